"""How much of an endpoint's capacity the runner uses, and how often it is refused.

    .venv-inference/bin/python benchmarks/endpoint_capacity.py [--capacity 64] [--delay-ms 500] [--seconds 40]

Starts the tests' OpenAI-style server with a hard capacity (calls above it get 429) and `shard-runner run` on a shard of made-up
texts, each as a process of its own, and reads the server's counters once the runner is warm and again before its tail. The last
line is JSON. `ratio` is answered rows/s over `capacity_rows_per_s` = capacity / delay, which no client can exceed;
`call_ms` is what a call really took in the server, which is over the delay on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from millrace.lake import Lake  # noqa: E402
from millrace.plan import PinnedModel  # noqa: E402
from tests.runner.build import SHARD, Run, build_run  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=64, help="calls the server works on at once")
    parser.add_argument("--delay-ms", type=float, default=500.0, help="time of one call")
    parser.add_argument("--warm-up-s", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=40.0, help="length of the measurement after the warm-up")
    args = parser.parse_args()
    ideal = args.capacity / (args.delay_ms / 1000)
    rows = int(ideal * (args.warm_up_s + args.seconds))
    command = [
        sys.executable,
        "-m",
        "tests.openai_server",
        "--capacity",
        str(args.capacity),
        "--delay-ms",
        str(args.delay_ms),
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            run = make_run(Path(folder), url, rows)
            result = measure(run, url, args.warm_up_s, args.seconds)
        finally:
            server.terminate()
    result |= {
        "capacity": args.capacity,
        "delay_ms": args.delay_ms,
        "capacity_rows_per_s": round(ideal, 1),
        "ratio": round(result["rows_per_s"] / ideal, 4),
    }
    print(json.dumps(result))
    return 0


def make_run(folder: Path, url: str, rows: int) -> Run:
    model = PinnedModel(
        name="endpoint", digest="0" * 64, engine="openai", location="", endpoint=url, served_name="test-model"
    )
    return build_run(Lake(str(folder)), [f"Parcel {n} came on time." for n in range(rows)], model)


def measure(run: Run, url: str, warm_up_s: float, seconds: float) -> dict[str, Any]:
    """Run the shard to its end; rates are of the `seconds` after `warm_up_s` from the first call on."""
    stats_url = url.removesuffix("/v1") + "/stats"
    command = [sys.executable, "-m", "shard_runner", "run", "--run", run.uri, "--shard", SHARD]

    def stats() -> tuple[float, dict[str, Any]]:
        with urllib.request.urlopen(stats_url) as response:
            return time.monotonic(), json.load(response)

    runner = subprocess.Popen(command)
    while runner.poll() is None and stats()[1]["calls"] < 2:
        time.sleep(0.05)
    time.sleep(warm_up_s)
    began, before = stats()
    # The runner may be slower than the ideal, never faster: the tail begins after this.
    time.sleep(seconds * 0.9)
    ended, after = stats()
    if runner.wait() != 0:
        raise SystemExit(f"the runner ended with exit code {runner.returncode}")
    answered, refused = after["answered"] - before["answered"], after["refused"] - before["refused"]
    completion = run.completion()
    return {
        "call_ms": round((after["busy_s"] - before["busy_s"]) / answered * 1000, 1),
        "rows": completion.requests,
        "rows_ok": completion.statuses.get("ok", 0),
        "rows_per_s": round(answered / (ended - began), 2),
        "refused_share": round(refused / (answered + refused), 4),
        "refused_in_warm_up": before["refused"],
        "measured_s": round(ended - began, 1),
        "whole_run_s": completion.phases.total,
    }


if __name__ == "__main__":
    raise SystemExit(main())
