"""Removes what nobody needs any more: old runs, old answers, and table files that no reader and no rollback can reach.

**Safe to run twice?** Yes, at any moment, and to stop. A date that a run is at work on is left out; while a date is cleaned, nobody can
begin a run of it.

**What is kept.** Every run that readers see or a rollback may bring back, the runs it builds on, and all that they are made of. Beyond
that:

| what | how long | set by |
| --- | --- | --- |
| runs | 30 days after the last file was written | the parameter `run_days` |
| answers in the cache | the longest `reuse_days` (90) of all enrichments, and a day | the enrichment files |
| replaced table files | `target.rollback_days` (14), and a day | the enrichment file |

**A task is red. What now?** A table, the store or the config table could not be read. Nothing was removed on its account; clear the task
when it is mended. More: docs/runbook.md.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow.sdk import DAG, CronTriggerTimetable, Param, task

from millrace.airflow import alerts, clean_up

# What is wrong with MILLRACE_ALERTS is an import error of this file, which people see, and of no other, so that enrichments go on.
alerts.notifiers()

with DAG(
    dag_id="millrace_maintenance",
    description="Removes old runs, answers and table files that nobody needs any more.",
    doc_md=__doc__,
    schedule=CronTriggerTimetable("30 1 * * *", timezone="UTC"),
    start_date=datetime(2020, 1, 1),
    catchup=False,
    max_active_runs=1,
    params={
        "run_days": Param(
            clean_up.RUN_DAYS,
            type="integer",
            minimum=1,
            title="Days to keep runs",
            description="A run in which no file was written for so long is removed, unless something still needs it.",
        )
    },
    tags=["millrace"],
    default_args={
        "owner": "millrace",
        "pool": "millrace",  # on one machine, never beside Spark, which lists the cache before it reads it
        "retries": 2,
        "retry_delay": timedelta(minutes=5),
        "execution_timeout": timedelta(hours=6),
        "on_failure_callback": alerts.task_failed,
    },
):
    runs = task(clean_up.runs)()
    answers = task(clean_up.answers)()
    table_files = task(clean_up.table_files)()

    # What a run keeps alive is decided by the run being there.
    runs >> answers >> table_files
