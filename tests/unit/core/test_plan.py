"""The plan's id follows from its decision alone; the fingerprint from what the engine is asked alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.canonical import content_hash
from millrace.enrichment import Enrichment, parse_enrichment
from millrace.errors import ConfigError, IncompleteError
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.plan import (
    Decision,
    PinnedModel,
    PinnedPrompt,
    Plan,
    PlanRecord,
    SourceSnapshot,
    fingerprint,
    reading_hash,
    shard_count,
)
from millrace.proof import prove_shards
from millrace.records import Completion, FileRef, Manifest, Phases, ShardEntry, Tokens

MODEL = PinnedModel(name="m", digest="d" * 64, engine="vllm", location="m/" + "d" * 64)


def enrichment(**changes: Any) -> Enrichment:
    base: dict[str, Any] = {
        "name": "mood",
        "source": {"path": "source/reviews", "key": "id", "text": "body"},
        "prompt": "mood",
        "answer": {"sentiment": {"labels": ["good", "bad"], "aliases": {"great": "good"}}},
        "target": {"path": "enriched/mood"},
    }
    return parse_enrichment(base | changes)


def plan(user: str = "a", **changes: Any) -> Plan:
    e = enrichment()
    prompt = PinnedPrompt(name="mood", version=1, system="s", body="{{ text }}")
    decision = {
        "enrichment": "mood",
        "partition": "2026-11-01",
        "spec": e.spec(),
        "prompt": prompt,
        "golden": "0" * 64,
        "models": {"m": MODEL},
        "default_model": "m",
        "max_tokens": 16,
        "fingerprints": {"m": fingerprint(e, prompt.text, MODEL, 16)},
        "accepted_fingerprints": [fingerprint(e, prompt.text, MODEL, 16)],
        "source": SourceSnapshot(
            format="parquet", path="source/reviews", partition_column="dt", delta_version=None, files=[], columns={}
        ),
        "row_sample": None,
        "ask_mode": "reuse",
    }
    return Plan.make(Decision(**(decision | changes)), PlanRecord(dag_run_id="r", user=user, params={}))


def test_who_and_when_do_not_change_the_plan_but_decisions_do() -> None:
    assert plan("a").plan_id == plan("b").plan_id
    assert plan().plan_id != plan(row_sample=10).plan_id


def test_a_plan_is_written_once_and_an_edited_one_is_refused(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    first = plan("a")
    assert first.save(lake) is True
    assert plan("b").save(lake) is False
    assert Plan.read(lake, first.paths.root).record.user == "a"
    edited = lake.read(first.paths.plan).replace(b'"max_tokens": 16', b'"max_tokens": 17')
    lake.write(first.paths.plan, edited)
    with pytest.raises(ConfigError, match="was edited"):
        Plan.read(lake, first.paths.root)


def test_a_plan_from_before_a_setting_existed_still_reads(tmp_path: Path) -> None:
    lake, made = Lake(str(tmp_path)), plan()
    data = json.loads(made.dump())
    del data["decision"]["base_plan"], data["decision"]["models"]["m"]["quantization"]
    older = content_hash(data["decision"])
    paths = RunPaths("mood", "2026-11-01", older)
    lake.write(paths.plan, json.dumps(data | {"plan_id": older}).encode())
    assert Plan.read(lake, paths.root).decision == made.decision


@pytest.mark.parametrize("damage", [lambda data: data[:300], lambda data: data.replace(b'"system":', b'"sistem":')])
def test_a_damaged_plan_is_an_error_that_quotes_no_prompt(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    lake, made = Lake(str(tmp_path)), plan()
    made.save(lake)
    lake.write(made.paths.plan, damage(lake.read(made.paths.plan)))
    with pytest.raises(ConfigError, match="is not a record of this Millrace") as caught:
        Plan.read(lake, made.paths)
    assert made.decision.prompt.body not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__, (
        "pydantic's own message quotes its input"
    )


def test_the_fingerprint_follows_what_is_asked_and_the_reading_follows_how_it_is_read() -> None:
    base = enrichment()
    prompt = PinnedPrompt(name="p", version=1, system="s", body="{{ text }}").text
    aliases = enrichment(answer={"sentiment": {"labels": ["good", "bad"], "aliases": {"fine": "good"}}})
    assert fingerprint(base, prompt, MODEL, 16) == fingerprint(aliases, prompt, MODEL, 16)
    assert reading_hash(base) != reading_hash(aliases)
    for changed in (
        fingerprint(enrichment(answer={"sentiment": {"labels": ["good", "bad", "mixed"]}}), prompt, MODEL, 16),
        fingerprint(base, prompt, MODEL.model_copy(update={"digest": "e" * 64}), 16),
        fingerprint(base, prompt, MODEL, 32),
        fingerprint(enrichment(limits={"max_text_chars": 100}), prompt, MODEL, 16),
        fingerprint(enrichment(form="compact"), prompt, MODEL, 16),
    ):
        assert changed != fingerprint(base, prompt, MODEL, 16)
    faster = MODEL.model_copy(update={"settings": {"block_size": 32}, "chars_per_token": 4.0})
    assert fingerprint(base, prompt, faster, 16) == fingerprint(base, prompt, MODEL, 16)


def test_a_setting_of_an_endpoint_is_in_the_fingerprint_where_it_changes_what_is_asked() -> None:
    prompt = PinnedPrompt(name="p", version=1, system="s", body="{{ text }}").text

    def asked(**settings: Any) -> str:
        model = MODEL.model_copy(
            update={"engine": "openai", "endpoint": "http://127.0.0.1:8000/v1", "settings": settings}
        )
        return fingerprint(enrichment(), prompt, model, 16)

    changed = [
        asked(structured=False),
        asked(system_role=False),
        asked(extra_body={"seed": None}),
        asked(extra_body={"top_k": 5}),
        asked(server="vllm"),
    ]
    assert len({asked(), *changed}) == 1 + len(changed)
    for same in (
        asked(structured=True, system_role=True, extra_body={}, server="openai"),
        asked(max_concurrency=4, max_tries=2, api_key_env="KEY", max_tokens_field="max_completion_tokens"),
    ):
        assert same == asked()


@pytest.mark.parametrize(("requests", "shards"), [(0, 0), (1, 1), (20_000, 1), (20_001, 2), (100_000_000, 1000)])
def test_shards_grow_rather_than_exceed_what_airflow_maps(requests: int, shards: int) -> None:
    assert shard_count(requests, 20_000, 1000) == shards


def test_proof_names_every_missing_and_disagreeing_shard(tmp_path: Path) -> None:
    lake, paths = Lake(str(tmp_path)), plan().paths
    manifest = Manifest(
        plan_id=paths.plan_id, attempt="a", rows=9, requests=9, reused=0, skipped_rows={}, reused_rows=0, infer_rows=9, changed={},
        row_files=[], reused_files=[], seconds=0,
        shards=[
            ShardEntry(shard_id=s, model="m", fingerprint="f", requests=3, est_tokens=1, bytes=1, files=[])
            for s in ("s1", "s2", "s3")
        ],
    )  # fmt: skip

    def complete(shard_id: str, rows: int, size: int) -> None:
        lake.write(f"answers/{shard_id}", b"x" * 5)
        record = Completion(
            plan_id=paths.plan_id, shard_id=shard_id, attempt="a", requests=3, statuses={"ok": rows}, reasons={},
            answers=FileRef(path=f"answers/{shard_id}", size=size, rows=rows), resumed=0, tokens=Tokens(), phases=Phases(), engine={},
        )  # fmt: skip
        lake.write(paths.complete(shard_id), record.dump())

    complete("s1", 3, 5)
    complete("s2", 2, 5)
    with pytest.raises(IncompleteError, match=r"2 of 3 shards(.|\n)*shard s2(.|\n)*shard s3"):
        prove_shards(lake, paths, manifest)
    complete("s2", 3, 999)
    complete("s3", 3, 5)
    with pytest.raises(IncompleteError, match="999 bytes"):
        prove_shards(lake, paths, manifest)
    complete("s2", 3, 5)
    assert [c.shard_id for c in prove_shards(lake, paths, manifest)] == ["s1", "s2", "s3"]
