"""The shard runner as a process of this machine: its output in the task's log, signals passed on, never left behind."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from millrace.errors import ConfigError
from millrace.settings import Settings

# What the runner prints. `millrace run` shows the latest line while a step is at work.
runner_log = logging.getLogger("millrace.runner")

# What belongs to the orchestrator's environment and must not reach the other one: its secrets, its interpreter, its Java.
_WITHHELD = (
    "AIRFLOW",
    "_AIRFLOW",
    "__AIRFLOW",
    "PYTHON",
    "VIRTUAL_ENV",
    "SPARK_",
    "PYSPARK_",
    "JAVA_",
    "MILLRACE_CONFIG_DB",
)
# Longer than the runner needs to finish its batch and write a part; Airflow kills the task itself after 60 s.
_GRACE_SECONDS = 45
_PR_SET_PDEATHSIG = 1


def runner_env(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment a runner gets: this one without the orchestrator's own variables, lake and model store spelled out."""
    settings = Settings.from_env(environ)
    kept = {name: value for name, value in environ.items() if not name.startswith(_WITHHELD)}
    return kept | {
        "MILLRACE_HOME": str(settings.home),
        "MILLRACE_LAKE": settings.lake,
        "MILLRACE_MODELS": settings.models,
        "PYTHONUNBUFFERED": "1",
    }


def last_word(line: str) -> str | None:
    """What a line says of how the runner ends, without its time and level; None for any other line. Libraries print after it.

    >>> last_word("04:28:35 INFO shard fd3d complete: 40 requests (40 ok) (exit 0)")
    'shard fd3d complete: 40 requests (40 ok)'
    >>> last_word("  warnings.warn('resource_tracker: ...")
    """
    found = re.fullmatch(r"(?:[\d:.]+ )?(?:[A-Z]+ )?(.*) \(exit \d+\)", line)
    return found and found[1]


class RunnerProcess:
    """One execution of `shard-runner`. `wait` returns its exit code, `stop` asks it to save and end."""

    def __init__(self, *arguments: str) -> None:
        runner = Settings.from_env().runner
        if not os.access(runner, os.X_OK):
            raise ConfigError(
                f"'{Path(runner).name}' is not at '{runner}'. Run `make setup`, or set MILLRACE_RUNNER to where it is."
            )
        # A worker that is killed outright cannot pass anything on: the kernel then tells the runner to save and end,
        # so that the next attempt does not find the only GPU taken.
        libc = ctypes.CDLL(None)
        self._process = subprocess.Popen(
            [runner, *arguments],
            env=runner_env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        self.last_word = ""

    def wait(self) -> int:
        """Copy the output to the log until the process ends. Negative when a signal ended it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if text := line.rstrip():
                runner_log.info("%s", text)
                self.last_word = last_word(text) or self.last_word
        return self._process.wait()

    def stop(self) -> None:
        """Ask the process to save and end; kill it, and what it started, when it does not."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
