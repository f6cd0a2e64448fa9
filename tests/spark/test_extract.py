from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from millrace.enrichment import Enrichment
from millrace.errors import ConfigError, IncompleteError
from millrace.plan import request_id
from millrace.records import Manifest
from millrace.schemas import ANSWER
from millrace.source_snapshot import snapshot
from millrace.spark.extract import extract, make_manifest
from millrace.spark.join_back import join_back

from .conftest import DATE, SOURCE, World, reviews


def shape(world: World, manifest: Manifest):
    """What must not depend on chance: rows, and each shard's name and requests."""
    rows = sorted(tuple(row.values()) for row in world.read(manifest.row_files))
    shards = [(s.shard_id, sorted(tuple(r.values()) for r in world.read(s.files))) for s in manifest.shards]
    return rows, shards


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


def test_ids_and_shards_do_not_depend_on_parallelism_or_the_order_of_rows_and_files(spark, world: World):
    rows = reviews(400, distinct=250)
    world.write_source(rows, files=1)
    first = make_manifest(spark, world.lake, world.plan(), "a1")
    random.Random(7).shuffle(rows)
    world.write_source(rows, files=7)
    plan = world.plan()
    others = []
    for attempt, partitions in (("a2", "2"), ("a3", "16")):
        session = spark.newSession()
        session.conf.set("spark.sql.shuffle.partitions", partitions)
        session.conf.set("spark.sql.files.maxPartitionBytes", "2000")
        others.append(make_manifest(session, world.lake, plan, attempt))
    assert len(first.shards) > 10
    assert shape(world, first) == shape(world, others[0]) == shape(world, others[1])
    assert [s.est_tokens for s in first.shards] == [s.est_tokens for s in others[1].shards]


def test_extract_happens_once_per_plan_and_damage_is_named(spark, world: World):
    world.write_source(reviews(20))
    plan = world.plan()
    first = extract(spark, world.lake, plan.paths)
    world.lake.write(f"{plan.paths.extract('killed')}/shards/part-00000-x.parquet", b"torn")
    assert extract(spark, world.lake, plan.paths) == first
    world.lake.write(first.row_files[0].path, b"short")
    with pytest.raises(IncompleteError, match=r"part-.*has 5 bytes"):
        extract(spark, world.lake, plan.paths)


def test_of_two_extracts_at_once_one_manifest_stands_for_both(spark, world: World):
    world.write_source(reviews(30))
    plan = world.plan()
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: extract(spark, world.lake, plan.paths), range(2))
    assert one == two == world.manifest(plan)


def test_null_and_doubled_keys_are_refused_before_anything_is_written(spark, world: World):
    world.write_source([*reviews(5), {"id": "r1", "comment": "again", "rating": 0.0}])
    plan = world.plan()
    with pytest.raises(
        ConfigError,
        match=r"1 values of 'id' \(source.key\) appear in 2 rows of 'source/reviews' dt=2026-11-01, e.g. 'r1'",
    ):
        extract(spark, world.lake, plan.paths)
    world.write_source([*reviews(5), {"id": None, "comment": "no id", "rating": 0.0}])
    with pytest.raises(ConfigError, match="1 of 6 rows of 'source/reviews' dt=2026-11-01 have no 'id'"):
        extract(spark, world.lake, world.plan().paths)
    assert list(world.lake.list(f"{plan.paths.root}/extract")) == []


def test_large_whole_number_keys_come_back_digit_by_digit(spark, world: World):
    keys = [2**53 + 1, 2**63 - 1, -7]
    world.write_source(
        pa.table({"id": pa.array(keys, pa.int64()), "comment": ["a", "b", "c"], "rating": [1.0, 2.0, 3.0]})
    )
    manifest = extract(spark, world.lake, world.plan().paths)
    assert {row["key"] for row in world.read(manifest.row_files)} == {str(k) for k in keys}


def test_a_source_file_rewritten_after_the_plan_is_refused(spark, world: World):
    world.write_source(reviews(5))
    plan = world.plan()
    world.write_source([row | {"comment": "changed"} for row in reviews(5)])
    with pytest.raises(ConfigError, match="1 of 1 source files of dt=2026-11-01 changed"):
        extract(spark, world.lake, plan.paths)


def test_a_late_file_is_not_read_under_the_old_plan(spark, world: World):
    world.write_source(reviews(5))
    plan = world.plan()
    world.lake.write_parquet(
        f"{SOURCE}/part-late.parquet", pa.Table.from_pylist([{"id": "late", "comment": "x", "rating": 1.0}])
    )
    assert extract(spark, world.lake, plan.paths).rows == 5


