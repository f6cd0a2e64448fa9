from __future__ import annotations

import re
from datetime import timedelta
from html import unescape
from io import StringIO

import pytest
from rich.console import Console

from millrace import publishing, report, validation
from millrace.errors import NotFoundError, RefusedError
from millrace.lake import Lake
from millrace.records import Outcome, Stop, utc_now
from tests.unit.publishing.runs import DATE, check, extracted, joined_run, make_plan, ready, store_verdict, suite

OUTCOMES = [("ok", None)] * 995 + [("unknown", "not_json")] * 5 + [("skipped", "blank")] * 20


def texts(lake: Lake, run: str, state: str = "success", **options) -> tuple[str, str]:
    written = report.write(lake, run, "manual__2026-11-01T00:00:00+00:00", state=state, **options)
    return lake.read(written["markdown"]).decode(), lake.read(written["html"]).decode()


def visible(html: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html.split("</style>")[1])))


def test_a_published_run_says_what_happened_to_every_row(lake: Lake) -> None:
    plan = make_plan(lake, price=1.0)
    joined_run(lake, plan, OUTCOMES, reused=100)
    validation.validate(lake, plan.paths.root)
    publishing.publish(lake, plan.paths.root, 1)
    store_verdict(lake, "k")
    markdown, html = texts(lake, plan.paths.root, step_seconds={"plan": 1.5, "infer": 40.0})
    for text in (markdown, visible(html)):
        assert f"reviews, {DATE}" in text
        assert "1,020 rows: 995 answered, 5 without a usable answer (0.50%, limit 1.00%), 20 that need none." in text
        assert "Published as version 1 of enriched/reviews." in text
        assert "no readable object in the answer" in text
        assert "135,000 prompt (66.7% from the prefix cache), 9,000 completion" in text
        assert "Cost at the model's price: 0.1440." in text
        assert "engine full 20% of its time" in text
        assert "98% usable" in text
        assert "40.0 s" in text
        assert "d" * 64 in text
    assert "Next:" not in html


def test_the_label_mix_is_set_against_the_version_before(lake: Lake) -> None:
    publishing.publish(lake, ready(lake, make_plan(lake, date="2026-10-31"), 3), 1)
    first = ready(lake, make_plan(lake), 4)
    publishing.publish(lake, first, 1)
    assert "The thin line is 2026-10-31." in texts(lake, first)[1]
    second = ready(lake, make_plan(lake, prompt_version=2), 5)
    publishing.publish(lake, second, 2)
    markdown, _ = texts(lake, second)
    assert "version 2 of this date" in markdown
    assert re.search(r"\| positive \| 3 \| 60.0% \| 50.0% \|", markdown)
    assert "10.0% of the mix moved." in markdown


def test_a_label_that_no_row_has_is_in_the_mix_with_0(lake: Lake) -> None:
    markdown, html = texts(lake, ready(lake, make_plan(lake), 4))
    mix = markdown.split("**sentiment**")[1].split("\n## ")[0]
    assert re.findall(r"(?m)^\| (\w+) \| (\d+) \|", mix) == [("negative", "2"), ("positive", "2"), ("unknown", "0")]
    assert "unknown 0 0.0%" in visible(html)


