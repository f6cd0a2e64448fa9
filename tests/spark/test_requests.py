from __future__ import annotations

import pyarrow as pa

from millrace.canonical import canonical_json
from millrace.plan import request_id
from millrace.spark.extract import extract

from .conftest import World

NASTY = [
    'quotes " and \\ and / and {"json": true}',
    "line\nfeed, carriage\r\nreturn, tab\t",
    "{{ text }} {% raw %} ${HOME} %s {text}",
    "emoji 👨‍👩‍👧‍👦, 𠮷, combining e\u0301, rtl \u202bשלום\u202c",
    "separators \u2028 and \u2029, del \x7f, next line \x85, U+FFFD \ufffd",
    "literal \\u0000 and \\b and \\f",
    "null",
    "  spaces  ",
    "<b>&amp;</b>",
    *(f"one {chr(c)} letter" for c in range(0x20, 0x180)),
]


def test_spark_and_python_agree_on_the_id_and_the_input_of_every_text(spark, world: World):
    rows = [{"id": str(i), "comment": text, "rating": None if i % 2 else -0.9} for i, text in enumerate(NASTY)]
    world.write_source(rows)
    plan = world.plan()
    manifest = extract(spark, world.lake, plan.paths)
    found = {row["key"]: row["request_id"] for row in world.read(manifest.row_files)}
    inputs = {r["request_id"]: r["input"] for r in world.requests(plan)}
    for row in rows:
        values = {"rating": None if row["rating"] is None else "-0.9", "text": row["comment"]}
        expected = request_id(plan.decision.fingerprints["tiny"], values)
        assert found[row["id"]] == expected, row["comment"]
        assert inputs[expected] == canonical_json(values)


def test_what_cleaning_changed_is_counted_and_other_placeholders_are_cleaned_too(spark, world: World):
    world.spec["limits"]["max_text_chars"] = 10
    world.spec["source"]["keep"] = ["shop"]
    world.body = "{{ shop }}: {{ text }}"
    table = pa.table(
        {
            "id": ["a", "b", "c", "d"],
            "comment": pa.array([b"ok", b"nul\x00", b"bad\xff", b"long enough to cut"], pa.binary()).view(pa.string()),
            "shop": ["s\x01hop", "shop", "shop", "shop"],
        }
    )
    world.write_source(table)
    plan = world.plan()
    manifest = extract(spark, world.lake, plan.paths)
    assert manifest.changed == {"control_chars": 1, "bad_utf8": 1, "truncated": 1}
    assert sorted(r["input"] for r in world.requests(plan)) == sorted(
        canonical_json({"shop": "shop", "text": text}) for text in ("ok", "nul", "bad\ufffd", "long")
    )
    kept = {row["key"]: row["shop"] for row in world.read(manifest.row_files)}
    assert kept["a"] == "s\x01hop", "kept columns go to the table as the source has them"


def test_excluded_blank_and_too_long_rows_are_skipped_with_their_reason(spark, world: World):
    world.spec["limits"] |= {"max_text_chars": 10, "too_long": "skip"}
    world.spec["source"]["exclude"] = "rating < 0"
    rows = [
        ("a", "fine", 1.0),
        ("b", "fine", -1.0),
        ("c", None, 1.0),
        ("d", "much too long", 1.0),
        ("e", "fine", None),
        ("f", "", -1.0),
    ]
    world.write_source([{"id": i, "comment": t, "rating": r} for i, t, r in rows])
    plan = world.plan()
    manifest = extract(spark, world.lake, plan.paths)
    reasons = {row["key"]: row["skip_reason"] for row in world.read(manifest.row_files)}
    assert reasons == {"a": None, "b": "excluded", "c": "blank", "d": "too_long", "e": None, "f": "excluded"}
    assert manifest.skipped_rows == {"excluded": 2, "blank": 1, "too_long": 1}
    assert (manifest.rows, manifest.infer_rows) == (6, 2)
