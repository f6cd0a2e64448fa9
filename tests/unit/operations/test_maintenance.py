"""What clean-up removes and, above all, what it does not: each run here is published, refused, open or built upon, on a real table."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace import maintenance, publishing
from millrace.config_db import ConfigDb
from millrace.enrichment import Enrichment, parse_enrichment
from millrace.lake import Lake
from millrace.layout import answers_file
from millrace.maintenance import Removed, remove_answers, remove_table_files
from millrace.plan import Plan
from millrace.records import FileRef, Manifest
from tests.unit.publishing.runs import DATE, FINGERPRINT, joined_run, make_plan, read_rows, ready, spec

NAME = "reviews"


def remove_runs(*arguments: Any, run_days: int = 30, **options: Any) -> Removed:
    return maintenance.remove_runs(*arguments, run_days=run_days, **options)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


@pytest.fixture
def db(postgres: Callable[[], str]) -> ConfigDb:
    made = ConfigDb(postgres())
    made.migrate()
    return made


@pytest.fixture
def enrichments() -> dict[str, Enrichment]:
    return {NAME: parse_enrichment(spec(target={"path": "enriched/reviews", "rollback_days": 14}))}


def days(number: float) -> datetime:
    """The moment this many days from now."""
    return datetime.now(UTC) + timedelta(days=number)


def touch(lake: Lake, prefix: str, at: datetime) -> None:
    for file in lake.list(prefix):
        os.utime(lake.uri(file.path), (at.timestamp(), at.timestamp()))


def published(lake: Lake, number: int = 1, **plan: Any) -> Plan:
    made = make_plan(lake, **plan)
    publishing.publish(lake, ready(lake, made, mark=f"n{number}-"), number)
    return made


def plans(lake: Lake, partition: str = DATE) -> list[str]:
    return list(lake.folders(f"runs/{NAME}/{partition}"))


# -- runs --------------------------------------------------------------------------------------------------------------


def test_an_old_run_that_nobody_reads_goes_with_all_its_files(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    refused = make_plan(lake)
    joined_run(lake, refused)
    count = len(list(lake.list(refused.paths.root)))
    removed = remove_runs(lake, db, enrichments, now=days(31))
    assert (removed.runs, removed.files) == (1, count) and removed.bytes > 0
    assert list(lake.folders("runs")) == []


def test_a_run_is_kept_until_its_retention_is_over(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    made = make_plan(lake)
    assert remove_runs(lake, db, enrichments, run_days=30, now=days(29)) == Removed()
    assert plans(lake) == [made.plan_id]
    assert remove_runs(lake, db, enrichments, run_days=20, now=days(29)).runs == 1


def test_one_young_file_keeps_the_whole_run(lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]) -> None:
    """A date that was run again last week, under the plan of last year."""
    made = make_plan(lake)
    lake.write(f"{made.paths.root}/reports/again/report.md", b"yesterday")
    touch(lake, made.paths.plan, days(-400))
    touch(lake, f"{made.paths.root}/reports", days(-1))
    assert remove_runs(lake, db, enrichments) == Removed()
    assert plans(lake) == [made.plan_id]


def test_the_run_that_readers_see_is_kept_however_old(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    live = published(lake)
    refused = make_plan(lake, prompt_version=2)
    remove_runs(lake, db, enrichments, now=days(1000))
    assert plans(lake) == [live.plan_id] != [refused.plan_id]


def test_a_replaced_run_is_kept_while_a_rollback_may_bring_it_back_and_no_longer(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    first = published(lake, 1)
    second = published(lake, 2, prompt_version=2)
    remove_runs(lake, db, enrichments, run_days=1, now=days(14.5))
    assert set(plans(lake)) == {first.plan_id, second.plan_id}
    remove_runs(lake, db, enrichments, run_days=1, now=days(15.5))
    assert plans(lake) == [second.plan_id]


def test_a_run_at_work_keeps_every_run_of_its_date(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    make_plan(lake)
    other = make_plan(lake, date="2026-11-02")
    db.register_run(NAME, DATE, "scheduled__1", lambda _: True)
    remove_runs(lake, db, enrichments, now=days(100))
    assert len(plans(lake)) == 1 and plans(lake, other.decision.partition) == []
    db.close_run(NAME, DATE, "scheduled__1", state="failed")
    assert remove_runs(lake, db, enrichments, now=days(100)).runs == 1


def test_a_run_that_begins_while_its_date_is_cleaned_waits_for_the_end(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment], monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import ThreadPoolExecutor
    from concurrent.futures import wait as wait_for

    make_plan(lake)
    deleting = Lake.delete
    with ThreadPoolExecutor() as pool:
        claims = []

        def delete(self: Lake, paths: list[str]) -> None:
            if not claims:
                claims.append(pool.submit(db.register_run, NAME, DATE, "manual__1", lambda _: False))
                assert not wait_for(claims, timeout=0.5).done
            deleting(self, paths)

        monkeypatch.setattr(Lake, "delete", delete)
        assert remove_runs(lake, db, enrichments, now=days(100)).runs == 1
        assert claims[0].result(timeout=20) == 1


def test_the_plan_that_a_kept_run_builds_on_is_kept_and_so_on(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    """'Ask unknowns again' on a live run needs the texts and answers of all the runs before it."""
    first = published(lake, 1)
    second = _based_on(lake, first, prompt_version=2)
    third = _based_on(lake, second, prompt_version=3)
    publishing.publish(lake, ready(lake, third), 3)
    loose = make_plan(lake, prompt_version=9)
    remove_runs(lake, db, enrichments, now=days(200))
    assert set(plans(lake)) == {first.plan_id, second.plan_id, third.plan_id}
    assert loose.plan_id not in plans(lake)


def _based_on(lake: Lake, base: Plan, **changes: Any) -> Plan:
    from millrace.plan import PlanRecord

    made = make_plan(lake, ask_mode="unknowns", **changes)
    lake.delete([made.paths.plan])
    decision = made.decision.model_copy(update={"base_plan": base.paths.root})
    made = Plan.make(decision, PlanRecord(dag_run_id="manual__1", user="ada", params={}))
    made.save(lake)
    return made


def test_a_run_is_live_in_the_table_that_its_own_plan_names(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    """The enrichment moved to another table; the old one still has readers."""
    live = published(lake, target={"path": "enriched/before"})
    remove_runs(lake, db, enrichments, now=days(100))
    assert plans(lake) == [live.plan_id]


def test_what_has_no_enrichment_file_is_left_alone(lake: Lake, db: ConfigDb) -> None:
    made = make_plan(lake)
    lake.write(answers_file(FINGERPRINT, "s" * 64, "a1"), b"answers")
    assert remove_runs(lake, db, {}, now=days(1000)) == Removed()
    assert remove_answers(lake, {}, now=days(1000)) == Removed()
    assert plans(lake) == [made.plan_id] and len(list(lake.list("answers"))) == 1


def test_a_plan_written_by_another_version_is_still_understood(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    live = published(lake)
    text = lake.read(live.paths.plan).replace(b'"row_sample"', b'"sample_of_rows"')
    lake.write(live.paths.plan, text)
    remove_runs(lake, db, enrichments, now=days(100))
    assert plans(lake) == [live.plan_id]


def test_a_table_that_cannot_be_read_stops_the_clean_up(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    from millrace.errors import UnavailableError

    live = published(lake)
    lake.write(f"enriched/reviews/_delta_log/{1:020}.json", b"torn")
    for step in (
        lambda: remove_runs(lake, db, enrichments, now=days(100)),
        lambda: remove_table_files(lake, enrichments, now=days(100)),
    ):
        with pytest.raises(UnavailableError, match="enriched/reviews"):
            step()
    assert plans(lake) == [live.plan_id]


def test_leftovers_inside_a_kept_run_go_and_what_counts_stays(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    live = make_plan(lake)
    root = live.paths.root
    run = ready(lake, live)
    shard = Manifest.load(lake, live.paths.manifest).shards[0].shard_id
    stay = ["extract/e1/rows/part-0.parquet", f"shards/{shard}/complete.json", "shards/open/a1/part-0.parquet"]
    go = ["extract/lost/rows/part-0.parquet", f"shards/{shard}/a1/part-0.parquet", f"shards/{shard}/a1/outcome.json"]
    for path in {*stay, *go} - {f"shards/{shard}/complete.json"}:
        lake.write(f"{root}/{path}", b"x")
    publishing.publish(lake, run, 1)
    remove_runs(lake, db, enrichments, now=days(29))
    assert all(lake.exists(f"{root}/{path}") for path in [*stay, *go])
    removed = remove_runs(lake, db, enrichments, now=days(31))
    assert removed == Removed(runs=0, files=3, bytes=3)
    assert all(lake.exists(f"{root}/{path}") for path in stay)
    assert not any(lake.exists(f"{root}/{path}") for path in go)


def test_a_clean_up_killed_half_way_is_finished_by_the_next(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gone first is the manifest, so that a run of the same plan in between would extract afresh."""
    made = make_plan(lake)
    joined_run(lake, made)
    deleting, calls = Lake.delete, []

    def delete(self: Lake, paths: list[str]) -> None:
        calls.append(paths)
        if len(calls) == 2:
            raise KeyboardInterrupt
        deleting(self, paths)

    with monkeypatch.context() as patched:
        patched.setattr(Lake, "delete", delete)
        with pytest.raises(KeyboardInterrupt):
            remove_runs(lake, db, enrichments, now=days(31))
    assert calls[0] == [made.paths.manifest] and lake.exists(made.paths.plan)
    remove_runs(lake, db, enrichments, now=days(31))
    assert plans(lake) == []


