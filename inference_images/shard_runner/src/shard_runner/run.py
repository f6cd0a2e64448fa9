"""Answer one shard: resume, ask what is left, save as it comes, prove that it is complete.

shards/<id>/<attempt>/part-*.parquet    what this attempt has answered, saved as it goes
answers/fingerprint=<f>/...             all parts of the shard merged, once nothing is missing
shards/<id>/complete.json               created once: whoever creates it has won
shards/<id>/<attempt>/outcome.json      how this attempt ended
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from obstore.exceptions import BaseError as StoreError

from millrace.errors import ExitCode, MillraceError, NotFoundError, StoppedError
from millrace.lake import Lake
from millrace.layout import RunPaths, golden_file
from millrace.plan import Plan
from millrace.proof import prove_shard
from millrace.records import Completion, Manifest, Outcome, Phases, ShardEntry, utc_now
from shard_runner.ask import Asker, prefix_fields
from shard_runner.engines import open_engine as open_named_engine
from shard_runner.engines.base import Ask, Engine, EngineSpec
from shard_runner.golden import read_golden
from shard_runner.guard import Guard, Signals
from shard_runner.models import model_folder
from shard_runner.parts import PartWriter, SavedPart, Tally, merge, resume
from shard_runner.pump import Pump, Reading
from shard_runner.requests import read_ids, stream
from shard_runner.watchdog import Watched, step_timeout_s

log = logging.getLogger("shard_runner")

# Golden prompts that are answered first, so that caches, kernels and grammar are warm when the clock starts.
WARM_UP = 8
PROGRESS_SECONDS = 15.0
# How often `stop.json` and another attempt's completion are looked for when parts take long.
LOOK_SECONDS = 15.0

OpenEngine = Callable[[EngineSpec], Engine]


@dataclass
class Attempt:
    """One execution of one shard: what it needs and what it has counted."""

    lake: Lake
    paths: RunPaths
    shard_id: str
    attempt: str
    signals: Signals
    open_engine: OpenEngine = open_named_engine
    started_at: datetime = field(default_factory=utc_now)
    tally: Tally = field(default_factory=Tally)  # of this attempt
    answered: int = 0
    _pump: Pump | None = None

    def run(self) -> tuple[ExitCode, str]:
        """Answer the shard; returns the exit code and one line for people. Leaves `outcome.json` behind, whatever happens."""
        try:
            code, message = ExitCode.COMPLETE, self._run()
        except MillraceError as error:
            code, message = error.exit_code, str(error)
        except (OSError, StoreError, MemoryError) as error:
            code = ExitCode.UNAVAILABLE
            message = f"{type(error).__name__}: {str(error)[:300]}. What was saved stands; mend the store or node, then clear the task."
        except Exception as error:
            # Only where it happened: the message of an unforeseen error might quote a row.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            code = ExitCode.UNAVAILABLE
            message = f"unforeseen {type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}; report this as a bug."
        self._record(code, message)
        return code, message

    def _run(self) -> str:
        shard = self._shard()
        if self.lake.exists(self.paths.complete(self.shard_id)):
            done = prove_shard(self.lake, self.paths, shard)
            return f"shard {self.shard_id} is complete since {done.finished_at:%Y-%m-%d %H:%M} UTC; nothing to do"
        plan = Plan.read(self.lake, self.paths)
        guard = Guard(self.lake, self.paths, self.shard_id, plan.enrichment.limits, self.signals)
        guard.check_stop()
        remaining = read_ids(self.lake, shard)
        saved, resumed = resume(self.lake, self.paths, shard, remaining)
        if resumed.rows:
            log.info("resuming: %s of %s requests are answered", f"{resumed.rows:,}", f"{shard.requests:,}")
        phases, engine, parts = Phases(), {}, saved
        if remaining:
            work = ShardWork(self, plan, shard, guard, resumed.rows)
            try:
                done_elsewhere = work.answer(remaining)
                phases, engine, parts = work.pump.phases, work.describe(), saved + work.writer.parts
            finally:
                # The engine goes after the record is made (F4): close() belongs to the caller's teardown.
                self.answered = work.writer.saved
                self._pump = work.pump
            if done_elsewhere:
                return self._lost(shard)
        return self._complete(plan, shard, parts, resumed, phases, engine)

    def close(self) -> None:
        """Free the engine; may hang, so the caller gives it a deadline."""
        if self._pump is not None:
            self._pump.close()

    def ended_by_watchdog(self, message: str, answered: int) -> None:
        """Leave `outcome.json` behind for a process that is about to be ended, not by this thread."""
        self.answered = answered
        self._record(ExitCode.UNAVAILABLE, message)

    def _shard(self) -> ShardEntry:
        manifest = Manifest.load(self.lake, self.paths.manifest)
        for shard in manifest.shards:
            if shard.shard_id == self.shard_id:
                return shard
        raise NotFoundError(
            f"'{self.paths.manifest}' has no shard '{self.shard_id}'. Clear `infer` as a whole: shards are mapped anew."
        )

    def _complete(
        self,
        plan: Plan,
        shard: ShardEntry,
        parts: list[SavedPart],
        resumed: Tally,
        phases: Phases,
        engine: dict[str, str],
    ) -> str:
        answers = merge(self.lake, shard, self.attempt, parts)
        both = [resumed, self.tally]
        record = Completion(
            plan_id=plan.plan_id,
            shard_id=self.shard_id,
            attempt=self.attempt,
            requests=shard.requests,
            statuses=dict(sum((t.statuses for t in both), Counter())),
            reasons=dict(sum((t.reasons for t in both), Counter())),
            answers=answers,
            resumed=resumed.rows,
            tokens=Tally(
                prompt=sum(t.prompt for t in both),
                cached=sum(t.cached for t in both),
                completion=sum(t.completion for t in both),
            ).tokens,
            phases=phases,
            engine=engine,
        )
        if not self.lake.create(self.paths.complete(self.shard_id), record.dump()):
            self.lake.delete([answers.path])
            return self._lost(shard)
        statuses = ", ".join(f"{count:,} {name}" for name, count in sorted(record.statuses.items()))
        return f"shard {self.shard_id} complete: {shard.requests:,} requests ({statuses})"

    def _lost(self, shard: ShardEntry) -> str:
        winner = prove_shard(self.lake, self.paths, shard)
        return (
            f"shard {self.shard_id} was completed by attempt {winner.attempt} meanwhile; this attempt changes nothing"
        )

    def _record(self, code: ExitCode, message: str) -> None:
        outcome = Outcome(
            plan_id=self.paths.plan_id,
            shard_id=self.shard_id,
            attempt=self.attempt,
            exit_code=int(code),
            message=message,
            answered=self.answered,
            reasons=dict(self.tally.reasons),
            started_at=self.started_at,
        )
        try:
            self.lake.write(f"{self.paths.shard_attempt(self.shard_id, self.attempt)}/outcome.json", outcome.dump())
        except (OSError, StoreError, MillraceError) as error:
            # The exit code tells the same; a full disk must not hide it.
            log.warning("outcome.json could not be written (%s)", type(error).__name__)


class ShardWork:
    """The asking part of an attempt: engine, pump and writer, with the checks between parts."""

    def __init__(self, attempt: Attempt, plan: Plan, shard: ShardEntry, guard: Guard, resumed: int) -> None:
        self._attempt, self._plan, self._shard, self._guard = attempt, plan, shard, guard
        decision, enrichment = plan.decision, plan.enrichment
        model = decision.models[shard.model]
        self.spec = EngineSpec(
            model=model,
            schema=enrichment.schema,
            form=enrichment.form,
            sampling=enrichment.sampling,
            max_tokens=decision.max_tokens,
            folder=model_folder(model),
            want_confidence=enrichment.limits.confidence_floor is not None,
            requests=shard.requests - resumed,
        )
        self._step_timeout_s = step_timeout_s(model)
        self._described: dict[str, str] = {}
        self.asker: Asker | None = None
        self.pump = Pump(self._open, Reading.of(enrichment, self._longer), guard.check_signals)
        self.writer = PartWriter(attempt.lake, plan, shard, attempt.attempt)
        self._progress = Progress(shard.requests, resumed)

    def _open(self) -> Engine:
        signals = self._attempt.signals
        signals.check()
        signals.interruptible = True  # loading takes minutes, and there is nothing to save while it lasts
        try:
            engine = self._attempt.open_engine(self.spec)
        finally:
            signals.interruptible = False
        self._described = engine.describe()
        log.info("engine: %s", ", ".join(f"{key} {value}" for key, value in self._described.items()))
        return Watched(engine, self._step_timeout_s, self._save_and_record)

    def _save_and_record(self, reason: str) -> None:
        """For the watchdog: this thread's answers are all in the writer while it waits for the engine."""
        try:
            self.writer.flush()
        finally:
            self._attempt.ended_by_watchdog(reason, self.writer.saved)

    def _longer(self, ask: Ask) -> Ask | None:
        return None if self.asker is None else self.asker.longer(ask)

    def describe(self) -> dict[str, str]:
        changed = self.asker.changed if self.asker else Counter[str]()
        return self._described | {f"texts_{name}": str(count) for name, count in changed.items()}

    def answer(self, remaining: set[str]) -> bool:
        """Answer what remains. True when another attempt completed the shard meanwhile. Saves what is done, whatever is raised."""
        attempt, tally = self._attempt, self._attempt.tally
        self.asker = Asker(self._plan, self.spec.model, self.pump.engine.tokenizer)
        self._warm_up(self.asker)
        self._progress.start()
        tail = self._plan.enrichment.limits.early_stop_requests
        requests = stream(attempt.lake, self._shard, remaining, prefix_fields(self._plan), tail)
        looked = time.monotonic()
        try:
            for answer in self.pump.answers(self.asker.asks(requests)):
                tokens = (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)
                tally.add(answer.status, answer.reason, *tokens)
                part = self.writer.add(answer)
                self._guard.count(answer.status, answer.reason, sum(t or 0 for t in (tokens[0], tokens[2])))
                if part or time.monotonic() - looked > LOOK_SECONDS:
                    looked = time.monotonic()
                    self._progress.show(tally)
                    self._guard.between_parts()
                    if attempt.lake.exists(attempt.paths.complete(attempt.shard_id)):
                        return True
        except StoppedError as stopped:
            self.writer.flush()
            left = self._shard.requests - self._progress.resumed - tally.rows
            saved = f"{self.writer.saved:,} answers of this attempt are saved, {left:,} requests are left"
            raise StoppedError(f"{stopped}; {saved}") from stopped
        finally:
            self.writer.flush()
            self.writer.close()
        # Once more: an engine may have been rebuilt, and knows now what it has met.
        self._described = self.pump.engine.describe()
        self._progress.finish(tally, self.pump.phases)
        return False

    def _warm_up(self, asker: Asker) -> None:
        golden = self._plan.decision.golden
        if self._attempt.lake.exists(golden_file(golden)):
            rows = read_golden(self._attempt.lake, self._plan)[:WARM_UP]
            self.pump.warm_up(asker.asks(row.request for row in rows))
            asker.changed.clear()


