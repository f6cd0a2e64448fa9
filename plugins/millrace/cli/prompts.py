"""`millrace prompts`: from the files people review to the versions that run."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer

from millrace.cli.common import Json, open_config_db, print_table, sound_enrichments
from millrace.enrichment import load_enrichments
from millrace.errors import ConfigError
from millrace.local import login_name
from millrace.settings import Settings

Name = Annotated[str, typer.Argument(help="Name of a folder in dags/prompts/.")]
Names = Annotated[list[str] | None, typer.Argument(help="Names of folders in dags/prompts/; none: all of them.")]
Version = Annotated[int | None, typer.Argument(help="A version; none: the active one.")]


def register(app: typer.Typer) -> None:
    prompts = typer.Typer(
        no_args_is_help=True,
        help="Push, compare and activate prompts.\n\nPrompts are written in `dags/prompts/` and reviewed like code; `push` copies them "
        "into the config table as drafts, `activate` makes one the version that runs. Every row says which version labelled it.",
    )
    for function in (push, activate, show, diff, lint):
        prompts.command()(function)
    prompts.command("list")(list_)
    app.add_typer(prompts, name="prompts", rich_help_panel="Enrichments and prompts")


def push(
    names: Names = None,
    note: Annotated[str, typer.Option(help="Why this version: kept with it.")] = "",
    activate: Annotated[bool, typer.Option("--activate", help="Make the pushed version the one that runs.")] = False,
) -> None:
    """Copy prompts from dags/prompts/ into the config table as new drafts.

    A text that has not changed since the newest version makes no new one, so pushing twice is harmless.
    """
    from millrace.prompt_push import push_prompts

    pushed = push_prompts(
        open_config_db(), Settings.from_env(), names or None, author=login_name(), note=note, activate=activate
    )
    for name, version in pushed.items():
        typer.echo(f"{name}: version {version}{' is active' if activate else ''}")


def activate(name: Name, version: Annotated[int, typer.Argument(help="The version that shall run.")]) -> None:
    """Make a version the one that runs from the next plan on; the one before is retired.

    Refused when an enrichment that uses the prompt could not fill a placeholder, or when the text has none. A retired version can
    be activated again. Runs that are under way keep the version of their plan.
    """
    # A file that is broken uses no prompt until it is mended; `millrace enrichments` names it.
    enrichments = load_enrichments(Settings.from_env().enrichments)[0]
    open_config_db().activate_prompt(name, version, enrichments.values())
    typer.echo(f"{name}: version {version} is active")


def list_(name: Annotated[str | None, typer.Argument(help="Only this prompt.")] = None, as_json: Json = False) -> None:
    """List the versions in the config table."""
    print_table(
        ("prompt", "version", "status", "author", "created", "note"),
        [
            (row.name, row.version, row.status, row.author, f"{row.created_at:%Y-%m-%d %H:%M}", row.note)
            for row in open_config_db().prompts(name)
        ],
        as_json=as_json,
        empty="No prompt has been pushed. Push those of dags/prompts/ with `millrace prompts push --activate`.",
    )


def show(name: Name, version: Version = None) -> None:
    """Print a version's texts."""
    row = open_config_db().prompt(name, version)
    typer.echo(
        f"# {row.name} version {row.version}, {row.status}\n\n## system\n\n{row.system}\n\n## body\n\n{row.body}"
    )


def diff(
    name: Name,
    old: Version = None,
    new: Annotated[int | None, typer.Argument(help="Another version; none: the files in dags/prompts/.")] = None,
) -> None:
    """Compare two versions, or a version with the files in dags/prompts/."""
    from millrace.prompts import PromptText, read_prompt

    db = open_config_db()
    before = db.prompt(name, old)
    if new is None:
        after, after_name = read_prompt(Settings.from_env().prompts / name), f"dags/prompts/{name}"
    else:
        row = db.prompt(name, new)
        after, after_name = PromptText(row.system, row.body), f"version {new}"
    lines = [
        line
        for part in ("system", "body")
        for line in difflib.unified_diff(
            getattr(before, part).splitlines(),
            getattr(after, part).splitlines(),
            f"version {before.version} {part}",
            f"{after_name} {part}",
            lineterm="",
        )
    ]
    typer.echo("\n".join(lines) or f"Version {before.version} and {after_name} are the same.")


def lint(names: Names = None) -> None:
    """Check the prompts in dags/prompts/ against the enrichments that use them. Needs no database."""
    from millrace.prompt_push import lint_prompts

    problems, checked = lint_prompts(Settings.from_env(), sound_enrichments().values(), names or None)
    if problems:
        raise ConfigError("\n".join(problems))
    typer.echo(f"{checked} prompt(s) checked, no problem found.")
