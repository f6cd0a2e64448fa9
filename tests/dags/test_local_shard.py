"""One shard as a process of this machine: what its end means, who may start it, and what it may see."""

from __future__ import annotations

import json
import logging
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.airflow.operators import LocalShard, Preflight
from millrace.airflow.retries import INFER_RETRIES, POLICY, CrashedError, GaveUpError, ReclaimedError
from millrace.airflow.tasks import step_log
from millrace.config_db import ConfigDb
from millrace.errors import (
    ConfigError,
    IncompleteError,
    RefusedError,
    StoppedError,
    UnavailableError,
    UnusableError,
)
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.records import Manifest, ShardEntry, Stop
from tests.dags.conftest import ROOT
from tests.dags.fake_runner import complete

SHARD, OTHER = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"
PLAN = "0" * 64


@dataclass
class Bench:
    """A run with two shards in a lake, a claim on its partition, and a runner that does as it is told."""

    lake: Lake
    paths: RunPaths
    seen: Path
    monkeypatch: pytest.MonkeyPatch
    db: ConfigDb
    dag_run_id: str = "manual__1"
    started: datetime = field(default_factory=lambda: datetime.now(UTC))

    def tell(self, how: Any, **more: Any) -> None:
        self.monkeypatch.setenv("FAKE_RUNNER", json.dumps({"how": how, "seen": str(self.seen), **more}))

    def starts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.seen.read_text().splitlines()] if self.seen.exists() else []

    def context(self, try_number: int = 1, max_tries: int = INFER_RETRIES) -> dict[str, Any]:
        ref = {"run": self.paths.root, "number": 1}
        return {
            "ti": SimpleNamespace(try_number=try_number, max_tries=max_tries, xcom_pull=lambda task_ids: ref),
            "dag_run": SimpleNamespace(run_id=self.dag_run_id, start_date=self.started),
        }

    def answer(self, shard: str = SHARD, **tries: int) -> None:
        LocalShard(task_id="infer", shard_id=shard, retries=INFER_RETRIES).execute(self.context(**tries))

    def stop(self, at: datetime) -> None:
        self.lake.write(self.paths.stop, Stop(reason="61 % unusable", by=f"shard {OTHER}", at=at).dump())


def wait_for(happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline, "it did not happen within 30 s"
        time.sleep(0.01)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_db_url: str) -> Bench:
    runner = tmp_path / "shard-runner"
    runner.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m tests.dags.fake_runner "$@"\n')
    runner.chmod(0o755)
    lake = Lake(str(tmp_path / "lake"))
    monkeypatch.setenv("MILLRACE_RUNNER", str(runner))
    monkeypatch.setenv("MILLRACE_LAKE", lake.root)
    monkeypatch.setenv("MILLRACE_CONFIG_DB", config_db_url)
    paths = RunPaths(f"shards_{secrets.token_hex(4)}", "2026-11-01", PLAN)
    shards = [
        ShardEntry(shard_id=s, model="m", fingerprint="f", requests=7, est_tokens=70, bytes=700, files=[])
        for s in (SHARD, OTHER)
    ]
    manifest = Manifest(
        plan_id=PLAN, attempt="x", rows=14, requests=14, reused=0, skipped_rows={}, reused_rows=0, infer_rows=14,
        changed={}, row_files=[], reused_files=[], shards=shards, seconds=1,
    )  # fmt: skip
    lake.write(paths.manifest, manifest.dump())
    db = ConfigDb(config_db_url)
    db.register_run(paths.enrichment, paths.partition, "manual__1", lambda _: False)
    return Bench(lake, paths, tmp_path / "seen", monkeypatch, db)


def test_a_shard_is_green_once_its_completion_is_proved(bench: Bench) -> None:
    bench.tell("complete")
    bench.answer()
    (start,) = bench.starts()
    assert start["arguments"][:5] == ["run", "--run", bench.paths.root, "--shard", SHARD]
    assert bench.lake.exists(bench.paths.complete(SHARD))


def test_exit_0_without_a_completion_record_is_not_green(bench: Bench) -> None:
    bench.tell("liar")
    with pytest.raises(IncompleteError, match=SHARD):
        bench.answer()


