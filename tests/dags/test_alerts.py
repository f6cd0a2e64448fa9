"""What a person is told, through which notifiers, and what is never passed on."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import BaseNotifier

from millrace.airflow import alerts
from millrace.airflow.alerts import Alert
from millrace.enrichment import load_enrichment
from millrace.errors import ConfigError, RefusedError, UnusableError
from tests.dags.conftest import ROOT

RUN = f"runs/review_insights/2026-11-01/{'a' * 64}"
TOLD: list[tuple[str, str]] = []


class Pager(BaseNotifier):
    """A notifier like those of the providers: its arguments are templates."""

    template_fields = ("to", "text")

    def __init__(self, to: str, text: str = "{{ alert.title }}") -> None:
        super().__init__()
        self.to, self.text = to, text

    def notify(self, context: Any) -> None:
        TOLD.append((self.to, self.text))


class Broken(Pager):
    def notify(self, context: Any) -> None:
        raise RuntimeError("POST https://hooks.example.org/T0KEN failed")


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """What the pagers said; one pager that gets the whole text is configured."""
    TOLD.clear()
    monkeypatch.setenv("MILLRACE_LAKE", str(tmp_path))
    configure(monkeypatch, {"notifier": f"{__name__}.Pager", "to": "oncall", "text": "{{ alert.text }}"})
    return TOLD


def configure(monkeypatch: pytest.MonkeyPatch, *entries: dict[str, Any]) -> None:
    monkeypatch.setenv("MILLRACE_ALERTS", json.dumps(entries))


def context(
    task_id: str = "infer",
    error: BaseException | None = None,
    shard: str | None = None,
    run: str | None = RUN,
    start: str = "04:00",
) -> dict[str, Any]:
    """What Airflow gives a failure callback, as far as alerts look at it."""
    ti = SimpleNamespace(
        dag_id="review_insights",
        task_id=task_id,
        run_id="scheduled__2026-11-01",
        map_index=-1 if shard is None else 7,
        task=SimpleNamespace(shard_id=shard),
        log_url="http://airflow/the-log",
        xcom_pull=lambda task_ids: run and {"run": run, "number": 3},
    )
    dag_run = SimpleNamespace(run_id=ti.run_id, start_date=start)
    return {"ti": ti, "dag_run": dag_run, "exception": error}


def test_the_message_has_run_shard_reason_next_step_and_link(told: list[tuple[str, str]]) -> None:
    alerts.task_failed(context(error=UnusableError("61 % of 200 answers were unusable"), shard="5eed"))
    assert told == [
        (
            "oncall",
            "Millrace: review_insights failed at infer\n"
            f"Run: {RUN} (scheduled__2026-11-01)\n"
            "Shard: 5eed\n"
            "Reason: 61 % of 200 answers were unusable\n"
            "Next: Clear the red `infer` instances; only what is not answered yet is asked.\n"
            "Link: http://airflow/the-log",
        )
    ]


def test_without_a_setting_the_log_has_the_alert_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: list[tuple[str, str]]
) -> None:
    monkeypatch.delenv("MILLRACE_ALERTS")
    alerts.task_failed(context("validate", RefusedError("3.2 % unknown, limit 1 %")))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.message.startswith("ALERT Millrace: review_insights failed at validate | Run: ")
    assert "Reason: 3.2 % unknown, limit 1 %" in record.message and "\n" not in record.message
    assert told == []


def test_an_error_that_is_not_millraces_own_is_named_but_not_quoted(
    told: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    """It may quote a row or an address with its password."""
    alerts.task_failed(context("extract", ValueError("cannot cast 'I hate my boss'")))
    assert "Reason: ValueError; see the task's log" in told[0][1]
    assert "boss" not in told[0][1] + caplog.text


def test_a_lost_task_alerts_without_plan_shard_or_error(told: list[tuple[str, str]]) -> None:
    """The DAG processor calls for a task that was killed: it knows neither its error nor, mapped, its shard."""
    lost = context(shard="x", run=None)
    lost["ti"].task = SimpleNamespace()
    del lost["ti"].xcom_pull
    alerts.task_failed(lost)
    assert "Run: scheduled__2026-11-01\nShard: number 7\nReason: the task was killed" in told[0][1]


def test_a_thousand_red_shards_are_one_alert_and_after_a_clear_one_more(told: list[tuple[str, str]]) -> None:
    for number in range(1000):
        alerts.task_failed(context(error=UnusableError("bad prompt"), shard=f"{number:04}"))
    assert len(told) == 1 and "Shard: 0000" in told[0][1]
    alerts.task_failed(context(error=UnusableError("bad prompt"), shard="0500", start="05:30"))
    assert len(told) == 2 and "Shard: 0500" in told[1][1]


def test_every_other_task_alerts_each_time(told: list[tuple[str, str]]) -> None:
    for _ in range(2):
        alerts.task_failed(context("plan", ConfigError("no prompt is active"), run=None))
    assert len(told) == 2


def test_a_notifier_that_fails_keeps_no_other_from_being_told_and_its_words_are_not_logged(
    monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    configure(
        monkeypatch,
        {"notifier": f"{__name__}.Broken", "to": "chat"},
        {"notifier": f"{__name__}.Pager", "to": "second"},
    )
    alerts.task_failed(context("publish", RefusedError("another run was faster")))
    assert told == [("second", "Millrace: review_insights failed at publish")]
    assert "Broken failed with RuntimeError" in caplog.text and "T0KEN" not in caplog.text


def test_text_of_an_alert_is_never_a_template(told: list[tuple[str, str]]) -> None:
    alerts.send(Alert("t", "r", "{{ 6 * 7 }} {% raw %}", "n", "l"), {"ti": None})
    assert "{{ 6 * 7 }} {% raw %}" in told[0][1]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("{", "is not JSON"),
        ('{"notifier": "x.Y"}', "must be a JSON list"),
        ('[{"to": "me"}]', "must be a JSON list"),
        ('[{"notifier": "nowhere.Pager"}]', "nowhere.Pager cannot be made"),
        ('[{"notifier": "builtins.dict"}]', "builtins.dict is not an Airflow notifier"),
        (f'[{{"notifier": "{__name__}.Pager"}}]', "cannot be made"),
    ],
)
def test_a_broken_setting_is_named_and_the_alert_is_in_the_log_all_the_same(
    setting: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MILLRACE_ALERTS", setting)
    with pytest.raises(ConfigError, match=said):
        alerts.notifiers()
    alerts.task_failed(context("plan", ConfigError("no date")))
    assert "Reason: no date" in caplog.text and said in caplog.text


def test_the_providers_mail_notifier_gets_the_alert_into_subject_and_body(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.providers.smtp.notifications.smtp import SmtpNotifier

    configure(
        monkeypatch,
        {
            "notifier": "airflow.providers.smtp.notifications.smtp.SmtpNotifier",
            "from_email": "millrace@example.org",
            "to": "oncall@example.org",
            "subject": "{{ alert.title }}",
            "html_content": "<pre>{{ alert.text | e }}</pre>",
        },
    )
    sent: list[tuple[str | None, str | None]] = []
    monkeypatch.setattr(SmtpNotifier, "notify", lambda self, context: sent.append((self.subject, self.html_content)))
    alerts.task_failed(context("validate", RefusedError("a < b & c")))
    ((subject, body),) = sent
    assert subject == "Millrace: review_insights failed at validate"
    assert body is not None and "Reason: a &lt; b &amp; c" in body


def missed(run_type: str) -> dict[str, Any]:
    """What Airflow gives a deadline's callback."""
    run = {"dag_id": "review_insights", "dag_run_id": "scheduled__1", "run_type": run_type, "state": "running"}
    return {"dag_run": run, "deadline": {"id": "d", "deadline_time": "2026-11-02T06:00:00.123456Z"}}


