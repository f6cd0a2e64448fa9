"""Clean-up: what nobody needs any more, removed by age, and nothing else.

| what | removed when | kept all the same |
| --- | --- | --- |
| runs | untouched for `run_days` | a run at work; one that readers see or a rollback may bring back; one that another kept run builds on |
| leftovers inside kept runs: parts of complete shards, extracts that lost | the run is untouched for `run_days` | a run at work |
| answers in the cache | older than every enrichment's `reuse_days` | those that a run which is still there was made of |
| files below an enriched table | out of readers' sight for `target.rollback_days` and a day | output of a run that is still there |

The functions work in this order, since what a run keeps alive is decided by the run being there. Each may be killed at any
moment and run again. Runs and tables of an enrichment that has no file any more are left alone. Prompts, golden rows and verdicts
are small and stay; Airflow's own logs and database have `airflow db clean`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import orjson

from millrace import publishing
from millrace.config_db import ConfigDb
from millrace.enrichment import Enrichment
from millrace.lake import FileInfo, Lake
from millrace.layout import RunPaths

# A rollback that begins in the last minute of its window still finds its files.
GRACE = timedelta(days=1)
_BATCH = 1000

_COMPLETE = re.compile(r"^runs/[^/]+/[^/]+/[^/]+/shards/([^/]+)/complete\.json$")


@dataclass(frozen=True)
class Removed:
    """What a clean-up removed: whole runs, files (those of the runs included) and their bytes."""

    runs: int = 0
    files: int = 0
    bytes: int = 0

    def __add__(self, other: Removed) -> Removed:
        return Removed(self.runs + other.runs, self.files + other.files, self.bytes + other.bytes)


def _delete(lake: Lake, files: Iterable[FileInfo], *, runs: int = 0) -> Removed:
    files = list(files)
    for start in range(0, len(files), _BATCH):
        lake.delete([file.path for file in files[start : start + _BATCH]])
    return Removed(runs, len(files), sum(file.size for file in files))


def remove_runs(
    lake: Lake,
    db: ConfigDb,
    enrichments: Mapping[str, Enrichment],
    *,
    run_days: int,
    now: datetime | None = None,
) -> Removed:
    """Remove runs, and leftovers inside kept ones, in which no file was written for `run_days`.

    While a partition's runs are removed nobody can claim it, so none of them can come to life meanwhile.
    """
    now = now or datetime.now(UTC)
    before = now - timedelta(days=run_days)
    removed = Removed()
    for name in sorted(set(lake.folders("runs")) & set(enrichments)):
        needed = _TablePlans(lake, now - timedelta(days=enrichments[name].target.rollback_days) - GRACE)
        for partition in lake.folders(f"runs/{name}"):
            with db.between_runs(name, partition) as idle:
                if idle:
                    removed += _clean_partition(lake, name, partition, before, needed)
    return removed


def _clean_partition(lake: Lake, enrichment: str, partition: str, before: datetime, needed: _TablePlans) -> Removed:
    files = defaultdict(list)
    for file in lake.list(f"runs/{enrichment}/{partition}"):
        files[file.path.split("/")[3]].append(file)
    old = {plan_id for plan_id, own in files.items() if max(file.modified for file in own) < before}
    if not old:
        return Removed()
    decisions = {plan_id: _decision(lake, RunPaths(enrichment, partition, plan_id)) for plan_id in files}
    kept = set()
    wanted = [plan_id for plan_id in files if plan_id not in old or needed.include(plan_id, decisions[plan_id])]
    while wanted:
        plan_id = wanted.pop()
        kept.add(plan_id)
        base = decisions.get(plan_id, {}).get("base_plan")
        if base and RunPaths.parse(base)[1].plan_id not in kept:
            wanted.append(RunPaths.parse(base)[1].plan_id)
    removed = Removed()
    for plan_id in sorted(old):
        paths = RunPaths(enrichment, partition, plan_id)
        if plan_id in kept:
            removed += _delete(lake, _leftovers(lake, paths, files[plan_id]))
        else:
            # The manifest first: where the rest is cut short, a later run of this plan extracts afresh and misses nothing.
            ordered = sorted(files[plan_id], key=lambda file: file.path != paths.manifest)
            removed += _delete(lake, ordered[:1]) + _delete(lake, ordered[1:], runs=1)
    return removed


def _decision(lake: Lake, paths: RunPaths) -> dict[str, Any]:
    """A plan's decision as it lies there, whichever version of Millrace wrote it; empty where there is no plan."""
    data = lake.read_or_none(paths.plan)
    decision: dict[str, Any] = orjson.loads(data)["decision"] if data else {}
    return decision


