"""Texts that models have really written, one group a fault; each has one right outcome."""

from __future__ import annotations

import json
import math

import pytest

from millrace.answers import AnswerSchema, Parsed, Reason, Status, parse_answer, split_reasoning

SPAM = AnswerSchema.from_dict(
    {
        "label": {"labels": ["ham", "spam", "not spam"], "aliases": {"Werbung": "spam", "垃圾": "spam"}},
        "why": {"text": {"max_chars": 60}, "optional": True},
        "ok": {"boolean": True, "optional": True},
        "score": {"number": {"min": 0, "max": 1}, "optional": True},
    }
)
LABEL = AnswerSchema.from_dict({"label": {"labels": ["pos", "neg", "negligible"]}})
SCORE = AnswerSchema.from_dict({"score": {"number": {"min": 0, "max": 1}}})
STARS = AnswerSchema.from_dict({"stars": {"number": {"min": 1, "max": 5, "integer": True}}})
TEXT = AnswerSchema.from_dict({"why": {"text": {"max_chars": 60}}})
PAIR = AnswerSchema.from_dict(
    {
        "sentiment": {"labels": ["positive", "neutral", "negative"], "aliases": {"pos": "positive"}},
        "topic": {"labels": ["quality", "price", "other"]},
    }
)


def label_of(text: str, finish_reason: str | None = None) -> str:
    parsed = parse_answer(text, SPAM, finish_reason)
    assert parsed.status is Status.ok, parsed
    return str(parsed.values["label"])


def refusal(parsed: Parsed) -> Reason | None:
    """The reason of a non-answer, which holds no values."""
    assert parsed.status is Status.unknown, parsed
    assert parsed.values == {}
    return parsed.reason


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"label": "ham"}\n```',
        '```\n{"label": "ham"}',
        'Sure! Here it is:\n{"label": "ham"}\nHope that helps {or not}.',
        'In [1] {braces} were used [sic]: {"label": "ham"}',
        '{{"label": "ham"}}',
        '\ufeff{"label": "ham"} ',
    ],
)
def test_g1_fences_and_brackets_around_the_answer_do_not_hide_it(text: str) -> None:
    assert label_of(text) == "ham"


def test_g1_fences_and_brackets_inside_a_value_come_back_unaltered() -> None:
    why = 'use ```json {"label": "spam"}``` or [x]'
    parsed = parse_answer(json.dumps({"label": "ham", "why": why, "ok": None, "score": None}), SPAM)
    assert parsed == Parsed(Status.ok, None, {"label": "ham", "why": why, "ok": None, "score": None}, ())
    fenced = parse_answer("```json\n" + json.dumps({"label": "ham", "why": why}) + "\n```", SPAM)
    assert (fenced.values["label"], fenced.values["why"]) == ("ham", why)


def test_g1_an_object_inside_a_broken_or_cut_one_is_not_an_answer() -> None:
    assert refusal(parse_answer('{"label": spam ham, "other": {"label": "ham"}}', SPAM)) is Reason.not_json
    assert refusal(parse_answer('{"draft": {"label": "ham"}, "label": ', SPAM)) is Reason.truncated


@pytest.mark.parametrize(
    ("text", "repair"),
    [
        ('{"label": "ham"}\n{"label": "ham"}', "repeated_object"),
        ('[{"label": "ham"}]', "array"),
        ('{"result": {"label": "ham"}}', "wrapper"),
        (json.dumps('{"label": "ham"}'), "double_encoded"),
        ('{"label": "ham", "label": "ham"}', "duplicate_key"),
        ('{"label": "lebanon"} final: {"label": "ham"}', "surrounding_text"),
    ],
)
def test_g2_repeats_collapse_and_one_wrapper_is_unwrapped(text: str, repair: str) -> None:
    parsed = parse_answer(text, SPAM)
    assert parsed.values["label"] == "ham"
    assert repair in parsed.repaired


