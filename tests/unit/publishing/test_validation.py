from __future__ import annotations

import pytest

from millrace import validation
from millrace.errors import IncompleteError, RefusedError
from millrace.lake import Lake
from millrace.records import Audit, Joined, Override, Record
from tests.unit.publishing.runs import check, joined_run, make_plan, suite

Outcomes = list[tuple[str, str | None]]


def outcomes(ok: int, *others: tuple[str, str, int]) -> Outcomes:
    rows: Outcomes = [("ok", None)] * ok
    for status, reason, count in others:
        rows += [(status, reason)] * count
    return rows


def replace(lake: Lake, path: str, record: Record, **changes: object) -> None:
    lake.write(path, record.model_copy(update=changes).dump())


def refused(lake: Lake, run: str) -> tuple[str, Audit]:
    with pytest.raises(RefusedError) as caught:
        validation.validate(lake, run)
    return str(caught.value), Audit.load(lake, f"{run}/audit.json")


def failed(audit: Audit) -> list[str]:
    return [gate.name for gate in audit.gates if not gate.passed]


def test_every_kind_of_non_answer_counts_towards_the_unknown_rate(lake: Lake) -> None:
    """930 valid, 30 unparseable, 20 refused, 10 too long, 10 never returned of 1,000: 7 %."""
    plan = make_plan(lake)
    joined_run(
        lake,
        plan,
        outcomes(
            930,
            ("unknown", "not_json", 30),
            ("unknown", "refused", 20),
            ("skipped", "too_long", 10),
            ("failed", "no_answer", 10),
        ),
    )
    message, audit = refused(lake, plan.paths.root)
    assert audit.unknown_rate == pytest.approx(0.07)
    assert "unknown rate 7.00%, limit 1.00%" in message
    assert "not_json 30, refused 20, no_answer 10, too_long 10" in message
    assert "--accept-unknown-rate" in message
    assert failed(audit) == ["unknown rate"]


def test_a_label_called_unknown_is_an_answer(lake: Lake) -> None:
    plan = make_plan(lake)
    joined = joined_run(lake, plan, 100)
    replace(lake, plan.paths.joined, joined, labels={"sentiment": {"unknown": 100}})
    audit = validation.validate(lake, plan.paths.root)
    assert audit.passed and audit.unknown_rate == 0.0
    assert audit.labels == {"sentiment": {"unknown": 100}}


def test_rows_that_need_no_answer_leave_the_rate_alone(lake: Lake) -> None:
    plan = make_plan(lake)
    joined_run(lake, plan, outcomes(99, ("unknown", "empty", 1), ("skipped", "blank", 10), ("skipped", "excluded", 5)))
    audit = validation.validate(lake, plan.paths.root)
    assert audit.unknown_rate == pytest.approx(0.01)
    assert (audit.not_applicable, audit.not_askable) == (15, 0)


def test_zero_rows_and_rows_that_all_need_no_answer_have_rate_zero(lake: Lake) -> None:
    empty = make_plan(lake)
    joined_run(lake, empty, 0)
    assert validation.validate(lake, empty.paths.root).unknown_rate == 0.0
    blank = make_plan(lake, limits={"not_applicable_rate": 1.0})
    joined_run(lake, blank, outcomes(0, ("skipped", "blank", 5)))
    assert validation.validate(lake, blank.paths.root).unknown_rate == 0.0


def test_too_many_rows_without_a_text_are_refused(lake: Lake) -> None:
    plan = make_plan(lake)
    joined_run(lake, plan, outcomes(79, ("skipped", "blank", 21)))
    message, audit = refused(lake, plan.paths.root)
    assert failed(audit) == ["not applicable rate"]
    assert "21.00%, limit 20.00%" in message and "limits.not_applicable_rate" in message


@pytest.mark.parametrize(
    ("changes", "gate"),
    [
        ({"statuses": {"ok": 99}}, "ledger: by status"),
        ({"reused": 1}, "ledger: by origin"),
        ({"reasons": {"not_json": 1}}, "ledger: by reason"),
        ({"rows": 101, "statuses": {"ok": 101}, "inferred": 101}, "ledger: by extract"),
    ],
)
def test_counts_that_do_not_add_up_are_refused(lake: Lake, changes: dict[str, object], gate: str) -> None:
    plan = make_plan(lake)
    joined = joined_run(lake, plan, 100)
    replace(lake, plan.paths.joined, joined, **changes)
    message, audit = refused(lake, plan.paths.root)
    assert gate in failed(audit)
    assert "clear `join_back`" in message


def test_rows_lost_since_extract_are_refused(lake: Lake) -> None:
    plan = make_plan(lake)
    joined_run(lake, plan, 100)
    joined = Joined.load(lake, plan.paths.joined)
    replace(lake, plan.paths.joined, joined, files=joined.files[:1])
    assert failed(refused(lake, plan.paths.root)[1]) == ["ledger: by extract"]


