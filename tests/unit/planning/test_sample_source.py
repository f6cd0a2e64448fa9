"""The sample tables, and the golden rows that were taken from the same data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from millrace.errors import NotFoundError
from millrace.lake import Lake
from millrace.sample_source import load

HOME = Path(__file__).resolve().parents[3]
DATA = HOME / "data"


def keys(lake: Lake, table: str, partition: str) -> list[str]:
    return lake.parquet(f"{table}/dt={partition}/part-00000.parquet").read().column("comment_id").to_pylist()


def test_each_day_has_the_rows_asked_for_and_no_two_days_the_same(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    loaded = load(lake, DATA, rows=40, days=3)
    days = ["2026-11-01", "2026-11-02", "2026-11-03"]
    assert loaded == {t: dict.fromkeys(days, 40) for t in ("source/product_reviews", "source/shop_reviews_zh")}
    for table in loaded:
        ids = [key for day in days for key in keys(lake, table, day)]
        assert len(set(ids)) == 120


def test_all_rows_of_the_data_fit_one_day_and_the_next_starts_over(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    assert load(lake, DATA, days=2)["source/product_reviews"] == {"2026-11-01": 3708, "2026-11-02": 3708}
    assert sorted(keys(lake, "source/product_reviews", "2026-11-01")) == sorted(
        keys(lake, "source/product_reviews", "2026-11-02")
    )


def test_columns_are_those_of_the_data(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    load(lake, DATA, rows=1, days=1)
    names = {
        t: lake.parquet(f"{t}/dt=2026-11-01/part-00000.parquet").schema_arrow.names
        for t in ("source/product_reviews", "source/shop_reviews_zh")
    }
    assert names == {
        "source/product_reviews": ["comment_id", "comment_text", "rating"],
        "source/shop_reviews_zh": ["comment_id", "comment_text", "polarity"],
    }


def test_loading_again_rewrites_only_what_changed(tmp_path: Path) -> None:
    """A rewritten file is another snapshot, hence another plan."""
    lake = Lake(str(tmp_path))
    file = tmp_path / "source/product_reviews/dt=2026-11-01/part-00000.parquet"
    load(lake, DATA, rows=20, days=1)
    inode = file.stat().st_ino
    load(lake, DATA, rows=20, days=1)
    assert file.stat().st_ino == inode
    load(lake, DATA, rows=21, days=1)
    assert pq.read_metadata(file).num_rows == 21


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"amazon_review_sentences\.parquet"):
        load(Lake(str(tmp_path)), tmp_path / "nowhere")


def sentiment(row: dict[str, Any]) -> str:
    return "positive" if row["rating"] > 0.5 else "negative" if row["rating"] < -0.5 else "neutral"


def recommends(row: dict[str, Any]) -> str:
    return "yes" if row["polarity"] == "pos" else "no"


def sampled(
    file: str, label: Callable[[dict[str, Any]], str], field: str, labels: list[str]
) -> Iterator[dict[str, Any]]:
    """docs/prompts.md, "Golden rows": the labels in turn, of each the rows with the lowest hash of the key."""
    rows = pq.read_table(DATA / file).to_pylist()
    rows.sort(key=lambda row: hashlib.sha256(row["comment_id"].encode()).hexdigest())
    for i in range(50):
        name = labels[i % len(labels)]
        labelled = [row for row in rows if label(row) == name]
        yield {"text": labelled[i // len(labels)]["comment_text"], "expected": {field: name}}


@pytest.mark.parametrize(
    ("prompt", "file", "label", "field", "labels"),
    [
        (
            "review_insights",
            "amazon_review_sentences.parquet",
            sentiment,
            "sentiment",
            ["positive", "negative", "neutral"],
        ),
        ("review_polarity_zh", "online_reviews_zh.parquet", recommends, "recommends", ["yes", "no"]),
    ],
)
def test_golden_rows_are_the_balanced_sample_that_the_docs_describe(
    prompt: str, file: str, label: Callable[[dict[str, Any]], str], field: str, labels: list[str]
) -> None:
    lines = (HOME / "dags" / "prompts" / prompt / "golden.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == list(sampled(file, label, field, labels))
