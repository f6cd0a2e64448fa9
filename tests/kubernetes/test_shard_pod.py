"""One shard as a pod: green by its record alone, and one outcome for each way in which a pod can end."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import structlog

from millrace.airflow.retries import POLICY, CrashedError, GaveUpError, ReclaimedError
from millrace.errors import (
    ConfigError,
    IncompleteError,
    RefusedError,
    StoppedError,
    UnavailableError,
    UnusableError,
)
from tests.kubernetes.cluster import Pod
from tests.kubernetes.conftest import Bench
from tests.runner.build import SHARD

both_waits = pytest.mark.parametrize("deferrable", [True, False], ids=["deferred", "in the worker"])


def what_next(error: BaseException) -> tuple[str, float | None]:
    """What Airflow does after an exception: the action, and its delay in seconds where the policy sets one."""
    decision = POLICY.evaluate(error, 1, 50)
    return decision.action.value, None if decision.retry_delay is None else decision.retry_delay.total_seconds()


@both_waits
def test_a_shard_is_answered_by_a_pod_and_proved(bench: Bench, deferrable: bool) -> None:
    bench.shard(deferrable=deferrable)
    assert bench.run.completion().statuses == {"ok": 30}
    (pod,) = bench.cluster.created
    assert pod.container["args"][:5] == ["run", "--run", bench.run.paths.root, "--shard", SHARD]
    assert bench.run.completion().attempt == pod.container["args"][6] == pod.labels["millrace/attempt"]


def test_a_pod_says_whose_it_is(bench: Bench) -> None:
    bench.shard()
    (pod,) = bench.cluster.created
    assert pod.name.startswith(f"millrace-tiny-{SHARD}-")
    wanted = {
        "app.kubernetes.io/part-of": "millrace",
        "app.kubernetes.io/component": "infer",
        "millrace/enrichment": "tiny",
        "millrace/partition": "2026-03-02",
        "millrace/plan": bench.run.plan.plan_id[:16],
        "millrace/shard": SHARD,
    }
    assert wanted.items() <= pod.labels.items()


def test_a_finished_pod_is_deleted(bench: Bench) -> None:
    bench.shard()
    assert all(pod.manifest["metadata"].get("deletionTimestamp") for pod in bench.cluster.pods)


def test_a_pod_pushes_nothing_through_xcom_but_its_name(bench: Bench) -> None:
    bench.shard()
    assert set(bench.pushed) == {"pod_name", "pod_namespace"}
    assert len(bench.cluster.created[0].manifest["spec"]["containers"]) == 1


def test_the_pods_log_is_in_the_tasks_log(bench: Bench) -> None:
    with structlog.testing.capture_logs() as logged:
        bench.shard()
    text = "\n".join(str(entry) for entry in logged)
    assert f"shard {SHARD} complete: 30 requests" in text
    assert "review number" not in text


def test_a_complete_shard_starts_no_pod(bench: Bench) -> None:
    bench.shard()
    bench.shard(try_number=2)
    assert len(bench.cluster.created) == 1


@both_waits
def test_a_green_pod_without_a_record_is_red(bench: Bench, deferrable: bool) -> None:
    bench.tell("liar")
    with pytest.raises(IncompleteError, match=SHARD) as raised:
        bench.shard(deferrable=deferrable)
    assert what_next(raised.value)[0] == "fail"


@both_waits
def test_a_record_counts_though_the_pod_ended_badly(bench: Bench, deferrable: bool) -> None:
    """As when the node goes while the engine is being shut down."""
    bench.misbehave(hang_on_close=True)
    bench.meanwhile(bench.cluster.vanish, word="complete")
    bench.shard(deferrable=deferrable)
    assert bench.run.completion().statuses == {"ok": 30}


@both_waits
@pytest.mark.parametrize(
    ("how", "error", "action", "delay"),
    [
        ("2", ConfigError, "fail", None),
        ("3", UnavailableError, "retry", 300.0),
        ("4", UnusableError, "fail", None),
        ("75", StoppedError, "retry", 0.0),
        ("1", CrashedError, "default", None),
        ("kill", ReclaimedError, "retry", 0.0),
    ],
)
def test_the_runners_exit_code_is_the_tasks_outcome(
    bench: Bench, how: str, error: type[Exception], action: str, delay: float | None, deferrable: bool
) -> None:
    bench.tell(how)
    with pytest.raises(error, match=SHARD) as raised:
        bench.shard(deferrable=deferrable)
    assert type(raised.value) is error
    assert what_next(raised.value) == (action, delay)


def test_the_message_of_a_failed_shard_is_one_line_with_the_runners_last_word(bench: Bench) -> None:
    bench.misbehave(no_start=True)
    with pytest.raises(UnavailableError) as raised:
        bench.shard()
    message = str(raised.value)
    assert "did not find enough memory" in message
    assert "node-1" in message
    assert "\n" not in message


@both_waits
@pytest.mark.parametrize(
    ("fate", "why"),
    [("evict", "Evicted"), ("preempt", "PreemptionByScheduler|is gone"), ("vanish", "is gone"), ("kill", "killed")],
)
def test_a_pod_that_is_taken_away_is_retried_at_once(bench: Bench, fate: str, why: str, deferrable: bool) -> None:
    bench.tell("wait")
    bench.meanwhile(getattr(bench.cluster, fate), word="at work")
    with pytest.raises((ReclaimedError, StoppedError), match=why) as raised:
        bench.shard(deferrable=deferrable)
    assert what_next(raised.value) == ("retry", 0.0)


def test_a_pod_whose_node_has_gone_silent_is_given_up(bench: Bench) -> None:
    """It says Terminating for ever, and Running is its phase."""
    bench.tell("wait")
    bench.meanwhile(bench.cluster.silence_node, word="at work")
    with pytest.raises(ReclaimedError, match="taken away"):
        bench.shard()


def test_pods_that_are_taken_away_never_count_as_failures(bench: Bench) -> None:
    bench.tell("wait")
    for number in range(1, 6):
        bench.meanwhile(bench.cluster.evict, word="at work", pods=number)
        with pytest.raises(ReclaimedError):
            bench.shard(try_number=number)
    bench.misbehave()
    bench.shard(try_number=6)


def test_what_an_evicted_pod_had_answered_is_not_asked_again(bench: Bench) -> None:
    log = bench.templates.parent / "asked"
    bench.misbehave(term_at_answer=12, asked_log=str(log))
    with pytest.raises(StoppedError, match="answers of this attempt are saved"):
        bench.shard()
    bench.misbehave(asked_log=str(log))
    bench.shard(try_number=2)
    done = bench.run.completion()
    assert done.statuses == {"ok": 30}
    assert done.resumed >= 12
    second = log.read_text().splitlines()
    assert len(second) < 60


@both_waits
def test_running_out_of_memory_is_a_failure_that_names_the_limit(bench: Bench, deferrable: bool) -> None:
    bench.tell("wait")
    bench.meanwhile(bench.cluster.kill_for_memory, word="at work")
    with pytest.raises(CrashedError, match=r"out of memory \(limit 2Gi\)") as raised:
        bench.shard(deferrable=deferrable)
    assert what_next(raised.value)[0] == "default"


def test_running_out_of_memory_again_and_again_ends_the_task(bench: Bench) -> None:
    """Nothing in the pod could record it, so the operator does."""
    bench.tell("wait")
    for number in range(1, 4):
        bench.meanwhile(bench.cluster.kill_for_memory, word="at work", pods=number)
        with pytest.raises(CrashedError):
            bench.shard(try_number=number)
    bench.meanwhile(bench.cluster.kill_for_memory, word="at work", pods=4)
    with pytest.raises(GaveUpError, match="out of memory") as raised:
        bench.shard(try_number=4)
    assert what_next(raised.value)[0] == "fail"


@both_waits
def test_an_image_that_cannot_be_pulled_is_named(bench: Bench, deferrable: bool) -> None:
    bench.cluster.images.clear()
    bench.limit_start(30)
    with pytest.raises(UnavailableError, match=r"image 'millrace/vllm-cpu:test' cannot be pulled") as raised:
        bench.shard(deferrable=deferrable)
    assert what_next(raised.value) == ("retry", 300.0)


@both_waits
def test_a_pod_without_a_node_is_given_up_with_the_schedulers_reason(bench: Bench, deferrable: bool) -> None:
    bench.cluster.no_node = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    bench.limit_start(1)
    with pytest.raises(UnavailableError, match=r"3 Insufficient nvidia\.com/gpu") as raised:
        bench.shard(deferrable=deferrable)
    assert what_next(raised.value) == ("retry", 300.0)
    assert all(pod.manifest["metadata"].get("deletionTimestamp") for pod in bench.cluster.pods)


def test_a_secret_that_does_not_exist_is_a_mistake_of_the_configuration(bench: Bench) -> None:
    bench.edit_template(
        lambda manifest: manifest["spec"]["containers"][0].update(envFrom=[{"secretRef": {"name": "millrace-lake"}}])
    )
    bench.limit_start(1)
    with pytest.raises(ConfigError, match='secret "millrace-lake" not found'):
        bench.shard()


def test_an_init_container_that_fails_its_check_tries_another_node(bench: Bench) -> None:
    check = {"name": "check-device", "image": "check", "terminationMessagePolicy": "FallbackToLogsOnError"}
    bench.cluster.images["check"] = ["sh", "-c", "echo 'GPU 0 does not add up'; exit 3"]
    bench.edit_template(lambda manifest: manifest["spec"].update(initContainers=[check]))
    with pytest.raises(UnavailableError, match="'check-device' failed: GPU 0 does not add up"):
        bench.shard()


def test_a_pod_that_exceeds_the_tasks_time_is_ended_and_tried_again(bench: Bench) -> None:
    bench.tell("wait")
    with pytest.raises(CrashedError, match="execution_timeout"):
        bench.shard(execution=timedelta(seconds=2))
    assert all(pod.manifest["metadata"].get("deletionTimestamp") for pod in bench.cluster.pods)


def test_a_lost_api_server_fails_the_try_but_not_the_pod(bench: Bench) -> None:
    bench.tell("wait")

    def cut(_: object) -> None:
        bench.cluster.silent = True

    bench.meanwhile(cut, word="at work")
    with pytest.raises(UnavailableError, match="API server") as raised:
        bench.shard()
    assert what_next(raised.value) == ("retry", 300.0)
    (pod,) = bench.cluster.created
    assert pod.process is not None
    assert pod.process.returncode is None


def test_the_next_try_goes_on_with_a_pod_that_is_still_at_work(bench: Bench) -> None:
    """Its model is loaded: a new one would take minutes to get as far."""
    test_a_lost_api_server_fails_the_try_but_not_the_pod(bench)
    bench.cluster.silent = False
    bench.pushed.clear()

    def end_once_adopted(pod: Pod) -> None:
        while "pod_name" not in bench.pushed:
            time.sleep(0.01)
        assert pod.process is not None
        pod.process.terminate()

    bench.meanwhile(end_once_adopted)
    with pytest.raises(StoppedError):
        bench.shard(try_number=2)
    assert len(bench.cluster.created) == 1


def test_after_a_clear_a_pod_from_before_is_ended_and_a_new_one_started(bench: Bench) -> None:
    test_a_lost_api_server_fails_the_try_but_not_the_pod(bench)
    bench.cluster.silent = False
    bench.misbehave()
    bench.shard(try_number=2, max_tries=51)
    first, second = bench.cluster.created
    assert first.manifest["metadata"].get("deletionTimestamp")
    assert bench.run.completion().attempt == second.labels["millrace/attempt"]


def test_an_api_server_that_is_not_there_is_tried_later(bench: Bench) -> None:
    bench.cluster.silent = True
    with pytest.raises(UnavailableError, match="API server"):
        bench.shard()


def test_a_lost_reply_to_the_creation_makes_no_second_pod(bench: Bench) -> None:
    bench.cluster.lose_first_reply = True
    bench.shard()
    assert len(bench.cluster.created) == 1


def test_a_refusal_by_the_api_server_is_not_retried_unless_a_quota_is_spent(bench: Bench) -> None:
    bench.cluster.forbidden = "pods is forbidden: User cannot create resource"
    with pytest.raises(ConfigError, match="cannot create resource"):
        bench.shard()
    bench.cluster.forbidden = "pods is forbidden: exceeded quota: gpus"
    with pytest.raises(UnavailableError, match="exceeded quota"):
        bench.shard()


@both_waits
def test_a_worker_that_is_told_to_stop_never_reports_success(bench: Bench, deferrable: bool) -> None:
    """Airflow's SIGTERM handler calls on_kill and lets the operator run on; KubernetesPodOperator then returns as if all were well."""
    bench.tell("wait")
    bench.meanwhile(lambda pod: bench.operator.on_kill(), word="at work")
    with pytest.raises((ReclaimedError, StoppedError)) as raised:
        if deferrable:
            bench.monkeypatch.setattr("millrace.airflow.kubernetes.RunnerPod.invoke_defer_method", _linger)
        bench.shard(deferrable=deferrable)
    assert what_next(raised.value) == ("retry", 0.0)


def _linger(operator: object, *args: object, **kwargs: object) -> None:
    """The worker is told to stop between starting the pod and handing it to the triggerer."""
    from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator

    while not operator._killed:  # type: ignore[attr-defined]
        time.sleep(0.01)
    KubernetesPodOperator.invoke_defer_method(operator, *args, **kwargs)  # type: ignore[arg-type]


def test_a_stopped_run_starts_no_pod(bench: Bench) -> None:
    from millrace.records import Stop

    bench.lake.write(bench.run.paths.stop, Stop(reason="61 % unusable", by="shard x").dump())
    with pytest.raises(RefusedError, match="61 % unusable"):
        bench.shard()
    assert bench.cluster.created == []


def test_another_dag_run_that_took_the_partition_stops_this_one_before_it_spends(bench: Bench) -> None:
    bench.db.register_run(bench.run.paths.enrichment, bench.run.paths.partition, "manual__later", lambda _: False)
    with pytest.raises(RefusedError, match="manual__later"):
        bench.shard()
    assert bench.cluster.created == []
