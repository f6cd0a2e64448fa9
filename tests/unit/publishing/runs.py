"""Runs as join_back would leave them: plan, manifest, completions, joined counts and files, written without Spark or an engine."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

import millrace
from millrace import publishing, validation
from millrace.canonical import sha256_hex
from millrace.enrichment import parse_enrichment
from millrace.lake import Lake
from millrace.layout import answers_file, published_prefix, verdict_file
from millrace.plan import Decision, PinnedModel, PinnedPrompt, Plan, PlanRecord, SourceSnapshot
from millrace.records import (
    CheckResult,
    Completion,
    FileRef,
    Joined,
    Manifest,
    Phases,
    ShardEntry,
    SuiteResult,
    Tokens,
    Verdict,
)

DATE = "2026-11-01"
FINGERPRINT = "f" * 64


def spec(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "reviews",
        "source": {"path": "source/reviews", "key": "id", "text": "body", "keep": ["rating"]},
        "prompt": "reviews",
        "answer": {"sentiment": {"labels": ["positive", "negative", "unknown"]}},
        "limits": {"unknown_rate": 0.01, "requests_per_shard": 50},
        "target": {"path": "enriched/reviews"},
    }
    for key, value in changes.items():
        base[key] = base[key] | value if isinstance(value, dict) and key in ("source", "limits", "target") else value
    return base


def make_plan(
    lake: Lake,
    *,
    date: str = DATE,
    prompt_version: int = 1,
    row_sample: int | None = None,
    ask_mode: str = "reuse",
    price: float | None = None,
    columns: dict[str, str] | None = None,
    **changes: Any,
) -> Plan:
    enrichment = parse_enrichment(spec(**changes))
    model = PinnedModel(
        name="small", digest="d" * 64, engine="vllm", location="small/" + "d" * 64, price_per_million_tokens=price
    )
    decision = Decision(
        enrichment=enrichment.name,
        partition=date,
        spec=enrichment.spec(),
        prompt=PinnedPrompt(name="reviews", version=prompt_version, system="Answer.", body="Text: {{ text }}"),
        golden="a" * 64,
        models={"small": model},
        default_model="small",
        max_tokens=20,
        fingerprints={"small": FINGERPRINT},
        accepted_fingerprints=[FINGERPRINT],
        source=SourceSnapshot(
            format="parquet",
            path="source/reviews",
            partition_column="dt",
            delta_version=None,
            files=[],
            columns=columns or {"id": "string", "body": "string", "rating": "int32"},
        ),
        row_sample=row_sample,
        ask_mode=ask_mode,
    )
    plan = Plan.make(decision, PlanRecord(dag_run_id="manual__1", user="ada", params={}))
    plan.save(lake)
    return plan


def suite(*results: CheckResult, asked: int | None = None, rows: int = 0) -> SuiteResult:
    return SuiteResult(
        suite="enriched", rows=rows, asked=len(results) if asked is None else asked, results=list(results), seconds=1.0
    )


def check(outcome: str = "met", severity: str = "block") -> CheckResult:
    return CheckResult(
        name="ExpectColumnValuesToBeUnique", column="id", severity=severity, outcome=outcome, observed="1", why="grain"
    )


def extracted(
    lake: Lake, plan: Plan, outcomes: list[tuple[str, str | None]], *, reused: int = 0, answered: bool = True
) -> Manifest:
    """The manifest of rows with these (status, reason), one shard, and its completion record where `answered`."""
    paths = plan.paths
    never_asked = Counter(reason for status, reason in outcomes if status == "skipped" and reason is not None)
    infer = len(outcomes) - sum(never_asked.values()) - reused
    shards = []
    if infer:
        shard_id = sha256_hex(plan.plan_id)[:16]
        shards.append(
            ShardEntry(
                shard_id=shard_id,
                model="small",
                fingerprint=FINGERPRINT,
                requests=infer,
                est_tokens=infer * 40,
                bytes=infer * 100,
                files=[],
            )
        )
        if answered:
            statuses = Counter(status for status, _ in outcomes if status != "skipped")
            statuses["ok"] -= reused
            done = Completion(
                plan_id=plan.plan_id,
                shard_id=shard_id,
                attempt="r1",
                requests=infer,
                statuses=dict(statuses),
                reasons=dict(
                    Counter(reason for status, reason in outcomes if status in ("unknown", "failed") and reason)
                ),
                answers=FileRef(path=answers_file(FINGERPRINT, shard_id, "r1"), size=1, rows=infer),
                resumed=0,
                tokens=Tokens(prompt=infer * 150, cached=infer * 100, completion=infer * 10),
                phases=Phases(load=30, start=1, full=8, tail=1, total=40),
                engine={"engine": "vllm", "version": "0.32.0", "device": "cpu"},
            )
            lake.write(paths.complete(shard_id), done.dump())
    manifest = Manifest(
        plan_id=plan.plan_id,
        attempt="e1",
        rows=len(outcomes),
        requests=infer + reused,
        reused=reused,
        skipped_rows=dict(never_asked),
        reused_rows=reused,
        infer_rows=infer,
        changed={"truncated": 2},
        row_files=[],
        reused_files=[],
        shards=shards,
        seconds=3.0,
    )
    lake.write(paths.manifest, manifest.dump())
    return manifest


def joined_run(
    lake: Lake,
    plan: Plan,
    outcomes: list[tuple[str, str | None]] | int = 4,
    *,
    reused: int = 0,
    by_model: dict[str, dict[str, int]] | None = None,
    result: SuiteResult | None = None,
    columns: pa.Schema | None = None,
    mark: str = "",
) -> Joined:
    """A run after join_back. `outcomes` is one (status, reason) per row, or the number of `ok` rows; `mark` prefixes the keys."""
    if isinstance(outcomes, int):
        outcomes = [("ok", None)] * outcomes
    paths, attempt = plan.paths, secrets.token_hex(8)
    manifest = extracted(lake, plan, outcomes, reused=reused)
    schema = columns or publishing.target_schema(plan)
    schema = schema.remove(schema.get_field_index("dt"))
    statuses = Counter(status for status, _ in outcomes)
    rows = [
        {
            "id": f"{mark}{index}",
            "rating": index % 5,
            "sentiment": ("positive", "negative")[index % 2] if status == "ok" else None,
            "answer_status": status,
            "answer_reason": reason,
            "answer_meta": {"plan_id": plan.plan_id},
        }
        for index, (status, reason) in enumerate(outcomes)
    ]
    files = []
    prefix = published_prefix(plan.enrichment.target.path, paths.partition, plan.plan_id, attempt)
    for number, part in enumerate([rows[: len(rows) // 2], rows[len(rows) // 2 :]] if rows else []):
        path = f"{prefix}/part-{number}.parquet"
        table = pa.Table.from_pylist([{f.name: row.get(f.name) for f in schema} for row in part], schema=schema)
        files.append(FileRef(path=path, size=lake.write_parquet(path, table), rows=len(part)))
    asked = {status: count for status, count in statuses.items() if status != "skipped"}
    joined = Joined(
        plan_id=plan.plan_id,
        attempt=attempt,
        rows=len(outcomes),
        statuses=dict(statuses),
        reasons=dict(Counter(reason for _, reason in outcomes if reason)),
        by_model=by_model if by_model is not None else {f"small@{plan.decision.prompt.version}": asked},
        reused=reused,
        inferred=len(outcomes) - reused - statuses["skipped"],
        skipped=statuses["skipped"],
        labels={"sentiment": dict(Counter(row["sentiment"] for row in rows if row["sentiment"]))},
        repaired=0,
        files=files,
        suite=result or suite(check(), rows=len(outcomes)),
        seconds=2.0,
    )
    assert manifest.rows == joined.rows
    lake.write(paths.joined, joined.dump())
    return joined


def store_verdict(lake: Lake, key: str, *, rows_per_s: float = 12.0, day: int = 1, passed: bool = True) -> None:
    verdict = Verdict(
        fingerprint=FINGERPRINT,
        key=key,
        model="small",
        passed=passed,
        golden_rows=50,
        usable_rate=0.98 if passed else 0.4,
        accuracy=0.63,
        labelled=50,
        reasons={"not_json": 1},
        latency_ms={"p50": 100, "p90": 200, "p99": 300},
        tokens_per_s=900.0,
        rows_per_s=rows_per_s,
        engine={"engine": "vllm"},
        at=datetime(2026, 11, day, tzinfo=UTC),
    )
    lake.write(verdict_file(FINGERPRINT, key), verdict.dump())


def ready(lake: Lake, plan: Plan, rows: int = 4, **options: Any) -> str:
    """A joined and validated run; returns its path."""
    joined_run(lake, plan, rows, **options)
    validation.validate(lake, plan.paths.root)
    return plan.paths.root


def read_rows(lake: Lake, target: str = "enriched/reviews", version: int | None = None) -> list[dict[str, Any]]:
    """What an analyst sees. `scan` and not `to_pyarrow_table`: that one can abort the interpreter at exit (deltalake 1.6.6)."""
    table = DeltaTable(lake.uri(target), version=version)
    return sorted(pa.table(table.scan()).to_pylist(), key=lambda row: (row["dt"], row["id"]))


# One interpreter imports everything, then forks a process per run before any library has started threads; all are let go at once.
_PUBLISH = """
import os, sys
from millrace.errors import RefusedError
from millrace.lake import Lake
from millrace.publishing import publish
root, runs = sys.argv[1], [run.split("=") for run in sys.argv[2:]]
gate, opener = os.pipe()
children = []
for run, number in runs:
    child = os.fork()
    if child == 0:
        os.close(opener)
        os.read(gate, 1)
        try:
            said, code = str(publish(Lake(root), run, int(number))), 0
        except RefusedError as error:
            said, code = f"refused: {error}", 0
        except BaseException as error:
            said, code = repr(error), 1
        os.write(1, (said + "\\n").encode())
        os._exit(code)
    children.append(child)
os.close(opener)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def publish_together(lake: Lake, runs: list[tuple[str, int]]) -> list[str]:
    """Publish each run in a process of its own, all let go at once; the last words of each."""
    done = subprocess.run(
        [sys.executable, "-c", _PUBLISH, lake.root, *(f"{run}={number}" for run, number in runs)],
        env=os.environ | {"PYTHONPATH": str(Path(millrace.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
