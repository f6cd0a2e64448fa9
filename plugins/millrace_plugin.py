"""What Airflow loads from this folder. Everything else here is the shared package, which `.airflowignore` hides from the loader."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin

from millrace.airflow.first_queued import FirstQueued
from millrace.airflow.priority import ScheduledFirst


class MillracePlugin(AirflowPlugin):
    name = "millrace"
    priority_weight_strategies = [ScheduledFirst]  # noqa: RUF012
    deadline_references = [FirstQueued]  # noqa: RUF012
