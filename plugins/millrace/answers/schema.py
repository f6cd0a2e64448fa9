"""The answer that an enrichment wants, as one value: checked once, then compiled for engine, prompt, table and parser."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from millrace.answers.kinds import (
    INT64,
    Boolean,
    Field,
    Kind,
    LabelList,
    Number,
    Object,
    OneLabel,
    Spec,
    Text,
    object_cost,
    object_schema,
    token_cost,
)
from millrace.answers.labels import LabelSet
from millrace.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

Form = Literal["json", "compact"]

PARSER_VERSION = "1"  # goes up with every change that can read a stored answer differently
MAX_CHOICES = 512
MAX_LABELS = 1000
MAX_TEXT_CHARS = 20_000
# Integers beyond it are not exact in 64-bit floating point, and the grammar would let through that many digits.
MAX_NUMBER = 10**15

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
_KINDS = ("labels", "list_of", "number", "boolean", "text", "object")
_COMMON_KEYS = frozenset({"name", "optional", "description"})
_KIND_KEYS = {"labels": {"aliases"}, "list_of": {"aliases", "max_items"}}


class AnswerSchemaError(ConfigError, ValueError):
    """An answer schema is wrong; the message names the field, what is wrong, and the fix."""


@dataclass(frozen=True)
class AnswerSchema:
    """The fields of an answer in their order. Make it with `from_dict`, which checks everything."""

    fields: tuple[Field, ...]

    @classmethod
    def from_dict(cls, spec: Mapping[str, Any]) -> AnswerSchema:
        """The schema of an enrichment's `answer:` mapping (field name -> field), or of what `to_dict` gave.

        Raises AnswerSchemaError, naming the field and the fix.
        """
        return cls(_fields("answer", spec["fields"] if _is_canonical(spec) else spec, nested=False))

    def to_dict(self) -> Spec:
        """The canonical spec; `from_dict` takes it back. Fields and labels are lists: their order survives sorted keys."""
        return {"fields": [field.spec() for field in self.fields]}

    def engine_dict(self) -> Spec:
        """The part of the spec that determines what the engine is asked: all but the aliases."""
        return {"fields": [_without_aliases(field.spec()) for field in self.fields]}

    def reading_dict(self) -> Spec:
        """The part that determines how a stored text is read: aliases and the parser's version."""
        aliases = {field.name: reading for field in self.fields if (reading := field.kind.reading())}
        return {"parser": PARSER_VERSION, "aliases": aliases}

    @property
    def names(self) -> tuple[str, ...]:
        """Field names, in order: the columns of the answer."""
        return tuple(field.name for field in self.fields)

    def json_schema(self) -> Spec:
        """The JSON Schema for the engine's structured output, using only keywords that xgrammar enforces.

        Seen with xgrammar 0.2.9: `enum`, `maxLength`, `maxItems`, `minimum` and `maximum` are enforced, for decimals too (a bound
        such as 1951108328137.647 is rounded; the parser is exact). It refuses integer bounds beyond 64 bits,
        and lets raw control characters but no escapes into a string that has a `maxLength`: such a text needs the lenient reading.
        """
        return object_schema(self.fields)

    def compact_choices(self) -> list[str]:
        """All answers in form `compact`: one label a field, joined by "|" in the order of the fields ("positive|quality").

        Raises AnswerSchemaError where the form does not fit: a field that is not `labels` or is optional, a label holding "|",
        more than 512 answers, or a last field in which one label cut short reads as another:
        a cut answer must not pass for a whole one.
        """
        return list(self.compact_answers)

    @cached_property
    def compact_answers(self) -> dict[str, dict[str, str]]:
        """choice -> values, for the choices of `compact_choices`; raises as it does."""
        for field in self.fields:
            fix = "use form: json, or change the field"
            if not isinstance(field.kind, OneLabel):
                raise _error(field.name, "form compact takes only fields of kind labels", fix)
            if field.optional:
                raise _error(
                    field.name, "form compact answers every field and has no null", "use form: json, or drop optional"
                )
            for label, _ in field.kind.labels.spellings():
                if "|" in label:
                    raise _error(field.name, f"{label!r} holds '|', which separates the labels in form compact", fix)
        sets = [field.kind.labels for field in self.fields if isinstance(field.kind, OneLabel)]
        last = sets[-1]
        for spelling, label in last.spellings():
            for cut in range(1, len(spelling)):
                found = last.find(spelling[:cut])
                if found and found[0] != label:
                    raise _error(
                        self.fields[-1].name,
                        f"in form compact {spelling!r}, cut short, reads as {found[0]!r}",
                        "rename one, move the field forward, or use form: json",
                    )
        count = math.prod(len(labels.labels) for labels in sets)
        if count > MAX_CHOICES:
            raise _error(
                self.fields[-1].name, f"form compact would have {count} answers, over {MAX_CHOICES}", "use form: json"
            )
        names = self.names
        product = itertools.product(*(labels.labels for labels in sets))
        return {"|".join(labels): dict(zip(names, labels, strict=True)) for labels in product}

    def max_answer_tokens(self, form: Form = "json", chars_per_token: float = 1.0) -> int:
        """A bound for max_tokens: what the longest valid answer takes, and 8 tokens.

        Keys, labels and punctuation count half a token an ASCII letter, one a digit or sign, one a byte beyond ASCII; numbers
        count one a digit; free text counts `max_chars / chars_per_token`. The default of one character a token holds for any
        language; give the model's measured ratio for a tighter bound.
        """
        if form == "compact":
            return math.ceil(max(token_cost(choice) for choice in self.compact_answers)) + 8
        tokens, chars = object_cost(self.fields)
        return math.ceil(tokens) + math.ceil(chars / chars_per_token) + 8

    def arrow_fields(self) -> list[pa.Field]:
        """One nullable typed column a field: string, list<string>, double or int64, bool, string, struct."""
        import pyarrow as pa

        return [pa.field(field.name, field.kind.arrow_type(), nullable=True) for field in self.fields]

    def spark_ddl(self) -> str:
        """The same columns as Spark SQL DDL, for `from_json` and for reading: "`sentiment` STRING, `score` DOUBLE"."""
        return ", ".join(f"`{field.name}` {field.kind.spark_type()}" for field in self.fields)

    def describe(self) -> str:
        """The fields, their labels and what these mean, one per line: what a prompt says as `{{ answer_fields }}`."""
        return "\n".join(line for field in self.fields for line in field.words())


