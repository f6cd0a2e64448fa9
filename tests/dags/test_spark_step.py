"""A Spark step's verdict is its record, whatever spark-submit returned (known fault C2)."""

from __future__ import annotations

import json
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.airflow.operators import CheckSource, Extract
from millrace.airflow.retries import CrashedError
from millrace.airflow.spark_submit import submit_command
from millrace.config_db import ConfigDb
from millrace.errors import ConfigError, RefusedError, UnavailableError
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.records import CheckResult, FileRef, Manifest, ShardEntry, SuiteResult
from millrace.settings import Settings
from millrace.spark.suites import Suite
from tests.dags.conftest import ROOT

PLAN = "0" * 64
ENRICHMENT = "review_insights"

SUBMIT = """#!{python}
import json, os, pathlib, shutil, sys
told = json.loads(os.environ["FAKE_SUBMIT"])
with open(told["seen"], "a") as seen:
    seen.write(json.dumps(sys.argv[1:]) + "\\n")
if told["record"]:
    target = pathlib.Path(told["record_at"])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(told["record"])
print("a line before")
print("extract: as told")
sys.exit(told["code"])
"""


@dataclass
class Bench:
    lake: Lake
    paths: RunPaths
    seen: Path
    monkeypatch: pytest.MonkeyPatch

    def tell(self, code: int, record: Any = None, at: str = "") -> None:
        text = record.dump().decode() if record else ""
        told = {"code": code, "record": text, "record_at": self.lake.uri(at), "seen": str(self.seen)}
        self.monkeypatch.setenv("FAKE_SUBMIT", json.dumps(told))

    def starts(self) -> list[list[str]]:
        return [json.loads(line) for line in self.seen.read_text().splitlines()] if self.seen.exists() else []

    def execute(self, step: type) -> Any:
        ref = {"run": self.paths.root, "number": 1}
        ti = SimpleNamespace(xcom_pull=lambda task_ids: ref)
        task_id = {CheckSource: "check_source", Extract: "extract"}[step]
        return step(task_id=task_id).execute({"ti": ti, "dag_run": SimpleNamespace(run_id="manual__1")})

    def manifest(self, *, rows: int = 3) -> Manifest:
        """A manifest of one shard whose file is there."""
        path = f"{self.paths.extract('x')}/shards/part.parquet"
        self.lake.write(path, b"requests")
        shard = ShardEntry(
            shard_id="aaaaaaaaaaaaaaaa", model="m", fingerprint="f", requests=rows, est_tokens=1, bytes=8,
            files=[FileRef(path=path, size=8, rows=rows)],
        )  # fmt: skip
        return Manifest(
            plan_id=PLAN, attempt="x", rows=rows, requests=rows, reused=0, skipped_rows={}, reused_rows=0, infer_rows=rows,
            changed={}, row_files=[], reused_files=[], shards=[shard], seconds=1,
        )  # fmt: skip


def suite(outcome: str, label: str | None = None) -> SuiteResult:
    current = Suite.load(Settings.from_env().expectations, ENRICHMENT, "source").label
    check = CheckResult(
        name="rows", column=None, severity="block", outcome=outcome, observed="0", why="A day has rows."
    )
    return SuiteResult(suite=label or current, rows=3, asked=1, results=[check], seconds=1)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_db_url: str) -> Bench:
    submit = tmp_path / "bin" / "spark-submit"
    submit.parent.mkdir()
    submit.write_text(SUBMIT.format(python=sys.executable))
    submit.chmod(0o755)
    lake = Lake(str(tmp_path / "lake"))
    monkeypatch.setenv("PATH", f"{submit.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", "host": "local[2]"}))
    monkeypatch.setenv("MILLRACE_LAKE", lake.root)
    monkeypatch.setenv("MILLRACE_CONFIG_DB", config_db_url)
    monkeypatch.setenv("MILLRACE_HOME", str(ROOT))
    paths = RunPaths(ENRICHMENT, f"2026-{secrets.randbelow(10_000):04}", PLAN)
    ConfigDb(config_db_url).register_run(paths.enrichment, paths.partition, "manual__1", lambda _: False)
    return Bench(lake, paths, tmp_path / "seen", monkeypatch)


