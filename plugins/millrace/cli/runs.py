"""`millrace runs|show|estimate|publish|rollback`: what became of runs, and the decisions only a person takes about them."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

import typer

from millrace.cli.common import EnrichmentName, Json, config_db_url, open_config_db, print_json, print_table
from millrace.errors import ConfigError, NotFoundError, UnavailableError
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.local import login_name
from millrace.settings import Settings

_PANEL = "Runs"

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="ENRICHMENT/PARTITION (its newest plan), ENRICHMENT/PARTITION/PLAN with the first digits of the plan id, or a run's path.",
    ),
]


def register(app: typer.Typer) -> None:
    for command in (runs, show, estimate, publish, rollback):
        app.command(rich_help_panel=_PANEL)(command)


def find_run(lake: Lake, name: str) -> str:
    """The relative path of the run that a person means.

    Raises NotFoundError when there is none, ConfigError when the name is not one or fits several plans.
    """
    if "runs/" in name:
        return RunPaths.parse(name)[1].root
    match = re.fullmatch(r"([a-z][a-z0-9_]*)/(\d{4}-\d{2}-\d{2})(?:/([0-9a-f]*))?", name)
    if not match:
        raise ConfigError(f"'{name}' is not a run; write ENRICHMENT/PARTITION, e.g. review_insights/2026-11-01.")
    enrichment, partition, prefix = match[1], match[2], match[3] or ""
    plans = [plan_id for plan_id in lake.folders(f"runs/{enrichment}/{partition}") if plan_id.startswith(prefix)]
    if not plans:
        raise NotFoundError(
            f"There is no run of '{name}' in the lake '{lake.root}'. `millrace runs {enrichment}` lists them."
        )
    if prefix and len(plans) > 1:
        raise ConfigError(
            f"'{name}' fits {len(plans)} plans: {', '.join(plan[:16] for plan in plans)}. Give more digits."
        )
    return RunPaths(enrichment, partition, _newest(lake, enrichment, partition, plans)).root


def _newest(lake: Lake, enrichment: str, partition: str, plans: list[str]) -> str:
    if len(plans) == 1:
        return plans[0]
    from millrace.plan import Plan

    return max(plans, key=lambda plan_id: Plan.read(lake, RunPaths(enrichment, partition, plan_id)).record.created_at)


def runs(
    enrichment: Annotated[
        str | None, typer.Argument(metavar="[ENRICHMENT]", help="Only this enrichment's runs.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20,
    as_json: Json = False,
) -> None:
    """List the latest runs with what came of them."""
    rows = []
    for run in open_config_db().runs(enrichment, limit):
        counts, tokens = run.counts, run.tokens
        rate = counts.get("unknown_rate")
        rows.append(
            (
                f"{run.enrichment}/{run.partition}",
                run.number,
                run.state,
                counts.get("rows"),
                counts.get("requests_answered"),
                None if rate is None else f"{rate:.2%}",
                tokens.get("prompt", 0) + tokens.get("completion", 0) if tokens else None,
                None if run.seconds is None else round(run.seconds),
                f"{run.started_at:%Y-%m-%d %H:%M}",
                (run.plan_id or "")[:12],
            )
        )
    columns = ("run", "number", "state", "rows", "asked", "unknown", "tokens", "seconds", "started", "plan")
    print_table(
        columns, rows, as_json=as_json, empty="No run yet. `millrace run ENRICHMENT --partition DATE` makes one."
    )


def _began(run: str) -> datetime | None:
    """When the newest DAG run under a run's plan began; None where no config table is at hand, for the lake speaks without it."""
    from millrace.config_db import ConfigDb

    _, paths = RunPaths.parse(run)
    try:
        url = config_db_url()
        row = ConfigDb(url).newest_run(paths.enrichment, paths.partition, paths.plan_id) if url else None
    except UnavailableError:
        return None
    return None if row is None else row.started_at


def show(run: RunName, as_json: Json = False) -> None:
    """Show what a run did, where it stands and what to do next.

    What was asked is counted for the newest DAG run of the plan. The full report is the HTML file it names.
    """
    from millrace import report
    from millrace.report.findings import find

    lake = Lake.from_env()
    path = find_run(lake, run)
    if as_json:
        found = find(lake, path, None, {}, _began(path))
        print_json(
            {
                "run": path,
                "state": found.state,
                "version": found.version,
                "asked_earlier": found.asked_earlier,
                "trouble": None if found.trouble is None else vars(found.trouble),
                "audit": found.audit.model_dump(mode="json"),
            }
        )
        return
    report.print_summary(lake, path, since=_began(path))
    for file in lake.list(f"{path}/reports"):
        if file.path.endswith(".html"):
            typer.echo(f"report    {lake.uri(file.path)}")


