"""Targets that must answer before there is an environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which nothing was set up."""
    shutil.copy(MAKEFILE, tmp_path)
    return tmp_path


def down(checkout: Path) -> subprocess.CompletedProcess[str]:
    env = {
        name: value for name, value in os.environ.items() if name != "MILLRACE_STATE" and not name.startswith("MAKE")
    }
    return subprocess.run(["make", "down"], cwd=checkout, env=env, capture_output=True, text=True, timeout=60)


def test_down_before_set_up_says_that_there_is_nothing_to_stop(checkout: Path) -> None:
    done = down(checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing is set up here: there is nothing to stop\n", "")


def test_down_stops_what_runs_with_the_environments_own_command(checkout: Path) -> None:
    command = checkout / ".venv" / "bin" / "millrace"
    command.parent.mkdir(parents=True)
    command.write_text('#!/bin/sh\necho "asked to $1"\n')
    command.chmod(0o755)
    assert down(checkout).stdout == "asked to down\n"


def test_down_after_the_environments_were_removed_says_how_to_stop_the_database(checkout: Path) -> None:
    pid_file = checkout / ".millrace" / "postgres" / "postmaster.pid"
    pid_file.parent.mkdir(parents=True)
    pid_file.touch()
    done = down(checkout)
    assert done.returncode != 0 and "run make setup, then make down" in done.stderr
