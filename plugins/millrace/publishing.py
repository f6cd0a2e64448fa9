"""Publishing: one atomic commit of one partition into the enriched Delta table, and the way back.

join_back has already written the Parquet files below the table; a commit only makes them visible, without a copy. Readers see the
old version of a date or the new one, and no other date is touched. docs/publishing.md tells the whole story.

What a commit records, as custom metadata under these names: `millrace.partition`, `millrace.plan_id`, `millrace.run`,
`millrace.rows`, `millrace.sample` (true or false), `millrace.unknown_rate`, `millrace.number`, and `millrace.rollback_to` after a rollback.
"""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from millrace.enrichment import Enrichment
from millrace.errors import ConfigError, IncompleteError, NotFoundError, RefusedError, UnavailableError
from millrace.lake import Lake
from millrace.layout import RunPaths, published_prefix
from millrace.plan import Plan
from millrace.records import Audit, FileRef, Joined
from millrace.schemas import arrow_type, enriched_schema, spark_type

PARTITION = "dt"
# A conflict costs one reload of the table; 20 rounds were ample for seven dates published at once.
MAX_ROUNDS = 20

_KEY = "millrace.key"
_ENRICHMENT = "millrace.enrichment"


@dataclass(frozen=True)
class PublishedVersion:
    """One commit of one date, as the table's history has it."""

    version: int
    at: datetime
    partition: str
    plan_id: str
    run: str
    rows: int
    sample: bool
    unknown_rate: float
    rollback_to: int | None


# -- the table ---------------------------------------------------------------------------------------------------------


def storage_options(lake: Lake) -> dict[str, str]:
    """What deltalake needs beside the standard AWS_* variables, which it reads by itself.

    Without a conditional put two commits of one version could both succeed on an object store.
    """
    if lake.is_local:
        return {}
    options = {"AWS_CONDITIONAL_PUT": os.environ.get("AWS_CONDITIONAL_PUT", "etag")}
    if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        options["AWS_ALLOW_HTTP"] = "true"
    return options


def open_table(lake: Lake, target: str, version: int | None = None) -> DeltaTable | None:
    """The enriched table at `target` (relative to the lake), afresh from storage; None when nothing was published yet.

    Raises UnavailableError when the store or the table's log cannot be read.
    """
    try:
        return DeltaTable(lake.uri(target), version=version, storage_options=storage_options(lake))
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as error:
        raise UnavailableError(
            f"The table '{target}' cannot be read: {_first_line(error)}. Mend it, then retry."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def target_schema(plan: Plan) -> pa.Schema:
    """Columns of the enriched table under this plan, with the types that Spark writes and Delta keeps."""
    source, columns = plan.enrichment.source, plan.decision.source.columns
    try:
        keep = [pa.field(name, _stored(arrow_type(columns[name]))) for name in source.keep]
        for column in keep:
            spark_type(column.type)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{plan.decision.enrichment}: source.keep: {error}") from error
    return enriched_schema(source.key, keep, plan.enrichment.schema.arrow_fields(), PARTITION)


def _stored(dtype: pa.DataType) -> pa.DataType:
    """The type a source column has after Spark wrote it: microseconds, UTC, plain strings and lists."""
    if pa.types.is_timestamp(dtype):
        return pa.timestamp("us", tz="UTC" if dtype.tz else None)
    if pa.types.is_large_string(dtype):
        return pa.string()
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        return pa.list_(_stored(dtype.value_type))
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(field.name, _stored(field.type)) for field in dtype])
    return dtype


def _type_changes(existing: pa.Schema, wanted: pa.Schema) -> list[str]:
    """Columns that both schemas have with different types. Compared as Spark types: list item names and the like do not matter."""
    return [
        f"column '{field.name}' is {spark_type(existing.field(field.name).type)} in the table and would become "
        f"{spark_type(field.type)}"
        for field in wanted
        if field.name in existing.names
        and spark_type(_stored(existing.field(field.name).type)) != spark_type(field.type)
    ]


def check_target(lake: Lake, plan: Plan) -> None:
    """Refuse at plan time what the enriched table cannot take: a changed type, key or partition column, or a foreign table.

    New columns are fine (they are added with the commit), and so are removed ones (they stay and are null). Raises ConfigError naming
    every difference and what to do.
    """
    target = plan.enrichment.target.path
    if "://" in target:
        raise ConfigError(
            f"{plan.decision.enrichment}: target.path: '{target}' is a URL; the target is a folder below the lake."
        )
    target_schema(plan)
    table = open_table(lake, target)
    if table is not None:
        _check_table(table, plan)


