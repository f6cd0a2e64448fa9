"""The report's content in order: sentences, tables and bars, ready for either template. Nothing here reads the lake."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.answers import REASONS, Reason
from millrace.answers.kinds import LabelList, OneLabel
from millrace.records import Audit, SuiteResult
from millrace.report.findings import Findings
from millrace.validation import NOT_APPLICABLE, group_rate

# A label field with thousands of labels must not make the report grow with them.
MAX_LABELS = 25
MAX_CHECKS = 100

_CHANGES = {
    "truncated": "cut to limits.max_text_chars",
    "unwrapped": "taken out of a JSON object",
    "control_chars": "freed of control characters",
    "bad_utf8": "with broken UTF-8 mended",
}


@dataclass(frozen=True)
class Table:
    columns: list[str]
    rows: list[list[str]]
    numeric: frozenset[int] = frozenset()  # columns set flush right


@dataclass(frozen=True)
class Bar:
    name: str
    count: int
    share: float
    before: float | None  # share in the version compared with


@dataclass(frozen=True)
class Bars:
    name: str
    rows: list[Bar]
    note: str


@dataclass(frozen=True)
class Section:
    title: str
    text: list[str] = field(default_factory=list)
    table: Table | None = None
    bars: list[Bars] = field(default_factory=list)


@dataclass(frozen=True)
class Stop:
    """One station of the rows' journey: a number, its unit, and what leaves or joins there."""

    name: str
    number: str
    unit: str
    aside: list[str]


@dataclass(frozen=True)
class Slice:
    """A part of the bar that shows what became of all rows; `kind` is its colour."""

    name: str
    kind: str
    count: int
    share: float


@dataclass(frozen=True)
class Content:
    title: str
    state: str
    tone: str  # good, warn or bad
    headline: list[str]
    next_steps: list[str]
    facts: list[tuple[str, str]]
    journey: list[Stop]
    slices: list[Slice]
    sections: list[Section]


def describe(found: Findings) -> Content:
    audit = found.audit
    sections = [
        _reasons(audit),
        _labels(found),
        _gates(audit),
        _speed(found),
        _tokens(audit),
        _groups(audit),
        _open_shards(found),
        _suite("Source checks", audit.source_check),
        _suite("Checks on the enriched rows", audit.enriched_check),
        _versions(found),
        _places(found),
        _steps(found),
    ]
    tone = {"published": "good", "superseded": "warn"}.get(found.state, "bad")
    return Content(
        title=f"{audit.enrichment}, {audit.partition}",
        state=found.state,
        tone=tone,
        headline=_headline(found),
        next_steps=[found.trouble.next_step] if found.trouble and found.trouble.next_step else [],
        facts=_facts(found),
        journey=_journey(found),
        slices=_slices(audit),
        sections=[section for section in sections if section is not None],
    )


def _headline(found: Findings) -> list[str]:
    audit, lines = found.audit, []
    limit = found.plan.enrichment.limits.unknown_rate
    if audit.attempt is not None:
        unusable = audit.rows - audit.not_applicable - audit.statuses.get("ok", 0)
        lines.append(
            f"{audit.rows:,} rows: {audit.statuses.get('ok', 0):,} answered, {unusable:,} without a usable answer "
            f"({audit.unknown_rate:.2%}, limit {limit:.2%}), {audit.not_applicable:,} that need none."
        )
    elif audit.requests or audit.rows:
        answered = audit.requests_reused + audit.requests_answered + (found.asked_earlier or 0)
        lines.append(f"{audit.rows:,} rows in {audit.requests:,} requests; {answered:,} of them answered so far.")
    if found.state == "published":
        version = "" if found.version is None else f" as version {found.version}"
        lines.append(f"Published{version} of {audit.target}.")
    elif found.state == "superseded":
        lines.append(f"Published, and since replaced by plan {(found.live or {}).get('plan_id', '')[:12]}.")
    else:
        lines.append("Not published. " + _still_live(found))
    if found.trouble:
        lines.append(f"{'Ended' if found.ended else 'Stands'} at {found.trouble.step}: {found.trouble.reason}")
    if found.plan.decision.row_sample is not None:
        lines.append(f"A sample of at most {found.plan.decision.row_sample:,} rows, not the whole date.")
    if audit.override and audit.passed and audit.unknown_rate > limit:
        lines.append(f"The unknown rate was accepted by {audit.override.by}: {audit.override.reason}")
    return lines


