"""A shard that meets no trouble, and one that must not be touched."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.errors import ExitCode
from millrace.lake import Lake
from millrace.plan import PinnedModel
from millrace.proof import prove_shard
from millrace.records import Outcome
from millrace.schemas import ANSWER, schema_differences
from shard_runner.run import WARM_UP
from tests.runner.build import SHARD, Run, build_run
from tests.runner.conftest import Answering, Process
from tests.runner.fake_engine import FakeEngine, right_label

TEXTS = [f"review number {n} about a thing" for n in range(1500)]


def assert_right(run: Run, texts: list[str] = TEXTS, except_for: str = "\0") -> None:
    """Every request of the run is answered once, and with the label of its own text."""
    by_id = {row["request_id"]: row for row in run.answers()}
    assert len(by_id) == len(run.answers()) == len(texts)
    for request in run.lake.parquet(run.shard.files[0].path).read().to_pylist():
        text = json.loads(request["input"])["text"]
        row = by_id[request["request_id"]]
        if except_for not in text:
            assert (row["status"], row["reason"]) == ("ok", None)
            assert json.loads(row["values"]) == {"sentiment": right_label(text)}


def test_every_request_gets_the_answer_to_its_own_text(lake: Lake, model: PinnedModel, answer: Answering) -> None:
    run = build_run(lake, TEXTS, model)
    code, message = answer(run)
    assert code == ExitCode.COMPLETE, message
    assert_right(run)
    done = prove_shard(lake, run.paths, run.shard)
    assert (done.requests, done.statuses, done.reasons, done.resumed) == (1500, {"ok": 1500}, {}, 0)
    assert done.tokens.prompt > 0
    assert done.engine["engine"] == "fake"
    row = run.answers()[0]
    assert row["model"] == model.name
    assert row["revision"] == model.digest
    assert row["plan_id"] == run.plan.plan_id
    assert row["fingerprint"] == run.shard.fingerprint
    assert row["asked"] == 1
    assert row["answered_at"].tzinfo is not None
    assert not schema_differences(ANSWER, lake.parquet(done.answers.path).schema_arrow)


def test_golden_prompts_warm_the_engine_up_and_count_for_nothing_else(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Callable[..., None], tmp_path: Path
) -> None:
    fake(asked_log=str(tmp_path / "asked"))
    run = build_run(lake, TEXTS[:20], model, golden=[{"text": f"golden {n} <|im_end|>"} for n in range(20)])
    assert answer(run)[0] == ExitCode.COMPLETE
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:WARM_UP] == [f"golden-{n + 1}" for n in range(WARM_UP)]
    assert set(asked[WARM_UP:]) == {row["request_id"] for row in run.answers()}
    assert len(asked) == WARM_UP + 20
    done = run.completion()
    assert (done.requests, done.tokens.prompt) == (20, sum(row["prompt_tokens"] for row in run.answers()))
    assert "texts_neutralised" not in done.engine
    assert_right(run, TEXTS[:20])


def test_the_outcome_of_an_attempt_is_recorded(lake: Lake, model: PinnedModel, answer: Answering) -> None:
    run = build_run(lake, TEXTS[:10], model)
    answer(run, "a1")
    outcome = Outcome.load(lake, f"{run.paths.shard_attempt(SHARD, 'a1')}/outcome.json")
    assert (outcome.exit_code, outcome.answered) == (0, 10)


def test_a_complete_shard_is_left_alone_and_loads_no_model(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Callable[..., None]
) -> None:
    run = build_run(lake, TEXTS[:10], model)
    answer(run, "a1")
    before = run.completion()
    fake(no_start=True)
    code, message = answer(run, "a2")
    assert (code, FakeEngine.opened) == (ExitCode.COMPLETE, 0)
    assert "nothing to do" in message
    assert run.completion() == before


def test_a_complete_shard_costs_a_process_no_engine_and_no_library_of_one(
    lake: Lake, model: PinnedModel, answer: Answering, process: Process
) -> None:
    run = build_run(lake, TEXTS[:10], model)
    answer(run)
    done = process(run, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "shard_runner.run" in imported
    assert not imported & {"vllm", "torch", "transformers", "xgrammar"}


def test_a_shard_without_requests_completes_without_an_engine(
    lake: Lake, model: PinnedModel, answer: Answering
) -> None:
    run = build_run(lake, [], model)
    assert answer(run)[0] == ExitCode.COMPLETE
    assert (run.completion().requests, run.answers(), FakeEngine.opened) == (0, [], 0)


def test_a_shard_that_the_manifest_does_not_have_is_a_configuration_error(
    lake: Lake, model: PinnedModel, answer: Answering
) -> None:
    code, message = answer(build_run(lake, TEXTS[:2], model), shard="nope")
    assert code == ExitCode.CONFIG
    assert "nope" in message


def test_a_shard_file_of_another_size_is_refused_before_the_model_loads(
    lake: Lake, model: PinnedModel, answer: Answering
) -> None:
    run = build_run(lake, TEXTS[:20], model)
    path = run.shard.files[0].path
    lake.write(path, lake.read(path) + b"x")
    code, message = answer(run)
    assert (code, FakeEngine.opened) == (ExitCode.CONFIG, 0)
    assert path in message


def test_a_doubled_request_in_a_shard_is_refused(lake: Lake, model: PinnedModel, answer: Answering) -> None:
    run = build_run(lake, [*TEXTS[:5], TEXTS[0]], model)
    code, message = answer(run)
    assert (code, FakeEngine.opened) == (ExitCode.CONFIG, 0)
    assert "5 different ids" in message


def test_a_changed_model_folder_is_refused(
    lake: Lake, model: PinnedModel, answer: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_run(lake, TEXTS[:5], model.model_copy(update={"digest": "0" * 64}))
    code, message = answer(run)
    assert (code, FakeEngine.opened) == (ExitCode.CONFIG, 0)
    assert "model" in message


def test_no_word_of_a_row_reaches_log_or_records(
    lake: Lake, model: PinnedModel, answer: Answering, fake: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Not even where the engine quotes the row in what it raises."""
    fake(raise_on="POISON", refuse_on="REFUSED", garble_on="GARBLED")
    caplog.set_level(logging.DEBUG)
    secret = "xylophone"
    run = build_run(
        lake, [f"{secret} {word} {n}" for n, word in enumerate(["POISON", "REFUSED", "GARBLED", *"abcdef"])], model
    )
    code, message = answer(run)
    assert code == ExitCode.COMPLETE
    records = [
        lake.read(f.path) for f in lake.list(run.paths.root) if f.path.endswith(("complete.json", "outcome.json"))
    ]
    for text in [caplog.text, message, *(record.decode() for record in records)]:
        assert secret not in text
