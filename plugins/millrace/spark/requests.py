"""From a row to its request: the values its prompt needs, cleaned, as canonical JSON, and the id made from them.

`millrace.plan.request_id` defines the id; the expressions here give the same one for every text (tests/spark/test_requests.py).
"""

from __future__ import annotations

from functools import reduce
from operator import and_

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from millrace.answers import Reason
from millrace.canonical import canonical_json
from millrace.plan import Plan
from millrace.prompts import TEXT as TEXT_PLACEHOLDER
from millrace.prompts import renderer, row_placeholders
from millrace.schemas import ROW_REQUEST, ROW_SKIP
from millrace.spark.cleaning import (
    CLEAN_TEXT,
    Rules,
    clean_characters,
    is_blank,
    is_plain,
    is_reshaped,
    may_change,
    with_clean_text,
)
from millrace.spark.source import EXCLUDED, KEPT, TEXT, name

INPUT = "input"


def with_requests(rows: DataFrame, plan: Plan) -> DataFrame:
    """Add `input`, `request_id` or `skip_reason`, and `changed` (null, or struct of booleans) to the frame of `source.to_rows`.

    Most values can stand in JSON as they are; only the others pay for an encoder, and fewer still for the verbs of `cleaning`.
    """
    rules = Rules.of(plan.enrichment)
    names = row_placeholders(plan.decision.prompt.text)
    raw = {n: F.col(TEXT) if n == TEXT_PLACEHOLDER else F.col(KEPT)[n].cast("string") for n in names}
    others = {n: value for n, value in raw.items() if n != TEXT_PLACEHOLDER}
    plain, dirty = F.col("plain"), F.col("dirty")
    cleaned = {TEXT_PLACEHOLDER: F.col(CLEAN_TEXT)}
    cleaned |= {n: F.when(dirty, clean_characters(value)).otherwise(value) for n, value in others.items()}
    return (
        rows.withColumn("plain", reduce(and_, map(is_plain, raw.values()), ~is_reshaped(F.col(TEXT), rules)))
        .withColumn("dirty", ~plain & may_change(F.col(TEXT), list(others.values()), rules))
        .transform(with_clean_text, TEXT, dirty, rules)
        .withColumn(INPUT, F.when(plain, plain_json(raw)).otherwise(to_json(cleaned)))
        .withColumn(ROW_SKIP, _skip_reason(F.col(CLEAN_TEXT), rules))
        .withColumn(ROW_REQUEST, F.when(F.col(ROW_SKIP).isNull(), request_id(current_fingerprint(plan))))
        .drop("plain", "dirty", CLEAN_TEXT)
    )


def current_fingerprint(plan: Plan) -> str:
    """The fingerprint under which every request of the run is asked: all go to the default model."""
    return plan.decision.fingerprints[plan.decision.default_model]


def to_json(values: dict[str, Column]) -> Column:
    """Canonical JSON of string columns: keys sorted, null kept. Equal to `canonical_json` for text without control characters."""
    return F.to_json(_struct(values), {"ignoreNullFields": "false"})


def plain_json(values: dict[str, Column]) -> Column:
    """What `to_json` returns for values that are all `cleaning.is_plain`."""
    parts: list[Column] = []
    for n in sorted(values):
        value = F.coalesce(F.concat(F.lit('"'), values[n], F.lit('"')), F.lit("null"))
        parts += [F.lit(f"{',' if parts else '{'}{canonical_json(n)}:"), value]
    return F.concat(*parts, F.lit("}"))


def _struct(values: dict[str, Column]) -> Column:
    return F.struct(*(values[n].alias(n) for n in sorted(values)))


def request_id(fingerprint: str) -> Column:
    return F.sha2(F.concat(F.lit(f"{fingerprint}\n"), F.col(INPUT)), 256)


def distinct_requests(rows: DataFrame, plan: Plan) -> DataFrame:
    """One line per distinct input, in the columns of `schemas.REQUEST`.

    Rows with equal input are one request whichever of them is met first: nothing else of a row enters it, so there is no tie to break.
    Grouping by the input and hashing afterwards moves 64 bytes less per row and hashes each input once.
    """
    # Asking for the request's id instead would hash every row for this alone.
    distinct = rows.where(F.col(ROW_SKIP).isNull()).select(INPUT).distinct()
    return distinct.select(
        request_id(current_fingerprint(plan)).alias(ROW_REQUEST),
        INPUT,
        _estimated_tokens(plan).alias("est_tokens"),
    )


def row_columns(rows: DataFrame, plan: Plan) -> DataFrame:
    """The columns of `schemas.rows_schema`."""
    kept = [F.col(f"{KEPT}.{name(c)}") for c in plan.enrichment.source.keep]
    return rows.select("key", *kept, ROW_REQUEST, ROW_SKIP)


def _skip_reason(text: Column, rules: Rules) -> Column:
    reason = F.when(F.col(EXCLUDED), Reason.excluded.value).when(is_blank(text), Reason.blank.value)
    return reason if rules.cut else reason.when(F.char_length(text) > rules.max_chars, Reason.too_long.value)


def _estimated_tokens(plan: Plan) -> Column:
    """Estimated prompt tokens: the characters of the rendered prompt by the model's measured ratio."""
    names = row_placeholders(plan.decision.prompt.text)
    empty = dict.fromkeys(names, "")
    static = sum(map(len, renderer(plan.decision.prompt.text, plan.enrichment.schema.describe())(empty)))
    ratio = plan.decision.models[plan.decision.default_model].chars_per_token
    # The JSON around the values is not part of the prompt; the escapes inside them are few.
    around = len(canonical_json(empty))
    chars = F.char_length(INPUT) + F.lit(static - around)
    return F.ceil(chars / F.lit(float(ratio))).cast("int")
