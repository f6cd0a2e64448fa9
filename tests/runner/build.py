"""Small runs for the runner's tests and benchmarks: plan, manifest and shard files, written as the earlier steps write them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from millrace.canonical import canonical_json, sha256_hex
from millrace.enrichment import parse_enrichment
from millrace.lake import Lake
from millrace.layout import RunPaths, golden_file
from millrace.model_store import folder_digest
from millrace.plan import Decision, PinnedModel, PinnedPrompt, Plan, PlanRecord, SourceSnapshot, fingerprint, request_id
from millrace.prompts import PromptText
from millrace.records import Completion, FileRef, Manifest, ShardEntry
from millrace.schemas import REQUEST

SHARD = "5a4d0001"
BODY = "Sentence: {{ text }}\nLabel:"
ANSWER = {"sentiment": {"labels": ["positive", "neutral", "negative"]}}


@dataclass(frozen=True)
class Run:
    lake: Lake
    plan: Plan
    manifest: Manifest

    @property
    def paths(self) -> RunPaths:
        return self.plan.paths

    @property
    def shard(self) -> ShardEntry:
        return self.manifest.shards[0]

    @property
    def uri(self) -> str:
        return self.lake.uri(self.paths.root)

    def completion(self) -> Completion:
        return Completion.load(self.lake, self.paths.complete(SHARD))

    def answers(self) -> list[dict[str, Any]]:
        """Rows of the file that the completion record names."""
        rows: list[dict[str, Any]] = self.lake.parquet(self.completion().answers.path).read().to_pylist()
        return rows


def store_model(models: Path, name: str = "tiny") -> PinnedModel:
    """A model folder in a store, with its digest; enough for engines that only pretend to load it."""
    draft = models / name / "draft"
    draft.mkdir(parents=True)
    (draft / "config.json").write_text('{"max_position_embeddings": 512}')
    digest = folder_digest(draft)
    draft.rename(models / name / digest)
    return PinnedModel(name=name, digest=digest, engine="vllm", location=f"{name}/{digest}", context_tokens=512)


def build_run(
    lake: Lake,
    texts: list[str] | list[dict[str, str | None]],
    model: PinnedModel,
    *,
    answer: dict[str, Any] | None = None,
    form: str = "json",
    system: str = "You label sentences.",
    body: str = BODY,
    limits: dict[str, Any] | None = None,
    preflight: dict[str, Any] | None = None,
    golden: list[dict[str, Any]] | None = None,
    max_tokens: int = 32,
    row_group: int = 1024,
) -> Run:
    """A run of one shard over `texts`, each distinct; rows may be mappings of placeholder values."""
    inputs: list[dict[str, str | None]] = [{"text": t} if isinstance(t, str) else t for t in texts]
    keep = sorted({name for values in inputs for name in values} - {"text"})
    enrichment = parse_enrichment(
        {
            "name": "tiny",
            "source": {"path": "source/tiny", "key": "id", "text": "text", "keep": keep},
            "prompt": "tiny",
            "answer": answer or ANSWER,
            "form": form,
            "limits": limits or {},
            "preflight": preflight or {},
            "target": {"path": "enriched/tiny"},
        }
    )
    golden_rows = golden or []
    golden_bytes = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in golden_rows).encode()
    golden_sha = sha256_hex(golden_bytes)
    lake.write(golden_file(golden_sha), golden_bytes)
    prompt = PromptText.of(system, body)
    print_ = fingerprint(enrichment, prompt, model, max_tokens)
    decision = Decision(
        enrichment="tiny",
        partition="2026-03-02",
        spec=enrichment.spec(),
        prompt=PinnedPrompt(name="tiny", version=1, system=prompt.system, body=prompt.body),
        golden=golden_sha,
        models={model.name: model},
        default_model=model.name,
        max_tokens=max_tokens,
        fingerprints={model.name: print_},
        accepted_fingerprints=[print_],
        source=SourceSnapshot(
            format="parquet", path="source/tiny", partition_column="dt", delta_version=None, files=[], columns={}
        ),
        row_sample=None,
        ask_mode="reuse",
    )
    plan = Plan.make(decision, PlanRecord(dag_run_id="test", user="test", params={}))
    plan.save(lake)
    rows = [(request_id(print_, values), canonical_json(values), len(canonical_json(values)) // 3) for values in inputs]
    path = f"{plan.paths.extract('x1')}/shards/part-0.parquet"
    columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, REQUEST, strict=True)], schema=REQUEST)
    with lake.parquet_writer(path, REQUEST) as writer:
        writer.write_table(table, row_group_size=row_group)
    size = lake.size(path)
    assert size is not None
    shard = ShardEntry(
        shard_id=SHARD,
        model=model.name,
        fingerprint=print_,
        requests=len(rows),
        est_tokens=sum(row[2] for row in rows),
        bytes=size,
        files=[FileRef(path=path, size=size, rows=len(rows))],
    )
    manifest = Manifest(
        plan_id=plan.plan_id,
        attempt="x1",
        rows=len(rows),
        requests=len(rows),
        reused=0,
        skipped_rows={},
        reused_rows=0,
        infer_rows=len(rows),
        changed={},
        row_files=[],
        reused_files=[],
        shards=[shard],
        seconds=0.0,
    )
    lake.create(plan.paths.manifest, manifest.dump())
    return Run(lake, plan, manifest)
