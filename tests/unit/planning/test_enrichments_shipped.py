"""The enrichments that come with the project, and their reference page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from millrace.enrichment import Enrichment, load_enrichments
from millrace.prompt_push import lint_prompts
from millrace.sample_source import TABLES
from millrace.settings import Settings

HOME = Path(__file__).resolve().parents[3]
SETTINGS = Settings.from_env({"MILLRACE_HOME": str(HOME)})


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{name}.")
        else:
            yield prefix + name


def test_are_sound_and_their_prompts_fit() -> None:
    found, errors = load_enrichments(SETTINGS.enrichments)
    assert errors == {}
    assert sorted(found) == ["review_insights", "review_polarity_zh"]
    assert lint_prompts(SETTINGS, found.values()) == ([], 2)
    assert {e.source.path for e in found.values()} == set(TABLES)


def test_each_has_its_three_parts_under_one_name() -> None:
    for name in load_enrichments(SETTINGS.enrichments)[0]:
        parts = [SETTINGS.prompts / name / f for f in ("system.jinja", "body.jinja", "golden.jsonl")]
        parts += [SETTINGS.expectations / name / f for f in ("source.json", "enriched.json")]
        assert [str(part) for part in parts if not part.is_file()] == []


@pytest.mark.parametrize("key", list(keys(Enrichment)))
def test_every_key_of_the_file_is_in_the_reference_and_no_other(key: str) -> None:
    page = (HOME / "docs" / "enrichments.md").read_text(encoding="utf-8")
    table = page.split("| key | meaning | default |")[1].split("\n\n")[0]
    documented = {
        word
        for line in table.splitlines()
        for word in re.findall(r"`([a-z_.]+)`", line.split("|")[1] if "|" in line else "")
    }
    assert key in documented
    assert documented <= set(keys(Enrichment))
