"""What vLLM is told for a model on a CPU and on a GPU."""

from __future__ import annotations

import pytest

from millrace.answers import AnswerSchema
from millrace.enrichment import Sampling
from millrace.plan import PinnedModel
from shard_runner.engines.base import EngineSpec
from shard_runner.engines.vllm import FEW_CORES, engine_arguments, prepare_cpu
from tests.runner.build import ANSWER


def spec(model: PinnedModel) -> EngineSpec:
    return EngineSpec(model, AnswerSchema.from_dict(ANSWER), "json", Sampling(), max_tokens=16)


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


@pytest.mark.parametrize(
    ("cores", "settings", "every_core"),
    [(1, {}, True), (FEW_CORES, {}, True), (FEW_CORES + 1, {}, False), (2, {"tensor_parallel_size": 2}, False)],
)
def test_on_few_cores_the_engine_takes_all_of_them_in_one_process(
    cores: int, settings: dict[str, int], every_core: bool, model: PinnedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard_runner.engines.vllm.os.sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr("shard_runner.engines.vllm.os.environ", environment := {"KMP_BLOCKTIME": "5"})
    asked = spec(model.model_copy(update={"settings": settings}))
    assert ("distributed_executor_backend" in engine_arguments(asked, is_cpu=True)) is every_core
    assert "distributed_executor_backend" not in engine_arguments(asked, is_cpu=False)
    prepare_cpu(asked)
    assert environment.get("OMP_NUM_THREADS") == (str(cores) if every_core else None)
    assert environment["KMP_BLOCKTIME"] == "5"  # what the deployment has set stands


def test_threads_that_the_deployment_has_set_are_the_cores(model: PinnedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(FEW_CORES + 1))
    assert "distributed_executor_backend" not in engine_arguments(spec(model), is_cpu=True)