class TestWhatToDoNext:
    """One run for each step it can end at: the report names the step, the reason and a way on."""

    def says(self, lake: Lake, run: str, step: str, *words: str) -> None:
        markdown, html = texts(lake, run, state="failed")
        assert f"Ended at {step}:" in markdown
        assert "Not published." in markdown
        for word in words:
            assert word in markdown
            assert word in visible(html)

    def test_source_checks_failed(self, lake: Lake) -> None:
        plan = make_plan(lake)
        lake.write(plan.paths.source_check(), suite(check("unmet")).dump())
        self.says(lake, plan.paths.root, "check_source", "ExpectColumnValuesToBeUnique on id", "clear `plan`")

    def test_preflight_failed(self, lake: Lake) -> None:
        plan = make_plan(lake)
        store_verdict(lake, "k", passed=False)
        self.says(lake, plan.paths.root, "preflight", "40% of 50 golden prompts")

    def test_the_source_was_not_checked(self, lake: Lake) -> None:
        self.says(lake, make_plan(lake).paths.root, "check_source", "left no result")

    def test_preflight_could_not_ask(self, lake: Lake) -> None:
        plan = make_plan(lake)
        lake.write(plan.paths.source_check(), suite(check()).dump())
        self.says(lake, plan.paths.root, "preflight", "left no verdict", "clear `preflight`")

    def test_nothing_extracted(self, lake: Lake) -> None:
        plan = make_plan(lake)
        lake.write(plan.paths.source_check(), suite(check()).dump())
        store_verdict(lake, "k")
        self.says(lake, plan.paths.root, "extract", "No manifest was written")

    def test_over_budget(self, lake: Lake) -> None:
        plan = make_plan(lake, limits={"budget_tokens": 10})
        extracted(lake, plan, [("ok", None)] * 100, answered=False)
        self.says(lake, plan.paths.root, "approve_budget", "6,000 tokens", "limits.budget_tokens")
        assert not lake.exists(plan.paths.approval)

    def test_a_shard_is_open(self, lake: Lake) -> None:
        plan = make_plan(lake)
        manifest = extracted(lake, plan, [("ok", None)] * 100, answered=False)
        shard_id = manifest.shards[0].shard_id
        outcome = Outcome(
            plan_id=plan.plan_id,
            shard_id=shard_id,
            attempt="r1",
            exit_code=3,
            message="the endpoint does not answer",
            answered=40,
            reasons={},
            started_at=utc_now(),
        )
        lake.write(f"{plan.paths.shard_attempt(shard_id, 'r1')}/outcome.json", outcome.dump())
        self.says(
            lake,
            plan.paths.root,
            "infer",
            "1 of 1 shards are not complete",
            shard_id,
            "exit 3: the endpoint does not answer",
        )

    def test_stopped(self, lake: Lake) -> None:
        plan = make_plan(lake)
        extracted(lake, plan, [("ok", None)] * 100, answered=False)
        lake.write(plan.paths.stop, Stop(reason="60 % of answers unusable", by="shard 1").dump())
        self.says(lake, plan.paths.root, "infer", "Stopped by shard 1: 60 % of answers unusable")

    def test_not_joined(self, lake: Lake) -> None:
        plan = make_plan(lake)
        extracted(lake, plan, [("ok", None)] * 100)
        self.says(lake, plan.paths.root, "join_back", "clear `join_back`")

    def test_validate_refused_and_the_earlier_version_stays(self, lake: Lake) -> None:
        publishing.publish(lake, ready(lake, make_plan(lake), 7), 1)
        plan = make_plan(lake, prompt_version=2)
        joined_run(lake, plan, [("ok", None)] * 50 + [("unknown", "not_a_label")] * 50)
        with pytest.raises(RefusedError):
            validation.validate(lake, plan.paths.root)
        self.says(lake, plan.paths.root, "validate", "50.00%", "not_a_label 50", "--accept-unknown-rate", "with 7 rows")

    def test_publish_did_not_happen(self, lake: Lake) -> None:
        self.says(lake, ready(lake, make_plan(lake)), "publish", "clear it")


def test_a_run_that_was_replaced_later_says_so(lake: Lake) -> None:
    old = ready(lake, make_plan(lake), 2)
    publishing.publish(lake, old, 1)
    publishing.publish(lake, ready(lake, make_plan(lake, prompt_version=2), 2), 2)
    assert "since replaced by plan" in texts(lake, old)[0]


def test_zero_rows_are_told_plainly(lake: Lake) -> None:
    run = ready(lake, make_plan(lake), 0)
    publishing.publish(lake, run, 1)
    assert "0 rows: 0 answered" in texts(lake, run)[0]


def test_what_a_person_typed_cannot_become_markup(lake: Lake) -> None:
    plan = make_plan(lake)
    joined_run(lake, plan, [("ok", None)] * 5 + [("unknown", "empty")] * 5)
    validation.accept_unknown_rate(lake, plan.paths.root, "eve", "<script>alert(1)</script>")
    validation.validate(lake, plan.paths.root)
    _, html = texts(lake, plan.paths.root)
    assert "<script" not in html and "&lt;script&gt;" in html


def test_each_cell_of_the_html_bears_the_name_of_its_column_which_a_phone_shows_beside_it(lake: Lake) -> None:
    plan = make_plan(lake)
    lake.write(plan.paths.source_check(), suite(check("unmet")).dump())
    _, html = texts(lake, plan.paths.root, state="failed")
    (table,) = re.findall(r'<table class="wide">.*?</table>', html, re.DOTALL)
    columns = re.findall(r"<th[^>]*>([^<]*)</th>", table)
    assert columns == ["outcome", "severity", "check", "column", "observed", "why it is there"]
    assert re.findall(r'<td data-column="([^"]*)"', table) == columns


