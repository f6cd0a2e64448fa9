"""The `extract` step: rows, reused answers, shards and the manifest that vouches for them. Create-once per plan."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from millrace.errors import IncompleteError
from millrace.lake import Lake
from millrace.layout import RunPaths, new_attempt
from millrace.plan import Plan
from millrace.records import FileRef, Manifest, ShardEntry
from millrace.schemas import ROW_KEY, ROW_REQUEST, ROW_SKIP
from millrace.spark import reuse
from millrace.spark.cleaning import CHANGED, CHANGES
from millrace.spark.requests import current_fingerprint, distinct_requests, row_columns, with_requests
from millrace.spark.session import derived_session, explain_rule_error
from millrace.spark.sharding import bucket_count, file_refs, make_shards
from millrace.spark.source import KEPT, check_keys, check_snapshot, read_source, to_rows

KEPT_ANSWER = "kept_answer"
# Parquet's writer would build a dictionary of values that hardly repeat before it gives it up: a tenth of the CPU of both writes.
DICTIONARY = "parquet.enable.dictionary"


@dataclass(frozen=True)
class RowCounts:
    rows: int
    skipped: dict[str, int]
    changed: dict[str, int]


def extract(spark: SparkSession, lake: Lake, paths: RunPaths) -> Manifest:
    """Make the run's requests, once: where a manifest exists and its files stand, it is returned and nothing is written.

    Raises ConfigError for null or doubled keys, for a rule that Spark refuses and for source files that changed since the plan;
    IncompleteError when files of an existing manifest are gone.
    """
    plan = Plan.read(lake, paths)
    existing = Manifest.load_or_none(lake, paths.manifest)
    if existing is not None:
        return check_manifest(lake, existing)
    try:
        manifest = make_manifest(spark, lake, plan, new_attempt())
    except PySparkException as error:
        # Class 22 is "data exception", and the rule is the only expression of a run that can meet a value it does not like.
        if plan.enrichment.source.exclude is None or not str(error.getSqlState()).startswith("22"):
            raise
        raise explain_rule_error(error, f"source.exclude of {plan.decision.enrichment}.yaml") from None
    lake.create(paths.manifest, manifest.dump())
    # Another attempt may have been first: then its manifest is the plan's, and our files stay unnamed.
    return Manifest.load(lake, paths.manifest)


def check_manifest(lake: Lake, manifest: Manifest) -> Manifest:
    """The manifest, once every file that it names has its size."""
    shard_files = [file for shard in manifest.shards for file in shard.files]
    with ThreadPoolExecutor(max_workers=16) as pool:
        list(pool.map(lambda file: file.check(lake), [*manifest.row_files, *manifest.reused_files, *shard_files]))
    return manifest


def make_manifest(spark: SparkSession, lake: Lake, plan: Plan, attempt: str) -> Manifest:
    """Write one attempt's files and return what its manifest says of them."""
    started = time.monotonic()
    prefix, limits = plan.paths.extract(attempt), plan.enrichment.limits
    check_snapshot(lake, plan)
    count = check_keys(to_rows(read_source(spark, plan), plan), plan)
    source_bytes = sum(file.size for file in plan.decision.source.files)
    spark = derived_session(spark, bucket_count(count, source_bytes, limits))
    # Pushing a condition on the request below the verbs that make it would make every request twice, once to judge it.
    spark.conf.set("spark.sql.optimizer.excludedRules", "org.apache.spark.sql.catalyst.optimizer.PushDownPredicates")

    rows = to_rows(read_source(spark, plan), plan).transform(with_requests, plan)
    answered = reuse.answered_before(lake, plan) if count else None
    asked = rows
    if plan.decision.base_plan is not None and answered is not None:
        rows = rows.transform(reuse.keep_base_answers, lake, plan, answered).persist()
        asked = rows.where(~F.col(KEPT_ANSWER))
    requests = distinct_requests(asked, plan)
    if plan.decision.base_plan is None and answered is not None:
        requests = requests.transform(reuse.without_answered, answered)

    def write_requests() -> list[ShardEntry]:
        ordered = requests.sortWithinPartitions(ROW_REQUEST)
        ordered.write.option(DICTIONARY, "false").parquet(lake.spark_uri(f"{prefix}/shards"))
        return make_shards(lake, f"{prefix}/shards", limits, plan.decision.default_model, current_fingerprint(plan))

    def write_rows() -> tuple[RowCounts, list[FileRef], list[FileRef], int]:
        counts = _write_rows(rows, plan, lake.spark_uri(f"{prefix}/rows"))
        row_files = file_refs(lake, f"{prefix}/rows")
        if answered is None:
            return counts, row_files, [], 0
        written = spark.read.parquet(*(lake.spark_uri(file.path) for file in row_files)).select(ROW_REQUEST)
        return counts, row_files, *reuse.write_reused(written, answered, lake, plan, f"{prefix}/reused")

    if not count:
        return _manifest(plan, attempt, started, RowCounts(0, {}, {}), [], [], 0, [])
    # Neither needs the other, and together they leave no core idle while the last task of one of them runs.
    with ThreadPoolExecutor(max_workers=2) as pool:
        shards, written_rows = pool.submit(write_requests), pool.submit(write_rows)
        counts, row_files, reused_files, reused_rows = written_rows.result()
        if not count == counts.rows == sum(file.rows for file in row_files):
            raise IncompleteError(f"the source has {count:,} rows, {counts.rows:,} were written. Clear `extract`.")
        return _manifest(plan, attempt, started, counts, row_files, reused_files, reused_rows, shards.result())