def _check_table(table: DeltaTable, plan: Plan) -> pa.Schema:
    """The table's schema, proved fit for the plan."""
    enrichment, existing = plan.enrichment, pa.schema(table.schema().to_arrow())
    metadata = table.metadata()
    problems = _type_changes(existing, target_schema(plan))
    if metadata.partition_columns != [PARTITION]:
        problems.append(f"it is partitioned by {metadata.partition_columns}, not by '{PARTITION}'")
    key = metadata.configuration.get(_KEY)
    if key is None and enrichment.source.key not in existing.names:
        problems.append(f"it has no key column '{enrichment.source.key}'")
    elif key is not None and key != enrichment.source.key:
        problems.append(f"its key is '{key}', and source.key is now '{enrichment.source.key}'")
    owner = metadata.configuration.get(_ENRICHMENT, enrichment.name)
    if owner != enrichment.name:
        problems.append(f"it belongs to the enrichment '{owner}'")
    if problems:
        raise ConfigError(
            f"{enrichment.name}: the enriched table '{enrichment.target.path}' cannot take this plan: {'; '.join(problems)}. "
            "Give the changed field a new name, or set target.path to a new table and backfill the dates you need."
        )
    return existing


def _create_table(lake: Lake, plan: Plan) -> None:
    """Create the empty table. Losing the race to another first publish is fine: its table is as good."""
    try:
        DeltaTable.create(
            lake.uri(plan.enrichment.target.path),
            schema=target_schema(plan),
            mode="error",
            partition_by=[PARTITION],
            description=f"Published by Millrace, enrichment {plan.enrichment.name}",
            configuration={_KEY: plan.enrichment.source.key, _ENRICHMENT: plan.enrichment.name},
            storage_options=storage_options(lake),
            raise_if_key_not_exists=False,
        )
    except DeltaError:
        if open_table(lake, plan.enrichment.target.path) is None:
            raise


# -- what is live ------------------------------------------------------------------------------------------------------


def _files(table: DeltaTable, partition: str) -> list[dict[str, Any]]:
    """path (below the table), size_bytes and num_records of a date's files in one version of the table."""
    # Through a stream: `pa.table` would import pandas, which costs a process longer than the publish itself.
    actions = pa.RecordBatchReader.from_stream(table.get_add_actions(flatten=True)).read_all()
    column = f"partition.{PARTITION}"
    if column not in actions.column_names:
        return []
    rows = actions.select(["path", "size_bytes", "num_records", column]).to_pylist()
    return sorted((row for row in rows if row.pop(column) == partition), key=lambda row: row["path"])


def _plan_of(file: dict[str, Any]) -> str:
    """The plan id in `dt=<D>/<plan id>-<attempt>/part-…`."""
    return file["path"].split("/")[1].rsplit("-", 1)[0]


def versions(
    lake: Lake, target: str, partition: str | None = None, table: DeltaTable | None = None
) -> list[PublishedVersion]:
    """Every commit of a date (or of all dates) that the table's history still has, newest first."""
    table = table or open_table(lake, target)
    if table is None:
        return []
    found = []
    for entry in table.history():
        if "millrace.plan_id" not in entry or partition not in (None, entry["millrace.partition"]):
            continue
        rollback_to = entry.get("millrace.rollback_to")
        found.append(
            PublishedVersion(
                version=entry["version"],
                at=datetime.fromtimestamp(entry["timestamp"] / 1000, UTC),
                partition=entry["millrace.partition"],
                plan_id=entry["millrace.plan_id"],
                run=entry["millrace.run"],
                rows=int(entry["millrace.rows"]),
                sample=entry["millrace.sample"] == "true",
                unknown_rate=float(entry["millrace.unknown_rate"]),
                rollback_to=None if rollback_to is None else int(rollback_to),
            )
        )
    return found


def live_plan(lake: Lake, target: str, partition: str) -> dict[str, Any] | None:
    """What readers of a date see: {plan_id, run, sample, version, rows}, or None when the date was never published.

    The plan id comes from the table's live files; sample flag and version from the commit that brought them in. Where the log has forgotten
    that commit (Delta keeps 30 days of it) the plan itself says whether it was a sample, and version is None.
    """
    table = open_table(lake, target)
    return None if table is None else _live(lake, table, target, partition)