def test_a_rule_that_meets_a_malformed_value_is_an_error_that_quotes_no_row(spark, world: World):
    world.spec["source"]["exclude"] = "CAST(comment AS INT) > 3"
    world.write_source([{"id": "a", "comment": "secret words", "rating": 1.0}])
    with pytest.raises(
        ConfigError, match=r"source.exclude of reviews.yaml failed with CAST_INVALID_INPUT.*try_cast"
    ) as error:
        extract(spark, world.lake, world.plan().paths)
    assert "secret" not in str(error.value)
    world.spec["source"]["exclude"] = "no_such_column > 3"
    with pytest.raises(ConfigError, match=r"source.exclude of reviews.yaml failed with UNRESOLVED_COLUMN"):
        extract(spark, world.lake, world.plan().paths)


def test_a_sample_is_the_same_rows_whatever_their_order(spark, world: World):
    world.write_source(reviews(50))
    first = extract(spark, world.lake, world.plan(row_sample=8).paths)
    world.write_source(reviews(50)[::-1], files=3)
    second = extract(spark, world.lake, world.plan(row_sample=8).paths)
    assert first.rows == 8 and shape(world, first) == shape(world, second)


def test_shards_grow_rather_than_exceed_the_cap(spark, world: World):
    world.spec["limits"] |= {"requests_per_shard": 1, "max_shards": 4}
    world.write_source(reviews(40))
    manifest = extract(spark, world.lake, world.plan().paths)
    assert 1 < len(manifest.shards) <= 4 and manifest.requests == 40


def test_a_second_plan_reuses_every_answer_that_the_cache_holds(spark, world: World):
    world.write_source(reviews(30, distinct=20))
    first = world.plan()
    extract(spark, world.lake, first.paths)
    failed = {"status": "failed", "reason": "timeout", "values": None}
    unknown = {"status": "unknown", "reason": "refused", "values": None, "raw_text": "I cannot"}
    world.answer(first, {"text 3": failed, "text 4": unknown})
    torn = f"answers/fingerprint={first.decision.fingerprints['tiny']}/torn-0.parquet"
    world.lake.write(torn, b"PAR1 and no more")
    world.write_source([*reviews(30, distinct=20), {"id": "new", "comment": "text 99", "rating": 1.5}])

    second = world.plan()
    manifest = extract(spark, world.lake, second.paths)
    asked = [r["input"] for r in world.requests(second)]
    assert asked and sorted(i.split('"text":')[1] for i in asked) == ['"text 3"}', '"text 99"}']
    assert (manifest.requests, manifest.reused, manifest.reused_rows, manifest.infer_rows) == (21, 19, 28, 3)
    world.answer(second)
    joined = join_back(spark, world.lake, second.paths)
    assert (joined.reused, joined.inferred, joined.statuses) == (28, 3, {"ok": 29, "unknown": 2})


def test_the_latest_ok_answer_wins_and_old_ones_expire(spark, world: World):
    world.write_source(reviews(2))
    first = world.plan()
    extract(spark, world.lake, first.paths)
    now = datetime.now(UTC)
    folder = f"answers/fingerprint={first.decision.fingerprints['tiny']}"
    [zero, one] = sorted(world.requests(first), key=lambda r: r["input"])
    made = [
        (zero, "ok", now - timedelta(days=3), "negative"),
        (zero, "ok", now - timedelta(days=2), "positive"),
        (zero, "unknown", now, None),
        (one, "ok", now - timedelta(days=100), "negative"),
    ]
    for index, (request, status, at, label) in enumerate(made):
        values = f'{{"sentiment":"{label}"}}' if label else None
        row = world._answer(first, request, {}) | {
            "status": status,
            "answered_at": at,
            "values": values,
            "raw_text": values,
        }
        world.lake.write_parquet(f"{folder}/{index}.parquet", pa.Table.from_pylist([row], ANSWER))
    world.spec["description"] = "another plan"
    second = world.plan()
    manifest = extract(spark, world.lake, second.paths)
    [reused] = world.read(manifest.reused_files)
    assert (reused["request_id"], reused["values"]) == (zero["request_id"], '{"sentiment":"positive"}')
    assert [r["request_id"] for r in world.requests(second)] == [one["request_id"]]


