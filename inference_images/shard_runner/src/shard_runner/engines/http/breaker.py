"""The circuit breaker: too many errors pause all calls, one small call after another asks whether the endpoint is back,
and after a while we give up.

Refusals for load (429, 503) are not errors here: they are what sets the concurrency. They open the breaker only when a
request used up all its tries and nothing else succeeded meanwhile (`trip`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_PAUSE_S = 60.0


@dataclass
class Breaker:
    """Opens when over `error_share` of the last `window` requests failed at first; the clock is in seconds and only moves forward."""

    window: int
    error_share: float
    pause_s: float
    give_up_s: float
    max_openings: int
    clock: Callable[[], float]
    is_open: bool = field(default=False, init=False)
    openings: int = field(default=0, init=False)  # since the last window that passed without one

    def __post_init__(self) -> None:
        self._recent: deque[bool] = deque(maxlen=self.window)
        self._errors = 0
        self._opened_at = 0.0
        self._pauses = 0

    def record(self, error: bool) -> None:
        """Count one request. A part-filled window is judged as if the rest of it had succeeded, so one early error is no outage."""
        if len(self._recent) == self.window:
            self._errors -= self._recent[0]
        self._recent.append(error)
        self._errors += error
        if self._errors > self.error_share * self.window:
            self.trip()
        elif len(self._recent) == self.window:
            self.openings = 0

    def trip(self) -> None:
        if not self.is_open:
            self.is_open = True
            self.openings += 1
            self._opened_at = self.clock()
            self._pauses = 0

    def next_pause_s(self, asked_s: float | None) -> float | None:
        """Seconds until the next probe: what the server asked for, else twice the last pause. None: give up."""
        pause = min(self.pause_s * 2**self._pauses, MAX_PAUSE_S) if asked_s is None else asked_s
        self._pauses += 1
        over = self.clock() + pause > self._opened_at + self.give_up_s
        return None if over or self.openings > self.max_openings else pause

    def close(self) -> None:
        self.is_open = False
        self._recent.clear()
        self._errors = 0
