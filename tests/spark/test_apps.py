"""The applications as Airflow starts them: through spark-submit, with their exit code and one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.spark import session

from .conftest import World, reviews

CHECKOUT = Path(__file__).parents[2]


# spark-submit passes an application's stderr on as stdout.
def submit(app: str, world: World, run: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MILLRACE_LAKE": world.lake.root, "PYSPARK_PYTHON": sys.executable}
    log4j = f"-Dlog4j2.configurationFile={CHECKOUT / 'spark_apps' / 'log4j2.properties'}"
    command = [
        str(Path(sys.executable).with_name("spark-submit")),
        "--master",
        "local[1]",
        "--driver-java-options",
        log4j,
    ]
    command += [str(CHECKOUT / "spark_apps" / f"{app}.py"), "--run", run]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_an_application_ends_with_its_line_and_quotes_no_row_when_it_fails(world: World):
    world.write_source([*reviews(30, distinct=20), {"id": "x", "comment": "secret words", "rating": 1.0}])
    plan = world.plan()
    done = submit("extract", world, plan.paths.root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("extract: 31 rows -> 21 requests (0 reused) in ")
    assert world.manifest(plan).rows == 31

    early = submit("join_back", world, plan.paths.root)
    assert early.returncode == 2 and "has no completion record" in early.stdout

    world.spec["source"]["exclude"] = "CAST(comment AS INT) > 3"
    failed = submit("extract", world, world.plan().paths.root)
    assert failed.returncode == 2 and "CAST_INVALID_INPUT" in failed.stdout
    assert "secret" not in failed.stdout + failed.stderr


def test_an_error_that_is_not_millraces_is_named_by_its_class_and_place_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(spark: Any, lake: Lake, paths: RunPaths) -> str:
        session.tasks_for("secret words")  # type: ignore[arg-type]
        return "never"

    monkeypatch.setattr(session, "start_session", lambda name: None)
    monkeypatch.setattr("sys.argv", ["extract", "--run", f"lake/runs/reviews/2026-11-01/{'0' * 64}"])
    with pytest.raises(SystemExit) as ended:
        session.run_app("extract", step)
    printed = capsys.readouterr().err
    assert ended.value.code == 3
    assert re.match(
        r"extract: TypeError at session\.py:\d+ in lake/runs/reviews/2026-11-01/0+\. Clear the task", printed
    )

    def quoting(spark: Any, lake: Lake, paths: RunPaths) -> str:
        raise ValueError("secret words")

    with pytest.raises(SystemExit):
        session.run_app("extract", quoting)
    printed = capsys.readouterr().err
    assert "ValueError at " in printed and "secret" not in printed
