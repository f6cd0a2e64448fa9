"""Operators of the graph that start something: a Spark application, the shard runner, or a question to a person.

A step is done when its record in the store says so, whatever its process returned: an application that wrote half its output and exited
0 has failed, one that wrote all and exited 1 has not.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import BaseOperator

from millrace.airflow.alerts import NeedsApproval
from millrace.airflow.process import RunnerProcess
from millrace.airflow.retries import MAX_FAILURES, GaveUpError, ReclaimedError, error_for, first_try_since_clear
from millrace.airflow.spark_submit import application, submit_hook
from millrace.airflow.tasks import check_claim, run_of, step_log
from millrace.errors import ExitCode, MillraceError, RefusedError
from millrace.settings import Settings

if TYPE_CHECKING:
    from millrace.lake import Lake
    from millrace.layout import RunPaths
    from millrace.records import Manifest, ShardEntry, SuiteResult


def _open(context: Any) -> tuple[Lake, RunPaths]:
    """The lake and the paths of the run that this DAG run works on."""
    from millrace.lake import Lake
    from millrace.layout import RunPaths

    return Lake.from_env(), RunPaths.parse(run_of(context["ti"])["run"])[1]


def _claimed(context: Any) -> tuple[Lake, RunPaths]:
    """The same, once it is sure that no other DAG run has taken over."""
    lake, paths = _open(context)
    check_claim(paths.root, context["dag_run"].run_id)
    return lake, paths


class SparkStep(BaseOperator):
    """Runs one application of `spark_apps/` through spark-submit and the connection `spark_default`.

    Subclasses say which record proves the step and whether one that is there already does.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._hook: Any = None

    @abstractmethod
    def record_path(self, paths: RunPaths) -> str:
        """Where the step's record lies."""

    def settled(self, lake: Lake, paths: RunPaths) -> bool:
        """Whether the step's output is there already, whole: then nothing is started, which saves Spark's 10 s."""
        return False

    @abstractmethod
    def result(self, lake: Lake, paths: RunPaths) -> Any:
        """Check the record and return what the next tasks need. Raises MillraceError when the step did not succeed."""

    def execute(self, context: Any) -> Any:
        lake, paths = _claimed(context)
        if not self.settled(lake, paths):
            before = lake.read_or_none(self.record_path(paths))
            failure = self._submit(paths)
            if lake.read_or_none(self.record_path(paths)) in (None, before):
                raise failure or RefusedError(
                    f"{self.task_id} of {paths.root} ended well but left no record at '{self.record_path(paths)}'. Clear it."
                )
        return self.result(lake, paths)

    def _submit(self, paths: RunPaths) -> Exception | None:
        """Run the application to its end; the error that its exit code stands for, or None."""
        from airflow.providers.common.compat.sdk import AirflowException

        self._hook = submit_hook(self.task_id, paths.root)
        try:
            self._hook.submit(application(self.task_id))
        except AirflowException as error:
            process = getattr(self._hook, "_submit_sp", None)
            code = process.returncode if process is not None else 1
            lines = [line for line in getattr(self._hook, "_last_submit_log_lines", ()) if line.strip()]
            return error_for(code, lines[-1].strip() if lines else str(error))
        return None

    def on_kill(self) -> None:
        if self._hook is not None:
            self._hook.on_kill()


class CheckSource(SparkStep):
    """Runs the source's expectation suite. Returns nothing; a blocking check fails the task."""

    def record_path(self, paths: RunPaths) -> str:
        return paths.source_check()

    def settled(self, lake: Lake, paths: RunPaths) -> bool:
        from millrace.records import SuiteResult

        found = SuiteResult.load_or_none(lake, paths.source_check())
        return found is not None and _stands(found, paths, "source")

    def result(self, lake: Lake, paths: RunPaths) -> None:
        from millrace.records import SuiteResult

        suite = SuiteResult.load(lake, paths.source_check())
        if not suite.passed:
            from millrace.spark.check_source import explain

            raise RefusedError(explain(suite, paths))
        met = sum(check.outcome == "met" for check in suite.results)
        step_log.info("%d of %d checks met over %s rows", met, suite.asked, f"{suite.rows:,}")


class Extract(SparkStep):
    """Makes the run's requests and shards. Returns the manifest's shard ids, over which `infer` is mapped."""

    def record_path(self, paths: RunPaths) -> str:
        return paths.manifest

    def settled(self, lake: Lake, paths: RunPaths) -> bool:
        from millrace.records import Manifest

        manifest = Manifest.load_or_none(lake, paths.manifest)
        return manifest is not None and _files_stand(lake, manifest)

    def result(self, lake: Lake, paths: RunPaths) -> list[str]:
        from millrace.records import Manifest

        manifest = Manifest.load(lake, paths.manifest)
        step_log.info(
            "%s rows: %s requests, %s of them with an answer to reuse, %d shards",
            f"{manifest.rows:,}", f"{manifest.requests:,}", f"{manifest.reused:,}", len(manifest.shards),
        )  # fmt: skip
        return [shard.shard_id for shard in manifest.shards]