def _live(lake: Lake, table: DeltaTable, target: str, partition: str) -> dict[str, Any] | None:
    files = _files(table, partition)
    if not files:
        return None
    plan_id = _plan_of(files[0])
    rows = sum(file["num_records"] or 0 for file in files)
    for found in versions(lake, target, partition, table):
        if found.plan_id == plan_id:
            return {
                "plan_id": plan_id,
                "run": found.run,
                "sample": found.sample,
                "version": found.version,
                "rows": rows,
            }
    enrichment = table.metadata().configuration.get(_ENRICHMENT, target.rsplit("/", 1)[-1])
    paths = RunPaths(enrichment, partition, plan_id)
    plan = Plan.load_or_none(lake, paths.plan)
    # A date whose plan is gone is taken for a full one: a sample must never replace it by accident.
    sample = plan is not None and plan.decision.row_sample is not None
    return {"plan_id": plan_id, "run": paths.root, "sample": sample, "version": None, "rows": rows}


def reachable_files(lake: Lake, target: str, since: datetime) -> set[str]:
    """Files (relative to the lake) that readers see now or saw at `since` or later: all that a rollback may bring back.

    Raises UnavailableError when one of these versions cannot be read.
    """
    table = open_table(lake, target)
    if table is None:
        return set()
    seen = [table]
    for entry in table.history():
        before = entry["version"] - 1
        replaced_at = datetime.fromtimestamp(entry["timestamp"] / 1000, UTC)
        # A version whose log entry is gone cannot be rolled back to.
        if replaced_at >= since and lake.exists(f"{target}/_delta_log/{before:020}.json"):
            seen.append(open_table(lake, target, before) or table)
    return {f"{target}/{path}" for version in seen for path in _paths(version)}


def _paths(table: DeltaTable) -> list[str]:
    actions = pa.RecordBatchReader.from_stream(table.get_add_actions(flatten=True)).read_all()
    paths: list[str] = actions["path"].to_pylist()
    return paths


# -- publish -----------------------------------------------------------------------------------------------------------


def publish(lake: Lake, run: str, number: int) -> dict[str, Any]:
    """Make join_back's output of a run what readers of its date see. Safe to repeat, and safe beside any number of others.

    Args:
        run: relative path of the run, `runs/<enrichment>/<partition>/<plan id>`.
        number: the run's number in the ledger; a lower one than the table has already seen for this date is refused.

    Returns:
        {"version": table version of that date's commit (None where the log has forgotten it), "rows": rows of the date,
        "already_live": True when there was nothing to do}.

    Raises:
        IncompleteError: validate has not passed for this very output, or a file is not what its record says.
        RefusedError: another run has published this date since, or a sample would replace a full date.
        UnavailableError: others kept committing to the table; retry.
    """
    paths = RunPaths.parse(run)[1]
    plan = Plan.read(lake, paths)
    joined, audit = _passed(lake, paths)
    files = joined.files or [_empty_file(lake, plan, joined)]
    with_columns = _check_files(lake, files, target_schema(plan))
    metadata = {
        "millrace.partition": paths.partition,
        "millrace.plan_id": plan.plan_id,
        "millrace.run": paths.root,
        "millrace.rows": str(joined.rows),
        "millrace.sample": json.dumps(plan.decision.row_sample is not None),
        "millrace.unknown_rate": f"{audit.unknown_rate:.6f}",
        "millrace.number": str(number),
    }
    target = plan.enrichment.target.path
    for round_ in range(MAX_ROUNDS):
        table = open_table(lake, target)
        if table is None:
            _create_table(lake, plan)
            continue
        live = _live(lake, table, target, paths.partition)
        if live and live["plan_id"] == plan.plan_id and _stands(lake, table, target, paths.partition):
            if _takes_turn(table, paths.partition, number):
                return {"version": live["version"], "rows": live["rows"], "already_live": True}
            _pause(round_)
            continue
        _check_turn(table, plan, number, live)
        existing = _check_table(table, plan)
        schema = pa.schema([*existing, *(field for field in with_columns if field.name not in existing.names)])
        actions = [_add(file.path.removeprefix(f"{target}/"), file.size, file.rows, paths.partition) for file in files]
        version = _commit(
            table, actions, schema, paths.partition, metadata, Transaction(_application(paths.partition), number)
        )
        if version is not None:
            return {"version": version, "rows": joined.rows, "already_live": False}
        _pause(round_)
    raise UnavailableError(
        f"'{target}' was changed by others {MAX_ROUNDS} times while dt={paths.partition} of {paths.root} was being published. "
        "Nothing was published; clear `publish` to try again."
    )


