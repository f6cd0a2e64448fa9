"""The same promises on a real S3 server, where they rest on conditional puts."""

from __future__ import annotations

import pyarrow as pa

from millrace import publishing, report
from millrace.lake import Lake
from tests.unit.publishing.runs import DATE, make_plan, publish_together, ready


def dates_and_keys(lake: Lake) -> list[tuple[str, str]]:
    table = publishing.open_table(lake, "enriched/reviews")
    assert table is not None
    return sorted((row["dt"], row["id"]) for row in pa.table(table.scan()).to_pylist())


def test_publish_replace_and_roll_back(lake: Lake) -> None:
    old, new = make_plan(lake), make_plan(lake, prompt_version=2)
    publishing.publish(lake, ready(lake, old, 2, mark="old"), 1)
    assert publishing.publish(lake, old.paths.root, 1)["already_live"] is True
    publishing.publish(lake, ready(lake, new, 1, mark="new"), 2)
    assert dates_and_keys(lake) == [(DATE, "new0")]
    publishing.rollback(lake, old.enrichment, DATE, 1)
    assert dates_and_keys(lake) == [(DATE, "old0"), (DATE, "old1")]
    assert lake.exists(report.write(lake, old.paths.root, "manual__x", state="success")["html"])


def test_eight_processes_publish_seven_dates_of_a_new_table_two_of_them_the_same(lake: Lake) -> None:
    dates = [f"2026-11-{day:02d}" for day in range(1, 8)]
    runs = [(ready(lake, make_plan(lake, date=date), 3), 1) for date in dates]
    rival = ready(lake, make_plan(lake, date=dates[0], prompt_version=2), 2, mark="new")
    publish_together(lake, [*runs, (rival, 2)])
    expected = [(dates[0], "new0"), (dates[0], "new1")] + [(date, str(i)) for date in dates[1:] for i in range(3)]
    assert dates_and_keys(lake) == expected


def test_two_processes_publish_one_new_date_and_the_later_run_is_live_once(lake: Lake) -> None:
    early = ready(lake, make_plan(lake), 3, mark="early")
    late = ready(lake, make_plan(lake, prompt_version=2), 2, mark="late")
    publish_together(lake, [(early, 1), (late, 2)])
    assert dates_and_keys(lake) == [(DATE, "late0"), (DATE, "late1")]


def test_two_processes_publish_the_same_run_and_its_rows_are_there_once(lake: Lake) -> None:
    run = ready(lake, make_plan(lake), 3)
    said = publish_together(lake, [(run, 1), (run, 1)])
    assert sorted("'already_live': True" in words for words in said) == [False, True]
    assert dates_and_keys(lake) == [(DATE, "0"), (DATE, "1"), (DATE, "2")]
    assert [version.plan_id for version in publishing.versions(lake, "enriched/reviews")] == [run.split("/")[-1]]
