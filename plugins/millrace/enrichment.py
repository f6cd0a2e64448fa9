"""An enrichment: the one YAML file a team writes, as a frozen value that is checked when it is made.

    enrichment = load_enrichment(path)                    # ConfigError names file, key, what is wrong and the fix
    enrichments, errors = load_enrichments(folder)        # a broken file never takes the others down

Importing this module reads nothing and needs neither network nor database: the DAG processor calls it for every parse.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from millrace.answers import AnswerSchema
from millrace.errors import ConfigError

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
Column = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^`\x00-\x1f]+$")]
Share = Annotated[float, Field(ge=0, le=1)]


def _inside(path: str) -> str:
    if ".." in path.split("/"):
        raise ValueError("must not lead out of the lake: leave out '..'")
    return path


LakePath = Annotated[str, Field(min_length=1, pattern=r"^(s3://)?[^\s/.][^\s]*$"), AfterValidator(_inside)]

RESERVED_COLUMNS = frozenset({"answer_status", "answer_reason", "answer_meta", "dt", "request_id", "skip_reason"})


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(Frozen):
    """The table to enrich: Parquet folders `<partition_column>=<value>/` or a Delta table, below the lake or at a URL."""

    path: LakePath
    partition_column: Column = "dt"
    key: Column
    text: Column
    keep: tuple[Column, ...] = ()
    on_missing: Literal["fail", "empty"] = "fail"
    unwrap_json: str | None = Field(
        default=None,
        description="texts that are JSON-escaped objects are replaced by this field of theirs, e.g. `text`",
    )
    exclude: str | None = Field(
        default=None, description="Spark SQL condition over the source's columns; rows where it is true are never asked"
    )


class Limits(Frozen):
    """Bounds of a run. A run that breaks one publishes nothing."""

    unknown_rate: Share = 0.01
    not_applicable_rate: Share = 0.20
    max_text_chars: int = Field(default=4000, ge=1, le=1_000_000)
    too_long: Literal["cut", "skip"] = Field(
        default="cut", description="a text over max_text_chars is cut at a word boundary, or skipped as too_long"
    )
    requests_per_shard: int = Field(default=20_000, ge=1)
    max_shards: int = Field(default=1000, ge=1, le=1000, description="Airflow maps at most 1024 tasks by default")
    budget_tokens: int | None = Field(
        default=None, ge=0, description="prompt and answer tokens a run may spend unasked"
    )
    shard_tokens: int | None = Field(
        default=None, ge=1, description="a runner that has spent this many tokens stops resumably"
    )
    shard_seconds: int | None = Field(default=None, ge=1, description="a runner that has run this long stops resumably")
    confidence_floor: Share | None = Field(
        default=None, description="a label less probable than this, or of unknown probability, is unknown"
    )
    early_stop_requests: int = Field(
        default=200, ge=20, description="window of answers over which early_stop_unknown_rate is judged"
    )
    early_stop_unknown_rate: Share = Field(
        default=0.5, description="unusable share of a window that ends a shard (exit 4)"
    )


class Sampling(Frozen):
    """How the engine picks tokens. `max_tokens` follows from the answer schema unless it is given."""

    temperature: float = Field(default=0.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = 0
    max_tokens: int | None = Field(default=None, ge=1, le=8192)


class Preflight(Frozen):
    """What the engine must show on the golden prompts before a run spends anything."""

    golden_rows: int = Field(default=50, ge=1, le=1000)
    usable_rate: Share = 0.9
    min_accuracy: Share | None = Field(
        default=None, description="share of golden labels that must be right; not set: reported only"
    )


class Target(Frozen):
    """The Delta table that analysts read, below the lake."""

    path: LakePath
    rollback_days: int = Field(default=14, ge=1)


class Enrichment(Frozen):
    """A named task over one table (see docs/architecture.md, "An enrichment file")."""

    name: Name
    description: str = ""
    owner: str = "data"
    schedule: str | None = Field(
        default=None, description="cron expression; the run covers the interval that has just ended"
    )
    timezone: str = "UTC"
    source: Source
    prompt: Name
    model: str | None = Field(default=None, description="name in the model store; not set: the route table decides")
    answer: dict[str, Any]
    form: Literal["json", "compact"] = "json"
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    preflight: Preflight = Preflight()
    reuse_days: int = Field(default=90, ge=0)
    over_budget: Literal["fail", "wait"] = "fail"
    publish_within_minutes: int | None = Field(
        default=None, ge=1, description="a run that is not published so long after it was queued is reported as late"
    )
    target: Target

    @field_validator("schedule")
    @classmethod
    def _cron(cls, value: str | None) -> str | None:
        # The shape only: pods read enrichments too and need no cron library. The DAG's timetable checks the rest.
        if value is not None and not re.fullmatch(r"[\dA-Za-z*/,\-#?]+( [\dA-Za-z*/,\-#?]+){4}", value):
            raise ValueError(f"'{value}' is not a cron expression; e.g. '0 3 * * *' for every day at 03:00")
        return value

    @field_validator("timezone")
    @classmethod
    def _timezone(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (KeyError, ValueError) as error:
            raise ValueError(f"'{value}' is not a time zone; e.g. 'Europe/Berlin'") from error
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Enrichment:
        schema = self.schema
        columns = [self.source.key, *self.source.keep, *schema.names]
        # Spark's readers take Price for price, so a table with both could be read by nobody.
        folded = [c.casefold() for c in columns]
        doubled = sorted({c for c in columns if folded.count(c.casefold()) > 1})
        if doubled:
            raise ValueError(
                f"source.keep/answer: column {doubled} would appear twice in the enriched table; rename or drop one"
            )
        reserved = sorted(c for c in set(columns) if c.casefold() in RESERVED_COLUMNS)
        if reserved:
            raise ValueError(f"source.keep/answer: {reserved} are names of Millrace's own columns; rename them")
        if "key" in self.source.keep:
            raise ValueError("source.keep: extract's rows call the key 'key'; rename the kept column of that name")
        if self.form == "compact":
            schema.compact_choices()
        return self

    @cached_property
    def schema(self) -> AnswerSchema:  # type: ignore[override]  # pydantic has a deprecated method of this name
        return AnswerSchema.from_dict(self.answer)

    def spec(self) -> dict[str, Any]:
        """The file's content as plain JSON values with defaults filled in, as `plan.json` carries it."""
        return self.model_dump(mode="json")