def test_extract_returns_the_manifests_shards(bench: Bench) -> None:
    bench.tell(0, bench.manifest(), bench.paths.manifest)
    assert bench.execute(Extract) == ["aaaaaaaaaaaaaaaa"]
    (arguments,) = bench.starts()
    assert arguments[arguments.index("--master") + 1] == "local[2]"
    assert arguments[-3:] == [str(ROOT / "spark_apps" / "extract.py"), "--run", bench.paths.root]
    assert arguments == submit_command("extract", bench.paths.root)[1:]


def test_a_missing_connection_fails_the_step_instead_of_meaning_yarn(bench: Bench) -> None:
    bench.monkeypatch.delenv("AIRFLOW_CONN_SPARK_DEFAULT")
    bench.tell(0, bench.manifest(), bench.paths.manifest)
    bench.lake.delete([bench.paths.manifest])
    with pytest.raises(ConfigError, match="spark_default"):
        bench.execute(Extract)
    assert bench.starts() == []


def test_an_application_that_wrote_all_and_exited_1_has_not_failed(bench: Bench) -> None:
    bench.tell(1, bench.manifest(), bench.paths.manifest)
    assert bench.execute(Extract) == ["aaaaaaaaaaaaaaaa"]


def test_an_application_that_exited_0_without_its_record_has_failed(bench: Bench) -> None:
    bench.tell(0)
    with pytest.raises(RefusedError, match=r"manifest\.json"):
        bench.execute(Extract)


@pytest.mark.parametrize(("code", "error"), [(2, ConfigError), (3, UnavailableError), (1, CrashedError)])
def test_the_error_is_the_applications_own_last_line(bench: Bench, code: int, error: type[Exception]) -> None:
    bench.tell(code)
    with pytest.raises(error, match=r"^extract: as told$"):
        bench.execute(Extract)


def test_an_earlier_record_does_not_stand_for_a_failed_try(bench: Bench) -> None:
    bench.lake.write(bench.paths.source_check(), suite("unmet").dump())
    bench.tell(1)
    with pytest.raises(CrashedError):
        bench.execute(CheckSource)


def test_nothing_is_started_where_the_manifest_stands(bench: Bench) -> None:
    bench.lake.write(bench.paths.manifest, bench.manifest().dump())
    assert bench.execute(Extract) == ["aaaaaaaaaaaaaaaa"]
    assert bench.starts() == []


def test_extract_is_started_again_where_a_file_of_the_manifest_is_gone(bench: Bench) -> None:
    manifest = bench.manifest()
    bench.lake.write(bench.paths.manifest, manifest.dump())
    bench.lake.delete([manifest.shards[0].files[0].path])
    bench.tell(2)
    with pytest.raises(ConfigError):
        bench.execute(Extract)
    assert len(bench.starts()) == 1


def test_a_suite_that_passed_stands_until_its_file_changes(bench: Bench) -> None:
    bench.lake.write(bench.paths.source_check(), suite("met").dump())
    bench.execute(CheckSource)
    assert bench.starts() == []
    bench.lake.write(bench.paths.source_check(), suite("met", label="review_insights/source.json@00000000").dump())
    bench.tell(0, suite("met"), bench.paths.source_check())
    bench.execute(CheckSource)
    assert len(bench.starts()) == 1


def test_a_suite_that_blocks_fails_the_step_and_is_asked_again(bench: Bench) -> None:
    bench.tell(2, suite("unmet"), bench.paths.source_check())
    with pytest.raises(RefusedError, match="rows is unmet"):
        bench.execute(CheckSource)
    bench.tell(0, suite("met"), bench.paths.source_check())
    bench.execute(CheckSource)
    assert len(bench.starts()) == 2
