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


def test_publish_replace_and_roll_back(s3_lake: Lake) -> None:
    old, new = make_plan(s3_lake), make_plan(s3_lake, prompt_version=2)
    publishing.publish(s3_lake, ready(s3_lake, old, 2, mark="old"), 1)
    assert publishing.publish(s3_lake, old.paths.root, 1)["already_live"] is True
    publishing.publish(s3_lake, ready(s3_lake, new, 1, mark="new"), 2)
    assert dates_and_keys(s3_lake) == [(DATE, "new0")]
    publishing.rollback(s3_lake, old.enrichment, DATE, 1)
    assert dates_and_keys(s3_lake) == [(DATE, "old0"), (DATE, "old1")]
    assert s3_lake.exists(report.write(s3_lake, old.paths.root, "manual__x", state="success")["html"])


def test_eight_processes_publish_seven_dates_of_a_new_table_two_of_them_the_same(s3_lake: Lake) -> None:
    dates = [f"2026-11-{day:02d}" for day in range(1, 8)]
    runs = [(ready(s3_lake, make_plan(s3_lake, date=date), 3), 1) for date in dates]
    rival = ready(s3_lake, make_plan(s3_lake, date=dates[0], prompt_version=2), 2, mark="new")
    publish_together(s3_lake, [*runs, (rival, 2)])
    expected = [(dates[0], "new0"), (dates[0], "new1")] + [(date, str(i)) for date in dates[1:] for i in range(3)]
    assert dates_and_keys(s3_lake) == expected
