"""A live Airflow on PostgreSQL as `millrace up` starts it, one small enrichment over it, and an endpoint that is told how to behave.

Everything is real but the model: scheduler, Spark, Great Expectations, the runner, the Delta table. Tests act as the person on call
does: through Airflow's REST API and the `millrace` command.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.e2e.conftest import ROOT, Checkout
from tests.e2e.conftest import checkout as make_checkout
from tests.openai_server import Script, running_server
from tests.openai_server.server import Running

NAME = "mood"
BUDGET_TOKENS = 3_000  # about twice what any date costs but the one that is to wait
SPEC: dict[str, Any] = {
    "name": NAME,
    "schedule": "0 3 * * *",
    "source": {"path": "source/notes", "key": "id", "text": "body"},
    "prompt": NAME,
    "model": "remote",
    "answer": {"mood": {"labels": ["good", "bad"]}},
    "limits": {"unknown_rate": 0.01, "requests_per_shard": 12, "budget_tokens": BUDGET_TOKENS},
    "over_budget": "wait",
    "publish_within_minutes": 1,
    "target": {"path": "enriched/mood"},
}
CHECKS = {
    "source": [("expect_column_values_to_be_unique", {"column": "id"})],
    "enriched": [("expect_column_values_to_be_unique", {"column": "id"})],
}
# Nothing waits for its second try, and a call is never repeated unseen.
SETTINGS = {"backoff_base_s": 0.01, "backoff_max_s": 0.02, "breaker_pause_s": 0.05, "breaker_give_up_s": 0.5}


@dataclass
class Operations:
    """The person on call: what they can do, and what they see."""

    checkout: Checkout
    server: Running
    told: Path
    rest: httpx.Client = field(init=False)

    # What the model does

    def model(self, *steps: dict[str, Any]) -> None:
        """From now on the endpoint follows this script; what it was asked before is forgotten."""
        self.server.app.script = Script(steps)
        self.server.app.bodies.clear()

    def asked(self) -> list[str]:
        """The rows' texts that the endpoint was asked about; sorted. Golden rows and the runner's first look at the endpoint are none."""
        return sorted(user.removeprefix("Text: ") for _, user in self._row_prompts())

    def systems(self) -> set[str]:
        """The instructions under which rows were asked."""
        return {system for system, _ in self._row_prompts()}

    def _row_prompts(self) -> list[tuple[str, str]]:
        prompts = [tuple(message["content"] for message in body["messages"]) for body in self.server.app.bodies]
        return [(system, user) for system, user in prompts if user.startswith("Text: ") and "golden" not in user]

    # The source and the prompt

    def write_source(self, date: str, texts: list[str], part: int = 0) -> None:
        folder = Path(self.checkout.settings.lake) / "source" / "notes" / f"dt={date}"
        folder.mkdir(parents=True, exist_ok=True)
        rows = {"id": [f"{date}-{part}-{n}" for n in range(len(texts))], "body": texts}
        schema = pa.schema([("id", pa.string()), ("body", pa.string())])
        pq.write_table(pa.table(rows, schema=schema), folder / f"part-{part}.parquet")

    def activate_prompt(self, system: str) -> None:
        """Push a new version and make it the active one."""
        (self.checkout.settings.prompts / NAME / "system.jinja").write_text(system)
        self.checkout.millrace("prompts", "push", NAME, "--activate")

    # Airflow

    def trigger(self, **params: Any) -> str:
        answer = self.rest.post(f"/dags/{NAME}/dagRuns", json={"logical_date": None, "conf": params})
        return str(answer.raise_for_status().json()["dag_run_id"])

    def backfill(self, first: str, last: str, reprocess: str = "none", **params: Any) -> None:
        # A DAG has one backfill at a time, and the scheduler looks only now and then whether one has ended.
        path = f"/backfills?dag_id={NAME}"
        until(lambda: all(one["completed_at"] for one in self.rest.get(path).json()["backfills"]), "no other backfill")
        body = {
            "dag_id": NAME,
            "from_date": f"{first}T00:00:00Z",
            "to_date": f"{last}T23:59:00Z",
            "reprocess_behavior": reprocess,
            "dag_run_conf": params,
        }
        self.rest.post("/backfills", json=body).raise_for_status()

    def clear(self, run_id: str, task: str, index: int | None = None) -> None:
        """Clear a task, or one of its mapped instances, with all that comes after it."""
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": [task if index is None else [task, index]],
            "include_downstream": True,
            "only_failed": False,
        }
        answer = self.rest.post(f"/dags/{NAME}/clearTaskInstances", json=body)
        assert answer.is_success, f"{answer.text}\n{self._said_by('api-server')}"

    def _said_by(self, component: str) -> str:
        """The end of what one of Airflow's processes logged."""
        return (self.checkout.site.logs / f"{component}.log").read_text()[-8000:]

    def respond(self, run_id: str, task: str, option: str) -> None:
        """Choose an option under Required Actions."""
        path = f"/dags/{NAME}/dagRuns/{run_id}/taskInstances/{task}/-1/hitlDetails"
        self.rest.patch(path, json={"chosen_options": [option], "params_input": {}}).raise_for_status()

    def run(self, run_id: str) -> dict[str, Any]:
        run: dict[str, Any] = self.rest.get(f"/dags/{NAME}/dagRuns/{run_id}").raise_for_status().json()
        return run

    def ended(self, run_id: str, dag: str = NAME) -> str:
        """Wait until a run has ended; its state."""

        def state() -> str | None:
            found = self.rest.get(f"/dags/{dag}/dagRuns/{run_id}").raise_for_status().json()["state"]
            return found if found in ("success", "failed") else None

        return str(until(state, f"{run_id} ends", 420))

    def instances(self, run_id: str, task: str | None = None) -> list[dict[str, Any]]:
        found = self.rest.get(f"/dags/{NAME}/dagRuns/{run_id}/taskInstances", params={"limit": 100}).raise_for_status()
        return [one for one in found.json()["task_instances"] if task in (None, one["task_id"])]

    def states(self, run_id: str) -> dict[str, str]:
        """State of each task; of a mapped one, that of its last instance."""
        return {one["task_id"]: one["state"] for one in self.instances(run_id)}

    def log(self, run_id: str, task: str, index: int = -1) -> str:
        """What the last try of a task said."""
        (one,) = [one for one in self.instances(run_id, task) if one["map_index"] == index]
        path = f"/dags/{NAME}/dagRuns/{run_id}/taskInstances/{task}/logs/{one['try_number']}"
        content = (
            self.rest.get(path, params={"full_content": "true", "map_index": index})
            .raise_for_status()
            .json()["content"]
        )
        return "\n".join(
            json.dumps(line, ensure_ascii=False) for line in content if line.get("level") in ("info", "error")
        )

    def why(self, run_id: str) -> str:
        """What the red tasks of a run said at the end, for a test that expected another outcome."""
        red = [one for one in self.instances(run_id) if one["state"] == "failed"]
        logs = {one["task_id"]: self.log(run_id, one["task_id"], one["map_index"])[-3000:] for one in red}
        return "\n".join(f"{task}: {log}" for task, log in logs.items())

    def backfill_runs(self) -> dict[str, str]:
        """Date -> id of the DAG runs of backfills."""
        params: dict[str, Any] = {"run_type": "backfill", "limit": 50}
        runs = self.rest.get(f"/dags/{NAME}/dagRuns", params=params).json()["dag_runs"]
        return {run["data_interval_start"][:10]: run["dag_run_id"] for run in runs}

    # What came of it

    def plan(self, run_id: str) -> dict[str, Any]:
        """The plan that a DAG run made, from its XCom."""
        path = f"/dags/{NAME}/dagRuns/{run_id}/taskInstances/plan/xcomEntries/return_value"
        run = self.rest.get(path, params={"deserialize": "true"}).raise_for_status().json()["value"]["run"]
        plan: dict[str, Any] = json.loads(self.checkout.lake.read(f"{run}/plan.json"))
        return plan | {"run": run}

    def published(self, date: str) -> list[dict[str, Any]]:
        """The rows of a date that readers see."""
        from deltalake import DeltaTable

        table = DeltaTable(self.checkout.lake.uri("enriched/mood"))
        return [row for row in pa.table(table.scan()).to_pylist() if row["dt"] == date]

    def files(self, date: str) -> list[str]:
        """The files of the enriched table that hold a date's rows."""
        from deltalake import DeltaTable

        return sorted(DeltaTable(self.checkout.lake.uri("enriched/mood")).file_uris([("dt", "=", date)]))

    def version(self) -> int:
        from deltalake import DeltaTable

        return int(DeltaTable(self.checkout.lake.uri("enriched/mood")).version())

    def alerts(self, about: str) -> list[str]:
        """What people were told that mentions this."""
        lines = self.told.read_text().splitlines() if self.told.exists() else []
        return [text for text in map(json.loads, lines) if about in text]


