"""Enriches one partition of one table with a large language model.

**What it does.** Checks the partition, proves that the model can answer, extracts the texts, has them answered shard by shard,
joins the answers back, refuses to publish when too many are unusable, and publishes the partition atomically. Whatever goes wrong, readers
keep the version they had.

**Which date.** A scheduled or backfill run works on the date its data interval starts: the run of 2 March 03:00 covers 1 March. A run
started by hand needs the parameter `partition` (YYYY-MM-DD) and is refused without it.

**Safe to run twice?** Yes, each task and the whole run. Everything a run has decided is in its plan; the same decision is the same
plan, and finished work under it counts. A second run of a date asks the model nothing.

**A task is red. What now?** Its log ends with one line: which run, what is wrong, the next step.

| task | red means | do |
| --- | --- | --- |
| `plan` | no date, another run has it, or file, prompt, table or model is wrong | repair what it names, clear `plan` |
| `check_source` | the partition fails its expectations | repair the source, clear `plan` with all after it |
| `preflight` | the model cannot answer this prompt | repair prompt or model, clear `plan` with all after it |
| `extract`, `join_back` | Spark failed | clear the task; it starts where nothing is proved |
| `approve_budget` | over budget, or rejected | raise the budget or approve, then clear it |
| `infer` | one shard; the others go on | clear that one mapped task: it asks only what is not answered yet |
| `validate` | too many unusable answers, or a ledger that does not add up | read the report; repair, or accept the rate, then clear it |
| `publish` | another run was faster, or the store refuses | see its log; clear it |

Clearing a task repeats it under the same plan. Clearing `plan` decides afresh: it sees late rows, a new prompt, a new model.
`report` always runs and never decides the colour. More: docs/runbook.md.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG, CronDataIntervalTimetable, TriggerRule, task

from millrace.airflow import alerts, params, retries, tasks
from millrace.airflow.backends import backend
from millrace.airflow.operators import ApproveBudget, CheckSource, Extract, JoinBack
from millrace.enrichment import Enrichment, load_enrichments
from millrace.settings import Settings

BACKEND = backend(Settings.from_env().backend)

# One slot on one machine, so that Spark and the model never compete; elsewhere as many as there are GPUs.
POOL = "millrace"


def enrichment_dag(enrichment: Enrichment) -> DAG:
    """The graph of one enrichment, under the enrichment's name."""
    # A bare cron string would be a trigger timetable: its interval has no width, so "the day before" would not exist.
    schedule = enrichment.schedule and CronDataIntervalTimetable(enrichment.schedule, timezone=enrichment.timezone)
    with DAG(
        dag_id=enrichment.name,
        description=enrichment.description,
        doc_md=__doc__,
        schedule=schedule,
        start_date=datetime(2020, 1, 1),
        catchup=False,
        max_active_runs=4,
        params=params.form(),
        tags=["millrace"],
        deadline=alerts.deadline(enrichment.publish_within_minutes),
        default_args={
            "owner": enrichment.owner,
            "retries": retries.STEP_RETRIES,
            "retry_delay": retries.CRASH_DELAY,
            "retry_policy": retries.POLICY,
            "execution_timeout": timedelta(hours=6),
            "on_failure_callback": alerts.task_failed,
            # Today's date before backfills, wherever both wait for a slot.
            "weight_rule": "millrace.airflow.priority.ScheduledFirst",
        },
    ) as dag:
        plan = task(tasks.plan)(enrichment.name, enrichment.timezone)
        check_source = CheckSource(task_id="check_source", pool=POOL)
        preflight = BACKEND.preflight(task_id="preflight", pool=POOL)
        extract = Extract(task_id="extract", pool=POOL)
        approve_budget = ApproveBudget(task_id="approve_budget", enrichment=enrichment.name)
        infer = BACKEND.shard.partial(
            task_id="infer",
            pool=POOL,
            retries=retries.INFER_RETRIES,
            retry_delay=timedelta(seconds=10),
            execution_timeout=timedelta(days=1),
            map_index_template="{{ task.shard_id }}",
        ).expand(shard_id=extract.output)
        # Zero shards skip `infer`; a failed one must still stop the run.
        join_back = JoinBack(task_id="join_back", pool=POOL, trigger_rule=TriggerRule.NONE_FAILED)
        validate = task(tasks.validate)()
        publish = task(tasks.publish)()
        report = task(tasks.report)(enrichment.name)

        plan >> check_source >> preflight >> extract >> approve_budget >> infer >> join_back >> validate >> publish
        publish >> report.as_teardown()
    return dag


# A broken file is reported by broken_enrichments.py: an error raised here would stop the schedule of every enrichment.
for _enrichment in load_enrichments(Path(__file__).with_name("enrichments"))[0].values():
    globals()[_enrichment.name] = enrichment_dag(_enrichment)
