"""`millrace models` and `millrace routes`: which models there are and which one answers what."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
import yaml

from millrace.canonical import content_hash
from millrace.cli.common import EnrichmentName, Json, config_db_url, open_config_db, print_json, print_table
from millrace.errors import ConfigError
from millrace.settings import Settings

_PANEL = "Models"


def register(app: typer.Typer) -> None:
    models = typer.Typer(
        no_args_is_help=True,
        help="Add and list models.\n\nA model is a folder in the store (MILLRACE_MODELS), named by the hash of its files, or an "
        "OpenAI-compatible endpoint. A plan pins the version it saw; a new version starts new answers.",
    )
    models.command()(add)
    models.command("list")(list_)
    models.command()(show)
    app.add_typer(models, name="models", rich_help_panel=_PANEL)
    routes = typer.Typer(
        no_args_is_help=True,
        help="Say which model answers an enrichment whose file names none.\n\nThe route with the lowest priority decides.",
    )
    routes.command("set")(set_route)
    routes.command("list")(list_routes)
    app.add_typer(routes, name="routes", rich_help_panel=_PANEL)


def _check_endpoint(endpoint: str) -> None:
    """Raise ConfigError, which does not quote it, unless the URL is plain: the config table and every plan will hold it."""
    try:
        url = urlsplit(endpoint)
    except ValueError:
        url = urlsplit("")
    if url.scheme not in ("http", "https") or not url.hostname or "@" in url.netloc or url.query:
        raise ConfigError(
            "--endpoint must be the base URL of the API with scheme, host and path alone, e.g. http://127.0.0.1:8000/v1. "
            "A key belongs into the runner's environment: see docs/endpoints.md."
        )


def _pairs(options: list[str] | None, what: str) -> dict[str, Any]:
    """`k=v` options; values are read as YAML, so that 32 is a number and true a boolean."""
    pairs = {}
    for option in options or []:
        key, separator, value = option.partition("=")
        if not key or not separator:
            raise ConfigError(f"{what} '{option}' is not written KEY=VALUE, e.g. block_size=32.")
        pairs[key] = yaml.safe_load(value)
    return pairs


def add(
    name: Annotated[str, typer.Argument(help="What enrichments call it, e.g. smollm2-135m-instruct.")],
    source: Annotated[
        str | None,
        typer.Option(
            "--from", help="Folder with the model's files, or a file://, s3:// or hf://OWNER/REPO[@REVISION] URL."
        ),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Base URL of an OpenAI-compatible API, instead of --from.")
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="The endpoint's own name of the model; default: NAME.")
    ] = None,
    revision: Annotated[
        str, typer.Option(help="What the endpoint serves at present. Change it when that changes.")
    ] = "",
    setting: Annotated[list[str] | None, typer.Option(help="Engine setting KEY=VALUE; may be repeated.")] = None,
    resource: Annotated[
        list[str] | None, typer.Option(help="What a pod needs, KEY=VALUE, e.g. gpu=1; may be repeated.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price of a million tokens, for estimates.")] = None,
    context_tokens: Annotated[
        int | None, typer.Option(min=256, help="Longest context; default: the model's own.")
    ] = None,
    chars_per_token: Annotated[
        float | None, typer.Option(min=0.1, help="UTF-8 bytes a token stands for, for estimates.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Number format the engine loads it in; default: the model's own.")
    ] = None,
    quantization: Annotated[str | None, typer.Option(help="The engine's name of the quantisation, if any.")] = None,
) -> None:
    """Add a model, or a new version of one.

    A folder is copied into the store, whole or not at all, under the hash of its files; adding the same files again does
    nothing. Where there is a config table the model is registered in it too; else `millrace demo` and `millrace up` do it later.

    Example: `millrace models add smollm2-135m-instruct --from ./smollm2`
    """
    from millrace import model_store

    settings = Settings.from_env()
    if source and endpoint:
        raise ConfigError("A model is a folder or an endpoint: give --from or --endpoint, not both.")
    given = {
        "price_per_million_tokens": price,
        "context_tokens": context_tokens,
        "chars_per_token": chars_per_token,
        "dtype": dtype,
        "quantization": quantization,
        "settings": _pairs(setting, "--setting") or None,
        "resources": _pairs(resource, "--resource") or None,
    }
    columns = {key: value for key, value in given.items() if value is not None}
    if endpoint:
        _check_endpoint(endpoint)
        served = served_name or name
        digest = content_hash([endpoint, served, revision])
        open_config_db().upsert_model(
            name, engine="openai", digest=digest, location="", endpoint=endpoint, served_name=served, **columns
        )
        typer.echo(f"{name}: {served} at {endpoint} is registered.")
        return
    if not source:
        raise ConfigError("Say where the model is: --from FOLDER for files, or --endpoint URL for an API.")
    registers = config_db_url() is not None
    if columns and not registers:
        raise ConfigError(
            "Settings and prices of a model are kept in the config table: set MILLRACE_CONFIG_DB, or leave them out now."
        )
    model = model_store.add_model(source, name, settings.models)
    typer.echo(f"{name}: {model.digest[:12]} is in the store ({model.bytes / 1e6:,.0f} MB).")
    if registers:
        model_store.register(open_config_db(), model, **columns)
        typer.echo(f"{name}: registered in the config table.")


def list_(as_json: Json = False) -> None:
    """List the models of the config table, and those of the store that it does not know."""
    from millrace import model_store

    settings = Settings.from_env()
    stored = model_store.stored_models(settings.models)
    versions = {(model.name, model.digest) for model in stored}
    rows: list[tuple[Any, ...]] = []
    if config_db_url():
        for row in open_config_db().models():
            there = row.engine != "vllm" or (row.name, row.digest) in versions
            state = "ready" if there else "not in the store"
            rows.append((row.name, row.digest[:12], row.engine, row.endpoint or "store", row.context_tokens, state))
    known = {row[0] for row in rows}
    rows += [
        (m.name, m.digest[:12], "vllm", "store", m.context_tokens, "in the store only")
        for m in stored
        if m.name not in known
    ]
    print_table(
        ("model", "digest", "engine", "from", "context", "state"),
        rows,
        as_json=as_json,
        empty="No model yet. Add one with `millrace models add NAME --from FOLDER`.",
    )


def show(name: Annotated[str, typer.Argument(help="Name of a model.")]) -> None:
    """Print everything the config table knows about a model, as JSON."""
    from millrace.config_db import Model

    row = open_config_db().model(name)
    print_json({column.name: getattr(row, column.name) for column in Model.__table__.columns})


def set_route(
    enrichment: EnrichmentName,
    model: Annotated[str, typer.Argument(help="Name of a model.")],
    priority: Annotated[int, typer.Option(help="The lowest decides.")] = 100,
) -> None:
    """Let a model answer an enrichment."""
    open_config_db().set_route(enrichment, model, priority)
    typer.echo(f"{enrichment}: answered by {model} (priority {priority}).")


def list_routes(
    enrichment: Annotated[str | None, typer.Argument(help="Only this enrichment.")] = None, as_json: Json = False
) -> None:
    """List the routes."""
    print_table(
        ("enrichment", "priority", "model"),
        [(route.enrichment, route.priority, route.model) for route in open_config_db().routes(enrichment)],
        as_json=as_json,
        empty="No route. Enrichments are answered by the model their file names.",
    )