def until(happened: Callable[[], Any], what: str, seconds: float = 180) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := happened():
            return found
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def _write_enrichment(home: Path) -> None:
    for folder in ("dags/enrichments", "dags/prompts", "expectations"):
        shutil.rmtree(home / folder)
        (home / folder).mkdir()
    (home / "dags" / "enrichments" / f"{NAME}.yaml").write_text(yaml.safe_dump(SPEC, sort_keys=False))
    prompt = home / "dags" / "prompts" / NAME
    prompt.mkdir()
    (prompt / "body.jinja").write_text("Text: {{ text }}")
    (prompt / "golden.jsonl").write_text("".join(json.dumps({"text": f"golden {n}"}) + "\n" for n in range(3)))
    suites = home / "expectations" / NAME
    suites.mkdir()
    for suite, checks in CHECKS.items():
        entries = [
            {
                "name": kind,
                "type": kind,
                "kwargs": kwargs,
                "severity": "block",
                "why": "It is the grain.",
                "opens": "the column id",
            }
            for kind, kwargs in checks
        ]
        text = json.dumps({"table": suite, "grain": "one row per id", "checks": entries})
        (suites / f"{suite}.json").write_text(text)


@pytest.fixture(scope="module")
def ops() -> Iterator[Operations]:
    told = Path(tempfile.mkdtemp(prefix="millrace-told-")) / "alerts.jsonl"
    notifier = {"notifier": "tests.operations.notifier.FileNotifier", "path": str(told)}
    making = make_checkout.__wrapped__()  # type: ignore[attr-defined]
    checkout: Checkout = next(making)
    # Airflow's processes must find the notifier.
    checkout.env.update({"MILLRACE_ALERTS": json.dumps([notifier]), "PYTHONPATH": str(ROOT)})
    _write_enrichment(checkout.settings.home)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, told.parent)
        stack.callback(next, making, None)  # stops Airflow and PostgreSQL
        server = stack.enter_context(running_server())
        made = Operations(checkout, server, told)
        checkout.env["MILLRACE_CONFIG_DB"] = checkout.site.config_db
        checkout.millrace("migrate")
        settings = [option for key, value in SETTINGS.items() for option in ("--setting", f"{key}={value}")]
        endpoint = ["--endpoint", server.url, "--served-name", "test-model", "--context-tokens", "4096"]
        checkout.millrace("models", "add", "remote", *endpoint, *settings)
        made.activate_prompt("Is it good or bad? First wording.")
        checkout.millrace("up")
        url = f"http://127.0.0.1:{checkout.site.running_port()}"
        user, password = checkout.site.login
        token = httpx.post(f"{url}/auth/token", json={"username": user, "password": password}).json()["access_token"]
        made.rest = httpx.Client(base_url=f"{url}/api/v2", headers={"Authorization": f"Bearer {token}"}, timeout=30)
        with made.rest:
            for dag in (NAME, "millrace_maintenance"):
                until(lambda dag=dag: made.rest.get(f"/dags/{dag}").is_success, f"{dag} is parsed")  # type: ignore[misc]
                made.rest.patch(f"/dags/{dag}", json={"is_paused": False}).raise_for_status()
            yield made
