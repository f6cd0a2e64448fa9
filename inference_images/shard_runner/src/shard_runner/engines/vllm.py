"""vLLM in this process's care: requests enter its queue as others leave, with the answer's grammar enforced while it writes.

What is set, and why (a model's `settings` override any of it, by vLLM's own names; ours are `kv_cache_gib`, for CPUs, and
`step_timeout_s`, for the watchdog):

| setting | CPU | GPU |
| --- | --- | --- |
| block_size | 32: the smallest the CPU backend takes; its default of 128 caches no shared prefix shorter than that | vLLM's |
| enforce_eager | on, until compiling pays: it costs a minute once and saves a fifth of each answer (`compiling.py`) | off |
| threads | up to 4 cores: all, in one process. vLLM keeps one for its scheduler, half of a small machine | vLLM's |
| max_num_seqs | 128: twice as many were no faster on 2 cores (docs/performance.md) | vLLM's |
| kv_cache_gib | 1 | all that vLLM finds |
| enable_prefix_caching | on | on |
| max_model_len | the plan's context_tokens, never the model's maximum | same |
| structured outputs | xgrammar, no free whitespace: a model may otherwise write newlines until its tokens end | same |
"""

from __future__ import annotations

import logging
import math
import multiprocessing.connection
import os
import sys
import threading
import time
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import orjson

from millrace.errors import ConfigError, MillraceError, UnavailableError
from shard_runner.chat import ChatTokenizer
from shard_runner.confidence import label_confidence
from shard_runner.engines.base import Ask, EngineDead, EngineSpec, Reply, Tokenizer
from shard_runner.engines.compiling import Compiled, processor

log = logging.getLogger("shard_runner")

CPU_DEFAULTS: dict[str, Any] = {"block_size": 32, "max_num_seqs": 128, "enforce_eager": True}
KV_CACHE_GIB = 1
# Up to here the model takes every core: 1.3 times the rows/s on 2 cores. Where there are many, the one that vLLM keeps free costs little.
FEW_CORES = 4
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
OWN_SETTINGS = frozenset({"kv_cache_gib", "step_timeout_s"})