@pytest.mark.parametrize(
    "text",
    [
        '{"label": "ham"} {"label": "spam"}',
        'draft {"label": "spam"}\nfinal: {"label": "ham"}',
        '[{"label": "ham"}, {"label": "spam"}]',
        '{"label": "ham", "label": "spam"}',
        "{'label': 'ham', 'label': 'spam'}",
        '{"first": {"label": "ham"}, "second": {"label": "spam"}}',
    ],
)
def test_g2_different_valid_answers_are_ambiguous_and_none_wins(text: str) -> None:
    assert refusal(parse_answer(text, SPAM)) is Reason.ambiguous


def test_g2_a_key_given_as_true_and_as_1_is_ambiguous() -> None:
    assert refusal(parse_answer('{"score": 1, "score": true}', SCORE)) is Reason.ambiguous


@pytest.mark.parametrize(
    "text",
    ['{"a": {"b": {"label": "ham"}}}', json.dumps(json.dumps('{"label": "ham"}')), '[[{"label": "ham"}]]'],
)
def test_g2_a_second_wrapper_is_not_unwrapped(text: str) -> None:
    assert refusal(parse_answer(text, SPAM)) in (Reason.schema, Reason.not_json)


@pytest.mark.parametrize("text", ['{"label": "ham"}\n{"label": "sp', '[{"label": "ham"}, ', '[{"label": "ham"}'])
def test_g2_an_answer_followed_by_the_start_of_another_is_truncated(text: str) -> None:
    assert refusal(parse_answer(text, SPAM)) is Reason.truncated


def test_g2_what_is_encoded_twice_is_not_read_while_its_outer_string_is_open() -> None:
    whole = json.dumps("{'why': 'a\\nb'}")
    assert parse_answer(whole, TEXT).values == {"why": "a\nb"}
    assert refusal(parse_answer(whole[:-1], TEXT)) is Reason.not_json


@pytest.mark.parametrize(
    "text",
    [
        '<think>maybe {"label": "spam"}?</think>\n{"label": "ham"}',
        'maybe {"label": "spam"}?</think>{"label": "ham"}',
        '<think>a <think>b</think> {"label": "spam"}</think>{"label": "ham"}',
        '[THINK]{"label": "spam"}[/THINK]{"label": "ham"}',
        '{"label": "ham"}<think>was that right? {"label": "spam"}</think>',
    ],
)
def test_g3_reasoning_is_set_apart_and_never_read_as_the_answer(text: str) -> None:
    parsed = parse_answer(text, SPAM)
    assert parsed.values["label"] == "ham"
    assert parsed.repaired == ("why:missing", "ok:missing", "score:missing")


@pytest.mark.parametrize("text", ['<think>it is {"label": "ham"}', '{"label": "ham"} <think>or is it'])
def test_g3_a_draft_beside_unclosed_reasoning_is_not_an_answer(text: str) -> None:
    assert refusal(parse_answer(text, SPAM, "stop")) is Reason.truncated
    assert refusal(parse_answer(text, PAIR, "stop", "compact")) is Reason.truncated


def test_g3_closed_reasoning_with_nothing_after_it_is_reasoning_only() -> None:
    assert refusal(parse_answer("<think>hm</think>\n", SPAM, "stop")) is Reason.reasoning_only
    assert refusal(parse_answer("<think>hm</think>\n", SPAM, "length")) is Reason.truncated


def test_g3_valid_json_that_holds_a_tag_is_untouched() -> None:
    assert parse_answer('{"why": "a <think> tag </think>"}', TEXT).values == {"why": "a <think> tag </think>"}


def test_g3_split_reasoning() -> None:
    assert split_reasoning("ham") == ("ham", False)
    assert split_reasoning(" <THINKING>x</THINKING> ham ") == ("ham", True)
    assert split_reasoning("x</think>ham") == ("ham", True)
    assert split_reasoning("ham<think>x") == ("", True)
    assert split_reasoning("<thi<think>x</think>nk>ham") == ("<thi nk>ham", True)


