"""`millrace enrichments` and `millrace schema`: what the files in dags/enrichments/ say."""

from __future__ import annotations

import typer

from millrace.cli.common import EnrichmentName, Json, print_json, print_table
from millrace.settings import Settings

_PANEL = "Enrichments and prompts"


def register(app: typer.Typer) -> None:
    app.command("enrichments", rich_help_panel=_PANEL)(enrichments)
    app.command("schema", rich_help_panel=_PANEL)(schema)


def enrichments(as_json: Json = False) -> None:
    """List the enrichments and check their files.

    Ends with exit code 2 when a file is broken, so that it can guard a merge.
    """
    from millrace.enrichment import load_enrichments

    found, errors = load_enrichments(Settings.from_env().enrichments)
    print_table(
        ("enrichment", "source", "answer", "form", "schedule", "target"),
        [
            (e.name, e.source.path, ", ".join(e.schema.names), e.form, e.schedule or "by hand", e.target.path)
            for e in found.values()
        ],
        as_json=as_json,
        empty="There is no sound enrichment file in dags/enrichments/.",
    )
    for error in errors.values():
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
    if errors:
        raise typer.Exit(2)


def schema(enrichment: EnrichmentName, as_json: Json = False) -> None:
    """Show what an enrichment's answer is for the engine, for the prompt and for the table.

    Use it while writing the `answer:` part of a file.
    """
    from millrace.enrichment import load_enrichment

    loaded = load_enrichment(Settings.from_env().enrichments / f"{enrichment}.yaml")
    answer = loaded.schema
    columns = {field.name: str(field.type) for field in answer.arrow_fields()}
    max_tokens = loaded.sampling.max_tokens or answer.max_answer_tokens(loaded.form)
    choices = answer.compact_choices() if loaded.form == "compact" else None
    if as_json:
        print_json(
            {
                "form": loaded.form,
                "json_schema": answer.json_schema(),
                "choices": choices,
                "columns": columns,
                "max_tokens": max_tokens,
            }
        )
        return
    typer.echo(f"Columns of {loaded.target.path}, null where answer_status is not ok:")
    print_table(("column", "type"), columns.items())
    typer.echo(f"What a prompt says as {{{{ answer_fields }}}}:\n\n{answer.describe()}\n")
    if choices:
        typer.echo(f"The engine may answer (form compact), in at most {max_tokens} tokens:\n\n" + "\n".join(choices))
    else:
        typer.echo(f"The engine is held to (form json), in at most {max_tokens} tokens:\n")
        print_json(answer.json_schema())
