"""What settings of vLLM cost on a CPU, in seconds of CPU: other jobs on the machine disturb these less than rows/s.

    OMP_NUM_THREADS=1 .venv-inference/bin/python benchmarks/engine_settings.py --settings '{"enforce_eager": false}'

The engine runs in this process with one thread and answers the sample's sentences in form json, its prefix cache emptied before each
round. `--defaults` takes vLLM's own settings instead of the runner's. The last line is JSON: start_cpu_s, cpu_s (one a round),
least_cpu_s, median_cpu_s, page_faults, tokens_per_answer.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from runner_vs_engine import prompts
from sample_run import sample_run

from shard_runner.engines.vllm import _params, engine_arguments, prepare_environment


def measure(rows: int, rounds: int, settings: dict[str, Any], defaults: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        sample = sample_run(Path(folder), rows)
        spec = sample.spec
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if defaults:
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"
        prepare_environment(spec)
        import torch
        from vllm import LLM

        from shard_runner.chat import ChatTokenizer

        assert spec.folder is not None
        torch.set_num_threads(1)
        started = time.process_time()
        llm = LLM(**({"model": str(spec.folder)} if defaults else engine_arguments(spec, is_cpu=True)) | settings)
        start = time.process_time() - started
        params = _params(spec)
        inputs = [{"prompt_token_ids": ask.prompt_token_ids} for ask in prompts(sample, ChatTokenizer(spec.folder))]
        llm.generate(inputs[:16], params, use_tqdm=False)
        seconds, faults, tokens = [], [], 0
        for _ in range(rounds):
            llm.reset_prefix_cache()
            before, faulted = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            outputs = llm.generate(inputs, params, use_tqdm=False)
            seconds.append(round(time.process_time() - before, 2))
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faulted)
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return {
            "rows": rows,
            "start_cpu_s": round(start, 1),
            "cpu_s": seconds,
            "least_cpu_s": min(seconds),
            "median_cpu_s": statistics.median(seconds),
            "page_faults": faults,
            "tokens_per_answer": round(tokens / rows, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", type=json.loads, default={}, help="arguments of vLLM's engine, as JSON")
    parser.add_argument("--defaults", action="store_true", help="vLLM's own settings instead of the runner's")
    args = parser.parse_args()
    print(json.dumps(measure(args.rows, args.rounds, args.settings, args.defaults)), flush=True)
    os._exit(0)  # an ordinary exit waits for vLLM's threads


if __name__ == "__main__":
    main()
