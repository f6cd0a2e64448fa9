from __future__ import annotations

import doctest
import json
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest

from millrace.answers import PARSER_VERSION, AnswerSchema, AnswerSchemaError, labels, parse

SPEC: dict[str, Any] = {
    "sentiment": {"labels": ["positive", "neutral", "negative"], "aliases": {"pos": "positive"}},
    "topic": {"labels": {"quality": "how well it is made", "price": None}, "description": "What it is\nabout"},
    "summary": {"text": {"max_chars": 200}, "optional": True},
    "score": {"number": {"min": 0, "max": 1}, "optional": True},
    "stars": {"number": {"min": 1, "max": 5, "integer": True}},
    "entities": {"list_of": ["person", "brand", "place"], "max_items": 2, "aliases": {"shop": "brand"}},
    "urgent": {"boolean": True},
    "buyer": {"object": {"tone": {"labels": ["calm", "angry"], "aliases": {"mad": "angry"}}, "age": {"number": {}}}},
}
SCHEMA = AnswerSchema.from_dict(SPEC)


def test_the_canonical_spec_comes_back_the_same_even_with_sorted_keys() -> None:
    stored = json.dumps(SCHEMA.to_dict(), sort_keys=True)
    again = AnswerSchema.from_dict(json.loads(stored))
    assert again == SCHEMA
    assert again.names == tuple(SPEC)
    assert json.dumps(again.to_dict(), sort_keys=True) == stored
    assert again.json_schema() == SCHEMA.json_schema()


def test_aliases_are_part_of_the_reading_and_not_of_what_the_engine_is_asked() -> None:
    assert SCHEMA.reading_dict() == {
        "parser": PARSER_VERSION,
        "aliases": {
            "sentiment": {"pos": "positive"},
            "entities": {"shop": "brand"},
            "buyer": {"tone": {"mad": "angry"}},
        },
    }
    assert "aliases" not in json.dumps(SCHEMA.engine_dict())
    assert "how well it is made" in json.dumps(SCHEMA.engine_dict())


def test_the_json_schema_binds_the_engine_to_the_fields_in_order() -> None:
    schema = SCHEMA.json_schema()
    assert schema["type"] == "object" and schema["additionalProperties"] is False
    assert schema["required"] == list(schema["properties"]) == list(SPEC)
    assert schema["properties"]["sentiment"] == {"type": "string", "enum": ["positive", "neutral", "negative"]}
    assert schema["properties"]["summary"] == {"anyOf": [{"type": "string", "maxLength": 200}, {"type": "null"}]}
    assert schema["properties"]["stars"] == {"type": "integer", "minimum": 1, "maximum": 5}
    assert schema["properties"]["entities"] == {
        "type": "array",
        "items": {"type": "string", "enum": ["person", "brand", "place"]},
        "maxItems": 2,
    }
    assert schema["properties"]["buyer"]["properties"]["age"] == {"type": "number"}


