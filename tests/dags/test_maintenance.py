"""The maintenance DAG: its order, its pool, and what a broken alert setting does to it and to the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def maintenance(parse: Callable[..., Any]) -> Any:
    return parse().dags["millrace_maintenance"]


def test_runs_go_before_what_they_keep_alive(maintenance: Any) -> None:
    assert maintenance.get_task("runs").downstream_task_ids == {"answers"}
    assert maintenance.get_task("answers").downstream_task_ids == {"table_files"}


def test_it_never_runs_beside_spark_on_one_machine_nor_beside_itself(maintenance: Any) -> None:
    assert {task.pool for task in maintenance.tasks} == {"millrace"}
    assert maintenance.max_active_runs == 1 and not maintenance.catchup


def test_a_red_task_alerts_and_every_task_has_a_time_limit(maintenance: Any) -> None:
    assert all(task.on_failure_callback and task.execution_timeout for task in maintenance.tasks)


def test_the_manual_states_every_retention(maintenance: Any) -> None:
    assert all(word in maintenance.doc_md for word in ("`run_days`", "`reuse_days`", "`target.rollback_days`"))


def test_a_broken_alert_setting_is_an_import_error_here_and_stops_no_enrichment(
    parse: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_ALERTS", '[{"notifier": "nowhere.Notifier"}]')
    bag = parse()
    assert {Path(file).name: "nowhere.Notifier cannot be made" in text for file, text in bag.import_errors.items()} == {
        "maintenance.py": True
    }
    assert set(bag.dags) == {"review_insights", "review_polarity_zh"}
