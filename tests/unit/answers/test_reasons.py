from __future__ import annotations

import re
from pathlib import Path

import pytest

from millrace.answers import REASONS, Reason, Status, kind_of_skip, status_of


def test_every_reason_has_one_status_that_is_not_ok_and_a_meaning() -> None:
    assert set(REASONS) == set(Reason)
    assert {status_of(reason) for reason in Reason} == {Status.unknown, Status.failed, Status.skipped}
    assert len({meaning for _, meaning in REASONS.values()}) == len(Reason)


def test_blank_and_excluded_rows_were_never_to_be_asked_and_the_others_could_not_be() -> None:
    kinds = {reason.value: kind_of_skip(reason) for reason in Reason if status_of(reason) is Status.skipped}
    assert kinds == {
        "blank": "not_applicable",
        "excluded": "not_applicable",
        "too_long": "not_askable",
        "unclean": "not_askable",
    }


def test_a_reason_that_is_no_skip_has_no_kind_of_skip() -> None:
    with pytest.raises(ValueError, match="truncated"):
        kind_of_skip("truncated")


def test_the_page_about_answers_lists_every_reason_with_its_status_and_meaning() -> None:
    page = (Path(__file__).parents[3] / "docs" / "answers.md").read_text(encoding="utf-8")
    for reason, (status, meaning) in REASONS.items():
        assert re.search(rf"^\| {status}.* \| `{reason}` \| {re.escape(meaning)}", page, re.MULTILINE), reason
