"""`millrace spark-command` shows what a Spark step submits, and starts nothing (known fault C1)."""

from __future__ import annotations

import doctest
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.airflow import spark_submit
from millrace.lake import Lake
from millrace.plan import Plan, PlanRecord, SourceFile
from millrace.spark import session
from tests.dags.conftest import ROOT
from tests.unit.publishing.runs import make_plan

RUN = f"runs/review_insights/2026-11-01/{'0' * 64}"
CLUSTER = {"conn_type": "spark", "host": "k8s://https://10.0.0.1", "port": 6443, "extra": {"deploy-mode": "client"}}

Show = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def show(tmp_path: Path) -> Show:
    """Run the command as in a container: Airflow's settings are in the environment, and a spark-submit that leaves a trace on the PATH."""
    (tmp_path / "bin").mkdir()
    submit = tmp_path / "bin" / "spark-submit"
    submit.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    submit.chmod(0o755)

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(Path(sys.executable).with_name("millrace")), "spark-command", *arguments],
            env={
                "PATH": f"{submit.parent}{os.pathsep}{os.environ['PATH']}",
                "HOME": str(tmp_path),
                "AIRFLOW_HOME": str(tmp_path),
                "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{tmp_path}/airflow.db",
                "MILLRACE_HOME": str(ROOT),
            }
            | env,
            capture_output=True,
            text=True,
        )

    return run


def test_the_command_is_the_whole_of_what_the_step_would_run(show: Show, tmp_path: Path) -> None:
    said = show("join_back", "--run", RUN, AIRFLOW_CONN_SPARK_DEFAULT=json.dumps(CLUSTER), SPARK_CONF_DIR="/etc/spark")
    assert said.returncode == 0, said.stderr
    command, *around = said.stdout.splitlines()
    words = shlex.split(command)
    assert words[:3] == ["spark-submit", "--master", "k8s://https://10.0.0.1:6443"]
    assert words[words.index("--deploy-mode") + 1] == "client"
    assert words[words.index("--name") + 1] == "millrace join_back review_insights 2026-11-01"
    assert words[-3:] == [str(ROOT / "spark_apps" / "join_back.py"), "--run", RUN]
    assert {tuple(line.split()) for line in around} >= {
        ("program", str(tmp_path / "bin" / "spark-submit")),
        ("SPARK_CONF_DIR", "/etc/spark"),
        ("JAVA_HOME", "not", "set"),
    }
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("connection", [None, "spark://k8s://https://10.0.0.1:6443"])
def test_a_connection_that_is_missing_or_cannot_be_read_is_named(show: Show, connection: str | None) -> None:
    """Airflow's hook alone would take it for one to YARN."""
    said = show(**({"AIRFLOW_CONN_SPARK_DEFAULT": connection} if connection else {}))
    assert said.returncode == 2
    assert "no connection 'spark_default'" in said.stderr
    assert said.stdout == ""


def test_a_program_that_is_not_on_the_path_is_named(show: Show) -> None:
    extra = {"spark-binary": "spark3-submit"}
    said = show(AIRFLOW_CONN_SPARK_DEFAULT=json.dumps(CLUSTER | {"extra": extra}))
    assert said.returncode == 2
    assert "'spark3-submit' is not on the PATH" in said.stderr


@pytest.mark.parametrize(("limit", "quick"), [(10, True), (9, False)])
def test_only_a_small_source_gets_the_jvm_that_starts_cheaply(
    limit: int, quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(CLUSTER))
    monkeypatch.setattr(session, "SMALL_SOURCE_BYTES", limit)
    lake = Lake(str(tmp_path))
    decision = make_plan(lake).decision
    files = [SourceFile(path=f"/{size}", size=size, version="1") for size in (4, 6)]
    source = decision.source.model_copy(update={"files": files})
    plan = Plan.make(
        decision.model_copy(update={"source": source}), PlanRecord(dag_run_id="manual__1", user="ada", params={})
    )
    plan.save(lake)
    command = spark_submit.submit_command("extract", f"{tmp_path}/{plan.paths.root}")
    assert any("-XX:TieredStopAtLevel=1" in word for word in command) == quick


@pytest.mark.parametrize("made", [True, False])
def test_the_archive_of_sparks_classes_is_named_where_it_was_made(
    made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "spark-classes.jsa"
    if made:
        archive.touch()
    monkeypatch.setattr(session, "CLASS_ARCHIVE", archive)
    options = session.submit_conf(ROOT / "spark_apps", "1g")["spark.driver.extraJavaOptions"].split()
    assert (f"-XX:SharedArchiveFile={archive}" in options) == made


def test_values_that_may_be_secret_are_masked() -> None:
    assert doctest.testmod(spark_submit).failed == 0
    hidden = spark_submit.shown(
        ["--conf", "spark.hadoop.fs.s3a.secret.key=hush", "--conf", "a.token=x=y", "--run", "r"]
    )
    assert hidden == "--conf 'spark.hadoop.fs.s3a.secret.key=******' --conf 'a.token=******' --run r"
