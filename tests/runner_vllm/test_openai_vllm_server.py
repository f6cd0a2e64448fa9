"""The endpoint engine against a real OpenAI-compatible server: `vllm serve` with the demo model on the CPU."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.answers import AnswerSchema, Reason, Status, parse_answer
from millrace.enrichment import Sampling
from millrace.errors import ConfigError, NotFoundError
from millrace.plan import PinnedModel
from shard_runner.engines.base import Ask, EngineSpec, Reply
from shard_runner.engines.openai import open_engine

MODELS = Path(__file__).resolve().parents[2] / ".millrace" / "models" / "smollm2-135m-instruct"
SCHEMA = AnswerSchema.from_dict(
    {"sentiment": {"labels": ["positive", "neutral", "negative"]}, "topic": {"labels": ["quality", "price", "other"]}}
)
SYSTEM = "You label the sentiment and the topic of a review sentence."
TEXTS = [
    "Great sound.",
    "Broke after a day.",
    "Too expensive for what it is.",
    "It arrived on Monday.",
    "Love it!",
    "Meh.",
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A running server; its log is shown when it does not come up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = next(path for path in MODELS.iterdir() if (path / "config.json").exists())
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += [
        "--host",
        "127.0.0.1",
        "--served-model-name",
        "smollm2",
        "--max-model-len",
        "512",
        "--api-key",
        "sk-local",
    ]
    command += ["--enforce-eager", "--block-size", "32", "--max-num-seqs", "16"]
    # As docs/endpoints.md says: the grammar otherwise lets the model write white space until its tokens end, and whether it
    # does depends on what it is batched with.
    command += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            wait_until_healthy(server, port, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            # The engine is a child of the server: the whole group goes.
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def wait_until_healthy(server: subprocess.Popen[bytes], port: int, log: Any) -> None:
    deadline = time.monotonic() + 400  # it takes 40 s on two idle cores, three times that on busy ones
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except OSError:
            time.sleep(0.5)
    log.seek(0)
    pytest.fail(f"vllm serve did not come up:\n{log.read()[-3000:]}")


def make_spec(url: str, form: str = "json", served_name: str = "smollm2", confidence: bool = False) -> EngineSpec:
    model = PinnedModel(
        name="demo",
        digest="0" * 64,
        engine="openai",
        location="",
        endpoint=url,
        served_name=served_name,
        settings={"server": "vllm", "initial_concurrency": 4, "max_concurrency": 16},
        context_tokens=512,
    )
    return EngineSpec(model, SCHEMA, form, Sampling(), max_tokens=48, want_confidence=confidence)


def answers(spec: EngineSpec, asks: list[Ask]) -> dict[str, Reply]:
    engine = open_engine(spec, {"MILLRACE_ENDPOINT_KEY": "sk-local"})
    replies: dict[str, Reply] = {}
    try:
        for ask in asks:
            engine.submit(ask)
        while len(replies) < len(asks):
            replies |= {reply.request_id: reply for reply in engine.poll(1.0)}
    finally:
        engine.close()
    return replies


def asks(max_tokens: int = 48) -> list[Ask]:
    return [Ask(text, SYSTEM, f"Sentence: {text}", None, max_tokens) for text in TEXTS]


def test_json_answers_keep_to_the_schema_and_count_tokens(url: str) -> None:
    replies = answers(make_spec(url, confidence=True), asks())
    assert replies.keys() == set(TEXTS)
    for reply in replies.values():
        assert reply.error is None
        parsed = parse_answer(reply.text, SCHEMA, reply.finish_reason)
        assert parsed.status is Status.ok, parsed.reason
        assert reply.prompt_tokens and reply.completion_tokens and reply.finish_reason == "stop"
        assert reply.confidence is not None and reply.confidence.keys() == {"sentiment", "topic"}
        assert all(0 < value <= 1 for value in reply.confidence.values())


def test_compact_answers_are_one_of_the_choices(url: str) -> None:
    replies = answers(make_spec(url, form="compact", confidence=True), asks())
    assert {reply.text for reply in replies.values()} <= set(SCHEMA.compact_choices())
    assert max(reply.completion_tokens or 0 for reply in replies.values()) < 16
    assert all(reply.confidence and reply.confidence.keys() == {"sentiment", "topic"} for reply in replies.values())


def test_a_text_longer_than_the_context_costs_itself(url: str) -> None:
    long = Ask("long", SYSTEM, "word " * 2000, None, 48)
    replies = answers(make_spec(url), [*asks(), long])
    error = replies.pop("long").error
    assert error is not None and error.reason is Reason.too_long
    assert all(reply.error is None for reply in replies.values())


def test_an_answer_cut_short_says_so(url: str) -> None:
    replies = answers(make_spec(url), asks(max_tokens=3))
    for reply in replies.values():
        assert reply.finish_reason == "length"
        assert parse_answer(reply.text, SCHEMA, reply.finish_reason).reason is Reason.truncated


def test_a_wrong_name_and_a_wrong_key_fail_at_once(url: str) -> None:
    with pytest.raises(NotFoundError, match="it offers 'smollm2'"):
        open_engine(make_spec(url, served_name="other"), {"MILLRACE_ENDPOINT_KEY": "sk-local"})
    with pytest.raises(ConfigError, match="forbidden"):
        open_engine(make_spec(url), {})
