"""`millrace spark-command`: what Airflow would submit to Spark, without doing it."""

from __future__ import annotations

import os
import shutil
from typing import Annotated

import typer

from millrace.errors import ConfigError
from millrace.local import LocalSite


def register(app: typer.Typer) -> None:
    app.command("spark-command", rich_help_panel="Set-up")(spark_command)


def spark_command(
    step: Annotated[str, typer.Argument(help="check_source, extract or join_back.")] = "extract",
    run: Annotated[
        str, typer.Option(help="The run as its tasks' logs name it.", show_default="a made-up one")
    ] = f"runs/review_insights/2026-11-01/{'0' * 64}",
) -> None:
    """Print the spark-submit command that Airflow runs for a step, through the connection `spark_default`; nothing is started.

    Where Airflow's settings are in the environment (a container, a worker) they count, and a connection made in the UI is found
    as one in the environment is; else this machine's Airflow. Values that may be secret are masked. Ends with 2 where the
    connection is missing or wrong, or its program is not on the PATH.
    """
    if not any(name.startswith("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN") for name in os.environ):
        os.environ.update(LocalSite.from_env().env())
    # As Airflow's own servers have it: only then are connections looked up in its database too.
    os.environ["_AIRFLOW_PROCESS_CONTEXT"] = "server"
    # The hook logs the command too, with a mask that knows fewer names.
    os.environ["AIRFLOW__LOGGING__LOGGING_LEVEL"] = "ERROR"
    from millrace.airflow import spark_submit

    if step not in spark_submit.APPLICATIONS:
        raise ConfigError(f"'{step}' is no Spark step: {', '.join(spark_submit.APPLICATIONS)}.")
    command = spark_submit.submit_command(step, run)
    typer.echo(spark_submit.shown(command))
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(f"'{command[0]}' is not on the PATH of this process.")
    typer.echo(f"  program         {program}")
    for name in ("JAVA_HOME", "SPARK_CONF_DIR", "SPARK_HOME"):
        typer.echo(f"  {name:<15} {os.environ.get(name, 'not set')}")
