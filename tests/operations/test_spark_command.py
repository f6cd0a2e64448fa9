"""Section "Spark is not started" of docs/runbook.md, with a connection that was made in Airflow's UI."""

from __future__ import annotations

from tests.e2e.conftest import Checkout
from tests.operations.conftest import Operations


def test_a_connection_made_in_the_ui_is_the_one_that_is_shown(ops: Operations) -> None:
    connection = {
        "connection_id": "spark_default",
        "conn_type": "spark",
        "host": "spark://spark.example",
        "port": 7077,
        "extra": '{"deploy-mode": "client"}',
    }
    ops.rest.post("/connections", json=connection).raise_for_status()
    site = ops.checkout.site.env()
    # It would come first.
    site.pop("AIRFLOW_CONN_SPARK_DEFAULT")
    said = Checkout(ops.checkout.env | site).millrace("spark-command", "check_source")
    assert said.startswith("spark-submit --master spark://spark.example:7077 ")