class _TablePlans:
    """Which plans' rows are live in their tables or may be rolled back to."""

    def __init__(self, lake: Lake, since: datetime) -> None:
        self._lake, self._since = lake, since
        self._by_target: dict[str, set[str]] = {}

    def include(self, plan_id: str, decision: dict[str, Any]) -> bool:
        if not decision:
            return False
        # The plan's own target: the enrichment may have moved to another table since.
        target = decision["spec"]["target"]["path"]
        if target not in self._by_target:
            reachable = publishing.reachable_files(self._lake, target, self._since)
            self._by_target[target] = {_plan_and_attempt(target, path)[0] for path in reachable}
        return plan_id in self._by_target[target]


def _leftovers(lake: Lake, paths: RunPaths, files: list[FileInfo]) -> list[FileInfo]:
    """Parts of shards that are complete (their answers lie in the cache), and extracts that the manifest does not name."""
    complete = {found[1] for file in files if (found := _COMPLETE.match(file.path))}
    manifest = lake.read_or_none(paths.manifest)
    winner = orjson.loads(manifest)["attempt"] if manifest else None

    def left_over(file: FileInfo) -> bool:
        match file.path.removeprefix(f"{paths.root}/").split("/"):
            case ["shards", shard_id, _, *rest]:
                return bool(rest) and shard_id in complete
            case ["extract", attempt, *_]:
                return winner is not None and attempt != winner
        return False

    return [file for file in files if left_over(file)]


def remove_answers(lake: Lake, enrichments: Mapping[str, Enrichment], *, now: datetime | None = None) -> Removed:
    """Remove answers that are too old for any enrichment to reuse and that no run which is still there was made of."""
    days = max((enrichment.reuse_days for enrichment in enrichments.values()), default=None)
    if days is None:
        return Removed()
    before = (now or datetime.now(UTC)) - timedelta(days=days) - GRACE
    old = [file for file in lake.list("answers") if file.modified < before]
    if not old:
        return Removed()
    # A shard's id is a hash of its requests, and answer files begin with it: no record needs to be read.
    needed = {found[1] for file in lake.list("runs") if (found := _COMPLETE.match(file.path))}
    return _delete(lake, (file for file in old if file.path.rsplit("/", 1)[-1].split("-", 1)[0] not in needed))


def remove_table_files(lake: Lake, enrichments: Mapping[str, Enrichment], *, now: datetime | None = None) -> Removed:
    """Remove files below the enriched tables that readers have not seen for longer than a rollback reaches back."""
    removed = Removed()
    for enrichment in enrichments.values():
        target = enrichment.target.path
        since = (now or datetime.now(UTC)) - timedelta(days=enrichment.target.rollback_days) - GRACE
        old = [
            file
            for file in lake.list(target)
            if file.modified < since and file.path.startswith(f"{target}/{publishing.PARTITION}=")
        ]
        if old:
            reachable = publishing.reachable_files(lake, target, since)
            joined_by = partial(_is_joined, lake, enrichment.name, target, {})
            removed += _delete(lake, (file for file in old if file.path not in reachable and not joined_by(file.path)))
    return removed


def _is_joined(lake: Lake, enrichment: str, target: str, attempts: dict[str, str | None], path: str) -> bool:
    """Whether a run that is still there names this file's attempt as its output: it may be published yet."""
    plan_id, attempt = _plan_and_attempt(target, path)
    if plan_id not in attempts:
        partition = path.removeprefix(f"{target}/{publishing.PARTITION}=").split("/")[0]
        data = lake.read_or_none(RunPaths(enrichment, partition, plan_id).joined)
        attempts[plan_id] = orjson.loads(data)["attempt"] if data else None
    return attempts[plan_id] == attempt


def _plan_and_attempt(target: str, path: str) -> tuple[str, str]:
    """Who wrote `<target>/dt=<D>/<plan id>-<attempt>/part-…`."""
    plan_id, _, attempt = path.removeprefix(f"{target}/").split("/")[1].partition("-")
    return plan_id, attempt
