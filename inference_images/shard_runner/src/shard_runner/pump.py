"""The pump: keeps an engine full, pairs its replies with their requests, and survives what engines do.

    pump = Pump(open_engine, reading, check)
    for answer in pump.answers(asker.asks(requests)): ...

Requests enter as others leave: there is no batch, so no barrier. One thread does all of it; the engine's own queue of waiting
asks covers the moments in which this side renders, tokenises or parses.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import orjson

from millrace.answers import AnswerSchema, Reason, Status, held_to_floor, parse_answer, status_of
from millrace.enrichment import Enrichment
from millrace.errors import MillraceError, UnavailableError
from millrace.records import Phases
from shard_runner.engines.base import Ask, Engine, EngineDead, Reply
from shard_runner.parts import Answer

log = logging.getLogger("shard_runner")

# Deaths without a single answer in between after which the engine itself is taken to be broken, and deaths in all. Isolating
# one bad request among 512 takes about ten rebuilds, each followed by a healthy half.
MAX_DEATHS_IN_A_ROW = 6
MAX_DEATHS = 30
POLL_SECONDS = 0.5

Unasked = tuple[str, Reason]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Reading:
    """How text becomes an answer, and what to do with one that was cut."""

    schema: AnswerSchema
    form: Literal["json", "compact"]
    confidence_floor: float | None
    longer: Callable[[Ask], Ask | None]

    @classmethod
    def of(cls, enrichment: Enrichment, longer: Callable[[Ask], Ask | None]) -> Reading:
        return cls(enrichment.schema, enrichment.form, enrichment.limits.confidence_floor, longer)


@dataclass
class _Pending:
    ask: Ask
    asked: int = 0
    deaths: int = 0  # of the engine while this ask was inside
    since: float = 0.0
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    counted: bool = False


@dataclass
class _Clock:
    """Sorts wall time into `start` (not yet full), `full` and `tail` (no more requests to put in)."""

    seconds: dict[str, float] = field(default_factory=lambda: {"start": 0.0, "full": 0.0, "tail": 0.0})
    _last: float | None = None

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        if self._last is not None:
            self.seconds[phase] += now - self._last
        self._last = now

    def pause(self) -> None:
        self._last = None


class Pump:
    """Drives one engine, which it opens when first needed and owns until `close`."""

    def __init__(
        self, open_engine: Callable[[], Engine], reading: Reading, check: Callable[[], None] = lambda: None
    ) -> None:
        self._open, self._reading, self._check = open_engine, reading, check
        self._engine: Engine | None = None
        self._inside: dict[str, _Pending] = {}
        self._again: deque[_Pending] = deque()
        self._groups: deque[list[_Pending]] = deque()  # suspects of a death; each group is asked alone
        self._deaths = self._deaths_in_a_row = 0
        self._load_seconds = 0.0
        self._clock = _Clock()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            started = time.monotonic()
            self._engine = self._open()
            self._load_seconds += time.monotonic() - started
        return self._engine

    @property
    def phases(self) -> Phases:
        seconds = {name: round(value, 3) for name, value in self._clock.seconds.items()}
        return Phases(
            load=round(self._load_seconds, 3), total=round(self._load_seconds + sum(seconds.values()), 3), **seconds
        )

    def warm_up(self, asks: Iterator[Ask | Unasked]) -> None:
        """Answer some prompts for nothing but their effect: caches filled, kernels and grammar compiled. Counts as `start`."""
        started = time.monotonic()
        for _ in self.answers(asks):
            pass
        self._clock = _Clock()
        self._clock.seconds["start"] = time.monotonic() - started

    def answers(self, asks: Iterator[Ask | Unasked]) -> Iterator[Answer]:
        """One answer per ask, as they finish. Raises what `check` raises, and UnavailableError when the engine stays dead."""
        exhausted = False
        engine = self.engine
        self._clock.lap("start")
        while True:
            self._check()
            try:
                while len(self._inside) < engine.capacity:
                    pending = self._next(asks)
                    if pending is None:
                        exhausted = not self._groups
                        break
                    unasked = pending if isinstance(pending, Answer) else self._submit(engine, pending)
                    if unasked is not None:
                        yield unasked
                if exhausted and not self._inside:
                    break
                full = len(self._inside) >= engine.slots
                yield from self._take(_guarded(engine.poll, POLL_SECONDS))
                self._clock.lap("full" if full else "tail" if exhausted else "start")
            except EngineDead as error:
                self._clock.lap("start")
                yield from self._survive(error)
                self._clock.pause()
                engine = self.engine
                self._clock.lap("start")
        self._clock.lap("tail")
        self._clock.pause()

    def _next(self, asks: Iterator[Ask | Unasked]) -> _Pending | Answer | None:
        """What to submit next: suspects alone, then what is asked once more, then the stream."""
        if self._again:
            return self._again.popleft()
        while self._groups:
            if self._groups[0]:
                return self._groups[0].pop()
            if self._inside:
                return None
            self._groups.popleft()
        item = next(asks, None)
        if item is None:
            return None
        if isinstance(item, Ask):
            return _Pending(item)
        request_id, reason = item
        return _without_text(request_id, reason, asked=0)

    def _submit(self, engine: Engine, pending: _Pending) -> Answer | None:
        pending.asked += 1
        pending.since = time.monotonic()
        self._inside[pending.ask.request_id] = pending
        try:
            _guarded(engine.submit, pending.ask)
        except ValueError:
            del self._inside[pending.ask.request_id]
            log.warning("the engine refused one request")
            return _without_text(pending.ask.request_id, Reason.engine_error, pending.asked)
        return None

    def _take(self, replies: list[Reply]) -> Iterator[Answer]:
        ids = {reply.request_id for reply in replies}
        if len(ids) != len(replies) or not ids <= self._inside.keys():
            raise EngineDead(
                "it answered requests that were not inside, or one of them twice; its replies are discarded"
            )
        if replies:
            self._deaths_in_a_row = 0
        for reply in replies:
            answer = self._read(self._inside.pop(reply.request_id), reply)
            if answer is not None:
                yield answer

    def _read(self, pending: _Pending, reply: Reply) -> Answer | None:
        """The answer in a reply; None when the request is asked once more."""
        pending.counted |= reply.prompt_tokens is not None
        pending.prompt += reply.prompt_tokens or 0
        pending.cached += reply.cached_tokens or 0
        pending.completion += reply.completion_tokens or 0
        if reply.error is not None:
            if reply.error.again and pending.asked == 1:
                self._again.append(pending)
                return None
            return self._answer(pending, reply, status_of(reply.error.reason), reply.error.reason)
        raw = reply.text if reply.reasoning is None else f"<think>{reply.reasoning}</think>{reply.text}"
        parsed = parse_answer(raw, self._reading.schema, reply.finish_reason, self._reading.form)
        if parsed.reason == Reason.truncated and pending.asked == 1:
            longer = self._reading.longer(pending.ask)
            if longer is not None:
                pending.ask = longer
                self._again.append(pending)
                return None
        parsed = held_to_floor(parsed, self._reading.schema, reply.confidence, self._reading.confidence_floor)
        values = parsed.values_json() if parsed.status == Status.ok else None
        return self._answer(pending, reply, parsed.status, parsed.reason, raw, values, bool(parsed.repaired))

    def _answer(
        self,
        pending: _Pending,
        reply: Reply,
        status: Status,
        reason: Reason | None,
        raw: str | None = None,
        values: str | None = None,
        repaired: bool = False,
    ) -> Answer:
        latency = reply.latency_ms
        return Answer(
            request_id=pending.ask.request_id,
            status=status.value,
            reason=None if reason is None else reason.value,
            values=values,
            raw_text=None if raw is None else _storable(raw),
            repaired=repaired,
            finish_reason=reply.finish_reason,
            confidence=orjson.dumps(reply.confidence).decode() if reply.confidence else None,
            prompt_tokens=pending.prompt if pending.counted else None,
            cached_tokens=pending.cached if pending.counted else None,
            completion_tokens=pending.completion if pending.counted else None,
            asked=pending.asked,
            latency_ms=latency if latency is not None else int((time.monotonic() - pending.since) * 1000),
            answered_at=datetime.now(UTC),
        )

    def _survive(self, error: EngineDead) -> Iterator[Answer]:
        """Take in the engine's death: bisect the suspects, or give up. The next use of `engine` builds a new one."""
        suspects = list(self._inside.values())
        self._inside.clear()
        why = str(error)
        self._deaths += 1
        self._deaths_in_a_row += 1
        log.warning("the engine died (%s) with %d requests inside; death %d", why, len(suspects), self._deaths)
        self._discard()
        self._check()
        if self._deaths_in_a_row > MAX_DEATHS_IN_A_ROW or self._deaths > MAX_DEATHS:
            raise UnavailableError(
                f"the engine died {self._deaths} times, {self._deaths_in_a_row} of them without an answer in between; last: {why}. "
                "Finished answers are saved. Look at the node and the engine's log, then clear the task."
            )
        while self._groups and not self._groups[0]:
            self._groups.popleft()
        if self._groups:  # what of the group in hand had not entered when the engine died goes on as a group
            self._groups.append(self._groups.popleft())
        for pending in suspects:
            pending.deaths += 1
            pending.asked -= 1
        if len(suspects) == 1 and suspects[0].deaths > 1:
            log.warning("set one request aside: the engine died each time it was inside")
            yield _without_text(suspects[0].ask.request_id, Reason.poison, suspects[0].asked + 1)
        elif any(pending.deaths > 1 for pending in suspects):
            middle = len(suspects) // 2
            self._groups.extend(half for half in (suspects[:middle], suspects[middle:]) if half)
        elif suspects:
            self._groups.append(suspects)

    def _discard(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            try:
                engine.close()
            except Exception as error:  # a dead engine may fail to close; the new one is what counts
                log.warning("the dead engine did not close cleanly (%s)", type(error).__name__)

    def close(self) -> None:
        self._inside.clear()
        self._discard()


def _guarded(call: Callable[[Any], Result], argument: Any) -> Result:
    """Call the engine; whatever it raises beyond its contract means that it cannot be trusted further."""
    try:
        return call(argument)
    except (MillraceError, EngineDead, ValueError):
        raise
    except Exception as error:
        raise EngineDead(f"it raised {type(error).__name__}") from error


def _storable(text: str) -> str:
    """Text that can be written: surrogate pairs joined, lone halves replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _without_text(request_id: str, reason: Reason, asked: int) -> Answer:
    return Answer(
        request_id=request_id,
        status=status_of(reason).value,
        reason=reason.value,
        values=None,
        raw_text=None,
        repaired=False,
        finish_reason=None,
        confidence=None,
        prompt_tokens=None,
        cached_tokens=None,
        completion_tokens=None,
        asked=asked,
        latency_ms=None,
        answered_at=datetime.now(UTC),
    )