class Progress:
    """At most one line every few seconds: how far, how fast, how good. Never a word of a row."""

    def __init__(self, requests: int, resumed: int) -> None:
        self.resumed = resumed
        self._requests = requests
        self.start()

    def start(self) -> None:
        """The first request is about to be asked."""
        self._shown = self._started = time.monotonic()

    def show(self, tally: Tally) -> None:
        now = time.monotonic()
        if now - self._shown < PROGRESS_SECONDS:
            return
        self._shown = now
        rate = tally.rows / (now - self._started)
        left = (self._requests - self.resumed - tally.rows) / rate if rate else 0.0
        log.info("%s, about %s left", self._line(tally, rate), f"{left / 60:.0f} min" if left > 90 else f"{left:.0f} s")

    def finish(self, tally: Tally, phases: Phases) -> None:
        rate = tally.rows / max(time.monotonic() - self._started, 1e-9)
        log.info("%s", self._line(tally, rate))
        log.info(
            "wall time %.1f s: load %.1f, start %.1f, full %.1f (%.0f %%), tail %.1f",
            phases.total, phases.load, phases.start, phases.full, 100 * phases.full / (phases.total or 1), phases.tail,
        )  # fmt: skip

    def _line(self, tally: Tally, rate: float) -> str:
        unusable = tally.rows - tally.statuses["ok"]
        return (
            f"{self.resumed + tally.rows:,}/{self._requests:,} requests, {rate:,.1f} rows/s, "
            f"{100 * unusable / max(tally.rows, 1):.1f} % not ok, prefix hit {100 * tally.cached / max(tally.prompt, 1):.0f} %"
        )
