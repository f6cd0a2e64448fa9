"""Each section of docs/runbook.md, done by hand as it says: through Airflow's REST API and `millrace`, on a running scheduler.

The tests follow one another, since a Spark step costs ten seconds: a later one goes on with the dates of an earlier one, as people do.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.operations.conftest import BUDGET_TOKENS, NAME, Operations, until

# A week: a date whose texts are all its own, one that repeats them, one without a row, one with a new text among old ones, one that
# repeats again, and a weekend on which the source has no partition.
NEW, REPEATED, EMPTY, MIXED, FRIDAY, SATURDAY, SUNDAY = (f"2026-10-{day:02d}" for day in range(5, 12))
RIDDLES = "2026-10-14"
COSTLY = "2026-10-15"
TEXTS = [f"note number {n} about the week" for n in range(30)]
MAGNET = "the magnet fell off"


@pytest.fixture(scope="module")
def red(ops: Operations) -> str:
    """A run of NEW whose one shard is red: the endpoint refuses the key whenever it is asked about the magnet."""
    ops.write_source(NEW, [*TEXTS, MAGNET])
    ops.model({"do": "status", "status": 401, "where": "magnet"})
    run_id = ops.trigger(partition=NEW)
    until(lambda: ops.states(run_id).get("plan") == "success", "it has its date")
    return run_id


def test_a_run_of_a_date_that_another_run_is_at_work_on_is_refused_and_names_it(ops: Operations, red: str) -> None:
    second = ops.trigger(partition=NEW)
    assert ops.ended(second) == "failed", ops.why(second)
    assert f"is being worked on by DAG run '{red}'" in ops.log(second, "plan")
    assert ops.states(second)["check_source"] == "upstream_failed"
    assert ops.run(red)["state"] == "running"


def test_a_manual_run_without_a_date_is_refused_naming_the_parameter(ops: Operations) -> None:
    run_id = ops.trigger()
    assert ops.ended(run_id) == "failed", ops.why(run_id)
    assert "parameter `partition`" in ops.log(run_id, "plan")
    (alert,) = ops.alerts(run_id)
    assert "Millrace: mood failed at plan" in alert and "parameter `partition`" in alert


def red_shard(ops: Operations, run_id: str) -> dict[str, Any]:
    (one,) = [one for one in ops.instances(run_id, "infer") if one["state"] == "failed"]
    return one


def test_a_red_shard_leaves_the_others_green_and_nothing_published(ops: Operations, red: str) -> None:
    assert ops.ended(red) == "failed", ops.why(red)
    shards = ops.instances(red, "infer")
    assert [one["state"] for one in shards].count("success") == len(shards) - 1 > 0, ops.why(red)
    assert ops.states(red)["join_back"] == "upstream_failed" and ops.states(red)["report"] == "success"
    assert not ops.checkout.lake.exists("enriched/mood/_delta_log/00000000000000000000.json")


def test_one_alert_names_run_shard_reason_link_and_next_step(ops: Operations, red: str) -> None:
    (alert,) = ops.alerts("failed at infer")
    shard = red_shard(ops, red)["rendered_map_index"]
    assert f"Run: runs/mood/{NEW}/" in alert and red in alert and f"Shard: {shard}" in alert
    assert re.search(r"Reason: shard .*401", alert) and "Next: Clear the red `infer` instances" in alert
    assert re.search(rf"Link: http://127.0.0.1:\d+/dags/{NAME}/runs/.*/tasks/infer/mapped/\d+", alert)
    assert "magnet" not in alert


def test_a_date_that_is_not_published_in_time_alerts(ops: Operations, red: str) -> None:
    (alert,) = until(lambda: [text for text in ops.alerts("is late") if red in text], "the deadline is seen")
    assert "Millrace: mood is late" in alert and "it was to be published by" in alert


def test_clearing_the_red_shard_asks_only_what_is_missing_with_the_runs_own_prompt_and_publishes(
    ops: Operations, red: str
) -> None:
    before = _answered(ops, red)
    ops.activate_prompt("Is it good or bad? Second wording.")
    ops.model()
    ops.clear(red, "infer", red_shard(ops, red)["map_index"])
    assert ops.ended(red) == "success", ops.why(red)
    assert MAGNET in ops.asked() and len(ops.asked()) == len(set(ops.asked()))
    assert len(ops.asked()) + len(before) == len(TEXTS) + 1
    assert ops.systems() == {"Is it good or bad? First wording."}
    rows = ops.published(NEW)
    assert len(rows) == len(TEXTS) + 1 and {row["answer_status"] for row in rows} == {"ok"}
    assert {row["answer_meta"]["prompt_version"] for row in rows} == {1}


def _answered(ops: Operations, run_id: str) -> set[str]:
    """Ids of a run's requests whose answers are stored: in the file of a complete shard, or in parts of an open one."""
    run, lake = ops.plan(run_id)["run"], ops.checkout.lake
    files = [file.path for file in lake.list(f"{run}/shards")]
    records = [path for path in files if path.endswith("/complete.json")]
    complete = {path.split("/")[-2] for path in records}
    stored = [json.loads(lake.read(path))["answers"]["path"] for path in records]
    stored += [path for path in files if path.endswith(".parquet") and path.split("/")[-3] not in complete]
    return {row for path in stored for row in lake.parquet(path).read(["request_id"])["request_id"].to_pylist()}


