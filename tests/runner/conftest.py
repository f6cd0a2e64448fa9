"""A lake, a stored model and the fake engine, fresh for each test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ExitCode
from millrace.lake import Lake
from millrace.plan import PinnedModel
from shard_runner.engines import ENGINES
from shard_runner.guard import Signals
from shard_runner.run import Attempt
from tests.runner.build import SHARD, Run, store_model
from tests.runner.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PinnedModel:
    monkeypatch.setenv("MILLRACE_MODELS", str(tmp_path / "models"))
    return store_model(tmp_path / "models")


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Tell the fake engine how to misbehave; its counters start at zero."""
    monkeypatch.setitem(ENGINES, "vllm", "tests.runner.fake_engine")

    def tell(**behaviour: Any) -> None:
        monkeypatch.setenv("FAKE_ENGINE", json.dumps(behaviour))
        FakeEngine.opened = FakeEngine.asked = FakeEngine.answered = 0
        FakeEngine.misfired = False
        FakeEngine.inside_seen = []
        FakeEngine._seen = set()

    tell()
    return tell


Answering = Callable[..., tuple[ExitCode, str]]


@pytest.fixture
def answer() -> Answering:
    """Run one attempt of a run's shard in this process."""

    def run(
        built: Run, attempt: str = "a1", signals: Signals | None = None, shard: str = SHARD
    ) -> tuple[ExitCode, str]:
        return Attempt(built.lake, built.paths, shard, attempt, signals or Signals()).run()

    return run


Process = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def process() -> Process:
    """Run `shard-runner` with the fake engine as a process."""

    def run(built: Run, attempt: str = "p1", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        arguments = ["run", "--run", built.uri, "--shard", SHARD, "--attempt", attempt]
        return subprocess.run(
            [sys.executable, "-m", "tests.runner.fake_runner", *arguments],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
