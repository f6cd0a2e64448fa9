"""The whole graph on the real parts: real reviews, Spark, vLLM and the demo model, Delta, PostgreSQL, Airflow."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil
import pyarrow.parquet as pq

from tests.e2e.conftest import DEMO, ENRICHMENT, ROWS, SECOND, Checkout

STEPS = [
    "plan",
    "check_source",
    "preflight",
    "extract",
    "approve_budget",
    "infer 1",
    "join_back",
    "validate",
    "publish",
]


def source_rows(checkout: Checkout, partition: str) -> dict[str, str]:
    table = pq.read_table(
        checkout.lake.uri(f"source/product_reviews/dt={partition}/part-00000.parquet"), partitioning=None
    )
    return dict(zip(table["comment_id"].to_pylist(), table["comment_text"].to_pylist(), strict=True))


def assert_published_whole(checkout: Checkout, partition: str) -> None:
    """Every source row once, with an answer or the reason why there is none."""
    rows = checkout.published(partition)
    assert sorted(row["comment_id"] for row in rows) == sorted(map(str, source_rows(checkout, partition)))
    for row in rows:
        if row["answer_status"] == "ok":
            assert row["sentiment"] in ("positive", "neutral", "negative")
        else:
            assert row["answer_reason"] and row["sentiment"] is None


def test_the_demo_publishes_every_row(checkout: Checkout, demo: str) -> None:
    assert_published_whole(checkout, DEMO)


def test_the_terminal_shows_each_step_and_ends_with_the_report(checkout: Checkout, demo: str) -> None:
    lines = demo.splitlines()
    shown = [line.strip() for line in lines if " s  " in line]
    assert [line[: len(step)] for line, step in zip(shown, [*STEPS, "report"], strict=True)] == [*STEPS, "report"]
    report = next(line.removeprefix("report: ") for line in lines if line.startswith("report: "))
    assert os.path.getsize(report) > 1000


def test_no_row_text_reaches_logs_or_reports(checkout: Checkout, demo: str) -> None:
    texts = [text for text in source_rows(checkout, DEMO).values() if len(text) > 40]
    run = checkout.run_of(DEMO)
    said = [checkout.lake.read(path).decode() for path in checkout.files(f"{run.root}/reports")]
    said += [file.read_text(errors="replace") for file in checkout.site.logs.rglob("*.log")]
    assert said and texts
    assert [text for text in texts if any(text in page for page in said)] == []


def test_a_second_run_of_a_date_asks_nothing_and_starts_no_engine(checkout: Checkout, demo: str) -> None:
    before = checkout.files("answers"), checkout.files(f"{checkout.run_of(DEMO).root}/shards")
    log = checkout.site.logs / f"run-{ENRICHMENT}.log"
    read = log.stat().st_size
    checkout.millrace("run", ENRICHMENT, "--partition", DEMO)
    assert (checkout.files("answers"), checkout.files(f"{checkout.run_of(DEMO).root}/shards")) == before
    logged = log.read_text(errors="replace")[read:]
    assert "no engine started" in logged and "Loading safetensors" not in logged
    assert "Spark-Submit cmd" not in logged
    newest = checkout.claims()[0]
    assert newest.counts["rows"] > 0 and newest.counts["requests_answered"] == newest.tokens["prompt"] == 0
    assert_published_whole(checkout, DEMO)


def runner_of(process: psutil.Process, deadline_seconds: float = 420) -> psutil.Process:
    """The shard's runner below a `millrace run`, once there is one."""
    deadline = time.monotonic() + deadline_seconds
    while time.monotonic() < deadline:
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                command = child.cmdline()
                if "run" in command and any(part.endswith("shard-runner") for part in command):
                    return child
        time.sleep(0.1)
    raise AssertionError("no shard runner was started")


def test_a_run_that_is_killed_twice_publishes_what_an_undisturbed_one_would(checkout: Checkout, demo: str) -> None:
    """First all of it is killed while a shard is at work, then, in the next run, only the shard's runner."""
    killed = checkout.start("run", ENRICHMENT, "--partition", SECOND)
    runner = runner_of(psutil.Process(killed.pid))
    killed.kill()
    killed.communicate()
    runner.wait(timeout=90)

    again = checkout.start("run", ENRICHMENT, "--partition", SECOND)
    runner_of(psutil.Process(again.pid)).send_signal(signal.SIGKILL)
    said, _ = again.communicate(timeout=600)
    assert again.returncode == 0, said
    assert "tries again" in said
    assert_published_whole(checkout, SECOND)
    assert len(checkout.published(DEMO)) == ROWS
    states = [claim.state for claim in checkout.claims() if claim.partition == SECOND]
    assert states == ["success", "superseded"]


def test_a_date_that_the_source_does_not_have_fails_before_anything_starts(checkout: Checkout, demo: str) -> None:
    process = checkout.start("run", ENRICHMENT, "--partition", "2025-01-01")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "2025-01-01" in said and "check_source" not in said
    assert checkout.published("2025-01-01") == []