def _error(where: str, wrong: str, fix: str) -> AnswerSchemaError:
    return AnswerSchemaError(f"{where}: {wrong}. Fix: {fix}.")


def _is_canonical(spec: Any) -> bool:
    return isinstance(spec, Mapping) and list(spec) == ["fields"] and isinstance(spec["fields"], list)


def _without_aliases(spec: Spec) -> Spec:
    rest = {key: value for key, value in spec.items() if key != "aliases"}
    if "object" in rest:
        rest["object"] = [_without_aliases(inner) for inner in rest["object"]]
    return rest


def _fields(where: str, spec: Any, *, nested: bool) -> tuple[Field, ...]:
    """The fields of a mapping name -> field, or of a list of fields that each hold their `name`."""
    if isinstance(spec, Mapping):
        pairs = list(spec.items())
    elif isinstance(spec, list) and all(isinstance(item, Mapping) and "name" in item for item in spec):
        pairs = [(item["name"], item) for item in spec]
    else:
        raise _error(where, "is not a mapping of field names to fields", "write one `name: {labels: [...]}` a field")
    if not pairs:
        raise _error(where, "has no fields", "add at least one, such as `sentiment: {labels: [positive, negative]}`")
    fields = tuple(_field(where, name, field, nested=nested) for name, field in pairs)
    seen: dict[str, str] = {}
    for field in fields:
        other = seen.setdefault(field.name.casefold(), field.name)
        if other is not field.name:
            raise _error(f"{where}.{field.name}", f"Spark cannot tell the column from {other!r}", "rename one")
    return fields


def _field(where: str, name: Any, spec: Any, *, nested: bool) -> Field:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _error(
            f"{where}.{name}", "a field name is ASCII letters, digits and _, not first a digit, at most 64", "rename it"
        )
    where = f"{where}.{name}"
    if isinstance(spec, Mapping) and spec.get("name", name) != name:
        raise _error(f"{where}.name", "differs from the name of the field", "remove it")
    if not nested and (name.casefold().startswith("answer_") or name.casefold() == "dt"):
        raise _error(where, "`dt` and names that start with `answer_` are Millrace's own columns", "rename the field")
    if not isinstance(spec, Mapping):
        raise _error(where, "is not a mapping", f"give it one of {', '.join(_KINDS)}")
    kinds = [kind for kind in _KINDS if kind in spec]
    if len(kinds) != 1:
        raise _error(
            where, f"has {len(kinds)} kinds ({', '.join(kinds) or 'none'})", f"give it one of {', '.join(_KINDS)}"
        )
    kind = kinds[0]
    unknown = [str(key) for key in spec if key not in {kind} | _COMMON_KEYS | _KIND_KEYS.get(kind, set())]
    if unknown:
        raise _error(where, f"a {kind} field does not know the key {unknown[0]!r}", "remove it or correct its spelling")
    optional = spec.get("optional", False)
    if not isinstance(optional, bool):
        raise _error(f"{where}.optional", "is not true or false", "write true or false")
    return Field(
        name,
        _kind(where, kind, spec, nested=nested),
        optional,
        _words(f"{where}.description", spec.get("description", "")),
    )


