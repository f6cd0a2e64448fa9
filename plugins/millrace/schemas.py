"""The schema of every file that passes between steps, declared once (see docs/contracts.md for a worked example).

| file                           | grain                          | written by   | read by            |
| ------------------------------ | ------------------------------ | ------------ | ------------------ |
| extract/<attempt>/rows         | one per source row             | extract      | join_back          |
| extract/<attempt>/shards       | one per request to be asked    | extract      | shard runner       |
| extract/<attempt>/reused       | one per request answered before | extract     | join_back          |
| shards/.../part-*.parquet      | one per answered request       | shard runner | shard runner       |
| answers/fingerprint=.../*      | one per answered request       | shard runner | extract, join_back |
| enriched/<enrichment>          | one per source row             | join_back    | analysts           |

Timestamps are UTC microseconds; keys, labels and partition values are strings.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

UTC_MICROS = pa.timestamp("us", tz="UTC")

REQUEST = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        # canonical JSON object of every placeholder value the template uses, after cleaning; values are strings or null
        pa.field("input", pa.string(), nullable=False),
        pa.field("est_tokens", pa.int32(), nullable=False),
    ]
)

ANSWER = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("fingerprint", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),  # ok, unknown, failed or skipped
        pa.field("reason", pa.string()),  # set whenever status is not ok
        pa.field("values", pa.string()),  # canonical JSON of field -> value; null unless ok
        pa.field("raw_text", pa.string()),  # what the model said, reasoning included
        pa.field("reading", pa.string(), nullable=False),  # hash of the reading that made status and values
        pa.field("repaired", pa.bool_(), nullable=False),
        pa.field("finish_reason", pa.string()),
        pa.field("confidence", pa.string()),  # JSON of field -> probability, where the engine gives it
        pa.field("prompt_tokens", pa.int32()),
        pa.field("cached_tokens", pa.int32()),  # of the prompt's tokens, found in the prefix cache
        pa.field("completion_tokens", pa.int32()),
        pa.field("asked", pa.int32(), nullable=False),  # how often the engine was asked: 0 never, 2 after a re-ask
        pa.field("latency_ms", pa.int32()),
        pa.field("model", pa.string(), nullable=False),
        pa.field("revision", pa.string(), nullable=False),  # the model's digest
        pa.field("prompt_version", pa.int32(), nullable=False),
        pa.field("answered_at", UTC_MICROS, nullable=False),
        pa.field("plan_id", pa.string(), nullable=False),
    ]
)

ANSWER_META = pa.struct(
    [
        pa.field("request_id", pa.string()),
        pa.field("fingerprint", pa.string()),
        pa.field("model", pa.string()),
        pa.field("revision", pa.string()),
        pa.field("prompt_version", pa.int32()),
        pa.field("repaired", pa.bool_()),
        pa.field("finish_reason", pa.string()),
        pa.field("latency_ms", pa.int32()),
        pa.field("answered_at", UTC_MICROS),
        pa.field("plan_id", pa.string()),
    ]
)

ROW_KEY = "key"
ROW_REQUEST = "request_id"  # null when the row is skipped
ROW_SKIP = "skip_reason"  # set when the row is skipped

_SPARK_TYPES = {
    pa.string(): "STRING",
    pa.large_string(): "STRING",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.bool_(): "BOOLEAN",
    pa.date32(): "DATE",
    pa.binary(): "BINARY",
}


def rows_schema(keep: list[pa.Field]) -> pa.Schema:
    """Schema of extract's rows: the key as a string, the kept columns as the source has them, and where the row went."""
    return pa.schema(
        [
            pa.field(ROW_KEY, pa.string(), nullable=False),
            *keep,
            pa.field(ROW_REQUEST, pa.string()),
            pa.field(ROW_SKIP, pa.string()),
        ]
    )


