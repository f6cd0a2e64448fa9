"""Bad enrichment files name the file, the key, what is wrong and the fix; good ones are frozen values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.enrichment import load_enrichments, parse_enrichment
from millrace.errors import ConfigError


def spec(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "mood",
        "source": {"path": "source/reviews", "key": "id", "text": "body", "keep": ["rating"]},
        "prompt": "mood",
        "answer": {"sentiment": {"labels": ["good", "bad"]}},
        "target": {"path": "enriched/mood"},
    }
    return base | changes


def test_defaults_are_those_of_the_architecture_page() -> None:
    enrichment = parse_enrichment(spec())
    assert enrichment.limits.unknown_rate == 0.01
    assert enrichment.limits.not_applicable_rate == 0.20
    assert (enrichment.reuse_days, enrichment.target.rollback_days, enrichment.form) == (90, 14, "json")
    assert enrichment.source.on_missing == "fail"


def test_the_spec_round_trips() -> None:
    enrichment = parse_enrichment(spec(schedule="0 3 * * *"))
    assert parse_enrichment(enrichment.spec()) == enrichment


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"colour": "red"}, r"mood.yaml: colour: is not a known key"),
        (
            {"source": {"path": "source/reviews", "key": "id", "text": "body", "keep": ["rating", "Rating"]}},
            r"\['Rating', 'rating'\] would appear twice",
        ),
        (
            {"source": {"path": "source/reviews", "key": "id", "text": "body", "keep": ["Sentiment"]}},
            r"\['Sentiment', 'sentiment'\] would appear twice",
        ),
        (
            {"source": {"path": "source/reviews", "key": "id", "text": "body", "keep": ["DT"]}},
            r"\['DT'\] are names of Millrace's own columns",
        ),
        ({"target": {"path": "enriched/../../mood"}}, r"mood.yaml: target.path: .*leave out '..'"),
        (
            {"source": {"path": "source/../..", "key": "id", "text": "body"}},
            r"mood.yaml: source.path: .*leave out '..'",
        ),
        ({"source": {"path": "source/reviews", "text": "body"}}, r"mood.yaml: source.key: is missing"),
        ({"limits": {"unknown_rate": 1.5}}, r"limits.unknown_rate: .*less than or equal to 1.*1.5"),
        ({"limits": {"max_shards": 1500}}, r"limits.max_shards: .*1000"),
        ({"schedule": "every day"}, r"schedule: 'every day' is not a cron expression"),
        ({"timezone": "Mars/Olympus"}, r"timezone: 'Mars/Olympus' is not a time zone"),
        ({"name": "Mood!"}, r"name: "),
        ({"answer": {"rating": {"boolean": True}}}, r"\['rating'\] would appear twice"),
        ({"answer": {"mood": {"labels": ["not-good", "not good"]}}}, r"mood"),
        ({"target": {"path": "../outside"}}, r"target.path"),
        ({"form": "compact", "answer": {"why": {"text": {"max_chars": 10}}}}, r"why"),
    ],
)
def test_a_wrong_file_is_explained(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_enrichment(spec(**changes), "mood.yaml")


def test_a_broken_file_leaves_the_others_standing(tmp_path: Path) -> None:
    (tmp_path / "mood.yaml").write_text(yaml.safe_dump(spec()))
    (tmp_path / "torn.yaml").write_text("name: [unclosed")
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(spec(name="not_the_stem", target={"path": "enriched/x"})))
    found, errors = load_enrichments(tmp_path)
    assert list(found) == ["mood"]
    assert "torn.yaml: line" in str(errors["torn"])
    assert "it must be the file's name, 'other'" in str(errors["other"])


def test_two_enrichments_with_one_target_are_both_errors(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(spec(name="a")))
    (tmp_path / "b.yaml").write_text(yaml.safe_dump(spec(name="b", target={"path": "enriched/mood/"})))
    found, errors = load_enrichments(tmp_path)
    assert found == {}
    assert "is the target of a and b" in str(errors["a"])