def _kind(where: str, kind: str, spec: Mapping[str, Any], *, nested: bool) -> Kind:
    value = spec[kind]
    where_kind = f"{where}.{kind}"
    if kind == "labels":
        return OneLabel(_labels(where_kind, value, spec.get("aliases")))
    if kind == "list_of":
        labels = _labels(where_kind, value, spec.get("aliases"))
        most = _whole(f"{where}.max_items", spec.get("max_items", len(labels.labels)), 1, len(labels.labels))
        return LabelList(labels, most)
    if kind == "boolean":
        if value is not True:
            raise _error(where_kind, "takes no setting", "write `boolean: true`")
        return Boolean()
    if kind == "number":
        return _number(where_kind, _mapping(where_kind, value, {"min", "max", "integer"}))
    if kind == "text":
        setting = _mapping(where_kind, value, {"max_chars"})
        if "max_chars" not in setting:
            raise _error(where_kind, "has no length bound", "write `text: {max_chars: 200}`")
        return Text(_whole(f"{where_kind}.max_chars", setting["max_chars"], 1, MAX_TEXT_CHARS))
    if nested:
        raise _error(where_kind, "is an object inside an object", "keep objects one level deep")
    return Object(_fields(where_kind, value, nested=True))


def _labels(where: str, spec: Any, aliases: Any) -> LabelSet:
    """Labels as a list, as a mapping label -> description, or as a list of {label, description}."""
    if isinstance(spec, Mapping):
        pairs = list(spec.items())
    elif isinstance(spec, list):
        pairs = [
            (item["label"], item.get("description"))
            if isinstance(item, Mapping) and "label" in item and set(item) <= {"label", "description"}
            else (item, None)
            for item in spec
        ]
    else:
        raise _error(where, "is neither a list of labels nor a mapping of labels to descriptions", "write `[a, b]`")
    aliases = {} if aliases is None else aliases
    if not isinstance(aliases, Mapping):
        raise _error(where, "its aliases are not a mapping", "write `aliases: {other spelling: label}`")
    for word in [label for label, _ in pairs] + [part for alias in aliases.items() for part in alias]:
        if not isinstance(word, str):
            raise _error(
                where, f"{word!r} is not a text (YAML reads unquoted yes, no, null and numbers as values)", "quote it"
            )
        if len(word) > 200:
            raise _error(
                where, f"{word[:40]!r}... is longer than 200 characters", "shorten it, and describe it instead"
            )
    if len(pairs) > MAX_LABELS:
        raise _error(where, f"has {len(pairs)} labels, over {MAX_LABELS}", "split the field in two levels")
    described = {label: _words(f"{where}.{label}", about) for label, about in pairs if about}
    labels = LabelSet(tuple(label for label, _ in pairs), described, dict(aliases))
    if problem := labels.problem():
        wrong, _, fix = problem.rpartition(": ")
        raise _error(where, wrong, fix)
    return labels


def _number(where: str, spec: Mapping[str, Any]) -> Number:
    integer = spec.get("integer", False)
    if not isinstance(integer, bool):
        raise _error(f"{where}.integer", "is not true or false", "write true or false")
    bounds: dict[str, float | int | None] = {}
    for key in ("min", "max"):
        bound = spec.get(key)
        if bound is not None:
            if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
                raise _error(f"{where}.{key}", "is not a finite number", "write one, or leave the bound out")
            if integer and (bound != int(bound) or not INT64[0] <= bound <= INT64[1]):
                raise _error(f"{where}.{key}", "is not a 64-bit whole number", "write one, or drop `integer`")
            if not integer and abs(bound) > MAX_NUMBER:
                raise _error(
                    f"{where}.{key}",
                    "is beyond 1e15, where 64-bit floating point is no longer exact",
                    "narrow the bound",
                )
            bound = int(bound) if bound == int(bound) else bound
        bounds[key] = bound
    low, high = bounds["min"], bounds["max"]
    if low is not None and high is not None and low > high:
        raise _error(where, f"min {low} is above max {high}", "swap them")
    return Number(low, high, integer)


def _mapping(where: str, value: Any, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _error(where, "is not a mapping", f"write {{{', '.join(sorted(known))}}} with values")
    for key in value:
        if key not in known:
            raise _error(where, f"does not know the key {key!r}", f"use {', '.join(sorted(known))}")
    return value


def _whole(where: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _error(where, f"is not a whole number from {low} to {high}", "write one")
    return value


def _words(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _error(where, "is not a text", "quote it")
    return " ".join(value.split())
