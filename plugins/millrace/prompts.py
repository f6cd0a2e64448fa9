"""Prompt templates: Jinja in a sandbox with named placeholders; row text goes in verbatim and is never rendered again.

A template has a `system` text, which is the same for every row (so that engines can cache it), and a `body`, which names
placeholders: `{{ text }}` for the text column, and any kept column, e.g. `{{ rating }}`. `{{ answer_fields }}` is the
description of the answer's fields and may stand in both. Literal braces are fine: a JSON example is not a placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from millrace.canonical import content_hash
from millrace.errors import ConfigError, NotFoundError

TEXT = "text"
STATIC = frozenset({"answer_fields"})

_ENVIRONMENT = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined,
    autoescape=False,
    keep_trailing_newline=False,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class PromptText:
    """The two texts of a prompt, line ends normalised."""

    system: str
    body: str

    @classmethod
    def of(cls, system: str, body: str) -> PromptText:
        """Normalise line ends and trailing blank lines, so that a file saved elsewhere is the same prompt."""
        return cls(*("\n".join(text.splitlines()).strip() for text in (system, body)))

    @property
    def sha(self) -> str:
        return content_hash([self.system, self.body])


def read_prompt(folder: Path) -> PromptText:
    """Read `system.jinja` and `body.jinja` of a prompt folder."""
    files = [folder / "system.jinja", folder / "body.jinja"]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise NotFoundError(f"dags/prompts/{folder.name}/ lacks {' and '.join(missing)}; create it or fix `prompt:`.")
    return PromptText.of(*(file.read_text(encoding="utf-8") for file in files))


def placeholders(text: str, where: str = "prompt") -> frozenset[str]:
    """Names a template refers to. Raises ConfigError for a template that does not parse."""
    try:
        return frozenset(meta.find_undeclared_variables(_ENVIRONMENT.parse(text)))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{where}, line {error.lineno}: {error.message}. Literal braces are written {{{{ '{{{{' }}}}."
        ) from error


def lint(prompt: PromptText, columns: Collection[str], where: str = "prompt") -> list[str]:
    """Everything wrong with a template for an enrichment whose kept columns are `columns`; empty when it is fine."""
    problems = []
    try:
        in_system, in_body = placeholders(prompt.system, f"{where} system"), placeholders(prompt.body, f"{where} body")
    except ConfigError as error:
        return [str(error)]
    if TEXT not in in_body:
        problems.append(f"{where} body: has no {{{{ text }}}}; without it every row gets the same prompt")
    if in_system - STATIC:
        problems.append(
            f"{where} system: {sorted(in_system - STATIC)} change from row to row; move them into the body, "
            "so that the system text is the same for all rows and can be cached"
        )
    unknown = in_body - STATIC - {TEXT} - set(columns)
    if unknown:
        problems.append(
            f"{where} body: {sorted(unknown)} is neither `text` nor a column in source.keep {sorted(columns)}"
        )
    return problems


def row_placeholders(prompt: PromptText) -> tuple[str, ...]:
    """The names whose values make up a request, sorted: `text` and the kept columns that the body uses."""
    return tuple(sorted(placeholders(prompt.body) - STATIC))


def renderer(prompt: PromptText, answer_fields: str) -> Callable[[Mapping[str, str | None]], tuple[str, str]]:
    """A function from a request's values to (system text, user text). A null value renders as nothing.

    >>> render = renderer(PromptText("Say {{ answer_fields }}.", "Text: {{ text }}"), "yes or no")
    >>> render({"text": "{{ 7 * 7 }} ${HOME} %s"})
    ('Say yes or no.', 'Text: {{ 7 * 7 }} ${HOME} %s')
    """
    system = _ENVIRONMENT.from_string(prompt.system).render(answer_fields=answer_fields)
    body = _ENVIRONMENT.from_string(prompt.body)

    def render(values: Mapping[str, str | None]) -> tuple[str, str]:
        filled = {name: "" if value is None else value for name, value in values.items()}
        return system, body.render(answer_fields=answer_fields, **filled)

    return render
