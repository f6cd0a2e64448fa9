"""How a step's Spark application is submitted: the hook, and the command it comes to through the connection `spark_default`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from millrace.errors import ConfigError, NotFoundError
from millrace.layout import RunPaths
from millrace.settings import Settings

SPARK_CONNECTION = "spark_default"
APPLICATIONS = ("check_source", "extract", "join_back")

_MASK = "******"
_SECRET_NAME = re.compile(r"password|passwd|secret|token|credential|access\.?key", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/@\s]+@")
# A setting inside a setting, such as extraJavaOptions=-Djavax.net.ssl.keyStorePassword=...
_NESTED = re.compile(rf"([^\s=]*(?:{_SECRET_NAME.pattern})[^\s=]*=)\S+", re.IGNORECASE)


def application(step: str) -> str:
    """Where a step's application lies, as spark-submit is told."""
    return str(Settings.from_env().spark_apps / f"{step}.py")


def submit_hook(step: str, run: str) -> Any:
    """Airflow's hook that submits a step's application for a run. Raises ConfigError for a connection that is missing or wrong."""
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
    from airflow.sdk import BaseHook
    from airflow.sdk.exceptions import AirflowNotFoundException

    from millrace.spark.session import submit_conf

    _, paths = RunPaths.parse(run)
    settings = Settings.from_env()
    try:
        # The hook itself takes a connection that is not there for one to YARN.
        BaseHook.get_connection(SPARK_CONNECTION)
        return SparkSubmitHook(
            conn_id=SPARK_CONNECTION,
            name=f"millrace {step} {paths.enrichment} {paths.partition}",
            conf=submit_conf(settings.spark_apps, settings.spark_driver_memory, _source_bytes(run)),
            application_args=["--run", run],
        )
    except AirflowNotFoundException:
        raise ConfigError(
            f"Airflow has no connection '{SPARK_CONNECTION}' that it can read. Make one, e.g. AIRFLOW_CONN_SPARK_DEFAULT="
            """'{"conn_type": "spark", "host": "local[*]", "extra": {"deploy-mode": "client"}}'."""
        ) from None
    except ValueError as error:
        raise ConfigError(f"the connection '{SPARK_CONNECTION}' is wrong: {error}") from error


def _source_bytes(run: str) -> int | None:
    """Size of the files that the run's plan names; None for a run without a plan."""
    from millrace.lake import Lake
    from millrace.plan import Plan

    root, paths = RunPaths.parse(run)
    try:
        plan = Plan.read(Lake(root) if root else Lake.from_env(), paths)
    except NotFoundError:
        return None
    return sum(file.size for file in plan.decision.source.files)


def submit_command(step: str, run: str) -> list[str]:
    """The command that a step runs, word by word, as the hook builds it and not masked. Raises ConfigError like `submit_hook`."""
    command: list[str] = submit_hook(step, run)._build_spark_submit_command(application(step))
    return command


def shown(command: Sequence[str]) -> str:
    """A command as a shell takes it, with every value that may be a secret masked.

    >>> shown(["spark-submit", "--conf", "spark.ssl.keyPassword=a b", "--name", "millrace extract"])
    "spark-submit --conf 'spark.ssl.keyPassword=******' --name 'millrace extract'"
    >>> shown(["--conf", "spark.driver.extraJavaOptions=-Da=1 -Dx.password=hush", "--master", "k8s://me:hush@host"])
    "--conf 'spark.driver.extraJavaOptions=-Da=1 -Dx.password=******' --master 'k8s://******@host'"
    """
    return shlex.join(_masked(word) for word in command)


def _masked(word: str) -> str:
    name, is_pair, _ = word.partition("=")
    if is_pair and _SECRET_NAME.search(name):
        return f"{name}={_MASK}"
    return _LOGIN.sub(f"://{_MASK}@", _NESTED.sub(rf"\1{_MASK}", word))
