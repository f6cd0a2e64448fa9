"""Status and reason of an answer: two closed enums, so that a null is never a riddle."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class Status(StrEnum):
    """What became of a request or row."""

    ok = "ok"
    unknown = "unknown"  # the model spoke, but not usably
    failed = "failed"  # no answer came
    skipped = "skipped"  # never asked


class Reason(StrEnum):
    """Why a status is not `ok`; `REASONS` says what each means."""

    empty = "empty"
    not_json = "not_json"
    not_a_label = "not_a_label"
    ambiguous = "ambiguous"
    truncated = "truncated"
    refused = "refused"
    schema = "schema"
    not_finite = "not_finite"
    reasoning_only = "reasoning_only"
    too_large = "too_large"
    low_confidence = "low_confidence"

    engine_error = "engine_error"
    poison = "poison"
    timeout = "timeout"
    rate_limited = "rate_limited"
    server_error = "server_error"
    no_answer = "no_answer"

    blank = "blank"
    excluded = "excluded"
    too_long = "too_long"
    unclean = "unclean"


REASONS: dict[Reason, tuple[Status, str]] = {
    Reason.empty: (Status.unknown, "the answer holds no text"),
    Reason.not_json: (Status.unknown, "no readable object in the answer"),
    Reason.not_a_label: (Status.unknown, "a value is none of the field's labels or aliases"),
    Reason.ambiguous: (Status.unknown, "several readings that differ"),
    Reason.truncated: (Status.unknown, "cut before the answer was complete"),
    Reason.refused: (Status.unknown, "the model declined to answer"),
    Reason.schema: (Status.unknown, "a field is missing, of the wrong type or shape, or out of bounds"),
    Reason.not_finite: (Status.unknown, "a number is NaN, infinite, or too large for 64-bit floating point"),
    Reason.reasoning_only: (Status.unknown, "reasoning, and no answer after it"),
    Reason.too_large: (Status.unknown, "longer or more deeply nested than any answer may be"),
    Reason.low_confidence: (Status.unknown, "a label's confidence is under the enrichment's floor, or not known"),
    Reason.engine_error: (Status.failed, "the engine raised an error on this request"),
    Reason.poison: (Status.failed, "set aside: the engine died each time on this request"),
    Reason.timeout: (Status.failed, "no answer within the time limit, retries included"),
    Reason.rate_limited: (Status.failed, "the endpoint kept refusing for load"),
    Reason.server_error: (Status.failed, "the endpoint kept failing"),
    Reason.no_answer: (Status.failed, "the request was asked and no answer was recorded"),
    Reason.blank: (Status.skipped, "the text is null or blank"),
    Reason.excluded: (Status.skipped, "excluded by the enrichment's rule"),
    Reason.too_long: (Status.skipped, "the text is longer than the model can take"),
    Reason.unclean: (Status.skipped, "the text cannot be made fit to ask"),
}

_NOT_APPLICABLE = frozenset({Reason.blank, Reason.excluded})


def status_of(reason: Reason | str) -> Status:
    """The one status a reason belongs to."""
    return REASONS[Reason(reason)][0]


def kind_of_skip(reason: Reason | str) -> Literal["not_applicable", "not_askable"]:
    """Which of the two kinds a skip reason is; only `not_askable` counts towards the unknown rate.

    Raises ValueError for a reason that is not a skip reason.
    """
    reason = Reason(reason)
    if status_of(reason) is not Status.skipped:
        raise ValueError(f"{reason} is not a reason to skip a row")
    return "not_applicable" if reason in _NOT_APPLICABLE else "not_askable"
