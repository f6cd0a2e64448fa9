"""What vLLM is told for a model on a CPU and on a GPU."""

from __future__ import annotations

import pytest

from millrace.answers import AnswerSchema
from millrace.enrichment import Sampling
from millrace.plan import PinnedModel
from shard_runner.engines.base import EngineSpec
from shard_runner.engines.vllm import COMPILE_FROM, engine_arguments
from tests.runner.build import ANSWER


def spec(model: PinnedModel, requests: int = 0) -> EngineSpec:
    return EngineSpec(model, AnswerSchema.from_dict(ANSWER), "json", Sampling(), max_tokens=16, requests=requests)


@pytest.mark.parametrize(
    ("requests", "compiler", "eager"),
    [(0, "g++", True), (COMPILE_FROM - 1, "g++", True), (COMPILE_FROM, "g++", False), (COMPILE_FROM, None, True)],
)
def test_a_cpu_compiles_the_model_for_large_shards_where_there_is_a_compiler(
    requests: int, compiler: str | None, eager: bool, model: PinnedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard_runner.engines.vllm.shutil.which", lambda name: compiler)
    assert engine_arguments(spec(model, requests), is_cpu=True)["enforce_eager"] is eager


def test_a_gpu_keeps_vllms_own_block_size_and_batch_size(model: PinnedModel) -> None:
    arguments = engine_arguments(spec(model), is_cpu=False)
    assert not arguments.keys() & {"block_size", "enforce_eager", "max_num_seqs"}
    assert arguments["enable_prefix_caching"] is True


def test_a_models_settings_override_the_defaults_and_ours_do_not_reach_vllm(model: PinnedModel) -> None:
    settings = {"block_size": 64, "enforce_eager": False, "kv_cache_gib": 2, "step_timeout_s": 30}
    arguments = engine_arguments(spec(model.model_copy(update={"settings": settings})), is_cpu=True)
    assert (arguments["block_size"], arguments["enforce_eager"], arguments["max_num_seqs"]) == (64, False, 128)
    assert not arguments.keys() & {"kv_cache_gib", "step_timeout_s"}
    assert arguments["max_model_len"] == model.context_tokens
