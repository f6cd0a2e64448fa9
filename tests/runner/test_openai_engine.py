"""The endpoint engine against a server on loopback that misbehaves to order."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from millrace.answers import AnswerSchema, Reason, Status, parse_answer
from millrace.enrichment import Sampling
from millrace.errors import ConfigError, NotFoundError, UnavailableError
from millrace.plan import PinnedModel
from shard_runner.engines.base import Ask, EngineSpec, Reply
from shard_runner.engines.openai import OpenAIEngine, open_engine
from tests.openai_server import running_server

SCHEMA = AnswerSchema.from_dict(
    {"sentiment": {"labels": ["positive", "neutral", "negative"]}, "topic": {"labels": ["quality", "price", "other"]}}
)
# The production settings scaled down, so that no test waits for a backoff.
QUICK = {
    "backoff_base_s": 0.01,
    "backoff_max_s": 0.02,
    "breaker_pause_s": 0.02,
    "breaker_give_up_s": 1.0,
    "start_deadline_s": 5.0,
}


def make_spec(url: str, form: str = "json", confidence: bool = False, **settings: Any) -> EngineSpec:
    model = PinnedModel(
        name="remote",
        digest="0" * 64,
        engine="openai",
        location="",
        endpoint=url,
        served_name="test-model",
        settings=QUICK | settings,
    )
    return EngineSpec(model, SCHEMA, form, Sampling(), max_tokens=32, want_confidence=confidence)


@contextmanager
def opened(url: str, env: dict[str, str] | None = None, **settings: Any) -> Iterator[OpenAIEngine]:
    engine = open_engine(make_spec(url, **settings), env or {})
    try:
        yield engine
    finally:
        engine.close()


def asks(count: int, text: str = "row") -> list[Ask]:
    return [Ask(f"id-{n}", "You label reviews.", f"Text: {text} {n}", None, 32) for n in range(count)]


def answer_all(engine: OpenAIEngine, wanted: list[Ask], within_s: float = 20.0) -> dict[str, Reply]:
    """What the runner's pump does: keep `capacity` inside, take replies by id."""
    waiting, replies, inside = list(reversed(wanted)), {}, 0
    deadline = time.monotonic() + within_s
    while len(replies) < len(wanted):
        assert time.monotonic() < deadline, f"{len(replies)} of {len(wanted)} replies in time"
        while waiting and inside < engine.capacity:
            engine.submit(waiting.pop())
            inside += 1
        for reply in engine.poll(0.2):
            assert reply.request_id not in replies
            replies[reply.request_id] = reply
            inside -= 1
    return replies


def test_answers_parse_and_are_paired_by_id() -> None:
    with running_server(delay_ms=1) as server, opened(server.url) as engine:
        first, second = answer_all(engine, asks(60)), answer_all(engine, list(reversed(asks(60))))
    assert first.keys() == {f"id-{n}" for n in range(60)}
    assert {i: r.text for i, r in first.items()} == {i: r.text for i, r in second.items()}
    assert len({reply.text for reply in first.values()}) > 3
    for reply in first.values():
        assert parse_answer(reply.text, SCHEMA, reply.finish_reason).status is Status.ok
        assert reply.error is None and reply.prompt_tokens and reply.cached_tokens and reply.completion_tokens
        assert reply.latency_ms is not None


def test_a_request_carries_schema_sampling_and_length() -> None:
    with running_server() as server, opened(server.url) as engine:
        answer_all(engine, asks(1))
    body = server.app.bodies[-1]
    assert (
        body["model"] == "test-model" and body["max_tokens"] == 32 and body["temperature"] == 0.0 and body["seed"] == 0
    )
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA.json_schema()
    assert [message["role"] for message in body["messages"]] == ["system", "user"]


def test_compact_form_uses_vllms_choices_only_where_the_server_is_vllm() -> None:
    with running_server() as server, opened(server.url, form="compact", server="vllm") as engine:
        reply = answer_all(engine, asks(1))["id-0"]
    assert server.app.bodies[-1]["structured_outputs"]["choice"] == SCHEMA.compact_choices()
    assert parse_answer(reply.text, SCHEMA, reply.finish_reason, "compact").status is Status.ok
    with running_server() as server, opened(server.url, form="compact") as engine:
        answer_all(engine, asks(1))
    assert not {"structured_outputs", "response_format"} & server.app.bodies[-1].keys()