def _write_rows(rows: DataFrame, plan: Plan, uri: str) -> RowCounts:
    """Write the rows and count in the same pass what became of them."""
    seen = Observation()
    reasons = ("excluded", "blank", "too_long")
    # Observing copies every column of its rows: the texts are left behind first.
    rows = rows.select(ROW_KEY, KEPT, ROW_REQUEST, ROW_SKIP, CHANGED).observe(
        seen,
        F.count(F.lit(1)).alias("rows"),
        *(F.count_if(F.col(ROW_SKIP) == reason).alias(f"skipped_{reason}") for reason in reasons),
        *(F.count_if(F.col(CHANGED)[change]).alias(f"changed_{change}") for change in CHANGES),
    )
    writer = row_columns(rows, plan).write
    for column in (ROW_KEY, ROW_REQUEST):
        writer = writer.option(f"{DICTIONARY}#{column}", "false")
    writer.parquet(uri)
    counts = seen.get
    return RowCounts(
        rows=counts["rows"],
        skipped={r: counts[f"skipped_{r}"] for r in reasons if counts[f"skipped_{r}"]},
        changed={c: counts[f"changed_{c}"] for c in CHANGES if counts[f"changed_{c}"]},
    )


def _manifest(
    plan: Plan,
    attempt: str,
    started: float,
    counts: RowCounts,
    row_files: list[FileRef],
    reused_files: list[FileRef],
    reused_rows: int,
    shards: list[ShardEntry],
) -> Manifest:
    reused = sum(file.rows for file in reused_files)
    return Manifest(
        plan_id=plan.plan_id,
        attempt=attempt,
        rows=counts.rows,
        requests=reused + sum(shard.requests for shard in shards),
        reused=reused,
        skipped_rows=counts.skipped,
        reused_rows=reused_rows,
        infer_rows=counts.rows - sum(counts.skipped.values()) - reused_rows,
        changed=counts.changed,
        row_files=row_files,
        reused_files=reused_files,
        shards=shards,
        seconds=round(time.monotonic() - started, 3),
    )


def describe(manifest: Manifest) -> str:
    """The step's one line.

    >>> describe(Manifest(plan_id="", attempt="", rows=3708, requests=3697, reused=0, skipped_rows={}, reused_rows=0,
    ...          infer_rows=3708, changed={}, row_files=[], reused_files=[], shards=[], seconds=1))
    '3,708 rows -> 3,697 requests (0 reused) in 0 shards'
    """
    skipped = sum(manifest.skipped_rows.values())
    return (
        f"{manifest.rows:,} rows -> {manifest.requests:,} requests ({manifest.reused:,} reused) in {len(manifest.shards)} shards"
        + (f", {skipped:,} rows skipped" if skipped else "")
    )