def prepare_environment(spec: EngineSpec) -> None:
    """What vLLM reads from the environment, set before it is imported; what the deployment has set stands."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",  # models come from the store, never from a hub
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are a dozen lines at every start; this log is read at four in the morning
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # so that its processes import shard_runner.cli, which ties them to ours
        "TOKENIZERS_PARALLELISM": "false",  # its threads would compete with the engine's on a small machine
        "VLLM_CPU_KVCACHE_SPACE": str(int(spec.model.settings.get("kv_cache_gib", KV_CACHE_GIB))),
    }.items():
        os.environ.setdefault(name, value)


def prepare_cpu(spec: EngineSpec) -> None:
    """What the engine's process reads from the environment when it starts on a few cores; what the deployment has set stands."""
    if not _takes_every_core(spec):
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(_cores()))
    # A thread that has waited for a millisecond sleeps: this process and the engine's scheduler need the cores too.
    os.environ.setdefault("KMP_BLOCKTIME", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # What vLLM's manual says to load first: Intel's OpenMP, which its CPU build brings along and whose threads wake faster than torch's
    # own, and an allocator that keeps what it has freed, where the machine has it (Debian's libtcmalloc-minimal4).
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    libraries = [find_library("tcmalloc_minimal"), str(openmp) if openmp.exists() else None]
    os.environ.setdefault("LD_PRELOAD", ":".join(filter(None, libraries)))


def _takes_every_core(spec: EngineSpec) -> bool:
    several = {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend"}
    return _cores() <= FEW_CORES and not spec.model.settings.keys() & several


def _cores() -> int:
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def engine_arguments(spec: EngineSpec, is_cpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs for a model: device defaults, then the plan, then the model's own settings.

    A CPU's `enforce_eager` is for `compiling` to turn off.
    """
    settings = {key: value for key, value in spec.model.settings.items() if key not in OWN_SETTINGS}
    return {
        **(CPU_DEFAULTS if is_cpu else {}),
        # Part of the name under which vLLM keeps what it compiles.
        **({"additional_config": {"processor": processor()}} if is_cpu else {}),
        **({"distributed_executor_backend": ONE_PROCESS} if is_cpu and _takes_every_core(spec) else {}),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        **settings,
        "model": str(spec.folder),
        "dtype": spec.model.dtype,
        "quantization": spec.model.quantization,
        "max_model_len": spec.model.context_tokens,
        "seed": spec.sampling.seed,
    }


class VllmEngine:
    """`core` is a started vllm LLMEngine; `open_engine` starts one from a spec."""

    def __init__(self, spec: EngineSpec, core: Any, tokenizer: ChatTokenizer, compiled: Compiled | None = None) -> None:
        import vllm
        from vllm.inputs.engine import tokens_input
        from vllm.platforms import current_platform
        from vllm.v1.engine.exceptions import EngineDeadError

        self._died, self._tokens_input = EngineDeadError, tokens_input
        self._spec, self._engine = spec, core
        self._compiled, self._answered = compiled, 0
        self.tokenizer: Tokenizer | None = tokenizer
        config = core.vllm_config
        self.slots = int(config.scheduler_config.max_num_seqs)
        # As many again wait in the engine's own queue, so that it never waits for this process.
        self.capacity = 2 * self.slots
        self._params = _params(spec)
        self._since: dict[str, float] = {}
        self._facts = {
            "engine": "vllm",
            "version": vllm.__version__,
            "device": current_platform.get_device_name(),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "context_tokens": str(config.model_config.max_model_len),
            "block_size": str(config.cache_config.block_size),
            "prefix_caching": str(config.cache_config.enable_prefix_caching).lower(),
            "max_num_seqs": str(self.slots),
            "max_num_batched_tokens": str(config.scheduler_config.max_num_batched_tokens),
            "enforce_eager": str(config.model_config.enforce_eager).lower(),
        }
        if current_platform.is_cpu():
            self._facts["kv_cache_gib"] = os.environ["VLLM_CPU_KVCACHE_SPACE"]
            self._facts["threads"] = os.environ.get("OMP_NUM_THREADS", "auto")

    def describe(self) -> dict[str, str]:
        return dict(self._facts)

    def submit(self, ask: Ask) -> None:
        params = self._params
        if ask.max_tokens != params.max_tokens:
            params = params.clone()
            params.max_tokens = ask.max_tokens
        try:
            self._engine.add_request(ask.request_id, self._tokens_input(ask.prompt_token_ids), params)
        except self._died as error:
            raise EngineDead("its process ended") from error
        self._since[ask.request_id] = time.monotonic()

    def poll(self, timeout_s: float) -> list[Reply]:
        if not self._engine.has_unfinished_requests():
            if self._since:  # else the runner would wait for their replies for ever, without a call that hangs
                raise EngineDead(f"it has lost {len(self._since)} requests")
            return []
        try:
            outputs = self._engine.step()
        except self._died as error:
            raise EngineDead("its process ended") from error
        replies = [self._reply(output) for output in outputs if output.finished]
        self._answered += len(replies)
        return replies

    def _reply(self, output: Any) -> Reply:
        completion = output.outputs[0]
        confidence = None
        if self._spec.want_confidence and completion.logprobs:
            pieces = [
                (step[token].decoded_token or "", math.exp(step[token].logprob))
                for token, step in zip(completion.token_ids, completion.logprobs, strict=True)
            ]
            confidence = label_confidence(completion.text, pieces, self._spec.schema, self._spec.form)
        since = self._since.pop(output.request_id, None)
        return Reply(
            request_id=output.request_id,
            text=completion.text,
            finish_reason=completion.finish_reason,
            prompt_tokens=len(output.prompt_token_ids or ()),
            cached_tokens=output.num_cached_tokens,
            completion_tokens=len(completion.token_ids),
            latency_ms=None if since is None else int((time.monotonic() - since) * 1000),
            confidence=confidence,
        )

    def abort(self) -> None:
        self._engine.abort_request(list(self._since))
        self._since.clear()

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            if self._compiled is not None:
                self._compiled.count(self._answered)
            # Nothing in it is worth waiting for: what is finished is saved, and its worker does not end on SIGTERM.
            engine.engine_core.shutdown(timeout=1.0)


def _params(spec: EngineSpec) -> Any:
    """Sampling and grammar, the same for every request of a shard."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    if spec.form == "compact":
        structured = StructuredOutputsParams(choice=spec.schema.compact_choices())
    else:
        # As text: vLLM copies the parameters for each request, and a schema's dictionaries one by one. In the fields' own order.
        structured = StructuredOutputsParams(json=orjson.dumps(spec.schema.json_schema()).decode())
    sampling = spec.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed if sampling.temperature > 0 else None,
        max_tokens=spec.max_tokens,
        logprobs=0 if spec.want_confidence else None,
        structured_outputs=structured,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # vLLM's copy for each request is a shallow one: what it changes in it is the same for all
    )


def open_engine(spec: EngineSpec) -> VllmEngine:
    """Load the model. ConfigError: vLLM refuses the settings; UnavailableError: it did not start."""
    if spec.folder is None:
        raise ConfigError(f"model '{spec.model.name}' has no folder; engine vllm loads it from the store.")
    prepare_environment(spec)
    import vllm
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    is_cpu = current_platform.is_cpu()
    arguments = engine_arguments(spec, is_cpu)
    compiled = None
    if is_cpu:
        prepare_cpu(spec)
        if "enforce_eager" not in spec.model.settings:
            compiled = Compiled(Path(envs.VLLM_CACHE_ROOT), arguments, vllm.__version__)
            arguments["enforce_eager"] = not compiled.pays(spec.requests)
    tokenizer = ChatTokenizer(spec.folder)
    # The context decides vLLM's defaults for batch sizes: those of offline work, not of a server.
    context = UsageContext.LLM_CLASS
    try:
        config = EngineArgs(**arguments).create_engine_config(context)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"model '{spec.model.name}': vLLM {vllm.__version__} does not accept its settings: {str(error)[:500]}"
        ) from error
    try:
        core = LLMEngine.from_vllm_config(config, context, disable_log_stats=True)
    except MillraceError:
        raise
    except Exception as error:  # memory, device or driver: its own process has logged the cause
        raise UnavailableError(
            f"vLLM could not start model '{spec.model.name}' ({type(error).__name__}: {str(error)[:300]}). "
            "Look at the log above; where memory was short, lower kv_cache_gib, gpu_memory_utilization or context_tokens."
        ) from error
    _tell_of_death(core.engine_core)
    return VllmEngine(spec, core, tokenizer, compiled)


def _tell_of_death(client: Any) -> None:
    """Wake who waits for an answer when the engine's process ends: vLLM's own watch ends the thread that would say so (0.32)."""
    from vllm.v1.engine.core_client import SyncMPClient
    from vllm.v1.engine.exceptions import EngineDeadError

    if not isinstance(client, SyncMPClient):
        return  # the engine runs in this process, and ends with it
    processes, told = client.resources.engine_manager.processes, client.outputs_queue

    def wait() -> None:
        multiprocessing.connection.wait([process.sentinel for process in processes])
        told.put(EngineDeadError())

    threading.Thread(target=wait, name="engine's end", daemon=True).start()
