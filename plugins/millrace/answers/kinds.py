"""The kinds of answer field. Each says, in one class, how it is asked, stored, described and read.

Every kind has

- `spec()`: its canonical spec; `reading()`: the part of the spec that only matters to reading (aliases)
- `json_schema()`, `arrow_type()`, `spark_type()`: how it is asked and stored
- `words()`: how it is described in a prompt: a phrase, and lines that come below it
- `cost()`: tokens of the longest valid value without free text, and characters of free text
- `accept(raw, note)`: the value of a decoded JSON value; `note(what)` records a repair; raises `Unacceptable`
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from millrace.answers.labels import LabelSet
from millrace.answers.reasons import Reason

if TYPE_CHECKING:
    import pyarrow as pa

Note = Callable[[str], None]
Spec = dict[str, Any]

INT64 = (-(2**63), 2**63 - 1)
JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)

MISSING = object()  # a key with no value behind it
CONFLICT = object()  # a key given twice with different values


class Unacceptable(Exception):
    """A decoded value that the field cannot take."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason


class Kind(Protocol):
    def spec(self) -> Spec: ...
    def reading(self) -> Spec: ...
    def json_schema(self) -> Spec: ...
    def arrow_type(self) -> pa.DataType: ...
    def spark_type(self) -> str: ...
    def words(self) -> tuple[str, list[str]]: ...
    def cost(self) -> tuple[float, int]: ...
    def accept(self, raw: Any, note: Note) -> Any: ...


@dataclass(frozen=True, slots=True)
class Field:
    """A named field of an answer. An optional one is null where the model gives no acceptable value."""

    name: str
    kind: Kind
    optional: bool = False
    description: str = ""

    def spec(self) -> Spec:
        spec: Spec = {"name": self.name, **self.kind.spec()}
        if self.optional:
            spec["optional"] = True
        if self.description:
            spec["description"] = self.description
        return spec

    def json_schema(self) -> Spec:
        schema = self.kind.json_schema()
        return {"anyOf": [schema, {"type": "null"}]} if self.optional else schema

    def words(self) -> list[str]:
        phrase, below = self.kind.words()
        about = f"{self.description} - " if self.description else ""
        null = ", or null where the text does not say" if self.optional else ""
        return [f'- "{self.name}": {about}{phrase}{null}{":" if below else ""}', *("    " + line for line in below)]


def token_cost(text: str) -> float:
    """Tokens that a text of keys, labels or punctuation takes at most: half a token an ASCII letter, else one a byte."""
    return sum(0.5 if char.isascii() and char.isalpha() else len(char.encode()) for char in text)


def decode_int(digits: str) -> int | float:
    """An integer literal, or infinity where 64-bit floating point would overflow (it also bounds the conversion's time)."""
    return int(digits) if len(digits) <= 308 else float(digits)


