"""When the circuit breaker opens, how long it pauses, and when it gives up."""

from __future__ import annotations

from shard_runner.engines.http.breaker import Breaker


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock, **changes: float) -> Breaker:
    settings = {"window": 100, "error_share": 0.05, "pause_s": 5.0, "give_up_s": 300.0, "max_openings": 3} | changes
    return Breaker(clock=clock, **settings)  # type: ignore[arg-type]


def test_it_opens_above_five_percent_of_the_window_and_not_at_it() -> None:
    subject = breaker(Clock())
    for number in range(200):
        subject.record(number % 20 == 0)
    assert not subject.is_open
    for _ in range(2):
        subject.record(True)
    assert subject.is_open


def test_old_errors_leave_the_window() -> None:
    subject = breaker(Clock())
    for _ in range(4):
        for _ in range(5):
            subject.record(True)
        for _ in range(100):
            subject.record(False)
    assert not subject.is_open


def test_an_endpoint_that_is_down_from_the_start_is_noticed_after_six_calls() -> None:
    subject = breaker(Clock())
    for _ in range(6):
        subject.record(True)
    assert subject.is_open


def test_pauses_double_up_to_a_minute_and_end_with_the_deadline() -> None:
    clock = Clock()
    subject = breaker(clock)
    subject.trip()
    pauses = []
    while (pause := subject.next_pause_s(None)) is not None:
        pauses.append(pause)
        clock.now += pause
    assert pauses == [5, 10, 20, 40, 60, 60, 60]
    assert sum(pauses) <= 300


def test_the_servers_wait_is_taken_instead_and_one_beyond_the_deadline_ends_it_at_once() -> None:
    subject = breaker(Clock())
    subject.trip()
    assert subject.next_pause_s(42.0) == 42.0
    assert subject.next_pause_s(999999.0) is None


def test_reopening_again_and_again_without_a_clean_window_gives_up() -> None:
    """A probe that succeeds proves little when real calls keep failing."""
    subject = breaker(Clock())
    for _ in range(3):
        subject.trip()
        assert subject.next_pause_s(None) is not None
        subject.close()
    subject.trip()
    assert subject.next_pause_s(None) is None


def test_a_clean_window_forgives_earlier_openings() -> None:
    subject = breaker(Clock())
    for _ in range(10):
        subject.trip()
        assert subject.next_pause_s(None) is not None
        subject.close()
        for _ in range(100):
            subject.record(False)
    assert subject.openings == 0
