"""Which date a run works on: the one rule of docs/architecture.md, "Which date"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime
from typing import Any
from zoneinfo import ZoneInfo

from millrace.errors import ConfigError

PARAM = "partition"
# Only these runs stand for a data interval; a manual or asset-triggered run has none, or one that means nothing.
INTERVAL_RUNS = frozenset({"scheduled", "backfill"})


def parse_partition(value: Any, what: str) -> str:
    """`value` if it is a date written YYYY-MM-DD. Raises ConfigError naming `what`.

    >>> parse_partition("2026-11-01", "the parameter `partition`")
    '2026-11-01'
    """
    try:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
            return date.fromisoformat(value).isoformat()
    except ValueError:
        pass  # such as 2026-02-30
    raise ConfigError(f"{what} is {value!r}; it must be a date that exists, written YYYY-MM-DD, e.g. 2026-11-01.")


def resolve_partition(
    *,
    run_type: str,
    params: Mapping[str, Any],
    partition_key: str | None = None,
    data_interval_start: datetime | None = None,
    data_interval_end: datetime | None = None,
    timezone: str = "UTC",
) -> str:
    """The business date of a DAG run: the `partition` parameter, else the run's partition key, else, for scheduled and
    backfill runs, the date of the data interval's start in the enrichment's time zone. Never today.

    `run_type` is Airflow's (`manual`, `scheduled`, `backfill`, ...), `params` the run's effective parameters. Raises
    ConfigError, naming the parameter, for any other run, a value that is no date, and a backfill run whose parameter is not its own date.
    """
    # A form that was left empty sends "".
    asked = None if params.get(PARAM) in (None, "") else parse_partition(params[PARAM], f"The parameter `{PARAM}`")
    interval = None
    if run_type in INTERVAL_RUNS and data_interval_start is not None:
        if data_interval_start == data_interval_end:
            raise ConfigError(
                "The run's data interval has no length, so it names no date to work on. "
                "Give the DAG a timetable with intervals (CronDataIntervalTimetable)."
            )
        interval = data_interval_start.astimezone(ZoneInfo(timezone)).date().isoformat()

    if asked is not None:
        # The configuration of a backfill goes to each of its runs: every date would redo this one.
        if run_type == "backfill" and interval is not None and asked != interval:
            raise ConfigError(
                f"The parameter `{PARAM}` is {asked}, but this backfill run is for {interval}. Start the backfill "
                f"without `{PARAM}`; to work on {asked} alone, trigger the DAG by hand with it."
            )
        return asked
    if partition_key:
        return parse_partition(partition_key, "The run's partition key")
    if interval is not None:
        return interval
    raise ConfigError(
        f"This run is {run_type} and says no date. Trigger it again with the parameter `{PARAM}`, e.g. "
        f'{{"{PARAM}": "2026-11-01"}}.'
    )