@pytest.mark.parametrize(
    ("text", "repair", "values"),
    [
        (
            """{'label': 'ham', 'why': "it's fine", 'ok': True, 'x': None}""",
            "python_literal",
            {"label": "ham", "why": "it's fine", "ok": True},
        ),
        ("{“label”: “ham”}", "curly_quotes", {"label": "ham"}),
        ("{„label“: „ham”}", "curly_quotes", {"label": "ham"}),
        ("{'label': 'ham', 'why': 'it\\'s'}", "single_quotes", {"label": "ham", "why": "it's"}),
        ('{"label": "ham",}', "trailing_comma", {"label": "ham"}),
        ('{"label": "ham" // because "spam" is\n}', "comment", {"label": "ham"}),
        ('{/* {"label": "spam"} */ "label": "ham"}', "comment", {"label": "ham"}),
        ('{"label": "ham", "why": "a\nb\tc"}', "control_character", {"label": "ham", "why": "a\nb\tc"}),
        ('{label: "ham", ok: false}', "unquoted_key", {"label": "ham", "ok": False}),
        ('{"label":\u00a0"ham"}', "spacing", {"label": "ham"}),
    ],
)
def test_g4_python_literals_quotes_commas_and_comments_have_one_reading(
    text: str, repair: str, values: dict[str, object]
) -> None:
    parsed = parse_answer(text, SPAM)
    assert parsed.status is Status.ok
    assert {name: value for name, value in parsed.values.items() if value is not None} == values
    assert repair in parsed.repaired


def test_g4_curly_quotes_in_a_value_of_valid_json_stay() -> None:
    assert parse_answer('{"why": "she said “no” and ‘why’"}', TEXT) == Parsed(
        Status.ok, None, {"why": "she said “no” and ‘why’"}, ()
    )


@pytest.mark.parametrize(
    "text",
    [
        "{'ham'}",
        "{'label': b'ham'}",
        "{'label': 'h' + 'am'}",
        "{'label': str('ham')}",
        "{'label': ('ham',)}",
        "{'label': ham}",
        "{'label': 'ham' 'why': 'x'}",
        "{'label': 'it's'}",
        r'{"label": "ham", "why": "C:\dir"}' + ",",
        "{'score': 0x1, 'label': 'ham'}",
        "dict(label='ham')",
        "ham",
    ],
)
def test_g4_sets_bytes_expressions_and_missing_delimiters_are_not_read(text: str) -> None:
    assert refusal(parse_answer(text, SPAM)) is Reason.not_json


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 50_000, "{a:" * 50_000, "{'label': " + "[" * 40 + "]" * 40 + "}"]
)
def test_g4_depth_has_a_limit(text: str) -> None:
    assert refusal(parse_answer(text, SPAM)) is Reason.too_large


def test_g4_size_has_a_limit() -> None:
    assert refusal(parse_answer('{"label": "ham"}' + " " * 300_000, SPAM)) is Reason.too_large


@pytest.mark.parametrize(
    "text",
    ['{"label": "neg', '{"label": "neg"', '{"label": "neg"\n', "{'label': 'neg', ", '{"label":', '{"label"', "{"],
)
@pytest.mark.parametrize("finish_reason", ["length", "stop", None])
def test_g5_f6_a_value_cut_open_by_the_end_is_never_taken(text: str, finish_reason: str | None) -> None:
    assert refusal(parse_answer(text, LABEL, finish_reason)) is Reason.truncated


def test_g5_a_key_without_a_value_is_null_where_optional_and_no_answer_where_required() -> None:
    parsed = parse_answer('{"label": "ham", "score": }', SPAM)
    assert parsed.values == {"label": "ham", "why": None, "ok": None, "score": None}
    assert "missing_value" in parsed.repaired and "score:missing" in parsed.repaired
    assert refusal(parse_answer('{"label": , "score": 1}', SPAM)) is Reason.schema


