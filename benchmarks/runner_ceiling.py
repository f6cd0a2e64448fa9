"""What the runner itself costs: a shard answered by an engine that answers at once.

    .venv-inference/bin/python benchmarks/runner_ceiling.py --rows 1000000

Everything but the engine is the real thing: shard file in, prompts rendered, answers parsed, parts written, merge and
completion record. The last line is JSON: rows, requests_per_core_s (requests over the process's CPU seconds, so that other
work on the machine does not count), rows_per_s (over wall time), peak_rss_gib.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

from sample_run import sample_run

from millrace.errors import ExitCode
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.records import Manifest
from shard_runner.engines.base import Ask, EngineSpec, Reply, Tokenizer
from shard_runner.guard import Signals
from shard_runner.run import Attempt


class Instant:
    """Answers every ask with the same right answer at the next poll."""

    tokenizer: Tokenizer | None = None
    slots = 256
    capacity = 512

    def __init__(self, spec: EngineSpec) -> None:
        self._inside: deque[Ask] = deque()

    def describe(self) -> dict[str, str]:
        return {"engine": "instant"}

    def submit(self, ask: Ask) -> None:
        self._inside.append(ask)

    def poll(self, timeout_s: float) -> list[Reply]:
        text = '{"sentiment":"positive","topic":"quality"}'
        replies = [Reply(ask.request_id, text, None, "stop", 200, 160, 12, 5) for ask in self._inside]
        self._inside.clear()
        return replies

    def abort(self) -> None:
        self._inside.clear()

    def close(self) -> None:
        self._inside.clear()


def build(folder: Path, rows: int) -> str:
    """Write the shard in a process of its own, whose memory is not the runner's; returns the run's path."""
    command = [sys.executable, __file__, "--rows", str(rows), "--build", str(folder)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        print(sample_run(args.build, args.rows).run.uri)
        return
    with tempfile.TemporaryDirectory() as folder:
        root, paths = RunPaths.parse(build(Path(folder), args.rows))
        lake = Lake(root or "")
        shard_id = Manifest.load(lake, paths.manifest).shards[0].shard_id
        started, before = time.monotonic(), time.process_time()
        code, message = Attempt(lake, paths, shard_id, "ceiling", Signals(), open_engine=Instant).run()
        assert code == ExitCode.COMPLETE, message
        cpu, wall = time.process_time() - before, time.monotonic() - started
        result = {
            "rows": args.rows,
            "requests_per_core_s": round(args.rows / cpu),
            "rows_per_s": round(args.rows / wall),
            "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
