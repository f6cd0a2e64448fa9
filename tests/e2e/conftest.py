"""A checkout of its own for the end-to-end tests: a copy of what people edit, the real environments, model, Spark and PostgreSQL."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millrace.config_db import ConfigDb, Run
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.local import LocalSite
from millrace.settings import Settings

ROOT = Path(__file__).parents[2]
ENRICHMENT = "review_insights"
ROWS = 40  # of each date
DEMO, SECOND, THIRD = "2026-11-01", "2026-11-02", "2026-11-03"


@dataclass(frozen=True)
class Checkout:
    env: dict[str, str]

    @property
    def settings(self) -> Settings:
        return Settings.from_env(self.env)

    @property
    def lake(self) -> Lake:
        return Lake(self.settings.lake)

    @property
    def site(self) -> LocalSite:
        return LocalSite(self.settings)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `millrace` and return its process."""
        command = [str(ROOT / ".venv" / "bin" / "millrace"), *arguments]
        return subprocess.Popen(command, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def millrace(self, *arguments: str) -> str:
        """Run `millrace` to its end and return what it printed; it must succeed."""
        process = self.start(*arguments)
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said
        return said

    def claims(self) -> list[Run]:
        """The ledger of runs, newest first."""
        return ConfigDb(self.site.config_db).runs(ENRICHMENT, limit=100)

    def published(self, partition: str) -> list[dict[str, Any]]:
        """The rows that readers of the enriched table see."""
        from deltalake import DeltaTable

        table = DeltaTable(self.lake.uri(f"enriched/{ENRICHMENT}"))
        rows: list[dict[str, Any]] = table.to_pyarrow_table(filters=[("dt", "=", partition)]).to_pylist()
        return rows

    def files(self, prefix: str) -> set[str]:
        return {file.path for file in self.lake.list(prefix)}

    def run_of(self, partition: str) -> RunPaths:
        """The one plan that a partition has."""
        (plan_id,) = self.lake.folders(f"runs/{ENRICHMENT}/{partition}")
        return RunPaths(ENRICHMENT, partition, plan_id)


@pytest.fixture(scope="session")
def checkout() -> Iterator[Checkout]:
    # Not below pytest's own folder, which is closed to the user as whom PostgreSQL runs when we are root.
    home = Path(tempfile.mkdtemp(prefix="millrace-e2e-"))
    for folder in ("dags", "expectations"):
        shutil.copytree(ROOT / folder, home / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("plugins", "spark_apps", "data"):
        (home / folder).symlink_to(ROOT / folder)
    (home / ".millrace").mkdir()
    if (ROOT / ".millrace" / "env").exists():
        shutil.copy(ROOT / ".millrace" / "env", home / ".millrace" / "env")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "MILLRACE_"))}
    found = Checkout(
        kept
        | {
            "MILLRACE_HOME": str(home),
            # Half a minute is right for people and long for a test.
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "5",
            "MILLRACE_MODELS": str(ROOT / ".millrace" / "models"),
            "MILLRACE_RUNNER": str(ROOT / ".venv-inference" / "bin" / "shard-runner"),
        }
    )
    yield found
    found.millrace("down")
    shutil.rmtree(home)


@pytest.fixture(scope="session")
def demo(checkout: Checkout) -> str:
    """What `millrace demo` printed: DEMO is published, the other dates have rows to be asked about."""
    return checkout.millrace("demo", "--rows", str(ROWS))
