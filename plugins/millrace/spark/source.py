"""The source partition of a run: exactly the files that the plan names, with the types it saw."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import obstore
import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from millrace.errors import ConfigError
from millrace.lake import Lake
from millrace.plan import Plan, SourceFile
from millrace.schemas import ROW_KEY, arrow_type, spark_ddl, spark_type
from millrace.spark.session import explain_rule_error, spark_form

# Columns of the frame that the verbs of extract work on, beside ROW_KEY. Kept columns sit in a struct: they may bear any name.
TEXT = "text"
KEPT = "kept"
EXCLUDED = "excluded"


def name(column: str) -> str:
    """A column's name quoted for Spark, which reads a bare dot as a struct's field."""
    return f"`{column}`"


def check_snapshot(lake: Lake, plan: Plan) -> None:
    """Raise ConfigError when a file that the plan names is gone or was rewritten since."""
    snapshot = plan.decision.source
    table = lake if snapshot.path.startswith(lake.root + "/") else Lake(snapshot.path)

    def stands(file: SourceFile) -> bool:
        try:
            meta = obstore.head(table.store, table.relative(file.path))
        except FileNotFoundError:
            return False
        version = (meta["e_tag"] or meta["last_modified"].isoformat()).strip('"')
        return meta["size"] == file.size and file.version in (version, "delta")

    # One small request a file; thousands of them on an object store are worth overlapping.
    with ThreadPoolExecutor(max_workers=16) as pool:
        changed = [f for f, same in zip(snapshot.files, pool.map(stands, snapshot.files), strict=True) if not same]
    if changed:
        raise ConfigError(
            f"{len(changed)} of {len(snapshot.files)} source files of {snapshot.partition_column}={plan.decision.partition} "
            f"changed or went after the plan was made, e.g. '{changed[0].path}'. Clear `plan` to decide afresh."
        )


def read_source(spark: SparkSession, plan: Plan) -> DataFrame:
    """The partition's rows with the columns the plan needs, under the source's names; no file, no row."""
    snapshot = plan.decision.source
    ddl = spark_ddl(pa.schema([pa.field(column, arrow_type(dtype)) for column, dtype in snapshot.columns.items()]))
    if not snapshot.files:
        return spark.createDataFrame([], ddl)
    rows = spark.read.schema(ddl).parquet(*(spark_form(file.path) for file in snapshot.files))
    day = snapshot.partition_column
    if snapshot.format == "delta" and day in snapshot.columns:
        # The table has the column, its files have not: it would be read as null.
        return rows.withColumn(day, F.lit(plan.decision.partition).cast(spark_type(arrow_type(snapshot.columns[day]))))
    return rows


def to_rows(source: DataFrame, plan: Plan) -> DataFrame:
    """`key` (string), `text`, `kept` (struct) and `excluded` (boolean) of every source row, or of the plan's sample of them.

    A sample is the rows with the lowest hash of the key, so that the same rows are in it whatever else changes.
    """
    spec, decision = plan.enrichment.source, plan.decision
    if spec.partition_column not in source.columns:
        source = source.withColumn(spec.partition_column, F.lit(decision.partition))
    try:
        rows = source.select(
            F.col(name(spec.key)).cast("string").alias(ROW_KEY),
            F.col(name(spec.text)).alias(TEXT),
            _struct(spec.keep).alias(KEPT),
            F.coalesce(F.expr(spec.exclude), F.lit(False)).alias(EXCLUDED)
            if spec.exclude
            else F.lit(False).alias(EXCLUDED),
        )
    except AnalysisException as error:
        raise explain_rule_error(error, f"source.exclude of {decision.enrichment}.yaml") from None
    if decision.row_sample is not None:
        rows = rows.orderBy(F.sha2(ROW_KEY, 256), ROW_KEY).limit(decision.row_sample).persist()
    return rows


def _struct(columns: tuple[str, ...]) -> Column:
    return F.struct(*(F.col(name(c)) for c in columns)) if columns else F.lit(None)


def check_keys(rows: DataFrame, plan: Plan) -> int:
    """Count the rows, and raise ConfigError unless each has a key of its own: with null or doubled keys no answer finds its row.

    Keys are compared by a 64-bit hash first: as many hashes as rows proves as many keys, and costs an eighth of the memory.
    """
    hashes = rows.groupBy(F.xxhash64(ROW_KEY).alias("hash")).agg(
        F.count(F.lit(1)).alias("rows"), F.count_if(F.col(ROW_KEY).isNull()).alias("nulls")
    )
    counts = hashes.agg(
        F.sum("rows").alias("rows"), F.sum("nulls").alias("nulls"), F.count(F.lit(1)).alias("keys")
    ).first()
    if counts is None or not counts["rows"]:
        return 0
    spec, where = plan.enrichment.source, f"{plan.decision.source.partition_column}={plan.decision.partition}"
    if counts["nulls"]:
        raise ConfigError(
            f"{counts['nulls']:,} of {counts['rows']:,} rows of '{spec.path}' {where} have no '{spec.key}' (source.key). "
            "Repair the source, or name another key, then clear `plan`."
        )
    if counts["keys"] < counts["rows"]:
        doubled = rows.groupBy(ROW_KEY).count().where("count > 1")
        found = doubled.agg(F.count(F.lit(1)).alias("keys"), F.sum("count").alias("rows")).first()
        if found is not None and found["keys"]:
            examples = ", ".join(f"'{row[ROW_KEY]}'" for row in doubled.orderBy(ROW_KEY).limit(3).collect())
            raise ConfigError(
                f"{found['keys']:,} values of '{spec.key}' (source.key) appear in {found['rows']:,} rows of '{spec.path}' {where}, e.g. "
                f"{examples}. Repair the source, or name a key that is unique within a date, then clear `plan`."
            )
    return int(counts["rows"])
