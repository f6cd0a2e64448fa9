"""A strict reader of what models write instead of JSON, for texts that `json` refuses.

It reads one superset of JSON: Python's True, False and None; strings in single, curly or German quotes; raw control characters in
strings; trailing commas; comments; unquoted keys; a key with no value. Nothing is evaluated, and nothing is closed, completed
or split on the model's behalf: a value counts only with its delimiter in the text. Sets, bytes, tuples, bare words as values,
missing commas and unknown escapes are not read. Each liberty taken is noted by name.

(The json-repair library was the first candidate; it completes cut values, which makes another label of a cut one.)
"""

from __future__ import annotations

import math
import re
from typing import Any

from millrace.answers.kinds import JSON_NUMBER, MISSING, decode_int, pairs_to_dict

MAX_DEPTH = 32

_CLOSERS = {'"': '"', "'": "'", "“": "”", "„": "“”", "”": "”", "‘": "’", "«": "»"}
# Possessive quantifiers: a string that never closes must cost one pass, not a search over all ways to split it.
_STRINGS = {
    quote: re.compile(rf"((?:[^\\{closers}]++|\\.)*+)[{closers}]", re.DOTALL) for quote, closers in _CLOSERS.items()
}
_SPACE = re.compile(r"(?:\s++|//[^\n]*+\n|/\*.*?\*/)*+", re.DOTALL)
_KEY = re.compile(r"[^\W\d]\w*+")
_WORD = re.compile(r"[\w.+-]++")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", '"': '"', "'": "'"}
_JSON_WORDS = {"true": True, "false": False, "null": None}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_NOT_FINITE = {"nan", "inf", "infinity", "-inf", "-infinity", "+inf", "+infinity"}

# An array counts as the start of an answer only where an object follows: "[1]" and "[sic]" are prose.
_START = re.compile(r"\{|\[(?=\s*\{)")
_BRACKET_OR_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\]"]', re.DOTALL)


class Cut(Exception):
    """The text ended inside an object or array."""


class TooDeep(Exception):
    """Brackets nest deeper than any answer does."""


class _Broken(Exception):
    """Not the superset either."""


class Reader:
    """Reads one value that starts with a bracket at `pos`; afterwards `pos` is behind it and `notes` holds the repairs."""

    def __init__(self, text: str, pos: int) -> None:
        self.text = text
        self.pos = pos
        self.notes: dict[str, None] = {}
        self.keyed = False  # a key and its colon were seen: this was meant as an object, not as prose

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise TooDeep
        char = self._peek()
        if char == "{":
            return self._object(depth)
        if char == "[":
            return self._array(depth)
        if char in _CLOSERS:
            return self._string()
        return self._word()

    def _object(self, depth: int) -> Any:
        self.pos += 1
        pairs: list[tuple[str, Any]] = []
        if self._after_space() == "}":
            self.pos += 1
            return {}
        while True:
            key = self._key()
            if self._after_space() != ":":
                raise _Broken
            self.keyed = True
            self.pos += 1
            # A missing value is noted by whoever looks for the field.
            pairs.append((key, MISSING if self._after_space() in ",}" else self.value(depth + 1)))
            if self._ends("}"):
                return pairs_to_dict(pairs)

    def _array(self, depth: int) -> list[Any]:
        self.pos += 1
        items: list[Any] = []
        if self._after_space() == "]":
            self.pos += 1
            return items
        while True:
            self._after_space()
            items.append(self.value(depth + 1))
            if self._ends("]"):
                return items

    def _ends(self, closer: str) -> bool:
        """After a value: past the closer (True), or past a comma to the next value (False)."""
        char = self._after_space()
        if char == ",":
            self.pos += 1
            char = self._after_space()
            if char != closer:
                return False
            self.notes["trailing_comma"] = None
        if char != closer:
            raise _Broken
        self.pos += 1
        return True

    def _key(self) -> str:
        if self._peek() in _CLOSERS:
            return self._string()
        match = _KEY.match(self.text, self.pos)
        if not match:
            raise _Broken
        self.pos = match.end()
        self.notes["unquoted_key"] = None
        return match.group()

    def _string(self) -> str:
        quote = self.text[self.pos]
        match = _STRINGS[quote].match(self.text, self.pos + 1)
        if not match:
            raise Cut
        self.pos = match.end()
        body = match.group(1)
        if quote != '"':
            self.notes["single_quotes" if quote == "'" else "curly_quotes"] = None
        if not body.isprintable() and any(char < " " for char in body):
            self.notes["control_character"] = None
        if "\\" not in body:
            return body
        body = _ESCAPE.sub(_unescape, body)
        # As `json` does: two escaped halves are one character; a lone half stays for the field to judge.
        return (
            body if body.isascii() else body.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        )

    def _word(self) -> Any:
        match = _WORD.match(self.text, self.pos)
        if not match:
            raise _Broken
        if match.end() == len(self.text):
            raise Cut
        self.pos = match.end()
        word = match.group()
        if word in _JSON_WORDS:
            return _JSON_WORDS[word]
        if word in _PYTHON_WORDS:
            self.notes["python_literal"] = None
            return _PYTHON_WORDS[word]
        if word.lower() in _NOT_FINITE:
            return math.nan
        if not JSON_NUMBER.fullmatch(word):
            raise _Broken
        return decode_int(word) if word.lstrip("-").isdigit() else float(word)

    def _peek(self) -> str:
        if self.pos >= len(self.text):
            raise Cut
        return self.text[self.pos]

    def _after_space(self) -> str:
        """The next character that is neither space nor comment; `pos` is at it."""
        match = _SPACE.match(self.text, self.pos)
        assert match is not None  # it matches the empty text
        if "/" in match.group():
            self.notes["comment"] = None
        self.pos = match.end()
        if self.text.startswith(("//", "/*"), self.pos):
            raise Cut  # a comment that never ends
        return self._peek()


def _unescape(match: re.Match[str]) -> str:
    code = match.group(1)
    if len(code) > 1:
        return chr(int(code[1:], 16))
    if code not in _ESCAPED:
        raise _Broken
    return _ESCAPED[code]


def scan(text: str) -> tuple[list[tuple[Any, list[str]]], bool]:
    """All complete objects, and arrays of them, at the top level of a text; and whether the text ends inside one.

    Each comes with its repairs. What stands inside a broken or cut object is never an answer of its own. A brace that does not
    even open a key is prose. Raises TooDeep. Time is linear in the length: what failed attempts may read is bounded.
    """
    found: list[tuple[Any, list[str]]] = []
    pos = 0
    wasted, most = 0, 8 * len(text)
    first, last = len(text) - len(text.lstrip()), len(text.rstrip())
    while start := _START.search(text, pos):
        reader = Reader(text, start.start())
        try:
            value = reader.value(0)
        except Cut:
            return found, True
        except _Broken:
            wasted += reader.pos - start.start()
            end = _closing_bracket(text, start.start()) if reader.keyed else start.end()
            if end is None:
                return found, False
            if wasted > most:
                return [], False
            pos = end
            continue
        pos = reader.pos
        if start.start() > first or pos < last:
            reader.notes["surrounding_text"] = None
        found.append((value, list(reader.notes) or ["spacing"]))
    return found, False


def _closing_bracket(text: str, start: int) -> int | None:
    """The position behind the bracket that closes the one at `start`; None where it stays open."""
    depth = 0
    for match in _BRACKET_OR_STRING.finditer(text, start):
        token = match.group()
        if token == '"':
            return None  # a string that never closes
        if token in "{[":
            depth += 1
        elif token in "}]":
            depth -= 1
            if depth == 0:
                return match.end()
    return None
