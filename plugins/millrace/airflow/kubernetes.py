"""Backend `kubernetes`: preflight and shards as pods. docs/kubernetes.md says what each way to end means.

A pod's colour proves nothing. What it left in the lake decides, on each of the ways on which Airflow learns that a pod has ended: after
the wait of an operator that is not deferrable, after a trigger's event, and after a SIGTERM to the worker, which makes
KubernetesPodOperator delete its pod and return as if all were well.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.providers.cncf.kubernetes.pod_generator import make_safe_label_value
from airflow.providers.cncf.kubernetes.triggers.pod import ContainerState, KubernetesPodTrigger
from airflow.providers.common.compat.sdk import AirflowException
from kubernetes.client import ApiException
from kubernetes.config import ConfigException
from urllib3.exceptions import HTTPError

from millrace.airflow.operators import ShardTries, _claimed, _open, find_shard, is_complete, prove
from millrace.airflow.pod_end import RECLAIMED, PodEnd, has_started, is_at_work, pod_end
from millrace.airflow.pod_template import CONTAINER, PodTemplate, template_for
from millrace.airflow.retries import error_for
from millrace.airflow.tasks import check_claim, step_log
from millrace.errors import ConfigError, ExitCode, MillraceError, UnavailableError

if TYPE_CHECKING:
    from kubernetes.client import V1Pod

    from millrace.lake import Lake
    from millrace.layout import RunPaths
    from millrace.plan import PinnedModel
    from millrace.records import ShardEntry

# A pod on a node that no longer answers stays "Terminating" for ever; so long after its grace period it is given up.
LOST_AFTER = timedelta(seconds=60)
# How often a pod is looked at, and its new log lines are fetched. A thousand pods make a hundred requests a second.
POLL_SECONDS = 10
LOG_SECONDS = 60


class PodTrigger(KubernetesPodTrigger):
    """Airflow's trigger, which would wait until the task's time limit for a pod whose node has gone silent."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__qualname__}", super().serialize()[1]

    def define_pod_container_state(self, pod: V1Pod) -> ContainerState:
        ends_at = pod.metadata.deletion_timestamp
        if ends_at and datetime.now(UTC) > ends_at + LOST_AFTER:
            return ContainerState.FAILED
        return super().define_pod_container_state(pod)


