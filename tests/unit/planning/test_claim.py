"""The claim of a date by the task `plan`: its number and the enriched table's."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import CommitProperties, Transaction, write_deltalake

from millrace.airflow import tasks
from millrace.publishing import seen_number, target_schema
from tests.unit.conftest import Checkout


def test_a_run_after_the_config_table_was_lost_has_a_higher_number_than_the_table_has_seen(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else publish would refuse every date that was ever published, after the model was paid for."""
    settings = checkout.settings
    for name, value in {
        "HOME": str(settings.home),
        "LAKE": settings.lake,
        "MODELS": settings.models,
        "CONFIG_DB": settings.require_config_db(),
    }.items():
        monkeypatch.setenv(f"MILLRACE_{name}", value)
    empty: pa.Table = target_schema(checkout.plan()).empty_table()
    write_deltalake(
        checkout.lake.uri("enriched/mood"),
        empty,
        partition_by=["dt"],
        commit_properties=CommitProperties(app_transactions=[Transaction("dt=2026-11-01", 7)]),
    )
    assert seen_number(checkout.lake, "enriched/mood", "2026-11-01") == 7
    assert seen_number(checkout.lake, "enriched/mood", "2026-11-02") == 0

    dag_run = SimpleNamespace(
        run_id="manual__1",
        run_type=SimpleNamespace(value="manual"),
        partition_key=None,
        data_interval_start=None,
        data_interval_end=None,
        triggering_user_name="someone",
    )
    asked = {"row_sample": None, "prompt_version": None, "do_not_reuse_answers": False, "ask_unknowns_again": False}
    params = {"partition": "2026-11-01", **asked}
    assert tasks.plan("mood", "UTC", ti=None, dag_run=dag_run, params=params)["number"] == 8
