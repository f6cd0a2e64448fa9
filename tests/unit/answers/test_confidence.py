"""A floor under a label's confidence."""

from __future__ import annotations

import pytest

from millrace.answers import AnswerSchema, held_to_floor, parse_answer

SCHEMA = AnswerSchema.from_dict(
    {"mood": {"labels": ["good", "bad"]}, "tone": {"labels": ["calm"], "optional": True}, "score": {"number": {}}}
)
ANSWER = '{"mood":"good","tone":"calm","score":1}'
NO_TONE = '{"mood":"good","tone":null,"score":1}'


@pytest.mark.parametrize(
    ("text", "confidence", "floor", "outcome"),
    [
        (ANSWER, {"mood": 0.9, "tone": 0.9}, 0.5, ("ok", None)),
        (ANSWER, {"mood": 0.5, "tone": 0.5}, 0.5, ("ok", None)),
        (ANSWER, {"mood": 0.9, "tone": 0.4}, 0.5, ("unknown", "low_confidence")),
        (ANSWER, {"mood": 0.9}, 0.5, ("unknown", "low_confidence")),
        (ANSWER, None, 0.5, ("unknown", "low_confidence")),
        (NO_TONE, {"mood": 0.9}, 0.5, ("ok", None)),
        (ANSWER, None, None, ("ok", None)),
        (ANSWER, {"mood": 0.1, "tone": 0.1}, None, ("ok", None)),
        ("no answer", {"mood": 0.9}, 0.5, ("unknown", "not_json")),
    ],
)
def test_every_label_that_an_answer_has_must_be_known_to_reach_the_floor(
    text: str, confidence: dict[str, float] | None, floor: float | None, outcome: tuple[str, str | None]
) -> None:
    held = held_to_floor(parse_answer(text, SCHEMA), SCHEMA, confidence, floor)
    assert (held.status, held.reason) == outcome
    assert bool(held.values) == (outcome[0] == "ok")


def test_an_answer_without_labels_has_nothing_to_hold_to_a_floor() -> None:
    schema = AnswerSchema.from_dict({"score": {"number": {}}})
    assert held_to_floor(parse_answer('{"score":1}', schema), schema, None, 0.9).status == "ok"
