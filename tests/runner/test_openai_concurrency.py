"""The concurrency controller, against a simulated server in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from shard_runner.engines.http.concurrency import DECREASE, Concurrency

MEAN_S = 1.0495  # of a simulated call; they differ by up to a tenth, so that they do not come back in lockstep


@dataclass
class Seen:
    answered: int = 0
    refused: int = 0
    most: int = 0


def simulate(
    concurrency: Concurrency,
    capacity: Callable[[float], int],
    until: float,
    since: float = 0.0,
    latency: Callable[[int], float] = lambda inside: 1.0,
    backoff: float = 0.3,
) -> Seen:
    """Keep the limit filled with calls of about a second; a refusal comes at once and holds its place for `backoff`."""
    events: list[tuple[float, int, str, int, float]] = []
    seen, serving, held, number, now = Seen(), 0, 0, 0, 0.0
    while now < until:
        while held < concurrency.limit and concurrency.free:
            held, number = held + 1, number + 1
            epoch = concurrency.take()
            seen.most = max(seen.most, concurrency.in_flight)
            if serving < capacity(now):
                serving += 1
                took = latency(serving) * (1 + (number * 7919 % 100) / 1000)
                heapq.heappush(events, (now + took, number, "answer", epoch, took))
            else:
                heapq.heappush(events, (now + 0.001, number, "refusal", epoch, 0.001))
        now, _, what, epoch, took = heapq.heappop(events)
        if what == "answer":
            serving, held = serving - 1, held - 1
            concurrency.release()
            concurrency.succeeded(epoch, took)
            seen.answered += now >= since
        elif what == "refusal":
            concurrency.release()
            concurrency.congested(epoch)
            seen.refused += now >= since
            heapq.heappush(events, (now + backoff, number, "waited", epoch, 0.0))
        else:
            held -= 1
    concurrency.in_flight = 0
    return seen


@pytest.mark.parametrize("capacity", [1, 2, 4, 7, 20, 64])
def test_a_hard_capacity_is_used_to_95_percent_with_under_2_percent_refusals(capacity: int) -> None:
    """After a warm-up of 60 service times."""
    seen = simulate(Concurrency(8, 256, 4), lambda now: capacity, until=560, since=60)
    assert seen.answered / 500 >= 0.95 * capacity / MEAN_S
    assert seen.refused < 0.02 * (seen.answered + seen.refused)


def test_a_capacity_that_falls_is_followed_down_and_one_that_rises_is_found() -> None:
    concurrency = Concurrency(8, 256, 4)
    assert simulate(concurrency, lambda now: 64, until=100, since=50).answered >= 50 * 64 * 0.9
    fallen = simulate(concurrency, lambda now: 16, until=100, since=20)
    assert fallen.answered >= 80 * 16 * 0.9 and fallen.refused < 0.05 * fallen.answered
    risen = simulate(concurrency, lambda now: 64, until=300, since=200)
    assert risen.answered >= 100 * 64 * 0.9


def test_many_refusals_of_one_burst_lower_the_limit_once() -> None:
    concurrency = Concurrency(100, 256, 4)
    epochs = [concurrency.take() for _ in range(100)]
    for epoch in epochs:
        concurrency.release()
        concurrency.congested(epoch)
    assert concurrency.limit == int(100 * DECREASE)


def test_the_limit_never_falls_below_one_call_nor_rises_above_the_maximum() -> None:
    concurrency = Concurrency(8, 32, 4)
    for _ in range(50):
        concurrency.congested(concurrency.take())
        concurrency.release()
    assert concurrency.limit == 1
    seen = simulate(Concurrency(8, 32, 4), lambda now: 10_000, until=50)
    assert seen.most == 32


def test_the_limit_stops_growing_when_latency_grows_with_it() -> None:
    """A server that queues and never refuses: beyond 16 calls each takes longer in proportion, so more of them gain nothing."""
    concurrency = Concurrency(8, 4096, 4)
    seen = simulate(concurrency, lambda now: 10_000, until=300, since=50, latency=lambda inside: max(1.0, inside / 16))
    assert seen.answered >= 250 * 16 * 0.9
    assert concurrency.limit <= 4 * 16 * 2


def test_a_limit_that_is_not_reached_does_not_grow() -> None:
    concurrency = Concurrency(8, 256, 4)
    for _ in range(1000):
        epoch = concurrency.take()
        concurrency.release()
        concurrency.succeeded(epoch, 1.0)
    assert concurrency.limit == 8


def test_an_outage_does_not_teach_a_low_ceiling() -> None:
    concurrency = Concurrency(8, 256, 4)
    for _ in range(20):
        concurrency.congested(concurrency.take())
        concurrency.release()
    concurrency.restart()
    assert simulate(concurrency, lambda now: 64, until=60, since=30).answered >= 30 * 64 * 0.9
