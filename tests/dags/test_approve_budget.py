"""approve_budget passes at once or waits for a person; what the person said is stored with the plan."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.standard.exceptions import HITLRejectException, HITLTimeoutError

from millrace.airflow.operators import ApproveBudget
from millrace.config_db import ConfigDb
from millrace.errors import RefusedError
from millrace.lake import Lake
from millrace.plan import Plan
from millrace.records import Approval, Manifest, ShardEntry
from tests.unit.publishing.runs import make_plan


class Bench:
    """A run whose shard would take 1,000 prompt tokens, and the operator that decides about it."""

    def __init__(self, lake: Lake, url: str, **spec: Any) -> None:
        self.plan: Plan = make_plan(lake, name=f"budget_{secrets.token_hex(4)}", **spec)
        self.plan.save(lake)
        shard = ShardEntry(
            shard_id="a" * 16, model="small", fingerprint="f" * 64, requests=10, est_tokens=1000, bytes=1, files=[]
        )
        manifest = Manifest(
            plan_id=self.plan.plan_id, attempt="x", rows=10, requests=10, reused=0, skipped_rows={}, reused_rows=0,
            infer_rows=10, changed={}, row_files=[], reused_files=[], shards=[shard], seconds=1,
        )  # fmt: skip
        lake.write(self.plan.paths.manifest, manifest.dump())
        self.lake = lake
        self.operator = ApproveBudget(task_id="approve_budget", enrichment=self.plan.decision.enrichment)
        ref = {"run": self.plan.paths.root, "number": 1}
        self.context = {
            "ti": SimpleNamespace(xcom_pull=lambda task_ids: ref),
            "dag_run": SimpleNamespace(run_id="manual__1"),
        }
        paths = self.plan.paths
        ConfigDb(url).register_run(paths.enrichment, paths.partition, "manual__1", lambda _: False)

    def answer(self, option: str) -> None:
        event = {
            "chosen_options": [option],
            "params_input": {},
            "responded_at": datetime.now(UTC),
            "responded_by_user": {"id": "7", "name": "ada"},
        }
        self.operator.execute_complete(self.context, event)

    @property
    def approval(self) -> Approval | None:
        return Approval.load_or_none(self.lake, self.plan.paths.approval)


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_db_url: str) -> Lake:
    monkeypatch.setenv("MILLRACE_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("MILLRACE_CONFIG_DB", config_db_url)
    return Lake(str(tmp_path / "lake"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Questions that reached a person."""
    found: list[str] = []
    monkeypatch.setattr(
        "airflow.providers.standard.operators.hitl.ApprovalOperator.execute",
        lambda self, context: found.append(self.subject),
    )
    return found


def test_a_run_within_its_budget_asks_nobody(lake: Lake, config_db_url: str, asked: list[str]) -> None:
    bench = Bench(lake, config_db_url, limits={"budget_tokens": 100_000})
    bench.operator.execute(bench.context)
    assert asked == []


def test_a_run_over_its_budget_fails_where_nobody_is_to_be_asked(
    lake: Lake, config_db_url: str, asked: list[str]
) -> None:
    bench = Bench(lake, config_db_url, limits={"budget_tokens": 10})
    with pytest.raises(RefusedError, match="budget"):
        bench.operator.execute(bench.context)
    assert asked == []


def test_an_approval_is_asked_once_and_stored(lake: Lake, config_db_url: str, asked: list[str]) -> None:
    bench = Bench(lake, config_db_url, limits={"budget_tokens": 10}, over_budget="wait")
    bench.operator.execute(bench.context)
    assert len(asked) == 1
    bench.answer("Approve")
    assert bench.approval and bench.approval.approved and bench.approval.by == "ada"
    bench.operator.execute(bench.context)
    assert len(asked) == 1


def test_a_rejection_fails_the_task_and_approves_nothing(lake: Lake, config_db_url: str, asked: list[str]) -> None:
    bench = Bench(lake, config_db_url, limits={"budget_tokens": 10}, over_budget="wait")
    with pytest.raises(HITLRejectException):
        bench.answer("Reject")
    assert bench.approval is None


def test_no_answer_in_time_fails_the_task(lake: Lake, config_db_url: str, asked: list[str]) -> None:
    bench = Bench(lake, config_db_url, limits={"budget_tokens": 10}, over_budget="wait")
    with pytest.raises(HITLTimeoutError):
        bench.operator.execute_complete(bench.context, {"error": "no answer", "error_type": "timeout"})
    assert bench.approval is None
