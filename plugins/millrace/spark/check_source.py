"""The `check_source` step: the source partition's profile, and the suite that judges it before anything is spent."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from millrace.errors import RefusedError
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.plan import Plan
from millrace.records import SuiteResult
from millrace.settings import Settings
from millrace.spark.cleaning import is_blank
from millrace.spark.source import check_snapshot, name, read_source
from millrace.spark.suites import Suite, run_suite

# A character that no text should hold: controls other than tab and line ends, private use, unassigned, and the mark of a bad byte.
_ODD = r"[\p{Cc}\p{Co}\p{Cn}\x{FFFD}&&[^\t\n\r]]"
_MARKUP = r"</?[A-Za-z][^<>]*>|&(?:[a-z]{2,8}|#\d{1,6});"


def check_source(spark: SparkSession, lake: Lake, paths: RunPaths) -> str:
    """Run the suite and record what it said; returns the step's one line.

    Raises RefusedError when it blocks, after the record is written.
    """
    plan = Plan.read(lake, paths)
    suite = Suite.load(Settings.from_env().expectations, paths.enrichment, "source")
    check_snapshot(lake, plan)
    source = read_source(spark, plan)
    result = run_suite(spark, suite, source.count(), plan.enrichment.source.key, lambda: profile(source, plan))
    lake.write(paths.source_check(), result.dump())
    if not result.passed:
        raise RefusedError(explain(result, paths))
    met = sum(r.outcome == "met" for r in result.results)
    return f"{met} of {result.asked} checks met over {result.rows:,} rows"


def explain(result: SuiteResult, paths: RunPaths) -> str:
    said = [f"{r.name} is {r.outcome} ({r.observed or 'nothing observed'}): {r.why}" for r in result.blocking]
    if result.asked != len(result.results):
        said.append(f"{result.asked} checks were asked, {len(result.results)} answered")
    return (
        f"{result.suite} blocks {paths.enrichment} {paths.partition}: {'; '.join(said)} "
        f"Repair the source and clear `plan`, or change the check and clear `check_source`."
    )


def profile(source: DataFrame, plan: Plan) -> DataFrame:
    """What the suite sees of each row: key, kept columns and measures of the text, never the text itself.

    | column | meaning |
    | --- | --- |
    | has_text | 1 when the text is more than white space |
    | text_chars | its code points, null without a text |
    | json_like | 1 when it is a JSON object or list, plain or escaped |
    | markup_like | 1 when it holds an HTML or XML tag or entity |
    | odd_chars | share of its characters that are controls, unassigned, private use or U+FFFD |
    | days_after_date | days from the partition's date to the last change of the row's file |
    """
    spec = plan.enrichment.source
    kept = [F.col(name(c)) for c in dict.fromkeys([spec.key, *spec.keep])]
    text = F.make_valid_utf8(F.col(name(spec.text)))
    source = source.withColumn("days_after_date", _days_after(plan)).select(
        *kept, text.alias("text_"), "days_after_date"
    )
    text = F.when(~is_blank(F.col("text_")), F.col("text_"))
    return source.select(
        *kept,
        F.when(text.isNotNull(), 1).otherwise(0).alias("has_text"),
        F.char_length(text).alias("text_chars"),
        F.when(text.rlike(r'^\s*"?(?:\{\s*\\?"|\[\s*[\[{"\d\]])'), 1).when(text.isNotNull(), 0).alias("json_like"),
        F.when(text.rlike(_MARKUP), 1).when(text.isNotNull(), 0).alias("markup_like"),
        (F.regexp_count(text, F.lit(_ODD)) / F.char_length(text)).alias("odd_chars"),
        "days_after_date",
    )


def _days_after(plan: Plan) -> Column:
    changed = F.to_date(F.col("_metadata.file_modification_time"))
    return F.date_diff(changed, F.lit(plan.decision.partition).cast("date"))
