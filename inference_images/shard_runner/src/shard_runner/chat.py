"""The model's own tokenizer and chat template: what the engine is shown, counted exactly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError

# Control markers of common chat formats. Models that write their turns in plain text do not list them as special tokens,
# and an endpoint's tokenizer is not at hand: these are neutralised for every engine.
KNOWN_MARKERS = frozenset(
    {
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|system|>",
        "<|user|>",
    }
    | {
        "<|assistant|>",
        "<|end|>",
        "<s>",
        "</s>",
        "<bos>",
        "<eos>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<think>",
        "</think>",
    }
    | {"[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"}
)
_MARKER = re.compile(r"^[<\[|].*[>\]|]$", re.DOTALL)


class Neutraliser:
    """Breaks control markers in row text with a space after their first character; everything else stays as it is.

    >>> Neutraliser(["<|im_end|>"])("nice <|im_end|> <b>")
    ('nice < |im_end|> <b>', 1)
    """

    def __init__(self, markers: Sequence[str] | frozenset[str]) -> None:
        longest_first = sorted((m for m in markers if len(m) > 1), key=lambda m: (-len(m), m))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        # Most texts hold none of the characters that markers start with: one look at the text settles those.
        self._first = (
            re.compile("[" + re.escape("".join(sorted({m[0] for m in longest_first}))) + "]") if longest_first else None
        )

    def __call__(self, text: str) -> tuple[str, int]:
        if self._pattern is None or self._first is None or not self._first.search(text):
            return text, 0
        return self._pattern.subn(lambda match: f"{match[0][0]} {match[0][1:]}", text)


class ChatTokenizer:
    """A tokenizer with its chat template, read from a model folder without network.

    The system text goes into the user turn when the template has no system role. A BOS that the template writes is kept; one that
    only the tokenizer would add is added, so that a prompt of a model that uses BOS starts with exactly one.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.hf: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        if not self.hf.chat_template:
            raise ConfigError(
                f"the model in '{folder.name}' has no chat template; add chat_template.jinja and add the model again."
            )
        self._bos: int | None = self.hf.bos_token_id
        self._adds_bos = self._bos is not None and self.hf("x")["input_ids"][:1] == [self._bos]
        self.folds_system = not self._accepts_system()
        self._neutralise = Neutraliser(KNOWN_MARKERS | self._markers())

    def _markers(self) -> frozenset[str]:
        added = self.hf.added_tokens_decoder.values()
        return frozenset(str(t) for t in added if t.special or _MARKER.match(str(t))) | frozenset(
            self.hf.all_special_tokens
        )

    def _accepts_system(self) -> bool:
        try:
            text = self._template([{"role": "system", "content": "S1S"}, {"role": "user", "content": "U2U"}])
        except Exception:  # a template refuses by raising whatever it likes
            return False
        return "S1S" in text and "U2U" in text

    def _template(self, messages: list[dict[str, str]]) -> str:
        text: str = self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def render(self, system: str, user: str) -> str:
        """The whole prompt as text."""
        if system and self.folds_system:
            return self._template([{"role": "user", "content": f"{system}\n\n{user}"}])
        messages = [{"role": "system", "content": system}] if system else []
        return self._template([*messages, {"role": "user", "content": user}])

    def encode(self, system: str, user: str) -> list[int]:
        return self.encode_many([(system, user)])[0]

    def encode_many(self, prompts: Sequence[tuple[str, str]]) -> list[list[int]]:
        texts = [self.render(system, user) for system, user in prompts]
        encoded: list[list[int]] = self.hf(texts, add_special_tokens=False)["input_ids"]
        return [self._one_bos(ids) for ids in encoded]

    def _one_bos(self, ids: list[int]) -> list[int]:
        if not self._adds_bos:
            return ids
        start = 0
        while start < len(ids) and ids[start] == self._bos:
            start += 1
        return [self._bos, *ids[start:]] if self._bos is not None else ids

    def neutralise(self, text: str) -> tuple[str, int]:
        return self._neutralise(text)
