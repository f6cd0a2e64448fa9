"""A shard answered on S3 by the real runner, as processes, with the engine of the runner's own tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ExitCode
from millrace.lake import Lake
from millrace.proof import prove_shard
from tests.runner.build import SHARD, Run, build_run, store_model
from tests.runner.fake_engine import right_label

ROOT = Path(__file__).parents[2]
TEXTS = [f"sentence number {i}" for i in range(1200)]


@pytest.fixture
def run(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("MILLRACE_MODELS", str(tmp_path / "models"))
    return build_run(lake, TEXTS, store_model(tmp_path / "models"))


def start(run: Run, attempt: str, engine: dict[str, Any] | None = None, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.runner.fake_runner",
            "run",
            "--run",
            run.uri,
            "--shard",
            SHARD,
            "--attempt",
            attempt,
        ],
        cwd=ROOT,
        env=os.environ | {"FAKE_ENGINE": json.dumps(engine or {})} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said = process.communicate(timeout=120)[0]
    return process.returncode, said


def assert_answered_once(run: Run) -> None:
    """Every request has its own right answer, in the one file that the completion record names."""
    done = prove_shard(run.lake, run.paths, run.shard)
    rows = run.answers()
    assert done.statuses == {"ok": len(TEXTS)}
    assert len({row["request_id"] for row in rows}) == len(rows) == len(TEXTS)
    labels = sorted(json.loads(row["values"])["sentiment"] for row in rows)
    assert labels == sorted(right_label(text) for text in TEXTS)


def test_a_shard_is_answered_and_a_second_runner_finds_nothing_to_do(run: Run) -> None:
    code, said = ended(start(run, "a1"))
    assert code == ExitCode.COMPLETE, said
    assert_answered_once(run)
    code, said = ended(start(run, "a2"))
    assert (code, "nothing to do" in said) == (ExitCode.COMPLETE, True)
    assert run.completion().attempt == "a1"


@pytest.mark.parametrize("write", ["3", "7"], ids=["while a part is written", "before the completion record"])
def test_a_killed_runner_is_resumed_from_its_parts(run: Run, tmp_path: Path, write: str) -> None:
    """At most one part, 512 answers and what is inside the engine, is asked twice."""
    asked = tmp_path / "asked"
    engine = {"asked_log": str(asked)}
    code, said = ended(start(run, "a1", engine, KILL_AT_WRITE=write))
    assert code == -signal.SIGKILL, said
    assert not run.lake.exists(run.paths.complete(SHARD))
    code, said = ended(start(run, "a2", engine))
    assert code == ExitCode.COMPLETE, said
    assert_answered_once(run)
    assert len(asked.read_text().split()) - len(TEXTS) <= 512 + 16


def test_of_two_runners_at_once_one_wins_and_no_answer_is_doubled(run: Run) -> None:
    runners = [start(run, f"a{i}") for i in range(2)]
    ends = [ended(runner) for runner in runners]
    assert [code for code, _ in ends] == [ExitCode.COMPLETE] * 2, ends
    assert_answered_once(run)
    assert [file.path for file in run.lake.list("answers")] == [run.completion().answers.path]
    assert sum("changes nothing" in said or "nothing to do" in said for _, said in ends) == 1


def test_a_runner_that_is_told_to_stop_saves_what_it_has(run: Run) -> None:
    code, said = ended(start(run, "a1", {"term_at_answer": 700}))
    assert code == ExitCode.STOPPED, said
    code, said = ended(start(run, "a2"))
    assert code == ExitCode.COMPLETE, said
    assert run.completion().resumed >= 700
    assert_answered_once(run)


def test_keys_that_the_store_refuses_end_the_runner_without_a_retry(run: Run) -> None:
    code, said = ended(start(run, "a1", AWS_SECRET_ACCESS_KEY="wrong"))
    assert (code, "AWS_SECRET_ACCESS_KEY" in said) == (ExitCode.CONFIG, True)
    assert "wrong" not in said