def pairs_to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of one JSON object. A key given twice with different values has the value CONFLICT."""
    document = dict(pairs)
    if len(document) == len(pairs):
        return document
    seen: dict[str, Any] = {}
    for key, value in pairs:
        # repr tells 1 from true and 1.0, which == does not.
        seen[key] = value if key not in seen or repr(seen[key]) == repr(value) else CONFLICT
    return Repeated(seen)


class Repeated(dict[str, Any]):
    """An object in which at least one key was given more than once."""


def read_fields(fields: tuple[Field, ...], document: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """field -> value of a decoded object, in the order of the fields; raises Unacceptable for a required field without one."""
    values: dict[str, Any] = {}
    found = 0
    for field in fields:
        name = field.name
        raw = document.get(name, MISSING)
        if raw is not MISSING:
            found += 1
        elif name in document:
            found += 1
            note("missing_value")
        if raw is None and field.optional:
            values[name] = None
            continue
        try:
            if raw is MISSING or raw is None:
                raise Unacceptable(Reason.schema)
            if raw is CONFLICT:
                raise Unacceptable(Reason.ambiguous)
            values[name] = field.kind.accept(raw, lambda what, name=name: note(f"{name}:{what}"))  # type: ignore[misc]
        except Unacceptable as problem:
            if not field.optional:
                raise
            note(f"{name}:{'missing' if raw is MISSING else problem.reason}")
            values[name] = None
    if found != len(document):
        note("extra_keys")
    if type(document) is Repeated:
        note("duplicate_key")
    return values


def object_schema(fields: tuple[Field, ...]) -> Spec:
    return {
        "type": "object",
        "properties": {field.name: field.json_schema() for field in fields},
        "required": [field.name for field in fields],
        "additionalProperties": False,
    }


def object_cost(fields: tuple[Field, ...]) -> tuple[float, int]:
    tokens, chars = token_cost("{}"), 0
    for field in fields:
        value_tokens, value_chars = field.kind.cost()
        tokens += token_cost(f'"{field.name}": , ') + max(value_tokens, token_cost("null") if field.optional else 0)
        chars += value_chars
    return tokens, chars


def _labels_spec(key: str, labels: LabelSet) -> Spec:
    # Labels are a list in the canonical spec, with or without descriptions: their order must survive sorted JSON keys.
    described = [
        {"label": label, "description": labels.descriptions[label]} if label in labels.descriptions else label
        for label in labels.labels
    ]
    spec: Spec = {key: described}
    if labels.aliases:
        spec["aliases"] = dict(sorted(labels.aliases.items()))
    return spec


def _labels_words(phrase: str, labels: LabelSet) -> tuple[str, list[str]]:
    if not labels.descriptions:
        return f"{phrase} " + ", ".join(f'"{label}"' for label in labels.labels), []
    described = [(label, labels.descriptions.get(label)) for label in labels.labels]
    return phrase, [f'- "{label}": {about}' if about else f'- "{label}"' for label, about in described]


def _find_label(labels: LabelSet, raw: Any, note: Note) -> str:
    if type(raw) is int:
        raw = str(raw)
        note("label_from_number")
    if type(raw) is not str:
        raise Unacceptable(Reason.schema)
    found = labels.find(raw)
    if found is None:
        raise Unacceptable(Reason.not_a_label)
    label, how = found
    if how != "exact":
        note(how)
    return label


@dataclass(frozen=True, slots=True)
class OneLabel:
    """Exactly one of a set of labels; a string."""

    labels: LabelSet

    def spec(self) -> Spec:
        return _labels_spec("labels", self.labels)

    def reading(self) -> Spec:
        return dict(sorted(self.labels.aliases.items()))

    def json_schema(self) -> Spec:
        return {"type": "string", "enum": list(self.labels.labels)}

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.string()

    def spark_type(self) -> str:
        return "STRING"

    def words(self) -> tuple[str, list[str]]:
        return _labels_words("exactly one of", self.labels)

    def cost(self) -> tuple[float, int]:
        return max(token_cost(json.dumps(label, ensure_ascii=False)) for label in self.labels.labels), 0

    def accept(self, raw: Any, note: Note) -> str:
        return _find_label(self.labels, raw, note)


@dataclass(frozen=True, slots=True)
class LabelList:
    """A list of different labels of a set, in the model's order; a list of strings. A repeated label counts once."""

    labels: LabelSet
    max_items: int

    def spec(self) -> Spec:
        return {**_labels_spec("list_of", self.labels), "max_items": self.max_items}

    def reading(self) -> Spec:
        return dict(sorted(self.labels.aliases.items()))

    def json_schema(self) -> Spec:
        # No uniqueItems: xgrammar does not take it.
        items = {"type": "string", "enum": list(self.labels.labels)}
        return {"type": "array", "items": items, "maxItems": self.max_items}

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.list_(pa.string())

    def spark_type(self) -> str:
        return "ARRAY<STRING>"

    def words(self) -> tuple[str, list[str]]:
        return _labels_words(f"a list, possibly empty, of at most {self.max_items} of", self.labels)

    def cost(self) -> tuple[float, int]:
        longest = max(token_cost(json.dumps(label, ensure_ascii=False)) for label in self.labels.labels)
        return token_cost("[]") + self.max_items * (longest + token_cost(", ")), 0

    def accept(self, raw: Any, note: Note) -> list[str]:
        if type(raw) is not list:
            raise Unacceptable(Reason.schema)
        found = [_find_label(self.labels, item, note) for item in raw]
        distinct = list(dict.fromkeys(found))
        if len(distinct) != len(found):
            note("repeated_item")
        if len(distinct) > self.max_items:
            raise Unacceptable(Reason.schema)
        return distinct


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number within bounds: float64, or int64 where `integer` is set."""

    min: float | int | None
    max: float | int | None
    integer: bool

    def spec(self) -> Spec:
        bounds = {"min": self.min, "max": self.max}
        return {
            "number": {key: value for key, value in bounds.items() if value is not None} | {"integer": self.integer}
        }

    def reading(self) -> Spec:
        return {}

    def json_schema(self) -> Spec:
        low, high = self.min, self.max
        if self.integer:
            low, high = INT64[0] if low is None else low, INT64[1] if high is None else high
        schema: Spec = {"type": "integer" if self.integer else "number"}
        if low is not None:
            schema["minimum"] = low
        if high is not None:
            schema["maximum"] = high
        return schema

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.int64() if self.integer else pa.float64()

    def spark_type(self) -> str:
        return "BIGINT" if self.integer else "DOUBLE"

    def words(self) -> tuple[str, list[str]]:
        noun = "a whole number" if self.integer else "a number"
        low = "" if self.min is None else f", at least {self.min}"
        high = "" if self.max is None else f", at most {self.max}"
        return noun + low + high, []

    def cost(self) -> tuple[float, int]:
        # Sign, up to 19 digits, point, 6 decimals: the longest that the grammar of a bounded number lets through.
        return (20.0 if self.integer else 27.0), 0

    def accept(self, raw: Any, note: Note) -> float | int:
        if type(raw) is str and JSON_NUMBER.fullmatch(raw.strip()):
            note("number_from_string")
            raw = raw.strip()
            raw = float(raw) if any(char in ".eE" for char in raw) else decode_int(raw)
        if type(raw) is not int and type(raw) is not float:
            raise Unacceptable(Reason.schema)
        if not math.isfinite(raw):
            raise Unacceptable(Reason.not_finite)
        if (self.min is not None and raw < self.min) or (self.max is not None and raw > self.max):
            raise Unacceptable(Reason.schema)
        if not self.integer:
            return float(raw)
        if type(raw) is float:
            if not raw.is_integer():
                raise Unacceptable(Reason.schema)
            note("integer_from_decimal")
        if not INT64[0] <= raw <= INT64[1]:
            raise Unacceptable(Reason.schema)
        return int(raw)


@dataclass(frozen=True, slots=True)
class Boolean:
    """true or false; nothing else is read as one, save the two words as strings."""

    def spec(self) -> Spec:
        return {"boolean": True}

    def reading(self) -> Spec:
        return {}

    def json_schema(self) -> Spec:
        return {"type": "boolean"}

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.bool_()

    def spark_type(self) -> str:
        return "BOOLEAN"

    def words(self) -> tuple[str, list[str]]:
        return "true or false", []

    def cost(self) -> tuple[float, int]:
        return token_cost("false"), 0

    def accept(self, raw: Any, note: Note) -> bool:
        if type(raw) is bool:
            return raw
        if type(raw) is str and raw.strip().casefold() in ("true", "false"):
            note("boolean_from_string")
            return raw.strip().casefold() == "true"
        raise Unacceptable(Reason.schema)


@dataclass(frozen=True, slots=True)
class Text:
    """Free text of at most `max_chars` code points; longer is refused, never cut."""

    max_chars: int

    def spec(self) -> Spec:
        return {"text": {"max_chars": self.max_chars}}

    def reading(self) -> Spec:
        return {}

    def json_schema(self) -> Spec:
        return {"type": "string", "maxLength": self.max_chars}

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.string()

    def spark_type(self) -> str:
        return "STRING"

    def words(self) -> tuple[str, list[str]]:
        return f"a text of at most {self.max_chars} characters", []

    def cost(self) -> tuple[float, int]:
        return token_cost('""'), self.max_chars

    def accept(self, raw: Any, note: Note) -> str:
        if type(raw) is not str:
            raise Unacceptable(Reason.schema)
        value: str = raw
        if not value.isascii():
            value = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        value = value.replace("\0", "")
        if value != raw:
            note("broken_unicode")
        if len(value) > self.max_chars:
            raise Unacceptable(Reason.schema)
        return value


@dataclass(frozen=True, slots=True)
class Object:
    """Fields of the other kinds under one name; a struct."""

    fields: tuple[Field, ...]

    def spec(self) -> Spec:
        return {"object": [field.spec() for field in self.fields]}

    def reading(self) -> Spec:
        return {field.name: aliases for field in self.fields if (aliases := field.kind.reading())}

    def json_schema(self) -> Spec:
        return object_schema(self.fields)

    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.struct([pa.field(field.name, field.kind.arrow_type()) for field in self.fields])

    def spark_type(self) -> str:
        inner = ", ".join(f"`{field.name}`: {field.kind.spark_type()}" for field in self.fields)
        return f"STRUCT<{inner}>"

    def words(self) -> tuple[str, list[str]]:
        return "an object of", [line for field in self.fields for line in field.words()]

    def cost(self) -> tuple[float, int]:
        return object_cost(self.fields)

    def accept(self, raw: Any, note: Note) -> dict[str, Any]:
        if not isinstance(raw, dict):
            raise Unacceptable(Reason.schema)
        return read_fields(self.fields, raw, note)