def test_html_needs_nothing_from_elsewhere_and_stays_small_with_many_labels(lake: Lake) -> None:
    plan = make_plan(lake, limits={"unknown_rate": 1.0})
    joined = joined_run(lake, plan, 10)
    many = {f"label {i:05d}": 1 for i in range(20_000)}
    lake.write(plan.paths.joined, joined.model_copy(update={"labels": {"sentiment": many}}).dump())
    _, html = texts(lake, plan.paths.root)
    assert len(html) < 60_000
    assert "19,978 rarer labels" in html  # the three of the enrichment are among them
    assert not re.search(r"""(src|href)=|url\(|@import""", html)


def test_each_dag_run_has_a_report_of_its_own_and_writing_again_replaces_it(lake: Lake) -> None:
    run = ready(lake, make_plan(lake))
    first = report.write(lake, run, "scheduled__2026-11-02T03:00:00+00:00", state="success")
    again = report.write(lake, run, "scheduled__2026-11-02T03:00:00+00:00", state="success")
    other = report.write(lake, run, "manual__x", state="success")
    assert first == again and first["html"] != other["html"]
    assert first["html"] == f"{run}/reports/scheduled__2026-11-02T03_00_00_00_00/report.html"


def test_a_run_without_a_plan_is_named(lake: Lake) -> None:
    with pytest.raises(NotFoundError, match=r"plan\.json"):
        report.write(lake, f"runs/reviews/{DATE}/{'0' * 64}", "manual__x", state="failed")


def test_the_summary_for_a_terminal_has_the_same_numbers(lake: Lake) -> None:
    plan = make_plan(lake)
    joined_run(lake, plan, OUTCOMES, reused=100)
    validation.validate(lake, plan.paths.root)
    publishing.publish(lake, plan.paths.root, 1)
    out = StringIO()
    report.print_summary(lake, plan.paths.root, console=Console(file=out, width=200))
    assert "1,020 = 995 ok + 5 unknown + 0 failed + 20 skipped" in out.getvalue()
    assert "100 reused, 900 asked under this plan, 20 skipped" in out.getvalue()
    assert "1,000 distinct, 100 reused, 900 asked under this plan" in out.getvalue()


def test_a_second_dag_run_of_a_finished_plan_says_that_it_asked_nothing(lake: Lake) -> None:
    plan = make_plan(lake, price=1.0)
    joined_run(lake, plan, OUTCOMES, reused=100)
    validation.validate(lake, plan.paths.root)
    publishing.publish(lake, plan.paths.root, 1)
    later = utc_now() + timedelta(hours=1)
    markdown, html = texts(lake, plan.paths.root, since=later)
    for text in (markdown, visible(html)):
        assert "Nothing was asked: every answer was there already." in text
        assert "900 asked by earlier runs of this plan" in text
        assert "135,000 prompt" not in text and "Cost" not in text
    assert "| Asked | 0 | by this run |" in markdown
    out = StringIO()
    report.print_summary(lake, plan.paths.root, since=later, console=Console(file=out, width=200))
    assert "1,000 distinct, 100 reused, 0 asked by this run, 900 by earlier runs of its plan" in out.getvalue()


def test_the_dag_run_that_asked_claims_what_it_asked(lake: Lake) -> None:
    plan = make_plan(lake)
    joined_run(lake, plan, OUTCOMES, reused=100)
    markdown, _ = texts(lake, plan.paths.root, since=utc_now() - timedelta(hours=1))
    assert "| Asked | 900 | by this run | 1 of 1 shards |" in markdown
    assert "earlier runs" not in markdown and "135,000 prompt" in markdown


def test_a_run_that_found_everything_answered_is_charged_nothing(lake: Lake) -> None:
    plan = make_plan(lake)
    joined_run(lake, plan, OUTCOMES, reused=100)
    before, after = utc_now() - timedelta(hours=1), utc_now() + timedelta(hours=1)
    counts, tokens = report.ledger(lake, plan.paths.root, before)
    assert counts["requests_answered"] == 900 and tokens["prompt"] == 135_000
    counts, tokens = report.ledger(lake, plan.paths.root, after)
    assert counts["rows"] == 1020 and counts["requests_answered"] == 0
    assert tokens == {"prompt": 0, "cached": 0, "completion": 0}


def test_the_ledger_gets_counts_and_tokens(lake: Lake) -> None:
    plan = make_plan(lake)
    joined_run(lake, plan, OUTCOMES, reused=100)
    counts, tokens = report.ledger(lake, plan.paths.root)
    assert counts["rows"] == 1020 and counts["unknown"] == 5 and counts["unknown_rate"] == 0.005
    assert tokens == {"prompt": 135_000, "cached": 90_000, "completion": 9_000}