def estimate(run: RunName, as_json: Json = False) -> None:
    """Estimate the tokens, the cost and the hours that a run still needs.

    Before `extract` this is an upper bound from the source's size; afterwards it counts exactly what is left to ask.
    """
    from millrace import budget
    from millrace.plan import Plan
    from millrace.records import Manifest

    lake = Lake.from_env()
    plan = Plan.read(lake, find_run(lake, run))
    found = budget.estimate(lake, plan, Manifest.load_or_none(lake, plan.paths.manifest))
    limit = plan.enrichment.limits.budget_tokens
    if as_json:
        print_json({"run": plan.paths.root, **found, "budget_tokens": limit})
        return
    counted = "counted by extract" if found["exact_requests"] else "at most: no text repeated, no answer reused"
    print_table(
        ("what", "estimate"),
        [
            ("requests left to ask", f"{found['requests']:,} ({counted})"),
            ("shards", f"{found['shards']:,}"),
            ("prompt tokens", f"{found['prompt_tokens']:,}"),
            ("completion tokens", f"at most {found['completion_tokens']:,}"),
            ("budget", "none" if limit is None else f"{limit:,} tokens"),
            ("cost", "the model has no price" if found["cost"] is None else f"{found['cost']:,.2f}"),
            ("hours on one engine", "not measured yet" if found["hours"] is None else f"{found['hours']:,.2f}"),
        ],
    )


def publish(
    run: RunName,
    accept_unknown_rate: Annotated[
        bool, typer.Option("--accept-unknown-rate", help="Let the run's present unknown rate pass `validate`.")
    ] = False,
    reason: Annotated[str, typer.Option(help="Why; stays with the run and stands in its report.")] = "",
) -> None:
    """Accept a run's unknown rate, so that it can be published.

    Publishing itself is the last step of the run's graph. This records who accepted which rate and why; clear `validate` afterwards.
    The acceptance covers this rate and nothing above it.
    """
    from millrace import validation

    lake = Lake.from_env()
    path = find_run(lake, run)
    if not accept_unknown_rate:
        raise ConfigError(
            f"Nothing to do for {path}: publishing is a step of its run, clear `publish` there. To let a refused run through, "
            "give --accept-unknown-rate and --reason."
        )
    override = validation.accept_unknown_rate(lake, path, login_name(), reason)
    typer.echo(
        f"Accepted an unknown rate of up to {override.unknown_rate:.2%} for {path}, by {override.by}. "
        "Now clear `validate` of that run."
    )


def rollback(
    enrichment: EnrichmentName,
    partition: Annotated[str, typer.Option(help="The date to roll back, YYYY-MM-DD.")],
    to: Annotated[
        int | None, typer.Option(help="Version of the table to go back to; left out, the versions are listed.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make an earlier version of one date live again; other dates stay as they are.

    Leave out `--to` to see which versions there are.
    """
    from millrace import publishing
    from millrace.enrichment import load_enrichment

    lake = Lake.from_env()
    loaded = load_enrichment(Settings.from_env().enrichments / f"{enrichment}.yaml")
    if to is None:
        print_table(
            ("version", "published", "rows", "unknown", "sample", "plan", "note"),
            [
                (
                    found.version,
                    f"{found.at:%Y-%m-%d %H:%M} UTC",
                    found.rows,
                    f"{found.unknown_rate:.2%}",
                    "yes" if found.sample else "",
                    found.plan_id[:12],
                    "" if found.rollback_to is None else f"rollback to {found.rollback_to}",
                )
                for found in publishing.versions(lake, loaded.target.path, partition)
            ],
            as_json=as_json,
            empty=f"{partition} of {loaded.target.path} was never published.",
        )
        return
    done = publishing.rollback(lake, loaded, partition, to)
    if as_json:
        print_json(done)
    elif done["already_live"]:
        typer.echo(
            f"{partition} of {loaded.target.path} already is as in version {to}: {done['rows']:,} rows. Nothing changed."
        )
    else:
        typer.echo(
            f"{partition} of {loaded.target.path} is as in version {to} again: {done['rows']:,} rows, now version {done['version']}."
        )
