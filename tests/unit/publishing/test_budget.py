from __future__ import annotations

import pyarrow as pa
import pytest

from millrace import budget
from millrace.errors import IncompleteError, RefusedError
from millrace.lake import Lake
from millrace.plan import Plan, SourceFile
from millrace.records import Approval, Manifest
from tests.unit.publishing.runs import extracted, make_plan, store_verdict

# 100 requests, 40 estimated prompt tokens each, answers of at most 20: 4,000 + 2,000 tokens.
OK = [("ok", None)] * 100


def run(lake: Lake, *, answered: bool = False, **options) -> tuple[Plan, Manifest]:
    plan = make_plan(lake, **options)
    return plan, extracted(lake, plan, OK, answered=answered)


def test_it_counts_what_the_open_shards_will_ask(lake: Lake) -> None:
    plan, manifest = run(lake, price=5.0)
    found = budget.estimate(lake, plan, manifest)
    assert (found["requests"], found["shards"], found["prompt_tokens"], found["completion_tokens"]) == (
        100,
        1,
        4000,
        2000,
    )
    assert found["tokens"] == 6000 and found["cost"] == pytest.approx(0.03)
    assert found["hours"] is None and found["exact_requests"] is True


def test_complete_shards_cost_nothing_more(lake: Lake) -> None:
    plan, manifest = run(lake, answered=True)
    assert budget.estimate(lake, plan, manifest)["tokens"] == 0


def test_hours_come_from_the_newest_passed_verdict(lake: Lake) -> None:
    plan, manifest = run(lake)
    store_verdict(lake, "a", rows_per_s=100.0, day=1)
    store_verdict(lake, "b", rows_per_s=10.0, day=2)
    store_verdict(lake, "c", rows_per_s=1.0, day=3, passed=False)
    found = budget.estimate(lake, plan, manifest)
    assert found["rows_per_s"] == 10.0 and found["hours"] == pytest.approx(10 / 3600)


def test_before_extract_the_source_gives_an_upper_bound(lake: Lake) -> None:
    texts = [f"{i:03d} " + "a fine text " * 8 for i in range(200)]
    table = pa.table({"id": [str(i) for i in range(200)], "body": texts, "rating": [1] * 200})
    path = "source/reviews/dt=2026-11-01/part-0.parquet"
    size = lake.write_parquet(path, table)
    plan = make_plan(lake, row_sample=50)
    snapshot = plan.decision.source.model_copy(
        update={"files": [SourceFile(path=lake.uri(path), size=size, version="1")]}
    )
    plan = plan.model_copy(update={"decision": plan.decision.model_copy(update={"source": snapshot})})
    found = budget.estimate(lake, plan, None)
    assert found["requests"] == 50 and found["exact_requests"] is False
    assert found["prompt_tokens"] >= 50 * 100 / 3


class TestDecision:
    def test_no_budget_and_within_the_budget_pass_on_record(self, lake: Lake) -> None:
        for limits in ({}, {"budget_tokens": 6000}):
            plan, _ = run(lake, limits=limits)
            assert budget.decide(lake, plan.paths.root) == "passed"
            approval = Approval.load(lake, plan.paths.approval)
            assert approval.by == "budget" and approval.estimate["tokens"] == 6000

    def test_over_the_budget_fails_where_nobody_is_asked(self, lake: Lake) -> None:
        plan, _ = run(lake, limits={"budget_tokens": 5999})
        with pytest.raises(RefusedError, match=r"6,000 tokens on 100 requests; limits.budget_tokens is 5,999"):
            budget.decide(lake, plan.paths.root)
        assert not lake.exists(plan.paths.approval)

    def test_over_the_budget_waits_and_an_approval_lets_it_through_once_and_for_all(self, lake: Lake) -> None:
        plan, _ = run(lake, limits={"budget_tokens": 10}, over_budget="wait")
        assert budget.decide(lake, plan.paths.root) == "needs approval"
        budget.approve(lake, plan.paths.root, "ada", "quarter end")
        assert budget.decide(lake, plan.paths.root) == "passed"
        assert Approval.load(lake, plan.paths.approval).by == "ada"

    def test_a_rejection_is_no_approval(self, lake: Lake) -> None:
        plan, _ = run(lake, limits={"budget_tokens": 10}, over_budget="wait")
        budget.approve(lake, plan.paths.root, "ada", "too dear", approved=False)
        assert budget.decide(lake, plan.paths.root) == "needs approval"

    def test_an_approval_for_less_does_not_cover_more(self, lake: Lake) -> None:
        plan, _ = run(lake, limits={"budget_tokens": 10}, over_budget="wait")
        lake.write(plan.paths.approval, Approval(approved=True, by="ada", reason="", estimate={"tokens": 5999}).dump())
        assert budget.decide(lake, plan.paths.root) == "needs approval"

    def test_nothing_left_to_ask_passes_whatever_the_budget(self, lake: Lake) -> None:
        plan, _ = run(lake, limits={"budget_tokens": 0}, answered=True)
        assert budget.decide(lake, plan.paths.root) == "passed"

    def test_before_extract_there_is_nothing_to_decide(self, lake: Lake) -> None:
        with pytest.raises(IncompleteError, match="Clear `extract`"):
            budget.decide(lake, make_plan(lake).paths.root)