def test_a_completion_record_counts_though_the_process_ended_badly(bench: Bench) -> None:
    """The engine's teardown may fail after everything is written."""
    bench.tell("1")
    complete(bench.lake, bench.paths, SHARD, "earlier")
    bench.answer()


def test_a_complete_shard_starts_no_process_and_says_so(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, step_log.name)
    bench.tell("complete")
    bench.answer()
    bench.answer(try_number=2)
    assert len(bench.starts()) == 1
    asked, found = (record.getMessage() for record in caplog.records if record.name == step_log.name)
    assert "answered earlier" not in asked and "requests, all answered earlier: " in found


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("2", ConfigError),
        ("3", UnavailableError),
        ("4", UnusableError),
        ("75", StoppedError),
        ("1", CrashedError),
        ("kill", ReclaimedError),
    ],
)
def test_how_the_runner_ends_is_how_the_task_ends(bench: Bench, how: str, error: type[Exception]) -> None:
    bench.tell(how)
    with pytest.raises(error, match=SHARD) as raised:
        bench.answer()
    assert type(raised.value) is error


def test_a_shard_that_the_manifest_does_not_have_is_refused(bench: Bench) -> None:
    bench.tell("complete")
    with pytest.raises(RefusedError, match="not in the manifest"):
        bench.answer("cccccccccccccccc")
    assert bench.starts() == []


def test_another_dag_run_that_took_the_partition_stops_this_one_before_it_spends(bench: Bench) -> None:
    bench.tell("complete")
    bench.db.register_run(bench.paths.enrichment, bench.paths.partition, "manual__2", lambda _: False)
    with pytest.raises(RefusedError, match="manual__2"):
        bench.answer()
    assert bench.starts() == []


def test_more_than_three_real_failures_since_the_last_clear_end_the_task(bench: Bench) -> None:
    bench.tell("3")
    for number in (1, 2, 3):
        with pytest.raises(UnavailableError):
            bench.answer(try_number=number)
    with pytest.raises(GaveUpError, match="clear the task"):
        bench.answer(try_number=4)
    # A clear sets max_tries to the last try plus retries, and the count starts anew.
    with pytest.raises(UnavailableError):
        bench.answer(try_number=5, max_tries=4 + INFER_RETRIES)


def test_a_crash_that_left_no_record_counts_as_a_failure(bench: Bench) -> None:
    bench.tell("3")
    for number in (1, 2, 3):
        with pytest.raises(UnavailableError):
            bench.answer(try_number=number)
    bench.tell("1", records=False)
    with pytest.raises(GaveUpError):
        bench.answer(try_number=4)


def test_reclaimed_and_stopped_tries_never_count_as_failures(bench: Bench) -> None:
    for number in range(1, 9):
        bench.tell("kill" if number % 2 else "75")
        with pytest.raises(ReclaimedError if number % 2 else StoppedError):
            bench.answer(try_number=number)
    bench.tell("complete")
    bench.answer(try_number=9)


def test_failures_of_another_dag_run_do_not_count(bench: Bench) -> None:
    bench.tell("3")
    for number in (1, 2, 3):
        with pytest.raises(UnavailableError):
            bench.answer(try_number=number)
    bench.dag_run_id = "manual__later"
    bench.db.register_run(bench.paths.enrichment, bench.paths.partition, "manual__later", lambda _: False)
    with pytest.raises(UnavailableError):
        bench.answer(try_number=4)


def test_a_stopped_run_starts_no_more_runners_and_does_not_retry(bench: Bench) -> None:
    bench.tell("complete")
    bench.stop(bench.started + timedelta(seconds=5))
    with pytest.raises(RefusedError, match="61 % unusable") as raised:
        bench.answer()
    assert POLICY.evaluate(raised.value, 1, INFER_RETRIES).action.value == "fail"
    assert bench.starts() == []


def test_a_runner_that_was_stopped_by_the_run_does_not_retry(bench: Bench) -> None:
    """It would read `stop.json` and end with 75 again, fifty times."""
    bench.tell("wait")

    def stop_when_at_work() -> None:
        wait_for(bench.starts)
        bench.stop(datetime.now(UTC))
        operator.on_kill()

    operator = LocalShard(task_id="infer", shard_id=SHARD, retries=INFER_RETRIES)
    thread = threading.Thread(target=stop_when_at_work)
    thread.start()
    with pytest.raises(RefusedError, match="61 % unusable"):
        operator.execute(bench.context())
    thread.join()