def test_g5_valid_input_is_never_repaired() -> None:
    assert parse_answer('{"label": "neg"}', LABEL).repaired == ()


@pytest.mark.parametrize(
    ("written", "label"),
    [
        ("HAM", "ham"),
        (" ham. ", "ham"),
        ("**ham**", "ham"),
        ("`ham`", "ham"),
        ("ｈａｍ", "ham"),
        ("Not_Spam", "not spam"),
        ("not-spam!", "not spam"),
        ("Werbung", "spam"),
        ("WERBUNG", "spam"),
        ("垃圾", "spam"),
    ],
)
def test_g6_a_label_almost_right_is_read_and_marked(written: str, label: str) -> None:
    parsed = parse_answer(json.dumps({"label": written}), SPAM)
    assert parsed.values["label"] == label
    assert any(repair.startswith("label:") for repair in parsed.repaired)


@pytest.mark.parametrize("written", ["definitely not spam", "spam or ham", "spammy", "sp am", "ham spam", "", "!", "h"])
def test_g6_no_label_is_found_by_substring_or_likeness(written: str) -> None:
    assert refusal(parse_answer(json.dumps({"label": written}), SPAM)) is Reason.not_a_label


def test_g6_a_label_called_unknown_or_other_is_a_label() -> None:
    schema = AnswerSchema.from_dict({"label": {"labels": ["unknown", "other"]}})
    assert parse_answer('{"label": "unknown"}', schema).status is Status.ok


def test_g6_a_minus_sign_is_part_of_a_label() -> None:
    schema = AnswerSchema.from_dict({"mood": {"labels": ["-1", "0", "1"]}})
    assert [parse_answer(f'{{"mood": "{mood}"}}', schema).values["mood"] for mood in ("-1", "1", "-1.")] == [
        "-1",
        "1",
        "-1",
    ]
    assert parse_answer('{"mood": -1}', schema).repaired == ("mood:label_from_number",)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "Infinity", "1e999", "-1e999", '"1e999"', "9" * 400, "nan"])
def test_g7_a_number_that_is_not_finite_is_no_value(number: str) -> None:
    assert refusal(parse_answer(f'{{"score": {number}}}', SCORE)) is Reason.not_finite
    parsed = parse_answer(f'{{"label": "ham", "score": {number}}}', SPAM)
    assert parsed.values["score"] is None
    assert "score:not_finite" in parsed.repaired


@pytest.mark.parametrize("number", ['"80%"', '"0,8"', "1.7", "-0.1", "true", "[0.8]", '"high"', "null", "9" * 200])
def test_g7_a_number_of_another_form_or_out_of_bounds_is_refused_not_guessed(number: str) -> None:
    assert refusal(parse_answer(f'{{"score": {number}}}', SCORE)) is Reason.schema


@pytest.mark.parametrize("text", ['{"score": 0,8}', '{"score": 80%}', '{"score": .8}', '{"score": 08}'])
def test_g7_a_bare_number_that_is_not_json_is_not_read(text: str) -> None:
    assert refusal(parse_answer(text, SCORE)) is Reason.not_json


def test_g7_a_json_number_in_a_string_is_read_and_marked() -> None:
    assert parse_answer('{"score": "0.8"}', SCORE) == Parsed(
        Status.ok, None, {"score": 0.8}, ("score:number_from_string",)
    )


def test_g7_numbers_have_the_type_of_their_column() -> None:
    score, stars = parse_answer('{"score": 1}', SCORE).values["score"], parse_answer('{"stars": 4.0}', STARS)
    assert type(score) is float
    assert type(stars.values["stars"]) is int and stars.repaired == ("stars:integer_from_decimal",)
    assert refusal(parse_answer('{"stars": 4.5}', STARS)) is Reason.schema
    assert refusal(parse_answer('{"stars": 99999999999999999999}', STARS)) is Reason.schema
    unbounded = AnswerSchema.from_dict({"n": {"number": {"integer": True}}})
    assert parse_answer(f'{{"n": {2**63 - 1}}}', unbounded).values == {"n": 2**63 - 1}
    assert refusal(parse_answer(f'{{"n": {2**63}}}', unbounded)) is Reason.schema
    assert not math.isnan(score)


