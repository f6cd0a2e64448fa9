"""The deployment's settings, read from the environment in this one place.

| variable            | meaning                                                     | default                       |
| ------------------- | ----------------------------------------------------------- | ----------------------------- |
| MILLRACE_HOME       | the checkout: dags/, expectations/, spark_apps/             | the folder above plugins/     |
| MILLRACE_LAKE       | where runs, answers and tables live: a path or an s3:// URL | $MILLRACE_HOME/.millrace/lake |
| MILLRACE_MODELS     | the model store                                             | $MILLRACE_HOME/.millrace/models |
| MILLRACE_CONFIG_DB  | SQLAlchemy URL of the config table                          | none: commands that need it say so |
| MILLRACE_BACKEND    | where shards run: `local` or `kubernetes`                   | local                         |
| MILLRACE_STATE      | local services: database, Airflow's own files, logs         | $MILLRACE_HOME/.millrace      |
| MILLRACE_ALERTS     | who is told when something is wrong: JSON, see `millrace.airflow.alerts` | nobody beside the log |
| MILLRACE_SPARK_DRIVER_MEMORY | heap of a Spark application's driver, e.g. 3g or 1500m | 3g: 5 million rows pass (docs/performance.md) |
| MILLRACE_RUNNER     | the `shard-runner` that backend `local` starts              | $MILLRACE_HOME/.venv-inference/bin/shard-runner |
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.errors import ConfigError

BACKENDS = ("local", "kubernetes")

_HEAP = re.compile(r"[1-9][0-9]*[mg]", re.IGNORECASE)


@dataclass(frozen=True)
class Settings:
    home: Path
    lake: str
    models: str
    config_db: str | None
    backend: str
    runner: str
    state: Path
    alerts: str
    spark_driver_memory: str  # as the JVM writes it

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Settings of this process. Raises ConfigError for a backend that does not exist or a memory that is none."""
        home = Path(env.get("MILLRACE_HOME") or Path(__file__).resolve().parents[2])
        backend = env.get("MILLRACE_BACKEND") or "local"
        if backend not in BACKENDS:
            raise ConfigError(f"MILLRACE_BACKEND is '{backend}'; set it to one of {', '.join(BACKENDS)}.")
        memory = env.get("MILLRACE_SPARK_DRIVER_MEMORY") or "3g"
        if not _HEAP.fullmatch(memory):
            raise ConfigError(
                f"MILLRACE_SPARK_DRIVER_MEMORY is '{memory}'; write a whole number of MiB or GiB, e.g. 1500m or 3g."
            )
        return cls(
            home=home,
            lake=env.get("MILLRACE_LAKE") or str(home / ".millrace" / "lake"),
            models=env.get("MILLRACE_MODELS") or str(home / ".millrace" / "models"),
            config_db=env.get("MILLRACE_CONFIG_DB") or None,
            backend=backend,
            state=Path(env.get("MILLRACE_STATE") or home / ".millrace"),
            alerts=env.get("MILLRACE_ALERTS") or "",
            spark_driver_memory=memory,
            runner=env.get("MILLRACE_RUNNER") or str(home / ".venv-inference" / "bin" / "shard-runner"),
        )

    def require_config_db(self) -> str:
        """The config table's URL, or a ConfigError that says how to set it."""
        if not self.config_db:
            raise ConfigError(
                "MILLRACE_CONFIG_DB is not set. Set it to the SQLAlchemy URL of the config table, "
                "or start the local database with `make up` and use `.venv/bin/millrace`, which sets it."
            )
        return self.config_db

    @property
    def enrichments(self) -> Path:
        return self.home / "dags" / "enrichments"

    @property
    def prompts(self) -> Path:
        return self.home / "dags" / "prompts"

    @property
    def expectations(self) -> Path:
        return self.home / "expectations"

    @property
    def spark_apps(self) -> Path:
        return self.home / "spark_apps"
