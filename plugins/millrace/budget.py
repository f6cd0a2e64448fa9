"""approve_budget: what a run is still going to ask, what that costs, and whether that was agreed.

    prompt tokens       what extract estimated for the shards that are not complete
    completion tokens   their requests x the longest answer the plan allows: an upper bound, since answers end earlier
    cost                tokens x the model's price per million, where it has one
    hours               requests / rows per second of the newest passed preflight verdict, one engine at a time

A run with nothing left to ask passes, whatever its budget.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pyarrow.parquet as pq

from millrace.errors import ConfigError, IncompleteError, RefusedError
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.plan import Plan, shard_count
from millrace.records import Approval, Manifest, ShardEntry, Verdict


@dataclass(frozen=True)
class Estimate:
    """What is still to be asked. Tokens are estimates; `exact_requests` is False before extract has counted them."""

    requests: int
    shards: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    hours: float | None
    rows_per_s: float | None
    exact_requests: bool

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def numbers(self) -> dict[str, float]:
        """The known numbers, as an approval stores them."""
        values = asdict(self) | {"tokens": self.tokens}
        return {
            name: float(value) for name, value in values.items() if value is not None and not isinstance(value, bool)
        }


def estimate(lake: Lake, plan: Plan, manifest: Manifest | None) -> dict[str, Any]:
    """What a run is still going to ask, as plain values: requests, shards, prompt_tokens, completion_tokens, tokens, cost, hours,
    rows_per_s (the last three None where unknown) and exact_requests.

    Without a manifest the source's Parquet footers give the rows and the size of the text column, hence an upper bound that knows
    nothing of repeated texts and of answers that exist already.
    """
    found = _from_manifest(lake, plan, manifest) if manifest else _from_source(lake, plan)
    return asdict(found) | {"tokens": found.tokens}


def decide(lake: Lake, run: str) -> Literal["passed", "needs approval"]:
    """Whether the run may go on to ask. Safe to repeat; a pass is stored as the run's approval, so that it is on record.

    Raises RefusedError when it is over budget and the enrichment says `over_budget: fail`, IncompleteError before extract.
    """
    paths = RunPaths.parse(run)[1]
    plan = Plan.read(lake, paths)
    manifest = Manifest.load_or_none(lake, paths.manifest)
    if manifest is None:
        raise IncompleteError(f"{paths.root} has no manifest: nothing is extracted. Clear `extract`.")
    left = _from_manifest(lake, plan, manifest)
    budget = plan.enrichment.limits.budget_tokens
    if left.requests == 0 or _covered(lake, paths, left):
        return "passed"
    if budget is None or left.tokens <= budget:
        within = "no budget is set" if budget is None else f"within the budget of {budget:,} tokens"
        lake.write(paths.approval, Approval(approved=True, by="budget", reason=within, estimate=left.numbers()).dump())
        return "passed"
    if plan.enrichment.over_budget == "wait":
        return "needs approval"
    raise RefusedError(
        f"{paths.root} would spend about {left.tokens:,} tokens on {left.requests:,} requests{_money(left)}; limits.budget_tokens is "
        f"{budget:,}. Raise it, take a row sample, or set over_budget: wait so that a person can approve, then clear `plan`."
    )


def approve(lake: Lake, run: str, by: str, reason: str, approved: bool = True) -> Approval:
    """Store a person's decision with the plan. An approval covers what is left up to the tokens it was given for."""
    paths = RunPaths.parse(run)[1]
    plan = Plan.read(lake, paths)
    numbers = _from_manifest(lake, plan, Manifest.load(lake, paths.manifest)).numbers()
    approval = Approval(approved=approved, by=by, reason=reason, estimate=numbers)
    lake.write(paths.approval, approval.dump())
    return approval


def _covered(lake: Lake, paths: RunPaths, left: Estimate) -> bool:
    approval = Approval.load_or_none(lake, paths.approval)
    return approval is not None and approval.approved and left.tokens <= approval.estimate.get("tokens", 0)


def _money(found: Estimate) -> str:
    return "" if found.cost is None else f", about {found.cost:,.2f} at the model's price"


