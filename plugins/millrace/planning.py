"""The `plan` step: decide everything about a run once, from the enrichment file, the config table and the source's files."""

from __future__ import annotations

import math
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from millrace import model_store, prompts, publishing
from millrace.canonical import sha256_hex
from millrace.config_db import ConfigDb, Model
from millrace.enrichment import Enrichment, load_enrichment
from millrace.errors import ConfigError, IncompleteError, NotFoundError
from millrace.lake import Lake
from millrace.layout import RunPaths, golden_file
from millrace.partition import parse_partition
from millrace.plan import Decision, PinnedModel, PinnedPrompt, Plan, PlanRecord, fingerprint
from millrace.prompts import PromptText
from millrace.proof import answer_files
from millrace.settings import Settings
from millrace.source_snapshot import snapshot

# What a chat template and the values of kept columns may add to a prompt.
_TEMPLATE_TOKENS = 128
# Columns of a model's row that a plan takes as they are.
_PINNED = (
    "name",
    "digest",
    "engine",
    "location",
    "endpoint",
    "served_name",
    "settings",
    "resources",
    "dtype",
    "quantization",
    "price_per_million_tokens",
)


class PlanParams(BaseModel):
    """What a person may choose for one run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    row_sample: int | None = Field(
        default=None, ge=1, description="only this many rows: those with the lowest hash of the key"
    )
    prompt_version: int | None = Field(default=None, ge=1, description="instead of the active version")
    reuse_answers: bool = Field(default=True, description="false: ask everything afresh")
    ask_unknowns_again: bool = Field(
        default=False, description="keep the base plan's usable answers, ask the rest again"
    )
    base_plan: str | None = Field(default=None, description="run to keep answers of; not set: the one that is live")


def make_plan(
    *,
    lake: Lake,
    db: ConfigDb,
    settings: Settings,
    enrichment_name: str,
    partition: str,
    dag_run_id: str,
    user: str,
    params: PlanParams,
) -> Plan:
    """Decide, check and save a plan; the same decision again is the same plan, whoever makes it.

    Raises ConfigError or NotFoundError, before any Spark or model work, for everything that is wrong or missing: the enrichment
    file, the prompt and its placeholders, the model's row and folder, the source's table, partition and columns, the target's schema.
    """
    parse_partition(partition, "The partition")
    enrichment = load_enrichment(settings.enrichments / f"{enrichment_name}.yaml")
    row = db.prompt(enrichment.prompt, params.prompt_version)
    prompt = PromptText(row.system, row.body)
    if problems := prompts.lint(prompt, enrichment.source.keep, f"prompt {row.name} version {row.version}"):
        raise ConfigError("\n".join(problems))
    golden = _golden_rows(settings, enrichment, prompt)
    golden_sha = sha256_hex(golden)

    max_tokens = enrichment.sampling.max_tokens or enrichment.schema.max_answer_tokens(enrichment.form)
    model = _pin_model(db, settings, enrichment, prompt, golden, max_tokens)
    now = fingerprint(enrichment, prompt, model, max_tokens)
    base = _base_plan(lake, enrichment, partition, params)
    if base:
        _check_base(lake, base, enrichment)

    decision = Decision(
        enrichment=enrichment.name,
        partition=partition,
        spec=enrichment.spec(),
        prompt=PinnedPrompt(name=row.name, version=row.version, system=prompt.system, body=prompt.body),
        golden=golden_sha,
        models={model.name: model},
        default_model=model.name,
        max_tokens=max_tokens,
        fingerprints={model.name: now},
        accepted_fingerprints=sorted({now, *(base.decision.accepted_fingerprints if base else ())}),
        source=snapshot(lake, enrichment, partition),
        row_sample=params.row_sample,
        ask_mode="unknowns" if base else "reuse" if params.reuse_answers else "fresh",
        fresh_for=None if params.reuse_answers else dag_run_id,
        base_plan=base.paths.root if base else None,
    )
    record = PlanRecord(dag_run_id=dag_run_id, user=user, params=params.model_dump(mode="json"))
    plan = Plan.make(decision, record)
    publishing.check_target(lake, plan)
    lake.create(golden_file(golden_sha), golden)
    plan.save(lake)
    return plan


def _golden_rows(settings: Settings, enrichment: Enrichment, prompt: PromptText) -> bytes:
    """The first `preflight.golden_rows` lines of the prompt's golden.jsonl, checked.

    Each line is `{"text": ..., <placeholder>: ..., "expected": {<field>: <value>}}`; `expected` may be left out.
    """
    path = settings.prompts / enrichment.prompt / "golden.jsonl"
    where = f"dags/prompts/{enrichment.prompt}/golden.jsonl"
    if not path.is_file():
        raise NotFoundError(f"{where} does not exist. Write labelled rows there: preflight asks the model about them.")
    lines = [line for line in path.read_bytes().splitlines() if line.strip()][: enrichment.preflight.golden_rows]
    if not lines:
        raise ConfigError(f"{where} is empty. Write at least one labelled row: preflight asks the model about them.")
    needed, fields = set(prompts.row_placeholders(prompt)), set(enrichment.schema.names)
    for number, line in enumerate(lines, start=1):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{where}, line {number}: is not JSON: {error}.") from error
        expected = row.get("expected", {}) if isinstance(row, dict) else None
        if not isinstance(expected, dict) or not all(isinstance(row.get(name, ""), str | None) for name in needed):
            raise ConfigError(f'{where}, line {number}: expected {{"text": "...", "expected": {{...}}}}.')
        if missing := sorted(needed - set(row)):
            raise ConfigError(f"{where}, line {number}: lacks {missing}, which the prompt uses; add a value.")
        if unknown := sorted(set(expected) - fields):
            raise ConfigError(f"{where}, line {number}: `expected` names {unknown}; the answer has {sorted(fields)}.")
    return b"\n".join(lines) + b"\n"


def _pin_model(
    db: ConfigDb, settings: Settings, enrichment: Enrichment, prompt: PromptText, golden: bytes, max_tokens: int
) -> PinnedModel:
    row = db.model(enrichment.model or _routed_model(db, enrichment))
    if row.engine == "vllm":
        model_store.find(settings.models, row.location)
    return PinnedModel.model_validate(
        {column: getattr(row, column) for column in _PINNED}
        | {
            "context_tokens": _context_tokens(row, enrichment, prompt, max_tokens),
            "chars_per_token": _chars_per_token(row, golden),
        }
    )


def _routed_model(db: ConfigDb, enrichment: Enrichment) -> str:
    for route in db.routes(enrichment.name):
        if route.condition is None:
            return route.model
    raise ConfigError(
        f"No model answers {enrichment.name}: its file names none and the config table has no route for it. "
        f"Set `model:` in {enrichment.name}.yaml, or run `millrace routes set {enrichment.name} MODEL`."
    )


def _context_tokens(row: Model, enrichment: Enrichment, prompt: PromptText, max_tokens: int) -> int:
    """Room for the longest prompt and an answer that is asked again with double the tokens, up to what the model can take.

    A character counts one token: SmolLM2's tokenizer makes 0.24 tokens of a character of the English reviews, at most 0.45; a
    model that knows Chinese makes less than one of a Chinese character. The runner cuts what is longer all the same. The
    engine must be able to hold this length in its cache, so the model's own maximum would ask for memory in vain.
    """
    chars = (
        len(prompt.system) + len(prompt.body) + 2 * len(enrichment.schema.describe()) + enrichment.limits.max_text_chars
    )
    return min(row.context_tokens, 256 * math.ceil((chars + _TEMPLATE_TOKENS + 2 * max_tokens) / 256))


def _chars_per_token(row: Model, golden: bytes) -> float:
    """The model's ratio for this enrichment's language, for estimates.

    The model's row counts UTF-8 bytes, and the golden rows say how many of them make a character.
    """
    texts: list[str] = [orjson.loads(line)["text"] or "" for line in golden.splitlines()]
    chars, size = sum(map(len, texts)), sum(len(text.encode()) for text in texts)
    return round(row.chars_per_token * chars / size, 2) if size else row.chars_per_token


def _base_plan(lake: Lake, enrichment: Enrichment, partition: str, params: PlanParams) -> Plan | None:
    if not params.ask_unknowns_again:
        if params.base_plan:
            raise ConfigError("`base_plan` only has a meaning together with `ask_unknowns_again`; set both or neither.")
        return None
    if not params.reuse_answers:
        raise ConfigError("`ask_unknowns_again` keeps answers and `reuse_answers: false` keeps none; choose one.")
    if params.base_plan:
        paths = RunPaths.parse(params.base_plan)[1]
        if (paths.enrichment, paths.partition) != (enrichment.name, partition):
            raise ConfigError(f"The base plan '{params.base_plan}' is not one of {enrichment.name} {partition}.")
        return Plan.read(lake, paths)
    live: dict[str, Any] | None = publishing.live_plan(lake, enrichment.target.path, partition)
    if live is None:
        raise NotFoundError(
            f"{enrichment.name} has nothing published for {partition}, so there are no unknowns to ask again. "
            "Run the date without `ask_unknowns_again`."
        )
    return Plan.read(lake, RunPaths(enrichment.name, partition, live["plan_id"]))


def _check_base(lake: Lake, base: Plan, enrichment: Enrichment) -> None:
    """Refuse a base plan that was never finished, whose answers cannot stand beside this plan's, or whose requests cannot be made
    from today's columns."""
    before, problems = base.enrichment, []
    if (before.schema.engine_dict(), before.form) != (enrichment.schema.engine_dict(), enrichment.form):
        problems.append("its answers have other fields, labels or another form")
    if gone := sorted(
        set(prompts.row_placeholders(base.decision.prompt.text)) - {prompts.TEXT, *enrichment.source.keep}
    ):
        problems.append(f"its prompt uses {gone}, which source.keep no longer names")
    if problems:
        raise ConfigError(
            f"The answers of '{base.paths.root}' cannot be kept by `ask_unknowns_again`: {'; '.join(problems)}. "
            f"Run {enrichment.name} {base.decision.partition} without it."
        )
    try:
        answer_files(lake, base.paths)
    except (IncompleteError, NotFoundError) as error:
        raise ConfigError(
            f"'{base.paths.root}' was never finished, or its files are gone, so `ask_unknowns_again` has no answers to keep: "
            f"{str(error).splitlines()[0]} Finish that run first, or run {enrichment.name} {base.decision.partition} without it."
        ) from error
