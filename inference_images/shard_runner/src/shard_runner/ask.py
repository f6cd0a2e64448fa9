"""From a request to what the engine is asked: render, neutralise, count, cut or skip."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from millrace.answers import Reason
from millrace.errors import ConfigError
from millrace.plan import PinnedModel, Plan
from millrace.prompts import TEXT, placeholders, renderer, row_placeholders
from shard_runner.chat import KNOWN_MARKERS, Neutraliser
from shard_runner.engines.base import Ask, Tokenizer
from shard_runner.requests import Request

# Prompts that are tokenised in one call. The engine holds a queue of waiting asks meanwhile, so it never starves.
_TOGETHER = 32
# Cutting aims at the right length at once and is repeated only where the estimate was off.
_CUTS = 6


class Asker:
    """Makes asks of requests. `changed` counts texts that were cut or had control markers neutralised."""

    def __init__(self, plan: Plan, model: PinnedModel, tokenizer: Tokenizer | None) -> None:
        decision, enrichment = plan.decision, plan.enrichment
        self.max_tokens = decision.max_tokens
        self.changed: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._neutralise = tokenizer.neutralise if tokenizer else Neutraliser(KNOWN_MARKERS)
        self._render = renderer(decision.prompt.text, enrichment.schema.describe())
        self._chars_per_token = model.chars_per_token
        self._context = model.context_tokens
        self._room = model.context_tokens - decision.max_tokens
        self._cut = enrichment.limits.too_long == "cut"
        if self._room <= 0:
            raise ConfigError(
                f"model '{model.name}': context_tokens {model.context_tokens} leaves no room for a prompt beside an answer "
                f"of {decision.max_tokens} tokens; raise it in the models table or shorten the answer."
            )

    def asks(self, requests: Iterable[Request]) -> Iterator[Ask | tuple[str, Reason]]:
        """For each request the ask, or its id with the reason why it cannot be asked."""
        source = iter(requests)
        while batch := list(islice(source, _TOGETHER)):
            cleaned = [self._clean(request.values) for request in batch]
            prompts = [self._render(values) for values in cleaned]
            if self._tokenizer is None:
                for request, values, (system, user) in zip(batch, cleaned, prompts, strict=True):
                    yield self._fitting(request, values, system, user, None)
            else:
                encoded = self._tokenizer.encode_many(prompts)
                for request, values, (system, user), ids in zip(batch, cleaned, prompts, encoded, strict=True):
                    yield self._fitting(request, values, system, user, ids)

    def longer(self, ask: Ask) -> Ask | None:
        """The same ask with double the tokens for its answer, as far as the context has room; None when it has none."""
        used = self._count(ask.system, ask.user, ask.prompt_token_ids)
        max_tokens = min(2 * ask.max_tokens, self._context - used)
        if max_tokens <= ask.max_tokens:
            return None
        return Ask(ask.request_id, ask.system, ask.user, ask.prompt_token_ids, max_tokens)

    def _clean(self, values: dict[str, str | None]) -> dict[str, str | None]:
        cleaned = dict(values)
        found = 0
        for name, value in values.items():
            if value:
                cleaned[name], markers = self._neutralise(value)
                found += markers
        if found:
            self.changed["neutralised"] += 1
        return cleaned

    def _fitting(
        self, request: Request, values: dict[str, str | None], system: str, user: str, ids: list[int] | None
    ) -> Ask | tuple[str, Reason]:
        if not any(value and not value.isspace() for value in values.values()):
            return request.request_id, Reason.blank
        used = self._count(system, user, ids)
        if used > self._room:
            fitted = self._shorten(values, used) if self._cut else None
            if fitted is None:
                return request.request_id, Reason.too_long
            system, user, ids = fitted
            self.changed["cut"] += 1
        return Ask(request.request_id, system, user, ids, self.max_tokens)

    def _count(self, system: str, user: str, ids: list[int] | None) -> int:
        return len(ids) if ids is not None else int((len(system) + len(user)) / self._chars_per_token) + 1

    def _shorten(self, values: dict[str, str | None], used: int) -> tuple[str, str, list[int] | None] | None:
        """The prompt with its text cut so that it fits; None when even no text would."""
        text = values.get(TEXT) or ""
        bare = self._rendered({**values, TEXT: ""})
        room = self._room - self._count(*bare)
        share = max(used - self._count(*bare), 1)
        for _ in range(_CUTS):
            if room <= 0 or not text:
                return None
            text = cut_at_word(text, int(len(text) * min(room / share, 0.98)))
            prompt = self._rendered({**values, TEXT: text})
            if text and self._count(*prompt) <= self._room:
                return prompt
            share = max(self._count(*prompt) - self._count(*bare), 1)
        return None

    def _rendered(self, values: dict[str, str | None]) -> tuple[str, str, list[int] | None]:
        system, user = self._render(values)
        return system, user, self._tokenizer.encode(system, user) if self._tokenizer else None


def cut_at_word(text: str, chars: int) -> str:
    """The first `chars` characters of a text, back to the last word's end where there is one in its last tenth.

    >>> cut_at_word("good sound, bad cable", 19), cut_at_word("无空格的文字", 3)
    ('good sound, bad', '无空格')
    """
    head = text[:chars]
    if chars < len(text) and not text[chars].isspace():
        space = max((m.start() for m in re.finditer(r"\s", head[-max(chars // 10, 16) :])), default=-1)
        if space >= 0:
            head = head[: max(chars - max(chars // 10, 16), 0) + space]
    return head.rstrip()


def prefix_fields(plan: Plan) -> tuple[str, ...]:
    """Placeholders that stand before the text in the prompt's body: requests that share their values share a prefix."""
    body = plan.decision.prompt.body
    names = set(row_placeholders(plan.decision.prompt.text)) - {TEXT}
    before = re.split(r"\{\{-?\s*text\b", body, maxsplit=1)[0]
    try:
        return tuple(sorted(names & placeholders(before)))
    except ConfigError:  # the text stands inside a block: the part before it is no template of its own
        return tuple(sorted(names))
