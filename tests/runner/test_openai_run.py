"""The whole runner on an endpoint: same parts, records and parser as with any engine, and its exit codes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.errors import ConfigError, ExitCode, UnusableError
from millrace.lake import Lake
from millrace.plan import PinnedModel
from millrace.records import Outcome
from shard_runner.guard import Signals
from shard_runner.probe import Probe
from tests.openai_server import Script, running_server
from tests.openai_server.server import answer as right_answer
from tests.runner.build import SHARD, Run, build_run
from tests.runner.conftest import Answering

QUICK: dict[str, Any] = {
    "backoff_base_s": 0.01,
    "backoff_max_s": 0.02,
    "breaker_pause_s": 0.02,
    "breaker_give_up_s": 0.5,
    "start_deadline_s": 1.0,
}
TEXTS = [f"review number {n} about a thing" for n in range(900)]


def endpoint(url: str, **settings: Any) -> PinnedModel:
    return PinnedModel(
        name="remote",
        digest="d" * 64,
        engine="openai",
        location="",
        endpoint=url,
        served_name="test-model",
        settings=QUICK | settings,
        context_tokens=512,
    )


def assert_right(run: Run, bodies: list[dict[str, Any]]) -> None:
    """Every request is answered once, with what the server says to its own prompt."""
    said = {
        body["messages"][-1]["content"]: json.loads(right_answer(body, body["messages"][-1]["content"]))
        for body in bodies
    }
    rows = {row["request_id"]: row for row in run.answers()}
    assert len(rows) == len(run.answers()) == run.shard.requests
    for request in run.lake.parquet(run.shard.files[0].path).read().to_pylist():
        text = json.loads(request["input"])["text"]
        row = rows[request["request_id"]]
        assert row["status"] == "ok" and json.loads(row["values"]) == said[f"Sentence: {text}\nLabel:"]


def test_a_shard_is_answered_through_every_kind_of_transient_trouble(lake: Lake, answer: Answering) -> None:
    script: list[dict[str, Any]] = []
    for trouble in (
        {"do": "status", "status": 429, "retry_after": "0"},
        {"do": "status", "status": 503},
        {"do": "page", "status": 502},
        {"do": "reset"},
        {"do": "empty"},
        {"do": "reasoning_only"},
        {"do": "cut"},
        {"do": "raw", "body": "{}"},
    ):
        script += [{"do": "answer", "times": 100}, trouble]
    with running_server(script) as server:
        run = build_run(lake, TEXTS, endpoint(server.url))
        code, message = answer(run)
        bodies = list(server.app.bodies)
    assert code == ExitCode.COMPLETE, message
    assert_right(run, bodies)
    assert run.completion().statuses == {"ok": 900}
    assert run.completion().tokens.cached > 0
    assert sum(row["asked"] == 2 for row in run.answers()) == 1, "the cut one was asked again by the runner"


def test_the_completion_record_says_what_the_endpoint_did_until_the_end(lake: Lake, answer: Answering) -> None:
    script = [{"do": "answer", "times": 50}, {"do": "status", "status": 503, "retry_after": "0"}]
    with running_server(script) as server:
        run = build_run(lake, TEXTS[:200], endpoint(server.url))
        assert answer(run)[0] == ExitCode.COMPLETE
    assert run.completion().engine["calls"] == "answered 200, overloaded 1"


def test_an_endpoint_that_dies_midway_is_exit_3_and_only_the_rest_is_asked_later(lake: Lake, answer: Answering) -> None:
    script = [{"do": "answer", "times": 701}, {"do": "status", "status": 503, "times": None}]
    with running_server(script) as server:
        run = build_run(lake, TEXTS, endpoint(server.url))
        code, message = answer(run, "a1")
        assert code == ExitCode.UNAVAILABLE and server.url in message
        outcome = Outcome.load(lake, f"{run.paths.shard_attempt(SHARD, 'a1')}/outcome.json")
        assert outcome.answered == 700
        server.app.script = Script()
        server.app.bodies.clear()
        code, message = answer(run, "a2")
        assert code == ExitCode.COMPLETE, message
        assert server.stats.statuses["200"] == 701 + 1 + 200, "a probe each, and no row twice"
    assert run.completion().resumed == 700
    assert run.completion().statuses == {"ok": 900}


@pytest.mark.parametrize(
    ("server_options", "settings", "code", "word"),
    [
        ({"models": ("llama",)}, {}, ExitCode.CONFIG, "'llama'"),
        ({"api_key": "sk-1"}, {}, ExitCode.CONFIG, "MILLRACE_ENDPOINT_KEY"),
        ({}, {"no_such_setting": 1}, ExitCode.CONFIG, "no_such_setting"),
        ({"unready_s": 60}, {}, ExitCode.UNAVAILABLE, "503"),
    ],
)
def test_what_cannot_start_says_whose_fault_it_is(
    server_options: dict[str, Any], settings: dict[str, Any], code: ExitCode, word: str, lake: Lake, answer: Answering
) -> None:
    with running_server(**server_options) as server:
        run = build_run(lake, TEXTS[:10], endpoint(server.url, **settings))
        found, message = answer(run)
    assert found == code and word in message
    assert not lake.exists(run.paths.complete(SHARD))


def test_a_model_that_only_refuses_stops_early(lake: Lake, answer: Answering) -> None:
    with running_server([{"do": "refusal", "times": None}]) as server:
        run = build_run(lake, TEXTS, endpoint(server.url), limits={"early_stop_requests": 50})
        code, message = answer(run)
        assert code == ExitCode.UNUSABLE and "refused" in message
        assert server.stats.calls < 300


GOLDEN = [{"text": f"golden sentence {n}", "expected": {"sentiment": "positive"}} for n in range(20)]


def test_the_probe_of_an_endpoint_passes_and_its_verdict_stands(lake: Lake) -> None:
    with running_server() as server:
        run = build_run(lake, TEXTS[:10], endpoint(server.url), golden=GOLDEN)
        assert "100%" in Probe(lake, run.paths, None, Signals()).run()
        calls = server.stats.calls
        assert calls == 21
        assert "no engine started" in Probe(lake, run.paths, None, Signals()).run()
        assert server.stats.calls == calls


def test_the_probe_of_an_endpoint_that_answers_nonsense_fails(lake: Lake) -> None:
    with running_server([{"do": "cut", "times": None}]) as server:
        run = build_run(lake, TEXTS[:10], endpoint(server.url), golden=GOLDEN)
        with pytest.raises(UnusableError, match="truncated"):
            Probe(lake, run.paths, None, Signals()).run()


def test_the_probe_finds_a_wrong_model_name(lake: Lake) -> None:
    with running_server(models=("llama",)) as server:
        run = build_run(lake, TEXTS[:10], endpoint(server.url), golden=GOLDEN)
        with pytest.raises(ConfigError, match="'llama'"):
            Probe(lake, run.paths, None, Signals()).run()
