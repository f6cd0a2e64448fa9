"""What ends a shard early: signals, `stop.json`, limits, too many unusable answers. Finished answers are always saved."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from millrace.errors import ExitCode
from millrace.lake import Lake
from millrace.plan import PinnedModel
from millrace.records import Outcome, Stop
from tests.runner.build import SHARD, Run, build_run
from tests.runner.conftest import Answering, Process
from tests.runner.fake_engine import FakeEngine
from tests.runner.test_run import TEXTS, assert_right

Fake = Callable[..., None]


def outcome(run: Run, attempt: str) -> Outcome:
    return Outcome.load(run.lake, f"{run.paths.shard_attempt(SHARD, attempt)}/outcome.json")


def test_sigterm_while_answering_saves_what_is_done_and_exits_75(
    lake: Lake, model: PinnedModel, process: Process
) -> None:
    run = build_run(lake, TEXTS, model)
    done = process(run, env={"FAKE_ENGINE": json.dumps({"term_at_answer": 333})})
    assert done.returncode == ExitCode.STOPPED
    assert "SIGTERM" in outcome(run, "p1").message
    assert outcome(run, "p1").answered >= 333
    assert not lake.exists(run.paths.complete(SHARD))
    assert process(run, "p2").returncode == 0
    assert run.completion().resumed == outcome(run, "p1").answered
    assert_right(run)


def test_sigterm_while_the_model_loads_exits_75_at_once(lake: Lake, model: PinnedModel, process: Process) -> None:
    run = build_run(lake, TEXTS[:5], model)
    done = process(run, env={"FAKE_ENGINE": json.dumps({"term_at_load": True})})
    assert done.returncode == ExitCode.STOPPED
    assert (outcome(run, "p1").exit_code, outcome(run, "p1").answered) == (75, 0)


def test_stop_json_ends_a_runner_before_it_loads_the_model(lake: Lake, model: PinnedModel, answer: Answering) -> None:
    run = build_run(lake, TEXTS[:5], model)
    lake.create(run.paths.stop, Stop(reason="the prompt is broken", by="shard 17").dump())
    code, message = answer(run)
    assert (code, FakeEngine.opened) == (ExitCode.STOPPED, 0)
    assert "shard 17" in message
    assert "the prompt is broken" in message


def test_stop_json_is_seen_between_parts(
    lake: Lake, model: PinnedModel, answer: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_run(lake, TEXTS, model)
    original = Lake.write_parquet

    def stopping(self: Lake, path: str, *args: object) -> int:
        lake.create(run.paths.stop, Stop(reason="spent", by="a person").dump())
        return original(self, path, *args)

    monkeypatch.setattr(Lake, "write_parquet", stopping)
    code, message = answer(run)
    assert code == ExitCode.STOPPED
    assert "spent" in message
    assert 256 <= outcome(run, "a1").answered < 1024
    lake.delete([run.paths.stop])
    monkeypatch.setattr(Lake, "write_parquet", original)
    assert answer(run, "a2")[0] == ExitCode.COMPLETE
    assert_right(run)


@pytest.mark.parametrize(
    ("limit", "word"), [({"shard_tokens": 3000}, "shard_tokens"), ({"shard_seconds": 1}, "shard_seconds")]
)
def test_a_spent_limit_stops_the_run_resumably_with_a_clear_word(
    limit: dict[str, int], word: str, lake: Lake, model: PinnedModel, answer: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_run(lake, TEXTS, model, limits=limit)
    clock = iter(range(10_000))
    monkeypatch.setattr("shard_runner.guard.time.monotonic", lambda: float(next(clock)))
    code, message = answer(run)
    assert code == ExitCode.STOPPED
    assert word in message
    assert word in Stop.load(lake, run.paths.stop).reason
    assert 0 < outcome(run, "a1").answered < 1500


def test_a_broken_prompt_stops_early_with_the_reasons(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Fake
) -> None:
    """300 answers, then every second one is garbled: over 40 % of a window of 100."""
    texts = [f"GARBLED {text}" if n > 300 and n % 2 else text for n, text in enumerate(TEXTS)]
    fake(garble_on="GARBLED")
    run = build_run(
        lake, texts, model, limits={"early_stop_requests": 100, "early_stop_unknown_rate": 0.4}, row_group=64
    )
    code, message = answer(run)
    assert code == ExitCode.UNUSABLE
    assert "not_json" in message
    assert "of the last 100" in message
    assert outcome(run, "a1").reasons["not_json"] > 40
    assert outcome(run, "a1").answered > 0
    assert Stop.load(lake, run.paths.stop).by == f"shard {SHARD}"


def test_unusable_answers_within_the_limit_do_not_stop_a_shard(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Fake
) -> None:
    texts = [f"GARBLED {text}" if n % 4 == 0 else text for n, text in enumerate(TEXTS)]
    fake(garble_on="GARBLED")
    run = build_run(lake, texts, model, limits={"early_stop_requests": 100, "early_stop_unknown_rate": 0.5})
    assert answer(run)[0] == ExitCode.COMPLETE
    assert run.completion().reasons == {"not_json": 375}
    assert_right(run, texts, except_for="GARBLED")


def test_a_window_that_is_not_full_is_not_judged(lake: Lake, model: PinnedModel, answer: Answering, fake: Fake) -> None:
    fake(garble_on="review")
    run = build_run(lake, TEXTS[:50], model, limits={"early_stop_requests": 100})
    assert answer(run)[0] == ExitCode.COMPLETE
    assert run.completion().statuses == {"unknown": 50}
