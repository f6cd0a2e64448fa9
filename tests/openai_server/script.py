"""What the server does instead of answering, call by call."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Action = Literal[
    "answer",  # as usual
    "status",  # a JSON error with `status`, and `retry_after`, `code` and `message` where given
    "page",  # an HTML page with `status`
    "raw",  # `body` as application/json with `status`
    "reset",  # the connection is cut before any byte of an answer
    "hang",  # no answer for `seconds`, then as usual
    "empty",  # a completion without text
    "reasoning_only",
    "refusal",
    "cut",  # half of the answer, finish reason `length`
    "echo",  # a 400 whose message quotes the prompt
]


@dataclass(frozen=True)
class Step:
    """One kind of behaviour: for `times` calls (None: for ever), or only for calls whose user text contains `where`."""

    do: Action
    times: int | None = 1
    where: str | None = None
    status: int = 200
    retry_after: str | None = None
    code: str | None = None
    message: str = "scripted"
    body: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.do not in get_args(Action):
            raise ValueError(f"'{self.do}' is not one of {', '.join(get_args(Action))}")


class Script:
    """Steps in their order, each used up before the next; once all are, calls are answered. Steps with `where` stand
    apart: they apply whenever their text occurs."""

    def __init__(self, steps: Iterable[Step | Mapping[str, Any]] = ()) -> None:
        made = [step if isinstance(step, Step) else Step(**step) for step in steps]
        self._by_text = [step for step in made if step.where is not None]
        self._queue = deque(step for step in made if step.where is None)
        self._used = 0  # of the first step in the queue

    def next(self, user: str) -> Step:
        for step in self._by_text:
            if step.where is not None and step.where in user:
                return step
        if not self._queue:
            return Step("answer")
        step = self._queue[0]
        self._used += 1
        if step.times is not None and self._used >= step.times:
            self._queue.popleft()
            self._used = 0
        return step
