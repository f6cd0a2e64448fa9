"""The connection names Spark's master in three ways; spark-submit is given the same each time."""

from __future__ import annotations

import json
from typing import Any

import pytest

EXTRA = {"deploy-mode": "client"}
MASTERS = {
    "local[2]": ("spark://local%5B2%5D?deploy-mode=client", {"host": "local[2]"}),
    "spark://spark.example:7077": (
        "spark://spark.example:7077?deploy-mode=client",
        {"host": "spark://spark.example", "port": 7077},
    ),
    "k8s://https://10.0.0.1:6443": (
        "spark://k8s%3A%2F%2Fhttps%3A%2F%2F10.0.0.1%3A6443?deploy-mode=client",
        {"host": "k8s://https://10.0.0.1", "port": 6443},
    ),
    "yarn": ("spark://yarn?deploy-mode=client", {"host": "yarn"}),
}


def submit_command(connection: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

    monkeypatch.setattr(SparkSubmitHook, "get_connection", lambda *_: connection)
    hook = SparkSubmitHook(conn_id="spark_default", name="millrace extract", application_args=["--run", "runs/a b/'x'"])
    command: list[str] = hook._build_spark_submit_command("extract.py")
    return command


@pytest.mark.parametrize("form", ["uri", "json", "fields"])
@pytest.mark.parametrize("master", MASTERS)
def test_every_form_of_the_connection_gives_the_same_master(
    master: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk import Connection

    uri, fields = MASTERS[master]
    if form == "uri":
        connection = Connection.from_uri(uri, conn_id="spark_default")
    elif form == "json":
        connection = Connection.from_json(
            json.dumps({"conn_type": "spark", "host": master, "extra": EXTRA}), conn_id="spark_default"
        )
    else:
        connection = Connection(conn_id="spark_default", conn_type="spark", extra=json.dumps(EXTRA), **fields)
    command = submit_command(connection, monkeypatch)
    assert command[command.index("--master") + 1] == master
    assert command[command.index("--deploy-mode") + 1] == "client"
    assert command[-3:] == ["extract.py", "--run", "runs/a b/'x'"]
