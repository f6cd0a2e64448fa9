"""`millrace`: what a person does from a terminal. The same words as in the UI and the docs.

Each module here adds its commands in a function `register(app)`. A command imports what it needs when it is called, so that
`millrace --help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from millrace.errors import MillraceError

_MODULES = ("local", "plan", "runs", "enrichments", "prompts", "models", "config", "spark")


class _Group(TyperGroup):
    """Turns what Millrace raises on purpose into one message and its exit code; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MillraceError as error:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(int(error.exit_code)) from error


app = typer.Typer(
    name="millrace",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    help=(
        "Enrich warehouse tables with a large language model: labels, scores, entities, summaries.\n\n"
        "An **enrichment** is a named task over one table; a **run** enriches one partition (a date) of it under a **plan**, "
        "which is everything the run has decided. Start with `millrace demo`."
    ),
    epilog=(
        "Settings are read from MILLRACE_* variables; `plugins/millrace/settings.py` lists them. "
        "Exit codes: 0 done, 1 the run failed, 2 wrong or refused, 3 try again later."
    ),
)

for _module in _MODULES:
    import_module(f"millrace.cli.{_module}").register(app)
