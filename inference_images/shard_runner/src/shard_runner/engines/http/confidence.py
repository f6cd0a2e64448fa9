"""How sure the model was of each label, from the log-probabilities of the tokens that spell it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from millrace.answers import AnswerSchema
from millrace.answers.kinds import OneLabel


def label_confidence(
    text: str, tokens: Sequence[tuple[str, float]], schema: AnswerSchema, form: str
) -> dict[str, float] | None:
    """Label field -> probability of its value: the product over all tokens that share a character with it.

    `tokens` are (token, natural logarithm of its probability) and must spell `text`; None where they do not. A field whose
    value cannot be found exactly once is left out.
    """
    if "".join(token for token, _ in tokens) != text:
        return None
    confidence = {}
    for field, start, end in _spans(text, schema, form):
        total, at = 0.0, 0
        for token, logprob in tokens:
            if at < end and at + len(token) > start:
                total += logprob
            at += len(token)
        confidence[field] = math.exp(min(total, 0.0))
    return confidence


def _spans(text: str, schema: AnswerSchema, form: str) -> Iterator[tuple[str, int, int]]:
    if form == "compact":
        at = 0
        for field, part in zip(schema.names, text.split("|"), strict=False):
            yield field, at, at + len(part)
            at += len(part) + 1
        return
    for name in (field.name for field in schema.fields if isinstance(field.kind, OneLabel)):
        found = list(re.finditer(rf'"{re.escape(name)}"\s*:\s*"((?:[^"\\]|\\.)*)"', text))
        if len(found) == 1:
            yield name, *found[0].span(1)