def _still_live(found: Findings) -> str:
    if found.live is None:
        return "This date has no published version."
    return f"Readers still see the earlier version, plan {found.live['plan_id'][:12]} with {found.live['rows']:,} rows."


def _facts(found: Findings) -> list[tuple[str, str]]:
    audit = found.audit
    facts = [
        (
            "rows",
            f"{audit.rows:,} = " + " + ".join(f"{count:,} {status}" for status, count in _by_status(audit).items()),
        ),
        ("origin", f"{audit.reused:,} reused, {audit.inferred:,} asked under this plan, {audit.skipped:,} skipped"),
        ("requests", f"{audit.requests:,} distinct, {audit.requests_reused:,} reused, {_asked_words(found)}"),
        ("shards", f"{audit.shards_complete:,} of {audit.shards:,} complete"),
    ]
    if audit.attempt is None:
        facts = facts[2:]
    if audit.requests_answered:
        facts.append(("speed", _speed_words(audit)))
        facts.append(("tokens", _token_words(audit)))
    facts.append(("table", f"{found.lake_root}/{audit.target}"))
    facts.append(("run", f"{found.lake_root}/{audit.run}"))
    return facts


def _asked_words(found: Findings) -> str:
    asked = f"{found.audit.requests_answered:,} asked"
    if found.asked_earlier is None:
        return f"{asked} under this plan"
    return f"{asked} by this run" + (
        f", {found.asked_earlier:,} by earlier runs of its plan" if found.asked_earlier else ""
    )


def _by_status(audit: Audit) -> dict[str, int]:
    return {status: audit.statuses.get(status, 0) for status in ("ok", "unknown", "failed", "skipped")}


def _journey(found: Findings) -> list[Stop]:
    audit, manifest = found.audit, found.manifest
    stops = []
    if manifest is not None:
        files = len(found.plan.decision.source.files)
        changed = [f"{count:,} {_CHANGES.get(name, name)}" for name, count in manifest.changed.items() if count]
        stops.append(Stop("Source", f"{manifest.rows:,}", "rows", [f"{files:,} files", *changed[:3]]))
        skipped = sum(manifest.skipped_rows.values())
        repeats = manifest.rows - skipped - manifest.requests
        aside = [f"{repeats:,} rows repeat another exactly"] if repeats else []
        aside += [f"{skipped:,} rows are not asked"] if skipped else []
        stops.append(Stop("Deduplicated", f"{manifest.requests:,}", "requests", aside))
        asked = manifest.requests - manifest.reused
        stops.append(Stop("Looked up", f"{manifest.reused:,}", "reused", [f"{asked:,} left to ask"]))
        aside = [f"{audit.shards_complete:,} of {audit.shards:,} shards"]
        if audit.requests_resumed:
            aside.append(f"{audit.requests_resumed:,} taken over from an attempt that was cut short")
        if found.asked_earlier:
            aside.append(f"{found.asked_earlier:,} asked by earlier runs of this plan")
        by = "under this plan" if found.asked_earlier is None else "by this run"
        stops.append(Stop("Asked", f"{audit.requests_answered:,}", by, aside))
    if audit.attempt is not None:
        stops.append(Stop("Joined back", f"{audit.rows:,}", "rows", [f"{audit.statuses.get('ok', 0):,} ok"]))
    if found.state == "published":
        version = "" if found.version is None else f"version {found.version}"
        stops.append(Stop("Published", f"{audit.rows:,}", "rows", [version]))
    else:
        stops.append(Stop("Published", "0", "rows", [found.state]))
    return stops


def _slices(audit: Audit) -> list[Slice]:
    parts = {
        "ok": audit.statuses.get("ok", 0),
        "unknown": audit.statuses.get("unknown", 0),
        "failed": audit.statuses.get("failed", 0),
        "not askable": audit.not_askable,
        "needs no answer": audit.not_applicable,
    }
    if audit.attempt is None or not audit.rows:
        return []
    return [Slice(name, name.replace(" ", "-"), count, count / audit.rows) for name, count in parts.items() if count]


