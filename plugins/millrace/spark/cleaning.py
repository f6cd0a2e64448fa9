"""What is done to a text before a model sees it: total, idempotent, counted. The warehouse's own text is never touched.

In this order, each only where it applies:

1. bytes that are not UTF-8, lone surrogates included, become U+FFFD (`bad_utf8`);
2. control characters other than tab, line feed and carriage return go (`control_chars`);
3. where the enrichment says `unwrap_json: field`, a text that is one JSON object, plain or escaped, becomes that field's value
   (`unwrapped`); one that is still such an object afterwards stays as it was, so that cleaning twice is cleaning once;
4. a text of more than `max_text_chars` code points is cut there, and if that splits a word, at the white space before it, at most 40
   characters back (`truncated`); or the row is skipped as `too_long` where the enrichment says so.

All else stays: emoji and their joiners, combining marks, direction marks, U+2028, spaces at the ends. Changing what these verbs
return changes what the model is asked: raise `millrace.plan.CLEANING_VERSION` with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from millrace.enrichment import Enrichment

# The columns that cleaning adds.
CLEAN_TEXT = "clean_text"
CHANGED = "changed"
CHANGES = ("bad_utf8", "control_chars", "unwrapped", "truncated")

_CONTROL = r"\x00-\x08\x0B\x0C\x0E-\x1F"
_CONTROLS = rf"[{_CONTROL}]"
_REMOVED = rf"[{_CONTROL}\uFFFD]"  # by steps 1 and 2, as Java reads malformed bytes
# Nothing that JSON escapes, and nothing malformed. What is allowed, taken without going back, is found twice as fast as what is not.
_PLAIN = r"\A[ !#-\[\]-\uFFFC\x{10000}-\x{10FFFF}]*+\z"
# Unicode's white space, and the zero-width space and byte-order mark, which look as empty.
_SPACES = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u200b"
    "\u2028\u2029\u202f\u205f\u3000\ufeff"
)
_SPLIT_WORD = rf"(?<=[^{_SPACES}])[{_SPACES}]+[^{_SPACES}]{{1,40}}\z"


@dataclass(frozen=True)
class Rules:
    """The part of an enrichment that cleaning depends on."""

    max_chars: int
    cut: bool
    unwrap: str | None

    @classmethod
    def of(cls, enrichment: Enrichment) -> Rules:
        limits = enrichment.limits
        return cls(limits.max_text_chars, limits.too_long == "cut", enrichment.source.unwrap_json)


def clean_characters(text: Column) -> Column:
    """Steps 1 and 2, for texts and for the other values of a prompt."""
    return F.regexp_replace(F.make_valid_utf8(text), _CONTROLS, "")


def with_clean_text(rows: DataFrame, text: str, where: Column, rules: Rules) -> DataFrame:
    """Add `clean_text`, and `changed`: which of CHANGES were made, a struct of booleans.

    All four steps are done where `where` holds. Elsewhere `clean_text` is the text as it is and `changed` is null. A null text stays null.
    Each step is a column: nested, it would be written out and computed again for each use.
    """
    given, characters, unwrapped = F.col(text), F.col("characters"), F.col("unwrapped")
    found = {
        "bad_utf8": ~F.is_valid_utf8(given),
        "control_chars": F.make_valid_utf8(given).rlike(_CONTROLS),
        "unwrapped": unwrapped != characters if rules.unwrap else F.lit(False),
        "truncated": F.char_length(unwrapped) > rules.max_chars if rules.cut else F.lit(False),
    }
    return (
        rows.withColumn("characters", F.when(where, clean_characters(given)))
        .withColumn("unwrapped", F.when(where, _unwrapped(characters, rules)))
        .withColumn(CLEAN_TEXT, F.when(where, _cut(unwrapped, rules)).otherwise(given))
        .withColumn(CHANGED, F.when(where, F.struct(*(found[change].alias(change) for change in CHANGES))))
        .drop("characters", "unwrapped")
    )


def is_plain(value: Column) -> Column:
    """Whether a value holds nothing that JSON escapes and nothing malformed, so that it can stand in JSON as it is; true for null.

    Java reads malformed bytes as U+FFFD, so one search answers both.
    """
    return F.coalesce(value.rlike(_PLAIN), F.lit(True))


def may_change(text: Column, others: list[Column], rules: Rules) -> Column:
    """False only if cleaning would return the text, and the other values of its prompt, as they are; costs a tenth of cleaning."""
    found = is_reshaped(text, rules)
    for value in (text, *others):
        found = found | F.coalesce(value.rlike(_REMOVED), F.lit(False))
    return found


def is_reshaped(text: Column, rules: Rules) -> Column:
    """Whether steps 3 or 4 may apply to a text: it begins as JSON does where JSON is unwrapped, or is longer than allowed."""
    # No text has more characters than bytes, and the bytes need not be counted.
    longer = (F.octet_length(text) > rules.max_chars) & (F.char_length(text) > rules.max_chars)
    wrapped = F.substring(F.ltrim(text), 1, 1).isin("{", '"') if rules.unwrap else F.lit(False)
    return F.coalesce(longer | wrapped, F.lit(False))


def is_blank(text: Column) -> Column:
    """Null, or nothing but white space. Looks beyond the first character only where that is white space."""
    # Strings compare by code point, so ranges around the white space of each script tell without decoding a character.
    ranges = (("\x85", "\xa1"), ("\u1680", "\u1681"), ("\u2000", "\u2060"), ("\u3000", "\u3001"), ("\ufeff", "\uff00"))
    starts_blank = text < "!"
    for first, beyond in ranges:
        starts_blank = starts_blank | ((text >= first) & (text < beyond))
    return F.when(starts_blank, F.btrim(text, F.lit(_SPACES)) == "").otherwise(F.coalesce(text == "", F.lit(True)))


def _unwrapped(text: Column, rules: Rules) -> Column:
    field = rules.unwrap
    if field is None:
        return text
    return _let(
        clean_characters(_field(text, field)),
        lambda inner: F.when(inner.isNotNull() & _field(inner, field).isNull(), inner).otherwise(text),
    )


def _field(text: Column, field: str) -> Column:
    """The field of a text that is one JSON object, or one escaped as a JSON string with or without its quotes; else null."""

    def unescape(trimmed: Column) -> Column:
        return (
            F.when(trimmed.startswith('"'), _json(trimmed, "$[0]"))
            .when(trimmed.startswith('{\\"'), _json(F.concat(F.lit('"'), trimmed, F.lit('"')), "$[0]"))
            .otherwise(trimmed)
        )

    def read(plain: Column) -> Column:
        return F.when(F.trim(plain).startswith("{"), _json(plain, f"$[0]['{field}']"))

    return _let(_let(F.trim(text), unescape), read)


def _json(text: Column, path: str) -> Column:
    """What a path finds in `[text]` if the text is one whole JSON value. Spark's JSON functions ignore what follows the first value."""
    return _let(
        F.concat(F.lit("["), text, F.lit("]")),
        lambda listed: F.when(F.json_array_length(listed) == 1, F.get_json_object(listed, path)),
    )


def _let(value: Column, use: Callable[[Column], Column]) -> Column:
    """`use(value)` with the value computed once and written once, where nesting would multiply expressions into millions."""
    return F.element_at(F.transform(F.array(value), use), 1)


def _cut(text: Column, rules: Rules) -> Column:
    if not rules.cut:
        return text
    head = F.substring(text, 1, rules.max_chars)
    splits_a_word = ~F.substring(text, rules.max_chars + 1, 1).isin(*_SPACES)
    cut = F.when(splits_a_word, F.regexp_replace(head, _SPLIT_WORD, "")).otherwise(head)
    return F.when(F.char_length(text) > rules.max_chars, cut).otherwise(text)
