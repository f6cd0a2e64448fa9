from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.enrichment import load_enrichments
from millrace.errors import ConfigError, NotFoundError, RefusedError
from millrace.records import SuiteResult
from millrace.settings import Settings
from millrace.spark.check_source import check_source
from millrace.spark.suites import Suite

from .conftest import World, reviews

CHECKOUT = Path(__file__).parents[2]


def check(name: str, kind: str, severity: str = "block", **kwargs):
    return {
        "name": name,
        "type": f"expect_{kind}",
        "kwargs": kwargs,
        "severity": severity,
        "why": "There is a reason.",
        "opens": "the column",
    }


def write_suite(*checks) -> None:
    path = Settings.from_env().expectations / "reviews" / "source.json"
    path.write_text(json.dumps({"table": "reviews", "grain": "one row per id", "checks": checks}))


def run(spark, world: World, rows) -> SuiteResult:
    """Check a partition of these rows; what was recorded, whether it passed or not."""
    world.write_source(rows)
    plan = world.plan()
    try:
        check_source(spark, world.lake, plan.paths)
    except RefusedError as error:
        assert not SuiteResult.load(world.lake, plan.paths.source_check()).passed
        assert "secret" not in str(error)
    return SuiteResult.load(world.lake, plan.paths.source_check())


def test_every_measure_of_a_text_is_checked_and_no_text_gets_out(spark, world: World):
    texts = [
        "secret words",
        None,
        "\u3000 \t",
        '{"secret": 1}',
        '"{\\"secret\\": 1}"',
        "<b>secret</b> &amp;",
        "secre\x01t\ufffd",
        "a < b and c > d [sic]",
    ]
    write_suite(
        check("has_text", "column_mean_to_be_between", column="has_text", min_value=0.9),
        check("longest", "column_max_to_be_between", column="text_chars", max_value=5),
        check("json", "column_mean_to_be_between", "warn", column="json_like", max_value=0.1),
        check("markup", "column_mean_to_be_between", "warn", column="markup_like", max_value=0.1),
        check("odd", "column_max_to_be_between", column="odd_chars", max_value=0.2),
        check("recent", "column_min_to_be_between", column="days_after_date", min_value=-100_000),
        check("unique", "column_values_to_be_unique", column="id"),
        check("rating", "column_values_to_be_between", "warn", column="rating", min_value=5),
    )
    rows = [{"id": f"r{i // 2}", "comment": text, "rating": 1.0} for i, text in enumerate(texts)]
    result = run(spark, world, rows)
    seen = {r.name: (r.outcome, r.observed) for r in result.results}
    # 6 of the 8 rows have a text: two of these six are JSON, one is markup, one has 2 odd characters of 8.
    assert seen == {
        "has_text": ("unmet", "0.75"),
        "longest": ("unmet", "21"),
        "json": ("unmet", "0.3333"),
        "markup": ("unmet", "0.1667"),
        "odd": ("unmet", "0.25"),
        "recent": ("met", seen["recent"][1]),
        "unique": ("unmet", "8 of 8 rows, e.g. r0, r1, r2"),
        "rating": ("unmet", "8 of 8 rows"),
    }
    assert {r.name for r in result.blocking} == {"has_text", "longest", "odd", "unique"}
    assert "secret" not in result.model_dump_json()


def test_a_check_that_errors_blocks_even_where_it_would_only_warn(spark, world: World):
    write_suite(
        check("fine", "table_row_count_to_be_between", min_value=1),
        check("no such column", "column_mean_to_be_between", "warn", column="missing", max_value=1),
    )
    result = run(spark, world, reviews(3))
    assert [r.outcome for r in result.results] == ["met", "errored"]
    assert result.asked == 2 and not result.passed


def test_an_unmet_check_that_warns_does_not_block(spark, world: World):
    write_suite(check("many", "table_row_count_to_be_between", "warn", min_value=1000))
    result = run(spark, world, reviews(3))
    assert (result.results[0].outcome, result.results[0].observed, result.passed) == ("unmet", "3", True)


def test_all_null_texts_block(spark, world: World):
    write_suite(
        check("has_text", "column_mean_to_be_between", column="has_text", min_value=0.9),
        check("length", "column_max_to_be_between", column="text_chars", max_value=5),
    )
    result = run(spark, world, [{"id": "a", "comment": None, "rating": 1.0}])
    assert not result.passed and result.results[0].outcome == "unmet"


def test_zero_rows_pass_by_rule(spark, world: World):
    write_suite(check("many", "table_row_count_to_be_between", min_value=1000))
    result = run(spark, world, [])
    assert (result.rows, result.passed, result.results[0].observed) == (0, True, "no rows: passes by rule")


@pytest.mark.parametrize(
    ("checks", "said"),
    [
        ([], "checks: Tuple should have at least 1 item"),
        (
            [check("a", "table_row_count_to_be_between") | {"severity": "critical"}],
            "severity: Input should be 'block' or 'warn'",
        ),
        ([check("a", "table_row_count_to_be_between") | {"why": ""}], "why: String should have at least 10"),
        ([check("a", "table_row_count_to_be_between")] * 2, r"checks \['a'\] appear twice"),
    ],
)
def test_a_suite_file_that_is_wrong_is_named_with_its_fault(world: World, checks, said):
    write_suite(*checks)
    with pytest.raises(ConfigError, match=f"expectations/reviews/source.json: .*{said}"):
        Suite.load(Settings.from_env().expectations, "reviews", "source")


def test_a_type_that_great_expectations_does_not_know_is_named(spark, world: World):
    write_suite(check("a", "column_values_to_be_lovely", column="id"))
    world.write_source(reviews(3))
    with pytest.raises(ConfigError, match="check 'a': expect_column_values_to_be_lovely was refused"):
        check_source(spark, world.lake, world.plan().paths)


def test_an_enrichment_without_a_suite_is_told_which_file_to_write(world: World):
    with pytest.raises(NotFoundError, match=r"expectations/reviews_zh/source\.json does not exist"):
        Suite.load(Settings.from_env().expectations, "reviews_zh", "source")


def test_every_enrichment_of_the_checkout_has_both_suites():
    enrichments, errors = load_enrichments(CHECKOUT / "dags" / "enrichments")
    assert not errors and enrichments
    for name in enrichments:
        for kind in ("source", "enriched"):
            assert Suite.load(CHECKOUT / "expectations", name, kind).checks
