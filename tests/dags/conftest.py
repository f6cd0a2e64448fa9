"""Airflow on nothing: no database, no network, an empty home. Set before anything imports Airflow, which reads it once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

os.environ.update(
    {
        "AIRFLOW_HOME": tempfile.mkdtemp(prefix="millrace-airflow-"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }
)


@pytest.fixture(scope="session")
def parse() -> Callable[..., Any]:
    """Parse a DAG folder (default: the project's) as Airflow does; a DagBag."""

    def bag(folder: Path = ROOT / "dags") -> Any:
        from airflow.dag_processing.dagbag import DagBag

        return DagBag(dag_folder=str(folder))

    return bag


@pytest.fixture(scope="session")
def dag(parse: Callable[..., Any]) -> Any:
    """The DAG of the demo's enrichment."""
    return parse().dags["review_insights"]
