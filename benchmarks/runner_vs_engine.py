"""How much the shard runner costs beside the engine it drives, on real review sentences.

    .venv-inference/bin/python benchmarks/runner_vs_engine.py --rows 512

One vLLM engine with the runner's settings answers the same requests by itself (LLM.generate, all prompts at once) and under the
runner (a whole `run`: shard file in, parts, merge and completion record out), then an engine with vLLM's default settings answers them:
the three take turns, so that a machine that gets slower does so for all. The default engine lives in a process of its own, which is
suspended while it is not its turn. Every prefix cache is emptied before each turn. The first round does not count: a compiled engine
may still compile. Rates are medians over the rounds, ratios medians of each round's ratio. `--eager` measures the runner on a CPU
that has not compiled its model yet.
The last line is JSON: ratio, rows_per_s, engine_rows_per_s, default_rows_per_s, vs_default, full_share, prefix_hit_rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from sample_run import SampleRun, sample_run

from millrace.errors import ExitCode
from shard_runner.ask import Asker
from shard_runner.engines.base import Ask, EngineSpec
from shard_runner.engines.vllm import VllmEngine, _params, engine_arguments, prepare_cpu, prepare_environment
from shard_runner.guard import Signals
from shard_runner.leash import kill_descendants
from shard_runner.requests import read_ids, stream
from shard_runner.run import Attempt


def prompts(sample: SampleRun, tokenizer: Any) -> list[Ask]:
    """The run's asks exactly as the runner makes them, in its order."""
    run = sample.run
    asker = Asker(run.plan, sample.spec.model, tokenizer)
    requests = stream(
        run.lake, run.shard, read_ids(run.lake, run.shard), (), run.plan.enrichment.limits.early_stop_requests
    )
    return [ask for ask in asker.asks(requests) if isinstance(ask, Ask)]


def raw_seconds(llm: Any, asks: list[Ask], spec: EngineSpec) -> float:
    """LLM.generate over all prompts at once, already tokenised."""
    params = _params(spec)
    inputs = [{"prompt_token_ids": ask.prompt_token_ids} for ask in asks]
    started = time.monotonic()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds = time.monotonic() - started
    assert len(outputs) == len(asks)
    return seconds


class Shared(VllmEngine):
    """The one engine of the benchmark: it outlives the attempts that use it."""

    def close(self) -> None:
        self.abort()


class Defaults:
    """vLLM as it comes, in a process of its own: nothing set but the model, the answer's schema and a cache that fits this machine."""

    def __init__(self, rows: int, form: str) -> None:
        command = [sys.executable, __file__, "--rows", str(rows), "--form", form, "--serve-defaults"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._said("ready")
        first = psutil.Process(self._process.pid)
        self._tree = [first, *first.children(recursive=True)]
        self._suspend()

    def rows_per_s(self) -> float:
        """One turn."""
        for process in self._tree:
            process.resume()
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        rate = float(self._said("rows/s"))
        self._suspend()
        return rate

    def _suspend(self) -> None:
        for process in self._tree:
            process.suspend()

    def _said(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise SystemExit("the process with vLLM's default settings has ended")


def serve_defaults(rows: int, form: str) -> None:
    """The other end of `Defaults`: a turn for every line."""
    with tempfile.TemporaryDirectory() as folder:
        sample = sample_run(Path(folder), rows, form)
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        from vllm import LLM

        from shard_runner.chat import ChatTokenizer

        assert sample.spec.folder is not None
        llm = LLM(model=str(sample.spec.folder))
        asks = prompts(sample, ChatTokenizer(sample.spec.folder))
        print("ready", flush=True)
        for _ in sys.stdin:
            llm.reset_prefix_cache()
            print("rows/s", rows / raw_seconds(llm, asks, sample.spec), flush=True)


def compare(rows: int, rounds: int, form: str, eager: bool, with_defaults: bool) -> dict[str, Any]:
    defaults = Defaults(rows, form) if with_defaults else None
    with tempfile.TemporaryDirectory() as folder:
        sample = sample_run(Path(folder), rows, form)
        llm, tokenizer = start_llm(sample.spec, eager)
        asks = prompts(sample, tokenizer)
        turns = []
        for number in range(rounds + 1):
            llm.reset_prefix_cache()
            engine = rows / raw_seconds(llm, asks, sample.spec)
            llm.reset_prefix_cache()
            attempt = Attempt(
                sample.run.lake, sample.run.paths, sample.run.shard.shard_id, f"round{number}", Signals(),
                open_engine=lambda spec: Shared(spec, llm.llm_engine, tokenizer),
            )  # fmt: skip
            code, message = attempt.run()
            assert code == ExitCode.COMPLETE, message
            done = sample.run.completion()
            seconds = done.phases.total - done.phases.load - done.phases.start
            turn = {
                "ratio": rows / seconds / engine,
                "rows_per_s": rows / seconds,
                "engine_rows_per_s": engine,
                "full_share": done.phases.full / seconds,
                "prefix_hit_rate": done.tokens.cached / done.tokens.prompt,
            }
            if defaults is not None:
                default = defaults.rows_per_s()
                turn |= {"default_rows_per_s": default, "vs_default": rows / seconds / default}
            print(f"round {number}: " + ", ".join(f"{name} {value:.2f}" for name, value in turn.items()), flush=True)
            turns.append(turn)
            sample.forget_answers()
        medians = {name: round(statistics.median(turn[name] for turn in turns[1:]), 3) for name in turns[0]}
        return {"rows": rows, "form": form, **medians}


def start_llm(spec: EngineSpec, eager: bool) -> tuple[Any, Any]:
    """vLLM's own front to an engine with the runner's settings, and the tokenizer. `eager` is for a CPU: the model not compiled."""
    prepare_environment(spec)
    from vllm import LLM
    from vllm.platforms import current_platform

    from shard_runner.chat import ChatTokenizer

    assert spec.folder is not None
    is_cpu = bool(current_platform.is_cpu())
    if is_cpu:
        prepare_cpu(spec)
    return LLM(**engine_arguments(spec, is_cpu) | {"enforce_eager": is_cpu and eager}), ChatTokenizer(spec.folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--form", choices=["json", "compact"], default="json", help="how the answers are asked for")
    parser.add_argument("--eager", action="store_true", help="as on a CPU that has not compiled the model yet")
    parser.add_argument("--no-defaults", action="store_true", help="without vLLM's defaults, in half the time")
    parser.add_argument("--serve-defaults", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_defaults:
        serve_defaults(args.rows, args.form)
    else:
        print(json.dumps(compare(args.rows, args.rounds, args.form, args.eager, not args.no_defaults)), flush=True)
    # vLLM's processes do not end with the interpreter on a CPU: an ordinary exit waits for them for ever.
    kill_descendants()
    os._exit(0)


if __name__ == "__main__":
    main()
