"""validate: judges join_back's counts and writes `audit.json`, the record that publish requires and the report is rendered from.

    ledger        rows = ok + unknown + failed + skipped = reused + inferred + skipped, and as many as extract read
    unknown rate  (unknown + failed + not_askable) / (rows - not_applicable); 0/0 is 0

The unknown rate is judged for the run and for each model and prompt version. A group is judged once it is large enough for the limit to
mean something (rows x limit >= 1): one odd row of a group of five says nothing. Under "ask unknowns again" groups are not judged, since
the rows asked again are by selection the hard ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from millrace.answers import Reason, Status, kind_of_skip, status_of
from millrace.errors import IncompleteError, RefusedError
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.plan import Plan
from millrace.records import Audit, Completion, Gate, Joined, Manifest, Override, Phases, SuiteResult, Tokens

PACKAGES = ("millrace", "apache-airflow", "pyspark", "great-expectations", "deltalake", "pyarrow")

NOT_APPLICABLE = frozenset(r for r in Reason if status_of(r) is Status.skipped and kind_of_skip(r) == "not_applicable")

# Rates are quotients of counts, so anything closer than this is the same rate.
_EPSILON = 1e-9


def validate(lake: Lake, run: str) -> Audit:
    """Judge a joined run and store the audit. Repeatable: the same records give the same verdict.

    Raises IncompleteError when there is nothing to judge yet, RefusedError when a gate says no; the audit is stored before either way of
    ending, so that the report can show why.
    """
    paths = RunPaths.parse(run)[1]
    plan = Plan.read(lake, paths)
    if not lake.exists(paths.joined):
        raise IncompleteError(f"{paths.root} has no joined.json: its rows are not joined. Clear `join_back`.")
    audit = collect(lake, plan)
    lake.write(paths.audit, audit.dump())
    if not audit.passed:
        raise RefusedError(refusal(audit))
    return audit


def refusal(audit: Audit) -> str:
    """Why validate said no, in a few lines: the gates with their numbers, the main reasons, the next step."""
    return f"{audit.run} must not be published; what is live stays live.\n{why_refused(audit)}\n{next_step(audit)}"


def why_refused(audit: Audit) -> str:
    """The failed gates with their numbers, and why rows have no usable answer."""
    lines = [
        f"{gate.name} {gate.found}, limit {gate.limit}. {gate.detail}".rstrip()
        for gate in audit.gates
        if not gate.passed
    ]
    unusable = unusable_reasons(audit)
    if unusable:
        listed = ", ".join(f"{reason} {count:,}" for reason, count in unusable.items())
        lines.append(f"Rows without a usable answer: {listed}.")
    return "\n".join(lines)


def unusable_reasons(audit: Audit) -> dict[str, int]:
    """Reason -> rows for everything that counts towards the unknown rate, most frequent first."""
    counted = {reason: count for reason, count in audit.reasons.items() if reason not in NOT_APPLICABLE}
    return dict(sorted(counted.items(), key=lambda item: (-item[1], item[0])))


def next_step(audit: Audit) -> str:
    """What a person can do about the failed gates of an audit."""
    failed = {gate.name for gate in audit.gates if not gate.passed}
    if any(name.startswith("ledger") for name in failed):
        return "Counts that do not add up are a fault of Millrace: clear `join_back`; if it repeats, keep the run and report it."
    steps = []
    if any(name.startswith("unknown rate") for name in failed):
        steps.append(
            "Look at the reasons: fix the prompt (`millrace prompts`) and start a new run with 'ask unknowns again', or accept this "
            f"rate with `millrace publish {short_name(audit)} --accept-unknown-rate --reason ...` and clear `validate`."
        )
    if "not applicable rate" in failed:
        steps.append(
            "Many rows have no text to ask about: look at the source, or raise limits.not_applicable_rate in the enrichment file and "
            "clear `plan`."
        )
    if "enriched suite" in failed:
        steps.append(
            f"Open expectations/{audit.enrichment}/enriched.json for why each check is there, then the rows it points to."
        )
    return " ".join(steps)


def short_name(audit: Audit) -> str:
    """The run as people type it: enrichment, date and the start of the plan id."""
    return f"{audit.enrichment}/{audit.partition}/{audit.plan_id[:12]}"


def collect(lake: Lake, plan: Plan) -> Audit:
    """Everything known about a run, from whatever records it has left so far. Stores nothing."""
    paths = plan.paths
    manifest = Manifest.load_or_none(lake, paths.manifest)
    joined = Joined.load_or_none(lake, paths.joined)
    source_check = SuiteResult.load_or_none(lake, paths.source_check())
    override = Override.load_or_none(lake, paths.override)
    completions = _completions(lake, paths, manifest)
    reasons = joined.reasons if joined else (manifest.skipped_rows if manifest else {})
    rows = joined.rows if joined else (manifest.rows if manifest else 0)
    statuses = joined.statuses if joined else {}
    not_applicable = sum(count for reason, count in reasons.items() if reason in NOT_APPLICABLE)
    # Whatever else was skipped counts as unknown, a reason that nobody knows included.
    not_askable = (statuses.get("skipped", 0) if joined else sum(reasons.values())) - not_applicable
    rate = _rate(statuses.get("unknown", 0) + statuses.get("failed", 0) + not_askable, rows - not_applicable)
    seconds = {"check_source": source_check.seconds if source_check else None}
    seconds |= {"extract": manifest.seconds if manifest else None, "join_back": joined.seconds if joined else None}
    gates = _gates(plan, manifest, joined, rate, _rate(not_applicable, rows), override)
    return Audit(
        plan_id=plan.plan_id,
        run=paths.root,
        enrichment=paths.enrichment,
        partition=paths.partition,
        attempt=joined.attempt if joined else None,
        passed=joined is not None and all(gate.passed for gate in gates),
        gates=gates,
        override=override,
        rows=rows,
        statuses=statuses,
        reasons=reasons,
        not_applicable=not_applicable,
        not_askable=not_askable,
        unknown_rate=rate,
        not_applicable_rate=_rate(not_applicable, rows),
        by_model=joined.by_model if joined else {},
        reused=joined.reused if joined else 0,
        inferred=joined.inferred if joined else 0,
        skipped=joined.skipped if joined else sum(reasons.values()),
        repaired=joined.repaired if joined else 0,
        labels=joined.labels if joined else {},
        changed=manifest.changed if manifest else {},
        requests=manifest.requests if manifest else 0,
        requests_reused=manifest.reused if manifest else 0,
        shards=len(manifest.shards) if manifest else 0,
        shards_complete=len(completions),
        **_asked(plan, manifest, completions),
        engine=completions[0].engine if completions else {},
        seconds={step: value for step, value in seconds.items() if value is not None},
        source_check=source_check,
        enriched_check=joined.suite if joined else None,
        versions=_versions(plan),
        target=plan.enrichment.target.path,
        files=joined.files if joined else [],
    )


def accept_unknown_rate(lake: Lake, run: str, by: str, reason: str) -> Override:
    """Record a person's decision to publish above the unknown-rate limit. It covers rates up to the one it was given for.

    Raises RefusedError without a reason or when there is nothing to accept, IncompleteError before join_back.
    """
    paths = RunPaths.parse(run)[1]
    plan = Plan.read(lake, paths)
    if not reason.strip():
        raise RefusedError("An accepted unknown rate needs a reason: give --reason, it stays with the run.")
    if not lake.exists(paths.joined):
        raise IncompleteError(f"{paths.root} has no joined.json: there is no unknown rate to accept yet.")
    audit = collect(lake, plan)
    if all(gate.passed for gate in audit.gates if gate.name.startswith("unknown rate")):
        raise RefusedError(
            f"{paths.root}: the unknown rate {audit.unknown_rate:.2%} needs no acceptance. Clear `validate` if it has not passed."
        )
    override = Override(by=by, reason=reason.strip(), unknown_rate=audit.unknown_rate)
    lake.write(paths.override, override.dump())
    return override


def _gates(
    plan: Plan,
    manifest: Manifest | None,
    joined: Joined | None,
    unknown_rate: float,
    not_applicable_rate: float,
    override: Override | None,
) -> list[Gate]:
    if joined is None:
        return []
    limits = plan.enrichment.limits
    covered = override is not None and unknown_rate <= override.unknown_rate + _EPSILON
    note = (
        f"Accepted up to {override.unknown_rate:.2%} by {override.by}: {override.reason}"
        if override and covered
        else ""
    )
    suite = joined.suite
    gates = [
        _ledger("ledger: by status", joined.rows, joined.statuses),
        _ledger(
            "ledger: by origin",
            joined.rows,
            {"reused": joined.reused, "inferred": joined.inferred, "skipped": joined.skipped},
        ),
        _ledger("ledger: by reason", joined.rows - joined.statuses.get("ok", 0), joined.reasons),
        _against_manifest(joined, manifest),
        _limit("unknown rate", unknown_rate, limits.unknown_rate, covered, note),
        *(
            _limit(f"unknown rate of {group}", rate, limits.unknown_rate, covered, note or f"{rows:,} rows.")
            for group, rows, rate in _judged_groups(plan, joined)
        ),
        _limit("not applicable rate", not_applicable_rate, limits.not_applicable_rate),
        Gate(
            name="enriched suite",
            passed=suite.passed,
            found=f"{len(suite.results)} of {suite.asked} checks answered, {len(suite.blocking)} blocking",
            limit="all answered, none blocking",
            detail="; ".join(f"{r.name} on {r.column or 'the table'} is {r.outcome}" for r in suite.blocking[:10]),
        ),
    ]
    return gates


def _ledger(name: str, rows: int, parts: dict[str, int]) -> Gate:
    said = " + ".join(f"{count:,} {part}" for part, count in parts.items()) or "nothing"
    return Gate(
        name=name, passed=sum(parts.values()) == rows, found=f"{said} = {sum(parts.values()):,}", limit=f"{rows:,} rows"
    )


def _against_manifest(joined: Joined, manifest: Manifest | None) -> Gate:
    found = f"{joined.rows:,} rows joined, {sum(file.rows for file in joined.files):,} in the files"
    if manifest is None:
        return Gate(
            name="ledger: by extract",
            passed=False,
            found=found,
            limit="manifest.json",
            detail="The manifest is missing.",
        )
    extracted = manifest.reused_rows + manifest.infer_rows + sum(manifest.skipped_rows.values())
    passed = joined.rows == manifest.rows == extracted == sum(file.rows for file in joined.files)
    detail = "" if extracted == manifest.rows else f"The manifest's own parts sum to {extracted:,}."
    return Gate(
        name="ledger: by extract", passed=passed, found=found, limit=f"{manifest.rows:,} rows extracted", detail=detail
    )


def _limit(name: str, rate: float, limit: float, covered: bool = False, note: str = "") -> Gate:
    within = rate <= limit + _EPSILON
    return Gate(
        name=name, passed=within or covered, found=f"{rate:.2%}", limit=f"{limit:.2%}", detail="" if within else note
    )


def _judged_groups(plan: Plan, joined: Joined) -> Iterable[tuple[str, int, float]]:
    """(model@prompt version, rows, unknown rate) of each group that is judged by itself."""
    if plan.decision.ask_mode == "unknowns" or len(joined.by_model) < 2:
        return
    for group, statuses in sorted(joined.by_model.items()):
        rows = sum(statuses.values())
        if rows * plan.enrichment.limits.unknown_rate >= 1:
            yield group, rows, group_rate(statuses)


def group_rate(statuses: dict[str, int]) -> float:
    """Unknown rate of one model and prompt version. Rows that no model saw are in no group, so every skipped row here is not_askable."""
    rows = sum(statuses.values())
    return _rate(rows - statuses.get("ok", 0), rows)


def _rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _completions(lake: Lake, paths: RunPaths, manifest: Manifest | None) -> list[Completion]:
    shards = [shard.shard_id for shard in manifest.shards] if manifest else []
    # One small read per shard, up to 1,000 of them: on an object store they are worth overlapping.
    with ThreadPoolExecutor(max_workers=16) as pool:
        found = pool.map(lambda shard_id: Completion.load_or_none(lake, paths.complete(shard_id)), shards)
        return [done for done in found if done is not None]


def asked_since(lake: Lake, plan: Plan, audit: Audit, since: datetime) -> Audit:
    """The audit with what shards completed at `since` or later asked, in place of what all the plan's DAG runs asked."""
    manifest = Manifest.load_or_none(lake, plan.paths.manifest)
    new = [done for done in _completions(lake, plan.paths, manifest) if done.finished_at >= since]
    return audit.model_copy(update=_asked(plan, manifest, new))