class RunnerPod(KubernetesPodOperator):
    """Runs `shard-runner` in a pod made from its model's template, and judges how that ended by what is in the lake.

    Subclasses name the pod's task (`component`), set the pod up (`describe`), and say what its end means (`settle`).
    """

    component: str
    template_fields: tuple[str, ...] = ()

    def __init__(self, *, deferrable: bool = True, poll_interval: float = POLL_SECONDS, **kwargs: Any) -> None:
        super().__init__(
            deferrable=deferrable,
            poll_interval=poll_interval,
            logging_interval=LOG_SECONDS,
            base_container_name=CONTAINER,
            container_name_log_prefix_enabled=False,
            # The end of the log comes with the pod's status: a log may be gone when the task resumes.
            termination_message_policy="FallbackToLogsOnError",
            random_name_suffix=False,
            # Found by the shard's labels here, never by the map index, which another extract gives to another shard.
            durable=False,
            do_xcom_push=False,
            log_pod_spec_on_failure=False,
            on_finish_action="delete_pod",
            **kwargs,
        )
        self._attempt = ""
        self._last_seen: V1Pod | None = None

    @abstractmethod
    def settle(self, context: Any, end: PodEnd) -> None:
        """Return when the task has succeeded; raise what its end means when it has not."""

    def may_adopt(self, attempt: str) -> bool:
        """Whether a pod that is at work may go on as this try's, which saves loading the model again."""
        return False

    # Before the pod

    def describe(
        self, paths: RunPaths, model: PinnedModel, arguments: list[str], attempt: str, shard: str = ""
    ) -> None:
        """Say what pod to start: image, resources and limits from the model's template, identity from the run and shard."""
        template: PodTemplate = template_for(model)
        self.pod_template_dict = template.manifest
        self.image = template.image
        self.schedule_timeout_seconds = template.schedule_seconds
        self.startup_timeout_seconds = template.startup_seconds
        self.arguments = arguments
        self.labels = self._identity(paths, shard) | {"millrace/attempt": attempt}
        self._attempt = attempt
        # Pods carry the attempt, so that a name is never taken by a pod that is still being deleted.
        subject = re.sub(r"[^a-z0-9]+", "-", f"{paths.enrichment[:24]}-{shard[:12] or self.component}".lower()).strip(
            "-"
        )
        self.name = f"millrace-{subject}-{attempt[:12]}"
        self.trigger_kwargs = {"attempt": attempt}

    def _identity(self, paths: RunPaths, shard: str) -> dict[str, str]:
        """Labels that tell whose pod it is, each a valid label value."""
        values = {
            "app.kubernetes.io/part-of": "millrace",
            "app.kubernetes.io/component": self.component,
            "millrace/enrichment": paths.enrichment,
            "millrace/partition": paths.partition,
            "millrace/plan": paths.plan_id[:16],
        }
        if shard:
            values["millrace/shard"] = shard
        return {key: make_safe_label_value(value) for key, value in values.items()}

    def start(self, context: Any) -> None:
        """Start the pod and wait for it, here or (deferrable) in the triggerer: then this raises TaskDeferred."""
        with cluster_errors():
            waited = ""
            try:
                super().execute(context)
            except (AirflowException, ApiException) as error:
                vanished = isinstance(error, ApiException) and error.status == 404 and self.pod is not None
                if self.deferrable or not (vanished or isinstance(error, AirflowException)):
                    raise
                waited = str(error).splitlines()[0]
            if self.deferrable:
                return  # the pod had ended before the wait began: `trigger_reentry` has settled it
        self.settle(context, self._end(self._last_seen, waited))

    def get_or_create_pod(self, pod_request_obj: V1Pod, context: Any) -> V1Pod:
        """The pod of this try. Deleted again at once where the worker was told to stop before `on_kill` could know of it."""
        self.pod = self._adopt_or_create(pod_request_obj)
        if self._killed:
            self.on_kill()
        return self.pod

    def _adopt_or_create(self, pod_request_obj: V1Pod) -> V1Pod:
        """Start a pod, after what earlier tries left behind is asked to end; or go on with a pod that is still at work."""
        metadata = pod_request_obj.metadata
        own = {key: value for key, value in self.labels.items() if key != "millrace/attempt"}
        selector = ",".join(f"{key}={value}" for key, value in sorted(own.items()))
        adopted: V1Pod | None = None
        for pod in self.client.list_namespaced_pod(namespace=metadata.namespace, label_selector=selector).items:
            attempt = (pod.metadata.labels or {}).get("millrace/attempt", "")
            if adopted is None and is_at_work(pod) and self.may_adopt(attempt):
                adopted = pod
            elif not pod.metadata.deletion_timestamp:
                self.log.info("deleting pod %s, which an earlier try left behind", pod.metadata.name)
                self.pod_manager.delete_pod(pod)
        if adopted is not None:
            self.log.info("pod %s of an earlier try is at work; going on with it", adopted.metadata.name)
            self._attempt = adopted.metadata.labels["millrace/attempt"]
            self.labels["millrace/attempt"] = self._attempt
            self.trigger_kwargs = {"attempt": self._attempt}
            return adopted
        try:
            return self.pod_manager.create_pod(pod=pod_request_obj)
        except ApiException as error:
            if error.status != 409:
                raise
            # The reply to the first request was lost, and the client asked again: the pod of that name is this one.
            return self.client.read_namespaced_pod(metadata.name, metadata.namespace)

    def defer(self, *, trigger: Any, **kwargs: Any) -> NoReturn:
        super().defer(trigger=PodTrigger(**trigger.serialize()[1]), **kwargs)

    # After it

    def trigger_reentry(self, context: Any, event: dict[str, Any]) -> None:
        """Go on after the trigger's event. What the event says is a hint; the pod and the lake are asked."""
        self._attempt = event.get("attempt", "")
        with cluster_errors():
            pod = self._read_pod(event["name"], event["namespace"])
            self.pod = pod
            if pod is not None and event["status"] == "error" and is_at_work(pod):
                self._watch_on(context, event)
            end = self._end(pod, str(event.get("message") or ""), event["name"])
            if pod is None and event["status"] == "success":
                end = PodEnd(ExitCode.COMPLETE, f"pod {event['name']} had ended well before it was removed")
            try:
                if pod is not None and has_started(pod):
                    self._write_logs(pod, since_time=event.get("last_log_time"))
            except (ApiException, HTTPError) as error:
                self.log.info("the rest of the log cannot be read (%s)", type(error).__name__)
            finally:
                if pod is not None:
                    self.process_pod_deletion(pod, reraise=False)
        self.settle(context, end)

    def _watch_on(self, context: Any, event: dict[str, Any]) -> None:
        """Defer again while the pod is at work and the trigger failed. The API server's troubles are not the pod's."""
        times = event.get("_redefer_count", 0)
        if times >= self.MAX_REDEFER_ATTEMPTS:
            raise UnavailableError(
                f"pod {event['name']} is at work, but cannot be watched: {event.get('message')}. The next try goes on with it."
            )
        self.log.info("pod %s is at work; watching on (%s)", event["name"], event.get("message"))
        self.trigger_kwargs = {"attempt": self._attempt, "_redefer_count": times + 1}
        self.invoke_defer_method(last_log_time=event.get("last_log_time"), context=context)

    def cleanup(self, pod: V1Pod, remote_pod: V1Pod, *args: Any, **kwargs: Any) -> None:
        """Look at the pod once more before it is deleted; Airflow's own last look may be from before it started."""
        self._last_seen = self._read_pod(pod.metadata.name, pod.metadata.namespace) if pod else None
        super().cleanup(pod, remote_pod, *args, **kwargs)

    def _read_pod(self, name: str, namespace: str) -> V1Pod | None:
        try:
            return self.hook.get_pod(name, namespace)
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def _end(self, pod: V1Pod | None, waited: str, name: str | None = None) -> PodEnd:
        end = pod_end(pod, name or str(self.name), waited)
        if self._killed and end.code != ExitCode.COMPLETE:
            return PodEnd(RECLAIMED, f"the worker was told to stop, so its pod was deleted ({end.why})")
        return end


