"""From distinct requests to shards: which requests meet, what a shard is called, and what the manifest says of it.

Spark hashes requests into buckets, one file each; consecutive buckets are then merged into shards of about equal size, because
how many requests there are is only known once they are distinct and those answered before are gone. The number of buckets follows
from the plan and the source alone, so shards are the same whatever the cluster, its parallelism or the order of files.
"""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.enrichment import Limits
from millrace.lake import FileInfo, Lake
from millrace.plan import shard_count
from millrace.records import FileRef, ShardEntry
from millrace.spark.session import tasks_for

_SPARK_FILE = re.compile(r"/part-(\d+)-[^/]*\.parquet$")
_HEX_DIGITS = 64  # of a request id


@dataclass(frozen=True)
class Bucket:
    """One file of requests, as written by the Spark task of its bucket."""

    file: FileRef
    ids: bytes  # request ids, 64 bytes each, in no particular order
    est_tokens: int


def bucket_count(rows: int, source_bytes: int, limits: Limits) -> int:
    """Buckets for a partition: as many as there could be shards if no row repeated another, and enough for the bytes.

    >>> bucket_count(3708, 300_000, Limits(requests_per_shard=1250)), bucket_count(10**9, 0, Limits())
    (3, 1000)
    """
    wanted = max(shard_count(rows, limits.requests_per_shard, limits.max_shards), tasks_for(source_bytes))
    return min(wanted, limits.max_shards)


def written_files(lake: Lake, prefix: str) -> list[FileInfo]:
    """The Parquet files that Spark's tasks wrote to a folder, in the order of their tasks."""
    return [file for file in lake.list(prefix) if _SPARK_FILE.search(file.path)]


def file_refs(lake: Lake, prefix: str) -> list[FileRef]:
    """What a record says of the files Spark wrote to a folder; row counts come from the files' own footers. Empty files are left out."""

    def ref(file: FileInfo) -> FileRef:
        with lake.parquet(file.path) as parquet:
            return FileRef(path=file.path, size=file.size, rows=parquet.metadata.num_rows)

    with ThreadPoolExecutor(max_workers=8) as pool:
        return [r for r in pool.map(ref, written_files(lake, prefix)) if r.rows]


def make_shards(lake: Lake, prefix: str, limits: Limits, model: str, fingerprint: str) -> list[ShardEntry]:
    """Merge the buckets written to a folder into shards."""

    def read(file: FileRef) -> Bucket:
        with lake.parquet(file.path) as parquet:
            table = parquet.read(columns=["request_id", "est_tokens"])
        return Bucket(file, _packed(table["request_id"]), pc.sum(table["est_tokens"]).as_py())

    with ThreadPoolExecutor(max_workers=4) as pool:
        buckets = list(pool.map(read, file_refs(lake, prefix)))
        groups = merge([b.file.rows for b in buckets], limits)
        shards = [[buckets[i] for i in group] for group in groups]
        return list(pool.map(lambda shard: _entry(shard, model, fingerprint), shards))


def merge(sizes: list[int], limits: Limits) -> list[list[int]]:
    """Group consecutive buckets of these sizes into the shards they fill: each bucket goes where its middle falls.

    >>> merge([1232, 1230, 1235], Limits(requests_per_shard=1250)), merge([2, 1, 1], Limits(requests_per_shard=1250))
    ([[0], [1], [2]], [[0, 1, 2]])
    """
    total = sum(sizes)
    count = shard_count(total, limits.requests_per_shard, limits.max_shards)
    shards: dict[int, list[int]] = {}
    before = 0
    for index, size in enumerate(sizes):
        shards.setdefault(int((before + size / 2) * count / total), []).append(index)
        before += size
    return list(shards.values())


def shard_id(ids: bytes) -> str:
    """Name of the shard that answers these request ids: a hash of them in sorted order, 16 hex digits."""
    ordered = np.sort(np.frombuffer(ids, dtype=f"S{_HEX_DIGITS}"))
    return hashlib.sha256(ordered.tobytes()).hexdigest()[:16]


def _packed(ids: pa.ChunkedArray) -> bytes:
    """The ids' own bytes, without making a Python string of each. Raises ArrowInvalid for an id that is not 64 bytes long."""
    fixed = [chunk.cast(pa.binary()).cast(pa.binary(_HEX_DIGITS)) for chunk in ids.chunks]
    return b"".join(c.buffers()[1][c.offset * _HEX_DIGITS : (c.offset + len(c)) * _HEX_DIGITS] for c in fixed)


def _entry(shard: list[Bucket], model: str, fingerprint: str) -> ShardEntry:
    return ShardEntry(
        shard_id=shard_id(b"".join(bucket.ids for bucket in shard)),
        model=model,
        fingerprint=fingerprint,
        requests=sum(bucket.file.rows for bucket in shard),
        est_tokens=sum(bucket.est_tokens for bucket in shard),
        bytes=sum(bucket.file.size for bucket in shard),
        files=[bucket.file for bucket in shard],
    )
