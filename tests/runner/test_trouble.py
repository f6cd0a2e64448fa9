"""Bad requests and bad engines: a bad request costs itself, a confused engine is not believed, a dead one is given up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from millrace.errors import ExitCode
from millrace.lake import Lake
from millrace.plan import PinnedModel
from millrace.records import Outcome
from shard_runner.pump import MAX_DEATHS, MAX_DEATHS_IN_A_ROW
from tests.runner.build import SHARD, build_run
from tests.runner.conftest import Answering
from tests.runner.fake_engine import FakeEngine
from tests.runner.test_run import TEXTS, assert_right

Fake = Callable[..., None]


@pytest.mark.parametrize("how", ["die_on", "raise_on"])
@pytest.mark.parametrize("places", [[0], [299], [150, 151], [10, 100, 200]])
def test_a_request_that_kills_the_engine_is_set_aside_alone(
    how: str, places: list[int], lake: Lake, model: PinnedModel, answer: Answering, fake: Fake
) -> None:
    fake(**{how: "POISON"})
    texts = [f"POISON {text}" if n in places else text for n, text in enumerate(TEXTS[:300])]
    run = build_run(lake, texts, model)
    code, message = answer(run)
    assert code == ExitCode.COMPLETE, message
    assert run.completion().statuses == {"ok": 300 - len(places), "failed": len(places)}
    assert run.completion().reasons == {"poison": len(places)}
    assert_right(run, texts, except_for="POISON")


def test_a_request_that_the_engine_refuses_costs_itself_and_no_engine(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Fake
) -> None:
    fake(refuse_on="REFUSED")
    texts = ["REFUSED", *TEXTS[:100]]
    run = build_run(lake, texts, model)
    assert answer(run)[0] == ExitCode.COMPLETE
    assert FakeEngine.opened == 1
    assert run.completion().reasons == {"engine_error": 1}
    assert_right(run, texts, except_for="REFUSED")


@pytest.mark.parametrize("how", ["orphan_after", "double_after"])
def test_replies_that_do_not_match_what_was_asked_are_discarded_with_their_engine(
    how: str, lake: Lake, model: PinnedModel, answer: Answering, fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    """A stray reply, or one twice, means that the engine's replies cannot be trusted: no row may get another's label."""
    fake(**{how: 50})
    run = build_run(lake, TEXTS[:200], model)
    assert answer(run)[0] == ExitCode.COMPLETE
    assert FakeEngine.opened == 2
    assert "discarded" in caplog.text
    assert_right(run, TEXTS[:200])


def test_an_engine_that_dies_once_is_rebuilt_and_loses_no_request(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Fake
) -> None:
    fake(dead_once_after=50)
    run = build_run(lake, TEXTS[:200], model)
    assert answer(run)[0] == ExitCode.COMPLETE
    assert FakeEngine.opened == 2
    assert_right(run, TEXTS[:200])


def test_an_engine_that_stays_dead_is_given_up_with_everything_finished_saved(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Fake
) -> None:
    fake(dead_after=60)
    run = build_run(lake, TEXTS[:200], model)
    code, message = answer(run)
    assert code == ExitCode.UNAVAILABLE
    assert "dead for ever" in message
    assert FakeEngine.opened == MAX_DEATHS_IN_A_ROW + 1
    assert Outcome.load(lake, f"{run.paths.shard_attempt(SHARD, 'a1')}/outcome.json").answered == 60


def test_an_engine_that_keeps_dying_between_answers_is_rebuilt_a_bounded_number_of_times(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Fake
) -> None:
    fake(dead_every=8)
    run = build_run(lake, TEXTS, model)
    code, message = answer(run)
    assert code == ExitCode.UNAVAILABLE
    assert "worn out" in message
    assert FakeEngine.opened == MAX_DEATHS + 1
    saved = Outcome.load(lake, f"{run.paths.shard_attempt(SHARD, 'a1')}/outcome.json").answered
    assert saved == FakeEngine.answered > MAX_DEATHS
    fake()
    assert answer(run, "a2")[0] == ExitCode.COMPLETE
    assert run.completion().resumed == saved
    assert_right(run)


def test_an_engine_that_cannot_start_is_unavailable_and_not_tried_again(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Fake
) -> None:
    fake(no_start=True)
    code, message = answer(build_run(lake, TEXTS[:5], model))
    assert (code, FakeEngine.opened) == (ExitCode.UNAVAILABLE, 1)
    assert "memory" in message


def test_a_cut_answer_is_asked_once_more_with_double_the_tokens(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Fake
) -> None:
    fake(cut_on="CUT")
    texts = ["CUT me", *TEXTS[:50]]
    run = build_run(lake, texts, model, max_tokens=32)
    assert answer(run)[0] == ExitCode.COMPLETE
    assert_right(run, texts)
    asked = Counter(row["asked"] for row in run.answers())
    assert asked == {1: 50, 2: 1}


def test_an_answer_cut_twice_is_unknown_because_truncated(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Fake
) -> None:
    fake(cut_on="CUT")
    run = build_run(lake, ["CUT me", *TEXTS[:50]], model, max_tokens=16)
    assert answer(run)[0] == ExitCode.COMPLETE
    assert run.completion().reasons == {"truncated": 1}
    assert max(row["asked"] for row in run.answers()) == 2


def test_a_passing_error_is_asked_once_more(lake: Lake, model: PinnedModel, answer: Answering, fake: Fake) -> None:
    fake(busy_on="BUSY")
    texts = ["BUSY", *TEXTS[:50]]
    run = build_run(lake, texts, model)
    assert answer(run)[0] == ExitCode.COMPLETE
    assert_right(run, texts)


def test_an_unsure_label_is_unknown_where_the_enrichment_sets_a_floor(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Fake
) -> None:
    fake(confidence=0.55)
    run = build_run(lake, TEXTS[:30], model, limits={"confidence_floor": 0.6, "early_stop_requests": 1000})
    assert answer(run)[0] == ExitCode.COMPLETE
    assert run.completion().reasons == {"low_confidence": 30}
    row = run.answers()[0]
    assert (row["values"], row["confidence"]) == (None, '{"sentiment":0.55}')
    assert "sentiment" in row["raw_text"]


def test_a_label_whose_confidence_the_engine_does_not_give_passes_no_floor(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Fake
) -> None:
    run = build_run(lake, TEXTS[:30], model, limits={"confidence_floor": 0.6, "early_stop_requests": 1000})
    assert answer(run)[0] == ExitCode.COMPLETE
    assert run.completion().reasons == {"low_confidence": 30}


def test_a_confidence_at_the_floor_is_kept(lake: Lake, model: PinnedModel, answer: Answering, fake: Fake) -> None:
    fake(confidence=0.6)
    run = build_run(lake, TEXTS[:30], model, limits={"confidence_floor": 0.6})
    assert answer(run)[0] == ExitCode.COMPLETE
    assert run.completion().statuses == {"ok": 30}


def test_the_engine_stays_full_until_the_requests_run_out(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Fake
) -> None:
    """No barrier between parts: while requests are left, every poll finds a full queue."""
    fake(slots=16)
    run = build_run(lake, TEXTS, model)
    assert answer(run)[0] == ExitCode.COMPLETE
    polls = FakeEngine.inside_seen
    until_short = next(n for n, inside in enumerate(polls) if inside < 32)
    assert until_short >= (1500 - 32) // 8
    phases = run.completion().phases
    assert phases.full > 0
    assert phases.total == pytest.approx(phases.load + phases.start + phases.full + phases.tail, abs=0.01)