def test_clearing_the_run_removes_the_stop(bench: Bench) -> None:
    bench.tell("complete")
    bench.stop(bench.started - timedelta(minutes=5))  # the DAG run was restarted by the clear, after the stop
    bench.answer()
    assert not bench.lake.exists(bench.paths.stop)


def test_clearing_the_shard_that_failed_removes_the_stop_while_the_run_goes_on(bench: Bench) -> None:
    bench.tell("4")
    stopped = datetime.now(UTC)
    with pytest.raises(UnusableError):
        bench.answer(try_number=1)
    bench.stop(stopped)
    bench.tell("complete")
    bench.answer(try_number=2, max_tries=1 + INFER_RETRIES)
    assert not bench.lake.exists(bench.paths.stop)


def test_a_retry_is_no_clear_and_leaves_the_stop(bench: Bench) -> None:
    bench.tell("3")
    with pytest.raises(UnavailableError):
        bench.answer(try_number=1)
    bench.stop(datetime.now(UTC))
    with pytest.raises(RefusedError):
        bench.answer(try_number=2)
    assert bench.lake.exists(bench.paths.stop)


def test_killing_the_task_lets_the_runner_save_and_end(bench: Bench) -> None:
    bench.tell("wait")
    operator = LocalShard(task_id="infer", shard_id=SHARD, retries=INFER_RETRIES)

    def kill_when_at_work() -> None:
        wait_for(bench.starts)
        operator.on_kill()

    thread = threading.Thread(target=kill_when_at_work)
    thread.start()
    with pytest.raises(StoppedError):
        operator.execute(bench.context())
    thread.join()


def test_a_worker_that_is_killed_outright_takes_its_runner_with_it(bench: Bench) -> None:
    """Else the next attempt finds the machine's only engine slot taken."""
    bench.tell("wait")
    arguments = ["run", "--run", bench.paths.root, "--shard", SHARD, "--attempt", "a1"]
    code = f"from millrace.airflow.process import RunnerProcess; RunnerProcess(*{arguments!r}).wait()"
    worker = subprocess.Popen([sys.executable, "-c", code])
    wait_for(bench.starts)
    worker.kill()
    worker.wait()
    outcome = f"{bench.paths.shard_attempt(SHARD, 'a1')}/outcome.json"
    wait_for(lambda: bench.lake.exists(outcome))
    assert json.loads(bench.lake.read(outcome))["exit_code"] == 75


def test_the_runner_sees_the_lake_and_no_secret_of_the_orchestrator(bench: Bench) -> None:
    bench.tell("complete")
    bench.monkeypatch.setenv("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "postgresql://secret")
    bench.monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", "secret")
    bench.monkeypatch.setenv("PYTHONPATH", "/somewhere")
    bench.answer()
    environment = bench.starts()[0]["environment"]
    assert environment["MILLRACE_LAKE"] == bench.lake.root
    withheld = ("AIRFLOW", "MILLRACE_CONFIG_DB", "PYTHONPATH", "JAVA_HOME")
    assert [name for name in environment if name.startswith(withheld)] == []


def test_a_missing_runner_says_what_to_do(bench: Bench) -> None:
    bench.monkeypatch.setenv("MILLRACE_RUNNER", "/nowhere/shard-runner")
    with pytest.raises(ConfigError, match="make setup"):
        bench.answer()


@pytest.mark.parametrize(("how", "error"), [("0", None), ("2", ConfigError), ("3", UnavailableError)])
def test_preflight_ends_as_the_probe_does(bench: Bench, how: str, error: type[Exception] | None) -> None:
    bench.tell(how)
    probe: Callable[[], None] = lambda: Preflight(task_id="preflight").execute(bench.context())  # noqa: E731
    if error is None:
        probe()
    else:
        with pytest.raises(error, match="golden answers"):
            probe()
    assert bench.starts()[0]["arguments"] == ["probe", "--run", bench.paths.root]
