"""What holds for every schema, every answer and every text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.answers import AnswerSchema, AnswerSchemaError, Status, parse_answer
from millrace.answers.kinds import Boolean, Field, LabelList, Number, Object, OneLabel, Text

# A busy machine must not fail a test.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Labels that are prefixes of one another, hold quotes, brackets or the word for "no answer", and are not ASCII.
WORDS = [
    "good",
    "good value",
    "bad",
    "none",
    "null",
    "N/A (x)",
    'the "best"',
    "it's",
    "a|b",
    "{x}",
    "中性",
    "😀 joy",
    "-1",
    "1",
]

label_sets = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6, unique=True)
simple_fields = st.one_of(
    st.builds(lambda labels: {"labels": labels}, label_sets),
    st.builds(lambda labels: {"list_of": labels}, label_sets),
    st.sampled_from([{"number": {}}, {"number": {"min": -2.5, "max": 1e6}}, {"number": {"min": 0, "integer": True}}]),
    st.just({"boolean": True}),
    st.builds(lambda most: {"text": {"max_chars": most}}, st.integers(1, 40)),
)


def optionally(fields: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda field, optional: {**field, "optional": optional}, fields, st.booleans())


names = st.sampled_from(["label", "topic", "why", "score", "tags", "ok", "x_1"])
objects = st.builds(
    lambda fields: {"object": fields}, st.dictionaries(names, optionally(simple_fields), min_size=1, max_size=3)
)
schemas = st.dictionaries(names, optionally(simple_fields | objects), min_size=1, max_size=4).map(
    AnswerSchema.from_dict
)
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")


def values_of(field: Field) -> st.SearchStrategy[Any]:
    kind = field.kind
    match kind:
        case OneLabel():
            values: st.SearchStrategy[Any] = st.sampled_from(kind.labels.labels)
        case LabelList():
            values = st.lists(st.sampled_from(kind.labels.labels), unique=True, max_size=kind.max_items)
        case Number(integer=True):
            values = st.integers(0, 2**63 - 1)
        case Number():
            values = st.floats(kind.min, kind.max, allow_nan=False, allow_infinity=False)
        case Boolean():
            values = st.booleans()
        case Text():
            values = st.text(characters, max_size=kind.max_chars)
        case Object():
            values = st.fixed_dictionaries({inner.name: values_of(inner) for inner in kind.fields})
        case _:
            raise AssertionError(kind)
    return st.none() | values if field.optional else values


def answers_of(schema: AnswerSchema) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({field.name: values_of(field) for field in schema.fields})


schemas_and_answers = schemas.flatmap(lambda schema: st.tuples(st.just(schema), answers_of(schema)))


def loose_style(value: Any) -> str:
    """Unquoted keys, single quotes, comments, trailing commas, raw control characters."""
    if isinstance(value, dict):
        return "{ " + "".join(f"{key}: {loose_style(item)}, // {{\n" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + "".join(f"{loose_style(item)} ,/* ] */" for item in value) + "]"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return json.dumps(value)


def curly_style(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"“{key}”:{curly_style(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(curly_style, value)) + "]"
    if isinstance(value, str):
        return "“" + value.replace("\\", "\\\\").replace("”", "\\u201d") + "”"
    return json.dumps(value)


STYLES: dict[str, Callable[[Any], str]] = {
    "json": json.dumps,
    "indented": lambda value: json.dumps(value, indent=2, ensure_ascii=False),
    "fenced": lambda value: "Here you are:\n```json\n" + json.dumps(value) + "\n```\n",
    "wrapped": lambda value: json.dumps({"result": value}),
    "listed": lambda value: json.dumps([value]),
    "encoded": lambda value: json.dumps(json.dumps(value)),
    "repeated": lambda value: json.dumps(value) + "\n" + json.dumps(value),
    "reasoned": lambda value: '<think>{"label": "bad"}</think>' + json.dumps(value),
    "python": repr,
    "encoded python": lambda value: json.dumps(repr(value)),
    "loose": loose_style,
    "curly": curly_style,
}


@given(schemas_and_answers)
@settings(UNTIMED)
def test_every_valid_answer_comes_back_unchanged_and_unrepaired(case: tuple[AnswerSchema, dict[str, Any]]) -> None:
    schema, values = case
    for text in (json.dumps(values), json.dumps(values, ensure_ascii=False, indent=1)):
        parsed = parse_answer(text, schema, "stop")
        assert (parsed.status, parsed.values, parsed.repaired) == (Status.ok, values, ())


@pytest.mark.parametrize("style", STYLES)
@given(case=schemas_and_answers)
@settings(UNTIMED, max_examples=50)
def test_an_answer_in_any_style_reads_as_its_values(style: str, case: tuple[AnswerSchema, dict[str, Any]]) -> None:
    schema, values = case
    parsed = parse_answer(STYLES[style](values), schema)
    assert parsed.values == values


@pytest.mark.parametrize("style", STYLES)
@given(case=schemas_and_answers, finish_reason=st.sampled_from(["length", "stop", None]))
@settings(UNTIMED, max_examples=50)
def test_every_prefix_of_an_answer_is_its_values_or_a_non_answer(
    style: str, case: tuple[AnswerSchema, dict[str, Any]], finish_reason: str | None
) -> None:
    schema, values = case
    text = STYLES[style](values)
    for cut in range(len(text)):
        parsed = parse_answer(text[:cut], schema, finish_reason)
        if parsed.status is Status.ok:
            assert parsed.values == values, text[:cut]
        else:
            assert parsed.values == {}


compact_schemas = st.dictionaries(
    names, st.builds(lambda labels: {"labels": labels}, label_sets), min_size=1, max_size=3
)


@given(spec=compact_schemas, finish_reason=st.sampled_from(["length", "stop", None]), data=st.data())
@settings(UNTIMED)
def test_every_prefix_of_a_compact_answer_is_its_values_or_a_non_answer(
    spec: dict[str, Any], finish_reason: str | None, data: st.DataObject
) -> None:
    labels = data.draw(st.sampled_from(list(spec.values())))["labels"]
    spec["label"] = {"labels": labels, "aliases": {"goo": labels[0], "ba": labels[-1]}}
    schema = AnswerSchema.from_dict(spec)
    try:
        choices = schema.compact_choices()
    except AnswerSchemaError:
        return
    choice = data.draw(st.sampled_from(choices))
    values = dict(zip(schema.names, choice.split("|"), strict=True))
    for text in (choice, choice.upper(), " " + choice.replace("|", " | ") + ".\n"):
        for cut in range(len(text) + 1):
            parsed = parse_answer(text[:cut], schema, finish_reason, "compact")
            assert parsed.status is Status.unknown or parsed.values == values, text[:cut]
    assert parse_answer(choice, schema, finish_reason, "compact").repaired == ()


# Pieces that steer a text into every corner of the reader.
PIECES = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "“",
    "”",
    ":",
    ",",
    "\\",
    "\\u00",
    "\ud83d",
    "\\ude00",
    "\0",
    "//",
    "/*",
    "*/",
    "\n",
]
PIECES += [
    "label",
    "good",
    "1",
    "-",
    "1e999",
    "NaN",
    "None",
    "true",
    "<think>",
    "</think>",
    "|",
    "```",
    "{label:",
    "sorry",
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=40).map("".join)

MIXED = AnswerSchema.from_dict(
    {
        "label": {"labels": ["good", "bad"], "optional": True},
        "why": {"text": {"max_chars": 20}, "optional": True},
        "score": {"number": {}, "optional": True},
        "o": {"object": {"label": {"list_of": ["good"]}}, "optional": True},
    }
)
COMPACT = AnswerSchema.from_dict({"label": {"labels": ["good", "bad"]}, "topic": {"labels": ["1", "-1"]}})


@given(texts, st.sampled_from(["length", "stop", "content_filter", None]))
@settings(UNTIMED, max_examples=500)
def test_no_text_raises_and_values_are_always_strict_json_in_utf_8(text: str, finish_reason: str | None) -> None:
    for parsed in (
        parse_answer(text, MIXED, finish_reason),
        parse_answer(text, COMPACT, finish_reason, "compact"),
    ):
        assert (parsed.status is Status.ok) == (parsed.reason is None)
        stored = parsed.values_json().encode()
        assert json.loads(stored, parse_constant=lambda constant: pytest.fail(constant)) == parsed.values


@given(texts)
@settings(UNTIMED, max_examples=500)
def test_reading_the_stored_values_again_changes_nothing(text: str) -> None:
    parsed = parse_answer(text, MIXED)
    if parsed.status is Status.ok:
        again = parse_answer(parsed.values_json(), MIXED)
        assert (again.status, again.values, again.repaired) == (Status.ok, parsed.values, ())


@pytest.mark.parametrize(
    ("pattern", "end"),
    [
        ("{“", "”x"),
        ("{a:“}", "”x"),
        ('{"', ""),
        ("{/*", "*/x"),
        ('{"label":\n', ""),
        ("{a:1}", ""),
        ("{a:x}", ""),
        ("{a:x", ""),
        ("[{", ""),
        ('\\"', '"'),
        ("<think>", ""),
        ("<think></think>", ""),
        ("(", "i"),
        (" ", "x"),
    ],
)
def test_work_grows_with_the_length_of_a_text_and_not_faster(
    pattern: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: characters that all attempts at one text read, by where each attempt began and stopped."""
    from millrace.answers import reader

    read = 0

    class Counting(reader.Reader):
        def value(self, depth: int) -> Any:
            nonlocal read
            start = self.pos
            try:
                return super().value(depth)
            finally:
                if depth == 0:
                    read += self.pos - start

    monkeypatch.setattr(reader, "Reader", Counting)
    text = pattern * 4000 + end
    parse_answer(text, MIXED)
    assert read <= 10 * len(text)
