from __future__ import annotations

import pytest

from millrace.errors import ConfigError, IncompleteError
from millrace.plan import request_id
from millrace.spark.extract import extract

from .conftest import SOURCE, World, reviews


def test_rows_become_distinct_requests_in_shards(spark, world: World):
    world.write_source(reviews(60, distinct=40))
    plan = world.plan()
    manifest = extract(spark, world.lake, plan.paths)
    assert (manifest.rows, manifest.requests, manifest.reused, manifest.infer_rows) == (60, 40, 0, 60)
    assert sum(shard.requests for shard in manifest.shards) == 40
    rows = world.read(manifest.row_files)
    assert {row["key"] for row in rows} == {f"r{i}" for i in range(60)}
    fingerprint = plan.decision.fingerprints["tiny"]
    expected = {request_id(fingerprint, {"rating": "1.5", "text": f"text {i}"}) for i in range(40)}
    assert {row["request_id"] for row in rows} == expected == {r["request_id"] for r in world.requests(plan)}
