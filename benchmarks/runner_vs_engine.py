"""How much the shard runner costs beside the engine it drives, on real review sentences.

    .venv-inference/bin/python benchmarks/runner_vs_engine.py --rows 512

One vLLM engine with the runner's settings answers the same requests alternately by itself (LLM.generate, all prompts at once) and
under the runner (a whole `run`: shard file in, parts, merge and completion record out), its prefix cache emptied before
each; `ratio` is the median over the rounds. Then an engine with vLLM's default settings answers them as often, in a process of its own:
`default_rows_per_s` is its median too (the first round of a compiled engine may still compile, or fault its memory in).
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
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from sample_run import SampleRun, sample_run

from millrace.errors import ExitCode
from shard_runner.ask import Asker
from shard_runner.engines.base import Ask, EngineSpec
from shard_runner.engines.vllm import VllmEngine, _params, engine_arguments, prepare_environment
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


def compare(rows: int, rounds: int, form: str, shard: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        sample = sample_run(Path(folder), rows, form)
        spec = replace(sample.spec, requests=shard)
        prepare_environment(spec)
        from vllm import LLM

        from shard_runner.chat import ChatTokenizer

        assert spec.folder is not None
        tokenizer = ChatTokenizer(spec.folder)
        llm = LLM(**engine_arguments(spec, is_cpu=_is_cpu()))
        asks = prompts(sample, tokenizer)
        raw_seconds(llm, asks[:16], spec)
        ratios, ours, engine, full, hits = [], [], [], [], []
        for number in range(rounds):
            llm.reset_prefix_cache()
            raw = raw_seconds(llm, asks, spec)
            llm.reset_prefix_cache()
            attempt = Attempt(
                sample.run.lake, sample.run.paths, sample.run.shard.shard_id, f"round{number}", Signals(),
                open_engine=lambda spec: Shared(spec, llm.llm_engine, tokenizer),
            )  # fmt: skip
            code, message = attempt.run()
            assert code == ExitCode.COMPLETE, message
            done = sample.run.completion()
            run_seconds = done.phases.total - done.phases.load - done.phases.start
            ratios.append(raw / run_seconds)
            ours.append(rows / run_seconds)
            engine.append(rows / raw)
            full.append(done.phases.full / run_seconds)
            hits.append(done.tokens.cached / done.tokens.prompt)
            print(
                f"round {number}: engine {engine[-1]:.2f} rows/s, runner {ours[-1]:.2f} rows/s, ratio {ratios[-1]:.3f}, {done.phases}",
                flush=True,
            )
            sample.forget_answers()
        return {
            "rows": rows,
            "form": form,
            "ratio": round(statistics.median(ratios), 3),
            "rows_per_s": round(statistics.median(ours), 2),
            "engine_rows_per_s": round(statistics.median(engine), 2),
            "full_share": round(statistics.median(full), 3),
            "prefix_hit_rate": round(statistics.median(hits), 3),
        }


def default_rows_per_s(rows: int, rounds: int, form: str) -> float:
    """vLLM as it comes: nothing set but the model, the answer's schema and a cache that fits this machine."""
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
        raw_seconds(llm, asks[:16], sample.spec)
        rates = []
        for number in range(rounds):
            llm.reset_prefix_cache()
            rates.append(rows / raw_seconds(llm, asks, sample.spec))
            print(f"round {number}: vLLM's defaults {rates[-1]:.2f} rows/s", flush=True)
        return statistics.median(rates)


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--form", choices=["json", "compact"], default="json", help="how the answers are asked for")
    parser.add_argument(
        "--shard", type=int, default=20_000, help="use the engine settings that a shard of so many requests gets"
    )
    parser.add_argument("--phase", choices=["compare", "default"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase == "compare":
        _print_and_leave(compare(args.rows, args.rounds, args.form, args.shard))
    elif args.phase == "default":
        _print_and_leave({"default_rows_per_s": round(default_rows_per_s(args.rows, args.rounds, args.form), 2)})
    else:
        result: dict[str, Any] = {}
        for phase in ("compare", "default"):
            result |= _in_its_own_process(phase, args)
        result["vs_default"] = round(result["rows_per_s"] / result["default_rows_per_s"], 2)
        print(json.dumps(result))


def _print_and_leave(result: dict[str, Any]) -> NoReturn:
    """vLLM's processes do not end with the interpreter on a CPU: an ordinary exit waits for them for ever."""
    print(json.dumps(result), flush=True)
    kill_descendants()
    os._exit(0)


def _in_its_own_process(phase: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [
        sys.executable,
        __file__,
        "--rows",
        str(args.rows),
        "--rounds",
        str(args.rounds),
        "--form",
        args.form,
        "--shard",
        str(args.shard),
        "--phase",
        phase,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, end="", flush=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
