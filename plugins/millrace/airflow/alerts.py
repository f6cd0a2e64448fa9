"""Alerts: what a person is told when a task is red, a date is late or a budget needs a decision, and through which notifiers.

Every alert is one line in the log it belongs to. Who else hears of it is one setting of the deployment, `MILLRACE_ALERTS`: a JSON list
of Airflow notifiers, each with its class and that class's own arguments, in which `{{ alert.title }}` and `{{ alert.text }}` stand for
what happened:

    [{"notifier": "airflow.providers.smtp.notifications.smtp.SmtpNotifier",
      "to": "oncall@example.org", "subject": "{{ alert.title }}", "html_content": "<pre>{{ alert.text | e }}</pre>"}]

Secrets belong into the notifier's Airflow connection. Only Millrace's own messages are passed on, which never quote a row; of any other
error its class. Of a run's shards the first that fails alerts, and no other until the run is cleared: a thousand pods failing for
one reason are one message.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from airflow.sdk import BaseNotifier
from airflow.sdk.definitions.callback import SyncCallback
from airflow.sdk.definitions.deadline import DeadlineAlert
from airflow.sdk.module_loading import import_string

from millrace.airflow.first_queued import FirstQueued
from millrace.errors import ConfigError, MillraceError
from millrace.settings import Settings

alert_log = logging.getLogger("millrace.alert")

# For the task that failed; the message says more where Millrace itself raised the error.
NEXT_STEPS = {
    "plan": "Repair what the reason names, then clear `plan`.",
    "check_source": "Repair the source, then clear `plan` with all after it.",
    "preflight": "Repair prompt or model, then clear `plan` with all after it.",
    "extract": "Read its log, then clear it; it starts where nothing is proved.",
    "approve_budget": "Raise the budget or approve, then clear it.",
    "infer": "Clear the red `infer` instances; only what is not answered yet is asked.",
    "join_back": "Read its log, then clear it; it starts where nothing is proved.",
    "validate": "Read the report; repair and run again, or accept the rate, then clear it.",
    "publish": "Read its log, then clear it. Readers keep the version they have.",
    "report": "The run itself is not affected; clear it to write the report.",
}
_ANY_TASK = "Read its log, then clear it."


@dataclass(frozen=True)
class Alert:
    """What a person is told. `text` is all of it, a line each."""

    title: str
    run: str  # the run's path in the lake, or the DAG run where there is no plan
    reason: str
    next_step: str
    link: str
    shard: str | None = None

    @property
    def text(self) -> str:
        lines = {"Run": self.run, "Shard": self.shard, "Reason": self.reason, "Next": self.next_step, "Link": self.link}
        return "\n".join([self.title, *(f"{name}: {value}" for name, value in lines.items() if value)])


def notifiers() -> list[BaseNotifier]:
    """The notifiers that `MILLRACE_ALERTS` names, made anew: each renders its templates once.

    Raises ConfigError that names the entry and what is wrong with it.
    """
    raw = Settings.from_env().alerts
    try:
        entries = json.loads(raw) if raw else []
    except json.JSONDecodeError as error:
        raise ConfigError(f"MILLRACE_ALERTS is not JSON: {error}. Write a list of notifiers.") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "notifier" in entry for entry in entries):
        raise ConfigError('MILLRACE_ALERTS must be a JSON list of objects, each with the key "notifier".')
    return [_notifier(**entry) for entry in entries]


def _notifier(notifier: str, **arguments: Any) -> BaseNotifier:
    try:
        made = import_string(notifier)(**arguments)
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError(
            f"MILLRACE_ALERTS: {notifier} cannot be made: {error}. Install its provider, or correct its arguments."
        ) from error
    if not isinstance(made, BaseNotifier):
        raise ConfigError(f"MILLRACE_ALERTS: {notifier} is not an Airflow notifier.")
    return made


def send(alert: Alert, context: Mapping[str, Any]) -> None:
    """Log an alert and pass it to every notifier. One that fails keeps no other from being told, and never the task from ending."""
    alert_log.error("ALERT %s", alert.text.replace("\n", " | "))
    try:
        found = notifiers()
    except ConfigError as error:
        alert_log.error("nobody was told: %s", error)
        return
    for notifier in found:
        try:
            notifier({**context, "alert": alert})
        except Exception as error:
            # The class only: a notifier's error may quote the address with its token.
            alert_log.error("%s failed with %s", type(notifier).__name__, type(error).__name__)


def task_failed(context: Mapping[str, Any]) -> None:
    """`on_failure_callback` of every task."""
    ti = context["ti"]
    run = _run_path(ti)
    shard = _shard(ti) if ti.map_index >= 0 else None
    if shard and run and not _is_first(run, context):
        return
    error = context.get("exception")
    alert = Alert(
        title=f"Millrace: {ti.dag_id} failed at {ti.task_id}",
        run=f"{run} ({ti.run_id})" if run else ti.run_id,
        shard=shard,
        reason=_reason(error),
        next_step=NEXT_STEPS.get(ti.task_id, _ANY_TASK),
        link=ti.log_url,
    )
    send(alert, context)


def _reason(error: Any) -> str:
    if isinstance(error, MillraceError):
        return str(error)
    if error is None:
        return "the task was killed, or its worker was lost"
    return f"{type(error).__name__}; see the task's log"


def _run_path(ti: Any) -> str | None:
    try:
        ref = ti.xcom_pull(task_ids="plan")
    except Exception:  # where a lost task is reported by the DAG processor there may be no one to ask
        return None
    return ref["run"] if isinstance(ref, dict) else None


def _shard(ti: Any) -> str:
    # A lost task is reported with its unmapped operator, which knows no shard.
    return str(getattr(ti.task, "shard_id", None) or f"number {ti.map_index}")


def _is_first(run: str, context: Mapping[str, Any]) -> bool:
    """Whether no other shard of the run has alerted since it was started or cleared. In doubt it is: rather twice than never."""
    from millrace.canonical import content_hash
    from millrace.lake import Lake
    from millrace.layout import RunPaths, new_attempt

    dag_run = context["dag_run"]
    since = content_hash([dag_run.run_id, str(dag_run.start_date)])[:16]
    try:
        return Lake.from_env().create(RunPaths.parse(run)[1].alerted(since), new_attempt().encode())
    except (MillraceError, OSError):
        return True


def deadline(minutes: int | None) -> list[DeadlineAlert] | None:
    """The deadline of an enrichment's runs, `publish_within_minutes` after they were first queued.

    Not after their logical date, which for a backfill lies far in the past.
    """
    if minutes is None:
        return None
    after = timedelta(minutes=minutes)
    return [DeadlineAlert(FirstQueued(), after, SyncCallback(late), name="published in time")]


def late(context: Mapping[str, Any]) -> None:
    """Callback of an enrichment's deadline, `publish_within_minutes`. Backfills have none: nobody waits for them at that hour."""
    from airflow.configuration import conf

    run = context["dag_run"]
    if run["run_type"] == "backfill":
        return
    due = str(context["deadline"]["deadline_time"])[:16].replace("T", " ")
    base = conf.get("api", "base_url", fallback="http://localhost:8080/").rstrip("/")
    alert = Alert(
        title=f"Millrace: {run['dag_id']} is late",
        run=run["dag_run_id"],
        reason=f"it was to be published by {due} UTC and is {run['state']}",
        next_step="Open the run: a red task says what to do; a running one, how far it is. Readers keep the version they have.",
        link=f"{base}/dags/{run['dag_id']}/runs/{run['dag_run_id']}",
    )
    send(alert, context)


class NeedsApproval(BaseNotifier):
    """Tells people that a run waits for their approval."""

    def notify(self, context: Any) -> None:
        ti = context["ti"]
        run = _run_path(ti)
        alert = Alert(
            title=f"Millrace: {ti.dag_id} waits for an approval",
            run=f"{run} ({ti.run_id})" if run else ti.run_id,
            reason="the estimate of what is still to be asked is over the enrichment's budget",
            next_step="Approve or reject it under Required Actions in Airflow; the estimate is in the task's log.",
            link=ti.log_url,
        )
        send(alert, context)
