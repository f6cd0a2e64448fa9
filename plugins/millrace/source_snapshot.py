"""What a run will read: exactly the files of one partition of the source table, and the types of the columns it needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import unquote

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from millrace.enrichment import Enrichment, Source
from millrace.errors import ConfigError, NotFoundError
from millrace.lake import Lake
from millrace.plan import SourceFile, SourceSnapshot
from millrace.publishing import storage_options
from millrace.schemas import spark_type

# Partition value -> a function that lists its files: on an object store only the partition that is wanted is listed.
Partitions = dict[str, Callable[[], list[SourceFile]]]

# Readers of the bare files would see rows that Delta calls deleted, or columns under other names.
_UNREADABLE_DELTA = {"deletionVectors": "deletion vectors", "columnMapping": "column mapping"}


def snapshot(lake: Lake, enrichment: Enrichment, partition: str) -> SourceSnapshot:
    """List the partition's files and check their columns.

    Raises NotFoundError for a table or partition that does not exist (the latter unless `on_missing: empty`), ConfigError
    for a column that is missing or of a type Millrace cannot use.
    """
    source = enrichment.source
    table, path = (Lake(source.path), "") if source.path.startswith("s3://") else (lake, source.path.rstrip("/"))
    folders = table.folders(path)
    delta = None
    if "_delta_log" in folders:
        delta = DeltaTable(table.uri(path), storage_options=storage_options(table))
    by_partition = (
        _delta_partitions(delta, table, path, enrichment)
        if delta
        else _parquet_partitions(table, path, folders, enrichment)
    )
    files = by_partition[partition]() if partition in by_partition else []
    if not files and source.on_missing == "fail":
        raise NotFoundError(_missing(enrichment, partition, sorted(by_partition)))
    if delta:
        # Its files may lack a column that was added later: Delta reads it as null.
        schemas = {"the table": pa.schema(delta.schema().to_arrow())}
    else:
        # A partition that may be missing takes its types from the newest one there is.
        typed = files or next((found for _, get in sorted(by_partition.items(), reverse=True) if (found := get())), [])
        if not typed:
            raise NotFoundError(_missing(enrichment, partition, []))
        schemas = _footers(table, typed)
    return SourceSnapshot(
        format="delta" if delta else "parquet",
        path=table.uri(path),
        partition_column=source.partition_column,
        # Files of a Delta table never change, so their list says everything. The table's version would make another plan
        # out of every commit to another date.
        delta_version=None,
        files=files,
        columns=_columns(schemas, enrichment),
    )


def _missing(enrichment: Enrichment, partition: str, available: list[str]) -> str:
    source = enrichment.source
    before = [p for p in available if p < partition][-3:]
    after = [p for p in available if p > partition][:3]
    near = (
        f"the nearest of {len(available)} are {', '.join(before + after)}"
        if available
        else "it has no partition at all"
    )
    return (
        f"The source table '{source.path}' of {enrichment.name} has no partition {source.partition_column}={partition}; {near}. "
        f"Load that date and clear `plan`, or set source.on_missing: empty in {enrichment.name}.yaml if dates may be missing."
    )


def _parquet_partitions(table: Lake, path: str, folders: Sequence[str], enrichment: Enrichment) -> Partitions:
    if not folders:
        raise NotFoundError(
            f"The source table '{enrichment.source.path}' of {enrichment.name} does not exist in '{table.root}'. Correct source.path "
            f"in {enrichment.name}.yaml, or load the table (`millrace demo` loads the sample)."
        )
    column = enrichment.source.partition_column
    found = {f.partition("=")[2]: f for f in folders if f.startswith(f"{column}=")}
    if not found:
        raise ConfigError(
            f"The source table '{enrichment.source.path}' of {enrichment.name} is not partitioned by '{column}': its folders are "
            f"{', '.join(folders[:5])}. Correct source.partition_column in {enrichment.name}.yaml."
        )
    return {unquote(value): partial(_parquet_files, table, _join(path, folder)) for value, folder in found.items()}


def _parquet_files(table: Lake, folder: str) -> list[SourceFile]:
    metas = [meta for batch in obstore.list(table.store, folder) for meta in batch]
    # Spark, too, takes names that start with `_` or `.` for hidden.
    visible = [m for m in metas if m["path"].endswith(".parquet") and not re.search(r"/[_.]", m["path"][len(folder) :])]
    files = [
        SourceFile(
            path=table.uri(m["path"]),
            size=m["size"],
            version=(m["e_tag"] or m["last_modified"].isoformat()).strip('"'),
        )
        for m in visible
    ]
    return sorted(files, key=lambda file: file.path)


def _delta_partitions(delta: DeltaTable, table: Lake, path: str, enrichment: Enrichment) -> Partitions:
    source = enrichment.source
    features = set(delta.protocol().reader_features or ())
    for feature, words in _UNREADABLE_DELTA.items():
        if feature in features:
            raise ConfigError(
                f"The source table '{source.path}' of {enrichment.name} uses Delta's {words}, which Millrace does not read. "
                "Rewrite the table without it."
            )
    columns = delta.metadata().partition_columns
    if columns != [source.partition_column]:
        raise ConfigError(
            f"The source table '{source.path}' of {enrichment.name} is partitioned by {columns}, not by '{source.partition_column}' alone. "
            f"Correct source.partition_column in {enrichment.name}.yaml."
        )
    actions = pa.table(delta.get_add_actions(flatten=True))
    found: dict[str, list[SourceFile]] = {}
    for row in actions.select(["path", "size_bytes", f"partition.{source.partition_column}"]).to_pylist():
        file = SourceFile(path=table.uri(_join(path, unquote(row["path"]))), size=row["size_bytes"], version="delta")
        found.setdefault(str(row[f"partition.{source.partition_column}"]), []).append(file)
    return {value: partial(sorted, files, key=lambda file: file.path) for value, files in found.items()}


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _footers(table: Lake, files: list[SourceFile]) -> dict[str, pa.Schema]:
    """The schema of each file, by its path."""

    def footer(file: SourceFile) -> tuple[str, pa.Schema]:
        path = table.relative(file.path)
        try:
            # Spark's older timestamps (INT96) are microseconds to it, whatever Arrow makes of them.
            with pq.ParquetFile(path, filesystem=table.fs, coerce_int96_timestamp_unit="us") as parquet:
                return path, parquet.schema_arrow
        except pa.ArrowInvalid as error:
            raise ConfigError(
                f"'{path}' ({file.size:,} bytes) is not a readable Parquet file. Is it still being written? "
                "Load the partition again, then clear `plan`."
            ) from error

    # A footer is one small read; many files on an object store are worth overlapping.
    with ThreadPoolExecutor(max_workers=16) as pool:
        return dict(pool.map(footer, files))


def _columns(schemas: dict[str, pa.Schema], enrichment: Enrichment) -> dict[str, str]:
    """Types of the columns that the run reads; all files must agree. Raises one ConfigError for everything that is wrong."""
    source, file = enrichment.source, f"{enrichment.name}.yaml"
    (first_name, first), *others = schemas.items()
    needed = {"key": [source.key], "text": [source.text], "keep": list(source.keep)}
    problems = [
        f"{file}: source.{key}: the table '{source.path}' has no column '{column}'; it has {', '.join(first.names)}"
        for key, columns in needed.items()
        for column in columns
        if column not in first.names
    ]
    asked = [column for columns in needed.values() for column in columns if column in first.names]
    asked += [c for c in first.names if c not in asked and source.exclude and c in source.exclude]
    types = {column: _plain(first.field(column).type) for column in asked}
    for column, dtype in types.items():
        problems += _type_problems(source, file, column, dtype)
        for name, schema in others:
            found = _plain(schema.field(column).type) if column in schema.names else "missing"
            if found != dtype:
                problems.append(
                    f"{file}: column '{column}' is {dtype} in '{first_name}', but {found} in '{name}'; "
                    "write the partition again with one schema"
                )
                break
    if problems:
        raise ConfigError("\n".join(problems))
    return {column: str(dtype) for column, dtype in types.items()}


def _plain(dtype: pa.DataType) -> pa.DataType:
    """The type as Spark reads it: a dictionary's values, 32-bit or 64-bit offsets alike."""
    if pa.types.is_dictionary(dtype):
        return _plain(dtype.value_type)
    return pa.string() if pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype) else dtype


def _type_problems(source: Source, file: str, column: str, dtype: pa.DataType) -> list[str]:
    if column == source.text and dtype != pa.string():
        return [f"{file}: source.text: column '{column}' is {dtype}, not text; name the column that holds the text"]
    if column == source.key and not (dtype == pa.string() or pa.types.is_integer(dtype)):
        return [
            f"{file}: source.key: column '{column}' is {dtype}; a key is text or a whole number, so that it stays the same as a string"
        ]
    if pa.types.is_timestamp(dtype) and dtype.unit == "ns":
        return [
            f"{file}: column '{column}' is {dtype}, which Spark cannot read; write it in microseconds, or leave it out of `keep`"
        ]
    try:
        spark_type(dtype)
    except TypeError as error:
        return [f"{file}: column '{column}': {error}"]
    return []
