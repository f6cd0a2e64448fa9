"""`shard-runner` with the fake engine, for tests that need a process of its own: kills, signals, exit codes.

KILL_AT_WRITE=<n>[+] in the environment ends the process with SIGKILL before (with +: after) the n-th write to the lake.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from millrace.lake import Lake
from shard_runner import cli
from shard_runner.engines import ENGINES

ENGINES["vllm"] = "tests.runner.fake_engine"
cli.TEARDOWN_SECONDS = 0.3

_writes = 0


def _killing(name: str) -> None:
    at = os.environ.get("KILL_AT_WRITE")
    if not at:
        return
    original = getattr(Lake, name)

    def wrapped(self: Lake, *args: Any) -> Any:
        global _writes
        _writes += 1
        if at == str(_writes):
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(self, *args)
        if at == f"{_writes}+":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(Lake, name, wrapped)


if __name__ == "__main__":
    for method in ("write", "create", "parquet_writer"):
        _killing(method)
    cli.main()
