"""What a run's records say: gathered once, before anything is worded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from millrace import budget, publishing, validation
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.plan import Plan
from millrace.records import Approval, Audit, Joined, Manifest, Outcome, Stop, Verdict

# A report names this many open shards and stays readable; the counts say how many there are.
MAX_OPEN_SHARDS = 10


@dataclass(frozen=True)
class Trouble:
    """Why a run ended before its date was published."""

    step: str
    reason: str
    next_step: str


@dataclass(frozen=True)
class Labels:
    """The label mix of an earlier version to compare with, and which version that is."""

    of: str
    mix: dict[str, dict[str, int]]


@dataclass(frozen=True)
class OpenShard:
    shard_id: str
    requests: int
    attempts: int
    last: str  # how the newest attempt ended


@dataclass(frozen=True)
class Findings:
    plan: Plan
    audit: Audit  # what was asked is the DAG run's own, where it is known which one is meant
    asked_earlier: int | None  # requests that the plan's earlier DAG runs asked; None where `audit` counts them all
    manifest: Manifest | None
    state: str  # "published", "not published" or "superseded"
    ended: bool  # False where nobody said how the DAG run ended: it may be at work
    version: int | None  # of the table, when this plan is live
    live: dict | None  # what readers of the date see: publishing.live_plan
    verdict: Verdict | None
    approval: Approval | None
    open_shards: list[OpenShard]
    trouble: Trouble | None
    previous: Labels | None
    seconds: dict[str, float]
    lake_root: str


def find(
    lake: Lake, run: str, state: str | None, step_seconds: Mapping[str, float], since: datetime | None = None
) -> Findings:
    """Read every record of a run.

    `state` is how the DAG run ended, None when that is not known (then only the records speak). `since` is when it began: what was asked
    earlier is told apart; without it all of the plan's DAG runs count as one.
    """
    paths = RunPaths.parse(run)[1]
    plan = Plan.read(lake, paths)
    audit = _audit(lake, plan)
    target = plan.enrichment.target.path
    live = publishing.live_plan(lake, target, paths.partition)
    is_live = live is not None and live["plan_id"] == plan.plan_id
    manifest = Manifest.load_or_none(lake, paths.manifest)
    open_shards = _open_shards(lake, paths, manifest) if manifest else []
    verdict = _newest_verdict(lake, plan)
    history = publishing.versions(lake, target)
    was_published = any(version.plan_id == plan.plan_id and version.partition == paths.partition for version in history)
    trouble = None
    if not is_live and not was_published and state != "success":
        trouble = _trouble(lake, plan, audit, manifest, verdict, open_shards)
    own = audit if since is None else validation.asked_since(lake, plan, audit, since)
    return Findings(
        plan=plan,
        audit=own,
        asked_earlier=None if since is None else audit.requests_answered - own.requests_answered,
        manifest=manifest,
        state="published" if is_live else "superseded" if was_published else "not published",
        ended=state is not None,
        version=live["version"] if live and is_live else None,
        live=live,
        verdict=verdict,
        approval=Approval.load_or_none(lake, paths.approval),
        open_shards=open_shards,
        trouble=trouble,
        previous=_previous(lake, plan, history),
        seconds=dict(step_seconds) or audit.seconds,
        lake_root=lake.root,
    )


def _audit(lake: Lake, plan: Plan) -> Audit:
    """The stored audit when it judges the present output, else what is known so far."""
    stored = Audit.load_or_none(lake, plan.paths.audit)
    joined = Joined.load_or_none(lake, plan.paths.joined)
    if stored is not None and joined is not None and stored.attempt == joined.attempt:
        return stored
    return validation.collect(lake, plan)


def _newest_verdict(lake: Lake, plan: Plan) -> Verdict | None:
    fingerprint = plan.decision.fingerprints.get(plan.decision.default_model, "")
    return max(budget.verdicts(lake, fingerprint), key=lambda verdict: verdict.at, default=None)


def _open_shards(lake: Lake, paths: RunPaths, manifest: Manifest) -> list[OpenShard]:
    """The first few shards that are not complete, with how their newest attempt ended."""
    found = []
    for shard in budget.open_shards(lake, paths, manifest)[:MAX_OPEN_SHARDS]:
        attempts = lake.folders(paths.shard(shard.shard_id))
        outcomes = [
            Outcome.load_or_none(lake, f"{paths.shard_attempt(shard.shard_id, attempt)}/outcome.json")
            for attempt in attempts
        ]
        newest = max((outcome for outcome in outcomes if outcome), key=lambda outcome: outcome.ended_at, default=None)
        silent = "reclaimed without a word" if attempts else "never started"
        last = f"exit {newest.exit_code}: {newest.message}"[:300] if newest else silent
        found.append(OpenShard(shard.shard_id, shard.requests, len(attempts), last))
    return found


def _trouble(
    lake: Lake,
    plan: Plan,
    audit: Audit,
    manifest: Manifest | None,
    verdict: Verdict | None,
    open_shards: list[OpenShard],
) -> Trouble:
    """The first step, in the order of the graph, that the records do not show as done."""
    name = plan.decision.enrichment
    if audit.source_check is not None and not audit.source_check.passed:
        failed = ", ".join(
            f"{check.name} on {check.column or 'the table'}" for check in audit.source_check.blocking[:5]
        )
        return Trouble(
            "check_source",
            f"The source did not pass its checks: {failed or 'not every check was answered'}.",
            f"Open expectations/{name}/source.json for why each check is there. Correct the source, then clear `plan`.",
        )
    if verdict is not None and not verdict.passed and (manifest is None or audit.shards_complete == 0):
        return Trouble(
            "preflight",
            f"The model answered {verdict.usable_rate:.0%} of {verdict.golden_rows} golden prompts usably; "
            f"{plan.enrichment.preflight.usable_rate:.0%} are needed.",
            "Correct the prompt or choose another model, then clear `plan`.",
        )
    if manifest is None and audit.source_check is None:
        return Trouble("check_source", "It left no result.", "Read its log, then clear `check_source`.")
    if manifest is None and verdict is None:
        return Trouble(
            "preflight",
            "It left no verdict, so whether the model can answer is not known.",
            "Read its log for what kept the model or its endpoint from starting, then clear `preflight`.",
        )
    if manifest is None:
        return Trouble("extract", "No manifest was written.", "Read its log, then clear `extract`.")
    if open_shards:
        return _open(lake, plan, audit, manifest)
    if audit.attempt is None:
        return Trouble(
            "join_back",
            "All shards are complete, and the rows are not joined.",
            "Read its log, then clear `join_back`.",
        )
    if not audit.passed:
        return Trouble("validate", validation.why_refused(audit), validation.next_step(audit))
    return Trouble(
        "publish", "Validate passed, and the date was not published.", "Read the log of `publish`, then clear it."
    )


def _open(lake: Lake, plan: Plan, audit: Audit, manifest: Manifest) -> Trouble:
    stop = Stop.load_or_none(lake, plan.paths.stop)
    said = f"{audit.shards - audit.shards_complete:,} of {audit.shards:,} shards are not complete."
    if stop is not None:
        return Trouble(
            "infer",
            f"{said} Stopped by {stop.by}: {stop.reason}",
            "Finished answers are kept. Remove the cause, then clear the red `infer` tasks; clearing removes stop.json.",
        )
    if not lake.folders(f"{plan.paths.root}/shards"):
        needed, allowed = budget.estimate(lake, plan, manifest)["tokens"], plan.enrichment.limits.budget_tokens
        approval = Approval.load_or_none(lake, plan.paths.approval)
        if allowed is not None and needed > allowed and not (approval and approval.approved):
            return Trouble(
                "approve_budget",
                f"The run would spend about {needed:,} tokens; its budget is {allowed:,}, and nobody has approved more.",
                "Raise limits.budget_tokens or take a row sample and clear `plan`; or set over_budget: wait and approve it.",
            )
    return Trouble(
        "infer", said, "Read the last message of each open shard below, then clear its `infer` task: it resumes."
    )


def _previous(lake: Lake, plan: Plan, history: list[publishing.PublishedVersion]) -> Labels | None:
    """Label mix of this date's version before this plan, else of the newest earlier date: what a change shows against."""
    partition = plan.decision.partition
    mine = max((v.version for v in history if v.plan_id == plan.plan_id and v.partition == partition), default=None)
    same = [
        v
        for v in history
        if v.partition == partition and v.plan_id != plan.plan_id and (mine is None or v.version < mine)
    ]
    earlier = sorted(
        (v for v in history if v.partition < partition), key=lambda v: (v.partition, v.version), reverse=True
    )
    for version in [*same[:1], *earlier[:1]]:
        joined = Joined.load_or_none(
            lake, RunPaths(plan.decision.enrichment, version.partition, version.plan_id).joined
        )
        if joined is not None and joined.labels:
            of = f"version {version.version} of this date" if version.partition == partition else f"{version.partition}"
            return Labels(of, joined.labels)
    return None
