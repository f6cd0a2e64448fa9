"""The graph of a run, as docs/architecture.md and people's runbooks name it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import RetryAction, TriggerRule
from airflow.sdk.exceptions import ParamValidationError

from millrace.airflow.operators import ApproveBudget
from millrace.airflow.retries import UNAVAILABLE_DELAY, error_for
from millrace.settings import BACKENDS

STEPS = ["plan", "check_source", "preflight", "extract", "approve_budget", "infer", "join_back", "validate", "publish"]


def test_every_enrichment_has_a_dag_of_its_name(parse: Callable[..., Any]) -> None:
    bag = parse()
    assert not bag.import_errors
    assert set(bag.dags) == {"review_insights", "review_polarity_zh", "millrace_maintenance"}


def test_the_tasks_are_exactly_the_steps(dag: Any) -> None:
    assert set(dag.task_ids) == {*STEPS, "report"}


def test_the_steps_form_one_line(dag: Any) -> None:
    for before, after in zip(STEPS, [*STEPS[1:], "report"], strict=True):
        assert after in dag.get_task(before).downstream_task_ids


def test_infer_is_mapped_over_what_extract_returns_and_shown_by_shard(dag: Any) -> None:
    infer = dag.get_task("infer")
    assert infer.is_mapped
    assert {operator.task_id for operator, _ in infer.expand_input.value["shard_id"].iter_references()} == {"extract"}
    assert infer.partial_kwargs["map_index_template"] == "{{ task.shard_id }}"


def test_zero_shards_do_not_skip_join_back_and_a_failed_shard_stops_it(dag: Any) -> None:
    assert dag.get_task("join_back").trigger_rule == TriggerRule.NONE_FAILED


def test_only_report_runs_whatever_happened_and_it_never_decides_the_colour(dag: Any) -> None:
    report = dag.get_task("report")
    assert report.is_teardown and not report.on_failure_fail_dagrun
    assert [t.task_id for t in dag.tasks if t.trigger_rule.startswith("all_done")] == ["report"]


def test_spark_and_the_model_share_one_pool(dag: Any) -> None:
    bounded = {t.task_id for t in dag.tasks if t.pool == "millrace"}
    assert bounded == {"check_source", "preflight", "extract", "infer", "join_back"}


def test_every_task_has_a_time_limit(dag: Any) -> None:
    assert all(t.execution_timeout for t in dag.tasks if t.task_id != "infer")
    assert dag.get_task("infer").partial_kwargs["execution_timeout"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_preflight_and_infer_retry_by_the_same_rules_on_every_backend(
    parse: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """A wrong plan or an unusable model fails at once, an engine that does not answer is asked again later."""
    monkeypatch.setenv("MILLRACE_BACKEND", backend)
    dag = parse().dags["review_insights"]
    preflight, infer = dag.get_task("preflight"), dag.get_task("infer").partial_kwargs
    for policy, retries in ((preflight.retry_policy, preflight.retries), (infer["retry_policy"], infer["retries"])):
        decided = {
            code: policy.evaluate(error_for(code, "x"), try_number=1, max_tries=retries) for code in (2, 3, 4, 75)
        }
        assert {code: decision.action for code, decision in decided.items()} == {
            2: RetryAction.FAIL,
            3: RetryAction.RETRY,
            4: RetryAction.FAIL,
            75: RetryAction.RETRY,
        }
        assert (decided[3].retry_delay, decided[75].retry_delay) == (UNAVAILABLE_DELAY, timedelta(0))
        assert retries > 0


def test_infer_has_room_for_reclaimed_nodes_and_an_approval_is_asked_once(dag: Any) -> None:
    assert dag.get_task("infer").partial_kwargs["retries"] == 50
    approval = dag.get_task("approve_budget")
    assert isinstance(approval, ApproveBudget)
    assert approval.retries == 0 and approval.fail_on_reject and approval.response_timeout


def test_the_form_explains_each_field(dag: Any) -> None:
    fields = {name: dag.params.get_param(name) for name in dag.params}
    assert set(fields) == {"partition", "row_sample", "prompt_version", "do_not_reuse_answers", "ask_unknowns_again"}
    assert all(len(field.description) > 40 for field in fields.values())


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("partition", "yesterday"),
        ("partition", 20261101),
        ("row_sample", 0),
        ("row_sample", "7"),
        ("ask_unknowns_again", "yes"),
    ],
)
def test_the_form_refuses_values_of_the_wrong_type(dag: Any, field: str, wrong: Any) -> None:
    with pytest.raises(ParamValidationError):
        dag.params.get_param(field).resolve(wrong)


def test_the_manual_covers_every_task(dag: Any) -> None:
    assert all(f"`{step}`" in dag.doc_md for step in STEPS)


def test_a_backfill_waits_for_scheduled_runs(dag: Any) -> None:
    from types import SimpleNamespace

    from airflow.serialization.serialized_objects import DagSerialization

    serialized = DagSerialization.deserialize_dag(DagSerialization.serialize_dag(dag))
    for task_id in ("check_source", "infer"):
        weigh = serialized.get_task(task_id).weight_rule.get_weight
        backfill = weigh(SimpleNamespace(run_id="backfill__2026-11-01T03:00:00+00:00"))
        assert backfill < weigh(SimpleNamespace(run_id="scheduled__2026-11-28T03:00:00+00:00"))
        assert backfill < weigh(SimpleNamespace(run_id="manual__2026-11-28T03:00:00+00:00"))
