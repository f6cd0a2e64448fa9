"""The real engine: answers, confidence, and what is left of it when its runner ends in one way or another."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow.parquet as pq
import pytest

from millrace.answers import AnswerSchema
from millrace.enrichment import Sampling
from millrace.errors import ExitCode
from millrace.lake import Lake
from millrace.plan import PinnedModel
from millrace.records import Outcome
from shard_runner.engines.base import Ask, EngineDead, EngineSpec
from shard_runner.engines.vllm import VllmEngine, _params
from tests.runner.build import SHARD, Run, build_run
from tests.runner_vllm.conftest import ROOT, Runner

ANSWER = {
    "sentiment": {"labels": ["positive", "neutral", "negative"]},
    "topic": {"labels": ["quality", "price", "delivery", "service", "other"]},
}
SYSTEM = """Label each sentence of a product review.
Sentence: works great and feels solid.
{"sentiment":"positive","topic":"quality"}
Sentence: the seller never answered my mails.
{"sentiment":"negative","topic":"service"}"""
COMPACT_SYSTEM = SYSTEM.replace('{"sentiment":"positive","topic":"quality"}', "positive|quality").replace(
    '{"sentiment":"negative","topic":"service"}', "negative|service"
)

Start = Callable[[Run, str], Runner]


def sentences(rows: int) -> list[str]:
    table = pq.read_table(ROOT / "data" / "amazon_review_sentences.parquet", columns=["comment_text"])
    return list(dict.fromkeys(table["comment_text"].to_pylist()))[:rows]


def assert_labels(run: Run, rows: int) -> None:
    answers = run.answers()
    assert len({row["request_id"] for row in answers}) == len(answers) == rows
    for row in answers:
        assert row["status"] == "ok"
        values = json.loads(row["values"])
        assert values["sentiment"] in ANSWER["sentiment"]["labels"]
        assert values["topic"] in ANSWER["topic"]["labels"]
        assert not row["repaired"]


def ended(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_runner_leaves_no_engine_behind_and_its_successor_goes_on(
    tmp_path: Path, demo_model: PinnedModel, start: Start
) -> None:
    run = build_run(Lake(str(tmp_path / "lake")), sentences(400), demo_model, answer=ANSWER, system=SYSTEM)
    first = start(run, "first")
    first.until(first.first_part)
    engines = first.below()
    assert engines
    first.process.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert ended(engines)

    second = start(run, "second")
    assert second.wait() == ExitCode.COMPLETE, second.log.read_text()
    assert_labels(run, 400)
    done = run.completion()
    assert 256 <= done.resumed < 400
    assert done.tokens.cached > 0.3 * done.tokens.prompt  # the static part of the prompt, found in the prefix cache
    assert done.engine["block_size"] == "32"
    assert done.engine["context_tokens"] == str(demo_model.context_tokens)
    assert done.phases.full > 0
    assert "Sentence" not in second.log.read_text()


@pytest.mark.parametrize(
    ("settings", "killed"), [({}, "EngineCore"), ({"distributed_executor_backend": "mp"}, "Worker")]
)
def test_an_engine_whose_process_is_killed_is_rebuilt(
    settings: dict[str, str], killed: str, tmp_path: Path, demo_model: PinnedModel, start: Start
) -> None:
    """On few cores the engine is one process, else its worker is another."""
    model = demo_model.model_copy(update={"settings": settings})
    run = build_run(Lake(str(tmp_path / "lake")), sentences(400), model, answer=ANSWER, system=SYSTEM)
    runner = start(run, "only")
    runner.until(runner.first_part)
    engine = next(process for process in runner.below() if killed in process.name())
    engine.send_signal(signal.SIGKILL)
    assert runner.wait() == ExitCode.COMPLETE, runner.log.read_text()
    assert "the engine died" in runner.log.read_text()
    assert_labels(run, 400)


def test_a_compiled_model_is_compiled_once_and_loaded_by_the_next_runner(
    tmp_path: Path, demo_model: PinnedModel, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    model = demo_model.model_copy(update={"settings": {"enforce_eager": False}})
    run = build_run(Lake(str(tmp_path / "lake")), sentences(20), model, answer=ANSWER, system=SYSTEM)
    kept = []
    for attempt in ("compiles", "loads"):
        runner = start(run, attempt)
        assert runner.wait() == ExitCode.COMPLETE, runner.log.read_text()
        assert_labels(run, 20)
        (model_file,) = (tmp_path / "cache").glob("torch_compile_cache/torch_aot_compile/*/rank_0_0/model")
        kept.append(model_file.stat().st_mtime_ns)
        for file in run.lake.list(f"{run.paths.root}/shards"):
            run.lake.delete([file.path])
    assert kept[0] == kept[1], "vLLM compiled again: it could not read what it had written"


def test_the_engine_writes_the_fields_in_the_order_of_the_enrichment(demo_model: PinnedModel) -> None:
    schema = AnswerSchema.from_dict({"zeal": {"labels": ["yes", "no"]}, "anger": {"labels": ["yes", "no"]}})
    params = _params(EngineSpec(demo_model, schema, "json", Sampling(), max_tokens=16))
    assert list(json.loads(params.structured_outputs.json)["properties"]) == ["zeal", "anger"]


def test_compact_answers_carry_the_confidence_of_every_label(
    tmp_path: Path, demo_model: PinnedModel, start: Start
) -> None:
    limits = {"confidence_floor": 0.0}
    run = build_run(
        Lake(str(tmp_path / "lake")), sentences(40), demo_model, answer=ANSWER, system=COMPACT_SYSTEM, form="compact", limits=limits
    )  # fmt: skip
    runner = start(run, "only")
    assert runner.wait() == ExitCode.COMPLETE, runner.log.read_text()
    assert_labels(run, 40)
    for row in run.answers():
        assert row["raw_text"].count("|") == 1
        assert row["completion_tokens"] <= 8
        confidence = json.loads(row["confidence"])
        assert set(confidence) == set(ANSWER)
        assert all(0 < value <= 1 for value in confidence.values())
    assert len({row["confidence"] for row in run.answers()}) > 10


def test_sigterm_while_the_model_loads_exits_75_and_leaves_nothing_behind(
    tmp_path: Path, demo_model: PinnedModel, start: Start
) -> None:
    run = build_run(Lake(str(tmp_path / "lake")), sentences(10), demo_model, answer=ANSWER, system=SYSTEM)
    runner = start(run, "only")
    runner.until(lambda: any("EngineCore" in p.name() or "spawn" in " ".join(p.cmdline()) for p in runner.below()))
    engines = runner.below()
    os.kill(runner.process.pid, signal.SIGTERM)
    assert runner.wait(60) == ExitCode.STOPPED, runner.log.read_text()
    assert ended(engines)
    assert Outcome.load(run.lake, f"{run.paths.shard_attempt(SHARD, 'only')}/outcome.json").exit_code == 75


@pytest.mark.parametrize("settings", [{"block_syze": 32}, {"max_num_seqs": -1}])
def test_a_setting_that_vllm_does_not_know_is_a_configuration_error(
    settings: dict[str, int], tmp_path: Path, demo_model: PinnedModel, start: Start
) -> None:
    model = demo_model.model_copy(update={"settings": settings})
    run = build_run(Lake(str(tmp_path / "lake")), sentences(5), model, answer=ANSWER, system=SYSTEM)
    runner = start(run, "only")
    assert runner.wait() == ExitCode.CONFIG, runner.log.read_text()
    assert next(iter(settings)) in runner.log.read_text()


def test_an_engine_that_forgets_a_request_is_taken_for_dead(
    demo_model: PinnedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM says that nothing is left to do, and the request never came back."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=512),
        model_config=SimpleNamespace(dtype="torch.bfloat16", max_model_len=512, enforce_eager=True),
        cache_config=SimpleNamespace(block_size=32, enable_prefix_caching=True),
    )
    core = SimpleNamespace(
        vllm_config=config,
        add_request=lambda *args: None,
        abort_request=lambda ids: None,
        has_unfinished_requests=lambda: False,
    )
    spec = EngineSpec(demo_model, AnswerSchema.from_dict(ANSWER), "json", Sampling(), max_tokens=16)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    engine = VllmEngine(spec, core, tokenizer=None)
    assert engine.poll(0.1) == []
    engine.submit(Ask("one", "", "text", [1, 2, 3], 16))
    with pytest.raises(EngineDead, match="lost 1 request"):
        engine.poll(0.1)
    engine.abort()
    assert engine.poll(0.1) == []