def _passed(lake: Lake, paths: RunPaths) -> tuple[Joined, Audit]:
    joined = Joined.load_or_none(lake, paths.joined)
    if joined is None:
        raise IncompleteError(f"{paths.root} has no joined.json: its rows are not joined. Clear `join_back`.")
    audit = Audit.load_or_none(lake, paths.audit)
    if audit is None or audit.attempt != joined.attempt:
        raise IncompleteError(
            f"{paths.root}: validate has not judged this output (attempt {joined.attempt}). Clear `validate`."
        )
    if not audit.passed:
        failed = ", ".join(gate.name for gate in audit.gates if not gate.passed)
        raise RefusedError(
            f"{paths.root}: validate refused this output ({failed}); see its report. Nothing was published."
        )
    return joined, audit


def _empty_file(lake: Lake, plan: Plan, joined: Joined) -> FileRef:
    """A file without rows: a date of zero rows is replaced by it, so that the table itself says which plan emptied the date."""
    schema = target_schema(plan)
    schema = schema.remove(schema.get_field_index(PARTITION))
    prefix = published_prefix(plan.enrichment.target.path, plan.decision.partition, plan.plan_id, joined.attempt)
    path = f"{prefix}/part-empty.parquet"
    return FileRef(path=path, size=lake.write_parquet(path, schema.empty_table()), rows=0)


def _check_files(lake: Lake, files: list[FileRef], expected: pa.Schema) -> list[pa.Field]:
    """Prove that each file exists with its size, rows and the plan's column types; return the table's columns.

    Delta accepts a file of any type and the table is unreadable from then on, so the footers are read before the commit.
    """
    for file in files:
        file.check(lake)
        footer: pq.ParquetFile = lake.parquet(file.path)
        with footer:
            problems = _type_changes(footer.schema_arrow, expected)
            missing = {field.name for field in expected} - set(footer.schema_arrow.names) - {PARTITION}
            if missing:
                problems.append(f"columns {sorted(missing)} are missing")
            if footer.metadata.num_rows != file.rows:
                problems.append(f"it has {footer.metadata.num_rows} rows, its record says {file.rows}")
        if problems:
            raise IncompleteError(
                f"'{file.path}' is not what join_back recorded: {'; '.join(problems)}. Clear `join_back`."
            )
    return list(expected)


def _application(partition: str) -> str:
    return f"{PARTITION}={partition}"


def seen_number(lake: Lake, target: str, partition: str) -> int:
    """The highest run number that a date was published under, 0 where it never was: it outlives a config table that was lost."""
    table = open_table(lake, target)
    return 0 if table is None else table.transaction_version(_application(partition)) or 0


def _stands(lake: Lake, table: DeltaTable, target: str, partition: str) -> bool:
    """Whether readers can read what is live: where a file of it was lost, join_back has written the plan's rows again."""
    return all(lake.size(f"{target}/{file['path']}") == file["size_bytes"] for file in _files(table, partition))


def _takes_turn(table: DeltaTable, partition: str, number: int) -> bool:
    """Leave a run's number with a date that it need not change, in a commit without files; False when another commit came first.

    Without it an older run that was held up would still find its own number high enough, and replace what this one confirmed.
    """
    if (table.transaction_version(_application(partition)) or 0) >= number:
        return True
    schema = pa.schema(table.schema().to_arrow())
    return _commit(table, [], schema, partition, {}, Transaction(_application(partition), number)) is not None


def _check_turn(table: DeltaTable, plan: Plan, number: int, live: dict[str, Any] | None) -> None:
    partition, target = plan.decision.partition, plan.enrichment.target.path
    seen = table.transaction_version(_application(partition))
    if seen is not None and seen > number:
        raise RefusedError(
            f"dt={partition} of '{target}' was published by run number {seen}; this is run number {number}, which began earlier. "
            "The newer version stays live. To publish this plan after all, start a new run of the date."
        )
    if plan.decision.row_sample is not None and live and not live["sample"]:
        raise RefusedError(
            f"dt={partition} of '{target}' holds a full version ({live['rows']:,} rows); a sample of {plan.decision.row_sample:,} rows "
            "must not replace it. Run the date without a row sample, or try the sample on a date that is not published."
        )


def _add(path: str, size: int, rows: int | None, partition: str) -> AddAction:
    return AddAction(
        path=path,
        size=size,
        partition_values={PARTITION: partition},
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=json.dumps({"numRecords": rows}),
    )


