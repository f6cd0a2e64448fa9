"""One mapping from how a process ended to what Airflow does next."""

from __future__ import annotations

import signal
from datetime import timedelta

import pytest
from airflow.sdk import RetryAction

from millrace.airflow.retries import (
    POLICY,
    UNAVAILABLE_DELAY,
    CrashedError,
    GaveUpError,
    ReclaimedError,
    error_for,
    first_try_since_clear,
)
from millrace.errors import (
    ConfigError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    StoppedError,
    UnavailableError,
    UnusableError,
)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (2, ConfigError),
        (3, UnavailableError),
        (4, UnusableError),
        (75, StoppedError),
        (-signal.SIGKILL, ReclaimedError),
        (-signal.SIGTERM, ReclaimedError),
        (137, ReclaimedError),
        (143, ReclaimedError),
        (1, CrashedError),
        (134, CrashedError),
    ],
)
def test_each_exit_code_stands_for_one_error(code: int, error: type[Exception]) -> None:
    raised = error_for(code, "shard 12 of runs/x")
    assert type(raised) is error
    assert str(raised) == "shard 12 of runs/x"


@pytest.mark.parametrize(
    ("error", "action", "delay"),
    [
        (StoppedError("x"), RetryAction.RETRY, timedelta(0)),
        (ReclaimedError("x"), RetryAction.RETRY, timedelta(0)),
        (UnavailableError("x"), RetryAction.RETRY, UNAVAILABLE_DELAY),
        (ConfigError("x"), RetryAction.FAIL, None),
        (NotFoundError("x"), RetryAction.FAIL, None),
        (UnusableError("x"), RetryAction.FAIL, None),
        (RefusedError("x"), RetryAction.FAIL, None),
        (IncompleteError("x"), RetryAction.FAIL, None),
        (GaveUpError("x"), RetryAction.FAIL, None),
        (CrashedError("x"), RetryAction.DEFAULT, None),
        (ConnectionResetError("x"), RetryAction.DEFAULT, None),
    ],
)
def test_retrying_follows_from_the_error(error: Exception, action: RetryAction, delay: timedelta | None) -> None:
    decision = POLICY.evaluate(error, try_number=1, max_tries=50)
    assert (decision.action, decision.retry_delay) == (action, delay)


def test_the_policy_survives_serialization() -> None:
    again = type(POLICY).deserialize(POLICY.serialize())
    assert again.evaluate(StoppedError("x"), try_number=1, max_tries=50).action is RetryAction.RETRY
    assert again.evaluate(RefusedError("x"), try_number=1, max_tries=50).action is RetryAction.FAIL


@pytest.mark.parametrize(
    ("try_number", "max_tries", "first"),
    [
        (1, 50, 1),  # never cleared
        (7, 50, 1),
        (5, 54, 5),  # cleared after try 4
        (9, 54, 5),
        (1, 0, 1),
    ],
)
def test_tries_are_counted_from_the_last_clear(try_number: int, max_tries: int, first: int) -> None:
    assert first_try_since_clear(try_number, max_tries, retries=50) == first
