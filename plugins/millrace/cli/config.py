"""`millrace migrate`: the config table itself."""

from __future__ import annotations

import typer

from millrace.cli.common import open_config_db


def register(app: typer.Typer) -> None:
    app.command("migrate", rich_help_panel="Set-up")(migrate)


def migrate() -> None:
    """Create the config table's tables, or bring them to the newest version.

    Safe to run twice and while Millrace runs. `millrace up` and `millrace demo` do it by themselves; a deployment does it
    before a new version starts.
    """
    db = open_config_db()
    db.migrate()
    typer.echo(f"The config table at {db.where} is up to date.")
