"""Named placeholders in one pass: row text is inserted verbatim and never scanned again (known kind: J3)."""

from __future__ import annotations

import pytest

from millrace.errors import ConfigError
from millrace.prompts import PromptText, lint, renderer, row_placeholders


@pytest.mark.parametrize(
    "text", ["{text}", "{{label}}", "{% raw %}", "${HOME}", "%s", "{# gone #}", "{{ 7*7 }}", "a\r\nb\\"]
)
def test_row_text_arrives_verbatim(text: str) -> None:
    _, user = renderer(PromptText("", "Review: {{ text }} END"), "")({"text": text})
    assert user == f"Review: {text} END"


def test_a_json_example_in_the_template_is_not_a_placeholder() -> None:
    prompt = PromptText.of('Answer like {"label": "x", "n": {"a": 1}}', "{{ text }}")
    assert lint(prompt, []) == []
    assert renderer(prompt, "")({"text": "t"})[0] == 'Answer like {"label": "x", "n": {"a": 1}}'


def test_line_ends_and_trailing_blank_lines_do_not_make_another_prompt() -> None:
    assert PromptText.of("a\r\nb\r\n\r\n", "{{ text }}\n").sha == PromptText.of("a\nb", "{{ text }}").sha


def test_a_null_value_renders_as_nothing() -> None:
    assert renderer(PromptText("", "[{{ title }}] {{ text }}"), "")({"title": None, "text": "x"})[1] == "[] x"


@pytest.mark.parametrize(
    ("system", "body", "expected"),
    [
        ("s", "no placeholder", "has no {{ text }}"),
        ("s {{ text }}", "{{ text }}", "change from row to row"),
        ("s", "{{ text }} {{ stars }}", "['stars'] is neither"),
        ("s", "{{ text ", "line 1"),
    ],
)
def test_lint_names_what_is_wrong(system: str, body: str, expected: str) -> None:
    problems = lint(PromptText(system, body), ["rating"], "prompt mood")
    assert len(problems) == 1
    assert expected in problems[0]
    assert problems[0].startswith("prompt mood")


def test_row_placeholders_are_sorted_and_leave_out_static_ones() -> None:
    assert row_placeholders(PromptText("{{ answer_fields }}", "{{ text }} {{ rating }} {{ answer_fields }}")) == (
        "rating",
        "text",
    )


def test_templates_run_in_a_sandbox() -> None:
    render = renderer(PromptText("", "{{ text.__class__.__mro__ }}"), "")
    with pytest.raises(Exception, match="unsafe"):
        render({"text": "x"})


def test_a_template_that_does_not_parse_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        row_placeholders(PromptText("", "{% if %}"))