# -- answers -----------------------------------------------------------------------------------------------------------


def test_answers_stay_as_long_as_any_enrichment_may_reuse_them(lake: Lake) -> None:
    lake.write(answers_file(FINGERPRINT, "s" * 64, "a1"), b"answers")
    both = {
        "a": parse_enrichment(spec(name="a", reuse_days=10)),
        "b": parse_enrichment(spec(name="b", reuse_days=90)),
    }
    assert remove_answers(lake, both, now=days(90)) == Removed()
    assert remove_answers(lake, both, now=days(92)) == Removed(files=1, bytes=7)
    assert list(lake.folders("answers")) == []


def test_answers_of_a_run_that_is_still_there_stay_for_as_long_as_the_run(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    """Asking a live date's unknowns again reads the answers that were ok, whatever their age."""
    live, refused = published(lake), make_plan(lake, date="2026-11-02")
    joined_run(lake, refused)
    kept, lost = (Manifest.load(lake, made.paths.manifest).shards[0].shard_id for made in (live, refused))
    for shard in (kept, lost):
        lake.write(answers_file(FINGERPRINT, shard, "0a1b-2c3d-1"), b"answers")
    assert remove_answers(lake, enrichments, now=days(200)) == Removed()
    remove_runs(lake, db, enrichments, now=days(200))
    assert remove_answers(lake, enrichments, now=days(200)) == Removed(files=1, bytes=7)
    assert [file.path for file in lake.list("answers")] == [answers_file(FINGERPRINT, kept, "0a1b-2c3d-1")]


# -- table files -------------------------------------------------------------------------------------------------------


def test_replaced_files_stay_for_the_rollback_window_and_a_rollback_works_in_it(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    published(lake, 1)
    first = read_rows(lake)
    published(lake, 2, prompt_version=2)
    remove_runs(lake, db, enrichments, run_days=1, now=days(14.5))
    assert remove_table_files(lake, enrichments, now=days(14.5)) == Removed()
    publishing.rollback(lake, enrichments[NAME], DATE, 1)
    assert read_rows(lake) == first


def test_replaced_files_go_when_the_window_is_over_and_readers_see_the_same_rows(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    first = published(lake, 1)
    published(lake, 2, prompt_version=2)
    published(lake, 1, date="2026-11-02")
    rows = read_rows(lake)
    assert remove_table_files(lake, enrichments, now=days(40)) == Removed()  # their runs are still there
    remove_runs(lake, db, enrichments, now=days(40))
    removed = remove_table_files(lake, enrichments, now=days(40))
    assert removed.files == 2 and read_rows(lake) == rows
    assert not any(first.plan_id in file.path for file in lake.list("enriched/reviews"))


def test_a_version_rolled_back_to_stays_with_its_files_and_its_run(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    first = published(lake, 1)
    published(lake, 2, prompt_version=2)
    publishing.rollback(lake, enrichments[NAME], DATE, 1)
    rows = read_rows(lake)
    remove_runs(lake, db, enrichments, now=days(100))
    assert remove_table_files(lake, enrichments, now=days(100)).files == 2
    assert plans(lake) == [first.plan_id] and read_rows(lake) == rows


def test_output_that_waits_for_a_decision_stays_and_what_an_attempt_lost_goes(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    """validate said no three weeks ago; a person may still accept the rate. An attempt of join_back that was killed may go."""
    plan = make_plan(lake)
    waiting = joined_run(lake, plan).files
    torn = waiting[0].path.replace(plan.plan_id + "-", plan.plan_id + "-0dead0")
    lake.write(torn, b"torn")
    assert remove_table_files(lake, enrichments, now=days(20)) == Removed(files=1, bytes=4)
    for file in waiting:
        file.check(lake)


def test_the_tables_log_and_what_is_not_a_dates_file_are_never_touched(
    lake: Lake, enrichments: dict[str, Enrichment]
) -> None:
    published(lake)
    lake.write("enriched/reviews/README.md", b"whose is this?")
    log = [file.path for file in lake.list("enriched/reviews/_delta_log")]
    assert remove_table_files(lake, enrichments, now=days(1000)) == Removed()
    assert [file.path for file in lake.list("enriched/reviews/_delta_log")] == log
    assert lake.exists("enriched/reviews/README.md")


def test_after_every_step_a_published_date_is_whole(
    lake: Lake, db: ConfigDb, enrichments: dict[str, Enrichment]
) -> None:
    """A year of runs, cleaned each month: the table reads the same and every file that a live plan's manifest names is there."""
    for month in range(1, 5):
        plan = make_plan(lake, date=f"2026-0{month}-01")
        run = ready(lake, plan)
        manifest = Manifest.load(lake, plan.paths.manifest)
        rows = pa.table({"row_key": ["1"]})
        path = f"{plan.paths.extract('e1')}/rows/part-0.parquet"
        files = [FileRef(path=path, size=lake.write_parquet(path, rows), rows=1)]
        lake.write(plan.paths.manifest, manifest.model_copy(update={"row_files": files}).dump())
        publishing.publish(lake, run, 1)
    rows_before = read_rows(lake)
    for month in range(1, 13):
        for step in (
            lambda now: remove_runs(lake, db, enrichments, now=now),
            lambda now: remove_answers(lake, enrichments, now=now),
            lambda now: remove_table_files(lake, enrichments, now=now),
        ):
            step(days(30 * month))
            assert read_rows(lake) == rows_before
    for month in range(1, 5):
        (plan_id,) = plans(lake, f"2026-0{month}-01")
        manifest = Manifest.load(lake, f"runs/{NAME}/2026-0{month}-01/{plan_id}/manifest.json")
        for file in manifest.row_files:
            file.check(lake)
