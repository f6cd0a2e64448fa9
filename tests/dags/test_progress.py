"""What `millrace run` shows of a run: a line for each step that has ended, with its own word."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

from airflow.sdk import TaskInstanceState

from millrace.airflow.process import runner_log
from millrace.airflow.run_here import Progress
from millrace.airflow.tasks import step_log


class Terminal(io.StringIO):
    def __init__(self, is_tty: bool) -> None:
        super().__init__()
        self._is_tty = is_tty

    def isatty(self) -> bool:
        return self._is_tty


def task(task_id: str, state: str = "running", map_index: int = -1) -> Any:
    return SimpleNamespace(task_id=task_id, state=TaskInstanceState(state), map_index=map_index)


def record(logger: Any, message: str) -> Any:
    return logger.makeRecord(logger.name, 20, "", 0, message, (), None)


def shown(progress: Progress, terminal: Terminal) -> list[str]:
    """The lines, without their seconds."""
    return [re.sub(r" +\d+\.\d s", "", line) for line in terminal.getvalue().splitlines()]


def test_a_step_that_ended_is_one_line_with_its_own_word() -> None:
    terminal = Terminal(is_tty=False)
    progress = Progress(terminal)
    progress.on_task_instance_running(None, task("extract"))
    progress.emit(record(runner_log, "Loading weights"))
    progress.emit(record(step_log, "40 rows: 38 requests"))
    progress.on_task_instance_success(None, task("extract"))
    assert shown(progress, terminal) == ["  extract  40 rows: 38 requests"]


def test_mapped_steps_are_counted_from_one() -> None:
    terminal = Terminal(is_tty=False)
    progress = Progress(terminal)
    progress.on_task_instance_running(None, task("infer", map_index=2))
    progress.on_task_instance_success(None, task("infer", map_index=2))
    assert shown(progress, terminal)[0].startswith("  infer 3")


def test_a_try_that_will_be_repeated_is_no_failure_of_the_run() -> None:
    terminal = Terminal(is_tty=False)
    progress = Progress(terminal)
    progress.on_task_instance_running(None, task("infer", map_index=0))
    progress.on_task_instance_failed(None, task("infer", "up_for_retry", 0), RuntimeError("reclaimed"))
    assert "tries again: reclaimed" in terminal.getvalue()
    assert progress.errors == []
    progress.on_task_instance_running(None, task("infer", map_index=0))
    progress.on_task_instance_failed(None, task("infer", "failed", 0), RuntimeError("unusable\nreasons: refused 7"))
    assert "failed: unusable" in terminal.getvalue() and "reasons: refused 7" in terminal.getvalue()
    assert progress.errors == ["infer 1: unusable"]


def test_only_a_terminal_sees_what_is_at_work() -> None:
    for is_tty in (True, False):
        terminal = Terminal(is_tty)
        progress = Progress(terminal)
        progress.on_task_instance_running(None, task("infer", map_index=0))
        progress.emit(record(runner_log, "20/40 requests"))
        assert ("20/40 requests" in terminal.getvalue()) is is_tty