class JoinBack(SparkStep):
    """Fans the answers out to their rows, next to the table. Returns nothing; `joined.json` holds the counts."""

    def record_path(self, paths: RunPaths) -> str:
        return paths.joined

    def settled(self, lake: Lake, paths: RunPaths) -> bool:
        from millrace.records import Joined

        joined = Joined.load_or_none(lake, paths.joined)
        return joined is not None and _stands(joined.suite, paths, "enriched") and _all_stand(lake, joined.files)

    def result(self, lake: Lake, paths: RunPaths) -> None:
        from millrace.records import Joined

        joined = Joined.load(lake, paths.joined)
        statuses = ", ".join(f"{rows:,} {status}" for status, rows in joined.statuses.items() if rows)
        step_log.info("%s rows: %s", f"{joined.rows:,}", statuses or "none")


def _stands(suite: SuiteResult, paths: RunPaths, kind: Literal["source", "enriched"]) -> bool:
    """Whether a suite passed and is still the one in `expectations/`. The plan pins the files it judged, so it would pass again."""
    from millrace.spark.suites import Suite

    return suite.passed and suite.suite == Suite.load(Settings.from_env().expectations, paths.enrichment, kind).label


def _all_stand(lake: Lake, files: list[Any]) -> bool:
    try:
        for file in files:
            file.check(lake)
    except MillraceError:
        return False
    return True


def _files_stand(lake: Lake, manifest: Manifest) -> bool:
    shard_files = [file for shard in manifest.shards for file in shard.files]
    return _all_stand(lake, [*manifest.row_files, *manifest.reused_files, *shard_files])


class LocalRunner(BaseOperator):
    """Runs `shard-runner` as a process of this machine and turns its exit code into the task's outcome."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._process: RunnerProcess | None = None

    def start_runner(self, *arguments: str) -> tuple[int, str]:
        """Run it to its end; exit code and its own word on how it ended, empty when it was killed."""
        self._process = RunnerProcess(*arguments)
        return self._process.wait(), self._process.last_word

    def on_kill(self) -> None:
        if self._process is not None:
            self._process.stop()


class Preflight(LocalRunner):
    """Asks whether the model can answer, before anything is spent: `shard-runner probe`, which starts no engine while a verdict stands."""

    def execute(self, context: Any) -> None:
        _, paths = _claimed(context)
        code, last = self.start_runner("probe", "--run", paths.root)
        if code != ExitCode.COMPLETE:
            raise error_for(code, f"preflight of {paths.root}: {last or f'ended with {code}'}")
        step_log.info("%s", last)


class LocalShard(LocalRunner):
    """Has one shard answered. Green only when the shard's completion record exists and its counts match the manifest's."""

    template_fields = ("shard_id",)

    def __init__(self, *, shard_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shard_id = shard_id

    def execute(self, context: Any) -> None:
        lake, paths = _open(context)
        shard = find_shard(lake, paths, self.shard_id)
        was_complete = is_complete(lake, paths, shard)
        if not was_complete:
            check_claim(paths.root, context["dag_run"].run_id)
            tries = ShardTries(lake, paths, self.shard_id, context, self.retries or 0)
            tries.refuse_if_stopped()
            code, last = self.start_runner(
                "run", "--run", paths.root, "--shard", self.shard_id, "--attempt", tries.attempt
            )
            if code != ExitCode.COMPLETE and not is_complete(lake, paths, shard):
                raise tries.outcome_of(code, last)
        prove(lake, paths, shard, asked=not was_complete)


def find_shard(lake: Lake, paths: RunPaths, shard_id: str) -> ShardEntry:
    """The manifest's entry of a shard. Raises RefusedError when the manifest does not have it."""
    from millrace.records import Manifest

    for shard in Manifest.load(lake, paths.manifest).shards:
        if shard.shard_id == shard_id:
            return shard
    raise RefusedError(
        f"shard {shard_id} is not in the manifest of {paths.root}. Clear `extract` with all tasks after it."
    )


def is_complete(lake: Lake, paths: RunPaths, shard: ShardEntry) -> bool:
    from millrace.errors import IncompleteError
    from millrace.proof import prove_shard

    try:
        prove_shard(lake, paths, shard)
    except IncompleteError:
        return False
    return True


def prove(lake: Lake, paths: RunPaths, shard: ShardEntry, *, asked: bool = True) -> None:
    """Raise IncompleteError unless the shard is proved complete; else say what it came to, and whether this try asked anything."""
    from millrace.proof import prove_shard

    done = prove_shard(lake, paths, shard)
    step_log.info(
        "%s requests%s: %s",
        f"{done.requests:,}",
        "" if asked else ", all answered earlier",
        ", ".join(f"{n:,} {status}" for status, n in done.statuses.items() if n),
    )


