from __future__ import annotations

from pyspark.sql import functions as F

from millrace.spark.cleaning import CHANGES, Rules, is_blank, is_plain, is_reshaped, may_change, with_clean_text

CUT = Rules(max_chars=20, cut=True, unwrap=None)
WIDE = Rules(max_chars=10_000_000, cut=True, unwrap=None)
UNWRAP = Rules(max_chars=1000, cut=True, unwrap="text")

# Bytes as they may stand in a text column, and what is left of them: None where nothing may change.
CHARACTERS = {
    "NUL": (b"a\x00b", "ab"),
    "controls go, tab and line ends stay": (b"\x01a\tb\r\nc\x1f\x08\x0c", "a\tb\r\nc"),
    "a lone continuation byte": (b"a\x80b", "a\ufffdb"),
    "an overlong start": (b"\xc1\x80", "\ufffd\ufffd"),
    "a lone surrogate in UTF-8": (b"x\xed\xa0\xbdy", "x\ufffd\ufffd\ufffdy"),
    "an emoji family": ("👨‍👩‍👧‍👦".encode(), None),
    "combining marks are not composed": ("e\u0301 ą́".encode(), None),
    "right-to-left marks": ("\u202babc\u202c \u200f".encode(), None),
    "line separator": ("a\u2028b".encode(), None),
    "braces and quotes": (rb'{"a": "\u0041 \b"} {{ text }} ${HOME} %s', None),
    "spaces at the ends": (b"  a  ", None),
    "CJK and symbols": ("质量很好，推荐！𠮷 ﬁ №".encode(), None),
    "U+FFFD that was there": ("a\ufffdb".encode(), None),
}


def short_way(text, rules: Rules):
    """The condition on which extract takes a text as it is."""
    return is_plain(text) & ~is_reshaped(text, rules)


def cleaned(spark, texts: list[bytes], rules: Rules) -> list[tuple[str, str, bool, bool, bool, bool, bool]]:
    frame = spark.createDataFrame([(i, bytearray(t)) for i, t in enumerate(texts)], "i int, b binary")
    frame = frame.select("i", F.col("b").cast("string").alias("t"))
    once = with_clean_text(frame, "t", F.lit(True), rules).withColumnsRenamed(
        {"clean_text": "once", "changed": "found"}
    )
    twice = with_clean_text(once, "once", F.lit(True), rules)
    out = twice.select(
        "i",
        "once",
        F.col("clean_text").alias("twice"),
        *(F.col("found")[change] for change in CHANGES),
        (~short_way(F.col("t"), rules) & may_change(F.col("t"), [], rules)).alias("may_change"),
        (F.col("once") == F.col("t")).alias("same"),
    )
    return [tuple(row)[1:] for row in out.orderBy("i").collect()]


def test_every_odd_text_is_cleaned_once_and_for_all(spark):
    rows = cleaned(spark, [given for given, _ in CHARACTERS.values()], WIDE)
    for (what, (given, expected)), (once, twice, bad_utf8, controls, _, _, may, same) in zip(
        CHARACTERS.items(), rows, strict=True
    ):
        assert once == twice == (given.decode() if expected is None else expected), what
        assert (bad_utf8 or controls) == (expected is not None) == (not same), what
        assert may or same, f"{what}: the short way must not miss a text that cleaning changes"


def test_a_single_line_of_six_megabytes_passes(spark):
    [(once, twice, *_)] = cleaned(spark, ["长".encode() * 2_000_000], WIDE)
    assert len(once) == 2_000_000 and once == twice


LONG = {
    "exactly twenty chars": "exactly twenty chars",
    "cut at the word before it": "cut at the word",
    "this ends on a  word boundary": "this ends on a  word",
    "没有空格的文字一直写下去直到超过二十个字符为止": "没有空格的文字一直写下去直到超过二十个字",
    "😀" * 25: "😀" * 20,
    " " * 5 + "x" * 30: " " * 5 + "x" * 15,
}


def test_a_long_text_is_cut_at_a_word_or_else_at_a_code_point(spark):
    rows = cleaned(spark, [given.encode() for given in LONG], CUT)
    for (given, expected), (once, twice, _, _, _, truncated, _, _) in zip(LONG.items(), rows, strict=True):
        assert once == twice == expected
        assert truncated == (len(given) > 20)


WRAPPED = {
    '{"id": 7, "text": "the review"}': "the review",
    '  {"text": "a \\"quoted\\" word\\n"} ': 'a "quoted" word\n',
    '"{\\"text\\": \\"escaped\\"}"': "escaped",
    '{\\"text\\": \\"escaped without quotes\\"}': "escaped without quotes",
    '{"text": "a\\u0001b"}': "ab",
    '{"other": "x"}': None,
    '{"text": "a"} and more': None,
    '{"text": "a"}, {"text": "b"}': None,
    '{"text": "cut off': None,
    "{curly} words": None,
    '"just quoted"': None,
    '{"text": "{\\"text\\": \\"twice wrapped\\"}"}': None,
}


def test_one_whole_json_object_is_unwrapped_and_nothing_else(spark):
    rows = cleaned(spark, [given.encode() for given in WRAPPED], UNWRAP)
    for (given, expected), (once, twice, _, _, unwrapped, _, may, same) in zip(WRAPPED.items(), rows, strict=True):
        assert once == twice == (given if expected is None else expected), given
        assert unwrapped == (expected is not None), given
        assert may or same


def test_blank_is_null_empty_or_white_space_of_any_script(spark):
    blank = [None, "", " ", "\t\r\n", "\u3000\u00a0", "\u200b\ufeff", "\u2028"]
    texts = [*blank, "a", " a", "\u3000字", "0", "\u200d"]
    frame = spark.createDataFrame([(i, t) for i, t in enumerate(texts)], "i int, t string")
    got = [row.b for row in frame.select("i", is_blank(F.col("t")).alias("b")).orderBy("i").collect()]
    assert got == [True] * len(blank) + [False] * 5