def enriched_schema(
    key: str, keep: list[pa.Field], answer_fields: list[pa.Field], partition_column: str = "dt"
) -> pa.Schema:
    """Schema of the published table: key, kept columns, one nullable column per answer field, status, reason, meta, dt."""
    return pa.schema(
        [
            pa.field(key, pa.string()),
            *[field.with_nullable(True) for field in keep],
            *[field.with_nullable(True) for field in answer_fields],
            pa.field("answer_status", pa.string()),
            pa.field("answer_reason", pa.string()),
            pa.field("answer_meta", ANSWER_META),
            pa.field(partition_column, pa.string()),
        ]
    )


def spark_type(dtype: pa.DataType) -> str:
    """Spark SQL's name of an Arrow type. Raises TypeError for a type that Millrace's tables do not use.

    >>> spark_type(pa.list_(pa.string()))
    'ARRAY<STRING>'
    """
    if dtype in _SPARK_TYPES:
        return _SPARK_TYPES[dtype]
    if pa.types.is_timestamp(dtype):
        return "TIMESTAMP" if dtype.tz else "TIMESTAMP_NTZ"
    if pa.types.is_decimal(dtype):
        return f"DECIMAL({dtype.precision},{dtype.scale})"
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        return f"ARRAY<{spark_type(dtype.value_type)}>"
    if pa.types.is_struct(dtype):
        return f"STRUCT<{', '.join(f'`{f.name}`: {spark_type(f.type)}' for f in dtype)}>"
    raise TypeError(f"column type {dtype} is not supported; cast it in the source or leave it out of `keep`")


def _split_fields(text: str) -> list[tuple[str, str]]:
    """`a: int32, b: list<item: string>` as (name, type) pairs; commas inside brackets do not split."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text + ","):
        depth += (char in "<([") - (char in ">)]")
        if char == "," and depth == 0:
            name, _, dtype = text[start:index].strip().partition(": ")
            parts.append((name, dtype.removesuffix(" not null")))
            start = index + 1
    return parts


def arrow_type(name: str) -> pa.DataType:
    """The Arrow type that prints as `name`, as in a plan's source columns. Raises ValueError for a name it does not know.

    >>> arrow_type("timestamp[us, tz=UTC]"), arrow_type("list<element: decimal128(10, 2)>")
    (TimestampType(timestamp[us, tz=UTC]), ListType(list<element: decimal128(10, 2)>))
    """
    if match := re.fullmatch(r"timestamp\[(s|ms|us|ns), tz=(.+)\]", name):
        return pa.timestamp(match[1], tz=match[2])
    if match := re.fullmatch(r"decimal128\((\d+), (\d+)\)", name):
        return pa.decimal128(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"(large_)?list<(.+)>", name):
        [(item, dtype)] = _split_fields(match[2])
        return (pa.large_list if match[1] else pa.list_)(pa.field(item, arrow_type(dtype)))
    if match := re.fullmatch(r"struct<(.+)>", name):
        return pa.struct([pa.field(field, arrow_type(dtype)) for field, dtype in _split_fields(match[1])])
    return pa.type_for_alias(name)


def spark_ddl(schema: pa.Schema) -> str:
    """A schema as Spark DDL, for `spark.read.schema(...)`.

    >>> spark_ddl(pa.schema([pa.field("a", pa.string(), nullable=False)]))
    '`a` STRING NOT NULL'
    """
    return ", ".join(f"`{f.name}` {spark_type(f.type)}{'' if f.nullable else ' NOT NULL'}" for f in schema)


def schema_differences(expected: pa.Schema, actual: pa.Schema) -> list[str]:
    """Every difference between two schemas in words, so that one error reports them all. Nullability is not compared."""
    differences: list[Any] = []
    for field in expected:
        index = actual.get_field_index(field.name)
        if index < 0:
            differences.append(f"column '{field.name}' ({field.type}) is missing")
        elif actual.field(index).type != field.type:
            differences.append(f"column '{field.name}' is {actual.field(index).type}, expected {field.type}")
    differences += [f"column '{name}' is not expected" for name in actual.names if expected.get_field_index(name) < 0]
    return differences
