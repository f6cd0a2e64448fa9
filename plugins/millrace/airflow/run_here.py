"""A whole DAG run on this machine, without a scheduler, one line for each step: what `millrace run` and `millrace demo` do.

The graph and the tasks are the deployment's own; Airflow's `DAG.test` takes the scheduler's place. Where `millrace up` is running and
the DAG is switched on, the run is triggered there instead and followed: two schedulers would both start its tasks.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TextIO

from airflow.sdk._shared.listeners import hookimpl

from millrace.airflow.process import runner_log
from millrace.airflow.tasks import step_log
from millrace.errors import NotFoundError
from millrace.local import login_name
from millrace.settings import Settings

_TASK_WIDTH = len("approve_budget") + 1


@dataclass
class Ended:
    """How a DAG run ended."""

    dag_run_id: str
    state: str
    seconds: float
    errors: list[str] = field(default_factory=list)


class Progress(logging.Handler):
    """Listens to the run and prints: a line when a step has ended, and while one is at work its latest word, where a terminal shows it."""

    def __init__(self, terminal: TextIO) -> None:
        super().__init__(logging.INFO)
        self._terminal = terminal
        self._is_tty = terminal.isatty()
        self._task = ""
        self._started = 0.0
        self._said = ""
        self.errors: list[str] = []

    # What the steps log

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.name == step_log.name:
            self._said = message
        elif self._is_tty:
            self._show(f"{self._label()} {time.monotonic() - self._started:6.1f} s  {message}", transient=True)

    # What Airflow tells of its tasks

    @hookimpl
    def on_task_instance_running(self, previous_state: Any, task_instance: Any) -> None:
        index = task_instance.map_index
        self._task = task_instance.task_id + (f" {index + 1}" if index is not None and index >= 0 else "")
        self._started, self._said = time.monotonic(), ""
        if self._is_tty:
            self._show(f"{self._label()}  ...", transient=True)

    @hookimpl
    def on_task_instance_success(self, previous_state: Any, task_instance: Any) -> None:
        self._ended(self._said)

    @hookimpl
    def on_task_instance_failed(self, previous_state: Any, task_instance: Any, error: Any) -> None:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        again = getattr(task_instance.state, "value", None) == "up_for_retry"
        self._ended(f"{'tries again' if again else 'failed'}: {lines[0]}", "\n".join(lines[1:]))
        if not again:
            self.errors.append(f"{self._task}: {lines[0]}")

    def _label(self) -> str:
        return f"  {self._task:<{_TASK_WIDTH}}"

    def _ended(self, said: str, more: str = "") -> None:
        self._show(f"{self._label()} {time.monotonic() - self._started:6.1f} s  {said}")
        for line in more.splitlines():
            self._show(f"  {'':<{_TASK_WIDTH}}           {line}")

    def _show(self, line: str, *, transient: bool = False) -> None:
        if self._is_tty:
            self._terminal.write(f"\r\x1b[2K{line[:118] if transient else line}")
            if transient:
                self._terminal.flush()
                return
            self._terminal.write("\n")
        else:
            self._terminal.write(f"{line}\n")
        self._terminal.flush()


def load_dag(enrichment: str) -> Any:
    """The enrichment's DAG. Raises NotFoundError naming the ones there are, or what is wrong with its file."""
    from airflow.dag_processing.dagbag import DagBag

    from millrace.enrichment import load_enrichment

    settings = Settings.from_env()
    bag = DagBag(dag_folder=str(settings.home / "dags" / "enrichment.py"))
    if enrichment not in bag.dags:
        load_enrichment(settings.enrichments / f"{enrichment}.yaml")
        raise NotFoundError(
            f"'{enrichment}' is not among the enrichments: {', '.join(sorted(bag.dags)) or 'there are none'}."
            + "".join(f"\n{error}" for error in bag.import_errors.values())
        )
    return bag.dags[enrichment]


def run_here(enrichment: str, conf: dict[str, Any], terminal: TextIO) -> Ended:
    """Run the DAG in this process to its end, printing progress to `terminal`; all logs go where this process prints."""
    from airflow.listeners.listener import get_listener_manager as core_listeners
    from airflow.sdk.listener import get_listener_manager

    dag = load_dag(enrichment)
    forget_dead_runs(enrichment)
    progress = Progress(terminal)
    managers = {id(m): m for m in (get_listener_manager(), core_listeners())}.values()
    for manager in managers:
        manager.add_listener(progress)
    for logger in (step_log, runner_log):
        logger.addHandler(progress)
        logger.setLevel(logging.INFO)
    started = time.monotonic()
    dag_run = dag.test(run_conf=conf)
    return Ended(dag_run.run_id, str(dag_run.state), time.monotonic() - started, progress.errors)


def forget_dead_runs(enrichment: str) -> None:
    """Mark failed what an earlier `run_here` left running when it was killed: only one is at work at a time, and this is it."""
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from airflow.utils.state import DagRunState
    from airflow.utils.types import DagRunTriggeredByType
    from sqlalchemy import update

    with create_session() as session:
        session.execute(
            update(DagRun)
            .where(
                DagRun.dag_id == enrichment,
                DagRun.triggered_by == DagRunTriggeredByType.TEST,
                DagRun.state.in_([DagRunState.RUNNING, DagRunState.QUEUED]),
            )
            .values(state=DagRunState.FAILED)
            .execution_options(synchronize_session=False)
        )


def is_scheduled(enrichment: str) -> bool:
    """Whether a running scheduler would start this DAG's tasks: known to it and switched on."""
    from airflow.models.dag import DagModel
    from airflow.utils.session import create_session

    with create_session() as session:
        model = session.get(DagModel, enrichment)
        return model is not None and not model.is_paused and not model.is_stale


def run_there(enrichment: str, conf: dict[str, Any], terminal: TextIO) -> Ended:
    """Trigger the DAG in the running Airflow and follow it to its end; the steps' own words are in their logs there."""
    from airflow.api.common.trigger_dag import trigger_dag
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from airflow.utils.types import DagRunTriggeredByType
    from sqlalchemy import select

    run_id = f"millrace__{datetime.now(UTC).isoformat(timespec='seconds')}"
    trigger_dag(
        enrichment, triggered_by=DagRunTriggeredByType.CLI, run_id=run_id, conf=conf, triggering_user_name=login_name()
    )
    started = time.monotonic()
    seen: set[tuple[str, int]] = set()
    errors: list[str] = []
    while True:
        with create_session() as session:
            this_run = (TaskInstance.dag_id == enrichment, TaskInstance.run_id == run_id)
            tasks = session.scalars(select(TaskInstance).where(*this_run).order_by(TaskInstance.end_date)).all()
            state = session.scalar(select(DagRun.state).where(DagRun.dag_id == enrichment, DagRun.run_id == run_id))
            for ti in tasks:
                key = (ti.task_id, ti.map_index)
                if ti.state in ("success", "failed", "skipped", "upstream_failed") and key not in seen:
                    seen.add(key)
                    label = ti.task_id + (f" {ti.map_index + 1}" if ti.map_index >= 0 else "")
                    terminal.write(f"  {label:<{_TASK_WIDTH}} {ti.duration or 0:6.1f} s  {ti.state}\n")
                    if ti.state == "failed":
                        errors.append(f"{label}: see its log in Airflow")
        if state in ("success", "failed", None):
            return Ended(run_id, str(state), time.monotonic() - started, errors)
        time.sleep(1)
