"""Which date a scheduled run covers, whatever the deployment's default timetable is."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from airflow.serialization.encoders import coerce_to_core_timetable
from airflow.timetables.base import DataInterval, TimeRestriction

from millrace.partition import resolve_partition
from tests.dags.conftest import ROOT


def scheduled_runs(dag: Any, first: datetime, count: int) -> list[Any]:
    """The first runs that Airflow's scheduler would make of a DAG from a moment on."""
    timetable = coerce_to_core_timetable(dag.timetable)
    runs: list[Any] = []
    last: DataInterval | None = None
    while len(runs) < count:
        info = timetable.next_dagrun_info(
            last_automated_data_interval=last,
            restriction=TimeRestriction(earliest=first, latest=None, catchup=True),
        )
        runs.append(info)
        last = info.data_interval
    return runs


def partition_of(run: Any, timezone: str = "UTC") -> str:
    return resolve_partition(
        run_type="scheduled",
        params={"partition": None},
        data_interval_start=run.data_interval.start,
        data_interval_end=run.data_interval.end,
        timezone=timezone,
    )


def test_the_run_of_2_march_0300_covers_1_march(dag: Any) -> None:
    run = scheduled_runs(dag, datetime(2026, 3, 1, tzinfo=UTC), 1)[0]
    assert run.run_after == datetime(2026, 3, 2, 3, tzinfo=UTC)
    assert partition_of(run) == "2026-03-01"


def test_a_run_a_day_covers_every_day_once(dag: Any) -> None:
    dates = [partition_of(run) for run in scheduled_runs(dag, datetime(2026, 2, 26, tzinfo=UTC), 5)]
    assert dates == ["2026-02-26", "2026-02-27", "2026-02-28", "2026-03-01", "2026-03-02"]


def test_the_date_is_the_enrichments_own_across_a_clock_change() -> None:
    """03:00 in Berlin is 02:00 UTC in winter and 01:00 in summer; in both the run covers the local day before."""
    from airflow.sdk import DAG, CronDataIntervalTimetable

    dag = DAG(
        "d", schedule=CronDataIntervalTimetable("0 1 * * *", timezone="Europe/Berlin"), start_date=datetime(2026, 1, 1)
    )
    runs = scheduled_runs(dag, datetime(2026, 3, 27, tzinfo=UTC), 4)
    assert [partition_of(run, "Europe/Berlin") for run in runs] == [
        "2026-03-27",
        "2026-03-28",
        "2026-03-29",
        "2026-03-30",
    ]


def test_old_dates_are_not_caught_up_on(dag: Any) -> None:
    assert dag.catchup is False


@pytest.mark.parametrize("default", ["True", "False"])
def test_the_deployments_default_timetable_does_not_matter(default: str) -> None:
    code = (
        "from airflow.dag_processing.dagbag import DagBag\n"
        "from airflow.sdk import CronDataIntervalTimetable\n"
        f"bag = DagBag(dag_folder={str(ROOT / 'dags')!r})\n"
        "timetables = [bag.dags[name].timetable for name in ('review_insights', 'review_polarity_zh')]\n"
        "scheduled = [t for t in timetables if type(t).__name__ != 'NullTimetable']\n"
        "assert scheduled and all(isinstance(t, CronDataIntervalTimetable) for t in scheduled), timetables\n"
    )
    env = {**os.environ, "AIRFLOW__SCHEDULER__CREATE_CRON_DATA_INTERVALS": default}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True)