def test_settings_shape_the_request_for_servers_with_other_tastes() -> None:
    settings = {
        "system_role": False,
        "max_tokens_field": "max_completion_tokens",
        "structured": False,
        "extra_body": {"seed": None},
    }
    with running_server() as server, opened(server.url, **settings) as engine:
        answer_all(engine, asks(1))
    body = server.app.bodies[-1]
    assert body["messages"] == [{"role": "user", "content": "You label reviews.\n\nText: row 0"}]
    assert body["max_completion_tokens"] == 32
    assert not {"max_tokens", "response_format", "seed"} & body.keys()


def test_confidence_comes_from_logprobs_when_wanted() -> None:
    with running_server() as server, opened(server.url, confidence=True) as engine:
        reply = answer_all(engine, asks(1))["id-0"]
    assert reply.confidence is not None and reply.confidence.keys() == {"sentiment", "topic"}
    assert all(0.8 < value < 1 for value in reply.confidence.values())


def test_the_key_is_sent_and_a_missing_or_wrong_one_fails_at_once_without_being_shown() -> None:
    with running_server(api_key="sk-right") as server:
        with opened(server.url, {"MILLRACE_ENDPOINT_KEY": "sk-right"}) as engine:
            assert answer_all(engine, asks(1))["id-0"].error is None
        with opened(server.url, {"OTHER": "sk-right"}, api_key_env="OTHER") as engine:
            assert answer_all(engine, asks(1))["id-0"].error is None
        with pytest.raises(ConfigError, match="MILLRACE_ENDPOINT_KEY") as caught:
            open_engine(make_spec(server.url), {"MILLRACE_ENDPOINT_KEY": "sk-wrong-secret"})
        assert "wrong-secret" not in str(caught.value)
        with pytest.raises(ConfigError, match="OTHER"):
            open_engine(make_spec(server.url, api_key_env="OTHER"), {})
        with pytest.raises(ConfigError) as caught:
            open_engine(make_spec(server.url), {"MILLRACE_ENDPOINT_KEY": "sk-wröng\nsecret"})
        assert "secret" not in str(caught.value)


def test_a_model_that_is_not_offered_fails_at_once_and_prints_what_is() -> None:
    with running_server(models=("llama", "qwen")) as server:
        with pytest.raises(NotFoundError, match="'llama', 'qwen'"):
            open_engine(make_spec(server.url), {})
        assert server.stats.calls == 0


def test_a_server_without_a_model_list_is_asked_directly() -> None:
    with running_server(lists_models=False) as server, opened(server.url) as engine:
        assert answer_all(engine, asks(1))["id-0"].error is None
    with (
        running_server(lists_models=False, models=("llama",)) as server,
        pytest.raises(ConfigError, match="does not exist"),
    ):
        open_engine(make_spec(server.url), {})


def test_listed_but_not_yet_able_to_serve_is_waited_for() -> None:
    """H1: the list comes at once, then 503 for a while, then a slow first answer, then quick ones."""
    with running_server([{"do": "hang", "seconds": 0.3}], unready_s=0.5) as server, opened(server.url) as engine:
        assert server.stats.answered == 1
        assert answer_all(engine, asks(3))["id-2"].error is None
    assert server.stats.statuses["503"] >= 1


def test_a_server_that_never_gets_ready_is_unavailable_by_the_deadline() -> None:
    with running_server(unready_s=60) as server, pytest.raises(UnavailableError, match=r"after 0.3 s.*503"):
        open_engine(make_spec(server.url, start_deadline_s=0.3), {})


def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    with running_server([{"do": "status", "status": 503, "retry_after": "999999", "times": None}]) as server:
        with pytest.raises(UnavailableError, match=r"asked to wait 999,999 s"):
            open_engine(make_spec(server.url), {})
        assert server.stats.calls == 1