def test_integers_are_bound_to_64_bits_for_the_engine() -> None:
    schema = AnswerSchema.from_dict({"n": {"number": {"integer": True}}}).json_schema()
    assert schema["properties"]["n"] == {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


def test_every_field_is_a_nullable_column_of_the_same_type_in_arrow_and_spark() -> None:
    fields = SCHEMA.arrow_fields()
    assert all(field.nullable for field in fields)
    assert {field.name: field.type for field in fields} == {
        "sentiment": pa.string(),
        "topic": pa.string(),
        "summary": pa.string(),
        "score": pa.float64(),
        "stars": pa.int64(),
        "entities": pa.list_(pa.string()),
        "urgent": pa.bool_(),
        "buyer": pa.struct([pa.field("tone", pa.string()), pa.field("age", pa.float64())]),
    }
    assert SCHEMA.spark_ddl() == (
        "`sentiment` STRING, `topic` STRING, `summary` STRING, `score` DOUBLE, `stars` BIGINT, "
        "`entities` ARRAY<STRING>, `urgent` BOOLEAN, `buyer` STRUCT<`tone`: STRING, `age`: DOUBLE>"
    )


def test_the_description_names_every_field_and_label_for_the_prompt() -> None:
    assert SCHEMA.describe() == "\n".join(
        [
            '- "sentiment": exactly one of "positive", "neutral", "negative"',
            '- "topic": What it is about - exactly one of:',
            '    - "quality": how well it is made',
            '    - "price"',
            '- "summary": a text of at most 200 characters, or null where the text does not say',
            '- "score": a number, at least 0, at most 1, or null where the text does not say',
            '- "stars": a whole number, at least 1, at most 5',
            '- "entities": a list, possibly empty, of at most 2 of "person", "brand", "place"',
            '- "urgent": true or false',
            '- "buyer": an object of:',
            '    - "tone": exactly one of "calm", "angry"',
            '    - "age": a number',
        ]
    )


def of(*label_lists: list[str], **last: Any) -> AnswerSchema:
    fields: dict[str, Any] = {f"f{index}": {"labels": label_list} for index, label_list in enumerate(label_lists)}
    fields[f"f{len(label_lists) - 1}"].update(last)
    return AnswerSchema.from_dict(fields)


def test_compact_choices_are_the_product_of_the_labels_in_order() -> None:
    assert of(["a", "b"], ["x", "y"]).compact_choices() == ["a|x", "a|y", "b|x", "b|y"]
    assert len(of(["a", "b"], [f"l{index}x" for index in range(256)]).compact_choices()) == 512
    assert of(["good", "good value"], ["x"]).compact_choices() == ["good|x", "good value|x"]


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        (SCHEMA, "topic|summary"),
        (of(["a"], ["x"], optional=True), "null"),
        (of(["a|b", "c"]), "separates"),
        (of(["a", "b", "c"], [f"l{index}x" for index in range(256)]), "768 answers"),
        (of(["good", "good value"]), "cut short"),
        (of(["post", "positive"], aliases={"pos": "positive"}), "'post', cut short, reads as 'positive'"),
    ],
)
def test_compact_is_refused_where_it_does_not_fit(schema: AnswerSchema, wrong: str) -> None:
    with pytest.raises(AnswerSchemaError, match=wrong):
        schema.compact_choices()