class ShardTries:
    """The tries of one shard under one DAG run, told apart by the names of their attempts.

    An attempt is named `<random>-<hash of the DAG run>-<try number>`: random so that two never share a prefix, the rest so that the
    failures since the last clear can be counted from what is stored.
    """

    def __init__(self, lake: Lake, paths: RunPaths, shard_id: str, context: Any, retries: int) -> None:
        from millrace.layout import new_attempt

        ti, dag_run = context["ti"], context["dag_run"]
        self._lake, self._paths, self._shard_id = lake, paths, shard_id
        self._run_started: datetime | None = dag_run.start_date
        self._key = hashlib.sha256(dag_run.run_id.encode()).hexdigest()[:8]
        self._first = first_try_since_clear(ti.try_number, ti.max_tries, retries)
        self._is_cleared_now = ti.try_number == self._first > 1
        self._try = ti.try_number
        self.attempt = f"{new_attempt()}-{self._key}-{ti.try_number}"

    def outcomes(self, first_try: int = 1) -> list[Any]:
        """Recorded outcomes of this DAG run's tries from `first_try` on. A try without one was reclaimed."""
        from millrace.records import Outcome

        found = []
        for name in self._lake.folders(self._paths.shard(self._shard_id)):
            if self._is_ours(name, first_try) and (outcome := Outcome.load_or_none(self._lake, self._outcome(name))):
                found.append(outcome)
        return found

    def is_current(self, attempt: str) -> bool:
        """Whether an attempt belongs to a try of this DAG run since the last clear."""
        return self._is_ours(attempt, self._first)

    def _is_ours(self, attempt: str, first_try: int) -> bool:
        _, _, rest = attempt.partition("-")
        key, _, number = rest.partition("-")
        return key == self._key and int(number) >= first_try

    def _outcome(self, attempt: str) -> str:
        return f"{self._paths.shard_attempt(self._shard_id, attempt)}/outcome.json"

    def refuse_if_stopped(self) -> None:
        """Raise RefusedError while the run's `stop.json` stands; a clear since it was written removes it."""
        from millrace.records import Stop

        stop = Stop.load_or_none(self._lake, self._paths.stop)
        if stop is None:
            return
        run_restarted = self._run_started is not None and stop.at < self._run_started
        shard_cleared = self._is_cleared_now and any(outcome.ended_at >= stop.at for outcome in self.outcomes())
        if run_restarted or shard_cleared:
            self._lake.delete([self._paths.stop])
            return
        raise RefusedError(
            f"the run {self._paths.root} was stopped by {stop.by}: {stop.reason}. "
            "Remove the cause, then clear the failed `infer` tasks."
        )

    def outcome_of(self, code: int, last_line: str) -> Exception:
        """The exception for a try that ended without completing its shard."""
        from millrace.records import Stop

        message = f"shard {self._shard_id} of {self._paths.root}: {last_line or f'the runner ended with {code}'}"
        error = error_for(code, message)
        if isinstance(error, ReclaimedError):
            return error
        if code == ExitCode.STOPPED:
            stop = Stop.load_or_none(self._lake, self._paths.stop)
            return (
                error if stop is None else RefusedError(f"{message}. The run was stopped by {stop.by}: {stop.reason}")
            )
        self._record(code, message)
        failures = [o for o in self.outcomes(self._first) if o.exit_code not in (ExitCode.COMPLETE, ExitCode.STOPPED)]
        if len(failures) > MAX_FAILURES:
            return GaveUpError(
                f"{message}. Gave up after {MAX_FAILURES} retries of real failures; clear the task to go on."
            )
        return error

    def _record(self, code: int, message: str) -> None:
        """Record a real failure for a process that could not: it never started, or crashed. Else its try would not count."""
        from millrace.records import Outcome, utc_now

        now = utc_now()
        outcome = Outcome(
            plan_id=self._paths.plan_id,
            shard_id=self._shard_id,
            attempt=self.attempt,
            exit_code=code,
            message=message,
            answered=0,
            reasons={},
            started_at=now,
            ended_at=now,
        )
        self._lake.create(self._outcome(self.attempt), outcome.dump())


class ApproveBudget(ApprovalOperator):
    """Passes at once within the budget, at zero, or where an approval is stored; else waits for a person, or fails as configured."""

    def __init__(self, *, enrichment: str, **kwargs: Any) -> None:
        super().__init__(
            subject=f"{enrichment}: this run would cost more than its budget",
            body="The estimate is in this task's log, and `millrace estimate` shows it. Approve to go on, reject to fail the run.",
            fail_on_reject=True,
            retries=0,
            response_timeout=timedelta(days=2),
            notifiers=[NeedsApproval()],
            **kwargs,
        )

    def execute(self, context: Any) -> Any:
        from millrace import budget

        lake, paths = _claimed(context)
        if budget.decide(lake, paths.root) == "passed":
            step_log.info("within budget, or nothing left to ask")
            return None
        step_log.info("over budget: waiting for an approval (Required Actions in Airflow)")
        return super().execute(context)

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        from millrace import budget

        answer = super().execute_complete(context, event)
        lake, paths = _open(context)
        user = answer.get("responded_by_user") or {}
        budget.approve(
            lake, paths.root, by=user.get("name") or user.get("id") or "unknown", reason="approved in Airflow"
        )
        return None