def test_nobody_listening_is_unavailable() -> None:
    with running_server() as server:
        url = server.url
    with pytest.raises(UnavailableError, match="connection"):
        open_engine(make_spec(url, start_deadline_s=0.2), {})


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://x/v1", "http://user:pw@host/v1", "http://host/v1?key=secret", "http://[::1/v1"]
)
def test_an_address_that_cannot_work_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_engine(make_spec(url), {})
    assert "pw@" not in str(caught.value) and "secret" not in str(caught.value)


def test_an_address_without_its_path_says_what_is_missing() -> None:
    with running_server() as server, pytest.raises(ConfigError, match="/v1"):
        open_engine(make_spec(server.url.removesuffix("/v1")), {})


def test_unknown_settings_and_bounds_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'remote'.*block_size"):
        open_engine(make_spec("http://127.0.0.1:1/v1", block_size=32), {})
    with pytest.raises(ConfigError, match="max_tries"):
        open_engine(make_spec("http://127.0.0.1:1/v1", max_tries=0), {})


TRANSIENT = {
    "rate limited": {"do": "status", "status": 429},
    "rate limited with a wait": {"do": "status", "status": 429, "retry_after": "0"},
    "overloaded": {"do": "status", "status": 503},
    "server error": {"do": "status", "status": 500},
    "gateway page": {"do": "page", "status": 502},
    "gateway timeout": {"do": "page", "status": 504},
    "reset before any byte": {"do": "reset"},
    "an error with status 200": {"do": "raw", "body": '{"error": {"message": "busy", "code": 503}}'},
    "not json with status 200": {"do": "raw", "body": "ok"},
    "a login page with status 200": {"do": "page", "status": 200},
    "empty": {"do": "empty", "times": 1},
    "only reasoning": {"do": "reasoning_only", "times": 1},
}


@pytest.mark.parametrize("step", TRANSIENT.values(), ids=TRANSIENT)
def test_what_passes_is_asked_again(step: dict[str, Any]) -> None:
    """Twice (kinds that allow one more try: once), then 200: the answer is there and the row never knew."""
    with running_server([{"do": "answer"}, {"times": 2} | step]) as server, opened(server.url) as engine:
        reply = answer_all(engine, asks(1))["id-0"]
    assert reply.error is None and parse_answer(reply.text, SCHEMA, reply.finish_reason).status is Status.ok
    assert server.stats.calls == 2 + step.get("times", 2)


ONE_ROW = {
    "context length": ({"do": "status", "status": 400, "code": "context_length_exceeded"}, Reason.too_long, 1),
    "bad request": ({"do": "status", "status": 400}, Reason.engine_error, 1),
    "echo": ({"do": "echo"}, Reason.engine_error, 1),
    "refusal": ({"do": "refusal"}, Reason.refused, 1),
    "server error": ({"do": "status", "status": 500}, Reason.server_error, 5),
    "gateway page": ({"do": "page", "status": 502}, Reason.server_error, 5),
    "reset": ({"do": "reset"}, Reason.server_error, 5),
    "rate limited": ({"do": "status", "status": 429}, Reason.rate_limited, 5),
}


@pytest.mark.parametrize(("step", "reason", "tries"), ONE_ROW.values(), ids=ONE_ROW)
def test_a_row_that_always_fails_costs_itself(step: dict[str, Any], reason: Reason, tries: int) -> None:
    """Its neighbours are answered, its tries are bounded, and its error has a name and no text of it."""
    bad = Ask("bad", "You label reviews.", "Text: the poisoned parcel", None, 32)
    with (
        running_server([{"where": "poisoned", "times": None} | step], delay_ms=5) as server,
        opened(server.url, max_concurrency=8) as engine,
    ):
        replies = answer_all(engine, [*asks(40), bad, *asks(400)[40:]])
        asked = sum("poisoned" in body["messages"][-1]["content"] for body in server.app.bodies)
    assert asked == tries
    assert all(reply.error is None for request_id, reply in replies.items() if request_id != "bad")
    error = replies["bad"].error
    assert error is not None and error.reason is reason
    assert replies["bad"].text == "" and "poisoned" not in error.message and "label reviews" not in error.message


