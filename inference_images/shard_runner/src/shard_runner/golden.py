"""The golden rows of a plan: prompts whose answers show whether the engine can do the task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from millrace.errors import ConfigError
from millrace.lake import Lake
from millrace.layout import golden_file
from millrace.plan import Plan
from millrace.prompts import row_placeholders
from shard_runner.requests import Request


@dataclass(frozen=True)
class GoldenRow:
    request: Request
    expected: dict[str, Any]  # field -> right value, for the fields that are labelled


def read_golden(lake: Lake, plan: Plan) -> list[GoldenRow]:
    """The plan's golden rows, at most `preflight.golden_rows`. Raises NotFoundError, ConfigError naming the line."""
    path = golden_file(plan.decision.golden)
    names = row_placeholders(plan.decision.prompt.text)
    rows = []
    for number, line in enumerate(lake.read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
            values = {name: None if row[name] is None else str(row[name]) for name in names}
            rows.append(GoldenRow(Request(f"golden-{number}", values, 0), dict(row.get("expected") or {})))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"golden row {number} of prompt '{plan.decision.prompt.name}' is not usable ({type(error).__name__}); "
                f"each line is a JSON object with {', '.join(names)} and `expected`."
            ) from error
    return rows[: plan.enrichment.preflight.golden_rows]
