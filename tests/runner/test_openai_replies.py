"""Every odd reply has a name, and nothing of the prompt or the key is quoted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.plan import ENDPOINT_ASKS
from shard_runner.engines.http.replies import POLICIES, Kind, read_reply, redact
from shard_runner.engines.http.settings import EndpointSettings

JSON = {"content-type": "application/json"}


def completion(finish: str = "stop", **message: object) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}]}).encode()


def error(message: str = "", **fields: object) -> bytes:
    return json.dumps({"error": {"message": message, **fields}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, completion(content='{"a": 1}'), Kind.answered),
        (200, completion(content=[{"type": "text", "text": "yes"}]), Kind.answered),
        (200, completion(content=""), Kind.empty),
        (200, completion(content=None), Kind.empty),
        (200, completion(content=" \n "), Kind.empty),
        (200, completion(content=None, reasoning_content="so..."), Kind.reasoning_only),
        (200, completion(content="", reasoning="so..."), Kind.reasoning_only),
        (200, completion(content=None, refusal="I can't"), Kind.refused),
        (200, completion(content="", finish="content_filter"), Kind.refused),
        (200, b"", Kind.not_json),
        (200, b"null", Kind.not_json),
        (200, b"[]", Kind.not_json),
        (200, b"ok", Kind.not_json),
        (200, b'{"choices": []}', Kind.not_json),
        (200, b'{"choices": [{"message": {"content": 7}}]}', Kind.not_json),
        (200, b'{"choices": [{"message": {"content": "a"}', Kind.not_json),
        (200, b"[" * 100_000, Kind.not_json),
        (200, b"<html>please log in</html>", Kind.gateway_page),
        (200, error("too many", code="rate_limit_exceeded"), Kind.rate_limited),
        (200, error("too many", code=429), Kind.rate_limited),
        (200, error("boom"), Kind.server_error),
        (200, b'{"object": "error", "message": "busy", "code": 503}', Kind.overloaded),
        (200, b'{"error": "overloaded"}', Kind.server_error),
        (429, error("slow down"), Kind.rate_limited),
        (429, b"slow down", Kind.rate_limited),
        (429, error("nothing left", code="insufficient_quota"), Kind.no_quota),
        (402, b"", Kind.no_quota),
        (503, error("loading"), Kind.overloaded),
        (529, b"", Kind.overloaded),
        (500, error("boom"), Kind.server_error),
        (500, b"", Kind.server_error),
        (502, b"<html>Bad Gateway</html>", Kind.gateway_page),
        (502, b"bad gateway", Kind.gateway_page),
        (503, b"<html>Service Unavailable</html>", Kind.gateway_page),
        (504, b"<html>Gateway Time-out</html>", Kind.timeout),
        (408, b"", Kind.timeout),
        (413, b"", Kind.too_long),
        (400, error("This model's maximum context length is 2048 tokens. However, you requested 3000"), Kind.too_long),
        (400, error("...", code="context_length_exceeded"), Kind.too_long),
        (422, error("`inputs` tokens must be less or equal to 4096"), Kind.too_long),
        (400, error("filtered", code="content_filter"), Kind.refused),
        (400, error("temperature is out of range"), Kind.bad_request),
        (400, error(None, type=None), Kind.bad_request),  # type: ignore[arg-type]
        (422, b"", Kind.bad_request),
        (404, error("The model `x` does not exist."), Kind.wrong_model),
        (404, b'{"detail": "Not Found"}', Kind.wrong_url),
        (404, b"<html>model zoo</html>", Kind.wrong_url),
        (405, b"", Kind.wrong_url),
        (307, b"", Kind.wrong_url),
        (401, error("no key"), Kind.forbidden),
        (403, b"<html>blocked</html>", Kind.forbidden),
    ],
)
def test_each_reply_has_its_name(status: int, body: bytes, kind: Kind) -> None:
    assert read_reply(status, {}, body).kind is kind


def test_every_kind_has_a_policy_and_only_what_serves_goes_to_the_parser() -> None:
    assert set(POLICIES) == set(Kind)
    assert {kind for kind, policy in POLICIES.items() if policy.reason is None and not policy.fatal} == {
        Kind.answered,
        Kind.empty,
        Kind.reasoning_only,
    }


def test_the_page_lists_every_kind_and_setting() -> None:
    page = (Path(__file__).parents[2] / "docs" / "endpoints.md").read_text()
    names = {*Kind, *EndpointSettings.model_fields}
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_the_fingerprint_knows_the_true_defaults_of_the_settings_it_counts() -> None:
    defaults = {name: EndpointSettings.model_fields[name].default for name in ENDPOINT_ASKS}
    assert defaults == ENDPOINT_ASKS


def test_reasoning_is_kept_apart_from_the_answer() -> None:
    received = read_reply(200, JSON, completion(content="negative", reasoning_content="positive? no"))
    assert (received.text, received.reasoning) == ("negative", "positive? no")


def test_usage_and_finish_reason_are_read_and_may_be_absent() -> None:
    usage = {"prompt_tokens": 150, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 128}}
    body = json.dumps({"choices": [{"message": {"content": "x"}, "finish_reason": "length"}], "usage": usage}).encode()
    received = read_reply(200, JSON, body)
    assert (received.prompt_tokens, received.cached_tokens, received.completion_tokens) == (150, 128, 4)
    assert received.finish_reason == "length"
    bare = read_reply(200, JSON, b'{"choices": [{"message": {"content": "x"}}], "usage": null}')
    assert (bare.kind, bare.prompt_tokens, bare.finish_reason) == (Kind.answered, None, None)


@pytest.mark.parametrize("status", [429, 503, 500])
def test_a_wait_is_read_from_any_refusal(status: int) -> None:
    assert read_reply(status, {"retry-after": "1.5"}, b"").retry_after == 2.0


TEXT = "My neighbour Erna Muster, Hauptstraße 7, says: “it broke”.\nNever again"
KEY = "sk-abcdefghijklmnop"


@pytest.mark.parametrize(
    "body",
    [
        error(f"cannot read '{TEXT}'"),
        error(f"cannot read {json.dumps(TEXT)}"),
        error("bad request", input=TEXT),
        json.dumps({"detail": [{"loc": ["body"], "input": {"messages": [{"content": TEXT}]}}]}).encode(),
        f"<html><body>blocked: {TEXT}</body></html>".encode(),
        f"plain {TEXT} {KEY}".encode(),
        error(f"Incorrect API key provided: {KEY}"),
    ],
)
@pytest.mark.parametrize("status", [200, 400, 401, 500, 502])
def test_neither_prompt_nor_key_is_quoted(status: int, body: bytes) -> None:
    detail = read_reply(status, {}, body, [f"Label this: {TEXT}", KEY]).detail
    assert str(status) in detail and len(detail) <= 220
    for private in ("Erna", "Hauptstr", "it broke", "Never", "abcdef"):
        assert private not in detail


def test_the_message_of_an_error_survives_redaction() -> None:
    detail = read_reply(400, JSON, error("max_tokens must be at least 1, got 0"), [TEXT, KEY]).detail
    assert detail == "status 400: max_tokens must be at least 1, got 0"


def test_a_quote_in_another_script_is_hidden_too() -> None:
    said = redact('cannot parse "酒店的服务态度非常差" here', ["评论：酒店的服务态度非常差，不会再来"])
    assert said == 'cannot parse "…" here'


def test_redaction_of_a_huge_body_against_a_huge_prompt_is_bounded() -> None:
    assert len(redact("x y " * 1_000_000, ["lorem ipsum " * 10_000])) <= 200
