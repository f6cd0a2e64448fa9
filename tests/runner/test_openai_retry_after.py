"""Retry-After in each form that servers send."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from shard_runner.engines.http.retry_after import FOR_EVER_S, retry_after_s

NOW = datetime(2026, 11, 30, 10, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("2", 2.0),
        (" 2 ", 2.0),
        ("0", 0.0),
        ("1.5", 2.0),
        ("999999", 999999.0),
        ("9" * 400, FOR_EVER_S),
        ("Mon, 30 Nov 2026 10:00:03 GMT", 3.0),
        ("Monday, 30-Nov-26 10:00:03 GMT", 3.0),
        ("Mon Nov 30 10:00:03 2026", 3.0),
    ],
)
def test_a_legal_wait_is_read_and_rounded_up(value: str, seconds: float) -> None:
    assert retry_after_s(value, now=NOW) == seconds


@pytest.mark.parametrize(
    "value", [None, "", "-1", "abc", "NaN", "inf", "1e3", "٣", "Sun, 29 Nov 2026 10:00:00 GMT", "Mon, 99 Foo"]
)
def test_garbage_and_the_past_leave_the_wait_to_us(value: str | None) -> None:
    assert retry_after_s(value, now=NOW) is None


def test_a_date_is_compared_with_the_servers_own_clock() -> None:
    """A server whose clock is an hour behind ours asks for three seconds, not for none."""
    wait = retry_after_s("Mon, 30 Nov 2026 09:00:03 GMT", date="Mon, 30 Nov 2026 09:00:00 GMT", now=NOW)
    assert wait == 3.0


def test_a_date_with_part_of_a_second_to_go_is_not_come_early_to() -> None:
    assert retry_after_s("Mon, 30 Nov 2026 10:00:03 GMT", now=NOW.replace(microsecond=400_000)) == 3.0
