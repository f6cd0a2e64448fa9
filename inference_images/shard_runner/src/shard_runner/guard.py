"""What ends a shard early: a signal, `stop.json`, the plan's limits, too many unusable answers."""

from __future__ import annotations

import signal
import time
from collections import Counter, deque
from types import FrameType

from millrace.answers import Reason, Status, kind_of_skip
from millrace.enrichment import Limits
from millrace.errors import StoppedError, UnusableError
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.records import Stop


class Signals:
    """SIGTERM and SIGINT. While `interruptible` they raise StoppedError where the process stands (a model that loads); else
    they only set `stopped`, which the loop reads between polls."""

    def __init__(self) -> None:
        self.stopped: str | None = None
        self.interruptible = False

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.stopped is None
        self.stopped = f"received {signal.Signals(number).name}"
        if first and self.interruptible:
            raise StoppedError(self.stopped)

    def check(self) -> None:
        if self.stopped:
            raise StoppedError(self.stopped)


class Guard:
    """Judges a shard while it runs. `between_parts` and `count` raise what ends it."""

    def __init__(self, lake: Lake, paths: RunPaths, shard_id: str, limits: Limits, signals: Signals) -> None:
        self._lake, self._paths, self._shard_id, self._limits, self._signals = lake, paths, shard_id, limits, signals
        self._started = time.monotonic()
        self._tokens = 0
        self._window: deque[bool] = deque(maxlen=limits.early_stop_requests)
        self._unusable = 0
        self._reasons: Counter[str] = Counter()

    def check_signals(self) -> None:
        self._signals.check()

    def check_stop(self) -> None:
        """Raise StoppedError when the run's `stop.json` says so."""
        stop = Stop.load_or_none(self._lake, self._paths.stop)
        if stop is not None:
            raise StoppedError(
                f"the run was stopped by {stop.by}: {stop.reason} Clearing `infer` removes {self._paths.stop}."
            )

    def count(self, status: str, reason: str | None, tokens: int) -> None:
        """Take one answer of this attempt into account. Raises UnusableError when a full window holds too many unusable ones."""
        self._tokens += tokens
        bad = status in (Status.unknown, Status.failed) or (
            status == Status.skipped and kind_of_skip(reason or Reason.unclean) == "not_askable"
        )
        if len(self._window) == self._window.maxlen:
            self._unusable -= self._window[0]
        self._window.append(bad)
        self._unusable += bad
        if bad and reason:
            self._reasons[reason] += 1
        limit = self._limits.early_stop_unknown_rate
        if len(self._window) == self._window.maxlen and self._unusable > limit * len(self._window):
            reasons = ", ".join(f"{name} {count:,}" for name, count in self._reasons.most_common())
            message = (
                f"{self._unusable} of the last {len(self._window)} answers of shard {self._shard_id} are unusable "
                f"(limits.early_stop_unknown_rate {limit:.0%}); reasons in this attempt: {reasons}. "
                "The prompt or the model is at fault: mend it and clear `plan`."
            )
            self.stop_run(message)
            raise UnusableError(message)

    def check_limits(self) -> None:
        """Raise StoppedError when this attempt has spent the plan's tokens or seconds per shard."""
        seconds = time.monotonic() - self._started
        spent = None
        if self._limits.shard_tokens is not None and self._tokens >= self._limits.shard_tokens:
            spent = f"spent {self._tokens:,} tokens (limits.shard_tokens {self._limits.shard_tokens:,})"
        elif self._limits.shard_seconds is not None and seconds >= self._limits.shard_seconds:
            spent = f"ran {seconds:,.0f} s (limits.shard_seconds {self._limits.shard_seconds:,})"
        if spent:
            message = (
                f"shard {self._shard_id} {spent}; its answers are saved. Clear `infer` to go on, or raise the limit."
            )
            self.stop_run(message)
            raise StoppedError(message)

    def between_parts(self) -> None:
        self.check_limits()
        self.check_stop()

    def stop_run(self, message: str) -> None:
        """Tell every runner of the run to end; the first reason given stands."""
        self._lake.create(self._paths.stop, Stop(reason=message, by=f"shard {self._shard_id}").dump())
