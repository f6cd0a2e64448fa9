"""What the commands share: opening things, and printing tables or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.enrichment import Enrichment
from millrace.errors import ConfigError
from millrace.settings import Settings

if TYPE_CHECKING:
    from millrace.config_db import ConfigDb

EnrichmentName = Annotated[str, typer.Argument(metavar="ENRICHMENT", help="Name of a file in dags/enrichments/.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def config_db_url() -> str | None:
    """What MILLRACE_CONFIG_DB names, else the local database once `millrace demo` or `up` has made it; None before that."""
    from millrace.local import LocalSite

    site = LocalSite.from_env()
    return site.config_db if site.settings.config_db or site.is_prepared else None


def open_config_db() -> ConfigDb:
    """The config table. Raises ConfigError, saying how to get one, where there is none."""
    from millrace.config_db import ConfigDb

    return ConfigDb(config_db_url() or Settings.from_env().require_config_db())


def sound_enrichments() -> dict[str, Enrichment]:
    """Every enrichment by name. Raises ConfigError with the errors of all files when one is broken."""
    from millrace.enrichment import load_enrichments

    found, errors = load_enrichments(Settings.from_env().enrichments)
    if errors:
        raise ConfigError("\n".join(map(str, errors.values())))
    return found


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, as_json: bool = False, empty: str = "Nothing yet."
) -> None:
    """Rows as a table for people, or as a JSON list of objects."""
    listed = list(rows)
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in listed])
        return
    if not listed:
        typer.echo(empty)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in listed:
        table.add_row(*(Text("" if value is None else str(value)) for value in row))
    # In a pipe there is no width to fit into: cut nothing.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)
