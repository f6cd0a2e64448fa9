"""What Airflow costs beside the work: a live scheduler with 10, 100 and 1,000 mapped shards that have nothing left to do.

    .venv/bin/python benchmarks/mapped_shards.py --shards 10,100,1000 --window 60

The operator is the real one and finds each shard complete, so all that is measured is Airflow and the reading of manifest and records:

- `expand_s`: from the end of `extract` until all instances are there
- `shards_per_s`: instances finished per second, over at most `--window` seconds, four at a time
- `list_s`: the first page (100) of the instances through the REST API; `list_all_s` all pages
- `clear_s`: one instance cleared, from the request until it is green again, while all others are done

Airflow and PostgreSQL run in a folder of their own, which is removed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from millrace.lake import Lake
from millrace.layout import RunPaths, answers_file
from millrace.local import LocalSite
from millrace.records import Completion, FileRef, Manifest, Phases, ShardEntry, Tokens

ROOT = Path(__file__).resolve().parents[1]
_FINGERPRINT = "f" * 64

_DAG = """
from datetime import datetime
from airflow.sdk import DAG, task
from millrace.airflow.operators import LocalShard

RUNS = {runs!r}

def plan(run):
    return {{"run": run, "number": 1}}

def extract(run):
    from millrace.lake import Lake
    from millrace.records import Manifest
    return [shard.shard_id for shard in Manifest.load(Lake.from_env(), run + "/manifest.json").shards]

for count, run in RUNS.items():
    with DAG(f"mapped_{{count}}", schedule=None, start_date=datetime(2020, 1, 1)) as dag:
        shards = task(extract)(run)
        infer = LocalShard.partial(task_id="infer", map_index_template="{{{{ task.shard_id }}}}").expand(shard_id=shards)
        task(plan)(run) >> shards
    globals()[dag.dag_id] = dag
"""


def write_run(lake: Lake, count: int) -> str:
    """A run of `count` shards, each complete; returns its path."""
    paths = RunPaths("mapped", "2026-11-01", f"{count:064x}")
    shards = []
    for number in range(count):
        shard_id = f"{number:064x}"
        answers = FileRef(path=answers_file(_FINGERPRINT, shard_id, "a"), size=1, rows=1)
        lake.write(answers.path, b"x")
        done = Completion(
            plan_id=paths.plan_id,
            shard_id=shard_id,
            attempt="a",
            requests=1,
            statuses={"ok": 1},
            reasons={},
            answers=answers,
            resumed=0,
            tokens=Tokens(),
            phases=Phases(),
            engine={},
        )
        lake.write(paths.complete(shard_id), done.dump())
        shards.append(
            ShardEntry(
                shard_id=shard_id, model="m", fingerprint=_FINGERPRINT, requests=1, est_tokens=1, bytes=1, files=[]
            )
        )
    manifest = Manifest(
        plan_id=paths.plan_id,
        attempt="e",
        rows=count,
        requests=count,
        reused=0,
        skipped_rows={},
        reused_rows=0,
        infer_rows=count,
        changed={},
        row_files=[],
        reused_files=[],
        shards=shards,
        seconds=0,
    )
    lake.write(paths.manifest, manifest.dump())
    return paths.root


class Airflow:
    """The REST API of a running Airflow."""

    def __init__(self, site: LocalSite) -> None:
        url = f"http://127.0.0.1:{site.running_port()}"
        user, password = site.login
        token = httpx.post(f"{url}/auth/token", json={"username": user, "password": password}).json()["access_token"]
        self._client = httpx.Client(base_url=f"{url}/api/v2", headers={"Authorization": f"Bearer {token}"}, timeout=120)

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get(path, params=params).raise_for_status().json()
        return found

    def exists(self, path: str) -> bool:
        return self._client.get(path).is_success

    def send(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.request(method, path, json=body).raise_for_status().json()
        return answer


def measure(airflow: Airflow, count: int, window: float) -> dict[str, float]:
    dag = f"/dags/mapped_{count}"
    wait(lambda: airflow.exists(dag))
    airflow.send("PATCH", dag, {"is_paused": False})
    run_id = airflow.send("POST", f"{dag}/dagRuns", {"logical_date": None})["dag_run_id"]
    run = f"{dag}/dagRuns/{run_id}"
    instances = f"{run}/taskInstances/infer/listMapped"
    wait(lambda: airflow.get(f"{run}/taskInstances/extract")["state"] == "success")
    extracted = time.monotonic()
    wait(lambda: airflow.exists(instances) and airflow.get(instances, limit=1)["total_entries"] == count)
    expand_s = time.monotonic() - extracted

    began = time.monotonic()
    before = airflow.get(instances, limit=1, state="success")["total_entries"]
    while time.monotonic() - began < window and airflow.get(run)["state"] == "running":
        time.sleep(1)
    finished = airflow.get(instances, limit=1, state="success")["total_entries"] - before
    took = time.monotonic() - began
    if airflow.get(run)["state"] == "running":
        airflow.send("PATCH", run, {"state": "success"})
    wait(lambda: airflow.get(run)["state"] == "success")

    began = time.monotonic()
    airflow.get(instances, limit=100)
    list_s = time.monotonic() - began
    began = time.monotonic()
    for offset in range(0, count, 100):
        airflow.get(instances, limit=100, offset=offset)
    list_all_s = time.monotonic() - began

    began = time.monotonic()
    body = {"dry_run": False, "dag_run_id": run_id, "task_ids": [["infer", count - 1]], "only_failed": False}
    airflow.send("POST", f"{dag}/clearTaskInstances", body)
    answered = time.monotonic() - began
    wait(lambda: airflow.get(run)["state"] == "success")
    return {
        "shards": count,
        "expand_s": round(expand_s, 2),
        "shards_per_s": round(finished / took, 2),
        "list_s": round(list_s, 2),
        "list_all_s": round(list_all_s, 2),
        "clear_request_s": round(answered, 2),
        "clear_s": round(time.monotonic() - began, 2),
    }


def wait(happened: Any, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            raise SystemExit("Airflow did not get there in time; see its logs.")
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", default="10,100,1000", help="how many, one run each")
    parser.add_argument("--window", type=float, default=60, help="seconds over which finished instances are counted")
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="millrace-mapped-"))
    (home / "plugins").symlink_to(ROOT / "plugins")
    (home / "dags").mkdir()
    os.environ |= {"MILLRACE_HOME": str(home), "MILLRACE_STATE": str(home / ".millrace")}
    site = LocalSite.from_env()
    lake = Lake(site.settings.lake)
    runs = {int(count): write_run(lake, int(count)) for count in arguments.shards.split(",")}
    (home / "dags" / "mapped.py").write_text(_DAG.format(runs=runs))
    try:
        site.prepare()
        site.up()
        airflow = Airflow(site)
        results = []
        for count in runs:
            results.append(measure(airflow, count, arguments.window))
            print(results[-1], file=sys.stderr, flush=True)
    finally:
        site.down()
        shutil.rmtree(home)
    print(json.dumps({"runs": results}))


if __name__ == "__main__":
    main()
