"""From a row to its request: the values its prompt needs, cleaned, as canonical JSON, and the id made from them.

`millrace.plan.request_id` defines the id; the expressions here give the same one for every text (tests/spark/test_requests.py).
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from millrace.answers import Reason
from millrace.canonical import canonical_json
from millrace.plan import Plan
from millrace.prompts import TEXT as TEXT_PLACEHOLDER
from millrace.prompts import renderer, row_placeholders
from millrace.schemas import ROW_REQUEST, ROW_SKIP
from millrace.spark.cleaning import CHANGES, Rules, changes, clean, clean_characters, is_blank, let, may_change
from millrace.spark.source import EXCLUDED, KEPT, TEXT, name

INPUT = "input"
CHANGED = "changed"


def with_requests(rows: DataFrame, plan: Plan) -> DataFrame:
    """Add `input`, `request_id` or `skip_reason`, and `changed` (null, or struct of booleans) to the frame of `source.to_rows`.

    Most texts need no cleaning, so their JSON is made first and shows it; only the others pay for the verbs of `cleaning`.
    """
    rules = Rules.of(plan.enrichment)
    names = row_placeholders(plan.decision.prompt.text)
    raw = {n: F.col(TEXT) if n == TEXT_PLACEHOLDER else F.col(KEPT)[n].cast("string") for n in names}

    def cleaned(values: Column) -> Column:
        done = {n: clean(values[n], rules) if n == TEXT_PLACEHOLDER else clean_characters(values[n]) for n in names}
        found = changes(values[TEXT_PLACEHOLDER], rules)
        return F.struct(
            done[TEXT_PLACEHOLDER].alias("text"),
            to_json(done).alias(INPUT),
            F.struct(*(found[c].alias(c) for c in CHANGES)).alias(CHANGED),
        )

    dirty = F.col("cleaned").isNotNull()
    return (
        rows.withColumn("raw_input", to_json(raw))
        .withColumn(
            "cleaned",
            F.when(may_change(F.col(TEXT), F.col("raw_input"), _is_escaped(raw), rules), let(_struct(raw), cleaned)),
        )
        .withColumn("clean_text", F.when(dirty, F.col("cleaned.text")).otherwise(F.col(TEXT)))
        .withColumn(INPUT, F.when(dirty, F.col(f"cleaned.{INPUT}")).otherwise(F.col("raw_input")))
        .withColumn(CHANGED, F.col(f"cleaned.{CHANGED}"))
        .withColumn(ROW_SKIP, _skip_reason(F.col("clean_text"), rules))
        .withColumn(ROW_REQUEST, F.when(F.col(ROW_SKIP).isNull(), request_id(current_fingerprint(plan))))
        .drop("raw_input", "cleaned", "clean_text")
    )


def current_fingerprint(plan: Plan) -> str:
    """The fingerprint under which every request of the run is asked: all go to the default model."""
    return plan.decision.fingerprints[plan.decision.default_model]


def to_json(values: dict[str, Column]) -> Column:
    """Canonical JSON of string columns: keys sorted, null kept. Equal to `canonical_json` for text without control characters."""
    return F.to_json(_struct(values), {"ignoreNullFields": "false"})


def _is_escaped(values: dict[str, Column]) -> Column:
    """Whether the JSON `raw_input` of these values is longer than the values and what stands around them: an O(1) question."""
    lengths = [F.coalesce(F.octet_length(value), F.lit(len("null") - len('""'))) for value in values.values()]
    return F.octet_length("raw_input") > sum(lengths, F.lit(len(canonical_json(dict.fromkeys(values, "")))))


def _struct(values: dict[str, Column]) -> Column:
    return F.struct(*(values[n].alias(n) for n in sorted(values)))


def request_id(fingerprint: str) -> Column:
    return F.sha2(F.concat(F.lit(f"{fingerprint}\n"), F.col(INPUT)), 256)


def distinct_requests(rows: DataFrame, plan: Plan) -> DataFrame:
    """One line per distinct input, in the columns of `schemas.REQUEST`.

    Rows with equal input are one request whichever of them is met first: nothing else of a row enters it, so there is no tie to break.
    Grouping by the input and hashing afterwards moves 64 bytes less per row and hashes each input once.
    """
    distinct = rows.where(F.col(ROW_REQUEST).isNotNull()).select(INPUT).distinct()
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
