"""An engine that answers by rule and misbehaves as told, in place of `vllm`.

What it answers is a function of the row's text alone, so every test knows the right answer of every row. How it misbehaves stands in
the environment variable FAKE_ENGINE (JSON): it must not be part of the plan, as no plan knows of the next power cut.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from millrace.answers import Reason
from millrace.canonical import sha256_hex
from millrace.errors import UnavailableError
from shard_runner.chat import KNOWN_MARKERS, Neutraliser
from shard_runner.engines.base import Ask, EngineDead, EngineSpec, Reply, ReplyError

LABELS = ("positive", "neutral", "negative")


@dataclass(frozen=True)
class Behaviour:
    """How the engine misbehaves. `*_on` are words: a row whose text holds the word provokes it."""

    slots: int = 8
    asked_log: str = ""  # file to which every submitted request id is appended
    die_on: str = ""  # EngineDead while such a row is inside
    raise_on: str = ""  # RuntimeError from poll while such a row is inside
    refuse_on: str = ""  # ValueError from submit
    garble_on: str = ""  # the answer is no JSON
    cut_on: str = ""  # the answer is cut unless more than 32 tokens are allowed
    busy_on: str = ""  # a passing error the first time
    dead_after: int = -1  # answers after which every engine is dead for ever
    dead_every: int = 0  # answers after which an engine dies, each anew
    dead_once_after: int = -1  # answers after which the first engine dies, once
    orphan_after: int = -1  # answers after which one stray reply appears, once
    double_after: int = -1  # answers after which one reply appears twice, once
    no_start: bool = False  # construction fails
    kill_at_ask: int = -1  # SIGKILL to the process at the n-th ask
    term_at_load: bool = False  # SIGTERM to the process while the engine loads
    term_at_answer: int = -1  # SIGTERM to the process once so many are answered
    hang_after: int = -1  # answers after which `poll` never returns
    hang_on_close: bool = False
    raise_on_close: bool = False
    confidence: float = -1.0


def behaviour() -> Behaviour:
    given = json.loads(os.environ.get("FAKE_ENGINE", "{}"))
    unknown = set(given) - {f.name for f in fields(Behaviour)}
    assert not unknown, unknown
    return Behaviour(**given)


def right_label(text: str) -> str:
    return LABELS[int(sha256_hex(text)[:8], 16) % 3]


class WordTokenizer:
    """One token per word; the chat template adds two."""

    def __init__(self) -> None:
        self.neutralise = Neutraliser(KNOWN_MARKERS)

    def encode(self, system: str, user: str) -> list[int]:
        return [1, *(2 + len(word) for word in f"{system} {user}".split()), 0]

    def encode_many(self, prompts: Sequence[tuple[str, str]]) -> list[list[int]]:
        return [self.encode(*prompt) for prompt in prompts]


class FakeEngine:
    """Counters on the class are shared by the engines that one process builds one after the other."""

    opened = 0
    asked = 0
    answered = 0
    misfired = False
    inside_seen: ClassVar[list[int]] = []

    def __init__(self, spec: EngineSpec) -> None:
        self.told = behaviour()
        self.tokenizer = WordTokenizer()
        self.slots = self.told.slots
        self.capacity = 2 * self.told.slots
        self.context = spec.model.context_tokens
        self.field = spec.schema.names[0]
        self._inside: deque[Ask] = deque()
        self._given = 0
        FakeEngine.opened += 1
        if self.told.term_at_load:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)  # a load that a signal has to interrupt
        if self.told.no_start:
            raise UnavailableError("the fake engine did not find enough memory")

    def describe(self) -> dict[str, str]:
        return {"engine": "fake", "slots": str(self.slots)}

    def submit(self, ask: Ask) -> None:
        if self.told.refuse_on and self.told.refuse_on in ask.user:
            raise ValueError("not this one")
        assert ask.prompt_token_ids is not None
        if len(ask.prompt_token_ids) + ask.max_tokens > self.context:
            raise RuntimeError("a prompt beyond the context reached the engine")
        FakeEngine.asked += 1
        if self.told.asked_log:
            with Path(self.told.asked_log).open("a") as log:
                log.write(ask.request_id + "\n")
        if FakeEngine.asked == self.told.kill_at_ask:
            os.kill(os.getpid(), signal.SIGKILL)
        self._inside.append(ask)

    def poll(self, timeout_s: float) -> list[Reply]:
        told = self.told
        FakeEngine.inside_seen.append(len(self._inside))
        for ask in self._inside:
            if told.die_on and told.die_on in ask.user:
                raise EngineDead("the device fell off the bus")
            if told.raise_on and told.raise_on in ask.user:
                raise RuntimeError("a row's text may stand here: " + ask.user)
        if 0 <= told.dead_after <= FakeEngine.answered:
            raise EngineDead("dead for ever")
        if told.dead_every and self._given >= told.dead_every:
            raise EngineDead("worn out")
        if 0 <= told.dead_once_after <= FakeEngine.answered and self._once():
            raise EngineDead("dead once")
        if 0 <= told.hang_after <= FakeEngine.answered:
            time.sleep(3600)
        # The newest leave first: nobody may pair by position.
        replies = [self._reply(self._inside.pop()) for _ in range(min(len(self._inside), max(self.slots // 2, 1)))]
        FakeEngine.answered += len(replies)
        self._given += len(replies)
        if 0 <= told.orphan_after <= FakeEngine.answered and self._once():
            replies.insert(0, Reply("stray", text='{"sentiment":"negative"}', finish_reason="stop"))
        if 0 <= told.double_after <= FakeEngine.answered and replies and self._once():
            replies.append(replies[0])
        if 0 <= told.term_at_answer <= FakeEngine.answered and self._once():
            os.kill(os.getpid(), signal.SIGTERM)
        return replies

    def _once(self) -> bool:
        first, FakeEngine.misfired = not FakeEngine.misfired, True
        return first

    def _reply(self, ask: Ask) -> Reply:
        told = self.told
        text = ask.user.removeprefix("Sentence: ").removesuffix("\nLabel:")
        answer = json.dumps({self.field: right_label(text)}, separators=(",", ":"))
        finish = "stop"
        if told.garble_on and told.garble_on in text:
            answer = "well, that depends"
        if told.cut_on and told.cut_on in text and ask.max_tokens <= 32:
            answer, finish = answer[:-5], "length"
        if told.busy_on and told.busy_on in text and not self._asked_before(ask.request_id):
            return Reply(ask.request_id, error=ReplyError(Reason.server_error, "busy", again=True))
        return Reply(
            ask.request_id,
            text=answer,
            finish_reason=finish,
            prompt_tokens=len(ask.prompt_token_ids or ()),
            cached_tokens=4,
            completion_tokens=len(answer) // 4,
            confidence=None if told.confidence < 0 else {self.field: told.confidence},
        )

    _seen: ClassVar[set[str]] = set()

    def _asked_before(self, request_id: str) -> bool:
        before = request_id in FakeEngine._seen
        FakeEngine._seen.add(request_id)
        return before

    def abort(self) -> None:
        self._inside.clear()

    def close(self) -> None:
        if self.told.hang_on_close:
            time.sleep(3600)
        if self.told.raise_on_close:
            raise RuntimeError("the device would not let go")


def open_engine(spec: EngineSpec) -> FakeEngine:
    return FakeEngine(spec)
