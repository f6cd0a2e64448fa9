"""Ends a runner whose engine does not return: nothing else would, until the task's time limit, and a GPU would be paid meanwhile.

A step takes seconds. One that takes ten minutes waits for something that does not come (a worker stuck in its driver, a lost
message between vLLM's processes), and the thread that asked cannot be woken. So what is finished is saved from here and the process
ends with exit 3: the next attempt goes on with a fresh engine, perhaps on another node. Loading a model is not watched.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from millrace.errors import ConfigError, ExitCode
from millrace.plan import PinnedModel
from shard_runner.engines.base import Ask, Engine, Reply, Tokenizer
from shard_runner.leash import kill_descendants

log = logging.getLogger("shard_runner")

STEP_TIMEOUT_S = 600.0
# What is finished is a few hundred rows; a lake that does not take them in this time is not waited for.
SAVE_SECONDS = 60.0

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def step_timeout_s(model: PinnedModel) -> float:
    """How long a call of the engine may take: the model's setting `step_timeout_s`, 600 s without one. Raises ConfigError."""
    value = model.settings.get("step_timeout_s", STEP_TIMEOUT_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86_400:
        raise ConfigError(
            f"model '{model.name}': its setting step_timeout_s is not a number of seconds above 0 and up to a day."
        )
    return float(value)


class Watched:
    """An engine whose `submit` and `poll` must return within `seconds`; otherwise `save` gets the reason and the process ends."""

    def __init__(self, engine: Engine, seconds: float, save: Callable[[str], None] = lambda message: None) -> None:
        self._engine, self._seconds, self._save = engine, seconds, save
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self._since: float | None = None
        # Held while the process is ended: a call that returns at last must not touch what is being saved.
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    @property
    def capacity(self) -> int:
        return self._engine.capacity

    @property
    def slots(self) -> int:
        return self._engine.slots

    def describe(self) -> dict[str, str]:
        return self._engine.describe()

    def submit(self, ask: Ask) -> None:
        self._call(self._engine.submit, ask)

    def poll(self, timeout_s: float) -> list[Reply]:
        return self._call(self._engine.poll, timeout_s)

    def abort(self) -> None:
        self._engine.abort()

    def close(self) -> None:
        self._closed.set()
        self._engine.close()

    def _call(self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        self._since = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            with self._lock:
                self._since = None

    def _look(self) -> None:
        while not self._closed.wait(min(self._seconds / 4, 5.0)):
            with self._lock:
                since = self._since
                if since is not None and time.monotonic() - since > self._seconds:
                    self._end()

    def _end(self) -> None:
        message = (
            f"the engine has not returned from a call for {self._seconds:g} s (the model's setting step_timeout_s); "
            "what was finished is saved if the lake took it. Look at the node and its device; the next attempt starts a new engine"
        )
        saving = threading.Thread(target=self._save, args=(message,), daemon=True)
        saving.start()
        saving.join(SAVE_SECONDS)
        log.error("%s (exit %d)", message, ExitCode.UNAVAILABLE)
        kill_descendants()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(ExitCode.UNAVAILABLE))
