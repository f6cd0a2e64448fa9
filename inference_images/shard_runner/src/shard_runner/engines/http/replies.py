"""What an endpoint said: every kind of reply has a name, and every name its policy (docs/endpoints.md has the table).

`read_reply` turns status, headers and body of one HTTP answer into a `Received`; nothing here opens a socket.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from millrace.answers import Reason
from shard_runner.engines.http.retry_after import retry_after_s


class Kind(StrEnum):
    """The closed list of what can come back from one call."""

    answered = "answered"
    refused = "refused"
    empty = "empty"
    reasoning_only = "reasoning_only"
    not_json = "not_json"
    rate_limited = "rate_limited"
    overloaded = "overloaded"
    server_error = "server_error"
    gateway_page = "gateway_page"
    timeout = "timeout"
    connection = "connection"
    too_long = "too_long"
    bad_request = "bad_request"
    wrong_model = "wrong_model"
    wrong_url = "wrong_url"
    forbidden = "forbidden"
    no_quota = "no_quota"


@dataclass(frozen=True)
class Policy:
    """What follows from a kind. `tries` counts the first one; None means as many as the settings allow."""

    meaning: str
    reason: Reason | None  # of the row, when tries are spent; None: the text goes to the parser
    tries: int | None = 1
    serving: bool = False  # the endpoint is able to answer: says nothing against it
    congestion: bool = False  # lowers the concurrency
    breaker: bool = False  # counts as an error of the endpoint
    fatal: bool = False  # no call can succeed until a person changes something (exit 2)


POLICIES: dict[Kind, Policy] = {
    Kind.answered: Policy("a completion with text", None, serving=True),
    Kind.refused: Policy("the model or a content filter declined", Reason.refused, serving=True),
    Kind.empty: Policy("a completion without text", None, tries=2, serving=True),
    Kind.reasoning_only: Policy("reasoning, and no answer after it", None, tries=2, serving=True),
    Kind.not_json: Policy("status 200, and not a completion", Reason.server_error, tries=None, breaker=True),
    Kind.rate_limited: Policy("429", Reason.rate_limited, tries=None, congestion=True),
    Kind.overloaded: Policy("503 or 529", Reason.server_error, tries=None, congestion=True),
    Kind.server_error: Policy("500 and other 5xx", Reason.server_error, tries=None, breaker=True),
    Kind.gateway_page: Policy(
        "502, or an HTML page of something in between", Reason.server_error, tries=None, breaker=True
    ),
    Kind.timeout: Policy("408, 504, or no answer in time", Reason.timeout, tries=None, congestion=True, breaker=True),
    Kind.connection: Policy("no connection, or reset before the answer", Reason.server_error, tries=None, breaker=True),
    Kind.too_long: Policy("413, or 400 for the context length", Reason.too_long, serving=True),
    Kind.bad_request: Policy("400, 422 and other 4xx for this request", Reason.engine_error, serving=True),
    Kind.wrong_model: Policy("404 for the model's name", None, fatal=True),
    Kind.wrong_url: Policy("3xx, 404 or 405 for the address", None, fatal=True),
    Kind.forbidden: Policy("401 or 403", None, fatal=True),
    Kind.no_quota: Policy("402, or 429 because nothing is left to spend", None, fatal=True),
}


@dataclass(frozen=True)
class Received:
    """One call's outcome. `detail` is a bounded, redacted piece of what was said, fit for logs."""

    kind: Kind
    detail: str = ""
    text: str = ""
    reasoning: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    tokens: Sequence[tuple[str, float]] | None = None  # (token, its probability), in order
    retry_after: float | None = None  # seconds

    @property
    def policy(self) -> Policy:
        return POLICIES[self.kind]


_BY_STATUS = {
    401: Kind.forbidden,
    402: Kind.no_quota,
    403: Kind.forbidden,
    405: Kind.wrong_url,
    408: Kind.timeout,
    413: Kind.too_long,
    429: Kind.rate_limited,
    502: Kind.gateway_page,
    503: Kind.overloaded,
    504: Kind.timeout,
    529: Kind.overloaded,
}
# Codes that endpoints put into an error object, also in one that arrives with status 200.
_BY_CODE = {
    "content_filter": Kind.refused,
    "context_length_exceeded": Kind.too_long,
    "insufficient_quota": Kind.no_quota,
    "invalid_api_key": Kind.forbidden,
    "model_not_found": Kind.wrong_model,
    "overloaded": Kind.overloaded,
    "overloaded_error": Kind.overloaded,
    "rate_limit_error": Kind.rate_limited,
    "rate_limit_exceeded": Kind.rate_limited,
}
# vLLM, OpenAI, TGI, llama.cpp and Anthropic-style gateways in this order.
_TOO_LONG = re.compile(
    r"maximum context length|context_length|max_model_len|must be less or equal|exceeds? the available context|too long",
    re.IGNORECASE,
)


