"""One Spark for all of these tests, and a small world for the steps: a lake, a source, a plan, a stand-in for the runner."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from millrace.canonical import canonical_json
from millrace.enrichment import Enrichment
from millrace.lake import Lake
from millrace.layout import RunPaths, answers_file, new_attempt
from millrace.plan import Decision, PinnedModel, PinnedPrompt, Plan, PlanRecord, SourceFile, SourceSnapshot, fingerprint
from millrace.records import Completion, FileRef, Manifest, Phases, ShardEntry, Tokens
from millrace.schemas import ANSWER
from millrace.spark.session import start_session

DATE = "2026-11-01"
SOURCE = f"source/reviews/dt={DATE}"


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    os.environ.setdefault("MILLRACE_SPARK_DRIVER_MEMORY", "1g")
    session = start_session("millrace tests")
    yield session
    session.stop()


@dataclass
class World:
    """A lake with one enrichment whose spec a test may change."""

    lake: Lake
    spec: dict[str, Any]
    system: str = "Label the review."
    body: str = "Rated {{ rating }}: {{ text }}"

    def write_source(self, table: pa.Table | list[dict[str, Any]], files: int = 1, folder: str = SOURCE) -> None:
        """Replace the partition by these rows, dealt out over some files."""
        table = table if isinstance(table, pa.Table) else pa.Table.from_pylist(table, self.source_schema)
        self.lake.delete([file.path for file in self.lake.list(folder)])
        for index in range(files):
            self.lake.write_parquet(
                f"{folder}/part-{index:05d}.parquet",
                table.take(pa.array(range(index, table.num_rows, files), pa.int64())),
            )

    source_schema = pa.schema([("id", pa.string()), ("comment", pa.string()), ("rating", pa.float64())])

    def plan(self, **changes: Any) -> Plan:
        """A saved plan over the partition as it is now; `changes` replace fields of the decision."""
        enrichment = Enrichment.model_validate(self.spec)
        prompt = PinnedPrompt(
            name="reviews", version=changes.pop("prompt_version", 1), system=self.system, body=self.body
        )
        model = PinnedModel(name="tiny", digest="d1", engine="vllm", location="tiny/d1")
        current = fingerprint(enrichment, prompt.text, model, 32)
        decision: dict[str, Any] = {
            "enrichment": "reviews",
            "partition": DATE,
            "spec": enrichment.spec(),
            "prompt": prompt,
            "golden": "g",
            "models": {"tiny": model},
            "default_model": "tiny",
            "max_tokens": 32,
            "fingerprints": {"tiny": current},
            "accepted_fingerprints": [current],
            "source": self._snapshot(),
            "row_sample": None,
            "ask_mode": "reuse",
        }
        made = Plan.make(
            Decision.model_validate(decision | changes), PlanRecord(dag_run_id="manual__1", user="test", params={})
        )
        made.save(self.lake)
        return made

    def _snapshot(self) -> SourceSnapshot:
        metas = sorted((m for batch in obstore.list(self.lake.store, SOURCE) for m in batch), key=lambda m: m["path"])
        files = [
            SourceFile(path=self.lake.uri(m["path"]), size=m["size"], version=str(m["e_tag"]).strip('"')) for m in metas
        ]
        schema = pq.read_schema(metas[0]["path"], filesystem=self.lake.fs) if metas else self.source_schema
        return SourceSnapshot(
            format="parquet",
            path=self.lake.uri("source/reviews"),
            partition_column="dt",
            delta_version=None,
            files=files,
            columns={f.name: str(f.type) for f in schema},
        )

    def manifest(self, plan: Plan) -> Manifest:
        return Manifest.load(self.lake, plan.paths.manifest)

    def read(self, files: list[FileRef]) -> list[dict[str, Any]]:
        return [row for file in files for row in pq.read_table(file.path, filesystem=self.lake.fs).to_pylist()]

    def requests(self, plan: Plan) -> list[dict[str, Any]]:
        return self.read([file for shard in self.manifest(plan).shards for file in shard.files])

    def answer(self, plan: Plan, overrides: dict[str, dict[str, Any]] | None = None) -> None:
        """Answer and complete every shard: `positive`, or what `overrides` says for a text."""
        for shard in self.manifest(plan).shards:
            rows = [self._answer(plan, request, overrides or {}) for request in self.read(shard.files)]
            complete(self.lake, plan.paths, plan, shard, rows)

    def _answer(self, plan: Plan, request: dict[str, Any], overrides: dict[str, dict[str, Any]]) -> dict[str, Any]:
        text = next((v for t, v in overrides.items() if t in request["input"]), {})
        raw = canonical_json({"sentiment": "positive"})
        return {
            "request_id": request["request_id"],
            "fingerprint": plan.decision.fingerprints["tiny"],
            "status": "ok",
            "reason": None,
            "values": raw,
            "raw_text": raw,
            "reading": plan.reading,
            "repaired": False,
            "finish_reason": "stop",
            "confidence": None,
            "prompt_tokens": 20,
            "cached_tokens": 0,
            "completion_tokens": 5,
            "asked": 1,
            "latency_ms": 3,
            "model": "tiny",
            "revision": "d1",
            "prompt_version": plan.decision.prompt.version,
            "answered_at": datetime.now(UTC),
            "plan_id": plan.plan_id,
        } | text


def complete(lake: Lake, paths: RunPaths, plan: Plan, shard: ShardEntry, rows: list[dict[str, Any]]) -> None:
    """Store a shard's answers and its completion record, as the runner does at its end."""
    attempt = new_attempt()
    path = answers_file(shard.fingerprint, shard.shard_id, attempt)
    size = lake.write_parquet(path, pa.Table.from_pylist(rows, ANSWER))
    statuses: dict[str, int] = {}
    for row in rows:
        statuses[row["status"]] = statuses.get(row["status"], 0) + 1
    done = Completion(
        plan_id=plan.plan_id,
        shard_id=shard.shard_id,
        attempt=attempt,
        requests=len(rows),
        statuses=statuses,
        reasons={},
        answers=FileRef(path=path, size=size, rows=len(rows)),
        resumed=0,
        tokens=Tokens(),
        phases=Phases(),
        engine={},
    )
    lake.create(paths.complete(shard.shard_id), done.dump())


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    expectations = tmp_path / "home" / "expectations" / "reviews"
    expectations.mkdir(parents=True)
    for kind in ("source", "enriched"):
        (expectations / f"{kind}.json").write_text(MINIMAL_SUITE)
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    return World(
        Lake(str(tmp_path / "lake")),
        {
            "name": "reviews",
            "source": {"path": "source/reviews", "key": "id", "text": "comment", "keep": ["rating"]},
            "prompt": "reviews",
            "answer": {"sentiment": {"labels": ["positive", "negative"]}},
            "limits": {"requests_per_shard": 10, "max_text_chars": 200},
            "target": {"path": "enriched/reviews"},
        },
    )


MINIMAL_SUITE = """{"table": "reviews", "grain": "one row per id", "checks": [
  {"name": "id is unique", "type": "expect_column_values_to_be_unique", "kwargs": {"column": "id"}, "severity": "block",
   "why": "Doubled rows double every count.", "opens": "column id"}]}"""


def reviews(count: int, distinct: int | None = None) -> list[dict[str, Any]]:
    """Rows whose texts repeat after `distinct` of them."""
    return [{"id": f"r{i}", "comment": f"text {i % (distinct or count)}", "rating": 1.5} for i in range(count)]