def _explain(error: ValidationError, file: str) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(file)"
        match item["type"]:
            case "extra_forbidden":
                text = "is not a known key; check the spelling against docs/enrichments.md or remove it"
            case "missing":
                text = "is missing; add it"
            case _:
                text = re.sub(r"^Value error, ", "", item["msg"])
                if not isinstance(item["input"], dict | list):
                    text += f" (got {item['input']!r})"
        lines.append(f"{file}: {key}: {text}")
    return "\n".join(lines)


def parse_enrichment(data: Any, file: str = "enrichment") -> Enrichment:
    """An enrichment from parsed YAML. Raises ConfigError naming `file`, key, what is wrong and the fix."""
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected a mapping of keys such as `name:` and `source:`; see docs/enrichments.md")
    try:
        return Enrichment.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, file)) from error


def load_enrichment(path: Path) -> Enrichment:
    """Read and check one enrichment file; its `name` must be the file's stem."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        there = ", ".join(sorted(other.stem for other in path.parent.glob("*.yaml"))) or "none"
        raise ConfigError(
            f"{path.name}: there is no such enrichment file in {path.parent.name}/; the enrichments are: {there}"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        raise ConfigError(f"{path.name}:{line} is not valid YAML: {getattr(error, 'problem', error)}") from error
    enrichment = parse_enrichment(data, path.name)
    if enrichment.name != path.stem:
        raise ConfigError(f"{path.name}: name: is '{enrichment.name}'; it must be the file's name, '{path.stem}'")
    return enrichment


def load_enrichments(folder: Path) -> tuple[dict[str, Enrichment], dict[str, ConfigError]]:
    """Every enrichment of a folder, and for each broken file its error. Two enrichments with one target are both errors."""
    found: dict[str, Enrichment] = {}
    errors: dict[str, ConfigError] = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            found[path.stem] = load_enrichment(path)
        except ConfigError as error:
            errors[path.stem] = error
    by_target: dict[str, list[str]] = {}
    for name, enrichment in found.items():
        by_target.setdefault(enrichment.target.path.rstrip("/"), []).append(name)
    for target, names in by_target.items():
        if len(names) > 1:
            for name in names:
                del found[name]
                errors[name] = ConfigError(
                    f"{name}.yaml: target.path: '{target}' is the target of {' and '.join(names)}; give each its own table"
                )
    return found, errors