@pytest.mark.parametrize(
    ("text", "why", "repaired"),
    [
        ('{"why": "\\ud83d\\ude00"}', "😀", ()),
        ("{'why': '\\ud83d\\ude00'}", "😀", ("single_quotes",)),
        ('{"why": "a\\ud83d"}', "a\ufffd", ("why:broken_unicode",)),
        ('{"why": "a\ud83d"}', "a\ufffd", ("why:broken_unicode",)),
        ('{"why": "a\\u0000b"}', "ab", ("why:broken_unicode",)),
    ],
)
def test_g8_surrogates_are_joined_or_replaced_and_nul_removed(text: str, why: str, repaired: tuple[str, ...]) -> None:
    parsed = parse_answer(text, TEXT)
    assert parsed == Parsed(Status.ok, None, {"why": why}, repaired)
    assert json.loads(parsed.values_json().encode()) == {"why": why}


@pytest.mark.parametrize("finish_reason", ["length", "stop"])
def test_f5_whitespace_until_the_token_limit_is_truncated(finish_reason: str) -> None:
    assert refusal(parse_answer('{"label":' + "\n" * 4000, LABEL, finish_reason)) is Reason.truncated


def test_f6_length_is_complete_only_where_one_object_closed() -> None:
    assert label_of('{"label": "ham"}', "length") == "ham"
    assert label_of('{"label": "ham"} Because the', "length") == "ham"
    assert refusal(parse_answer("The label of this one is", SPAM, "length")) is Reason.truncated
    assert refusal(parse_answer("", SPAM, "length")) is Reason.truncated


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't help with that.",
        "I’m very sorry",
        "I cannot assist.",
        "Unfortunately, I am not able to judge this.",
        "As an AI model I have no view",
        "**I apologize**, no",
        "很抱歉，我无法回答",
        "我无法回答。",
        "Es tut mir leid",
    ],
)
def test_h2_a_refusal_is_named_in_both_forms(text: str) -> None:
    assert refusal(parse_answer(text, SPAM)) is Reason.refused
    assert refusal(parse_answer(text, PAIR, None, "compact")) is Reason.refused


def test_h2_a_refusal_with_a_valid_answer_is_an_answer() -> None:
    assert label_of('I\'m sorry, I can only say {"label": "ham"}') == "ham"
    assert parse_answer('{"why": "I\'m sorry, I can\'t"}', TEXT).status is Status.ok


def test_h2_a_filtered_text_without_an_answer_is_a_refusal() -> None:
    assert refusal(parse_answer("", SPAM, "content_filter")) is Reason.refused


@pytest.mark.parametrize("text", [None, "", " \n", "\ufeff"])
def test_h2_an_answer_without_text_is_empty(text: str | None) -> None:
    assert refusal(parse_answer(text, SPAM, "stop")) is Reason.empty
    assert refusal(parse_answer(text, PAIR, "stop", "compact")) is Reason.empty


@pytest.mark.parametrize("text", ["<html><body>502 Bad Gateway</body></html>", "null nothing", "ham"])
def test_h2_a_text_without_an_object_is_not_json(text: str) -> None:
    assert refusal(parse_answer(text, SPAM)) is Reason.not_json


@pytest.mark.parametrize("text", ["null", "5", "[]", "{}", '{"lable": "ham"}', '{"label": null}', '{"label": ["ham"]}'])
def test_json_of_another_shape_is_schema(text: str) -> None:
    assert refusal(parse_answer(text, SPAM)) is Reason.schema


def test_keys_beyond_the_schema_are_ignored_and_marked() -> None:
    assert parse_answer('{"label": "pos", "confidence": 0.3}', LABEL).repaired == ("extra_keys",)


