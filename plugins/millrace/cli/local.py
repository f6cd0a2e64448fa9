"""`millrace demo`, `run`, `up`, `down`, `env` and `airflow`: Airflow and its database on this machine."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.cli.common import EnrichmentName
from millrace.errors import ConfigError, RefusedError
from millrace.local import LocalSite, locked, login_name, quiet

if TYPE_CHECKING:
    from millrace.airflow.run_here import Ended

_PANEL = "This machine"
DEMO = "review_insights"


def register(app: typer.Typer) -> None:
    for command in (demo, run, up, down, env):
        app.command(rich_help_panel=_PANEL)(command)
    app.command(
        rich_help_panel=_PANEL,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(airflow)


def demo(
    rows: Annotated[str, typer.Option(help="How many review sentences, or `all`.")] = "300",
    enrichment: Annotated[str, typer.Option(help="Which enrichment of the sample tables.")] = DEMO,
) -> None:
    """See it work: load the sample reviews, enrich one date of them with the demo model, and show what came out.

    Run it a second time and the model is asked nothing: every answer is there already.
    """
    from millrace import sample_source
    from millrace.config_db import ConfigDb
    from millrace.lake import Lake
    from millrace.model_store import sync_models
    from millrace.prompt_push import push_prompts

    if rows != "all" and not (rows.isdecimal() and int(rows) > 0):
        raise ConfigError(f"--rows is '{rows}'; give a number of rows, or `all`.")
    site = _prepared()
    settings = site.settings
    sample_source.load(Lake(settings.lake), settings.home / "data", None if rows == "all" else int(rows))
    db = ConfigDb(site.config_db)
    push_prompts(db, settings, author=login_name(), note="from the checkout", activate=True)
    sync_models(db, settings.models)
    partition = sample_source.partitions(1)[0]
    _run(site, enrichment, {"partition": partition})


def run(
    enrichment: EnrichmentName,
    partition: Annotated[str, typer.Option(help="The business date, YYYY-MM-DD.")],
    row_sample: Annotated[int | None, typer.Option(min=1, help="Only this many rows, always the same ones.")] = None,
    prompt_version: Annotated[int | None, typer.Option(min=1, help="Instead of the active version.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ask everything; reuse no answer.")] = False,
    ask_unknowns_again: Annotated[
        bool, typer.Option("--ask-unknowns-again", help="Keep the published usable answers, ask the rest again.")
    ] = False,
) -> None:
    """Run the whole graph for one date, through Airflow, on this machine; ends with the report.

    Safe to repeat: a second time asks the model nothing. Where `millrace up` has Airflow running and the DAG is switched on, the run is
    triggered there and followed.
    """
    from millrace.partition import parse_partition

    partition = parse_partition(partition, "--partition")
    conf: dict[str, Any] = {"partition": partition, "row_sample": row_sample, "prompt_version": prompt_version}
    conf = {name: value for name, value in conf.items() if value is not None}
    if fresh:
        conf["do_not_reuse_answers"] = True
    if ask_unknowns_again:
        conf["ask_unknowns_again"] = True
    _run(_prepared(), enrichment, conf)


def up() -> None:
    """Start Airflow with its UI on this machine, for triggering, backfilling and clearing by hand."""
    site = _prepared()
    typer.echo("starting Airflow ...")
    url = site.up()
    name, password = site.login
    typer.echo(
        f"Airflow is up: {url}\n  login     {name} / {password}\n  logs      {site.logs}\n  stop with millrace down"
    )


def down() -> None:
    """Stop what `millrace up` started, and the local database. Shards at work save what is finished."""
    stopped = LocalSite.from_env().down()
    typer.echo(f"stopped {stopped} process{'' if stopped == 1 else 'es'}" if stopped else "nothing was running")


def env() -> None:
    """Print the local services' settings for a shell: `eval "$(millrace env)"`, then use `airflow` itself."""
    site = LocalSite.from_env()
    for name, value in site.env().items():
        if name != "PATH":
            typer.echo(f"export {name}={shlex.quote(value)}")
    typer.echo(f'export PATH={shlex.quote(site.bin)}:"$PATH"')


def airflow(context: typer.Context) -> None:
    """Airflow's own command line on this machine's Airflow: `millrace airflow backfill create ...`."""
    site = _prepared()
    os.execv(f"{site.bin}/airflow", ["airflow", *context.args])


def _prepared() -> LocalSite:
    site = LocalSite.from_env()
    if not site.is_prepared:
        typer.echo("preparing the local database ...")
    site.prepare()
    return site


def _run(site: LocalSite, enrichment: str, conf: dict[str, Any]) -> None:
    """Run and print what came of it; exit code 1 when the run failed."""
    log = site.logs / f"run-{enrichment}.log"
    typer.echo(f"{enrichment} {conf['partition']}")
    try:
        with locked(site.folder / "run.lock", wait=False), quiet(log) as terminal:
            from millrace.airflow import run_here

            scheduler_has_it = site.running_port() is not None and run_here.is_scheduled(enrichment)
            start = run_here.run_there if scheduler_has_it else run_here.run_here
            ended = start(enrichment, conf, terminal)
    except BlockingIOError:
        raise RefusedError("another `millrace run` is at work on this machine; wait until it ends.") from None
    _summarize(site, enrichment, ended)
    if ended.state != "success":
        typer.secho(f"\nThe run failed after {ended.seconds:.0f} s.", fg=typer.colors.RED, err=True)
        for error in ended.errors:
            typer.secho(f"  {error}", fg=typer.colors.RED, err=True)
        typer.echo(f"  log: {log}", err=True)
        raise typer.Exit(1)
    typer.echo(f"done in {ended.seconds:.0f} s")


def _summarize(site: LocalSite, enrichment: str, ended: Ended) -> None:
    """Print the report's summary and where the report is; nothing for a run that never got a plan."""
    from millrace import report
    from millrace.config_db import ConfigDb
    from millrace.lake import Lake
    from millrace.layout import RunPaths

    for row in ConfigDb(site.config_db).runs(enrichment, limit=50):
        if row.dag_run_id == ended.dag_run_id and row.plan_id:
            lake, paths = Lake(site.settings.lake), RunPaths(enrichment, row.partition, row.plan_id)
            typer.echo()
            report.print_summary(lake, paths.root, ended.state, row.started_at)
            typer.echo(f"report: {lake.uri(paths.report(ended.dag_run_id))}/report.html")