def _reasons(audit: Audit) -> Section | None:
    if not audit.reasons:
        return None
    rows = []
    for reason, count in sorted(audit.reasons.items(), key=lambda item: (-item[1], item[0])):
        known = reason in Reason.__members__
        status, meaning = REASONS[Reason(reason)] if known else ("?", "not a reason Millrace knows")
        counts = "no" if reason in NOT_APPLICABLE else "yes"
        rows.append([reason, meaning, str(status), f"{count:,}", _share(count, audit.rows), counts])
    columns = ["reason", "meaning", "status", "rows", "share of rows", "counts as unknown"]
    return Section("Why rows have no answer", table=Table(columns, rows, frozenset({3, 4})))


def _labels(found: Findings) -> Section | None:
    bars = []
    # A label that no row has is news: the prompt may have lost it.
    allowed = {
        field.name: field.kind.labels.labels
        for field in found.plan.enrichment.schema.fields
        if isinstance(field.kind, OneLabel | LabelList)
    }
    for name, counts in found.audit.labels.items():
        total = sum(counts.values())
        before = (found.previous.mix if found.previous else {}).get(name, {})
        total_before = sum(before.values())
        ranked = sorted({*allowed.get(name, ()), *counts, *before}, key=lambda label: (-counts.get(label, 0), label))
        rows = [
            Bar(
                label,
                counts.get(label, 0),
                counts.get(label, 0) / total if total else 0.0,
                before.get(label, 0) / total_before if total_before else None,
            )
            for label in ranked
        ]
        shown = rows[:MAX_LABELS]
        notes = []
        if len(rows) > len(shown):
            notes.append(
                f"{len(rows) - len(shown):,} rarer labels with {sum(bar.count for bar in rows[MAX_LABELS:]):,} rows are not shown."
            )
        if total_before:
            moved = sum(abs(bar.share - (bar.before or 0.0)) for bar in rows) / 2
            notes.append(f"{moved:.1%} of the mix moved.")
        bars.append(Bars(name, shown, " ".join(notes)))
    if not bars:
        return None
    compared = (
        f"The thin line is {found.previous.of}." if found.previous else "There is no earlier version to compare with."
    )
    return Section("Label mix", [compared], bars=bars)


def _gates(audit: Audit) -> Section | None:
    if not audit.gates:
        return None
    rows = [
        ["passed" if gate.passed else "FAILED", gate.name, gate.found, gate.limit, gate.detail] for gate in audit.gates
    ]
    return Section("Gates", table=Table(["", "gate", "found", "limit", "detail"], rows))


def _speed_words(audit: Audit) -> str:
    phases = audit.phases
    working = phases.total - phases.load
    rate = f"{audit.requests_answered / working:,.1f} requests/s per engine" if working > 0 else "not measured"
    full = f", engine full {phases.full / phases.total:.0%} of its time" if phases.total > 0 else ""
    return rate + full


def _speed(found: Findings) -> Section | None:
    audit, phases = found.audit, found.audit.phases
    if not audit.requests_answered:
        return None if not audit.requests else Section("Speed", ["Nothing was asked: every answer was there already."])
    rows = [
        [name, f"{value:,.1f} s", _share(value, phases.total)]
        for name, value in (
            ("loading the model", phases.load),
            ("filling the engine", phases.start),
            ("engine full", phases.full),
            ("emptying the engine", phases.tail),
            ("all shards together", phases.total),
        )
    ]
    text = [f"{_speed_words(audit)}."]
    if found.verdict:
        text.append(
            f"Preflight on {found.verdict.golden_rows} golden prompts: {found.verdict.usable_rate:.0%} usable, "
            f"{found.verdict.rows_per_s:,.1f} rows/s"
            + ("." if found.verdict.accuracy is None else f", {found.verdict.accuracy:.0%} of labels right.")
        )
    return Section("Speed", text, Table(["phase", "time", "share"], rows, frozenset({1, 2})))


