"""`millrace plan`: decide a run without starting it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from millrace.cli.common import EnrichmentName, Json, open_config_db, print_json
from millrace.local import login_name
from millrace.settings import Settings

Partition = Annotated[str, typer.Option(help="The business date, YYYY-MM-DD.")]


def register(app: typer.Typer) -> None:
    app.command("plan", rich_help_panel="Runs")(plan)


def plan(
    enrichment: EnrichmentName,
    partition: Partition,
    row_sample: Annotated[int | None, typer.Option(min=1, help="Only this many rows, always the same ones.")] = None,
    prompt_version: Annotated[
        int | None, typer.Option(min=1, help="Instead of the active version; a draft may be tried so.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ask everything; reuse no answer.")] = False,
    ask_unknowns_again: Annotated[
        bool, typer.Option("--ask-unknowns-again", help="Keep the published usable answers, ask the rest again.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Decide a run and print what it would do. Nothing is read but the source's file list; no model is asked.

    Every mistake that can be seen beforehand is reported here: a missing table, column, partition, prompt or model, a
    placeholder the table cannot fill, a schema the published table cannot take. The same decision again is the same plan.
    """
    from millrace.lake import Lake
    from millrace.planning import PlanParams, make_plan

    settings = Settings.from_env()
    lake = Lake(settings.lake)
    made = make_plan(
        lake=lake,
        db=open_config_db(),
        settings=settings,
        enrichment_name=enrichment,
        partition=partition,
        dag_run_id=f"cli__{datetime.now(UTC).isoformat(timespec='seconds')}",
        user=login_name(),
        params=PlanParams(
            row_sample=row_sample,
            prompt_version=prompt_version,
            reuse_answers=not fresh,
            ask_unknowns_again=ask_unknowns_again,
        ),
    )
    decision = made.decision
    if as_json:
        print_json({"run": made.paths.root, **made.model_dump(mode="json")})
        return
    model = decision.models[decision.default_model]
    size = sum(file.size for file in decision.source.files)
    lines = {
        "run": made.paths.root,
        "source": f"{decision.source.path}, {len(decision.source.files)} file(s), {size:,} bytes",
        "prompt": f"{decision.prompt.name} version {decision.prompt.version}",
        "model": f"{model.name} ({model.engine}, {model.digest[:12]})",
        "answer": f"{', '.join(made.enrichment.schema.names)} as {made.enrichment.form}, at most {decision.max_tokens} tokens",
        "rows": f"sample of {decision.row_sample:,}" if decision.row_sample else "all",
        "answers": {
            "reuse": "reused where given before",
            "fresh": "all asked",
            "unknowns": f"kept where ok in {decision.base_plan}",
        }[decision.ask_mode],
        "target": lake.uri(made.enrichment.target.path),
    }
    for name, value in lines.items():
        typer.echo(f"{name:8} {value}")
