"""The `join_back` step: every answer fanned out to its rows, proved, counted and checked before anything is published."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millrace.answers import Status
from millrace.answers.kinds import LabelList, OneLabel
from millrace.errors import IncompleteError, RefusedError
from millrace.lake import Lake
from millrace.layout import RunPaths, new_attempt, published_prefix
from millrace.plan import Plan
from millrace.proof import prove_shards
from millrace.records import FileRef, Joined, Manifest
from millrace.schemas import ANSWER, ANSWER_META, ROW_KEY, ROW_REQUEST, ROW_SKIP, spark_ddl
from millrace.settings import Settings
from millrace.spark.session import derived_session, in_spark, tasks_for
from millrace.spark.sharding import file_refs
from millrace.spark.source import name as quoted
from millrace.spark.suites import Suite, run_suite

_META_COUNTED = ("model", "prompt_version", "fingerprint", "repaired", "plan_id")
_ANSWER_DDL = spark_ddl(pa.schema([f.with_nullable(True) for f in ANSWER]))


def join_back(spark: SparkSession, lake: Lake, paths: RunPaths) -> Joined:
    """Join, count and check a run's output. An earlier result of the plan whose files stand and whose suite passed is kept.

    Raises IncompleteError when a shard or a file is not proved, RefusedError when a row has no acceptable answer.
    """
    started = time.monotonic()
    plan = Plan.read(lake, paths)
    existing = Joined.load_or_none(lake, paths.joined)
    if existing is not None and existing.suite.passed and _stand(lake, existing.files):
        return existing
    suite = Suite.load(Settings.from_env().expectations, paths.enrichment, "enriched")
    manifest = Manifest.load(lake, paths.manifest)
    answer_files = [*manifest.reused_files, *(done.answers for done in prove_shards(lake, paths, manifest))]
    for file in [*manifest.row_files, *manifest.reused_files]:
        file.check(lake)

    attempt = new_attempt()
    prefix = published_prefix(plan.enrichment.target.path, paths.partition, plan.plan_id, attempt)
    if manifest.rows:
        write_joined(spark, lake, plan, manifest.row_files, answer_files, prefix)
    files = file_refs(lake, prefix) if manifest.rows else []
    tally = Tally.of(lake, plan, files)
    tally.check(plan, manifest)

    joined = Joined(
        plan_id=plan.plan_id,
        attempt=attempt,
        rows=tally.rows,
        statuses=dict(tally.statuses),
        reasons=dict(tally.reasons),
        by_model={model: dict(statuses) for model, statuses in tally.by_model.items()},
        reused=tally.reused,
        inferred=tally.rows - tally.reused - tally.statuses[Status.skipped.value],
        skipped=tally.statuses[Status.skipped.value],
        labels={name: dict(labels) for name, labels in tally.labels.items()},
        repaired=tally.repaired,
        files=files,
        suite=run_suite(spark, suite, tally.rows, plan.enrichment.source.key, lambda: _published(spark, lake, files)),
        seconds=round(time.monotonic() - started, 3),
    )
    lake.write(paths.joined, joined.dump())
    return joined


def _stand(lake: Lake, files: list[FileRef]) -> bool:
    try:
        for file in files:
            file.check(lake)
    except IncompleteError:
        return False
    return True


def _published(spark: SparkSession, lake: Lake, files: list[FileRef]) -> DataFrame:
    return spark.read.parquet(*in_spark(lake, [file.path for file in files]))


def write_joined(
    spark: SparkSession, lake: Lake, plan: Plan, row_files: list[FileRef], answer_files: list[FileRef], prefix: str
) -> None:
    """Read rows and answers, join, write the enriched rows to `prefix`."""
    spark = derived_session(spark, tasks_for(sum(file.size for file in [*row_files, *answer_files])))
    rows = spark.read.parquet(*in_spark(lake, [file.path for file in row_files]))
    answers = _read_answers(spark, lake, answer_files).transform(with_values, plan)
    rows.transform(with_answers, answers).transform(enriched_columns, plan).write.parquet(lake.spark_uri(prefix))


def _read_answers(spark: SparkSession, lake: Lake, files: list[FileRef]) -> DataFrame:
    if not files:
        return spark.createDataFrame([], _ANSWER_DDL)
    return spark.read.schema(_ANSWER_DDL).parquet(*in_spark(lake, [file.path for file in files]))


def with_values(answers: DataFrame, plan: Plan) -> DataFrame:
    """Request id, status, reason, typed values and meta of each answer; raw text stays behind."""
    schema = plan.enrichment.schema
    values = F.from_json(F.col("values"), schema.spark_ddl())
    meta = F.struct(*(F.col(f.name) for f in ANSWER_META))
    return answers.select(ROW_REQUEST, "status", "reason", values.alias("answer"), meta.alias("answer_meta"))


def with_answers(rows: DataFrame, answers: DataFrame) -> DataFrame:
    """Each row with its request's answer; a row that was skipped, or whose answer is missing, stays, with nulls.

    Hashing the answers saves sorting both sides: a task holds the answers of its share of the input (`tasks_for`).
    Both sides get a name, since kept columns may be called `status` or `reason` like those of an answer.
    """
    return rows.alias("row").join(answers.alias("given").hint("shuffle_hash"), ROW_REQUEST, "left")


def enriched_columns(joined: DataFrame, plan: Plan) -> DataFrame:
    """The columns of `schemas.enriched_schema` but for the partition's, which Delta knows from its log."""
    source, schema = plan.enrichment.source, plan.enrichment.schema
    was_skipped = F.col(ROW_SKIP).isNotNull()
    status = F.when(was_skipped, Status.skipped.value).otherwise(F.col("given.status"))
    return joined.select(
        F.col(ROW_KEY).alias(source.key),
        *(F.col(f"row.{quoted(column)}") for column in source.keep),
        *(F.col("given.answer")[n].alias(n) for n in schema.names),
        status.alias("answer_status"),
        F.coalesce(F.col(ROW_SKIP), F.col("given.reason")).alias("answer_reason"),
        "answer_meta",
    )


