"""Preflight: what stops a plan before an engine starts, what a verdict says, and how long it stands."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from millrace.errors import ConfigError, UnusableError
from millrace.lake import Lake
from millrace.layout import verdict_file
from millrace.plan import PinnedModel
from millrace.records import Verdict, utc_now
from shard_runner import probe
from shard_runner.guard import Signals
from shard_runner.probe import Probe, verdict_key
from tests.runner.build import Run, build_run
from tests.runner.fake_engine import LABELS, FakeEngine, WordTokenizer, right_label

TEXTS = [f"golden sentence {n}" for n in range(20)]
GOLDEN = [{"text": text, "expected": {"sentiment": right_label(text)}} for text in TEXTS]


class Chat(WordTokenizer):
    """A chat template that writes both texts; stands in for the model's own, which the fake model lacks."""

    hf = None

    def __init__(self, folder: Any) -> None:
        super().__init__()

    def render(self, system: str, user: str) -> str:
        return f"{system}\n{user}"


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ChatTokenizer", Chat)
    monkeypatch.setattr(probe, "compile_grammar", lambda *args: None)


def run_probe(run: Run, engine: bool = True) -> str:
    return Probe(run.lake, run.paths, None, Signals()).run(engine=engine)


def stored(run: Run) -> Verdict:
    model = run.plan.decision.models[run.plan.decision.default_model]
    path = verdict_file(run.plan.decision.fingerprints[model.name], verdict_key(run.plan, model))
    return Verdict.load(run.lake, path)


def test_a_passing_model_gets_a_verdict_with_accuracy_and_speed(lake: Lake, model: PinnedModel) -> None:
    wrong = {"text": "golden sentence wrong", "expected": {"sentiment": "no such label"}}
    run = build_run(lake, ["a", "b"], model, golden=[*GOLDEN[:19], wrong])
    assert "passes preflight" in run_probe(run)
    verdict = stored(run)
    assert (verdict.passed, verdict.golden_rows, verdict.usable_rate, verdict.accuracy) == (True, 20, 1.0, 0.95)
    assert list(verdict.latency_ms) == ["p50", "p90", "p99"]
    assert verdict.rows_per_s > 0
    assert verdict.tokens_per_s > verdict.rows_per_s


def test_a_standing_verdict_starts_no_engine(lake: Lake, model: PinnedModel) -> None:
    run = build_run(lake, ["a"], model, golden=GOLDEN)
    run_probe(run)
    assert "no engine started" in run_probe(run)
    assert FakeEngine.opened == 1


def test_another_image_asks_again(lake: Lake, model: PinnedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run = build_run(lake, ["a"], model, golden=GOLDEN)
    run_probe(run)
    monkeypatch.setenv("MILLRACE_IMAGE", "registry/vllm@sha256:1")
    run_probe(run)
    assert FakeEngine.opened == 2


def test_the_engine_is_watched_for_as_long_as_the_model_says(
    lake: Lake, model: PinnedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the watchdog does is seen in tests/runner/test_survival.py."""
    watched: list[float] = []

    def watch(engine: Any, seconds: float) -> Any:
        watched.append(seconds)
        return engine

    monkeypatch.setattr(probe, "Watched", watch)
    run_probe(build_run(lake, ["a"], model.model_copy(update={"settings": {"step_timeout_s": 7}}), golden=GOLDEN))
    assert watched == [7.0]


@pytest.mark.parametrize(("garbled", "passes"), [(2, True), (3, False)])
def test_nine_of_ten_golden_answers_must_be_usable(
    garbled: int, passes: bool, lake: Lake, model: PinnedModel, fake: Callable[..., None]
) -> None:
    fake(garble_on="GARBLED")
    golden = [{**row, "text": f"GARBLED {row['text']}"} if n < garbled else row for n, row in enumerate(GOLDEN)]
    run = build_run(lake, ["a"], model, golden=golden)
    if passes:
        run_probe(run)
    else:
        with pytest.raises(UnusableError, match="85% of 20 golden prompts usable, 3 not_json"):
            run_probe(run)
    assert stored(run).passed == passes
    assert stored(run).reasons == {"not_json": garbled}


def test_a_failed_verdict_does_not_stand(lake: Lake, model: PinnedModel, fake: Callable[..., None]) -> None:
    run = build_run(lake, ["a"], model, golden=GOLDEN)
    fake(garble_on="golden")
    with pytest.raises(UnusableError):
        run_probe(run)
    fake()
    assert "passes preflight" in run_probe(run)


def test_accuracy_gates_only_where_the_enrichment_sets_a_bound(lake: Lake, model: PinnedModel) -> None:
    wrong = [
        {**row, "expected": {"sentiment": LABELS[(LABELS.index(right_label(row["text"])) + 1) % 3]}} for row in GOLDEN
    ]
    assert "0% of 20 labels right" in run_probe(build_run(lake, ["a"], model, golden=wrong))
    bound = build_run(lake, ["a"], model, golden=wrong[:19], preflight={"min_accuracy": 0.5})
    with pytest.raises(UnusableError, match="min_accuracy"):
        run_probe(bound)


def test_an_endpoints_verdict_stands_for_an_hour(lake: Lake, model: PinnedModel) -> None:
    endpoint = model.model_copy(update={"endpoint": "http://host/v1"})
    run = build_run(lake, ["a"], model, golden=GOLDEN)
    run_probe(run)
    old = stored(run).model_copy(update={"at": utc_now() - timedelta(minutes=61)})
    fresh = stored(run).model_copy(update={"at": utc_now() - timedelta(minutes=59)})
    assert probe._stale(old, endpoint)
    assert not probe._stale(fresh, endpoint)
    assert not probe._stale(old, model)


def test_the_first_stage_starts_no_engine(lake: Lake, model: PinnedModel) -> None:
    assert "agree" in run_probe(build_run(lake, ["a"], model, golden=GOLDEN), engine=False)
    assert FakeEngine.opened == 0


def test_a_chat_template_that_drops_the_system_text_is_named(
    lake: Lake, model: PinnedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chat, "render", lambda self, system, user: user)
    with pytest.raises(ConfigError, match="chat template of model 'tiny'"):
        run_probe(build_run(lake, ["a"], model, golden=GOLDEN))


def test_a_prompt_beyond_the_context_is_refused_before_the_engine(lake: Lake, model: PinnedModel) -> None:
    run = build_run(lake, ["a"], model, golden=GOLDEN, system="word " * 600)
    with pytest.raises(ConfigError, match="context of 512"):
        run_probe(run)
    assert FakeEngine.opened == 0


def test_a_schema_that_the_grammar_backend_refuses_is_named(
    lake: Lake, model: PinnedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("unsupported keyword")

    monkeypatch.setattr(probe, "compile_grammar", refuse)
    with pytest.raises(ConfigError, match=r"enrichment 'tiny'.*unsupported keyword"):
        run_probe(build_run(lake, ["a"], model, golden=GOLDEN))


def test_a_prompt_without_golden_rows_is_a_configuration_error(lake: Lake, model: PinnedModel) -> None:
    with pytest.raises(ConfigError, match=r"golden\.jsonl"):
        run_probe(build_run(lake, ["a"], model))