def _from_manifest(lake: Lake, plan: Plan, manifest: Manifest) -> Estimate:
    left = open_shards(lake, plan.paths, manifest)
    per_model: dict[str, tuple[int, int]] = {}
    for shard in left:
        requests, tokens = per_model.get(shard.model, (0, 0))
        per_model[shard.model] = (requests + shard.requests, tokens + shard.est_tokens)
    return _estimate(lake, plan, per_model, len(left), exact=True)


def _from_source(lake: Lake, plan: Plan) -> Estimate:
    rows, text_bytes = 0, 0
    for file in plan.decision.source.files:
        counted, size = _footer(lake, file.path, plan.enrichment.source.text)
        rows, text_bytes = rows + counted, text_bytes + size
    taken = rows if plan.decision.row_sample is None else min(rows, plan.decision.row_sample)
    model = plan.decision.models[plan.decision.default_model]
    prompt = plan.decision.prompt
    static_chars = len(prompt.system) + len(prompt.body) + len(plan.enrichment.schema.describe())
    chars = taken * (static_chars + min(text_bytes / rows, plan.enrichment.limits.max_text_chars)) if rows else 0
    shards = shard_count(taken, plan.enrichment.limits.requests_per_shard, plan.enrichment.limits.max_shards)
    return _estimate(lake, plan, {model.name: (taken, round(chars / model.chars_per_token))}, shards, exact=False)


def _footer(lake: Lake, path: str, column: str) -> tuple[int, int]:
    """Rows of a source file and the bytes of its text column, from its footer alone."""
    try:
        file: pq.ParquetFile = lake.parquet(lake.relative(path))
    except (ConfigError, OSError) as error:
        raise ConfigError(f"'{path}' cannot be read for an estimate; run extract first, it counts exactly.") from error
    with file:
        meta = file.metadata
        groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
        chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
        return meta.num_rows, sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)


def _estimate(lake: Lake, plan: Plan, per_model: dict[str, tuple[int, int]], shards: int, exact: bool) -> Estimate:
    """Totals over models of (requests, prompt tokens)."""
    requests = sum(count for count, _ in per_model.values())
    prompt = sum(tokens for _, tokens in per_model.values())
    prices = {name: plan.decision.models[name].price_per_million_tokens for name in per_model}
    bound = plan.decision.max_tokens
    cost = sum((tokens + count * bound) * (prices[name] or 0) / 1e6 for name, (count, tokens) in per_model.items())
    speeds = {name: _rows_per_s(lake, plan.decision.fingerprints.get(name, "")) for name in per_model}
    measured = {name: speed for name, speed in speeds.items() if speed is not None}
    known = bool(per_model) and len(measured) == len(per_model)
    seconds = sum(per_model[name][0] / speed for name, speed in measured.items()) if known else 0.0
    return Estimate(
        requests=requests,
        shards=shards,
        prompt_tokens=prompt,
        completion_tokens=requests * bound,
        cost=None if None in prices.values() else cost,
        hours=seconds / 3600 if known else None,
        rows_per_s=round(requests / seconds, 3) if seconds else None,
        exact_requests=exact,
    )


def open_shards(lake: Lake, paths: RunPaths, manifest: Manifest) -> list[ShardEntry]:
    """The shards that have no completion record."""
    # One look per shard, up to 1,000 of them: on an object store they are worth overlapping.
    with ThreadPoolExecutor(max_workers=16) as pool:
        complete = pool.map(lambda shard: lake.exists(paths.complete(shard.shard_id)), manifest.shards)
        return [shard for shard, done in zip(manifest.shards, complete, strict=True) if not done]


def verdicts(lake: Lake, fingerprint: str) -> list[Verdict]:
    """Every stored preflight verdict under a fingerprint."""
    files = lake.list(f"verdicts/{fingerprint}") if fingerprint else ()
    return [Verdict.load(lake, file.path) for file in files if file.path.endswith(".json")]


def _rows_per_s(lake: Lake, fingerprint: str) -> float | None:
    """Speed of the newest passed verdict under a fingerprint, or None."""
    passed = [verdict for verdict in verdicts(lake, fingerprint) if verdict.passed and verdict.rows_per_s > 0]
    return max(passed, key=lambda verdict: verdict.at).rows_per_s if passed else None