def test_a_changed_reading_reads_stored_text_again_and_asks_nothing(spark, world: World):
    world.write_source(reviews(6))
    first = world.plan()
    extract(spark, world.lake, first.paths)
    spoke = {"status": "unknown", "reason": "not_a_label", "values": None, "raw_text": '{"sentiment":"thumbs up"}'}
    world.answer(first, {"text 2": spoke})
    world.spec["answer"]["sentiment"]["aliases"] = {"thumbs up": "positive"}
    second = world.plan()
    manifest = extract(spark, world.lake, second.paths)
    assert (manifest.reused, manifest.shards) == (6, [])
    rows = world.read(manifest.reused_files)
    assert {(r["status"], r["values"], r["reading"]) for r in rows} == {
        ("ok", '{"sentiment":"positive"}', second.reading)
    }


def test_under_a_floor_no_answer_is_reused_whose_confidence_nobody_knows(spark, world: World):
    world.write_source(reviews(4))
    first = world.plan()
    extract(spark, world.lake, first.paths)
    refused = {"status": "unknown", "reason": "refused", "values": None, "raw_text": "I cannot"}
    sure, unsure = ({"confidence": f'{{"sentiment":{p}}}'} for p in (0.9, 0.3))
    world.answer(first, {"text 0": sure, "text 1": unsure, "text 2": refused})
    world.spec["limits"]["confidence_floor"] = 0.5
    second = world.plan()
    manifest = extract(spark, world.lake, second.paths)
    assert [r["input"].split('"text":')[1] for r in world.requests(second)] == ['"text 3"}']
    reused = {row["confidence"]: (row["status"], row["reason"]) for row in world.read(manifest.reused_files)}
    assert reused == {
        sure["confidence"]: ("ok", None),
        unsure["confidence"]: ("unknown", "low_confidence"),
        None: ("unknown", "refused"),
    }


def test_fresh_reuses_nothing(spark, world: World):
    world.write_source(reviews(5))
    first = world.plan()
    extract(spark, world.lake, first.paths)
    world.answer(first)
    fresh = world.plan(ask_mode="fresh", fresh_for="manual__2")
    assert extract(spark, world.lake, fresh.paths).reused == 0


def test_asking_unknowns_again_keeps_ok_answers_with_their_fingerprint(spark, world: World):
    world.write_source(reviews(20, distinct=10))
    base = world.plan()
    extract(spark, world.lake, base.paths)
    world.answer(base, {"text 3": {"status": "unknown", "reason": "refused", "values": None, "raw_text": "no"}})
    old = base.decision.fingerprints["tiny"]

    world.body = "Better: {{ text }}"
    current = world.plan().decision.fingerprints["tiny"]
    assert current != old
    changed = [row | ({"comment": "changed"} if row["id"] == "r5" else {}) for row in reviews(20, distinct=10)]
    world.write_source(changed)
    again = world.plan(
        ask_mode="unknowns", base_plan=base.paths.root, accepted_fingerprints=sorted([old, current]), prompt_version=2
    )
    manifest = extract(spark, world.lake, again.paths)
    assert sorted(r["input"] for r in world.requests(again)) == ['{"text":"changed"}', '{"text":"text 3"}']
    assert (manifest.reused, manifest.reused_rows, manifest.infer_rows) == (9, 17, 3)
    world.answer(again)
    joined = join_back(spark, world.lake, again.paths)
    assert joined.by_model == {"tiny@1": {"ok": 17}, "tiny@2": {"ok": 3}}
    by_id = {row["id"]: row["answer_meta"]["fingerprint"] for row in world.read(joined.files)}
    assert by_id["r4"] == old and by_id["r3"] == by_id["r5"] == current


def test_the_partition_column_of_a_delta_table_has_its_value_where_a_rule_or_the_output_uses_it(spark, world: World):
    """Delta's files lack the column, though the table has it."""
    table = pa.table({"id": ["a", "b"], "comment": ["x", "y"], "day": [DATE] * 2})
    write_deltalake(world.lake.uri("source/reviews"), table, partition_by=["day"])
    world.body = "{{ text }}"
    world.spec["source"] |= {"partition_column": "day", "keep": ["day"], "exclude": f"id = 'b' AND day = '{DATE}'"}
    plan = world.plan(source=snapshot(world.lake, Enrichment.model_validate(world.spec), DATE))
    manifest = extract(spark, world.lake, plan.paths)
    assert [row["day"] for row in world.read(manifest.row_files)] == [DATE, DATE]
    assert manifest.skipped_rows == {"excluded": 1}
