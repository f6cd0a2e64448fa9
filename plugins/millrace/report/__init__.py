"""The report of a run: what happened to the rows, in words and tables, for whoever is on call and whoever reads the labels.

    written = write(lake, run, dag_run_id, state="success")     # {"markdown": path, "html": path}
    print_summary(lake, run)                                    # the same in a few lines, for a terminal

It is rendered from the run's records alone, so it can be written for a run that failed anywhere, and written again at any time. It holds
counts, labels, ids and paths, never a row's text or a prompt, and its size does not grow with the partition.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.report.content import describe
from millrace.report.findings import find

__all__ = ["ledger", "print_summary", "summary", "write"]


@cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("millrace.report", "templates"),
        autoescape=jinja2.select_autoescape(["html.jinja"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def write(
    lake: Lake,
    run: str,
    dag_run_id: str,
    *,
    state: str,
    step_seconds: Mapping[str, float] | None = None,
    since: datetime | None = None,
) -> dict[str, str]:
    """Write `report.md` and `report.html` of one DAG run under `reports/<dag run>/` of its run.

    Args:
        run: relative path of the run.
        dag_run_id: names the folder, so that runs of one plan keep a report each.
        state: "success" or "failed", as the DAG run ended.
        step_seconds: wall time of each step; the steps' own records are used where it is not given.
        since: when the DAG run began; what its plan had asked before is told apart.

    Returns:
        {"markdown": path, "html": path}, relative to the lake.

    Raises:
        NotFoundError: the run has no plan.
    """
    content = describe(find(lake, run, state, step_seconds or {}, since))
    folder = RunPaths.parse(run)[1].report(dag_run_id)
    written = {}
    for kind, name in (("markdown", "report.md"), ("html", "report.html")):
        written[kind] = f"{folder}/{name}"
        lake.write(written[kind], _templates().get_template(f"{name}.jinja").render(report=content).encode())
    return written


def ledger(lake: Lake, run: str, since: datetime | None = None) -> tuple[dict[str, Any], dict[str, int]]:
    """(counts, tokens) of a DAG run as the ledger of runs keeps them for trends.

    Rows are the plan's, whoever had them answered. `requests_answered` and the tokens are those of shards completed at `since` or later,
    so that a second run of a finished plan costs nothing in a sum over runs; without `since`, those of the whole plan.
    """
    audit = find(lake, run, "success", {}, since).audit
    counts = {
        "rows": audit.rows,
        **audit.statuses,
        "reused": audit.reused,
        "inferred": audit.inferred,
        "requests": audit.requests,
        "requests_answered": audit.requests_answered,
        "unknown_rate": round(audit.unknown_rate, 6),
    }
    return counts, audit.tokens.model_dump()


def summary(lake: Lake, run: str, state: str | None = None, since: datetime | None = None) -> list[RichTable | Text]:
    """The report in a few lines, as rich renderables: headline, what to do next, what became of the rows, where things are."""
    content = describe(find(lake, run, state, {}, since))
    parts: list[RichTable | Text] = [Text(content.title, style="bold"), *(Text(line) for line in content.headline)]
    parts += [Text(f"Next: {step}", style="yellow") for step in content.next_steps]
    facts = RichTable(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")  # a path that is cut cannot be opened
    for name, value in content.facts:
        facts.add_row(name, Text(value))
    return [*parts, facts]


def print_summary(
    lake: Lake, run: str, state: str | None = None, since: datetime | None = None, console: Console | None = None
) -> None:
    (console or Console()).print(*summary(lake, run, state, since), sep="\n")
