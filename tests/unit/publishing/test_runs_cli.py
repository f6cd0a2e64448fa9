from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from millrace import publishing, report, validation
from millrace.cli import app
from millrace.cli.runs import find_run
from millrace.config_db import ConfigDb
from millrace.errors import ConfigError, NotFoundError, RefusedError
from millrace.lake import Lake
from millrace.records import Override
from tests.unit.publishing.runs import DATE, extracted, joined_run, make_plan, read_rows, ready, spec


@pytest.fixture
def millrace(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The command line on a lake and a checkout of its own."""
    folder = tmp_path / "dags" / "enrichments"
    folder.mkdir(parents=True)
    (folder / "reviews.yaml").write_text(yaml.safe_dump(spec()))
    monkeypatch.setenv("MILLRACE_LAKE", lake.root)
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))

    def run(*args: str) -> Result:
        return CliRunner().invoke(app, list(args))

    return run


def refused_run(lake: Lake) -> str:
    plan = make_plan(lake)
    joined_run(lake, plan, [("ok", None)] * 9 + [("unknown", "not_json")])
    with pytest.raises(RefusedError):
        validation.validate(lake, plan.paths.root)
    return plan.paths.root


class TestFindRun:
    def test_a_date_means_its_newest_plan(self, lake: Lake) -> None:
        make_plan(lake)
        newest = make_plan(lake, prompt_version=2)
        assert find_run(lake, f"reviews/{DATE}") == newest.paths.root

    def test_the_first_digits_of_a_plan_are_enough_when_they_fit_one(self, lake: Lake) -> None:
        plans = [make_plan(lake, prompt_version=version) for version in range(20)]
        assert find_run(lake, f"reviews/{DATE}/{plans[0].plan_id[:12]}") == plans[0].paths.root
        shared = next(p.plan_id[0] for p in plans if sum(q.plan_id[0] == p.plan_id[0] for q in plans) > 1)
        with pytest.raises(ConfigError, match="Give more digits"):
            find_run(lake, f"reviews/{DATE}/{shared}")

    def test_a_path_or_url_is_taken_as_it_is(self, lake: Lake) -> None:
        root = make_plan(lake).paths.root
        assert find_run(lake, root) == find_run(lake, lake.uri(root)) == root

    def test_what_is_not_there_or_not_a_run_is_said(self, lake: Lake) -> None:
        with pytest.raises(NotFoundError, match="There is no run"):
            find_run(lake, f"reviews/{DATE}")
        with pytest.raises(ConfigError, match="is not a run"):
            find_run(lake, "reviews")


def test_show_says_where_a_refused_run_stands_and_what_to_do(lake: Lake, millrace) -> None:
    run = refused_run(lake)
    written = report.write(lake, run, "manual__x", state="failed")
    shown = millrace("show", f"reviews/{DATE}")
    assert shown.exit_code == 0
    assert "unknown rate 10.00%" in shown.output and "--accept-unknown-rate" in shown.output
    assert written["html"].rsplit("/", 1)[-1] in shown.output
    as_json = json.loads(millrace("show", f"reviews/{DATE}", "--json").output)
    assert as_json["state"] == "not published" and as_json["trouble"]["step"] == "validate"
    assert as_json["audit"]["statuses"] == {"ok": 9, "unknown": 1}


def test_show_counts_what_the_newest_dag_run_of_the_plan_asked(
    lake: Lake, millrace, postgres: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres()
    monkeypatch.setenv("MILLRACE_CONFIG_DB", url)
    db = ConfigDb(url)
    db.migrate()
    plan, other = make_plan(lake), make_plan(lake, prompt_version=2)
    for dag_run, made in (("first", plan), ("second", plan), ("of another plan", other)):
        if dag_run == "second":
            joined_run(lake, plan, 30)
        db.register_run("reviews", DATE, dag_run, lambda holder: False)
        db.note_plan("reviews", DATE, dag_run, made.plan_id)
    shown = " ".join(millrace("show", f"reviews/{DATE}/{plan.plan_id[:12]}").output.split())
    assert "30 distinct, 0 reused, 0 asked by this run, 30 by earlier runs of its plan" in shown
    as_json = json.loads(millrace("show", f"reviews/{DATE}/{plan.plan_id[:12]}", "--json").output)
    assert (as_json["audit"]["requests_answered"], as_json["asked_earlier"]) == (0, 30)


def test_show_answers_while_the_config_table_does_not(lake: Lake, millrace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_CONFIG_DB", "postgresql://nobody@127.0.0.1:1/millrace")
    joined_run(lake, make_plan(lake), 30)
    assert "30 distinct, 0 reused, 30 asked under this plan" in millrace("show", f"reviews/{DATE}").output


def test_an_accepted_rate_lets_the_run_be_published(lake: Lake, millrace) -> None:
    run = refused_run(lake)
    assert millrace("publish", f"reviews/{DATE}").exit_code == 2
    assert millrace("publish", f"reviews/{DATE}", "--accept-unknown-rate").exit_code == 2
    done = millrace("publish", f"reviews/{DATE}", "--accept-unknown-rate", "--reason", "looked at all of them")
    assert done.exit_code == 0 and "up to 10.00%" in done.output
    assert Override.load(lake, f"{run}/override.json").reason == "looked at all of them"
    validation.validate(lake, run)
    assert publishing.publish(lake, run, 1)["rows"] == 10


def test_rollback_lists_the_versions_and_goes_back_to_one(lake: Lake, millrace) -> None:
    publishing.publish(lake, ready(lake, make_plan(lake), 2, mark="old"), 1)
    publishing.publish(lake, ready(lake, make_plan(lake, prompt_version=2), 1, mark="new"), 2)
    listed = json.loads(millrace("rollback", "reviews", "--partition", DATE, "--json").output)
    assert [row["version"] for row in listed] == [2, 1]
    done = millrace("rollback", "reviews", "--partition", DATE, "--to", "1")
    assert done.exit_code == 0 and "2 rows, now version 3" in done.output
    assert [row["id"] for row in read_rows(lake)] == ["old0", "old1"]
    assert "Nothing changed" in millrace("rollback", "reviews", "--partition", DATE, "--to", "1").output
    assert millrace("rollback", "reviews", "--partition", DATE, "--to", "9").exit_code == 2


def test_estimate_tells_what_is_left_to_ask(lake: Lake, millrace) -> None:
    extracted(lake, make_plan(lake), [("ok", None)] * 100, answered=False)
    assert "100 (counted by extract)" in millrace("estimate", f"reviews/{DATE}").output
    assert json.loads(millrace("estimate", f"reviews/{DATE}", "--json").output)["tokens"] == 6000


def test_runs_lists_the_ledger(lake: Lake, millrace, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import UTC, datetime

    from millrace.cli import runs as module
    from millrace.config_db.tables import Run

    row = Run(
        enrichment="reviews",
        partition=DATE,
        number=3,
        dag_run_id="manual__x",
        state="success",
        plan_id="ab" * 32,
        counts={"rows": 10, "requests_answered": 4, "unknown_rate": 0.1},
        tokens={"prompt": 90, "cached": 50, "completion": 10},
        seconds=12.4,
        started_at=datetime(2026, 11, 2, 3, 0, tzinfo=UTC),
    )

    class Ledger:
        def runs(self, enrichment: str | None, limit: int) -> list[Run]:
            return [row] if (enrichment, limit) == ("reviews", 5) else []

    monkeypatch.setattr(module, "open_config_db", Ledger)
    [listed] = json.loads(millrace("runs", "reviews", "--limit", "5", "--json").output)
    assert listed["run"] == f"reviews/{DATE}" and listed["unknown"] == "10.00%" and listed["tokens"] == 100
    assert "No run yet" in millrace("runs").output
