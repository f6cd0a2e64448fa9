"""Which tokens make a label's confidence."""

from __future__ import annotations

import pytest

from millrace.answers import AnswerSchema
from shard_runner.confidence import label_confidence

SCHEMA = AnswerSchema.from_dict({"sentiment": {"labels": ["good", "bad"]}, "topic": {"labels": ["price", "other"]}})


def test_a_label_is_as_sure_as_the_product_of_its_own_tokens() -> None:
    pieces = [
        ('{"', 0.9),
        ("sentiment", 0.9),
        ('":"', 0.9),
        ("go", 0.5),
        ("od", 0.8),
        ('","', 0.9),
        ("topic", 0.9),
        ('":"', 0.9),
    ]
    pieces += [("price", 0.7), ('"}', 0.9)]
    text = "".join(piece for piece, _ in pieces)
    assert label_confidence(text, pieces, SCHEMA, "json") == {
        "sentiment": pytest.approx(0.4),
        "topic": pytest.approx(0.7),
    }


def test_compact_parts_are_told_apart() -> None:
    pieces = [("ba", 0.6), ("d", 1.0), ("|", 1.0), ("other", 0.25)]
    assert label_confidence("bad|other", pieces, SCHEMA, "compact") == {
        "sentiment": pytest.approx(0.6),
        "topic": pytest.approx(0.25),
    }


def test_a_text_that_its_tokens_do_not_spell_has_no_confidence() -> None:
    assert label_confidence("bad|other", [("ba", 0.6)], SCHEMA, "compact") is None