class PreflightPod(RunnerPod):
    """Asks whether the model can answer, before anything is spent: `shard-runner probe`, which starts no engine while a verdict stands."""

    component = "preflight"

    def execute(self, context: Any) -> None:
        from millrace.layout import new_attempt
        from millrace.plan import Plan

        lake, paths = _claimed(context)
        decision = Plan.read(lake, paths).decision
        model = decision.models[decision.default_model]
        self.describe(paths, model, ["probe", "--run", paths.root], new_attempt())
        self.start(context)

    def settle(self, context: Any, end: PodEnd) -> None:
        _, paths = _open(context)
        if end.code != ExitCode.COMPLETE:
            raise error_for(end.code, f"preflight of {paths.root}: {end.why}")
        step_log.info("%s", end.why)


class ShardPod(RunnerPod):
    """Has one shard answered. Green only when the shard's completion record exists and its counts match the manifest's."""

    component = "infer"
    template_fields = ("shard_id",)

    def __init__(self, *, shard_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shard_id = shard_id
        self._tries: ShardTries | None = None

    def execute(self, context: Any) -> None:
        from millrace.plan import Plan

        lake, paths, shard = self._shard(context)
        was_complete = is_complete(lake, paths, shard)
        if not was_complete:
            check_claim(paths.root, context["dag_run"].run_id)
            self._tries = ShardTries(lake, paths, self.shard_id, context, self.retries or 0)
            self._tries.refuse_if_stopped()
            attempt = self._tries.attempt
            arguments = ["run", "--run", paths.root, "--shard", self.shard_id, "--attempt", attempt]
            model = Plan.read(lake, paths).decision.models[shard.model]
            self.describe(paths, model, arguments, attempt, self.shard_id)
            self.start(context)
        prove(lake, paths, shard, asked=not was_complete)

    def may_adopt(self, attempt: str) -> bool:
        return self._tries is not None and self._tries.is_current(attempt)

    def settle(self, context: Any, end: PodEnd) -> None:
        lake, paths, shard = self._shard(context)
        if end.code != ExitCode.COMPLETE and not is_complete(lake, paths, shard):
            tries = ShardTries(lake, paths, self.shard_id, context, self.retries or 0)
            tries.attempt = self._attempt or tries.attempt
            raise tries.outcome_of(end.code, end.why)
        prove(lake, paths, shard)

    def _shard(self, context: Any) -> tuple[Lake, RunPaths, ShardEntry]:
        lake, paths = _open(context)
        return lake, paths, find_shard(lake, paths, self.shard_id)


@contextmanager
def cluster_errors() -> Iterator[None]:
    """Turn the Kubernetes client's errors into ours: who can help, and whether retrying does."""
    try:
        yield
    except ApiException as error:
        raise api_error(error) from error
    except HTTPError as error:
        raise UnavailableError(
            f"the Kubernetes API server does not answer ({type(error).__name__}). A pod that is at work goes on; the next try finds it."
        ) from error
    except ConfigException as error:
        raise ConfigError(
            f"no Kubernetes cluster is configured: {error}. Set the connection kubernetes_default or KUBECONFIG."
        ) from error


def api_error(error: ApiException) -> MillraceError:
    """What a refusal of the API server means. One that a person must mend is not retried; a spent quota frees itself."""
    try:
        said = str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        said = str(error.reason)
    message = f"the Kubernetes API server refused ({error.status}): {said[:500]}"
    if error.status in (400, 403, 404, 422) and "exceeded quota" not in said:
        return ConfigError(f"{message}. Correct the pod template, the namespace or the role (deploy/kubernetes/).")
    return UnavailableError(message)