def test_a_backfill_of_a_week_pays_only_for_what_was_never_asked(ops: Operations) -> None:
    """The prompt's version is a parameter; a date that the source does not have fails by itself."""
    for date, texts in {
        REPEATED: TEXTS,
        EMPTY: [],
        MIXED: [*TEXTS[:5], "a note of its own"],
        FRIDAY: TEXTS[5:9],
    }.items():
        ops.write_source(date, texts)
    ops.model()
    version, files = ops.version(), ops.files(NEW)
    ops.backfill(NEW, SUNDAY, prompt_version=1)
    runs = until(lambda: len(found := ops.backfill_runs()) == 7 and found, "seven runs are made")
    weekend = {SATURDAY: "failed", SUNDAY: "failed"}
    assert {date: ops.ended(run_id) for date, run_id in runs.items()} == dict.fromkeys(runs, "success") | weekend
    assert ops.asked() == ["a note of its own"]
    rows = {NEW: len(TEXTS) + 1, REPEATED: len(TEXTS), EMPTY: 0, MIXED: 6, FRIDAY: 4, SATURDAY: 0, SUNDAY: 0}
    assert {date: len(ops.published(date)) for date in runs} == rows
    # The date that was done keeps its files, and its run only leaves its number; the empty one is published, as 0 rows.
    assert ops.files(NEW) == files and ops.version() == version + 5
    assert ops.states(runs[REPEATED])["infer"] == "skipped"
    for date, run_id in runs.items():
        assert ops.run(run_id)["conf"] == {"prompt_version": 1}
        if date in weekend:
            assert f"dt={date}" in ops.log(run_id, "plan") and ops.states(run_id)["plan"] == "failed"
            continue
        plan = ops.plan(run_id)
        assert plan["decision"]["partition"] == date and plan["decision"]["prompt"]["version"] == 1
        # The plan of the date that was done was made by its first run, without parameters; the same decision is the same plan.
        assert plan["record"]["params"]["prompt_version"] == (None if date == NEW else 1)