def _commit(
    table: DeltaTable,
    actions: list[AddAction],
    schema: pa.Schema,
    partition: str,
    metadata: dict[str, str],
    transaction: Transaction | None,
) -> int | None:
    """Replace one date's files on top of the very version that was looked at: the new version, or None when another commit came first.

    Without `actions` no file is touched, and only the transaction is recorded.

    deltalake would by itself retry on top of commits it takes for harmless, the first publish of the same date among them (seen: the
    date was doubled), so it is given no retries and the caller decides afresh.
    """
    version = table.version() + 1
    properties = CommitProperties(
        custom_metadata=metadata, max_commit_retries=0, app_transactions=[transaction] if transaction else None
    )
    try:
        table.create_write_transaction(
            actions,  # type: ignore[arg-type]  # a list of AddAction is one of AddAction | RemoveAction
            mode="overwrite" if actions else "append",
            schema=schema,
            partition_by=[PARTITION],
            partition_filters=[(PARTITION, "=", partition)] if actions else None,
            commit_properties=properties,
        )
    except CommitFailedError:
        return None
    except (DeltaError, OSError) as error:
        # It may have gone in all the same; whoever tries again finds it live.
        raise UnavailableError(
            f"A commit to '{table.table_uri}' failed: {_first_line(error)}. Clear `publish`."
        ) from error
    return version


def _pause(round_: int) -> None:
    """Let the others go first: seven processes that reload in step would collide again."""
    time.sleep(random.uniform(0, 0.05 * (round_ + 1)))


# -- rollback ----------------------------------------------------------------------------------------------------------


def rollback(
    lake: Lake, enrichment: Enrichment, partition: str, to_version: int, *, now: datetime | None = None
) -> dict[str, Any]:
    """Make an earlier version of one date live again by committing that version's files for this date alone.

    Returns {"version": new table version, "rows": rows, "plan_id": ..., "already_live": ...}.

    Raises NotFoundError when the version or its date does not exist, RefusedError when it was replaced more than
    `target.rollback_days` ago or a file of it is gone.
    """
    target, now = enrichment.target.path, now or datetime.now(UTC)
    for round_ in range(MAX_ROUNDS):
        table = open_table(lake, target)
        if table is None:
            raise NotFoundError(f"'{target}' has no published version; there is nothing to roll back.")
        history = versions(lake, target, partition, table)
        past = _files(_at_version(lake, target, to_version, table), partition)
        if not past:
            raise NotFoundError(f"version {to_version} of '{target}' has no dt={partition}. {_choices(history)}")
        plan_id, rows = _plan_of(past[0]), sum(file["num_records"] or 0 for file in past)
        result = {"rows": rows, "plan_id": plan_id}
        if [file["path"] for file in past] == [file["path"] for file in _files(table, partition)]:
            return {"version": table.version(), "already_live": True, **result}
        replaced = min((found.at for found in history if found.version > to_version), default=now)
        if now - replaced > timedelta(days=enrichment.target.rollback_days):
            raise RefusedError(
                f"version {to_version} of dt={partition} was replaced on {replaced:%Y-%m-%d}; files are kept "
                f"{enrichment.target.rollback_days} days (target.rollback_days). Run the date again instead: answers are reused."
            )
        gone = [file["path"] for file in past if lake.size(f"{target}/{file['path']}") != file["size_bytes"]]
        if gone:
            raise RefusedError(
                f"{len(gone)} of {len(past)} files of version {to_version}, dt={partition}, are gone from '{target}' (first: {gone[0]}). "
                "Run the date again instead: answers are reused."
            )
        of_plan = next((found for found in history if found.plan_id == plan_id), None)
        metadata = {
            "millrace.partition": partition,
            "millrace.plan_id": plan_id,
            "millrace.run": RunPaths(enrichment.name, partition, plan_id).root,
            "millrace.rows": str(rows),
            "millrace.sample": json.dumps(of_plan.sample if of_plan else False),
            "millrace.unknown_rate": f"{of_plan.unknown_rate if of_plan else 0.0:.6f}",
            "millrace.rollback_to": str(to_version),
        }
        actions = [_add(file["path"], file["size_bytes"], file["num_records"], partition) for file in past]
        version = _commit(table, actions, pa.schema(table.schema().to_arrow()), partition, metadata, None)
        if version is not None:
            return {"version": version, "already_live": False, **result}
        _pause(round_)
    raise UnavailableError(f"'{target}' was changed by others {MAX_ROUNDS} times. Nothing was rolled back; try again.")


def _at_version(lake: Lake, target: str, version: int, table: DeltaTable) -> DeltaTable:
    try:
        found = open_table(lake, target, version) if 0 <= version <= table.version() else None
    except UnavailableError:
        found = None  # the log has forgotten it: the table itself was just read
    if found is None:
        raise NotFoundError(f"'{target}' has no version {version}; its newest is {table.version()}.")
    return found


def _choices(history: list[PublishedVersion]) -> str:
    listed = ", ".join(f"{found.version} ({found.at:%Y-%m-%d %H:%M}, {found.rows:,} rows)" for found in history[:10])
    return f"Versions of this date: {listed}." if listed else "This date was never published."
