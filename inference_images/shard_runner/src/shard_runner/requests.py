"""A shard's requests: proved against the manifest, then streamed in the order that keeps the engine busiest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import orjson

from millrace.errors import ConfigError
from millrace.lake import Lake
from millrace.records import ShardEntry
from millrace.schemas import REQUEST, schema_differences

# Requests that are held at once: a few MB, and far more than an engine's cache keeps apart.
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


def stream(
    lake: Lake, shard: ShardEntry, wanted: set[str], prefix_fields: Sequence[str], tail: int
) -> Iterator[Request]:
    """The shard's requests whose id is in `wanted`, as the files have them, except for two things.

    Requests that share the values of `prefix_fields` (placeholders that stand before the text) are brought together within windows, so that
    the engine finds their common prefix in its cache. The last `tail` requests come longest first: what is asked last
    should be short, so that the engine does not wait half empty for one long answer. Sorting more would not shorten that, but would put
    all long texts together, and where long ones answer worse that looks like a broken prompt; so `tail` is the early stop's window.
    """

    def prefix(request: Request) -> tuple[str, ...]:
        return tuple(request.values.get(name) or "" for name in prefix_fields)

    held: deque[Request] = deque()
    requests = _read(lake, shard, wanted)
    while window := list(islice(requests, WINDOW)):
        held.extend(sorted(window, key=prefix) if prefix_fields else window)
        while len(held) > tail:
            yield held.popleft()
    yield from sorted(held, key=lambda request: (prefix(request), -request.est_tokens))


def _read(lake: Lake, shard: ShardEntry, wanted: set[str]) -> Iterator[Request]:
    for ref in shard.files:
        with lake.parquet(ref.path) as file:
            for batch in file.iter_batches(_BATCH, columns=REQUEST.names):
                ids, inputs, tokens = (column.to_pylist() for column in batch.columns)
                for request_id, values, est_tokens in zip(ids, inputs, tokens, strict=True):
                    if request_id in wanted:
                        yield Request(request_id, orjson.loads(values), est_tokens)
