"""From `dags/prompts/`, where prompts are written and reviewed, to the config table, from where they run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from millrace import prompts
from millrace.enrichment import Enrichment, load_enrichments
from millrace.errors import ConfigError
from millrace.settings import Settings

if TYPE_CHECKING:
    from millrace.config_db import ConfigDb


def prompt_names(settings: Settings) -> list[str]:
    """Names of the prompt folders."""
    return sorted(folder.name for folder in settings.prompts.iterdir() if (folder / "body.jinja").is_file())


def push_prompts(
    db: ConfigDb,
    settings: Settings,
    names: list[str] | None = None,
    *,
    author: str,
    note: str = "",
    activate: bool = False,
) -> dict[str, int]:
    """Push prompts (default: all) and return name -> version; with `activate` they run from the next plan on.

    Raises NotFoundError for a folder that lacks a file. ConfigError when an enrichment could not use what would be activated: it says which
    versions stay as they are and what to do; the other prompts are activated all the same.
    """
    texts = {name: prompts.read_prompt(settings.prompts / name) for name in names or prompt_names(settings)}
    pushed = {name: db.push_prompt(name, text, author=author, note=note) for name, text in texts.items()}
    if activate:
        # Files that are broken use no prompt yet; their own error is reported where they are loaded.
        enrichments = load_enrichments(settings.enrichments)[0].values()
        refused = []
        for name, version in pushed.items():
            try:
                db.activate_prompt(name, version, enrichments)
            except ConfigError as error:
                status = db.prompt(name, version).status
                refused.append(
                    f"{name}: version {version} is in the config table as {status}. {error}\n"
                    f"Correct dags/prompts/{name}/ and push it again, which makes a new version; or correct the enrichment and run "
                    f"`millrace prompts activate {name} {version}`."
                )
        if refused:
            raise ConfigError("\n".join(refused))
    return pushed


def lint_prompts(
    settings: Settings, enrichments: Iterable[Enrichment], names: list[str] | None = None
) -> tuple[list[str], int]:
    """(problems, prompts checked) of the prompt folders (default: all), and of enrichments whose prompt has no folder."""
    known = prompt_names(settings)
    by_prompt: dict[str, list[Enrichment]] = {name: [] for name in names or known}
    problems = []
    for enrichment in enrichments:
        if enrichment.prompt in by_prompt:
            by_prompt[enrichment.prompt].append(enrichment)
        elif enrichment.prompt not in known:
            problems.append(f"{enrichment.name}.yaml: prompt: there is no folder dags/prompts/{enrichment.prompt}/")
    for name, users in by_prompt.items():
        try:
            text = prompts.read_prompt(settings.prompts / name)
            # A prompt that nothing uses yet is still a template that needs its text.
            column_sets = [user.source.keep for user in users] or [tuple(prompts.placeholders(text.body))]
        except ConfigError as error:
            problems.append(str(error))
            continue
        for columns in column_sets:
            problems += prompts.lint(text, columns, f"prompt {name}")
    return problems, len(by_prompt)