def test_a_backfill_reprocesses_nothing_or_what_failed_or_what_is_done_under_new_parameters(ops: Operations) -> None:
    runs = ops.backfill_runs()
    before = {date: ops.run(run_id) for date, run_id in runs.items()}

    def again(*dates: str) -> bool:
        """Whether exactly the runs of these dates have been made again and have ended."""
        now = {date: ops.run(run_id) for date, run_id in runs.items()}
        ended = all(now[date]["state"] in ("success", "failed") for date in dates)
        return ended and {date for date in runs if now[date]["end_date"] != before[date]["end_date"]} == set(dates)

    ops.model()
    ops.backfill(NEW, SUNDAY, "none", prompt_version=2)
    assert again() and ops.run(runs[REPEATED])["conf"] == {"prompt_version": 1}

    # Saturday's rows have come, Sunday's have not.
    ops.write_source(SATURDAY, TEXTS[9:12])
    ops.backfill(NEW, SUNDAY, "failed", prompt_version=1)
    until(lambda: again(SATURDAY, SUNDAY), "what had failed is run again", 420)
    assert ops.run(runs[SATURDAY])["state"] == "success" and len(ops.published(SATURDAY)) == 3
    assert ops.run(runs[SUNDAY])["state"] == "failed" and ops.asked() == []

    ops.backfill(REPEATED, REPEATED, "completed", prompt_version=2)
    until(lambda: again(SATURDAY, SUNDAY, REPEATED), "the run is made again", 420)
    assert ops.run(runs[REPEATED])["state"] == "success", ops.why(runs[REPEATED])
    assert ops.run(runs[REPEATED])["conf"] == {"prompt_version": 2}
    assert ops.plan(runs[REPEATED])["decision"]["prompt"]["version"] == 2
    assert ops.asked() == sorted(TEXTS) and ops.systems() == {"Is it good or bad? Second wording."}
    assert {row["answer_meta"]["prompt_version"] for row in ops.published(REPEATED)} == {2}
    assert {row["answer_meta"]["prompt_version"] for row in ops.published(NEW)} == {1}


def test_late_rows_are_not_seen_when_extract_is_cleared_and_are_when_plan_is(ops: Operations) -> None:
    run_id = ops.backfill_runs()[REPEATED]
    plan, version = ops.plan(run_id), ops.version()
    ops.write_source(REPEATED, ["a note that came late"], part=1)
    ops.model()
    ops.clear(run_id, "extract")
    assert ops.ended(run_id) == "success", ops.why(run_id)
    assert (ops.asked(), ops.version(), ops.plan(run_id)["plan_id"]) == ([], version, plan["plan_id"])

    ops.clear(run_id, "plan")
    assert ops.ended(run_id) == "success", ops.why(run_id)
    assert ops.plan(run_id)["plan_id"] != plan["plan_id"]
    assert ops.asked() == ["a note that came late"]
    assert len(ops.published(REPEATED)) == len(TEXTS) + 1


@pytest.fixture(scope="module")
def refused(ops: Operations) -> str:
    """A run that validate refused: to one text in twenty the model gives no answer."""
    ops.write_source(RIDDLES, [*(f"day {n} of the journey" for n in range(19)), "a riddle"])
    ops.model({"do": "refusal", "times": None, "where": "riddle"})
    run_id = ops.trigger(partition=RIDDLES)
    assert ops.ended(run_id) == "failed", ops.why(run_id)
    return run_id


def test_too_many_unknown_answers_publish_nothing_and_the_report_says_why(ops: Operations, refused: str) -> None:
    assert ops.states(refused)["validate"] == "failed" and ops.states(refused)["publish"] == "upstream_failed"
    assert ops.published(RIDDLES) == []
    run = ops.plan(refused)["run"]
    (report,) = [file.path for file in ops.checkout.lake.list(f"{run}/reports") if file.path.endswith(".md")]
    text = ops.checkout.lake.read(report).decode()
    assert "5.00" in text and "refused" in text and "riddle" not in text
    (alert,) = ops.alerts(f"{run} ")
    assert "failed at validate" in alert and "5.00" in alert


def test_a_person_accepts_the_rate_clears_validate_and_the_date_is_published(ops: Operations, refused: str) -> None:
    run = ops.plan(refused)["run"]
    ops.model()
    ops.checkout.millrace("publish", run, "--accept-unknown-rate", "--reason", "one riddle a week is expected")
    ops.clear(refused, "validate")
    assert ops.ended(refused) == "success", ops.why(refused)
    assert ops.asked() == []
    statuses = [row["answer_status"] for row in ops.published(RIDDLES)]
    assert (statuses.count("ok"), statuses.count("unknown")) == (19, 1)
    shown = ops.checkout.millrace("show", run)
    assert "one riddle a week is expected" in shown or "accepted" in shown.lower()


