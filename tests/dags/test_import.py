"""What parsing the DAG files costs and needs, and what a broken enrichment file does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dags.conftest import ROOT

BROKEN = {
    "not_yaml": ("name: [", "not_yaml.yaml: line"),
    "unknown_key": ("name: unknown_key\nshedule: '0 3 * * *'\n", "unknown_key.yaml: shedule: is not a known key"),
    "other_name": (None, "other_name.yaml: name: is 'review_insights'"),
}


def test_importing_needs_no_database_no_network_and_nothing_heavy() -> None:
    """Every parse of the DAG processor imports this: a name lookup, a database or Spark here would be paid every 30 seconds."""
    code = f"""
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("the import used the network")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
sys.path.insert(0, {str(ROOT / "dags")!r})
import enrichment, broken_enrichments, maintenance
heavy = {{"pyspark", "pyarrow", "deltalake", "obstore", "vllm", "pandas", "kubernetes", "great_expectations", "psycopg"}}
print(*sorted(heavy & set(sys.modules)))
"""
    env = {k: v for k, v in os.environ.items() if k != "MILLRACE_CONFIG_DB"}
    env["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"] = "postgresql+psycopg2://nobody@nowhere.invalid/none"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the DAG folder."""
    return Path(shutil.copytree(ROOT / "dags", tmp_path / "dags", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_clear_import_error_and_the_other_dags_stand(
    name: str, folder: Path, parse: Callable[..., Any]
) -> None:
    text, expected = BROKEN[name]
    file = folder / "enrichments" / f"{name}.yaml"
    file.write_text(text or (folder / "enrichments" / "review_insights.yaml").read_text())
    bag = parse(folder)
    assert set(bag.dags) == {"review_insights", "review_polarity_zh", "millrace_maintenance"}
    (error,) = bag.import_errors.values()
    assert expected in error


def test_the_broken_files_error_is_not_on_the_file_whose_dags_are_scheduled(
    folder: Path, parse: Callable[..., Any]
) -> None:
    """Airflow stops scheduling every DAG of a file with an import error, so the factory's own file must have none."""
    (folder / "enrichments" / "broken.yaml").write_text("name: broken\n")
    bag = parse(folder)
    assert [Path(file).name for file in bag.import_errors] == ["broken_enrichments.py"]
    assert {Path(dag.fileloc).name for dag in bag.dags.values()} == {"enrichment.py", "maintenance.py"}


def test_all_broken_files_are_named_at_once(folder: Path, parse: Callable[..., Any]) -> None:
    for name in ("a", "b"):
        (folder / "enrichments" / f"{name}.yaml").write_text(f"name: {name}\n")
    (error,) = parse(folder).import_errors.values()
    assert "a.yaml: source: is missing" in error and "b.yaml: source: is missing" in error


def test_two_enrichments_with_one_target_are_both_refused(folder: Path, parse: Callable[..., Any]) -> None:
    first = (folder / "enrichments" / "review_insights.yaml").read_text()
    (folder / "enrichments" / "review_twin.yaml").write_text(
        first.replace("name: review_insights", "name: review_twin")
    )
    bag = parse(folder)
    assert set(bag.dags) == {"review_polarity_zh", "millrace_maintenance"}
    (error,) = bag.import_errors.values()
    assert "is the target of review_insights and review_twin" in error


def test_an_empty_folder_is_no_error(folder: Path, parse: Callable[..., Any]) -> None:
    for file in (folder / "enrichments").glob("*.yaml"):
        file.unlink()
    bag = parse(folder)
    assert set(bag.dags) == {"millrace_maintenance"} and bag.import_errors == {}


def test_a_backend_that_does_not_exist_is_named(
    folder: Path, parse: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_BACKEND", "mainframe")
    errors = parse(folder).import_errors.values()
    assert errors and all("MILLRACE_BACKEND is 'mainframe'" in error for error in errors)
