"""What the runner asks of an engine. A third engine is one file: a class with these members and an `open_engine` function.

    engine = open_engine(spec)                 # ConfigError: never works; UnavailableError: not now
    while ...:
        while inside < engine.capacity: engine.submit(ask)
        for reply in engine.poll(1.0): ...     # finished asks in any order, each submitted id exactly once
    engine.close()

The runner calls one engine from one thread. It pairs replies with asks by `request_id` alone, never by position, and
takes a reply to an id that is not inside as a sign that the engine is confused (EngineDead).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from millrace.answers import AnswerSchema, Reason
from millrace.enrichment import Sampling
from millrace.plan import PinnedModel


class EngineDead(Exception):
    """The engine cannot go on; everything inside is lost. The runner builds a new one, a bounded number of times.

    The message goes to logs and records: it names the failure and never quotes a prompt or a row's text.
    """


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an engine is built from; all of it comes from the plan and the deployment's environment."""

    model: PinnedModel
    schema: AnswerSchema
    form: str  # "json" or "compact"
    sampling: Sampling
    max_tokens: int  # of one answer, the re-ask of a truncated one may have twice as many
    folder: Path | None = None  # of the verified model, for engines that load it themselves
    want_confidence: bool = False  # report label probabilities where that is cheap
    requests: int = 0  # about how many are to come: what costs at the start may pay over many


@dataclass(frozen=True, slots=True)
class Ask:
    """One question. `prompt_token_ids` is set when the engine has a `tokenizer`, and is then what counts."""

    request_id: str
    system: str
    user: str
    prompt_token_ids: list[int] | None
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ReplyError:
    """Why there is no answer. `again` says whether asking once more could help."""

    reason: Reason
    message: str  # bounded, without row text
    again: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for one ask: a text, or an error."""

    request_id: str
    text: str = ""
    reasoning: str | None = None  # what a reasoning model thought, where the engine separates it
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    latency_ms: int | None = None
    confidence: dict[str, float] | None = None  # label field -> probability of what was said
    error: ReplyError | None = None


class Tokenizer(Protocol):
    """The model's own tokenizer and chat template, for engines that run the model themselves."""

    def encode(self, system: str, user: str) -> list[int]:
        """Token ids of the whole rendered prompt: chat template, one BOS, generation prompt."""
        ...

    def encode_many(self, prompts: Sequence[tuple[str, str]]) -> list[list[int]]:
        """The same for many prompts at once, which is faster."""
        ...

    def neutralise(self, text: str) -> tuple[str, int]:
        """Row text in which no special token of the model is left, and how many were changed."""
        ...


class Engine(Protocol):
    tokenizer: Tokenizer | None  # None: the runner estimates lengths from characters

    @property
    def capacity(self) -> int:
        """How many asks to keep inside so that the engine never waits; it may change over time."""
        ...

    @property
    def slots(self) -> int:
        """How many it works on at once, at most `capacity`: it counts as full while so many are inside."""
        ...

    def describe(self) -> dict[str, str]:
        """Engine, version, device and the settings worth knowing, for the log and the records. No secrets."""
        ...

    def submit(self, ask: Ask) -> None:
        """Hand over one ask. ValueError: the engine refuses this one (and only this one). EngineDead."""
        ...

    def poll(self, timeout_s: float) -> list[Reply]:
        """Replies that are finished; waits up to about `timeout_s` for the first. EngineDead, ConfigError, UnavailableError."""
        ...

    def abort(self) -> None:
        """Forget everything inside; no reply to it may come later."""
        ...

    def close(self) -> None:
        """Free device, processes and connections. May be called twice."""
        ...
