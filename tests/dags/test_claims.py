"""Whether the holder of a date is at work, in the words in which Airflow's task SDK answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.api.datamodels._generated import DagRunState

from millrace.airflow.tasks import is_alive


def answering(state: Any) -> Any:
    return SimpleNamespace(get_dagrun_state=lambda dag_id, run_id: state)


@pytest.mark.parametrize("state", [DagRunState.QUEUED, DagRunState.RUNNING, "running"])
def test_a_queued_or_running_holder_is_alive(state: Any) -> None:
    assert is_alive(answering(state), "mood", "manual__1")


@pytest.mark.parametrize("state", [DagRunState.SUCCESS, DagRunState.FAILED, "failed"])
def test_one_that_ended_is_not(state: Any) -> None:
    assert not is_alive(answering(state), "mood", "manual__1")
