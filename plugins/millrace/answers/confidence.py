"""The floor under a label's confidence: one rule, for an answer that was just given and for one that was stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from millrace.answers.kinds import OneLabel
from millrace.answers.parse import Parsed
from millrace.answers.reasons import Reason, Status
from millrace.answers.schema import AnswerSchema


def held_to_floor(
    parsed: Parsed, schema: AnswerSchema, confidence: Mapping[str, float] | None, floor: float | None
) -> Parsed:
    """The answer itself, or `unknown` for `low_confidence` where one of its labels is less probable than `floor`.

    `confidence` maps fields that are one label to a probability. A label that has none does not pass a floor: nobody knows how sure
    the engine was. Without a floor, or for an answer that is not `ok`, nothing changes.
    """
    if floor is None or parsed.status != Status.ok:
        return parsed
    known = confidence or {}
    if all(known.get(name, 0.0) >= floor for name in labels_of(schema) if parsed.values.get(name) is not None):
        return parsed
    return replace(parsed, status=Status.unknown, reason=Reason.low_confidence, values={})


def labels_of(schema: AnswerSchema, *, required: bool = False) -> list[str]:
    """Names of the fields that are one label, which are those that have a confidence; with `required`, without the optional ones."""
    return [f.name for f in schema.fields if isinstance(f.kind, OneLabel) and not (required and f.optional)]
