"""Label sets: when is what the model wrote one of the labels?"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# A minus sign before a number is part of the label: "-1" must never be read as "1".
_MINUS = re.compile(r"-(?=\d)")


def normalise(text: str) -> str:
    """The form in which labels are compared: NFKC, case folded, `_` and `-` as spaces, outer space and punctuation trimmed.

    >>> normalise(" **Very_Good!** ")
    'very good'
    >>> normalise("-1."), normalise("1")
    ('-1', '1')
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    start, end = 0, len(text)
    while start < end and _is_trimmed(text[start]) and not _MINUS.match(text, start):
        start += 1
    while end > start and _is_trimmed(text[end - 1]):
        end -= 1
    sign = "-" if _MINUS.match(text, start) else ""
    return sign + " ".join(text[start + len(sign) : end].replace("_", " ").replace("-", " ").split())


def _is_trimmed(char: str) -> bool:
    category = unicodedata.category(char)
    return char == "`" or char.isspace() or category[0] in "PZ" or category in ("Cc", "Cf")


@dataclass(frozen=True, slots=True)
class LabelSet:
    """Labels in their order, their descriptions, and other spellings that mean one of them (aliases).

    `LabelSet.problem()` names what is wrong with a set; only sets without a problem may be used.
    """

    labels: tuple[str, ...]
    descriptions: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    _exact: dict[str, str] = field(init=False, repr=False, compare=False)
    _normalised: dict[str, tuple[str, str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_exact", {label: label for label in self.labels})
        table = {normalise(alias): (label, "alias") for alias, label in self.aliases.items()}
        table |= {normalise(label): (label, "normalised") for label in self.labels}
        object.__setattr__(self, "_normalised", table)

    def problem(self) -> str | None:
        """What makes the set unusable, and the fix; None for a usable one."""
        if not self.labels:
            return "has no labels: list at least one"
        owners: dict[str, tuple[str, str]] = {}
        for spelling, label in self.spellings():
            key = normalise(spelling)
            if not key:
                return f"{spelling!r} holds nothing but space and punctuation: give it a name of letters or digits"
            if spelling != spelling.strip() or any(unicodedata.category(char) in ("Cc", "Cs") for char in spelling):
                return f"{spelling!r} has outer spaces, control characters or broken Unicode: remove them"
            other = owners.setdefault(key, (spelling, label))
            if other[1] != label:
                return (
                    f"{other[0]!r} and {spelling!r} are the same once case, spaces, punctuation, '_' and '-' "
                    "are set aside: rename or remove one"
                )
        if len(self._exact) != len(self.labels):
            return "lists a label twice: remove one"
        for alias, label in self.aliases.items():
            if label not in self._exact:
                return f"alias {alias!r} points to {label!r}, which is not a label: use one of {', '.join(self.labels)}"
        return None

    def spellings(self) -> Iterator[tuple[str, str]]:
        """(spelling, label) of all labels, then all aliases."""
        yield from self._exact.items()
        yield from self.aliases.items()

    def find(self, text: str) -> tuple[str, str] | None:
        """The label a text stands for and how it was found ("exact", "normalised" or "alias"); None where it is none.

        Never by substring: "not spam" is not "spam".
        """
        label = self._exact.get(text)
        return (label, "exact") if label is not None else self._normalised.get(normalise(text))
