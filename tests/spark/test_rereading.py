"""An answer read from the cache means what it meant when the engine gave it: both readings go by one rule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.schemas import ANSWER
from millrace.spark.reuse import reread
from shard_runner.engines.base import Ask, Reply
from shard_runner.pump import Pump, Reading

from .conftest import World

TEXTS = ('{"sentiment":"positive"}', '{"sentiment":"POSITIVE"}', '{"sentiment":"odd"}', "I cannot help", "")
CONFIDENCES: tuple[dict[str, float] | None, ...] = (None, {"sentiment": 0.3}, {"sentiment": 0.5}, {"sentiment": 0.9})
REPLIES = {
    f"{text}{confidence}{finish}": Reply(f"{text}{confidence}{finish}", text, finish, confidence=confidence)
    for text in TEXTS
    for confidence in CONFIDENCES
    for finish in ("stop", "length")
}


class Instant:
    """An engine that gives each request the reply of its id."""

    slots = capacity = 4

    def __init__(self) -> None:
        self._inside: list[Reply] = []

    def submit(self, ask: Ask) -> None:
        self._inside.append(REPLIES[ask.request_id])

    def poll(self, timeout_s: float) -> list[Reply]:
        given, self._inside = self._inside, []
        return given


def asks() -> Iterator[Ask]:
    return (Ask(request_id, "", "", None, 8) for request_id in REPLIES)


@pytest.mark.parametrize("floor", [None, 0.5])
def test_a_stored_answer_is_read_as_the_runner_read_it(world: World, floor: float | None) -> None:
    world.write_source([{"id": "a", "comment": "x", "rating": 1.0}])
    world.spec["limits"] |= {"confidence_floor": floor}
    plan = world.plan()
    pump = Pump(Instant, Reading.of(plan.enrichment, longer=lambda ask: None))  # type: ignore[arg-type]
    given = {answer.request_id: answer for answer in pump.answers(asks())}
    assert given.keys() == REPLIES.keys()
    for answer in given.values():
        stored = dict.fromkeys(ANSWER.names) | {
            "reading": "of another time",
            "raw_text": answer.raw_text,
            "finish_reason": answer.finish_reason,
            "confidence": answer.confidence,
        }
        assert meaning(reread(stored, plan)) == meaning(answer._asdict()), answer.request_id
    assert {answer.status for answer in given.values()} == {"ok", "unknown"}


def meaning(answer: dict[str, Any]) -> tuple[Any, ...]:
    values = answer["values"] and json.loads(answer["values"])
    return answer["status"], answer["reason"], values, answer["repaired"]
