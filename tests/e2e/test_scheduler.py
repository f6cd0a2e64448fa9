"""A live Airflow as `millrace up` starts it: which date each kind of run works on, and what a broken file does to the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import ENRICHMENT, Checkout

Rest = httpx.Client


@pytest.fixture(scope="module")
def airflow(checkout: Checkout) -> Iterator[Rest]:
    checkout.millrace("up")
    url = f"http://127.0.0.1:{checkout.site.running_port()}"
    user, password = checkout.site.login
    token = httpx.post(f"{url}/auth/token", json={"username": user, "password": password}).json()["access_token"]
    with Rest(base_url=f"{url}/api/v2", headers={"Authorization": f"Bearer {token}"}, timeout=30) as client:
        until(lambda: client.get(f"/dags/{ENRICHMENT}").is_success, "the DAG is parsed")
        client.patch(f"/dags/{ENRICHMENT}", json={"is_paused": False}).raise_for_status()
        yield client
    checkout.site.stop_components()


def until(happened: Callable[[], Any], what: str, seconds: float = 180) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := happened():
            return found
        time.sleep(1)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def ended(client: Rest, run_type: str, count: int) -> list[dict[str, Any]]:
    """The DAG runs of a type once `count` of them have ended."""

    def found() -> list[dict[str, Any]]:
        runs = client.get(f"/dags/{ENRICHMENT}/dagRuns", params={"run_type": run_type, "limit": 50}).json()["dag_runs"]
        over = [run for run in runs if run["state"] in ("success", "failed")]
        return over if len(over) >= count else []

    return list(until(found, f"{count} {run_type} runs end"))


def log_of_plan(client: Rest, run_id: str) -> str:
    path = f"/dags/{ENRICHMENT}/dagRuns/{run_id}/taskInstances/plan/logs/1"
    return str(client.get(path, params={"full_content": "true"}).text)


def states(client: Rest, run_id: str) -> dict[str, str]:
    instances = client.get(f"/dags/{ENRICHMENT}/dagRuns/{run_id}/taskInstances").json()["task_instances"]
    return {instance["task_id"]: instance["state"] for instance in instances}


def test_a_manual_run_without_a_date_is_refused_naming_the_parameter(airflow: Rest, checkout: Checkout) -> None:
    started = airflow.post(f"/dags/{ENRICHMENT}/dagRuns", json={"logical_date": None})
    run_id = started.raise_for_status().json()["dag_run_id"]
    run = until(lambda: next((r for r in ended(airflow, "manual", 1) if r["dag_run_id"] == run_id), None), "it ends")
    assert run["state"] == "failed"
    assert "parameter `partition`" in log_of_plan(airflow, run_id)
    assert states(airflow, run_id)["check_source"] == "upstream_failed"
    assert states(airflow, run_id)["report"] == "success"
    assert run_id not in {claim.dag_run_id for claim in checkout.claims()}


def test_each_run_of_a_backfill_works_on_its_own_date(airflow: Rest, checkout: Checkout) -> None:
    """The source has none of these dates, so each run fails in `plan`, which has claimed its date by then."""
    backfill = {"dag_id": ENRICHMENT, "from_date": "2026-09-01T00:00:00Z", "to_date": "2026-09-03T23:59:00Z"}
    airflow.post("/backfills", json=backfill).raise_for_status()
    runs = ended(airflow, "backfill", 3)
    claimed = {claim.dag_run_id: claim.partition for claim in checkout.claims()}
    resolved = {run["data_interval_start"][:10]: claimed[run["dag_run_id"]] for run in runs}
    assert resolved == {date: date for date in ("2026-09-01", "2026-09-02", "2026-09-03")}
    assert {claim.state for claim in checkout.claims() if claim.partition in resolved} == {"failed"}


def test_a_scheduled_run_covers_the_day_before(airflow: Rest, checkout: Checkout) -> None:
    """Switching the DAG on makes the run of the interval that has just ended, and none for older ones."""
    (run,) = ended(airflow, "scheduled", 1)
    (partition,) = [claim.partition for claim in checkout.claims() if claim.dag_run_id == run["dag_run_id"]]
    assert partition == run["data_interval_start"][:10] < run["run_after"][:10]


def test_a_broken_file_is_an_import_error_and_stops_no_other_dag(airflow: Rest, checkout: Checkout) -> None:
    broken = checkout.settings.enrichments / "broken.yaml"
    broken.write_text("name: broken\nshedule: '0 3 * * *'\n")
    try:
        (error,) = until(lambda: airflow.get("/importErrors").json()["import_errors"], "the error is seen")
        assert error["filename"] == "broken_enrichments.py"
        assert "broken.yaml: shedule: is not a known key" in error["stack_trace"]
        parsed = airflow.get(f"/dags/{ENRICHMENT}").json()["last_parsed_time"]
        # Once the factory's own file has been parsed again beside the broken one, the other DAGs must still be scheduled.
        until(lambda: airflow.get(f"/dags/{ENRICHMENT}").json()["last_parsed_time"] > parsed, "the DAG is parsed again")
        dags = airflow.get("/dags", params={"exclude_stale": "true"}).json()["dags"]
        assert {dag["dag_id"]: dag["has_import_errors"] for dag in dags} == {
            ENRICHMENT: False,
            "review_polarity_zh": False,
            "millrace_maintenance": False,
        }
    finally:
        broken.unlink()
    until(lambda: not airflow.get("/importErrors").json()["import_errors"], "the error goes away with the file")
