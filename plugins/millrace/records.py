"""The small JSON records that steps leave behind and trust: manifest, completion, outcome, joined counts, approvals.

Each is frozen, refuses unknown keys, and is written last by the step that makes it: a step's output counts because a record names its
files with their sizes, never because a task was green.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from millrace.errors import ConfigError, IncompleteError
from millrace.lake import Lake


def utc_now() -> datetime:
    return datetime.now(UTC)


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def dump(self) -> bytes:
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def load(cls, lake: Lake, path: str) -> Self:
        """Read a record. Raises NotFoundError when it does not exist, ConfigError when it is not one."""
        return cls.parse_bytes(path, lake.read(path))

    @classmethod
    def load_or_none(cls, lake: Lake, path: str) -> Self | None:
        data = lake.read_or_none(path)
        return None if data is None else cls.parse_bytes(path, data)

    @classmethod
    def parse_bytes(cls, path: str, data: bytes) -> Self:
        """The record that a file holds. Raises ConfigError, which quotes nothing of it: a plan holds a prompt."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ConfigError(
                f"'{path}' is not a record of this Millrace: {where}: {first['type']}. It is damaged, or another version wrote it: "
                "restore it, or start a new run of the date."
            ) from None


class FileRef(Record):
    """A file that a record vouches for. `path` is relative to the lake."""

    path: str
    size: int  # bytes
    rows: int

    def check(self, lake: Lake) -> None:
        """Raise IncompleteError unless the file exists with its size."""
        found = lake.size(self.path)
        if found != self.size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise IncompleteError(
                f"'{self.path}' {state}, its record says {self.size} bytes. Clear the step that wrote it."
            )


class ShardEntry(Record):
    """One shard of a manifest: the requests one pod answers, all for one model."""

    shard_id: str
    model: str
    fingerprint: str
    requests: int
    est_tokens: int
    bytes: int
    files: list[FileRef]


class Manifest(Record):
    """What extract decided: created once per plan, by the winning attempt."""

    plan_id: str
    attempt: str
    rows: int  # source rows of the partition (after sampling)
    requests: int  # distinct requests: reused + to be asked
    reused: int  # distinct requests answered before
    skipped_rows: dict[str, int]  # skip reason -> rows
    reused_rows: int  # rows whose request was answered before
    infer_rows: int  # rows whose request is in a shard
    changed: dict[str, int]  # what cleaning did -> rows: truncated, unwrapped, control_chars, ...
    row_files: list[FileRef]
    reused_files: list[FileRef]
    shards: list[ShardEntry]
    seconds: float


class Tokens(Record):
    prompt: int = 0
    cached: int = 0
    completion: int = 0


class Phases(BaseModel):
    """Where a runner's wall time went, in seconds; `full` is the time the engine had as many requests as it takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")  # no Record, whose method is called `load`

    load: float = 0
    start: float = 0
    full: float = 0
    tail: float = 0
    total: float = 0


class Completion(Record):
    """`complete.json` of a shard: created once, by the attempt that won."""

    plan_id: str
    shard_id: str
    attempt: str
    requests: int
    statuses: dict[str, int]  # status -> requests; sums to `requests`
    reasons: dict[str, int]  # reason -> requests, for those not ok
    answers: FileRef
    resumed: int  # requests whose answers came from an earlier attempt's parts
    tokens: Tokens
    phases: Phases
    engine: dict[str, str]  # engine, version, device, settings worth knowing
    finished_at: datetime = Field(default_factory=utc_now)


class Outcome(Record):
    """`outcome.json` of an attempt: how it ended. An attempt without one was reclaimed."""

    plan_id: str
    shard_id: str
    attempt: str
    exit_code: int
    message: str
    answered: int
    reasons: dict[str, int]
    started_at: datetime
    ended_at: datetime = Field(default_factory=utc_now)


class Verdict(Record):
    """What preflight saw on the golden prompts; stands while fingerprint and key (image or endpoint, golden set, device) do."""

    fingerprint: str
    key: str
    model: str
    passed: bool
    golden_rows: int
    usable_rate: float
    accuracy: float | None  # share of golden labels that were right; None when none is given
    labelled: int
    reasons: dict[str, int]
    latency_ms: dict[str, int]  # p50, p90, p99
    tokens_per_s: float  # prompt and answer tokens
    rows_per_s: float
    engine: dict[str, str]
    at: datetime = Field(default_factory=utc_now)


class Stop(Record):
    """`stop.json`: tells every runner of the run to end resumably."""

    reason: str
    by: str
    at: datetime = Field(default_factory=utc_now)


class Approval(Record):
    """A budget decision stored with the plan."""

    approved: bool
    by: str
    reason: str
    estimate: dict[str, float]
    at: datetime = Field(default_factory=utc_now)


class Override(Record):
    """A person's recorded decision to publish above the unknown-rate limit."""

    by: str
    reason: str
    unknown_rate: float
    at: datetime = Field(default_factory=utc_now)


