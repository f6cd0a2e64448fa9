"""Kills, torn files, full disks and rivals: nothing lost, nothing doubled, at most one part asked twice."""

from __future__ import annotations

import importlib
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.errors import ExitCode
from millrace.lake import Lake
from millrace.plan import PinnedModel
from millrace.records import Completion, Outcome
from millrace.schemas import ANSWER
from shard_runner import parts
from shard_runner.guard import Signals
from shard_runner.run import Attempt
from tests.runner.build import SHARD, build_run
from tests.runner.conftest import Answering, Process
from tests.runner.fake_engine import FakeEngine
from tests.runner.test_run import TEXTS, assert_right

KILLED = -9


def test_24_kills_at_random_moments_change_nothing(
    lake: Lake, model: PinnedModel, process: Process, tmp_path: Path
) -> None:
    """SIGKILL while asking and around writes of parts, answers and records, until an attempt gets through."""
    texts = [f"review {n} of the long shard" for n in range(6000)]
    run = build_run(lake, texts, model)
    log = tmp_path / "asked"
    dice = random.Random(7)
    attempts = kills = 0
    while kills < 24:
        behaviour: dict[str, Any] = {"asked_log": str(log), "slots": 16}
        env = {}
        if dice.random() < 0.5:
            behaviour["kill_at_ask"] = dice.randint(1, 700)
        else:
            env["KILL_AT_WRITE"] = f"{dice.randint(1, 3)}{dice.choice(['', '+'])}"
        done = process(run, f"k{attempts:02d}", env={"FAKE_ENGINE": json.dumps(behaviour), **env})
        attempts += 1
        assert done.returncode in (KILLED, 0), done.stdout
        kills += done.returncode == KILLED
        if done.returncode == 0:
            break
    last = process(run, "last", env={"FAKE_ENGINE": json.dumps({"asked_log": str(log), "slots": 16})})
    assert last.returncode == 0, last.stdout
    assert kills >= 20
    assert_right(run, texts)
    asked = Counter(log.read_text().split())
    assert len(asked) == len(texts)
    assert asked.total() - len(texts) <= kills * (parts.PART_ROWS + 32)


@pytest.mark.parametrize("moment", ["1", "1+", "2", "2+", "3", "3+", "4", "4+", "5", "5+"])
def test_a_kill_at_each_write_of_a_shard_is_survived(
    moment: str, lake: Lake, model: PinnedModel, process: Process
) -> None:
    """Two parts, the answer file, the completion record, the outcome: a kill before or after each of them."""
    run = build_run(lake, TEXTS[:400], model)
    assert process(run, "p1", env={"KILL_AT_WRITE": moment}).returncode == KILLED
    done = process(run, "p2")
    assert done.returncode == 0, done.stdout
    assert_right(run, TEXTS[:400])


def test_a_resumed_shard_asks_only_what_is_left(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Callable[..., None]
) -> None:
    run = build_run(lake, TEXTS, model)
    fake(dead_after=700)
    assert answer(run, "a1")[0] == ExitCode.UNAVAILABLE
    saved = Outcome.load(lake, f"{run.paths.shard_attempt(SHARD, 'a1')}/outcome.json").answered
    fake()
    assert answer(run, "a2")[0] == ExitCode.COMPLETE
    assert saved >= 700
    assert FakeEngine.asked == 1500 - saved
    assert run.completion().resumed == saved
    assert_right(run)


def test_answers_of_an_earlier_attempt_are_kept_as_they_were_given(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Callable[..., None]
) -> None:
    """An engine that would answer otherwise today does not change what is saved."""
    run = build_run(lake, TEXTS[:600], model)
    fake(dead_after=300)
    answer(run, "a1")
    first = {
        row["request_id"]: row["raw_text"]
        for info in lake.list(run.paths.shard_attempt(SHARD, "a1"))
        if info.path.endswith(".parquet")
        for row in lake.parquet(info.path).read().to_pylist()
    }
    fake(garble_on="review")
    assert answer(run, "a2")[0] == ExitCode.UNUSABLE  # every new answer is garbled
    fake()
    lake.delete([run.paths.stop])
    assert answer(run, "a3")[0] == ExitCode.COMPLETE
    final = {row["request_id"]: row["raw_text"] for row in run.answers()}
    assert len(first) >= 300
    assert {request_id: final[request_id] for request_id in first} == first


def _part(run_plan_row: dict[str, Any], **changes: Any) -> pa.Table:
    return pa.Table.from_pylist([{**run_plan_row, **changes}], schema=ANSWER)


