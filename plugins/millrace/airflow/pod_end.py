"""How a pod ended, as an exit code and one line: read from what the API server knows of it, optional fields and all.

The codes are those of `retries.error_for`, so pods and processes have one mapping to Airflow's outcomes. What has no exit code gets the
one that stands for the same outcome: a pod that was taken away is a process that was killed, one that could not start is an engine that
is unavailable. docs/kubernetes.md has the table.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millrace.airflow.pod_template import CONTAINER
from millrace.airflow.process import last_word
from millrace.errors import ExitCode

if TYPE_CHECKING:
    from kubernetes.client import V1ContainerStateTerminated, V1Pod

RECLAIMED = -signal.SIGKILL
CRASHED = 1

# Reasons of a whole pod by which a node gives it up. A node that refuses a pod it was given (OutOfcpu, UnexpectedAdmissionError) is
# not among them: it would refuse the next one as fast.
_GIVEN_UP = {"Evicted", "Preempting", "NodeLost", "NodeShutdown", "Shutdown", "Terminated"}
_WRONG_SPEC = {"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"}
_NO_IMAGE = {"ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError"}
_NO_CONTAINER = {"CreateContainerError", "RunContainerError"}
_NEVER_RAN = {"StartError", "ContainerCannotRun"}


@dataclass(frozen=True)
class PodEnd:
    code: int
    why: str


def pod_end(pod: V1Pod | None, name: str, waited: str = "") -> PodEnd:
    """How the pod `name` ended; None stands for one that the API server no longer has. `waited` is what the wait for it came to."""
    if pod is None or pod.status is None:
        return PodEnd(RECLAIMED, f"pod {name} is gone: it was deleted, or its node was")
    taken = _taken_away(pod)
    where = f"pod {name}" + (f" on node {pod.spec.node_name}" if pod.spec and pod.spec.node_name else "")
    if done := terminated(pod):
        return _of_container(pod, done, where, taken)
    for status in pod.status.init_container_statuses or []:
        ended = status.state.terminated if status.state else None
        if ended and ended.exit_code:
            return _of_init_container(status.name, ended, where, taken)
    if taken:
        return PodEnd(RECLAIMED, f"{where} was taken away: {taken}")
    if held_up := _stuck(pod, where) or _without_node(pod, where):
        return held_up
    if pod.status.phase == "Failed":
        said = ": ".join(filter(None, [pod.status.reason, pod.status.message])) or "no reason given"
        code = CRASHED if pod.status.reason == "DeadlineExceeded" else ExitCode.UNAVAILABLE
        return PodEnd(code, f"{where} failed: {said}")
    code = ExitCode.UNAVAILABLE if pod.status.phase == "Pending" else CRASHED
    return PodEnd(code, f"{where} is still {pod.status.phase}: {waited or 'the wait for it ended'}")


def terminated(pod: V1Pod) -> V1ContainerStateTerminated | None:
    """The end of the runner's container, None while it has none."""
    for status in pod.status.container_statuses or []:
        if status.name == CONTAINER and status.state:
            return status.state.terminated
    return None


def has_started(pod: V1Pod) -> bool:
    """Whether the runner's container has run, so that there may be a log."""
    statuses = pod.status.container_statuses or []
    return any(s.name == CONTAINER and s.state and (s.state.running or s.state.terminated) for s in statuses)


def is_at_work(pod: V1Pod) -> bool:
    """Whether the pod may still answer: neither ended nor on its way out."""
    going = pod.status is not None and pod.status.phase in ("Pending", "Running")
    return going and not terminated(pod) and not _taken_away(pod) and not _stuck(pod, "")


def _of_container(pod: V1Pod, done: Any, where: str, taken: str) -> PodEnd:
    last = _last_line(done.message)
    if done.reason == "OOMKilled":
        limits = pod.spec.containers[0].resources.limits if pod.spec.containers[0].resources else None
        limit = (limits or {}).get("memory", "none")
        return PodEnd(
            CRASHED,
            f"{where} ran out of memory (limit {limit}). Give the model more (`resources`, memory), or let the engine take less",
        )
    if done.reason in _NEVER_RAN:
        return PodEnd(ExitCode.UNAVAILABLE, f"{where}: the container could not start: {last or done.reason}")
    if done.exit_code in (128 + signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGINT):
        return PodEnd(RECLAIMED, f"{where} was killed: {taken or f'exit code {done.exit_code}'}")
    said = last or f"the runner ended with {done.exit_code}"
    return PodEnd(done.exit_code, f"{where}: {said}" + (f" ({taken})" if taken else ""))


def _of_init_container(name: str, ended: Any, where: str, taken: str) -> PodEnd:
    if taken:
        return PodEnd(RECLAIMED, f"{where} was taken away: {taken}")
    # Whatever it checks, another node may pass.
    code = ended.exit_code if ended.exit_code == ExitCode.CONFIG else ExitCode.UNAVAILABLE
    said = _last_line(ended.message) or ended.reason or f"exit code {ended.exit_code}"
    return PodEnd(code, f"{where}: init container '{name}' failed: {said}")


def _taken_away(pod: V1Pod) -> str:
    """Why the cluster took the pod away; empty when it did not."""
    for condition in pod.status.conditions or []:
        if condition.type == "DisruptionTarget" and condition.status == "True":
            return ": ".join(filter(None, [condition.reason, condition.message]))
    if pod.status.reason in _GIVEN_UP:
        return ": ".join(filter(None, [pod.status.reason, pod.status.message]))
    return "it was deleted" if pod.metadata.deletion_timestamp else ""


def _stuck(pod: V1Pod, where: str) -> PodEnd | None:
    """What keeps a container of the pod from starting, None when nothing is known to."""
    for status in [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]:
        waiting = status.state.waiting if status.state else None
        reason = waiting.reason if waiting else None
        said = f"{reason}: {waiting.message}" if waiting and waiting.message else reason
        if reason in _WRONG_SPEC:
            return PodEnd(
                ExitCode.CONFIG, f"{where} cannot start: {said}. Correct the pod template or the image's name"
            )
        if reason in _NO_IMAGE:
            return PodEnd(ExitCode.UNAVAILABLE, f"{where}: image '{status.image}' cannot be pulled: {said}")
        if reason in _NO_CONTAINER:
            return PodEnd(ExitCode.UNAVAILABLE, f"{where}: the container could not start: {said}")
    return None


def _without_node(pod: V1Pod, where: str) -> PodEnd | None:
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            said = ": ".join(filter(None, [condition.reason, condition.message]))
            return PodEnd(ExitCode.UNAVAILABLE, f"{where} found no node: {said or 'no reason given'}")
    return None


def _last_line(message: str | None) -> str:
    """The runner's last word in a termination message, which holds the end of the log (terminationMessagePolicy); else its last line."""
    lines = [line.strip() for line in (message or "").splitlines() if line.strip()]
    words = [word for line in lines if (word := last_word(line))]
    return [*lines[-1:], *words][-1][:1000] if lines else ""
