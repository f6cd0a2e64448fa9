"""The demo model in its store, and `shard-runner` as the process that a pod runs. An engine start takes 20 to 40 s here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from millrace.model_store import stored_models
from millrace.plan import PinnedModel
from millrace.settings import Settings
from tests.runner.build import SHARD, Run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def demo_model() -> PinnedModel:
    models = [m for m in stored_models(Settings.from_env().models) if m.name == "smollm2-135m-instruct"]
    assert models, "the demo model is not in the store: run `make setup`"
    found = models[0]
    return PinnedModel(name=found.name, digest=found.digest, engine="vllm", location=found.location, context_tokens=512)


class Runner:
    """A started `shard-runner run`, its log, and the engine processes below it."""

    def __init__(self, run: Run, attempt: str, log: Path) -> None:
        self.run, self.attempt, self.log = run, attempt, log
        command = [str(Path(sys.executable).with_name("shard-runner")), "run", "--run", run.uri, "--shard", SHARD]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "--attempt", attempt], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ)
            )

    def until(self, happened: Callable[[], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def first_part(self) -> bool:
        folder = self.run.paths.shard_attempt(SHARD, self.attempt)
        return self.run.lake.exists(f"{folder}/part-00000.parquet")

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self, seconds: float = 600) -> int:
        return self.process.wait(timeout=seconds)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Runner]]:
    """Start a runner; whatever is left of it when the test ends is killed."""
    started: list[Runner] = []

    def begin(run: Run, attempt: str) -> Runner:
        started.append(Runner(run, attempt, tmp_path / f"{attempt}.log"))
        return started[-1]

    yield begin
    for runner in started:
        if runner.process.poll() is None:
            for process in [*runner.below(), runner.process]:
                process.kill()