def test_the_last_row_of_all_may_be_the_bad_one() -> None:
    """Nothing else succeeds while it fails; the probe does, and so the row is at fault and not the endpoint."""
    bad = Ask("bad", "", "Text: the poisoned parcel", None, 32)
    with (
        running_server([{"do": "status", "status": 500, "where": "poisoned", "times": None}]) as server,
        opened(server.url) as engine,
    ):
        error = answer_all(engine, [bad])["bad"].error
    assert error is not None and error.reason is Reason.server_error


def test_empty_and_reasoning_only_answers_go_to_the_parser_as_such() -> None:
    script = [
        {"do": "empty", "where": "row 0", "times": None},
        {"do": "reasoning_only", "where": "row 1", "times": None},
    ]
    with running_server(script) as server, opened(server.url) as engine:
        replies = answer_all(engine, asks(2))
    assert (replies["id-0"].text, replies["id-0"].error) == ("", None)
    assert replies["id-1"].text == "" and replies["id-1"].reasoning and replies["id-1"].error is None
    assert server.stats.calls == 1 + 2 + 2


def test_a_cut_answer_says_so() -> None:
    with running_server([{"do": "answer"}, {"do": "cut"}]) as server, opened(server.url) as engine:
        reply = answer_all(engine, asks(1))["id-0"]
    assert reply.finish_reason == "length"
    assert parse_answer(reply.text, SCHEMA, reply.finish_reason).reason is Reason.truncated


def test_a_whole_second_that_was_asked_for_is_waited() -> None:
    step = {"do": "status", "status": 429, "retry_after": "1"}
    with running_server([{"do": "answer"}, step]) as server, opened(server.url) as engine:
        started = time.monotonic()
        answer_all(engine, asks(1))
        assert time.monotonic() - started >= 1.0
    assert server.stats.calls == 3


def test_an_outage_pauses_all_calls_and_loses_no_row(caplog: pytest.LogCaptureFixture) -> None:
    script = [{"do": "answer", "times": 30}, {"do": "status", "status": 500, "times": 20}]
    with running_server(script, delay_ms=2) as server, opened(server.url) as engine, caplog.at_level(logging.WARNING):
        replies = answer_all(engine, asks(120))
        assert engine.slots >= 1
    assert all(reply.error is None for reply in replies.values())
    assert [record.message.split(": ")[-1] for record in caplog.records][-1].endswith("answers again")


DEAD = {
    "refuses all": {"do": "status", "status": 429},
    "overloaded": {"do": "status", "status": 503},
    "gateway pages for ever": {"do": "page", "status": 502},
    "resets": {"do": "reset"},
    "not json": {"do": "raw", "body": "ok"},
}


@pytest.mark.parametrize("step", DEAD.values(), ids=DEAD)
def test_an_endpoint_that_stays_down_ends_in_unavailable_and_fails_no_row(step: dict[str, Any]) -> None:
    with (
        running_server([{"do": "answer", "times": 20}, {"times": None} | step]) as server,
        opened(server.url) as engine,
    ):
        replies: dict[str, Reply] = {}
        with pytest.raises(UnavailableError) as caught:
            for ask in asks(40):
                engine.submit(ask)
            deadline = time.monotonic() + 15
            while time.monotonic() < deadline:
                replies |= {reply.request_id: reply for reply in engine.poll(0.2)}
        with pytest.raises(UnavailableError):
            engine.submit(asks(1)[0])
    assert all(reply.error is None for reply in replies.values()) and len(replies) == 19
    assert "row" not in str(caught.value) and server.url in str(caught.value)


def test_a_wait_beyond_the_budget_in_the_middle_of_work_fails_no_row() -> None:
    """A daily quota is used up while other calls still come back: exit 3 at once, and every row without an answer stays unasked."""
    script = [{"do": "answer", "times": 30}, {"do": "status", "status": 429, "retry_after": "86400", "times": None}]
    with running_server(script, delay_ms=5) as server, opened(server.url) as engine:
        replies: list[Reply] = []
        with pytest.raises(UnavailableError, match="asked to wait 86,400 s"):
            for ask in asks(80):
                engine.submit(ask)
            while True:
                replies += engine.poll(0.2)
    assert len(replies) == 29 and all(reply.error is None for reply in replies)
    assert server.stats.calls < 80


