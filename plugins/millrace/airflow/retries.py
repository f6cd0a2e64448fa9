"""From how a process ended to what Airflow does next: one mapping for every step that starts one.

| ended                                | raised           | Airflow                                  |
| ------------------------------------ | ---------------- | ---------------------------------------- |
| 0                                    | -                | goes on, once the step's record proves it |
| 2 plan or configuration wrong        | ConfigError      | fails, no retry                          |
| 3 engine or endpoint unavailable     | UnavailableError | retries in 5 minutes                     |
| 4 too many unusable answers          | UnusableError    | fails, no retry                          |
| 75 told to stop, everything is saved | StoppedError     | retries at once                          |
| killed by a signal, no record left   | ReclaimedError   | retries at once                          |
| anything else                        | CrashedError     | retries in a minute                      |

A retry counts against `retries` whatever the reason, so `infer` has many of them (a reclaimed node is no failure), and more than
`MAX_FAILURES` real failures since the last clear end the task early.
"""

from __future__ import annotations

import signal
from datetime import timedelta

from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

from millrace.errors import (
    ConfigError,
    ExitCode,
    MillraceError,
    RefusedError,
    StoppedError,
    UnavailableError,
    UnusableError,
)

INFER_RETRIES = 50
STEP_RETRIES = 2
MAX_FAILURES = 3
CRASH_DELAY = timedelta(minutes=1)
UNAVAILABLE_DELAY = timedelta(minutes=5)
# 128 + signal is how a shell or a container runtime passes on a death by signal.
_SIGNAL_EXITS = frozenset({128 + signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGINT})


class ReclaimedError(Exception):
    """The process was killed and could not say why: a node taken back, memory run out."""


class CrashedError(Exception):
    """The process ended in a way that has no meaning of its own."""


class GaveUpError(RefusedError):
    """Too many real failures since the last clear."""


POLICY = ExceptionRetryPolicy(
    rules=[
        RetryRule(exception=[StoppedError, ReclaimedError], action=RetryAction.RETRY, retry_delay=timedelta(0)),
        RetryRule(exception=UnavailableError, action=RetryAction.RETRY, retry_delay=UNAVAILABLE_DELAY),
        RetryRule(exception=MillraceError, action=RetryAction.FAIL),
    ]
)


def error_for(exit_code: int, message: str) -> Exception:
    """The exception that stands for an exit code other than 0. A negative code is the signal that ended the process."""
    match exit_code:
        case ExitCode.CONFIG:
            return ConfigError(message)
        case ExitCode.UNAVAILABLE:
            return UnavailableError(message)
        case ExitCode.UNUSABLE:
            return UnusableError(message)
        case ExitCode.STOPPED:
            return StoppedError(message)
        case code if code < 0 or code in _SIGNAL_EXITS:
            return ReclaimedError(message)
        case _:
            return CrashedError(message)


def first_try_since_clear(try_number: int, max_tries: int, retries: int) -> int:
    """Number of the first try after the last clear, 1 when the task was never cleared.

    Try numbers go on growing across clears; a clear sets `max_tries` to the number of the last try plus `retries`.

    >>> first_try_since_clear(3, 50, 50), first_try_since_clear(8, 54, 50)
    (1, 5)
    """
    return max(1, min(try_number, max_tries - retries + 1))