@pytest.mark.parametrize(
    ("result", "passes"),
    [
        (suite(check("met")), True),
        (suite(check("unmet", "warn")), True),
        (suite(check("unmet", "block")), False),
        (suite(check("errored", "warn")), False),
        (suite(check("met"), asked=2), False),
    ],
)
def test_the_enriched_suite_must_have_answered_every_check(lake: Lake, result, passes: bool) -> None:
    plan = make_plan(lake)
    joined_run(lake, plan, 100, result=result)
    if passes:
        assert validation.validate(lake, plan.paths.root).passed
    else:
        assert failed(refused(lake, plan.paths.root)[1]) == ["enriched suite"]


class TestGroups:
    def test_a_model_that_fails_is_seen_behind_one_that_does_not(self, lake: Lake) -> None:
        plan = make_plan(lake)
        groups = {"small@1": {"ok": 9800}, "other@1": {"ok": 190, "unknown": 10}}
        joined_run(lake, plan, outcomes(9990, ("unknown", "not_json", 10)), by_model=groups)
        message, audit = refused(lake, plan.paths.root)
        assert failed(audit) == ["unknown rate of other@1"]
        assert "5.00%" in message

    def test_a_group_too_small_for_the_limit_is_not_judged(self, lake: Lake) -> None:
        plan = make_plan(lake)
        groups = {"small@1": {"ok": 995}, "other@1": {"ok": 4, "unknown": 1}}
        joined_run(lake, plan, outcomes(999, ("unknown", "not_json", 1)), by_model=groups)
        assert validation.validate(lake, plan.paths.root).passed

    def test_rows_asked_again_are_hard_by_selection(self, lake: Lake) -> None:
        plan = make_plan(lake, ask_mode="unknowns")
        groups = {"small@1": {"ok": 29_800}, "small@2": {"ok": 150, "unknown": 50}}
        joined_run(lake, plan, outcomes(29_950, ("unknown", "not_json", 50)), by_model=groups)
        assert validation.validate(lake, plan.paths.root).passed


class TestOverride:
    def over(self, lake: Lake) -> str:
        plan = make_plan(lake)
        joined_run(lake, plan, outcomes(95, ("unknown", "not_json", 5)))
        return plan.paths.root

    def test_it_covers_the_rate_it_was_given_for(self, lake: Lake) -> None:
        run = self.over(lake)
        refused(lake, run)
        override = validation.accept_unknown_rate(lake, run, "ada", "new product line, checked by hand")
        assert override.unknown_rate == pytest.approx(0.05)
        audit = validation.validate(lake, run)
        assert audit.passed and audit.override == override
        assert ["by ada: new product line" in gate.detail for gate in audit.gates if gate.name == "unknown rate"] == [
            True
        ]

    def test_it_does_not_cover_a_higher_rate(self, lake: Lake) -> None:
        run = self.over(lake)
        lake.write(f"{run}/override.json", Override(by="ada", reason="fine", unknown_rate=0.04).dump())
        assert failed(refused(lake, run)[1]) == ["unknown rate"]

    def test_it_covers_nothing_but_the_unknown_rate(self, lake: Lake) -> None:
        plan = make_plan(lake)
        joined_run(lake, plan, outcomes(95, ("unknown", "not_json", 5)), result=suite(check("unmet")))
        validation.accept_unknown_rate(lake, plan.paths.root, "ada", "fine")
        assert failed(refused(lake, plan.paths.root)[1]) == ["enriched suite"]

    def test_it_needs_a_reason_and_something_to_accept(self, lake: Lake) -> None:
        run = self.over(lake)
        with pytest.raises(RefusedError, match="needs a reason"):
            validation.accept_unknown_rate(lake, run, "ada", "  ")
        good = make_plan(lake, prompt_version=2)
        with pytest.raises(IncompleteError):
            validation.accept_unknown_rate(lake, good.paths.root, "ada", "fine")
        joined_run(lake, good, 10)
        with pytest.raises(RefusedError, match="needs no acceptance"):
            validation.accept_unknown_rate(lake, good.paths.root, "ada", "fine")


def test_validate_before_join_back_says_what_to_clear(lake: Lake) -> None:
    with pytest.raises(IncompleteError, match="Clear `join_back`"):
        validation.validate(lake, make_plan(lake).paths.root)


def test_the_audit_holds_what_a_report_needs_and_repeats(lake: Lake) -> None:
    plan = make_plan(lake, price=2.0)
    joined_run(lake, plan, outcomes(199, ("unknown", "empty", 1)), reused=80)
    audit = validation.validate(lake, plan.paths.root)
    again = validation.validate(lake, plan.paths.root)
    assert audit.model_copy(update={"at": again.at}) == again
    assert (audit.requests, audit.requests_reused, audit.requests_answered) == (200, 80, 120)
    assert (audit.tokens.prompt, audit.tokens.cached, audit.tokens.completion) == (18_000, 12_000, 1_200)
    assert audit.cost == pytest.approx(19_200 * 2 / 1e6)
    assert audit.seconds == {"extract": 3.0, "join_back": 2.0}
    assert audit.versions["prompt"] == "reviews v1" and audit.versions["model small"] == "d" * 64
    assert "deltalake" in audit.versions
