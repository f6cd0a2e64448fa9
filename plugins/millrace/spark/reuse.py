"""Answers given before: which of a run's requests have one, and the file of them that join_back reads.

Ids are looked up first; values are read only from files that hold a hit. An answer's file and position identify it, so that of several
answers to one request the same one always wins: the latest `ok`, else the latest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millrace.answers import Status, held_to_floor, labels_of, parse_answer
from millrace.errors import IncompleteError
from millrace.lake import Lake
from millrace.layout import answers_prefix
from millrace.plan import Plan
from millrace.proof import answer_files
from millrace.records import FileRef
from millrace.schemas import ANSWER, ROW_KEY, ROW_REQUEST, ROW_SKIP, spark_ddl
from millrace.spark.cleaning import CHANGED
from millrace.spark.requests import INPUT, current_fingerprint, with_requests
from millrace.spark.session import in_spark, tasks_for
from millrace.spark.sharding import file_refs

_DDL = spark_ddl(pa.schema([field.with_nullable(True) for field in ANSWER]))


@dataclass(frozen=True)
class Answered:
    """Where a run may find answers, and which of them it takes."""

    files: list[str]
    size: int  # bytes of all files
    statuses: tuple[str, ...]
    since: datetime | None = None
    sure: bool = False  # only labels whose confidence is known: there is a floor to hold them to

    def read(self, spark: SparkSession, files: list[str]) -> DataFrame:
        """Acceptable answers of some files, each with `found_in` and `position`.

        A runner that was killed while it wrote into the cache leaves a torn file that no record names; it is no answer.
        """
        answers = spark.read.schema(_DDL).option("ignoreCorruptFiles", "true").parquet(*files)
        answers = answers.select(
            "*", F.col("_metadata.file_path").alias("found_in"), F.col("_metadata.row_index").alias("position")
        ).where(F.col("status").isin(*self.statuses))
        if self.sure:
            answers = answers.where((F.col("status") != Status.ok.value) | F.col("confidence").isNotNull())
        return answers if self.since is None else answers.where(F.col("answered_at") >= F.lit(self.since))


def answered_before(lake: Lake, plan: Plan) -> Answered | None:
    """The answers this plan may reuse, or None where there are none or it asks afresh.

    `reuse` takes what the cache holds under the current fingerprint, `ok` and `unknown`, `reuse_days` old at most. `unknowns` takes
    only what was `ok` in the base plan, whatever its fingerprint. `fresh` takes nothing: this plan alone bears its DAG run's id, and
    its requests are made only once.

    Under a confidence floor none takes an `ok` answer without a confidence. Engines are asked for it only where there is a floor, and
    an answer from before cannot be held to one.
    """
    if plan.decision.ask_mode == "fresh":
        return None
    if plan.decision.ask_mode == "unknowns":
        files = answer_files(lake, _base(lake, plan).paths)
        found = [(f.path, f.size) for f in files]
        statuses: tuple[str, ...] = (Status.ok.value,)
        since = None
    else:
        if not plan.enrichment.reuse_days:
            return None
        listed = lake.list(answers_prefix(current_fingerprint(plan)))
        found = [(f.path, f.size) for f in listed if f.path.endswith(".parquet") and f.size]
        statuses = (Status.ok.value, Status.unknown.value)
        since = datetime.now(UTC) - timedelta(days=plan.enrichment.reuse_days)
    if not found:
        return None
    # Where each label is optional an answer may have none of them, and so no confidence to lack.
    sure = plan.enrichment.limits.confidence_floor is not None and bool(
        labels_of(plan.enrichment.schema, required=True)
    )
    return Answered(in_spark(lake, [path for path, _ in found]), sum(size for _, size in found), statuses, since, sure)


def _base(lake: Lake, plan: Plan) -> Plan:
    return Plan.read(lake, str(plan.decision.base_plan))


def keep_base_answers(rows: DataFrame, lake: Lake, plan: Plan, answered: Answered) -> DataFrame:
    """For ask mode `unknowns`: rows that are `ok` in the base plan get the request id they have there, and `kept_answer` is true.

    The id is computed from the row as it is now, under the base plan's prompt and rules (and those of the plan that it is itself
    based on, and so on): a text that changed since has another id and is asked.
    """
    ok = answered.read(rows.sparkSession, answered.files).select(F.col(ROW_REQUEST).alias("base_id")).distinct()
    given = F.lit(None).cast("string")
    for index, base in enumerate(_bases(lake, plan)):
        old_ids = with_requests(rows.drop(INPUT, CHANGED, ROW_REQUEST, ROW_SKIP), base).select(
            ROW_KEY, F.col(ROW_REQUEST).alias(f"base_id_{index}")
        )
        found = old_ids.join(ok, F.col(f"base_id_{index}") == F.col("base_id"), "left_semi")
        rows = rows.join(found, ROW_KEY, "left")
        given = F.coalesce(given, F.col(f"base_id_{index}"))
    asked = F.col(ROW_REQUEST).isNotNull()
    return rows.withColumn("kept_answer", asked & given.isNotNull()).withColumn(
        ROW_REQUEST, F.when(asked, F.coalesce(given, F.col(ROW_REQUEST)))
    )


def _bases(lake: Lake, plan: Plan) -> Iterator[Plan]:
    while plan.decision.base_plan is not None:
        plan = _base(lake, plan)
        yield plan


def without_answered(requests: DataFrame, answered: Answered) -> DataFrame:
    """Requests that have no answer yet. Texts are merged, never broadcast: their partition must not hang on the size of the cache."""
    ids = answered.read(requests.sparkSession, answered.files).select(ROW_REQUEST)
    return requests.hint("merge").join(ids, ROW_REQUEST, "left_anti")


def write_reused(rows: DataFrame, answered: Answered, lake: Lake, plan: Plan, prefix: str) -> tuple[list[FileRef], int]:
    """Write the winning answer of every request of `rows` that has one to `prefix`; returns the files and how many rows it serves.

    `rows` needs `request_id` alone. Answers whose text was read under other rules are read again, never asked again.
    """
    spark = rows.sparkSession
    wanted = rows.where(F.col(ROW_REQUEST).isNotNull()).groupBy(ROW_REQUEST).agg(F.count(F.lit(1)).alias("rows"))
    best = F.max(
        F.struct(F.col("status") == Status.ok.value, F.col("answered_at"), F.col("found_in"), F.col("position"))
    )
    ids = answered.read(spark, answered.files)
    winners = (
        wanted.join(ids.groupBy(ROW_REQUEST).agg(best.alias("best")), ROW_REQUEST)
        .select(ROW_REQUEST, "rows", "best.found_in", "best.position")
        .persist(StorageLevel.MEMORY_AND_DISK)
    )
    try:
        hits = (
            winners.groupBy("found_in").agg(F.count(F.lit(1)).alias("requests"), F.sum("rows").alias("rows")).collect()
        )
        if not hits:
            return [], 0
        values = answered.read(spark, [hit["found_in"] for hit in hits])
        on = [ROW_REQUEST, "found_in", "position"]
        chosen = values.join(winners.select(*on), on).select(*ANSWER.names)
        chosen.coalesce(tasks_for(answered.size)).write.parquet(lake.spark_uri(prefix))
    finally:
        winners.unpersist()
    files = [read_again(lake, file, plan) for file in file_refs(lake, prefix)]
    requests = sum(hit["requests"] for hit in hits)
    if sum(file.rows for file in files) != requests:
        raise IncompleteError(
            f"{requests:,} answers were found, {sum(f.rows for f in files):,} written to '{prefix}': the answer cache changed under "
            "the run. Clear `extract`."
        )
    return files, sum(hit["rows"] for hit in hits)


def read_again(lake: Lake, file: FileRef, plan: Plan) -> FileRef:
    """The file itself if all its answers were read under the plan's reading, else a new file beside it in which they are."""
    with lake.parquet(file.path) as parquet:
        current = pa.scalar(plan.reading)
        groups = range(parquet.num_row_groups)
        if all(
            v == current for g in groups for v in parquet.read_row_group(g, columns=["reading"])["reading"].unique()
        ):
            return file
        path = file.path.removesuffix(".parquet") + f"-{plan.reading}.parquet"
        with lake.parquet_writer(path, ANSWER) as writer:
            # A few thousand answers at a time: memory does not grow with the file.
            for batch in parquet.iter_batches(batch_size=4096, columns=ANSWER.names):
                rows = [reread(row, plan) for row in batch.to_pylist()]
                writer.write_table(pa.Table.from_pylist(rows, ANSWER))
    return FileRef(path=path, size=lake.size(path) or 0, rows=file.rows)


def reread(row: dict[str, Any], plan: Plan) -> dict[str, Any]:
    if row["reading"] == plan.reading:
        return row
    enrichment = plan.enrichment
    parsed = parse_answer(row["raw_text"], enrichment.schema, row["finish_reason"], enrichment.form)
    confidence = orjson.loads(row["confidence"] or "{}")
    parsed = held_to_floor(parsed, enrichment.schema, confidence, enrichment.limits.confidence_floor)
    return row | {
        "status": parsed.status.value,
        "reason": parsed.reason and parsed.reason.value,
        "values": parsed.values_json() if parsed.status == Status.ok else None,
        "repaired": bool(parsed.repaired),
        "reading": plan.reading,
    }
