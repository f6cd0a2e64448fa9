"""A shard's requests: proved against the manifest, then streamed in the order that keeps the engine busiest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson
import pyarrow as pa

from millrace.errors import ConfigError
from millrace.lake import Lake
from millrace.records import ShardEntry
from millrace.schemas import REQUEST, schema_differences

# Requests that are held and sorted together. Long ones first shortens only the tail, and the tail is made of the last
# window, so sorting within windows gives what sorting the whole shard would, in a few MB whatever the shard's size.
WINDOW = 4096
_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str
    values: dict[str, str | None]
    est_tokens: int


def read_ids(lake: Lake, shard: ShardEntry) -> set[str]:
    """Every request id of a shard. Raises IncompleteError for a missing file, ConfigError for wrong content.

    Costs about 120 bytes per id, which is all of a shard that is ever held at once.
    """
    ids: set[str] = set()
    rows = 0
    for ref in shard.files:
        ref.check(lake)
        with lake.parquet(ref.path) as file:
            differences = schema_differences(REQUEST, file.schema_arrow)
            if differences:
                raise ConfigError(f"'{ref.path}' is not a shard file: {'; '.join(differences)}. Clear `extract`.")
            rows += file.metadata.num_rows
            for batch in file.iter_batches(_BATCH * 16, columns=["request_id"]):
                ids.update(batch.column(0).to_pylist())
    if rows != shard.requests or len(ids) != rows:
        raise ConfigError(
            f"shard {shard.shard_id}: the manifest has {shard.requests} requests, its files {rows} rows with {len(ids)} "
            "different ids. They do not belong together; report this as a bug."
        )
    return ids


def stream(lake: Lake, shard: ShardEntry, wanted: set[str], prefix_fields: Sequence[str]) -> Iterator[Request]:
    """The shard's requests whose id is in `wanted`, window by window.

    Within a window, requests that share the values of `prefix_fields` (placeholders that stand before the text) are
    neighbours, so that the engine finds their common prefix in its cache; among those the longest come first.
    """
    window: list[Request] = []
    for ref in shard.files:
        with lake.parquet(ref.path) as file:
            for batch in file.iter_batches(_BATCH, columns=REQUEST.names):
                window += _requests(batch, wanted)
                if len(window) >= WINDOW:
                    yield from _ordered(window, prefix_fields)
                    window = []
    yield from _ordered(window, prefix_fields)


def _requests(batch: pa.RecordBatch, wanted: set[str]) -> Iterator[Request]:
    ids, inputs, tokens = (column.to_pylist() for column in batch.columns)
    for request_id, text, est_tokens in zip(ids, inputs, tokens, strict=True):
        if request_id in wanted:
            yield Request(request_id, orjson.loads(text), est_tokens)


def _ordered(window: list[Request], prefix_fields: Sequence[str]) -> list[Request]:
    def key(request: Request) -> tuple[tuple[str, ...], int]:
        return tuple(request.values.get(name) or "" for name in prefix_fields), -request.est_tokens

    return sorted(window, key=key)
