"""What an enrichment's deadline is counted from. Registered by `plugins/millrace_plugin.py`, for the scheduler to find it."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, ClassVar

from airflow.sdk.definitions.deadline import BaseDeadlineReference

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class FirstQueued(BaseDeadlineReference):
    """When a DAG run was first queued; clearing its tasks does not move it.

    Airflow's own `DAGRUN_QUEUED_AT` would be moved. Airflow 3.3.2 fails in doing so (`_recalculate_dagrun_queued_at_deadlines` takes the
    interval's serialized form for seconds), and with it the whole request: until the deadline had passed, nobody could clear a red shard.
    """

    required_kwargs: ClassVar[set[str]] = {"dag_id", "run_id"}

    def _evaluate_with(self, *, session: Session, dag_id: str, run_id: str) -> datetime | None:
        """When the run was queued, asked once: when it is made."""
        from airflow.models.dagrun import DagRun
        from sqlalchemy import select

        return session.scalar(select(DagRun.queued_at).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id))
