"""Reads a model's text into values by a schema: the strict reading first, the lenient one only where that fails."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from millrace.answers.kinds import OneLabel, Unacceptable, decode_int, pairs_to_dict, read_fields
from millrace.answers.reader import TooDeep, scan
from millrace.answers.reasons import Reason, Status
from millrace.answers.schema import PARSER_VERSION, AnswerSchema, Form

__all__ = ["PARSER_VERSION", "Parsed", "parse_answer", "split_reasoning"]

MAX_CHARS = 262_144

_decode = json.JSONDecoder(object_pairs_hook=pairs_to_dict, parse_int=decode_int).decode
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

_REASONING_TAG = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>|\[(/?)THINK\]", re.IGNORECASE)
_OBJECT_LIKE = re.compile(r"\s*(?:```\w*\s*)?[{\[]")
# A text that starts as a JSON string holding an object: what is in it is escaped once more, and is not to be read as it stands.
_ENCODED = re.compile(r"""\s*["'“]\s*[{\[]""")
_REFUSAL = re.compile(
    r"""[\W_]*(?:
        (?:i['’]?m|i\ am)\ (?:very\ |so\ |really\ )?sorry\b | sorry,?\ (?:but\ )?i\b | (?:i\ )?apologi[sz]e\b | my\ apologies\b
      | (?:unfortunately,?\ )?i\ (?:can(?:['’]?t|not|\ not)|won['’]?t|will\ not|must\ decline|decline\ to|refuse)\b
      | (?:unfortunately,?\ )?(?:i['’]?m|i\ am)\ (?:unable|not\ able|not\ allowed)\b
      | as\ an\ ai\b
      | es\ tut\ mir\ leid\b | ich\ kann\ (?:das\ |dies\ )?nicht\b | lo\ siento\b | je\ (?:suis\ désolé|ne\ peux\ pas)
      | (?:非常|很)?抱歉 | 对不起 | 我(?:无法|不能)
    )""",
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a text means.

    `values` maps every field to its value (None for an optional field without one) where `status` is ok, else it is empty.
    `repaired` names each liberty taken; empty for a text that was valid as it stood. Those that concern one field start with
    its name: "sentiment:alias", "score:missing".
    """

    status: Status
    reason: Reason | None
    values: dict[str, Any]
    repaired: tuple[str, ...] = ()

    def values_json(self) -> str:
        """The values as compact JSON in the order of the fields, non-ASCII kept; "{}" where there are none."""
        return _encode(self.values)


def parse_answer(
    text: str | None, schema: AnswerSchema, finish_reason: str | None = None, form: Form = "json"
) -> Parsed:
    """Reads one answer.

    `finish_reason` is the engine's: after "length" only an answer that closed is complete, after "content_filter" a text without a
    valid answer is a refusal. `form` is what was asked for; JSON is read in place of `compact` too, and marked.
    Never raises for any text; raises AnswerSchemaError where the schema does not allow `form`.
    """
    text = (text or "").removeprefix("\ufeff")
    if len(text) > MAX_CHARS:
        return _unknown(Reason.too_large)
    try:
        if form == "compact":
            return _read_compact(text, schema, finish_reason)
        return _read_json(text, schema, finish_reason)
    except (TooDeep, RecursionError):
        return _unknown(Reason.too_large)


def split_reasoning(text: str) -> tuple[str, bool]:
    """(answer text, whether there was reasoning): the text without `<think>...</think>` and the like.

    A closing tag without an opening one ends reasoning that began in the prompt: all before it goes. After an opening tag that is
    never closed there is no answer, and a draft before it is none either: the answer text is empty. A prompt that itself ends with
    the opening tag starts the reasoning: its caller puts that tag back in front of the text.

    >>> split_reasoning("<think>spam? no</think>ham")
    ('ham', True)
    """
    answer, had_reasoning, _ = _without_reasoning(text)
    return answer, had_reasoning


def _without_reasoning(text: str) -> tuple[str, bool, bool]:
    """(answer text, whether there was reasoning, whether it is still open at the end)."""
    kept: list[str] = []
    pos, is_open = 0, False
    for tag in _REASONING_TAG.finditer(text):
        closing = bool(tag.group(1) or tag.group(2))
        if not closing and not is_open:
            kept.append(text[pos : tag.start()])
        if closing and not is_open:
            kept.clear()
        is_open = not closing
        pos = tag.end()
    if is_open:
        return "", True, True
    # Joined by a space: two pieces must not make a new tag.
    return (" ".join([*kept, text[pos:]]).strip(), True, False) if pos else (text, False, False)


def _unknown(reason: Reason) -> Parsed:
    return Parsed(Status.unknown, reason, {})


def _no_answer(text: str, finish_reason: str | None, otherwise: Reason) -> Parsed:
    """The non-answer for a text that holds no answer of any form."""
    if finish_reason == "content_filter" or _REFUSAL.match(text):
        return _unknown(Reason.refused)
    return _unknown(Reason.truncated if finish_reason == "length" else otherwise)


def _read_json(text: str, schema: AnswerSchema, finish_reason: str | None, notes: tuple[str, ...] = ()) -> Parsed:
    try:
        document = _decode(text)
    except ValueError:
        return _read_loose(text, schema, finish_reason, notes)
    if type(document) is str and not notes:
        # Encoded twice. Only once more: a third layer is no answer.
        return _read_json(document, schema, finish_reason, ("double_encoded",))
    return _judge([(document, list(notes))], schema)


def _read_loose(text: str, schema: AnswerSchema, finish_reason: str | None, notes: tuple[str, ...]) -> Parsed:
    answer, had_reasoning, is_open = _without_reasoning(text)
    if is_open:
        return _unknown(Reason.truncated)
    if not answer.strip():
        return _no_answer(answer, finish_reason, Reason.reasoning_only if had_reasoning else Reason.empty)
    if had_reasoning:
        return _read_json(answer, schema, finish_reason, notes)
    if _ENCODED.match(answer) and "\\" in answer:
        return _no_answer(answer, finish_reason, Reason.not_json)
    found, is_cut = scan(answer)
    if is_cut:
        return _unknown(Reason.truncated)
    if not found:
        return _no_answer(answer, finish_reason, Reason.not_json)
    return _judge([(document, [*notes, *repairs]) for document, repairs in found], schema)


def _read_compact(text: str, schema: AnswerSchema, finish_reason: str | None) -> Parsed:
    answer, had_reasoning, is_open = _without_reasoning(text)
    if is_open:
        return _unknown(Reason.truncated)
    if not answer.strip():
        return _no_answer(answer, finish_reason, Reason.reasoning_only if had_reasoning else Reason.empty)
    values = schema.compact_answers.get(answer)
    if values is not None:
        return Parsed(Status.ok, None, dict(values))
    if _OBJECT_LIKE.match(answer):
        return _read_json(answer, schema, finish_reason, ("json_for_compact",))
    parts = answer.split("|")
    if len(parts) != len(schema.fields):
        return _no_answer(answer, finish_reason, Reason.schema)
    values, repairs = {}, []
    for part, field in zip(parts, schema.fields, strict=True):
        found = field.kind.labels.find(part.strip()) if isinstance(field.kind, OneLabel) else None
        if found is None:
            return _no_answer(answer, finish_reason, Reason.not_a_label)
        values[field.name], how = found
        if how != "exact":
            repairs.append(f"{field.name}:{how}")
    if finish_reason == "length":
        return _unknown(Reason.truncated)
    return Parsed(Status.ok, None, values, tuple(repairs) or ("spacing",))


def _judge(documents: list[tuple[Any, list[str]]], schema: AnswerSchema) -> Parsed:
    """The one valid answer among all candidates, however often repeated; ambiguous where two valid ones differ."""
    answer: tuple[dict[str, Any], list[str]] | None = None
    problem: Reason | None = None
    for candidate, repairs in _candidates(documents, schema.names):
        try:
            values = read_fields(schema.fields, candidate, repairs.append)
        except Unacceptable as unacceptable:
            problem = problem or unacceptable.reason
            continue
        if answer is None:
            answer = values, repairs
        elif _encode(values) == _encode(answer[0]):
            answer[1].append("repeated_object")
        else:
            return _unknown(Reason.ambiguous)
    if answer is None:
        return _unknown(problem or Reason.schema)
    return Parsed(Status.ok, None, answer[0], tuple(dict.fromkeys(answer[1])))


def _candidates(
    documents: list[tuple[Any, list[str]]], names: tuple[str, ...]
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """The objects that hold a field of the schema, at the top or one wrapper deep: in a list, or under another key."""
    for document, repairs in documents:
        if isinstance(document, dict) and any(name in document for name in names):
            yield document, repairs
        elif isinstance(document, dict | list):
            inner, note = (document, "array") if isinstance(document, list) else (document.values(), "wrapper")
            for item in inner:
                if isinstance(item, dict) and any(name in item for name in names):
                    yield item, [*repairs, note]