def test_asking_unknowns_again_with_a_better_prompt_asks_only_those(ops: Operations, refused: str) -> None:
    ops.activate_prompt("Is it good or bad? A riddle is good.")
    ops.model()
    run_id = ops.trigger(partition=RIDDLES, ask_unknowns_again=True)
    assert ops.ended(run_id) == "success", ops.why(run_id)
    assert ops.asked() == ["a riddle"] and ops.systems() == {"Is it good or bad? A riddle is good."}
    rows = ops.published(RIDDLES)
    assert {row["answer_status"] for row in rows} == {"ok"}
    versions = sorted(row["answer_meta"]["prompt_version"] for row in rows)
    assert versions == [2] * 19 + [3]


def test_a_rollback_brings_back_one_date_and_no_other(ops: Operations, refused: str) -> None:
    listed = json.loads(ops.checkout.millrace("rollback", NAME, "--partition", RIDDLES, "--json"))
    first = min(found["version"] for found in listed)
    others = ops.published(REPEATED)
    ops.checkout.millrace("rollback", NAME, "--partition", RIDDLES, "--to", str(first))
    assert sorted(row["answer_status"] for row in ops.published(RIDDLES)) == ["ok"] * 19 + ["unknown"]
    assert ops.published(REPEATED) == others


def test_a_run_over_its_budget_waits_for_a_person_and_asks_everything_afresh_where_that_is_wanted(
    ops: Operations,
) -> None:
    texts = [*TEXTS, *(f"another note, number {n}" for n in range(60))]
    ops.write_source(COSTLY, texts)
    ops.model()
    run_id = ops.trigger(partition=COSTLY, do_not_reuse_answers=True)
    until(lambda: ops.states(run_id).get("approve_budget") in ("deferred", "awaiting_input", "failed"), "it waits", 300)
    assert ops.asked() == [] and ops.run(run_id)["state"] == "running"
    (alert,) = until(lambda: [text for text in ops.alerts(run_id) if "budget" in text], "somebody is told")
    # People read first. Airflow 3.3.2 fails a task that is answered before its scheduler has seen the process end: within a second.
    time.sleep(5)
    ops.respond(run_id, "approve_budget", "Approve")
    assert ops.ended(run_id) == "success", ops.why(run_id)
    assert ops.asked() == sorted(texts)  # those that were answered before too
    assert len(ops.published(COSTLY)) == len(texts)
    plan = ops.plan(run_id)
    approval = json.loads(ops.checkout.lake.read(f"{plan['run']}/approval.json"))
    assert approval["approved"] and approval["by"] == ops.checkout.site.login[0]
    assert approval["estimate"]["requests"] == len(texts) and approval["estimate"]["tokens"] > BUDGET_TOKENS
    assert COSTLY in alert and "approve" in alert.lower()


def test_the_maintenance_dag_removes_an_old_run_and_leaves_the_rest(ops: Operations) -> None:
    lake = ops.checkout.lake
    live = {file.path for file in lake.list("runs") if not file.path.endswith(".log")}
    plan = ops.plan(ops.backfill_runs()[NEW])["run"]
    old = f"runs/{NAME}/2026-01-01/{'0' * 64}"
    shutil.copytree(lake.uri(plan), lake.uri(old))
    for file in lake.list(old):
        os.utime(Path(lake.uri(file.path)), (1_700_000_000, 1_700_000_000))
    answer = ops.rest.post("/dags/millrace_maintenance/dagRuns", json={"logical_date": None})
    run_id = answer.raise_for_status().json()["dag_run_id"]
    assert ops.ended(run_id, "millrace_maintenance") == "success"
    assert not list(lake.list(old))
    assert {file.path for file in lake.list("runs") if not file.path.endswith(".log")} == live
    assert len(ops.published(NEW)) == len(TEXTS) + 1
