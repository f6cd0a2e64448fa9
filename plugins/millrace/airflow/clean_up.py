"""Bodies of the maintenance DAG's tasks; each says in one line what it removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millrace.airflow.tasks import step_log
from millrace.settings import Settings

if TYPE_CHECKING:
    from millrace.enrichment import Enrichment
    from millrace.maintenance import Removed

RUN_DAYS = 30


def runs(*, params: Any = None) -> None:
    """Remove runs that nobody needs any more, and leftovers inside those that are kept."""
    from millrace import maintenance
    from millrace.config_db import ConfigDb
    from millrace.lake import Lake

    db = ConfigDb(Settings.from_env().require_config_db())
    _say(maintenance.remove_runs(Lake.from_env(), db, _enrichments(), run_days=params["run_days"]))


def answers() -> None:
    """Remove answers that no enrichment may reuse and no run was made of."""
    from millrace import maintenance
    from millrace.lake import Lake

    _say(maintenance.remove_answers(Lake.from_env(), _enrichments()))


def table_files() -> None:
    """Remove files of the enriched tables that no reader and no rollback can reach."""
    from millrace import maintenance
    from millrace.lake import Lake

    _say(maintenance.remove_table_files(Lake.from_env(), _enrichments()))


def _enrichments() -> dict[str, Enrichment]:
    """Those with a sound file; what belongs to a broken one is left alone until it is mended."""
    from millrace.enrichment import load_enrichments

    found, errors = load_enrichments(Settings.from_env().enrichments)
    if errors:
        step_log.info("left alone, since their files are broken: %s", ", ".join(sorted(errors)))
    return found


def _say(removed: Removed) -> None:
    step_log.info("removed %d runs, %d files, %.1f MB", removed.runs, removed.files, removed.bytes / 1e6)