@dataclass
class Tally:
    """Counts of the rows that were written, taken from the files themselves, a row group at a time."""

    rows: int = 0
    repaired: int = 0
    reused: int = 0  # rows whose answer another plan asked for
    unanswered: int = 0  # rows without a status
    hollow: int = 0  # rows that are `ok` and lack a value they must have
    statuses: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    by_model: dict[str, Counter[str]] = field(default_factory=dict)
    labels: dict[str, Counter[str]] = field(default_factory=dict)
    fingerprints: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, lake: Lake, plan: Plan, files: list[FileRef]) -> Tally:
        tally, fields = cls(), plan.enrichment.schema.fields
        tally.labels = {f.name: Counter() for f in fields if isinstance(f.kind, OneLabel | LabelList)}
        columns = [
            "answer_status",
            "answer_reason",
            *(f"answer_meta.{c}" for c in _META_COUNTED),
            *(f.name for f in fields),
        ]
        for file in files:
            with lake.parquet(file.path) as parquet:
                for group in range(parquet.num_row_groups):
                    tally._add(parquet.read_row_group(group, columns=columns), plan)
        return tally

    def _add(self, table: pa.Table, plan: Plan) -> None:
        meta = pa.table({c: pc.struct_field(table["answer_meta"], c) for c in _META_COUNTED})
        table = table.append_column("answered_here", pc.equal(meta["plan_id"], plan.plan_id))
        for column in ("model", "prompt_version", "fingerprint", "repaired"):
            table = table.append_column(f"meta_{column}", meta[column])
        keys = [
            "answer_status",
            "answer_reason",
            "answered_here",
            *(f"meta_{c}" for c in _META_COUNTED if c != "plan_id"),
        ]
        self.rows += table.num_rows
        for row in table.select(keys).group_by(keys).aggregate([([], "count_all")]).to_pylist():
            status, count = row["answer_status"], row["count_all"]
            self.unanswered += count if status is None else 0
            self.statuses[status] += count
            if row["answer_reason"] is not None:
                self.reasons[row["answer_reason"]] += count
            if row["meta_model"] is not None:
                version = f"{row['meta_model']}@{row['meta_prompt_version']}"
                self.by_model.setdefault(version, Counter())[status] += count
                self.fingerprints.add(row["meta_fingerprint"])
                self.repaired += count if row["meta_repaired"] else 0
                self.reused += 0 if row["answered_here"] else count
        for label_field, counter in self.labels.items():
            column = table[label_field]
            values = pc.list_flatten(column) if pa.types.is_list(column.type) else column
            for pair in pc.value_counts(pc.drop_null(values)).to_pylist():
                counter[pair["values"]] += pair["counts"]
        is_ok = pc.equal(table["answer_status"], Status.ok.value)
        for f in plan.enrichment.schema.fields:
            if not f.optional:
                self.hollow += pc.sum(pc.and_(is_ok, pc.is_null(table[f.name]))).as_py() or 0

    def check(self, plan: Plan, manifest: Manifest) -> None:
        """Raise RefusedError unless every row of the manifest is there once, answered as the plan allows."""
        root, accepted = plan.paths.root, plan.decision.accepted_fingerprints
        problems = []
        if self.unanswered:
            problems.append(f"{self.unanswered:,} rows have no answer")
        if self.rows != manifest.rows:
            problems.append(
                f"{manifest.rows:,} rows were extracted, {self.rows:,} joined: a request has several answers"
            )
        foreign = sorted(self.fingerprints - set(accepted))
        if foreign:
            problems.append(f"answers bear fingerprint {foreign[0][:12]}…, which the plan does not accept")
        if self.hollow:
            problems.append(f"{self.hollow:,} values are missing from answers that are ok")
        # A runner may skip a request that proves too long: its rows were for a shard all the same, and carry a model.
        answered = sum(sum(statuses.values()) for statuses in self.by_model.values())
        if not problems and (self.reused, answered - self.reused) != (manifest.reused_rows, manifest.infer_rows):
            problems.append(
                f"{self.reused:,} rows have reused answers and {answered - self.reused:,} new ones, the manifest says "
                f"{manifest.reused_rows:,} and {manifest.infer_rows:,}"
            )
        if problems:
            raise RefusedError(f"{root}: {'; '.join(problems)}. Nothing was published; report this as a bug.")


def describe(joined: Joined) -> str:
    """The step's one line."""
    statuses = ", ".join(f"{count:,} {status}" for status, count in sorted(joined.statuses.items())) or "none"
    checks = "its checks passed" if joined.suite.passed else f"{len(joined.suite.blocking)} checks block"
    return f"{joined.rows:,} rows ({statuses}) in {len(joined.files)} files, {checks}"
