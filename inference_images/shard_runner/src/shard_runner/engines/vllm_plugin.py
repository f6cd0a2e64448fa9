"""What vLLM loads into each of its processes (entry point `vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Let a CPU's engine load the model that an earlier start compiled, instead of compiling it for a minute every time.

    vLLM 0.32 writes it to VLLM_CACHE_ROOT on every platform. Reading it back, it calls `finalize_loading`, which what torch's own
    inductor backend has saved lacks, and a CPU has no other; that is whole as soon as it is read. vLLM has compared the sources before.
    """
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Compiled

    if not hasattr(Compiled, "finalize_loading"):
        Compiled.finalize_loading = lambda self, vllm_config: None