def read_reply(status: int, headers: Mapping[str, str], body: bytes, private: Sequence[str] = ()) -> Received:
    """Name one HTTP answer. `private` are the texts (prompt, key) that must not be quoted."""
    wait = retry_after_s(headers.get("retry-after"), date=headers.get("date"))
    decoded = body.decode("utf-8", "replace")
    try:
        data = json.loads(decoded)
    except (ValueError, RecursionError):
        data = None
    error = _error_object(data)

    def problem(kind: Kind, said: str) -> Received:
        return Received(kind, f"status {status}: {redact(said, private)}".rstrip(": "), retry_after=wait)

    if error is not None:
        said = str(error.get("message") or error.get("type") or "")
        codes = [str(error.get(key) or "").lower() for key in ("code", "type")]
        inner = next((int(code) for code in codes if re.fullmatch(r"[45]\d\d", code, re.ASCII)), 500)
        return problem(_kind(inner if status == 200 else status, codes, said), said)
    if status == 200:
        return _completion(data) or problem(*_no_completion(headers, decoded))
    if _is_page(headers, decoded) and status >= 500:
        return problem(Kind.timeout if status == 504 else Kind.gateway_page, _page_text(decoded))
    said = _page_text(decoded) if data is None else decoded
    return problem(_kind(status, [], said), said)


def _error_object(data: Any) -> dict[str, Any] | None:
    if not isinstance(data, dict):
        return None
    if isinstance(error := data.get("error"), dict):
        return error
    if isinstance(error, str):
        return {"message": error, "code": data.get("code")}
    return data if data.get("object") == "error" else None


def _kind(status: int, codes: Sequence[str], said: str) -> Kind:
    for code in codes:
        if code in _BY_CODE:
            return _BY_CODE[code]
    if status in (400, 422) and _TOO_LONG.search(said):
        return Kind.too_long
    if status == 404:
        return Kind.wrong_model if codes and "model" in said.lower() else Kind.wrong_url
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status < 400:
        return Kind.wrong_url
    return Kind.server_error if status >= 500 else Kind.bad_request


def _completion(data: Any) -> Received | None:
    """A chat completion as `Received`, None when it is not one."""
    try:
        choice = data["choices"][0]
        message = choice["message"]
        text, refusal = _text(message.get("content")), message.get("refusal")
        reasoning = message.get("reasoning_content") or message.get("reasoning") or None
        usage = data.get("usage") or {}
        finish = choice.get("finish_reason")
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        tokens = [(token["token"], math.exp(min(token["logprob"], 0.0))) for token in logprobs]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
    if refusal or finish == "content_filter":
        kind = Kind.refused
    elif text.strip():
        kind = Kind.answered
    elif reasoning:
        kind = Kind.reasoning_only
    else:
        kind = Kind.empty
    return Received(
        kind,
        "" if kind is Kind.answered else f"finish reason {finish}",
        text,
        reasoning,
        finish,
        usage.get("prompt_tokens"),
        cached,
        usage.get("completion_tokens"),
        tokens,
    )


def _text(content: Any) -> str:
    """The text of a message: a string, nothing, or a list of parts as some gateways send it."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    if content is not None and not isinstance(content, str):
        raise TypeError("content is neither text nor parts")
    return content or ""


def _no_completion(headers: Mapping[str, str], body: str) -> tuple[Kind, str]:
    if _is_page(headers, body):
        return Kind.gateway_page, _page_text(body)
    return Kind.not_json, body


def _is_page(headers: Mapping[str, str], body: str) -> bool:
    return "html" in headers.get("content-type", "").lower() or body.lstrip()[:1] == "<"


def _page_text(body: str) -> str:
    """What a reader of a page would see, from its first kilobytes."""
    without_code = re.sub(r"<(script|style)\b.*?(</\1>|$)", " ", body[:8000], flags=re.IGNORECASE | re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>?", " ", without_code))


# Runs of a private text this long are hidden. Shorter ones occur by chance in any error message; a character of Chinese or
# Japanese says more than a Latin one.
_WINDOW_ASCII, _WINDOW = 10, 4


def redact(said: str, private: Sequence[str], limit: int = 200) -> str:
    """A piece of at most `limit` characters in which longer runs of a private text are replaced by an ellipsis, and so
    is a whole private text however short. JSON escapes are undone first: an echo may be escaped.

    >>> redact('cannot parse: "the parcel came late and wet"', ["Text: the parcel came late and wet"])
    'cannot parse: "…"'
    """
    said = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), said[: 10 * limit])
    said = " ".join(re.sub(r"\\(.)", lambda match: " " if match[1] in "nrt" else match[1], said).split())
    hidden = bytearray(len(said))
    for text in (" ".join(text.split()) for text in private):
        if not text:
            continue
        size = min(_WINDOW_ASCII if text.isascii() else _WINDOW, len(text))
        windows = {text[at : at + size] for at in range(len(text) - size + 1)}
        for at in range(len(said) - size + 1):
            if said[at : at + size] in windows:
                hidden[at : at + size] = b"\x01" * size
    shown = "".join("\0" if gone else char for char, gone in zip(said, hidden, strict=True))
    shown = re.sub("\0+", "…", shown)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
