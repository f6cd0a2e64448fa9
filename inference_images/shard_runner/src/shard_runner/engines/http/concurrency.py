"""How many calls to keep at an endpoint at once: additive increase, multiplicative decrease, with a memory of the ceiling.

Nothing here knows sockets, tasks or clocks. A *round* is as many successes as the limit; an *epoch* is the time between
two decreases, so that the many refusals of one burst count once:

    epoch = concurrency.take()                     # a call leaves
    concurrency.release()                          # it came back, and then one of
    concurrency.succeeded(epoch, latency_s)
    concurrency.congested(epoch)                   # 429, 503 or a timeout
"""

from __future__ import annotations

DECREASE = 0.7
# A refusal costs about 0.6 rounds of throughput (70 % of the ceiling, then half the gap each round), and one in 60 rounds
# is one call in 60 times the ceiling. Simulated, 98 % of a hard capacity of 4 to 64 calls is used.
REST_ROUNDS = 60


class Concurrency:
    """The limit on calls in flight.

    Until the first refusal the limit doubles each round. A refusal sets the ceiling just under the limit it happened at
    and multiplies the limit by `DECREASE`. Below the ceiling, the limit gains half the gap each round; at the ceiling it
    rests `REST_ROUNDS` rounds, then gains one, two, four... a round while nothing is refused. A pure sawtooth (gain one, halve) would
    hold 75 % of a fixed capacity and see a refusal in every few rounds.

    The limit only grows after a round in which it was reached, and while latency holds: while the round's mean latency is
    within `latency_tolerance` times the lowest round's.
    """

    def __init__(self, initial: int, maximum: int, latency_tolerance: float) -> None:
        self.in_flight = 0
        self._initial = min(initial, maximum)
        self._maximum = maximum
        self._tolerance = latency_tolerance
        self._epoch = 0
        self._best_latency = float("inf")
        self.restart()

    def restart(self) -> None:
        """Begin afresh after an outage: refusals during it say nothing about the capacity after it."""
        self.limit = self._initial
        self._ceiling: int | None = None
        self._rested = 0
        self._step = 1
        self._epoch += 1
        self._new_round()

    def _new_round(self) -> None:
        self._successes = 0
        self._latencies = 0.0
        self._reached = False

    @property
    def free(self) -> bool:
        return self.in_flight < self.limit

    def take(self) -> int:
        """Count a call that leaves; returns the epoch it belongs to."""
        self.in_flight += 1
        self._reached |= self.in_flight >= self.limit
        return self._epoch

    def release(self) -> None:
        self.in_flight -= 1

    def succeeded(self, epoch: int, latency_s: float) -> None:
        if epoch != self._epoch:
            return
        self._successes += 1
        self._latencies += latency_s
        if self._successes < self.limit:
            return
        latency, reached = self._latencies / self._successes, self._reached
        self._best_latency = min(self._best_latency, latency)
        self._new_round()
        if reached and latency <= self._tolerance * self._best_latency:
            self._grow()

    def _grow(self) -> None:
        if self._ceiling is None:
            limit = self.limit * 2
        elif self.limit < self._ceiling:
            limit = self.limit + (self._ceiling - self.limit + 1) // 2
        elif self._rested < REST_ROUNDS:
            self._rested += 1
            return
        else:
            limit = self.limit + self._step
            self._step *= 2
        self.limit = min(limit, self._maximum)

    def congested(self, epoch: int) -> None:
        """Decrease once per epoch: calls sent before the last decrease say nothing about the limit it set."""
        if epoch != self._epoch:
            return
        self._epoch += 1
        self._ceiling = max(1, self.limit - 1)
        self._rested = 0
        self._step = 1
        self.limit = max(1, int(self.limit * DECREASE))
        self._new_round()
