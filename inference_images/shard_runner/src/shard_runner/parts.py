"""Durable answers: part files of one attempt, resuming from those of earlier attempts, and the merge at the end.

What is in a part is never asked again. What is not yet in one is lost when the process is killed: never more than one
part's worth of answers, besides those still inside the engine.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from millrace.answers import Reason, Status
from millrace.errors import UnavailableError
from millrace.lake import Lake
from millrace.layout import RunPaths, answers_file
from millrace.plan import Plan
from millrace.records import FileRef, ShardEntry, Tokens
from millrace.schemas import ANSWER, schema_differences

log = logging.getLogger("shard_runner")

# Answers that may be unsaved at once. Writing starts at half of it and goes on beside the engine.
PART_ROWS = 512

# No answer for now, through no fault of the request: asked again by the next attempt, unlike one that was set aside.
PASSING = frozenset({Reason.timeout, Reason.rate_limited, Reason.server_error, Reason.no_answer})


class Answer(NamedTuple):
    """One request's outcome, in the order of the columns of schemas.ANSWER that differ from row to row."""

    request_id: str
    status: str
    reason: str | None
    values: str | None
    raw_text: str | None
    repaired: bool
    finish_reason: str | None
    confidence: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    asked: int
    latency_ms: int | None
    answered_at: datetime


@dataclass
class Tally:
    """Counts over answers, kept by whoever adds them."""

    statuses: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def add(
        self, status: str, reason: str | None, prompt: int | None, cached: int | None, completion: int | None
    ) -> None:
        self.statuses[status] += 1
        if reason is not None:
            self.reasons[reason] += 1
        self.prompt += prompt or 0
        self.cached += cached or 0
        self.completion += completion or 0

    @property
    def rows(self) -> int:
        return self.statuses.total()

    @property
    def tokens(self) -> Tokens:
        return Tokens(prompt=self.prompt, cached=self.cached, completion=self.completion)


@dataclass(frozen=True)
class SavedPart:
    """A readable part of an earlier attempt. `keep` marks the rows that count; None: all."""

    path: str
    rows: int
    keep: np.ndarray | None = None


def answers_table(answers: list[Answer], plan: Plan, shard: ShardEntry) -> pa.Table:
    """Answers as a table of schemas.ANSWER, with what all rows of a shard share filled in."""
    columns: dict[str, Any] = dict(zip(Answer._fields, zip(*answers, strict=True), strict=True))
    decision, model = plan.decision, plan.decision.models[shard.model]
    shared = {
        "fingerprint": shard.fingerprint,
        "reading": plan.reading,
        "model": model.name,
        "revision": model.digest,
        "prompt_version": decision.prompt.version,
        "plan_id": plan.plan_id,
    }
    arrays = [
        pa.repeat(pa.scalar(shared[f.name], f.type), len(answers))
        if f.name in shared
        else pa.array(columns[f.name], f.type)
        for f in ANSWER
    ]
    return pa.Table.from_arrays(arrays, schema=ANSWER)


def resume(lake: Lake, paths: RunPaths, shard: ShardEntry, remaining: set[str]) -> tuple[list[SavedPart], Tally]:
    """Readable parts of all earlier attempts; what they answer is taken out of `remaining`.

    A part that is torn, has another schema or another fingerprint is ignored with a warning, never trusted in part.
    """
    found: list[SavedPart] = []
    tally = Tally()
    columns = ["request_id", "fingerprint", "status", "reason", "prompt_tokens", "cached_tokens", "completion_tokens"]
    for info in lake.list(paths.shard(shard.shard_id)):
        if not info.path.rsplit("/", 1)[-1].startswith("part-"):
            continue
        try:
            with lake.parquet(info.path) as file:
                differences = schema_differences(ANSWER, file.schema_arrow)
                table = None if differences else file.read(columns=columns)
        except (pa.ArrowException, OSError) as error:
            log.warning("ignored %s: not a readable Parquet file (%s)", info.path, type(error).__name__)
            continue
        if table is None:
            log.warning("ignored %s: %s", info.path, "; ".join(differences))
            continue
        if set(table["fingerprint"].unique().to_pylist()) - {shard.fingerprint}:
            log.warning("ignored %s: its answers belong to another fingerprint", info.path)
            continue
        keep = np.zeros(table.num_rows, dtype=bool)
        for row, (request_id, _, status, reason, *tokens) in enumerate(
            zip(*(column.to_pylist() for column in table.columns), strict=True)
        ):
            if request_id in remaining and not (status == Status.failed and reason in PASSING):
                remaining.discard(request_id)
                keep[row] = True
                tally.add(status, reason, *tokens)
        if keep.any():
            found.append(SavedPart(info.path, int(keep.sum()), None if keep.all() else keep))
    return found, tally


