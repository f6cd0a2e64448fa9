"""Preflight as a pod: the probe's end is the task's end, and a worker that is told to stop has proved nothing."""

from __future__ import annotations

import pytest

from millrace.airflow.retries import ReclaimedError
from millrace.errors import ConfigError, UnavailableError, UnusableError
from tests.kubernetes.cluster import Cluster, Pod
from tests.kubernetes.conftest import Bench


def probe(bench: Bench, deferrable: bool = True) -> None:
    from millrace.airflow.kubernetes import PreflightPod

    bench.operator = PreflightPod(
        task_id="preflight",
        deferrable=deferrable,
        poll_interval=0.05,
        startup_check_interval_seconds=0.05,
        base_container_status_polling_interval=0.05,
    )
    bench.drive(bench.operator, bench.context())


@pytest.mark.parametrize("deferrable", [True, False], ids=["deferred", "in the worker"])
def test_a_model_that_passes_makes_preflight_green(bench: Bench, deferrable: bool) -> None:
    bench.tell("0")
    probe(bench, deferrable)
    (pod,) = bench.cluster.created
    assert pod.container["args"] == ["probe", "--run", bench.run.paths.root]
    assert pod.labels["app.kubernetes.io/component"] == "preflight"


@pytest.mark.parametrize(("how", "error"), [("2", ConfigError), ("3", UnavailableError), ("4", UnusableError)])
def test_preflight_ends_as_the_probe_does(bench: Bench, how: str, error: type[Exception]) -> None:
    bench.tell(how)
    with pytest.raises(error, match="preflight of runs/tiny"):
        probe(bench)


@pytest.mark.parametrize("request_under_way", ["POST", "GET"], ids=["the pod is created", "the pod is looked at"])
def test_a_worker_that_is_told_to_stop_has_proved_nothing(bench: Bench, request_under_way: str) -> None:
    """Airflow's signal handler runs on_kill in the middle of whatever the worker was at."""
    bench.cluster.no_node = "0/1 nodes are available"
    bench.monkeypatch.setattr("tests.kubernetes.cluster.Cluster._remove", _at_once)

    def stop(method: str) -> None:
        if method == request_under_way and bench.cluster.pods:
            bench.operator.on_kill()

    bench.cluster.before_reply = stop
    with pytest.raises(ReclaimedError):
        probe(bench, deferrable=False)
    assert bench.cluster.created and not bench.cluster.pods


async def _at_once(cluster: Cluster, pod: Pod, grace: int) -> None:
    """A pod that has no process is gone as soon as it is deleted."""
    cluster._vanish(pod)