def _token_words(audit: Audit) -> str:
    tokens = audit.tokens
    cached = f" ({_share(tokens.cached, tokens.prompt)} from the prefix cache)" if tokens.prompt else ""
    return f"{tokens.prompt:,} prompt{cached}, {tokens.completion:,} completion"


def _tokens(audit: Audit) -> Section | None:
    if not audit.requests_answered:
        return None
    tokens, asked = audit.tokens, audit.requests_answered
    rows = [
        ["prompt", f"{tokens.prompt:,}", f"{tokens.prompt / asked:,.1f}"],
        ["of these from the prefix cache", f"{tokens.cached:,}", f"{tokens.cached / asked:,.1f}"],
        ["completion", f"{tokens.completion:,}", f"{tokens.completion / asked:,.1f}"],
    ]
    cost = "The model has no price." if audit.cost is None else f"Cost at the model's price: {audit.cost:,.4f}."
    return Section(
        "Tokens", [f"{_token_words(audit)}. {cost}"], Table(["kind", "tokens", "per request"], rows, frozenset({1, 2}))
    )


def _groups(audit: Audit) -> Section | None:
    if not audit.by_model:
        return None
    rows = [
        [group, f"{sum(statuses.values()):,}", f"{statuses.get('ok', 0):,}", f"{group_rate(statuses):.2%}"]
        for group, statuses in sorted(audit.by_model.items())
    ]
    return Section(
        "Models and prompt versions",
        table=Table(["model@prompt version", "rows", "ok", "unknown rate"], rows, frozenset({1, 2, 3})),
    )


def _open_shards(found: Findings) -> Section | None:
    if not found.open_shards or found.state == "published":
        return None
    rows = [[s.shard_id, f"{s.requests:,}", f"{s.attempts:,}", s.last] for s in found.open_shards]
    hidden = found.audit.shards - found.audit.shards_complete - len(rows)
    more = [f"{hidden:,} more are open."] if hidden else []
    return Section(
        "Open shards", more, Table(["shard", "requests", "attempts", "last message"], rows, frozenset({1, 2}))
    )


def _suite(title: str, suite: SuiteResult | None) -> Section | None:
    if suite is None:
        return None
    rows = [
        [check.outcome, check.severity, check.name, check.column or "", check.observed or "", check.why]
        for check in sorted(suite.results, key=lambda check: check.outcome == "met")[:MAX_CHECKS]
    ]
    text = [f"{len(suite.results):,} of {suite.asked:,} checks answered on {suite.rows:,} rows."]
    return Section(title, text, Table(["outcome", "severity", "check", "column", "observed", "why it is there"], rows))


def _versions(found: Findings) -> Section:
    decision = found.plan.decision
    entries = found.audit.versions | {f"engine: {name}": value for name, value in found.audit.engine.items()}
    rows = [
        ["plan", found.plan.plan_id],
        ["asked as", decision.ask_mode],
        *([name, value] for name, value in entries.items()),
    ]
    rows.append(["made by", f"{found.plan.record.user}, {found.plan.record.created_at:%Y-%m-%d %H:%M} UTC"])
    return Section("Versions", table=Table(["what", "version"], rows))


def _places(found: Findings) -> Section:
    run, target = found.audit.run, found.audit.target
    rows = [
        ["the enriched table, read through Delta", target],
        ["this run: plan, manifest, audit, shards, reports", run],
        [
            "every answer with the model's own words",
            "answers/fingerprint=" + next(iter(found.plan.decision.fingerprints.values()), ""),
        ],
        [
            "the source",
            f"{found.plan.decision.source.path}, {found.plan.decision.source.partition_column}={found.audit.partition}",
        ],
    ]
    return Section(
        "Where things are", [f"Paths are relative to the lake, {found.lake_root}."], Table(["what", "where"], rows)
    )


def _steps(found: Findings) -> Section | None:
    if not found.seconds:
        return None
    rows = [[step, f"{seconds:,.1f} s"] for step, seconds in found.seconds.items()]
    return Section("Time of each step", table=Table(["step", "time"], rows, frozenset({1})))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"
