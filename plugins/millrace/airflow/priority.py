"""Today's data before old data: the scheduler gives a free slot of the pool to a scheduled run before a backfill."""

from __future__ import annotations

from typing import Any

from airflow.task.priority_strategy import PriorityWeightStrategy

BACKFILL, OTHER = 1, 100


class ScheduledFirst(PriorityWeightStrategy):
    """Weight of a task by the kind of its run. Registered by `millrace_plugin.py`; DAGs name it by its dotted path."""

    def get_weight(self, ti: Any) -> int:
        # Only the id is known when Airflow weighs a new task instance; backfill runs carry their kind in it.
        return BACKFILL if str(ti.run_id).startswith("backfill__") else OTHER