def test_torn_and_foreign_parts_are_ignored_loudly(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Footerless, empty, of another schema, of another fingerprint, of another shard: none of it becomes an answer."""
    run = build_run(lake, TEXTS[:300], model)
    other = build_run(Lake(lake.root + "-other"), TEXTS[:300], model)
    answer(other)
    row = other.answers()[0]
    folder = run.paths.shard_attempt(SHARD, "a0")
    lake.write_parquet(f"{folder}/part-00000.parquet", _part(row))
    whole = lake.read(f"{folder}/part-00000.parquet")
    lake.write(f"{folder}/part-00001.parquet", whole[: len(whole) // 2])
    lake.write(f"{folder}/part-00002.parquet", b"")
    lake.write_parquet(f"{folder}/part-00003.parquet", _part(row).drop_columns(["raw_text"]))
    lake.write_parquet(f"{folder}/part-00004.parquet", _part(row, fingerprint="f" * 64, values='{"sentiment":"wrong"}'))
    lake.write_parquet(f"{folder}/part-00005.parquet", _part(row, request_id="another shard's"))
    fake()
    assert answer(run, "a1")[0] == ExitCode.COMPLETE
    assert_right(run, TEXTS[:300])
    assert (run.completion().resumed, FakeEngine.asked) == (1, 299)
    for part in ("part-00001", "part-00002", "part-00003", "part-00004"):
        assert part in caplog.text


def test_a_passing_failure_is_asked_again_by_the_next_attempt_and_a_lasting_one_is_not(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Callable[..., None]
) -> None:
    run = build_run(lake, TEXTS[:300], model)
    ids = [request["request_id"] for request in lake.parquet(run.shard.files[0].path).read().to_pylist()]
    other = build_run(Lake(lake.root + "-other"), TEXTS[:300], model)
    answer(other)
    row = other.answers()[0]
    failed = {"status": "failed", "values": None, "raw_text": None}
    rows = [
        {**row, **failed, "request_id": ids[0], "reason": "timeout"},
        {**row, **failed, "request_id": ids[1], "reason": "poison"},
    ]
    lake.write_parquet(
        f"{run.paths.shard_attempt(SHARD, 'a0')}/part-00000.parquet", pa.Table.from_pylist(rows, schema=ANSWER)
    )
    fake()
    assert answer(run, "a1")[0] == ExitCode.COMPLETE
    by_id = {r["request_id"]: r for r in run.answers()}
    assert by_id[ids[0]]["status"] == "ok"
    assert by_id[ids[1]]["reason"] == "poison"
    assert run.completion().reasons == {"poison": 1}


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_full_disk_ends_the_attempt_and_the_next_one_goes_on(
    failing: int, lake: Lake, model: PinnedModel, answer: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_run(lake, TEXTS, model)
    writes = 0

    def full(self: Lake, path: str, table: pa.Table) -> int:
        nonlocal writes
        writes += 1
        if writes >= failing:
            raise OSError(28, "No space left on device")
        return original(self, path, table)

    original = Lake.write_parquet
    with monkeypatch.context() as patch:
        patch.setattr(Lake, "write_parquet", full)
        code, message = answer(run, "a1")
    assert code == ExitCode.UNAVAILABLE
    assert "No space left" in message
    assert not lake.exists(run.paths.complete(SHARD))
    assert answer(run, "a2")[0] == ExitCode.COMPLETE
    assert run.completion().resumed == (failing - 1) * parts.PART_ROWS // 2
    assert_right(run)


def test_a_disk_that_fills_up_at_the_merge_leaves_no_completion_record(
    lake: Lake, model: PinnedModel, answer: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_run(lake, TEXTS[:300], model)

    def full(self: Lake, *args: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Lake, "parquet_writer", full)
        assert answer(run, "a1")[0] == ExitCode.UNAVAILABLE
    assert not lake.exists(run.paths.complete(SHARD))
    asked = FakeEngine.asked
    assert answer(run, "a2")[0] == ExitCode.COMPLETE
    assert FakeEngine.asked == asked
    assert_right(run, TEXTS[:300])


@pytest.mark.parametrize("where", ["shard_runner.parts.answers_table", "shard_runner.pump.parse_answer"])
def test_memory_that_runs_out_ends_the_attempt_and_the_next_one_goes_on(
    where: str, lake: Lake, model: PinnedModel, answer: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the engine, where parts are written, and in the thread that reads answers."""
    run = build_run(lake, TEXTS, model)
    module, _, name = where.rpartition(".")
    original = getattr(importlib.import_module(module), name)
    calls = 0

    def short(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > (1 if name == "answers_table" else 600):
            raise MemoryError
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(where, short)
        code, message = answer(run, "a1")
    assert code == ExitCode.UNAVAILABLE
    assert "MemoryError" in message
    assert not lake.exists(run.paths.complete(SHARD))
    assert answer(run, "a2")[0] == ExitCode.COMPLETE
    assert run.completion().resumed == (256 if name == "answers_table" else 600)
    assert_right(run)


def test_the_late_of_two_runners_stops_between_parts_and_changes_nothing(
    lake: Lake, model: PinnedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second completes the shard while the first is at its second part."""
    run = build_run(lake, TEXTS, model)
    original = FakeEngine.poll
    rival: list[tuple[ExitCode, str]] = []

    def poll(self: FakeEngine, timeout_s: float) -> Any:
        if FakeEngine.answered > 400 and not rival:
            rival.append((ExitCode.CONFIG, ""))
            rival[0] = Attempt(lake, run.paths, SHARD, "rival", Signals()).run()
        return original(self, timeout_s)

    monkeypatch.setattr(FakeEngine, "poll", poll)
    code, message = Attempt(lake, run.paths, SHARD, "late", Signals()).run()
    assert rival[0][0] == code == ExitCode.COMPLETE
    assert "attempt rival" in message
    assert "changes nothing" in message
    assert run.completion().attempt == "rival"
    assert_right(run)
    assert [f.path for f in lake.list("answers")] == [run.completion().answers.path]


def test_a_rival_that_completes_during_the_merge_wins(
    lake: Lake, model: PinnedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_run(lake, TEXTS[:300], model)
    original = Lake.create
    rival: list[tuple[ExitCode, str]] = []

    def create(self: Lake, path: str, data: bytes) -> bool:
        if path.endswith("complete.json") and not rival:
            rival.append((ExitCode.CONFIG, ""))
            rival[0] = Attempt(lake, run.paths, SHARD, "rival", Signals()).run()
        return original(self, path, data)

    monkeypatch.setattr(Lake, "create", create)
    code, message = Attempt(lake, run.paths, SHARD, "late", Signals()).run()
    assert rival[0][0] == code == ExitCode.COMPLETE
    assert "changes nothing" in message
    assert Completion.load(lake, run.paths.complete(SHARD)).attempt == "rival"
    assert [f.path for f in lake.list("answers")] == [run.completion().answers.path]
    assert_right(run, TEXTS[:300])


def test_an_engine_that_never_returns_ends_the_process_with_everything_finished_saved(
    lake: Lake, model: PinnedModel, process: Process
) -> None:
    run = build_run(lake, TEXTS, model.model_copy(update={"settings": {"step_timeout_s": 1}}))
    done = process(run, "a1", env={"FAKE_ENGINE": json.dumps({"hang_after": 700})})
    assert done.returncode == ExitCode.UNAVAILABLE, done.stdout
    assert "step_timeout_s" in done.stdout
    outcome = Outcome.load(lake, f"{run.paths.shard_attempt(SHARD, 'a1')}/outcome.json")
    assert (outcome.exit_code, outcome.answered) == (3, 700)
    assert "has not returned" in outcome.message
    assert process(run, "a2").returncode == 0
    assert run.completion().resumed == 700
    assert_right(run)


@pytest.mark.parametrize("seconds", [0, -1, "soon", True])
def test_a_time_limit_for_steps_that_is_none_is_refused_before_the_model_loads(
    seconds: Any, lake: Lake, model: PinnedModel, answer: Answering
) -> None:
    run = build_run(lake, TEXTS[:5], model.model_copy(update={"settings": {"step_timeout_s": seconds}}))
    code, message = answer(run)
    assert (code, FakeEngine.opened) == (ExitCode.CONFIG, 0)
    assert "step_timeout_s" in message


def test_an_engine_that_does_not_shut_down_changes_no_outcome(lake: Lake, model: PinnedModel, process: Process) -> None:
    run = build_run(lake, TEXTS[:20], model)
    done = process(run, env={"FAKE_ENGINE": json.dumps({"hang_on_close": True})})
    assert done.returncode == 0
    assert "did not close within" in done.stdout
    assert_right(run, TEXTS[:20])


def test_an_engine_that_fails_to_shut_down_changes_no_outcome(lake: Lake, model: PinnedModel, process: Process) -> None:
    run = build_run(lake, TEXTS[:20], model)
    done = process(run, env={"FAKE_ENGINE": json.dumps({"raise_on_close": True})})
    assert done.returncode == 0
    assert "did not close cleanly (RuntimeError)" in done.stdout
