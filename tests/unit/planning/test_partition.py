"""Which date a run works on."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from millrace.errors import ConfigError
from millrace.partition import resolve_partition

START, END = datetime(2026, 3, 1, 3, tzinfo=UTC), datetime(2026, 3, 2, 3, tzinfo=UTC)


def resolve(run_type: str, **overrides: Any) -> str:
    given: dict[str, Any] = {"params": {}, "data_interval_start": START, "data_interval_end": END}
    return resolve_partition(run_type=run_type, **(given | overrides))


@pytest.mark.parametrize("run_type", ["scheduled", "backfill"])
def test_the_run_of_2_march_03_00_covers_1_march(run_type: str) -> None:
    assert resolve(run_type) == "2026-03-01"


@pytest.mark.parametrize(
    ("timezone", "date"), [("UTC", "2026-03-01"), ("Asia/Shanghai", "2026-03-02"), ("America/New_York", "2026-03-01")]
)
def test_the_date_is_that_of_the_enrichments_time_zone(timezone: str, date: str) -> None:
    start = datetime(2026, 3, 1, 20, 30, tzinfo=UTC)
    assert resolve("scheduled", data_interval_start=start, timezone=timezone) == date


@pytest.mark.parametrize("run_type", ["manual", "asset_triggered"])
@pytest.mark.parametrize("interval", [None, START])
@pytest.mark.parametrize("empty", [{}, {"partition": None}, {"partition": ""}])
def test_manual_and_asset_runs_without_a_date_are_refused_naming_the_parameter(
    run_type: str, interval: datetime | None, empty: dict[str, Any]
) -> None:
    """Even where Airflow gives such a run an interval, it means nothing."""
    with pytest.raises(ConfigError, match="parameter `partition`"):
        resolve(run_type, params=empty, data_interval_start=interval)


@pytest.mark.parametrize("run_type", ["scheduled", "backfill"])
def test_a_run_without_an_interval_is_refused(run_type: str) -> None:
    with pytest.raises(ConfigError, match="parameter `partition`"):
        resolve(run_type, data_interval_start=None, data_interval_end=None)


def test_the_parameter_comes_before_the_partition_key_and_that_before_the_interval() -> None:
    both = {"params": {"partition": "2026-01-01"}, "partition_key": "2026-01-02"}
    assert resolve("scheduled", **both) == "2026-01-01"
    assert resolve("scheduled", partition_key="2026-01-02") == "2026-01-02"
    assert resolve("asset_triggered", partition_key="2026-01-02", data_interval_start=None) == "2026-01-02"
    assert resolve("manual", params={"partition": "2026-01-01"}, data_interval_start=None) == "2026-01-01"


def test_a_backfill_whose_parameter_is_another_date_is_refused() -> None:
    with pytest.raises(ConfigError, match="`partition` is 2026-03-05, but this backfill run is for 2026-03-01"):
        resolve("backfill", params={"partition": "2026-03-05"})
    assert resolve("backfill", params={"partition": "2026-03-01"}) == "2026-03-01"


def test_an_interval_without_length_is_refused() -> None:
    """A plain cron string gives start = end, and then the run of 2 March would cover 2 March."""
    with pytest.raises(ConfigError, match="CronDataIntervalTimetable"):
        resolve("scheduled", data_interval_end=START)


@pytest.mark.parametrize(
    "value",
    [
        "2026-3-1",
        "20260301",
        "2026-02-30",
        " 2026-03-01",
        "2026-03-01\n",
        "today",
        "../2026",
        "２０２６-03-01",
        "2026-03-01T00:00",
        20260301,
        START,
    ],
)
def test_only_dates_that_exist_written_one_way_are_taken(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"The parameter `partition` is .* YYYY-MM-DD"):
        resolve("manual", params={"partition": value})
    if isinstance(value, str):
        with pytest.raises(ConfigError, match="The run's partition key"):
            resolve("manual", partition_key=value)
