from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.errors import IncompleteError, RefusedError
from millrace.records import FileRef, Joined
from millrace.schemas import enriched_schema
from millrace.spark.extract import extract
from millrace.spark.join_back import join_back

from .conftest import DATE, World, complete, reviews


def ready(spark, world: World, rows, **answers):
    world.write_source(rows)
    plan = world.plan()
    extract(spark, world.lake, plan.paths)
    world.answer(plan, answers.get("overrides"))
    return plan


def test_every_row_comes_back_once_with_the_answer_of_its_request(spark, world: World):
    unknown = {"status": "unknown", "reason": "refused", "values": None}
    plan = ready(
        spark,
        world,
        [*reviews(30, distinct=20), {"id": "blank", "comment": " \u3000", "rating": 0.0}],
        overrides={"text 7": unknown},
    )
    joined = join_back(spark, world.lake, plan.paths)
    rows = {row["id"]: row for row in world.read(joined.files)}
    assert len(rows) == joined.rows == 31
    assert joined.statuses == {"ok": 28, "unknown": 2, "skipped": 1}
    assert joined.reasons == {"refused": 2, "blank": 1}
    assert joined.labels == {"sentiment": {"positive": 28}}
    assert joined.by_model == {"tiny@1": {"ok": 28, "unknown": 2}}
    assert (joined.reused, joined.inferred, joined.skipped) == (0, 30, 1)
    assert rows["r7"]["sentiment"] is None and rows["r27"]["answer_reason"] == "refused"
    assert rows["blank"]["answer_status"] == "skipped" and rows["blank"]["answer_meta"] is None
    assert rows["r3"]["answer_meta"]["plan_id"] == plan.plan_id
    assert joined.suite.passed and joined.suite.asked == 1


def test_the_files_have_exactly_the_columns_of_the_enriched_schema(spark, world: World):
    plan = ready(spark, world, reviews(5))
    joined = join_back(spark, world.lake, plan.paths)
    expected = enriched_schema("id", [pa.field("rating", pa.float64())], plan.enrichment.schema.arrow_fields())
    without_date = expected.remove(expected.get_field_index("dt"))
    actual = pq.read_schema(joined.files[0].path, filesystem=world.lake.fs)
    assert [(f.name, f.type) for f in actual] == [(f.name, f.type) for f in without_date]
    assert joined.files[0].path.startswith(f"enriched/reviews/dt={DATE}/{plan.plan_id}-{joined.attempt}/")


def test_a_shard_without_completion_record_refuses_and_writes_nothing(spark, world: World):
    world.write_source(reviews(40))
    plan = world.plan()
    manifest = extract(spark, world.lake, plan.paths)
    world.answer(plan)
    missing = manifest.shards[1].shard_id
    world.lake.delete([plan.paths.complete(missing)])
    shards = len(manifest.shards)
    with pytest.raises(IncompleteError, match=rf"expected {shards}, found {shards - 1}(.|\n)*{missing}"):
        join_back(spark, world.lake, plan.paths)
    assert list(world.lake.list("enriched")) == []


def test_an_answer_under_a_foreign_fingerprint_refuses(spark, world: World):
    plan = ready(spark, world, reviews(5), overrides={"text 2": {"fingerprint": "f" * 64}})
    with pytest.raises(RefusedError, match="fingerprint ffffffffffff…, which the plan does not accept"):
        join_back(spark, world.lake, plan.paths)
    assert not world.lake.exists(plan.paths.joined)


def test_an_answer_for_another_request_leaves_a_row_unanswered_and_refuses(spark, world: World):
    plan = ready(spark, world, reviews(5), overrides={"text 2": {"request_id": "0" * 64}})
    with pytest.raises(RefusedError, match="1 rows have no answer"):
        join_back(spark, world.lake, plan.paths)


