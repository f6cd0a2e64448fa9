"""A small checkout with one enrichment, its prompt, a model and a source table: everything a plan is made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from millrace import model_store
from millrace.config_db import ConfigDb
from millrace.lake import Lake
from millrace.plan import Plan
from millrace.planning import PlanParams, make_plan
from millrace.prompt_push import push_prompts
from millrace.records import Manifest
from millrace.settings import Settings

SPEC: dict[str, Any] = {
    "name": "mood",
    "source": {"path": "source/reviews", "key": "id", "text": "body", "keep": ["stars"]},
    "prompt": "mood",
    "model": "m",
    "answer": {"mood": {"labels": ["good", "bad"], "aliases": {"fine": "good"}}},
    "target": {"path": "enriched/mood"},
}
ROWS = pa.table({"id": ["1", "2"], "body": ["nice", "awful"], "stars": pa.array([5, 1], pa.int32())})


@dataclass(frozen=True)
class Checkout:
    settings: Settings
    lake: Lake
    db: ConfigDb

    @property
    def home(self) -> Path:
        return self.settings.home

    def write_enrichment(self, **changes: Any) -> None:
        spec = SPEC | changes
        (self.settings.enrichments / f"{spec['name']}.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))

    def write_prompt(self, body: str, system: str = "Label the mood.") -> None:
        folder = self.settings.prompts / "mood"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "system.jinja").write_text(system)
        (folder / "body.jinja").write_text(body)
        if not (folder / "golden.jsonl").exists():
            self.write_golden([{"text": "lovely", "stars": "5", "expected": {"mood": "good"}}])

    def write_golden(self, rows: list[Any]) -> None:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (self.settings.prompts / "mood" / "golden.jsonl").write_text(lines, encoding="utf-8")

    def push(self) -> int:
        return push_prompts(self.db, self.settings, author="test", activate=True)["mood"]

    def write_source(self, table: pa.Table = ROWS, name: str = "part-0.parquet", partition: str = "2026-11-01") -> Path:
        path = Path(self.settings.lake) / "source" / "reviews" / f"dt={partition}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
        return path

    def finish(self, plan: Plan) -> Plan:
        """A plan whose every answer was reused: its manifest has no shards."""
        manifest = Manifest(
            plan_id=plan.plan_id,
            attempt="e1",
            rows=0,
            requests=0,
            reused=0,
            skipped_rows={},
            reused_rows=0,
            infer_rows=0,
            changed={},
            row_files=[],
            reused_files=[],
            shards=[],
            seconds=1.0,
        )
        self.lake.write(plan.paths.manifest, manifest.dump())
        return plan

    def plan(self, partition: str = "2026-11-01", dag_run_id: str = "manual__1", **params: Any) -> Plan:
        return make_plan(
            lake=self.lake,
            db=self.db,
            settings=self.settings,
            enrichment_name="mood",
            partition=partition,
            dag_run_id=dag_run_id,
            user="someone",
            params=PlanParams(**params),
        )


@pytest.fixture
def checkout(tmp_path: Path, postgres: Callable[[], str]) -> Checkout:
    home = tmp_path / "home"
    settings = replace(
        Settings.from_env({"MILLRACE_HOME": str(home), "MILLRACE_CONFIG_DB": postgres()}),
        models=str(tmp_path / "models"),
    )
    settings.enrichments.mkdir(parents=True)
    made = Checkout(settings, Lake(settings.lake), ConfigDb(settings.require_config_db()))
    made.db.migrate()
    made.write_enrichment()
    made.write_prompt("Text: {{ text }}")
    made.push()
    made.write_source()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 8192}')
    model_store.register(made.db, model_store.add_model(str(model), "m", settings.models))
    return made
