"""The plan: everything a run has decided, written once as `plan.json`, never edited.

`decision` alone determines the plan's id. Caches, clocks and measured speeds never enter it, so clearing a step repeats it under the same
plan, and clearing `plan` where nothing changed gives the same plan again. `record` says who made it and when.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from millrace.canonical import canonical_json, content_hash, sha256_hex
from millrace.enrichment import Enrichment
from millrace.errors import ConfigError
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.prompts import PromptText
from millrace.records import Record, utc_now

# Bump when the cleaning verbs of `millrace.spark.cleaning` change what the engine is shown: it is part of the fingerprint.
CLEANING_VERSION = 1
# Bump when the runner changes how it lays out, cuts or re-asks a prompt.
ASKING_VERSION = 1
# Settings of an endpoint that change what its model is asked, with their defaults: docs/endpoints.md says what each does.
ENDPOINT_ASKS: dict[str, Any] = {"server": "openai", "structured": True, "system_role": True, "extra_body": {}}


class SourceFile(Record):
    path: str  # absolute path or URL
    size: int
    version: str  # etag, or modification time in ns: a rewritten file of the same size is another file


class SourceSnapshot(Record):
    """Exactly the files a run reads. Late or rewritten files make another snapshot, hence another plan."""

    format: Literal["parquet", "delta"]
    path: str
    partition_column: str
    delta_version: int | None
    files: list[SourceFile]
    columns: dict[
        str, str
    ]  # column -> Arrow type, for the key, the text, the kept columns and those that `exclude` may use


class PinnedPrompt(Record):
    name: str
    version: int
    system: str
    body: str

    @property
    def text(self) -> PromptText:
        return PromptText(self.system, self.body)


class PinnedModel(Record):
    """A model as the config table had it when the plan was made."""

    name: str
    digest: str  # sha256 over the model folder's files; for endpoints the hash of (endpoint, served name, declared revision)
    engine: Literal["vllm", "openai"]
    location: str  # folder below the model store: <name>/<digest>
    endpoint: str | None = None  # base URL, for engine openai; its key comes from the environment
    served_name: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)  # engine settings; block size, concurrency and the like
    resources: dict[str, Any] = Field(default_factory=dict)  # of its pod: gpu, cpu, memory, template
    dtype: str = "auto"
    quantization: str | None = None
    context_tokens: int = 2048  # the engine's context length for this run; prompts are cut or skipped to fit
    chars_per_token: float = 3.0  # estimate only: exact counting happens in the runner
    price_per_million_tokens: float | None = None


class Decision(Record):
    """What determines a run. Its canonical JSON is hashed into the plan id."""

    enrichment: str
    partition: str
    spec: dict[str, Any]
    prompt: PinnedPrompt
    golden: str  # sha256 of the golden rows
    models: dict[str, PinnedModel]
    default_model: str
    max_tokens: int  # of an answer
    fingerprints: dict[str, str]  # model -> fingerprint under which it is asked now
    accepted_fingerprints: list[str]  # all that join_back accepts: the current ones, and a base plan's
    source: SourceSnapshot
    row_sample: int | None
    ask_mode: Literal["reuse", "fresh", "unknowns"]
    fresh_for: str | None = None  # the DAG run id, for ask mode `fresh`: no other run shares its answers' plan
    base_plan: str | None = None  # run path, for ask mode `unknowns`


class PlanRecord(Record):
    dag_run_id: str
    user: str
    params: dict[str, Any]
    created_at: datetime = Field(default_factory=utc_now)


class Plan(Record):
    plan_id: str
    decision: Decision
    record: PlanRecord

    @classmethod
    def make(cls, decision: Decision, record: PlanRecord) -> Plan:
        return cls(plan_id=content_hash(decision.model_dump(mode="json")), decision=decision, record=record)

    @cached_property
    def enrichment(self) -> Enrichment:
        return Enrichment.model_validate(self.decision.spec)

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.decision.enrichment, self.decision.partition, self.plan_id)

    @property
    def reading(self) -> str:
        return reading_hash(self.enrichment)

    def save(self, lake: Lake) -> bool:
        """Create plan.json; False when the same plan exists already (its first record stays)."""
        return lake.create(self.paths.plan, self.dump())

    @classmethod
    def read(cls, lake: Lake, run: str | RunPaths) -> Plan:
        """Read a run's plan and prove that nobody edited it. Raises NotFoundError, ConfigError."""
        paths = run if isinstance(run, RunPaths) else RunPaths.parse(run)[1]
        data = lake.read(paths.plan)
        plan = cls.parse_bytes(paths.plan, data)
        # The stored text is hashed, not the model made from it: a plan from before a setting existed stays what it was.
        actual = content_hash(json.loads(data)["decision"])
        if not actual == plan.plan_id == paths.plan_id:
            raise ConfigError(
                f"'{paths.plan}' was edited: its content hashes to {actual[:12]}…. Clear `plan` to decide afresh."
            )
        return plan


def reading_hash(enrichment: Enrichment) -> str:
    """Hash of how raw text becomes values: aliases, confidence floor, parser version. A changed reading re-reads, never re-asks."""
    return content_hash([enrichment.schema.reading_dict(), enrichment.limits.confidence_floor])[:16]


def fingerprint(enrichment: Enrichment, prompt: PromptText, model: PinnedModel, max_tokens: int) -> str:
    """Hash of all that determines what the engine says (docs/architecture.md, "What determines an answer").

    The chat template is in the model's folder and so in its digest. Block size, concurrency, aliases, floors and the parser's
    version are left out: they change speed or reading, not what is asked. A setting of an endpoint that does change what is
    asked (`ENDPOINT_ASKS`) counts where it differs from its default.
    """
    asked = {
        name: model.settings[name]
        for name, default in ENDPOINT_ASKS.items()
        if model.engine == "openai" and model.settings.get(name, default) != default
    }
    return content_hash(
        {
            "system": prompt.system,
            "body": prompt.body,
            "schema": enrichment.schema.engine_dict(),
            "json_schema": enrichment.schema.json_schema(),
            "form": enrichment.form,
            "model": model.digest,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "context_tokens": model.context_tokens,
            "sampling": enrichment.sampling.model_dump(mode="json") | {"max_tokens": max_tokens},
            "cleaning": [
                CLEANING_VERSION,
                enrichment.source.unwrap_json,
                enrichment.limits.max_text_chars,
                enrichment.limits.too_long,
            ],
            "asking": ASKING_VERSION,
            # Only where there is one: what was answered before these settings counted stays reusable.
            **({"endpoint": asked} if asked else {}),
        }
    )


def request_id(fingerprint: str, values: dict[str, str | None]) -> str:
    """Id of a request: SHA-256 of the fingerprint, a newline and the canonical JSON of its placeholder values.

    `millrace.spark.requests` computes the same as a Spark SQL expression.
    """
    return sha256_hex(f"{fingerprint}\n{canonical_json(values)}")


def shard_count(requests: int, requests_per_shard: int, max_shards: int) -> int:
    """How many shards answer a number of requests: shards grow beyond `requests_per_shard` rather than exceed `max_shards`.

    >>> shard_count(3697, 1250, 1000), shard_count(0, 1250, 1000), shard_count(100_000_000, 20_000, 1000)
    (3, 0, 1000)
    """
    return min(max_shards, -(-requests // requests_per_shard))
