"""Bodies of the Python tasks: plan, validate, publish and report.

Each calls one step function, logs one line about what it did and returns a small reference. They run in a worker, where neither
Airflow's database nor a display is at hand; what they need of Airflow they ask through the task SDK.
"""

from __future__ import annotations

import logging
from typing import Any, TypedDict

from millrace.errors import ConfigError, MillraceError
from millrace.settings import Settings

# One line for each step that has ended. `millrace run` shows these and nothing else.
step_log = logging.getLogger("millrace.step")


# The name that Airflow's `DAG.test` gives to whoever calls it; the run then is this very process.
DAG_TEST = "dag_test"


class RunRef(TypedDict):
    """What travels from task to task: where the run lies in the lake, and the claim's number."""

    run: str
    number: int


def run_of(ti: Any) -> RunRef:
    """What `plan` decided for this DAG run. Raises ConfigError when it has decided nothing."""
    ref: RunRef | None = ti.xcom_pull(task_ids="plan")
    if ref is None:
        raise ConfigError("this DAG run has no plan. Clear `plan` with all tasks after it.")
    return ref


def check_claim(run: str, dag_run_id: str) -> None:
    """Raise RefusedError when another DAG run has claimed the partition since: called by each task before it spends."""
    from millrace.config_db import ConfigDb
    from millrace.layout import RunPaths

    _, paths = RunPaths.parse(run)
    ConfigDb(Settings.from_env().require_config_db()).check_run(paths.enrichment, paths.partition, dag_run_id)


def plan(enrichment: str, timezone: str, *, ti: Any = None, dag_run: Any = None, params: Any = None) -> RunRef:
    """Decide which partition this run works on, claim it, and write `plan.json`."""
    from millrace.config_db import ConfigDb
    from millrace.enrichment import load_enrichment
    from millrace.lake import Lake
    from millrace.partition import resolve_partition
    from millrace.planning import PlanParams, make_plan
    from millrace.publishing import seen_number

    partition = resolve_partition(
        run_type=dag_run.run_type.value,
        params=params,
        partition_key=dag_run.partition_key,
        data_interval_start=dag_run.data_interval_start,
        data_interval_end=dag_run.data_interval_end,
        timezone=timezone,
    )
    settings = Settings.from_env()
    db = ConfigDb(settings.require_config_db())
    lake, target = Lake.from_env(), load_enrichment(settings.enrichments / f"{enrichment}.yaml").target.path
    number = db.register_run(
        enrichment,
        partition,
        dag_run.run_id,
        lambda run_id: is_alive(ti, enrichment, run_id),
        above=seen_number(lake, target, partition),
    )
    try:
        made = make_plan(
            lake=lake,
            db=db,
            settings=settings,
            enrichment_name=enrichment,
            partition=partition,
            dag_run_id=dag_run.run_id,
            user=who_asked(dag_run),
            params=PlanParams(
                row_sample=params["row_sample"],
                prompt_version=params["prompt_version"],
                reuse_answers=not params["do_not_reuse_answers"],
                ask_unknowns_again=params["ask_unknowns_again"],
            ),
        )
    except MillraceError:
        # Without a plan there is no run for `report` to close.
        db.close_run(enrichment, partition, dag_run.run_id, state="failed")
        raise
    db.note_plan(enrichment, partition, dag_run.run_id, made.plan_id)
    decision = made.decision
    step_log.info(
        "%s %s: prompt %s version %d, model %s, plan %s",
        enrichment, partition, decision.prompt.name, decision.prompt.version, decision.default_model, made.plan_id[:12],
    )  # fmt: skip
    return RunRef(run=made.paths.root, number=number)


def who_asked(dag_run: Any) -> str:
    """Who started a DAG run: a person's name where Airflow knows one, else the kind of run, e.g. `scheduled`."""
    from millrace.local import login_name

    if dag_run.triggering_user_name == DAG_TEST:
        return login_name()
    return dag_run.triggering_user_name or str(dag_run.run_type.value)


def is_alive(ti: Any, dag_id: str, dag_run_id: str) -> bool:
    """Whether a DAG run is queued or running. One that Airflow no longer knows is not."""
    from airflow.sdk.exceptions import AirflowRuntimeError

    try:
        # An enum whose str() is its Python name, so it is compared as it is.
        return ti.get_dagrun_state(dag_id=dag_id, run_id=dag_run_id) in ("queued", "running")
    except AirflowRuntimeError as error:
        if "404" in str(error) or "not_found" in str(error).lower():
            return False
        raise


def validate(*, ti: Any = None, dag_run: Any = None) -> None:
    """Judge the counts of join_back: ledger, unknown rate, suite."""
    from millrace import validation
    from millrace.lake import Lake

    run = run_of(ti)["run"]
    check_claim(run, dag_run.run_id)
    audit = validation.validate(Lake.from_env(), run)
    step_log.info("%s rows, %.2f %% unknown", f"{audit.rows:,}", 100 * audit.unknown_rate)


def publish(*, ti: Any = None, dag_run: Any = None) -> None:
    """Commit the partition to the enriched table, atomically."""
    from millrace import publishing
    from millrace.lake import Lake

    ref = run_of(ti)
    check_claim(ref["run"], dag_run.run_id)
    done = publishing.publish(Lake.from_env(), ref["run"], ref["number"])
    live = "was live already as" if done["already_live"] else "is live as"
    step_log.info("%s rows; the date %s version %s", f"{done['rows']:,}", live, done["version"])


def report(enrichment: str, *, ti: Any = None, dag_run: Any = None) -> None:
    """Write the report of whatever the run left behind and let go of the partition. Never decides the run's colour."""
    from millrace import report as reports
    from millrace.config_db import ConfigDb
    from millrace.lake import Lake
    from millrace.layout import RunPaths

    ref: RunRef | None = ti.xcom_pull(task_ids="plan")
    ended = list(ti.get_task_breadcrumbs(dag_id=enrichment, run_id=dag_run.run_id))
    failed = sorted({str(crumb["task_id"]) for crumb in ended if crumb["state"] == "failed"})
    state = "failed" if failed else "success"
    db = ConfigDb(Settings.from_env().require_config_db())
    if ref is None:
        step_log.info("the run has no plan, so there is nothing to report; see the log of `plan`")
        return
    seconds: dict[str, float] = {}
    for crumb in ended:
        seconds[crumb["task_id"]] = seconds.get(crumb["task_id"], 0.0) + float(crumb["duration"] or 0.0)
    lake = Lake.from_env()
    _, paths = RunPaths.parse(ref["run"])
    try:
        since = db.started_at(paths.enrichment, paths.partition, dag_run.run_id)
        written = reports.write(lake, ref["run"], dag_run.run_id, state=state, step_seconds=seconds, since=since)
        counts, tokens = reports.ledger(lake, ref["run"], since)
    except MillraceError as error:
        step_log.info("no report: %s", error)
        written, counts, tokens = None, {}, {}
    db.close_run(
        paths.enrichment,
        paths.partition,
        dag_run.run_id,
        state=state,
        plan_id=paths.plan_id,
        counts=counts,
        tokens=tokens,
        seconds=sum(seconds.values()),
    )
    if written:
        step_log.info("written to %s", written["html"].removeprefix(f"{paths.root}/"))