class CheckResult(Record):
    """One expectation's verdict: counts and the ids of a few keys, never texts."""

    name: str
    column: str | None
    severity: str  # "block" or "warn"
    outcome: str  # "met", "unmet" or "errored"
    observed: str | None
    why: str


class SuiteResult(Record):
    """What a Great Expectations suite said. `passed` only if every check asked was answered and no blocking one failed."""

    suite: str
    rows: int
    asked: int
    results: list[CheckResult]
    seconds: float
    at: datetime = Field(default_factory=utc_now)

    @property
    def blocking(self) -> list[CheckResult]:
        """Blocking checks that were unmet, and any check that errored."""
        return [r for r in self.results if r.outcome == "errored" or (r.outcome == "unmet" and r.severity == "block")]

    @property
    def passed(self) -> bool:
        return self.asked == len(self.results) and not self.blocking


class Joined(Record):
    """`joined.json`: the counts of join_back's output and the files that publish commits."""

    plan_id: str
    attempt: str
    rows: int
    statuses: dict[str, int]  # status -> rows
    reasons: dict[str, int]  # reason -> rows, for those not ok
    by_model: dict[str, dict[str, int]]  # "model@prompt_version" -> status -> rows
    reused: int
    inferred: int
    skipped: int
    labels: dict[str, dict[str, int]]  # label field -> label -> rows
    repaired: int
    files: list[FileRef]
    suite: SuiteResult
    seconds: float
    finished_at: datetime = Field(default_factory=utc_now)


class Gate(Record):
    """One thing validate judged: what it is, what was found, what is allowed."""

    name: str
    passed: bool
    found: str
    limit: str
    detail: str = ""  # where the number comes from, or how a failed gate was overridden


class Audit(Record):
    """`audit.json`: the record of a run. Rows are judged by `gates`; everything else is what a report needs, so that it can be rebuilt.

    For a run that stopped early the same record is collected without being stored: what is not known yet is zero, empty or None.
    """

    plan_id: str
    run: str  # relative path of the run
    enrichment: str
    partition: str
    attempt: str | None  # of the join_back output that was judged; publish commits exactly that one
    passed: bool
    gates: list[Gate]
    override: Override | None

    rows: int
    statuses: dict[str, int]  # status -> rows
    reasons: dict[str, int]  # reason -> rows
    not_applicable: int  # skipped rows that need no answer
    not_askable: int  # skipped rows that count as unknown
    unknown_rate: float
    not_applicable_rate: float
    by_model: dict[str, dict[str, int]]  # "model@prompt_version" -> status -> rows
    reused: int  # rows
    inferred: int  # rows
    skipped: int  # rows
    repaired: int  # rows
    labels: dict[str, dict[str, int]]  # label field -> label -> rows
    changed: dict[str, int]  # what cleaning did -> rows

    requests: int
    requests_reused: int
    requests_answered: int  # by this plan's shards
    requests_resumed: int  # of those, taken over from an earlier attempt's parts
    shards: int
    shards_complete: int
    tokens: Tokens
    phases: Phases  # summed over shards
    cost: float | None  # in the currency of the models' prices; None where a model has none
    engine: dict[str, str]
    seconds: dict[str, float]  # step -> seconds, as the steps' own records say

    source_check: SuiteResult | None
    enriched_check: SuiteResult | None
    versions: dict[str, str]  # prompt, models and their digests, fingerprints, packages
    target: str
    files: list[FileRef]
    at: datetime = Field(default_factory=utc_now)
