"""The server itself: aiohttp, one event loop, in a thread of its own for tests."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from aiohttp import web

from tests.openai_server.script import Script, Step

PAGE = "<html><head><title>502 Bad Gateway</title></head><body><h1>Bad Gateway</h1><hr>nginx</body></html>"


@dataclass(frozen=True)
class ServerOptions:
    """How the server behaves apart from its script."""

    models: tuple[str, ...] = ("test-model",)
    capacity: int | None = None  # calls it works on at once; more are refused with 429
    retry_after: str | None = None  # sent with these refusals
    delay_ms: float = 0.0  # of each answer
    keepalive_s: float = 75.0  # idle connections are closed after this
    api_key: str | None = None  # calls without it get 401
    unready_s: float = 0.0  # answers 503 for so long after its first call, while it lists its models
    lists_models: bool = True


@dataclass
class Stats:
    calls: int = 0  # of /chat/completions
    answered: int = 0
    refused: int = 0  # for capacity
    in_flight: int = 0
    max_in_flight: int = 0
    busy_s: float = 0.0  # sum of the times that calls took here, refused ones apart
    connections: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    first_at: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "first_at"}


class App:
    def __init__(self, options: ServerOptions, script: Script) -> None:
        self.options, self.script, self.stats = options, script, Stats()
        self.bodies: list[dict[str, Any]] = []  # of the last calls, for tests that look at what was asked
        self._connections: WeakSet[asyncio.BaseTransport] = WeakSet()

    def web_app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024 * 1024, middlewares=[self._guarded])
        app.router.add_get("/stats", self._stats)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._completions)
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.transport is not None and request.transport not in self._connections:
            self._connections.add(request.transport)
            self.stats.connections += 1
        key = self.options.api_key
        if key and request.path != "/stats" and request.headers.get("authorization") != f"Bearer {key}":
            given = request.headers.get("authorization", "none")
            return _error(401, Step("status", message=f"Incorrect API key provided: {given}", code="invalid_api_key"))
        return await handler(request)

    async def _stats(self, request: web.Request) -> web.Response:
        return web.json_response(self.stats.to_dict())

    async def _models(self, request: web.Request) -> web.Response:
        if not self.options.lists_models:
            raise web.HTTPNotFound
        return web.json_response(
            {"object": "list", "data": [{"id": name, "object": "model"} for name in self.options.models]}
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        stats, options = self.stats, self.options
        body = await request.json()
        stats.calls += 1
        stats.first_at = stats.first_at or time.monotonic()
        self.bodies[:] = [*self.bodies[-9999:], body]
        if options.capacity is not None and stats.in_flight >= options.capacity:
            stats.refused += 1
            stats.statuses["429"] += 1
            return _error(
                429, Step("status", retry_after=options.retry_after, code="rate_limit_exceeded", message="slow down")
            )
        stats.in_flight += 1
        stats.max_in_flight = max(stats.max_in_flight, stats.in_flight)
        began = time.monotonic()
        try:
            response = await self._respond(request, body)
        finally:
            stats.in_flight -= 1
            stats.busy_s += time.monotonic() - began
        stats.statuses[str(response.status)] += 1
        return response

    async def _respond(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("model") not in self.options.models:
            return _error(
                404, Step("status", message=f"The model `{body.get('model')}` does not exist.", code="model_not_found")
            )
        if self.stats.first_at is not None and time.monotonic() < self.stats.first_at + self.options.unready_s:
            return _error(503, Step("status", message="the model is loading"))
        user = body["messages"][-1]["content"]
        step = self.script.next(user)
        await asyncio.sleep(self.options.delay_ms / 1000 + step.seconds)
        match step.do:
            case "status":
                return _error(step.status, step)
            case "page":
                return web.Response(status=step.status, text=PAGE, content_type="text/html")
            case "raw":
                return web.Response(status=step.status, text=step.body, content_type="application/json")
            case "echo":
                return _error(400, Step("status", message=f"cannot read {json.dumps(user)}"))
            case "reset":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
        self.stats.answered += 1
        return web.json_response(_completion(body, user, step))


def _error(status: int, step: Step) -> web.Response:
    headers = {} if step.retry_after is None else {"Retry-After": step.retry_after}
    error = {"message": step.message, "type": "scripted", "code": step.code or status}
    return web.json_response({"error": error}, status=status, headers=headers)


def _completion(body: dict[str, Any], user: str, step: Step) -> dict[str, Any]:
    text = answer(body, user)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    finish = "stop"
    match step.do:
        case "empty":
            message["content"] = ""
        case "reasoning_only":
            message |= {"content": None, "reasoning_content": f"It could be {text}."}
        case "refusal":
            message |= {"content": None, "refusal": "I'm sorry, I can't help with that."}
        case "cut":
            message["content"], finish = text[: len(text) // 2], "length"
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish}
    if body.get("logprobs"):
        choice["logprobs"] = {"content": [{"token": char, "logprob": -0.01} for char in message["content"] or ""]}
    prompt_tokens = sum(len(part["content"]) for part in body["messages"]) // 4
    return {
        "id": "chatcmpl-test",
        "object": "chat.completion",
        "model": body["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(message["content"] or "") // 4 + 1,
            "prompt_tokens_details": {"cached_tokens": prompt_tokens // 2},
        },
    }


def answer(body: dict[str, Any], user: str) -> str:
    """The answer to a text: one of the allowed ones, picked by the text's hash."""
    pick = int.from_bytes(hashlib.sha256(user.encode()).digest()[:8])
    if choices := (body.get("structured_outputs") or {}).get("choice"):
        return str(choices[pick % len(choices)])
    schema = ((body.get("response_format") or {}).get("json_schema") or {}).get("schema")
    if schema is None:
        return ["positive", "neutral", "negative"][pick % 3]
    return json.dumps(_value(schema, pick), ensure_ascii=False)


def _value(schema: dict[str, Any], pick: int) -> Any:
    if "enum" in schema:
        return schema["enum"][pick % len(schema["enum"])]
    if "anyOf" in schema:
        return _value(schema["anyOf"][0], pick)
    match schema["type"]:
        case "object":
            return {name: _value(part, pick >> at) for at, (name, part) in enumerate(schema["properties"].items())}
        case "array":
            return [_value(schema["items"], pick)]
        case "boolean":
            return bool(pick % 2)
        case "string":
            return "as expected"[: schema.get("maxLength", 20)]
        case _:
            return schema.get("minimum", 0)


async def serve(app: App, host: str, port: int) -> web.AppRunner:
    """Listen; port 0 takes a free one (`runner.addresses`)."""
    runner = web.AppRunner(
        app.web_app(), keepalive_timeout=app.options.keepalive_s, access_log=None, shutdown_timeout=0.1
    )
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner


@dataclass(frozen=True)
class Running:
    url: str  # base URL, ends in /v1
    app: App

    @property
    def stats(self) -> Stats:
        return self.app.stats


@contextmanager
def running_server(script: Script | list[dict[str, Any]] | None = None, **options: Any) -> Iterator[Running]:
    """A server on a free loopback port, in a thread, for the time of a `with` block."""
    app = App(ServerOptions(**options), script if isinstance(script, Script) else Script(script or ()))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(serve(app, "127.0.0.1", 0), loop).result(10)
    try:
        yield Running(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", app)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