def test_an_optional_field_without_an_acceptable_value_is_null_and_says_why() -> None:
    parsed = parse_answer('{"label": "ham", "why": 7, "ok": "maybe", "score": 3}', SPAM)
    assert parsed.values == {"label": "ham", "why": None, "ok": None, "score": None}
    assert parsed.repaired == ("why:schema", "ok:schema", "score:schema")


def test_a_text_over_its_bound_is_refused_not_cut() -> None:
    assert parse_answer(json.dumps({"why": "😀" * 60}), TEXT).values == {"why": "😀" * 60}
    assert refusal(parse_answer(json.dumps({"why": "😀" * 61}), TEXT)) is Reason.schema


def test_a_list_keeps_the_order_and_counts_a_label_once() -> None:
    schema = AnswerSchema.from_dict({"topics": {"list_of": ["a", "b", "c"], "max_items": 2}})
    assert parse_answer('{"topics": ["c", "a"]}', schema) == Parsed(Status.ok, None, {"topics": ["c", "a"]}, ())
    assert parse_answer('{"topics": []}', schema).values == {"topics": []}
    repeated = parse_answer('{"topics": ["c", "A", "c"]}', schema)
    assert (repeated.values, repeated.repaired) == (
        {"topics": ["c", "a"]},
        ("topics:normalised", "topics:repeated_item"),
    )
    assert refusal(parse_answer('{"topics": ["a", "b", "c"]}', schema)) is Reason.schema
    assert refusal(parse_answer('{"topics": ["a", "d"]}', schema)) is Reason.not_a_label
    assert refusal(parse_answer('{"topics": "a"}', schema)) is Reason.schema


def test_an_object_field_is_read_with_its_own_required_and_optional_fields() -> None:
    schema = AnswerSchema.from_dict(
        {"person": {"object": {"role": {"labels": ["buyer"]}, "age": {"number": {"integer": True}, "optional": True}}}}
    )
    assert parse_answer('{"person": {"role": "Buyer"}}', schema) == Parsed(
        Status.ok, None, {"person": {"role": "buyer", "age": None}}, ("person:role:normalised", "person:age:missing")
    )
    assert refusal(parse_answer('{"person": {"age": 3}}', schema)) is Reason.schema
    assert refusal(parse_answer('{"person": {"role": "x"}}', schema)) is Reason.not_a_label


def compact(text: str, finish_reason: str | None = None) -> Parsed:
    return parse_answer(text, PAIR, finish_reason, "compact")


def test_compact_reads_a_choice_as_it_stands() -> None:
    for finish_reason in (None, "stop", "length"):
        assert compact("positive|price", finish_reason) == Parsed(
            Status.ok, None, {"sentiment": "positive", "topic": "price"}, ()
        )
    assert compact("<think>hm</think> positive|price").repaired == ()


def test_compact_reads_labels_almost_right_and_marks_them() -> None:
    assert compact(" Pos | price.") == Parsed(
        Status.ok, None, {"sentiment": "positive", "topic": "price"}, ("sentiment:alias", "topic:normalised")
    )
    assert compact("positive | price").repaired == ("spacing",)
    assert refusal(compact("positive | price", "length")) is Reason.truncated


def test_compact_without_a_label_in_each_part_is_no_answer() -> None:
    assert refusal(compact("positive|qual")) is Reason.not_a_label
    assert refusal(compact("positive|qual", "length")) is Reason.truncated
    assert refusal(compact("positive")) is Reason.schema
    assert refusal(compact("positive|price|other")) is Reason.schema
    assert refusal(compact("positive|price\npositive|other")) is Reason.schema


def test_compact_takes_json_instead_and_marks_it() -> None:
    assert compact('```json\n{"sentiment": "positive", "topic": "price"}\n```').repaired == (
        "json_for_compact",
        "surrounding_text",
    )
    assert refusal(compact('{"sentiment": "positive", "topic": "pri')) is Reason.truncated