def _asked(plan: Plan, manifest: Manifest | None, completions: list[Completion]) -> dict[str, Any]:
    """The fields of an audit that say what was asked and what it took."""
    return {
        "requests_answered": sum(done.requests for done in completions),
        "requests_resumed": sum(done.resumed for done in completions),
        "tokens": _sum_tokens(done.tokens for done in completions),
        "phases": _sum_phases(done.phases for done in completions),
        "cost": _cost(plan, manifest, completions),
    }


def _sum_tokens(parts: Iterable[Tokens]) -> Tokens:
    parts = list(parts)
    return Tokens(**{name: sum(getattr(part, name) for part in parts) for name in Tokens.model_fields})


def _sum_phases(parts: Iterable[Phases]) -> Phases:
    parts = list(parts)
    return Phases(**{name: round(sum(getattr(part, name) for part in parts), 3) for name in Phases.model_fields})


def _cost(plan: Plan, manifest: Manifest | None, completions: list[Completion]) -> float | None:
    models = {shard.shard_id: plan.decision.models[shard.model] for shard in (manifest.shards if manifest else [])}
    prices = {done.shard_id: models[done.shard_id].price_per_million_tokens for done in completions}
    if not models or None in prices.values():
        return None
    return sum(
        (done.tokens.prompt + done.tokens.completion) * (prices[done.shard_id] or 0) / 1e6 for done in completions
    )


def _versions(plan: Plan) -> dict[str, str]:
    """Everything that decided the answers, and the packages at work here; the engine's own versions are in its completion records."""
    decision = plan.decision
    versions = {"prompt": f"{decision.prompt.name} v{decision.prompt.version}"}
    for name, model in decision.models.items():
        versions[f"model {name}"] = model.digest
        versions[f"fingerprint {name}"] = decision.fingerprints.get(name, "")
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
