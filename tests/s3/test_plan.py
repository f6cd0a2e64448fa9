"""Plans on S3: created once and read back as they were; and the sample tables that the first of them read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

from millrace import sample_source
from millrace.errors import ConfigError
from millrace.lake import Lake
from millrace.plan import Plan
from millrace.source_snapshot import snapshot
from millrace.spark.source import check_snapshot
from tests.unit.publishing.runs import DATE, make_plan

DATA = Path(__file__).parents[2] / "data"


def test_a_plan_is_created_once_and_read_back_from_its_url(lake: Lake) -> None:
    plan = make_plan(lake)
    assert Plan.read(lake, plan.paths.root) == Plan.read(lake, lake.uri(plan.paths.root)) == plan
    again = Plan.make(plan.decision, plan.record.model_copy(update={"user": "bob"}))
    assert again.save(lake) is False
    assert Plan.read(lake, plan.paths).record.user == "ada"


def test_an_edited_plan_is_refused(lake: Lake) -> None:
    plan = make_plan(lake)
    edited = json.loads(plan.dump())
    edited["decision"]["max_tokens"] = 2000
    lake.write(plan.paths.plan, json.dumps(edited).encode())
    with pytest.raises(ConfigError, match="was edited"):
        Plan.read(lake, plan.paths)


def test_extract_finds_the_files_as_the_plan_saw_them_and_notices_a_rewritten_one(lake: Lake) -> None:
    """One file of a single put, one of an upload in parts: a listing and a look at the file must tell the same version."""
    schema = pa.schema([("id", pa.string()), ("body", pa.string()), ("rating", pa.int32())])
    small = pa.table({"id": ["a"], "body": ["good"], "rating": [5]}, schema=schema)
    large = pa.table({"id": ["b"], "body": [os.urandom(8_000_000).hex()], "rating": [1]}, schema=schema)
    lake.write_parquet(f"source/reviews/dt={DATE}/small.parquet", small)
    with lake.parquet_writer(f"source/reviews/dt={DATE}/large.parquet", schema) as writer:
        writer.write_table(large)
    made = make_plan(lake)
    decision = made.decision.model_copy(update={"source": snapshot(lake, made.enrichment, DATE)})
    plan = Plan.make(decision, made.record)
    check_snapshot(lake, plan)
    lake.write_parquet(f"source/reviews/dt={DATE}/small.parquet", small.set_column(1, "body", pa.array(["fine"])))
    with pytest.raises(ConfigError, match="1 of 2 source files"):
        check_snapshot(lake, plan)


def test_the_sample_tables_are_loaded_once(lake: Lake) -> None:
    sample_source.load(lake, DATA, rows=20, days=2)
    before = snapshot_of(lake)
    assert [path for path, _ in before] == [
        f"{table}/dt=2026-11-0{day}/part-00000.parquet" for table in sorted(sample_source.TABLES) for day in (1, 2)
    ]
    sample_source.load(lake, DATA, rows=20, days=2)
    assert snapshot_of(lake) == before
    assert lake.parquet(before[0][0]).metadata.num_rows == 20


def snapshot_of(lake: Lake) -> list[tuple[str, str | None]]:
    """Path and last change of every file of the sample tables."""
    listed = [meta for batch in lake.store.list("source") for meta in batch]
    return sorted((meta["path"], str(meta["last_modified"])) for meta in listed)