def test_two_answers_to_one_request_refuse_instead_of_doubling_rows(spark, world: World):
    world.write_source(reviews(4))
    plan = world.plan()
    shard = extract(spark, world.lake, plan.paths).shards[0]
    rows = [world._answer(plan, request, {}) for request in world.read(shard.files)]
    complete(world.lake, plan.paths, plan, shard, [rows[0], rows[0], rows[2], rows[3]])
    with pytest.raises(RefusedError):
        join_back(spark, world.lake, plan.paths)


def test_an_ok_answer_without_a_required_value_refuses(spark, world: World):
    plan = ready(spark, world, reviews(4), overrides={"text 1": {"values": "{}"}})
    with pytest.raises(RefusedError, match="1 values are missing"):
        join_back(spark, world.lake, plan.paths)


def test_a_second_join_keeps_the_first_and_a_damaged_one_is_joined_again(spark, world: World):
    plan = ready(spark, world, reviews(12))
    first = join_back(spark, world.lake, plan.paths)
    assert join_back(spark, world.lake, plan.paths) == first
    world.lake.delete([first.files[0].path])
    again = join_back(spark, world.lake, plan.paths)
    assert again.attempt != first.attempt and again.rows == 12
    assert Joined.load(world.lake, plan.paths.joined) == again


def test_zero_rows_join_to_zero_rows(spark, world: World):
    world.write_source([], files=1)
    plan = world.plan()
    manifest = extract(spark, world.lake, plan.paths)
    assert (manifest.rows, manifest.shards, manifest.row_files) == (0, [], [])
    joined = join_back(spark, world.lake, plan.paths)
    assert (joined.rows, joined.files, joined.statuses) == (0, [], {})
    assert joined.suite.passed


def test_rows_that_are_all_skipped_need_no_shard(spark, world: World):
    plan = ready(
        spark, world, [{"id": "a", "comment": None, "rating": None}, {"id": "b", "comment": "", "rating": 1.0}]
    )
    joined = join_back(spark, world.lake, plan.paths)
    assert joined.statuses == {"skipped": 2} and joined.labels == {"sentiment": {}}
    assert FileRef.model_validate(joined.files[0]).rows >= 1


def test_every_field_kind_has_its_type_and_value(spark, world: World):
    world.spec["answer"] = {
        "sentiment": {"labels": ["positive", "negative"]},
        "tags": {"list_of": ["a", "b"], "optional": True},
        "score": {"number": {"min": 0, "max": 1}, "optional": True},
        "sure": {"boolean": True, "optional": True},
        "note": {"text": {"max_chars": 20}, "optional": True},
    }
    values = '{"sentiment":"negative","tags":["b","a"],"score":0.25,"sure":true,"note":"żółć 😀"}'
    empty = '{"sentiment":"positive","tags":null,"score":null,"sure":null,"note":null}'
    plan = ready(spark, world, reviews(2), overrides={"text 0": {"values": values}, "text 1": {"values": empty}})
    joined = join_back(spark, world.lake, plan.paths)
    rows = {row["id"]: row for row in world.read(joined.files)}
    fields = ["sentiment", "tags", "score", "sure", "note"]
    assert [rows["r0"][f] for f in fields] == ["negative", ["b", "a"], 0.25, True, "żółć 😀"]
    assert [rows["r1"][f] for f in fields] == ["positive", None, None, None, None]
    assert joined.labels == {"sentiment": {"negative": 1, "positive": 1}, "tags": {"a": 1, "b": 1}}


@pytest.mark.parametrize("column", ["status", "reason", "answer", "a.b"])
def test_a_kept_column_may_bear_the_name_of_one_of_the_answers(spark, world: World, column: str):
    world.body = "{{ text }}"
    world.spec["source"]["keep"] = [column]
    plan = ready(spark, world, pa.table({"id": ["x", "y"], "comment": ["one", "two"], column: ["paid", "open"]}))
    joined = join_back(spark, world.lake, plan.paths)
    rows = {row["id"]: (row[column], row["answer_status"], row["sentiment"]) for row in world.read(joined.files)}
    assert rows == {"x": ("paid", "ok", "positive"), "y": ("open", "ok", "positive")}