def test_max_answer_tokens_follows_from_the_longest_valid_answer() -> None:
    pair = of(["positive", "negative"], ["quality", "price"])
    # "positive|quality" is 15 letters and a bar: 8.5 tokens; and 8.
    assert pair.max_answer_tokens("compact") == 17
    assert 17 < pair.max_answer_tokens("json") < 45
    text = AnswerSchema.from_dict({"summary": {"text": {"max_chars": 200}}})
    assert text.max_answer_tokens() - text.max_answer_tokens(chars_per_token=4.0) == 150


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({}, "answer: has no fields"),
        ([], "answer: has no fields"),
        ("labels", "answer: is not a mapping"),
        ({"answer_x": {"boolean": True}}, "answer.answer_x: .*Millrace's own"),
        ({"dt": {"boolean": True}}, "answer.dt: .*Millrace's own"),
        ({"1st": {"boolean": True}}, "answer.1st: a field name"),
        ({"a b": {"boolean": True}}, "answer.a b: a field name"),
        ({1: {"boolean": True}}, "answer.1: a field name"),
        ({"a": {"boolean": True}, "A": {"boolean": True}}, "answer.A: Spark cannot tell"),
        ({"a": ["x"]}, "answer.a: is not a mapping"),
        ({"a": {}}, r"answer.a: has 0 kinds \(none\)"),
        ({"a": {"labels": ["x"], "boolean": True}}, r"answer.a: has 2 kinds \(labels, boolean\)"),
        ({"a": {"labels": ["x"], "alias": {}}}, "labels field does not know the key 'alias'"),
        ({"a": {"boolean": True, "aliases": {}}}, "boolean field does not know the key 'aliases'"),
        ({"a": {"labels": ["x"], "max_items": 1}}, "labels field does not know the key 'max_items'"),
        ({"a": {"labels": ["x"], "optional": "yes"}}, "answer.a.optional: is not true or false"),
        ({"a": {"labels": ["x"], "description": 3}}, "answer.a.description: is not a text"),
        ({"a": {"labels": ["x"], "name": "b"}}, "answer.a.name: differs"),
        ({"a": {"labels": []}}, "answer.a.labels: has no labels"),
        ({"a": {"labels": "x"}}, "answer.a.labels: is neither"),
        ({"a": {"labels": [True, False]}}, "True is not a text .*quote it"),
        ({"a": {"labels": ["x", "x"]}}, "lists a label twice"),
        ({"a": {"labels": ["Very good", "very_good!"]}}, "'Very good' and 'very_good!' are the same"),
        ({"a": {"labels": ["x", "!?"]}}, "nothing but space and punctuation"),
        ({"a": {"labels": [" x"]}}, "outer spaces"),
        ({"a": {"labels": ["x\ud83d"]}}, "broken Unicode"),
        ({"a": {"labels": ["x" * 201]}}, "longer than 200"),
        ({"a": {"labels": ["x", "y"], "aliases": {"X.": "y"}}}, "'x' and 'X.' are the same"),
        ({"a": {"labels": ["x", "y"], "aliases": {"z": "x", "Z": "y"}}}, "'z' and 'Z' are the same"),
        ({"a": {"labels": ["x"], "aliases": {"z": "w"}}}, "alias 'z' points to 'w'"),
        ({"a": {"labels": ["x"], "aliases": ["z"]}}, "aliases are not a mapping"),
        ({"a": {"list_of": ["x"], "max_items": 0}}, "answer.a.max_items: is not a whole number from 1 to 1"),
        ({"a": {"boolean": False}}, "answer.a.boolean: takes no setting"),
        ({"a": {"number": {"min": 2, "max": 1}}}, "answer.a.number: min 2 is above max 1"),
        ({"a": {"number": {"min": float("nan")}}}, "answer.a.number.min: is not a finite number"),
        ({"a": {"number": {"min": "0"}}}, "answer.a.number.min: is not a finite number"),
        ({"a": {"number": {"max": 2**63, "integer": True}}}, "answer.a.number.max: is not a 64-bit whole number"),
        ({"a": {"number": {"min": 0.5, "integer": True}}}, "answer.a.number.min: is not a 64-bit whole number"),
        ({"a": {"number": {"max": 1e16}}}, "answer.a.number.max: is beyond 1e15"),
        ({"a": {"number": {"maximum": 1}}}, "answer.a.number: does not know the key 'maximum'"),
        ({"a": {"number": True}}, "answer.a.number: is not a mapping"),
        ({"a": {"text": {}}}, "answer.a.text: has no length bound"),
        ({"a": {"text": {"max_chars": 0}}}, "answer.a.text.max_chars: is not a whole number"),
        (
            {"a": {"object": {"b": {"object": {"c": {"boolean": True}}}}}},
            "answer.a.object.b.object: .*inside an object",
        ),
        ({"a": {"object": {}}}, "answer.a.object: has no fields"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_field_and_the_fix(spec: Any, named: str) -> None:
    with pytest.raises(AnswerSchemaError, match=named) as error:
        AnswerSchema.from_dict(spec)
    assert "Fix: " in str(error.value)
    assert isinstance(error.value, ValueError)


def test_it_imports_without_airflow_spark_vllm_and_pyarrow() -> None:
    code = (
        "import sys, millrace.answers as a; a.parse_answer('', a.AnswerSchema.from_dict({'x': {'boolean': True}}));"
        "print(sorted({'airflow', 'pyspark', 'vllm', 'pyarrow', 'pandas'} & set(sys.modules)))"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"


def test_the_examples_in_the_docstrings_hold() -> None:
    for module in (labels, parse):
        result = doctest.testmod(module)
        assert result.attempted > 0 and result.failed == 0
