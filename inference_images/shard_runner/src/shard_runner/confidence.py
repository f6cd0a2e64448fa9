"""How sure the engine was of each label, from the probabilities of the tokens it wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence

from millrace.answers import AnswerSchema
from millrace.answers.kinds import OneLabel


def label_confidence(
    text: str, pieces: Sequence[tuple[str, float]], schema: AnswerSchema, form: str
) -> dict[str, float] | None:
    """Field -> probability of the label it says, for fields that are one label; None where the text cannot be followed.

    `pieces` are the tokens' texts with their probabilities. A label's probability is the product over the tokens that touch it: under a
    grammar they are conditional on what may follow, so a token that the grammar forces counts 1.
    """
    names = [field.name for field in schema.fields if isinstance(field.kind, OneLabel)]
    spans = _compact_spans(text, schema.names) if form == "compact" else _json_spans(text, names)
    found: dict[str, float] = {}
    position = 0
    bounds = []
    for piece, probability in pieces:
        bounds.append((position, position + len(piece), probability))
        position += len(piece)
    if position < len(text):
        return None
    for name, (start, end) in spans.items():
        if name in names:
            probability = 1.0
            for begin, finish, p in bounds:
                if begin < end and finish > start:
                    probability *= p
            found[name] = round(probability, 4)
    return found or None


def _compact_spans(text: str, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    spans = {}
    position = 0
    for name, part in zip(names, text.split("|"), strict=False):
        spans[name] = (position, position + len(part))
        position += len(part) + 1
    return spans


def _json_spans(text: str, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Where the value of each field stands in a compact JSON object (the grammar leaves no free whitespace)."""
    spans = {}
    for name in names:
        key = json.dumps(name) + ":"
        at = text.find(key)
        if at >= 0:
            start = at + len(key)
            while start < len(text) and text[start] in ' "':
                start += 1
            end = text.find('"', start)
            if end > start:
                spans[name] = (start, end)
    return spans
