"""Who a plan says asked for it."""

from __future__ import annotations

import getpass
import inspect
from types import SimpleNamespace

import pytest
from airflow.sdk import DAG

from millrace.airflow.tasks import DAG_TEST, who_asked


@pytest.mark.parametrize(
    ("triggering_user", "run_type", "name"),
    [
        ("ada", "manual", "ada"),
        ("ada", "backfill", "ada"),
        (None, "scheduled", "scheduled"),
        (DAG_TEST, "manual", getpass.getuser()),
    ],
)
def test_a_person_where_one_is_known_else_the_kind_of_run(
    triggering_user: str | None, run_type: str, name: str
) -> None:
    dag_run = SimpleNamespace(triggering_user_name=triggering_user, run_type=SimpleNamespace(value=run_type))
    assert who_asked(dag_run) == name


def test_airflow_names_whoever_calls_dag_test_so() -> None:
    assert f'triggering_user_name="{DAG_TEST}"' in inspect.getsource(DAG.test)
