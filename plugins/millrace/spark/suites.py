"""Expectation suites: files in `expectations/<name>/`, run by Great Expectations on Spark (docs/expectations.md has the format).

Every check asked must be answered: one that errors blocks like one that is unmet. A table with zero rows passes by rule. What comes back is
counts, observed numbers and a few keys: the frames that are checked hold no text, and values of other columns are never copied.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from millrace.canonical import sha256_hex
from millrace.errors import ConfigError, NotFoundError
from millrace.records import CheckResult, SuiteResult

SAMPLE_KEYS = 5


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Check(Frozen):
    """One expectation and the reason for it."""

    name: str
    type: str = Field(pattern=r"^expect_[a-z_]+$", description="a Great Expectations type")
    kwargs: dict[str, Any] = {}
    severity: Literal["block", "warn"]
    why: str = Field(min_length=10, description="what went wrong, or would, without this check")
    opens: str = Field(min_length=3, description="the table or column a reader should look at when it is unmet")


class Suite(Frozen):
    """The checks of one table, and the grain they rest on."""

    table: str
    grain: str
    checks: tuple[Check, ...] = Field(min_length=1)
    label: str = Field(default="", exclude=True)

    @classmethod
    def load(cls, expectations: Path, enrichment: str, kind: Literal["source", "enriched"]) -> Suite:
        """Read `expectations/<enrichment>/<kind>.json`; its label carries the start of the file's SHA-256, so that a result says
        which checks it stands for. Raises NotFoundError, ConfigError."""
        path = expectations / enrichment / f"{kind}.json"
        where = f"expectations/{enrichment}/{kind}.json"
        if not path.is_file():
            raise NotFoundError(
                f"{where} does not exist. Write the checks of this table; docs/expectations.md has the format."
            )
        data = path.read_bytes()
        try:
            suite = cls.model_validate(json.loads(data) | {"label": f"{enrichment}/{kind}.json@{sha256_hex(data)[:8]}"})
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} is not JSON: {error}.") from error
        except ValidationError as error:
            problems = "\n".join(f"{where}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ConfigError(problems) from error
        names = [check.name for check in suite.checks]
        if doubled := sorted({n for n in names if names.count(n) > 1}):
            raise ConfigError(f"{where}: checks {doubled} appear twice; give each its own name.")
        return suite


def run_suite(spark: SparkSession, suite: Suite, rows: int, key: str, frame: Callable[[], DataFrame]) -> SuiteResult:
    """Ask every check of a suite about `frame()`, of which `rows` is the number of rows and `key` the column that may be quoted."""
    started = time.monotonic()
    results = [_by_rule(check) for check in suite.checks] if rows == 0 else _ask(spark, suite, key, frame())
    return SuiteResult(
        suite=suite.label,
        rows=rows,
        asked=len(suite.checks),
        results=results,
        seconds=round(time.monotonic() - started, 3),
    )


def _by_rule(check: Check) -> CheckResult:
    return _result(check, "met", "no rows: passes by rule")


def _result(check: Check, outcome: str, observed: str | None) -> CheckResult:
    return CheckResult(
        name=check.name,
        column=check.kwargs.get("column"),
        severity=check.severity,
        outcome=outcome,
        observed=observed,
        why=f"{check.why} Look at {check.opens}.",
    )


def _ask(spark: SparkSession, suite: Suite, key: str, frame: DataFrame) -> list[CheckResult]:
    # Read at import: without it every start sends a report to the makers' server.
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    import great_expectations as gx
    from great_expectations.data_context.types.base import ProgressBarsConfig
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False, metric_calculations=False)
    asset = context.data_sources.add_spark("spark").add_dataframe_asset("table")
    # Every metric is a job of its own over these columns: they are computed once.
    frame = frame.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        batch = asset.add_batch_definition_whole_dataframe("all").get_batch(batch_parameters={"dataframe": frame})
        asked = gx.ExpectationSuite(name=suite.label)
        for check in suite.checks:
            try:
                asked.add_expectation_configuration(
                    ExpectationConfiguration(type=check.type, kwargs=check.kwargs, meta={"check": check.name})
                )
            except Exception as error:
                # GX raises several unrelated classes for a type or an argument that it does not know.
                raise ConfigError(
                    f"{suite.label}: check '{check.name}': {check.type} was refused: {type(error).__name__}: {error}"
                ) from error
        form = {"result_format": "SUMMARY", "partial_unexpected_count": SAMPLE_KEYS}
        given = batch.validate(asked, result_format=form).results
        answers = {a.expectation_config.meta["check"]: a for a in given if a.expectation_config is not None}
    finally:
        frame.unpersist()
    return [_judge(check, answers[check.name], key) for check in suite.checks if check.name in answers]


def _judge(check: Check, answer: Any, key: str) -> CheckResult:
    if error := _error(answer.exception_info):
        return _result(check, "errored", error)
    return _result(check, "met" if answer.success else "unmet", _observed(check, answer.result, key))


def _error(info: dict[str, Any] | None) -> str | None:
    """The class of the exception that kept a check from being answered; its message may quote a row."""
    details = [info, *info.values()] if info else []
    for detail in details:
        if isinstance(detail, dict) and detail.get("raised_exception"):
            lines = [line for line in str(detail.get("exception_traceback") or "").splitlines() if line.strip()]
            last = lines[-1].split(":", 1)[0].strip() if lines else "an exception"
            return f"could not be answered: {last.rsplit('.', 1)[-1]}"
    return None


def _observed(check: Check, result: dict[str, Any], key: str) -> str | None:
    if "unexpected_count" in result:
        text = f"{result['unexpected_count']:,} of {result['element_count']:,} rows"
        if check.kwargs.get("column") == key:
            keys = sorted({str(value) for value in result.get("partial_unexpected_list", []) if value is not None})
            text += f", e.g. {', '.join(keys[:SAMPLE_KEYS])}" if keys else ""
        return text
    value = result.get("observed_value")
    if isinstance(value, dict) and "quantiles" in value:
        return ", ".join(f"{q:.0%}: {_number(v)}" for q, v in zip(value["quantiles"], value["values"], strict=True))
    # Anything that is no number could be a row's value.
    return _number(value) if isinstance(value, int | float) else None


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