def test_a_few_bad_rows_in_a_hundred_do_not_open_the_breaker(caplog: pytest.LogCaptureFixture) -> None:
    """Rows 37, 67, 97... fail at each of their five tries: as calls they would be more than a twentieth of all."""
    script = [{"do": "status", "status": 500, "where": f"row {n}7 ", "times": None} for n in range(3, 20, 3)]
    wanted = [Ask(f"id-{n}", "", f"row {n} ", None, 32) for n in range(500)]
    with (
        caplog.at_level(logging.WARNING),
        running_server(script, delay_ms=5) as server,
        opened(server.url, max_concurrency=8) as engine,
    ):
        replies = answer_all(engine, wanted)
    assert sum(reply.error is not None for reply in replies.values()) == 6
    assert caplog.records == []


def test_a_key_that_is_revoked_midway_is_a_configuration_error() -> None:
    script = [{"do": "answer", "times": 5}, {"do": "status", "status": 401, "times": None}]
    with running_server(script) as server, opened(server.url) as engine, pytest.raises(ConfigError, match="forbidden"):
        answer_all(engine, asks(20))


def test_a_call_that_hangs_is_given_up_and_asked_again_without_piling_up() -> None:
    script = [{"do": "answer"}, {"do": "hang", "seconds": 0.6}]
    with running_server(script) as server, opened(server.url, read_timeout_s=0.2) as engine:
        started = time.monotonic()
        reply = answer_all(engine, asks(1))["id-0"]
        took = time.monotonic() - started
    assert reply.error is None
    assert took >= 0.4, "the second try leaves the server as long again"


def test_a_closed_idle_connection_costs_no_row() -> None:
    """H4: the server closes idle connections after 0.2 s, the client pauses longer and keeps them for 3 s."""
    with running_server(keepalive_s=0.2) as server, opened(server.url, breaker_error_share=0.0) as engine:
        answer_all(engine, asks(8))
        time.sleep(0.5)
        replies = answer_all(engine, asks(8))
    assert all(reply.error is None for reply in replies.values())


def test_connections_are_kept() -> None:
    with running_server() as server, opened(server.url, initial_concurrency=4, max_concurrency=4) as engine:
        answer_all(engine, asks(200))
    assert server.stats.connections <= 6


def test_concurrency_finds_a_hard_capacity_from_below() -> None:
    with running_server(capacity=12, delay_ms=20) as server, opened(server.url) as engine:
        replies = answer_all(engine, asks(400))
    assert all(reply.error is None for reply in replies.values())
    assert server.stats.max_in_flight == 12


def test_abort_forgets_what_is_inside_and_the_engine_goes_on() -> None:
    with running_server(delay_ms=30) as server, opened(server.url) as engine:
        for ask in asks(30, "old"):
            engine.submit(ask)
        engine.abort()
        new = [Ask(f"new-{n}", "", f"Text {n}", None, 32) for n in range(5)]
        assert answer_all(engine, new).keys() == {ask.request_id for ask in new}
        assert engine.poll(0.1) == []


def test_closing_twice_and_with_work_inside_is_fine() -> None:
    with running_server([{"do": "answer"}, {"do": "hang", "seconds": 30, "times": None}]) as server:
        engine = open_engine(make_spec(server.url), {})
        for ask in asks(20):
            engine.submit(ask)
        started = time.monotonic()
        engine.close()
        engine.close()
        assert time.monotonic() - started < 5


def test_nothing_of_a_row_or_the_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    script = [
        {"do": "echo", "where": "row 1", "times": None},
        {"do": "status", "status": 500, "where": "row 2", "times": None},
    ]
    key = {"MILLRACE_ENDPOINT_KEY": "sk-very-secret"}
    with caplog.at_level(logging.INFO), running_server(script) as server, opened(server.url, key) as engine:
        answer_all(engine, asks(30))
        described = json.dumps(engine.describe())
    logged = " ".join(record.getMessage() for record in caplog.records) + described
    assert "row" not in logged and "secret" not in logged and "label reviews" not in logged


def test_describe_says_what_is_worth_knowing() -> None:
    with running_server() as server, opened(server.url) as engine:
        answer_all(engine, asks(3))
        described = engine.describe()
    assert described["endpoint"] == server.url and described["model"] == "test-model"
    assert described["calls"] == "answered 3"
