"""What the graph itself costs: the whole graph of review_insights on a tiny partition, beside its parts alone.

    .venv/bin/python benchmarks/graph_overhead.py --rows 20 --rounds 3

The model is an endpoint on this machine that answers at once, so what is left is Airflow, Spark's and the runner's starts and our own
code. Every round decides a new plan and asks every row again; the first round of each kind warms up and is not counted, and so every
preflight has a stored verdict. Medians of the rounds:

- `here_s`: the step in `millrace run`, from Airflow's own start and end of the task
  (the first step's holds the start of the API server that Airflow runs inside this process)
- `live_s`: the same under the scheduler that `millrace up` starts, triggered through the REST API
- `alone_s`: the same part without Airflow: spark-submit with the very command, `shard-runner` with the very arguments, and for steps in
  Python the function, called in a process that has imported everything
- `alone_cpu_s`: CPU seconds of it, which a busy machine stretches less
- `here_over_s`, `live_over_s`: the difference, what Airflow costs this step
- `gap_s`: under the scheduler, from the end of the step before to this one's start

Below the table: the whole from start to success, and how it divides into tasks, gaps and the rest; and what a task costs that does
nothing (ten of them in a row). `--no-live` leaves the scheduler out. Everything happens in a folder of its own, which is removed. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psycopg
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from millrace import sample_source
from millrace.config_db import ConfigDb
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.local import LocalSite
from millrace.prompt_push import push_prompts
from tests.openai_server import running_server

ROOT = Path(__file__).resolve().parents[1]
ENRICHMENT = "review_insights"
IDLE = "idle"
IDLE_TASKS = 10
STEPS = (
    "plan",
    "check_source",
    "preflight",
    "extract",
    "approve_budget",
    "infer",
    "join_back",
    "validate",
    "publish",
    "report",
)
_IDLE_DAG = f"""
from datetime import datetime
from airflow.sdk import DAG, task
from airflow.sdk.bases.operator import chain

def nothing():
    pass

with DAG("{IDLE}", schedule=None, start_date=datetime(2020, 1, 1)):
    chain(*[task(nothing, task_id=f"nothing_{{n}}")() for n in range({IDLE_TASKS})])
"""


@dataclass(frozen=True)
class Timing:
    """One DAG run: the seconds of its tasks, of the gaps before them, and around them."""

    tasks: dict[str, float]
    gaps: dict[str, float]
    before_s: float
    after_s: float
    wall_s: float
    cpu_s: float  # of the processes that this one started


def cpu_seconds() -> float:
    """CPU of this process and of all that it started and has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