def test_a_late_run_says_when_it_was_due_and_how_it_stands(told: list[tuple[str, str]]) -> None:
    alerts.late(missed("scheduled"))
    assert "Millrace: review_insights is late\nRun: scheduled__1\n" in told[0][1]
    assert "it was to be published by 2026-11-02 06:00 UTC and is running" in told[0][1]
    assert "/dags/review_insights/runs/scheduled__1" in told[0][1]


def test_nobody_is_called_for_a_late_backfill(told: list[tuple[str, str]]) -> None:
    alerts.late(missed("backfill"))
    assert told == []


def test_every_task_of_an_enrichment_alerts(dag: Any) -> None:
    for task in dag.tasks:
        callbacks = task.partial_kwargs["on_failure_callback"] if task.is_mapped else task.on_failure_callback
        assert alerts.task_failed in callbacks


def test_a_run_that_waits_for_an_approval_tells_people(dag: Any, told: list[tuple[str, str]]) -> None:
    (notifier,) = dag.get_task("approve_budget").notifiers
    notifier(context("approve_budget"))
    assert "review_insights waits for an approval" in told[0][1] and "Required Actions" in told[0][1]


def test_a_deadline_is_counted_from_when_the_run_was_first_queued(
    tmp_path: Path, parse: Callable[..., Any], dag: Any
) -> None:
    """Not from its logical date, which for a daily run lies a day back, and for a backfill far in the past.

    Nor by Airflow's own reference: with it, clearing a task before the deadline fails (`first_queued`).
    """
    import shutil

    from airflow.serialization.decoders import decode_deadline_alert
    from airflow.serialization.encoders import encode_deadline_alert

    folder = shutil.copytree(ROOT / "dags", tmp_path / "dags", ignore=shutil.ignore_patterns("__pycache__"))
    file = Path(folder) / "enrichments" / "review_insights.yaml"
    file.write_text(file.read_text() + "\npublish_within_minutes: 180\n")
    assert load_enrichment(file).publish_within_minutes == 180
    (deadline,) = parse(Path(folder)).dags["review_insights"].deadline
    assert deadline.interval.total_seconds() == 180 * 60
    # The scheduler reads it back by way of the plugin.
    assert decode_deadline_alert(encode_deadline_alert(deadline)).reference.reference_name == "FirstQueued"
    assert deadline.callback.path == "millrace.airflow.alerts.late"
    assert not dag.deadline