class PartWriter:
    """Writes parts beside the engine. `add` returns at once unless a whole part is unsaved; errors appear in the caller."""

    def __init__(self, lake: Lake, plan: Plan, shard: ShardEntry, attempt: str) -> None:
        self.parts: list[SavedPart] = []
        self._lake, self._plan, self._shard = lake, plan, shard
        self._prefix = plan.paths.shard_attempt(shard.shard_id, attempt)
        self._buffer: list[Answer] = []
        self._queue: Queue[list[Answer] | None] = Queue()
        self._saved = threading.Condition()
        self._unsaved = 0  # handed to the thread and not yet on disk
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="parts", daemon=True)
        self._thread.start()

    @property
    def saved(self) -> int:
        return sum(part.rows for part in self.parts)

    def add(self, answer: Answer) -> bool:
        """Take one answer. True when it completed a part, which is then on its way to disk."""
        self._buffer.append(answer)
        if len(self._buffer) * 2 < PART_ROWS:
            return False
        self._hand_over(limit=PART_ROWS // 2)
        return True

    def flush(self) -> None:
        """Return when every answer is on disk. UnavailableError when the lake does not take them."""
        self._hand_over(limit=0)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=30)

    def _hand_over(self, limit: int) -> None:
        if self._buffer:
            with self._saved:
                self._unsaved += len(self._buffer)
            self._queue.put(self._buffer)
            self._buffer = []
        with self._saved:
            self._saved.wait_for(lambda: self._unsaved <= limit or self._error is not None)
        if self._error is not None:
            raise UnavailableError(
                f"the lake did not take a part of shard {self._shard.shard_id} ({type(self._error).__name__}: "
                f"{str(self._error)[:200]}). What was saved before stands; free some space or repair the store, then clear the task."
            ) from self._error

    def _run(self) -> None:
        while (answers := self._queue.get()) is not None:
            path = f"{self._prefix}/part-{len(self.parts):05d}.parquet"
            try:
                self._lake.write_parquet(path, answers_table(answers, self._plan, self._shard))
            except BaseException as error:
                with self._saved:
                    self._error = error
                    self._saved.notify_all()
                return
            with self._saved:
                self.parts.append(SavedPart(path, len(answers)))
                self._unsaved -= len(answers)
                self._saved.notify_all()


def merge(lake: Lake, shard: ShardEntry, attempt: str, parts: list[SavedPart]) -> FileRef:
    """All parts as one answer file, streamed. Raises RuntimeError unless it holds each request of the shard once."""
    path = answers_file(shard.fingerprint, shard.shard_id, attempt)
    rows = 0
    ids: set[str] = set()
    with lake.parquet_writer(path, ANSWER) as writer:
        for tables in _groups(lake, parts):
            table = pa.concat_tables(tables)
            ids.update(table["request_id"].to_pylist())
            rows += table.num_rows
            writer.write_table(table)
    if not rows == len(ids) == shard.requests:
        raise RuntimeError(f"shard {shard.shard_id}: {rows} answers with {len(ids)} ids for {shard.requests} requests")
    size = lake.size(path)
    if size is None:
        raise UnavailableError(
            f"'{path}' was written and is not there. Is the lake's disk full? Clear the task to repeat."
        )
    return FileRef(path=path, size=size, rows=rows)


def _groups(lake: Lake, parts: list[SavedPart], rows: int = 16_384) -> Iterator[list[pa.Table]]:
    """The parts' rows in groups that are worth a row group of their own."""
    group: list[pa.Table] = []
    for part in parts:
        with lake.parquet(part.path) as file:
            table = file.read(columns=ANSWER.names).cast(ANSWER)
        group.append(table if part.keep is None else table.filter(pa.array(part.keep)))
        if sum(table.num_rows for table in group) >= rows:
            yield group
            group = []
    if group:
        yield group