class Bench:
    """A checkout of its own with the sample's first date in it, the endpoint registered as the model."""

    def __init__(self, home: Path, endpoint: str, rows: int) -> None:
        for folder in ("dags", "expectations"):
            shutil.copytree(ROOT / folder, home / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for folder in ("plugins", "spark_apps", "data"):
            (home / folder).symlink_to(ROOT / folder)
        (home / ".millrace").mkdir()
        shutil.copy(ROOT / ".millrace" / "env", home / ".millrace" / "env")
        os.environ |= {
            "MILLRACE_HOME": str(home),
            "MILLRACE_STATE": str(home / ".millrace"),
            "MILLRACE_RUNNER": str(ROOT / ".venv-inference" / "bin" / "shard-runner"),
            "AIRFLOW__LOGGING__LOGGING_LEVEL": "WARNING",
        }
        file = home / "dags" / "enrichments" / f"{ENRICHMENT}.yaml"
        spec = yaml.safe_load(file.read_text(encoding="utf-8")) | {"model": "stand-in"}
        file.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")

        self.home, self.site = home, LocalSite.from_env()
        self.site.prepare()
        self.lake = Lake.from_env()
        self.timezone = spec.get("timezone", "UTC")
        self.partition = sample_source.partitions(1)[0]
        sample_source.load(self.lake, home / "data", rows, days=1)
        db = ConfigDb(self.site.config_db)
        push_prompts(db, self.site.settings, [ENRICHMENT], author="benchmark", activate=True)
        db.upsert_model(
            "stand-in",
            engine="openai",
            digest="0" * 64,
            location="",
            endpoint=endpoint,
            served_name="test-model",
            context_tokens=4096,
        )
        self._airflow_db = self.site.database("airflow", "psycopg").replace("+psycopg", "")

    # The graph in one process

    def here(self) -> Timing:
        """`millrace run`, from the start of the process to its end."""
        return self._timed_process("run", ENRICHMENT, "--partition", self.partition, "--fresh", dag=ENRICHMENT)

    def idle_here(self) -> Timing:
        file = self.home / "dags" / "idle.py"
        file.write_text(_IDLE_DAG)
        return self._timed_process("airflow", "dags", "test", IDLE, dag=IDLE)

    def _timed_process(self, *arguments: str, dag: str) -> Timing:
        began, cpu = time.time(), cpu_seconds()
        said = subprocess.run(
            [f"{self.site.bin}/millrace", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        ended = time.time()
        if said.returncode != 0:
            raise SystemExit(said.stdout)
        with psycopg.connect(self._airflow_db) as db:
            found = db.execute(
                "select run_id from dag_run where dag_id = %s order by id desc limit 1", [dag]
            ).fetchone()
        assert found
        return self._timing(dag, found[0], began, ended, cpu_seconds() - cpu)

    # The graph under the scheduler

    def up(self) -> None:
        self.site.up()
        url = f"http://127.0.0.1:{self.site.running_port()}"
        user, password = self.site.login
        token = httpx.post(f"{url}/auth/token", json={"username": user, "password": password}).json()["access_token"]
        self.rest = httpx.Client(base_url=f"{url}/api/v2", headers={"Authorization": f"Bearer {token}"}, timeout=60)
        for dag in (ENRICHMENT, IDLE):
            _until(partial(self._is_known, dag))
            self.rest.patch(f"/dags/{dag}", json={"is_paused": False}).raise_for_status()
        # The run of the newest date that is due starts by itself and finds no such partition.
        _until(lambda: not self._running())

    def _is_known(self, dag: str) -> bool:
        return self.rest.get(f"/dags/{dag}").is_success

    def live(self) -> Timing:
        return self._triggered(ENRICHMENT, {"partition": self.partition, "do_not_reuse_answers": True})

    def idle_live(self) -> Timing:
        return self._triggered(IDLE, {})

    def _triggered(self, dag: str, conf: dict[str, Any]) -> Timing:
        began = time.time()
        started = self.rest.post(f"/dags/{dag}/dagRuns", json={"logical_date": None, "conf": conf}).raise_for_status()
        run_id = started.json()["dag_run_id"]
        with psycopg.connect(self._airflow_db, autocommit=True) as db:
            query = "select state, extract(epoch from end_date) from dag_run where dag_id = %s and run_id = %s"
            while (row := db.execute(query, [dag, run_id]).fetchone()) is None or row[0] not in ("success", "failed"):
                time.sleep(0.2)
        if row[0] != "success":
            raise SystemExit(f"{dag} failed under the scheduler: {self.site.logs}")
        return self._timing(dag, run_id, began, float(row[1]))

    def _running(self) -> bool:
        with psycopg.connect(self._airflow_db) as db:
            found = db.execute("select count(*) from dag_run where state in ('queued', 'running')").fetchone()
        return bool(found and found[0])

    def _timing(self, dag: str, run_id: str, began: float, ended: float, cpu: float = 0.0) -> Timing:
        with psycopg.connect(self._airflow_db) as db:
            rows: list[tuple[str, datetime, datetime]] = db.execute(
                "select task_id, start_date, end_date from task_instance "
                "where dag_id = %s and run_id = %s order by start_date",
                [dag, run_id],
            ).fetchall()
        tasks = {task: (end - start).total_seconds() for task, start, end in rows}
        gaps = {task: (start - before).total_seconds() for (_, _, before), (task, start, _) in itertools.pairwise(rows)}
        before_s, after_s = rows[0][1].timestamp() - began, ended - rows[-1][2].timestamp()
        return Timing(tasks, gaps, before_s, after_s, ended - began, cpu)

    # The parts alone

    def alone(self) -> dict[str, tuple[float, float]]:
        """Seconds and CPU seconds of each step's part, one after the other on one plan."""
        from millrace import budget
        from millrace.airflow import spark_submit, tasks
        from millrace.airflow.process import runner_env
        from millrace.records import Manifest

        dag_run = SimpleNamespace(
            run_id=f"alone__{time.time()}",
            run_type=SimpleNamespace(value="manual"),
            partition_key=None,
            data_interval_start=None,
            data_interval_end=None,
            triggering_user_name="benchmark",
        )
        params = {
            "partition": self.partition,
            "row_sample": None,
            "prompt_version": None,
            "do_not_reuse_answers": True,
            "ask_unknowns_again": False,
        }
        took: dict[str, tuple[float, float]] = {}

        def timed(step: str, part: Callable[[], Any]) -> Any:
            began, cpu = time.monotonic(), cpu_seconds()
            found = part()
            took[step] = time.monotonic() - began, cpu_seconds() - cpu
            return found

        def process(command: list[str], env: dict[str, str] | None = None) -> None:
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode != 0:
                raise SystemExit(f"{' '.join(command)}\n{done.stdout}")

        ref = timed("plan", lambda: tasks.plan(ENRICHMENT, self.timezone, dag_run=dag_run, params=params))
        run = ref["run"]
        ti = SimpleNamespace(xcom_pull=lambda task_ids: ref, get_task_breadcrumbs=lambda **_: [])
        commands = {step: spark_submit.submit_command(step, run) for step in spark_submit.APPLICATIONS}
        runner = self.site.settings.runner
        timed("check_source", lambda: process(commands["check_source"]))
        timed("preflight", lambda: process([runner, "probe", "--run", run], runner_env()))
        timed("extract", lambda: process(commands["extract"]))
        timed("approve_budget", lambda: budget.decide(self.lake, run))
        (shard,) = Manifest.load(self.lake, RunPaths.parse(run)[1].manifest).shards
        timed("infer", lambda: process([runner, "run", "--run", run, "--shard", shard.shard_id], runner_env()))
        timed("join_back", lambda: process(commands["join_back"]))
        timed("validate", lambda: tasks.validate(ti=ti, dag_run=dag_run))
        timed("publish", lambda: tasks.publish(ti=ti, dag_run=dag_run))
        timed("report", lambda: tasks.report(ENRICHMENT, ti=ti, dag_run=dag_run))
        return took


def rounds(measure: Callable[[], Any], count: int) -> list[Any]:
    """What `count` rounds measured, after one that is thrown away."""
    measure()
    return [measure() for _ in range(count)]


def median(values: list[float]) -> float:
    return round(statistics.median(values), 2)


def whole(timings: list[Timing]) -> dict[str, float]:
    """How the whole of a run divides."""
    return {
        "wall_s": median([one.wall_s for one in timings]),
        "before_s": median([one.before_s for one in timings]),
        "tasks_s": median([sum(one.tasks.values()) for one in timings]),
        "gaps_s": median([sum(one.gaps.values()) for one in timings]),
        "after_s": median([one.after_s for one in timings]),
    }


def idle(timings: list[Timing]) -> dict[str, float]:
    """What one task that does nothing costs, itself and until the next one starts."""
    return {
        "task_s": median([s for one in timings for s in one.tasks.values()]),
        "gap_s": median([s for one in timings for s in one.gaps.values()]),
    }


def _sum(steps: dict[str, dict[str, float]], column: str) -> float:
    return round(sum(row[column] for row in steps.values()), 2)


def show(results: dict[str, Any]) -> None:
    columns = list(next(iter(results["steps"].values())))
    print(f"{'step':<16}" + "".join(f"{column:>13}" for column in columns))
    for step, row in results["steps"].items():
        print(f"{step:<16}" + "".join(f"{row[column]:>13.2f}" for column in columns))
    for name in ("alone", "here", "live", "idle_here", "idle_live"):
        if name in results:
            print(f"{name:<16}" + "  ".join(f"{key} {value:.2f}" for key, value in results[name].items()))


def _until(happened: Callable[[], Any], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            raise SystemExit("Airflow did not get there in time; see its logs.")
        time.sleep(0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20, help="rows of the partition")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind, after one that warms up")
    parser.add_argument("--no-live", action="store_true", help="leave the scheduler out")
    arguments = parser.parse_args()
    # Not below a folder that is closed to the user as whom PostgreSQL runs when we are root.
    home = Path(tempfile.mkdtemp(prefix="millrace-graph-"))
    site: LocalSite | None = None
    try:
        with running_server() as server:
            bench = Bench(home, server.url, arguments.rows)
            site = bench.site
            here = rounds(bench.here, arguments.rounds)
            alone = rounds(bench.alone, arguments.rounds)
            idle_here = rounds(bench.idle_here, arguments.rounds)
            live: list[Timing] = []
            idle_live: list[Timing] = []
            if not arguments.no_live:
                bench.up()
                live = rounds(bench.live, arguments.rounds)
                idle_live = rounds(bench.idle_live, arguments.rounds)
    finally:
        if site is not None:
            site.down()
        shutil.rmtree(home)

    steps: dict[str, dict[str, float]] = {}
    for step in STEPS:
        row = {
            "alone_s": median([one[step][0] for one in alone]),
            "alone_cpu_s": median([one[step][1] for one in alone]),
        }
        row["here_s"] = median([one.tasks[step] for one in here])
        row["here_over_s"] = round(row["here_s"] - row["alone_s"], 2)
        if live:
            row["live_s"] = median([one.tasks[step] for one in live])
            row["live_over_s"] = round(row["live_s"] - row["alone_s"], 2)
            row["gap_s"] = median([one.gaps.get(step, one.before_s) for one in live])
        steps[step] = row
    results: dict[str, Any] = {"rows": arguments.rows, "rounds": arguments.rounds, "load": os.getloadavg()[0]}
    results |= {"steps": steps, "here": whole(here) | {"cpu_s": median([one.cpu_s for one in here])}}
    results["alone"] = {"wall_s": _sum(steps, "alone_s"), "cpu_s": _sum(steps, "alone_cpu_s")}
    results["idle_here"] = idle(idle_here)
    if live:
        results |= {"live": whole(live), "idle_live": idle(idle_live)}
    show(results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
