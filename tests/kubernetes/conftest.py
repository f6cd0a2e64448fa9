"""A cluster that runs pods as processes, a run with one shard, and an operator driven as Airflow drives it."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
# The Kubernetes client reads the variable when it is imported, so the file's place stays and its content is each test's own.
HOME = Path(tempfile.mkdtemp(prefix="millrace-airflow-"))

# Before anything imports Airflow, which reads them once. Lost connections are not waited for here.
os.environ.update(
    {
        "AIRFLOW_HOME": str(HOME),
        "KUBECONFIG": str(HOME / "kubeconfig"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__WORKERS__API_RETRIES": "2",
        "AIRFLOW__WORKERS__API_RETRY_WAIT_MIN": "0.01",
        "AIRFLOW__WORKERS__API_RETRY_WAIT_MAX": "0.02",
    }
)

from millrace.config_db import ConfigDb  # noqa: E402
from millrace.lake import Lake  # noqa: E402
from tests.kubernetes.cluster import Cluster, Pod  # noqa: E402
from tests.runner.build import SHARD, Run, build_run, store_model  # noqa: E402

IMAGE = "millrace/vllm-cpu:test"
PYTHON = str(ROOT / ".venv-inference" / "bin" / "python")
# The runner itself with an engine that answers by rule, and a stand-in that ends as a test wants it to.
REAL_RUNNER = [PYTHON, "-m", "tests.runner.fake_runner"]
TOLD_RUNNER = [PYTHON, "-m", "tests.dags.fake_runner"]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster({IMAGE: REAL_RUNNER}, ROOT) as running:
        yield running


@dataclass
class Bench:
    """One shard of 30 requests, its pod template, and the operator's way through execute, trigger and re-entry."""

    cluster: Cluster
    run: Run
    templates: Path
    monkeypatch: pytest.MonkeyPatch
    db: ConfigDb
    dag_run_id: str = "manual__1"
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    operator: Any = None
    pushed: dict[str, Any] = field(default_factory=dict)

    @property
    def lake(self) -> Lake:
        return self.run.lake

    def tell(self, how: str, **more: Any) -> None:
        """Let pods run the stand-in: `complete`, `liar`, `wait`, or an exit code."""
        self.cluster.images[IMAGE] = TOLD_RUNNER
        seen = str(self.templates.parent / "seen")
        self.set_env("FAKE_RUNNER", json.dumps({"how": how, "seen": seen, **more}))

    def misbehave(self, **how: Any) -> None:
        """Let the engine of the real runner misbehave."""
        self.cluster.images[IMAGE] = REAL_RUNNER
        self.set_env("FAKE_ENGINE", json.dumps(how))

    def set_env(self, name: str, value: str) -> None:
        def change(manifest: dict[str, Any]) -> None:
            env = manifest["spec"]["containers"][0].setdefault("env", [])
            env[:] = [variable for variable in env if variable["name"] != name]
            env.append({"name": name, "value": value})

        self.edit_template(change)

    def edit_template(self, change: Callable[[dict[str, Any]], None], engine: str = "vllm") -> None:
        file = self.templates / engine / "pod_template.yaml"
        manifest = yaml.safe_load(file.read_text())
        change(manifest)
        file.write_text(yaml.safe_dump(manifest))

    def limit_start(self, seconds: int) -> None:
        notes = {f"millrace/{phase}-timeout-seconds": str(seconds) for phase in ("schedule", "startup")}
        self.edit_template(lambda manifest: manifest["metadata"].update(annotations=notes))

    def context(self, try_number: int = 1, max_tries: int = 50) -> dict[str, Any]:
        ref = {"run": self.run.paths.root, "number": 1}
        ti = SimpleNamespace(
            dag_id="tiny", task_id="infer", map_index=0, try_number=try_number, max_tries=max_tries,
            start_date=datetime.now(UTC), xcom_pull=lambda task_ids: ref,
        )  # fmt: skip
        ti.xcom_push = lambda key, value: self.pushed.update({key: value})
        return {
            "ti": ti,
            "run_id": self.dag_run_id,
            "dag": SimpleNamespace(),
            "dag_run": SimpleNamespace(run_id=self.dag_run_id, start_date=self.started),
        }

    def shard(self, *, deferrable: bool = True, execution: timedelta | None = None, **tries: int) -> None:
        """One try of the shard's task, through as many deferrals as it takes."""
        from millrace.airflow.kubernetes import ShardPod

        self.operator = ShardPod(
            task_id="infer", shard_id=SHARD, retries=50, deferrable=deferrable, poll_interval=0.05,
            startup_check_interval_seconds=0.05, base_container_status_polling_interval=0.05,
            execution_timeout=execution or timedelta(days=1),
        )  # fmt: skip
        self.drive(self.operator, self.context(**tries))

    def drive(self, operator: Any, context: dict[str, Any]) -> None:
        from airflow.sdk.exceptions import TaskDeferred

        step, arguments = operator.execute, {}
        while True:
            try:
                step(context, **arguments)
                return
            except TaskDeferred as deferred:
                # As between two processes: the trigger is made anew from its serialised form, and so is the operator.
                path, values = deferred.trigger.serialize()
                assert path == "millrace.airflow.kubernetes.PodTrigger"
                event = asyncio.run(_first_event(type(deferred.trigger)(**values)))
                operator.pod = operator.pod_request_obj = None
                step, arguments = getattr(operator, deferred.method_name), {"event": event}

    def meanwhile(self, act: Callable[[Pod], None], word: str = "", pods: int = 1) -> threading.Thread:
        """Do something to the newest pod once it is at work (has printed `word`), while the task waits."""

        def watch() -> None:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                if len(self.cluster.created) >= pods:
                    pod = self.cluster.created[-1]
                    if not word or any(word in line for _, line in pod.log):
                        act(pod)
                        return
                time.sleep(0.01)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        return thread


async def _first_event(trigger: Any) -> dict[str, Any]:
    async for event in trigger.run():
        payload: dict[str, Any] = event.payload
        return json.loads(json.dumps(payload, default=str))
    raise AssertionError("the trigger ended without an event")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster, config_db_url: str) -> Bench:
    models = tmp_path / "models"
    lake = Lake(str(tmp_path / "lake"))
    run = build_run(lake, [f"review number {n} about a thing" for n in range(30)], store_model(models))
    templates = tmp_path / "templates"
    (templates / "vllm").mkdir(parents=True)
    container = {
        "name": "runner", "image": IMAGE, "env": [{"name": "MILLRACE_MODELS", "value": str(models)}],
        "resources": {"limits": {"memory": "2Gi"}},
    }  # fmt: skip
    manifest = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "template"},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 20},
    }  # fmt: skip
    (templates / "vllm" / "pod_template.yaml").write_text(yaml.safe_dump(manifest))
    cluster.kubeconfig(HOME)
    monkeypatch.setenv("MILLRACE_POD_TEMPLATES", str(templates))
    monkeypatch.setenv("MILLRACE_LAKE", lake.root)
    monkeypatch.setenv("MILLRACE_CONFIG_DB", config_db_url)
    db = ConfigDb(config_db_url)
    # Every test is the newest run of the same plan's date.
    dag_run_id = f"manual__{tmp_path.name}"
    db.register_run(run.paths.enrichment, run.paths.partition, dag_run_id, lambda _: False)
    return Bench(cluster, run, templates, monkeypatch, db, dag_run_id)
