"""Engine `openai`: any endpoint that speaks OpenAI's chat completions (vLLM's server, a gateway, a hosted API).

The runner's thread hands asks over and takes replies back through queues; one background thread runs an event loop with one
connection pool. How many calls are in flight follows from how the endpoint copes (`http/concurrency.py`), what each odd
reply leads to from its kind (`http/replies.py`), and an endpoint in trouble is left alone and probed (`http/breaker.py`).

A request keeps its place while it waits for its next try, so that an endpoint that refuses is asked less at once and
retries never pile up on one that is still busy with the first call.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.errors import ConfigError, MillraceError, UnavailableError
from shard_runner.confidence import label_confidence
from shard_runner.engines.base import Ask, EngineDead, EngineSpec, Reply, ReplyError
from shard_runner.engines.http.breaker import Breaker
from shard_runner.engines.http.client import EndpointClient
from shard_runner.engines.http.concurrency import Concurrency
from shard_runner.engines.http.replies import Kind, Received
from shard_runner.engines.http.settings import EndpointSettings, endpoint_settings

log = logging.getLogger(__name__)

# A question of ours, so that the endpoint's own words about it may be quoted.
_PROBE_SYSTEM, _PROBE_USER = "You answer in the required format.", "Answer with any valid answer."
_CLOSE_S = 5.0


def open_engine(spec: EngineSpec, env: Mapping[str, str] = os.environ) -> OpenAIEngine:
    """Connect, look the model up, and have one small question answered.

    Raises ConfigError (settings, key, address or model name are wrong), UnavailableError (no answer within
    `start_deadline_s`).
    """
    settings = endpoint_settings(spec.model.name, spec.model.settings)
    engine = OpenAIEngine(spec, settings, EndpointClient(spec, settings, env))
    try:
        engine.start()
    except BaseException:
        engine.close()
        raise
    return engine


@dataclass(repr=False)  # event loops print arguments when they report an error, and an ask holds a row's text
class _Job:
    ask: Ask
    tries: int = 0
    spent_s: float = 0.0  # in calls and in waits between them; waiting for a paused endpoint is not the request's fault
    sent: tuple[float, float] = (math.inf, math.inf)  # when the last try but one left, and the last
    excused: bool = False  # its tries were spent in an outage and given back, once


class OpenAIEngine:
    """The engine of one endpoint; see `shard_runner.engines.base.Engine` for what its methods promise."""

    tokenizer = None

    def __init__(
        self,
        spec: EngineSpec,
        settings: EndpointSettings,
        client: EndpointClient,
        rand: Callable[[], float] = random.random,
    ) -> None:
        self._spec, self._settings, self._client, self._rand = spec, settings, client, rand
        self._concurrency = Concurrency(
            settings.initial_concurrency, settings.max_concurrency, settings.latency_tolerance
        )
        self._breaker = Breaker(
            settings.breaker_window,
            settings.breaker_error_share,
            settings.breaker_pause_s,
            settings.breaker_give_up_s,
            settings.breaker_max_openings,
            time.monotonic,
        )
        self._kinds: Counter[Kind] = Counter()
        self._last_success = -math.inf
        self._pending: deque[_Job] = deque()
        self._turns: deque[asyncio.Future[int]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._mending: asyncio.Task[None] | None = None
        self._replies: queue.SimpleQueue[Reply | Exception] = queue.SimpleQueue()
        self._fatal: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._thread.start()

    # The runner's side.

    def start(self) -> None:
        """Wait until the endpoint has answered one small question. Raises ConfigError, UnavailableError."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    @property
    def slots(self) -> int:
        return self._concurrency.limit

    @property
    def capacity(self) -> int:
        # A few more than may be in flight, so that a place that falls free is taken at once.
        return self.slots + self.slots // 4 + 1

    def describe(self) -> dict[str, str]:
        return {
            "engine": "openai",
            "endpoint": self._client.url,
            "model": self._client.model,
            "server": self._settings.server,
            "structured": str(self._settings.structured).lower(),
            "concurrency": str(self._concurrency.limit),
            "calls": self._calls(),
        }

    def _calls(self) -> str:
        return ", ".join(f"{kind} {count:,}" for kind, count in self._kinds.most_common()) or "none yet"

    def submit(self, ask: Ask) -> None:
        if self._fatal is not None:
            raise self._fatal
        self._loop.call_soon_threadsafe(self._accept, _Job(ask))

    def poll(self, timeout_s: float) -> list[Reply]:
        replies: list[Reply] = []
        try:
            item = self._replies.get(timeout=timeout_s)
            while True:
                if isinstance(item, Exception):
                    self._fatal = item
                else:
                    replies.append(item)
                item = self._replies.get_nowait()
        except queue.Empty:
            pass
        if self._fatal is not None and not replies:
            raise self._fatal
        return replies

    def abort(self) -> None:
        self._in_loop(self._cancel_all())
        while not self._replies.empty():
            self._replies.get_nowait()

    def close(self) -> None:
        if self._thread.is_alive():
            try:
                self._in_loop(self._shut())
            except TimeoutError:
                log.warning("connections to %s did not close in %.0f s", self._client.url, _CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)

    def _in_loop(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_CLOSE_S)

    # The event loop's side: everything below runs in the background thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _shut(self) -> None:
        await self._cancel_all()
        await self._client.close()

    async def _cancel_all(self) -> None:
        self._pending.clear()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._turns.clear()
        self._mending = None
        self._concurrency.in_flight = 0
        self._breaker.close()

    async def _start(self) -> None:
        deadline = time.monotonic() + self._settings.start_deadline_s
        trouble = await self._patiently(self._client.check_model, deadline)
        if trouble is None:
            trouble = await self._patiently(self._probe, deadline)
        if trouble is not None:
            raise self._unavailable(
                f"had not answered one question after {self._settings.start_deadline_s:g} s", trouble
            )

    async def _patiently(self, call: Callable[[float], Awaitable[Received | None]], deadline: float) -> Received | None:
        """Repeat a call until it returns None, or return its last trouble when the deadline comes first."""
        tries, last = 0, None
        while True:
            received = await call(deadline - time.monotonic())
            if received is None:
                return None
            if last is not None and time.monotonic() >= deadline:
                return last  # the deadline cut this call; the one before says what is wrong
            last = received
            if received.policy.fatal or received.kind in (Kind.too_long, Kind.bad_request):
                raise self._config_error(received)
            wait = self._wait_s(received, tries, 0.0)
            tries += 1
            if time.monotonic() + wait >= deadline:
                return received
            await asyncio.sleep(wait)

    async def _probe(self, deadline_s: float) -> Received | None:
        """One small question, asked as rows are asked; None when a completion came back, whatever it says."""
        ask = Ask("probe", _PROBE_SYSTEM, _PROBE_USER, None, self._spec.max_tokens)
        received = await self._client.complete(ask, deadline_s)
        if received.kind in (Kind.too_long, Kind.bad_request) or not received.policy.serving:
            return received
        self._last_success = time.monotonic()
        return None

    def _accept(self, job: _Job) -> None:
        self._pending.append(job)
        self._pump()

    def _pump(self) -> None:
        """Let calls go while there is room: requests that wait for their next try first, then new ones."""
        if self._breaker.is_open:
            return
        while self._turns and self._concurrency.free:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(self._concurrency.take())
        while self._pending and len(self._tasks) < self._concurrency.limit and self._concurrency.free:
            task = self._loop.create_task(self._answer(self._pending.popleft(), self._concurrency.take()))
            self._tasks.add(task)
            task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A fault of ours: the runner must hear of it, and without the text that it may quote.
            self._replies.put(EngineDead(f"the endpoint engine broke: {type(error).__name__}"))
        self._pump()

    async def _turn(self) -> int:
        turn: asyncio.Future[int] = self._loop.create_future()
        self._turns.append(turn)
        self._pump()
        return await turn

    async def _answer(self, job: _Job, epoch: int) -> None:
        """Ask until there is a reply, or until tries or budget are spent. `epoch` belongs to the place already taken."""
        while True:
            sent = time.monotonic()
            job.sent = (min(job.sent[1], sent), sent)
            received = await self._client.complete(job.ask, self._settings.request_budget_s - job.spent_s)
            took = time.monotonic() - sent
            self._concurrency.release()
            self._count(received, epoch, took, first=job.tries == 0)
            policy = received.policy
            job.tries += 1
            job.spent_s += took
            wait = self._wait_s(received, job.tries - 1, took)
            if policy.fatal:
                self._replies.put(self._config_error(received))
                return
            too_late = job.spent_s + wait >= self._settings.request_budget_s
            if too_late or job.tries >= (policy.tries or self._settings.max_tries):
                # Where nothing else went through during its last two tries, or the endpoint asks to stay away for longer than
                # any request may take, the endpoint is to blame and no row.
                down = self._last_success < job.sent[0] and not job.excused
                shut = policy.congestion and too_late and received.retry_after is not None
                if policy.serving or not (down or shut):
                    self._replies.put(self._reply(job, received, took))
                    return
                self._breaker.trip()
                self._mend(received)
                job.excused, job.tries, job.spent_s, wait = True, 0, 0.0, 0.0
            self._pump()
            await asyncio.sleep(wait)
            job.spent_s += wait
            epoch = await self._turn()

    def _count(self, received: Received, epoch: int, took: float, first: bool) -> None:
        self._kinds[received.kind] += 1
        policy = received.policy
        # A refusal of the only call allowed is no matter of concurrency: there is nothing left to lower.
        error = policy.breaker or (policy.congestion and self._concurrency.limit == 1)
        if policy.congestion:
            self._concurrency.congested(epoch)
        if policy.serving:
            self._last_success = time.monotonic()
            self._concurrency.succeeded(epoch, took)
        # The breaker judges the share of requests that met an error. With their retries counted, one bad row in a hundred
        # would look like an endpoint in trouble.
        if first and (error or policy.serving):
            self._breaker.record(error)
            self._mend(received)

    def _mend(self, received: Received) -> None:
        if self._breaker.is_open and self._mending is None:
            self._mending = self._loop.create_task(self._probe_until_back(received))

    async def _probe_until_back(self, received: Received) -> None:
        """While the breaker is open: pause, ask one small question, and go on, or give up."""
        log.warning("endpoint %s: %s (%s); calls pause", self._client.url, received.kind, received.detail)
        while (pause := self._breaker.next_pause_s(received.retry_after)) is not None:
            await asyncio.sleep(pause)
            trouble = await self._probe(self._settings.read_timeout_s)
            if trouble is None:
                log.warning("endpoint %s answers again", self._client.url)
                self._breaker.close()
                self._concurrency.restart()
                self._mending = None
                self._pump()
                return
            if trouble.policy.fatal:
                self._replies.put(self._config_error(trouble))
                return
            received = trouble
        self._replies.put(self._unavailable("is in trouble and pausing did not help", received))

    def _wait_s(self, received: Received, failures: int, took: float) -> float:
        """Seconds before the next try, after `failures` earlier ones: what was asked for and a little, else full jitter."""
        settings = self._settings
        if received.retry_after is not None:
            return received.retry_after + self._rand() * settings.backoff_base_s
        if received.kind is Kind.connection and failures == 0:
            return 0.0  # most often a kept connection that the server had closed: a fresh one works at once
        wait = self._rand() * min(settings.backoff_max_s, settings.backoff_base_s * 2**failures)
        # The server may still be working on a call that we or a gateway gave up: leave it as long again.
        return max(wait, took) if received.kind is Kind.timeout else wait

    def _reply(self, job: _Job, received: Received, took: float) -> Reply:
        reason = received.policy.reason
        error = None
        if reason is not None:
            tries = "" if job.tries == 1 else f" after {job.tries} tries"
            error = ReplyError(reason, f"{received.kind}{tries}: {received.detail}")
        confidence = None
        if error is None and received.tokens:
            confidence = label_confidence(received.text, received.tokens, self._spec.schema, self._spec.form)
        return Reply(
            job.ask.request_id,
            received.text,
            received.reasoning,
            received.finish_reason,
            received.prompt_tokens,
            received.cached_tokens,
            received.completion_tokens,
            round(took * 1000),
            confidence,
            error,
        )

    def _config_error(self, received: Received) -> MillraceError:
        step = {
            Kind.forbidden: "Check the key (MILLRACE_ENDPOINT_KEY, or the variable that settings.api_key_env names).",
            Kind.no_quota: "Nothing is left to spend with this key: raise the quota, or route to another model.",
            Kind.wrong_model: "Set the model's served_name to a name that the endpoint offers.",
            Kind.wrong_url: "Check the model's endpoint: it is the base URL of the API and most often ends in /v1.",
        }.get(received.kind, "Change the model's settings so that the endpoint takes the request (docs/endpoints.md).")
        return ConfigError(
            f"{self._client.url} said {received.kind} to model '{self._client.model}': {received.detail}. {step}"
        )

    def _unavailable(self, what: str, last: Received) -> MillraceError:
        asked = "" if last.retry_after is None else f"; it asked to wait {last.retry_after:,.0f} s"
        return UnavailableError(
            f"{self._client.url} {what}. Last: {last.kind}, {last.detail}{asked}. Calls: {self._calls()}. "
            "Finished answers are kept; retry when it is back."
        )
