"""Whether a CPU's engine compiles its model: once the machine has answered so much without that a compiled model would have paid.

Compiling costs a minute, is kept in vLLM's cache (VLLM_CACHE_ROOT) and costs a few seconds at every later start; each answer is then
a fifth cheaper. Nobody knows what a machine will be asked tomorrow, so it rents until the rent has reached the price, and then
buys: whatever comes, it never pays more than twice what would have been best. A machine whose cache does not last, such as a pod
with only its own /tmp, buys for large shards only.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from millrace.canonical import content_hash

log = logging.getLogger("shard_runner")

# Requests whose answers repay compiling: 60 s against 5 ms each; and a compiled model's slower start: 4 s
# (benchmarks/engine_settings.py, docs/performance.md; the demo model on 2 cores).
PRICE = 12_000
WORTH_LOADING = 1_000


def processor() -> str:
    """What machine code made for this processor depends on, as a short hash.

    vLLM names what it compiled by model and settings, not by processor, and another one may share the cache or the volume.
    """
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    named = dict(line.split(":", 1) for line in lines if ":" in line)
    told = {name.strip(): value.strip() for name, value in named.items()}
    return content_hash([told.get(name) for name in ("model name", "flags", "CPU part", "Features")])[:16]


class Compiled:
    """What a machine has done so far with one model under one set of engine arguments: one small file in vLLM's cache.

    Two runners that count at once may lose one count; a model that left the cache meanwhile is compiled once more.
    """

    def __init__(self, cache: Path, arguments: dict[str, Any], version: str) -> None:
        self._file = cache / "shard_runner" / content_hash([version, arguments])[:16]

    def pays(self, requests: int) -> bool:
        """Whether an engine for so many requests should be compiled. Only where there is what vLLM compiles with (`CXX`, else `g++`)."""
        return (
            requests >= WORTH_LOADING
            and self._read() + requests >= PRICE
            and shutil.which(os.environ.get("CXX", "g++")) is not None
        )

    def count(self, answers: int) -> None:
        """An engine, compiled or not, has given so many answers."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(str(self._read() + answers), encoding="ascii")
        except OSError as error:
            log.info("vLLM's cache cannot be written (%s); a compiled model would not be kept", type(error).__name__)

    def _read(self) -> int:
        try:
            return int(self._file.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0
