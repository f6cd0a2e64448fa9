"""A Kubernetes API server for tests, small but strict: what it accepts it validates, and each pod's command runs as a process.

It speaks what the real clients and the operator say: pods (create, read, list, watch, patch, delete with grace), their logs (followed or
not), events, and evictions. Status fields appear as a kubelet writes them, so many are absent until they mean something. `Cluster` is the
lever a test pulls: no image, no node, no memory, an eviction, a node that goes silent, an API server that does not answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from aiohttp import web

API_VERSION = "1.36"
GRACE_SECONDS = 30


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Pod:
    manifest: dict[str, Any]
    log: list[tuple[datetime, str]] = field(default_factory=list)
    process: asyncio.subprocess.Process | None = None
    life: asyncio.Task[None] | None = None
    oom: bool = False

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.manifest["status"]
        return status

    @property
    def container(self) -> dict[str, Any]:
        container: dict[str, Any] = self.manifest["spec"]["containers"][0]
        return container

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.manifest["metadata"].get("labels") or {}
        return labels

    @property
    def environment(self) -> dict[str, str]:
        return {variable["name"]: variable.get("value", "") for variable in self.container.get("env") or []}


class Cluster:
    """The server, in a thread of its own, and what a test may do to it. Use as a context manager."""

    def __init__(self, images: dict[str, list[str]], cwd: Path) -> None:
        self.images = images  # image -> the command of its entrypoint
        self.secrets: dict[str, dict[str, str]] = {}
        self.config_maps: dict[str, dict[str, str]] = {}
        self.created: list[Pod] = []  # every pod there ever was
        self.requests: list[tuple[str, str]] = []
        self.no_node = ""  # the scheduler's words, while no node fits
        self.silent = False  # nothing answers
        self.forbidden = ""  # the API server's words, while it refuses to create pods
        self.lose_first_reply = False
        self.before_reply: Callable[[str], object] | None = None  # called with the method of every request
        self._cwd = cwd
        self._pods: dict[str, Pod] = {}
        self._events: list[dict[str, Any]] = []
        self._version = 0
        self._changed: list[asyncio.Queue[dict[str, Any]]] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.port = 0

    # For tests

    def __enter__(self) -> Cluster:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def kubeconfig(self, folder: Path) -> Path:
        file = folder / "kubeconfig"
        cluster = {"name": "test", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        context = {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "millrace"}}
        user = {"name": "test", "user": {"token": "not-a-secret"}}
        content = {"apiVersion": "v1", "kind": "Config", "current-context": "test"}
        file.write_text(yaml.safe_dump(content | {"clusters": [cluster], "contexts": [context], "users": [user]}))
        return file

    @property
    def pods(self) -> list[Pod]:
        return list(self._pods.values())

    def evict(self, pod: Pod) -> None:
        """As the kubelet does under node pressure: the pod fails and stays, its containers' statuses are gone."""
        self._do(
            self._end, pod, {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
        )

    def preempt(self, pod: Pod) -> None:
        """As the scheduler does for a pod of higher priority: a condition, then a deletion with grace."""
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByScheduler",
            "message": "preempting",
        }
        self._do(self._preempt, pod, condition)

    def vanish(self, pod: Pod) -> None:
        """As when a node is removed and the pod is collected: from one moment to the next there is nothing."""
        self._do(self._vanish, pod)

    def silence_node(self, pod: Pod) -> None:
        """As when a node is cut off: the pod is marked for deletion, and nothing ever confirms it."""
        self._do(self._silence, pod)

    def kill_for_memory(self, pod: Pod) -> None:
        self._do(self._out_of_memory, pod)

    def kill(self, pod: Pod) -> None:
        """SIGKILL to the container's process, by whom one never learns."""
        self._do(lambda p: p.process and p.process.kill(), pod)

    def _do(self, call: Any, *arguments: Any) -> None:
        done = threading.Event()

        def run() -> None:
            try:
                call(*arguments)
            finally:
                done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(10)

    # The life of a pod

    async def _live(self, pod: Pod) -> None:
        self._event(pod, "Normal", "Created", "the test cluster has the pod")
        while self.no_node:
            unschedulable = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": self.no_node,
            }
            if pod.status.get("conditions") != [unschedulable]:
                pod.status["conditions"] = [unschedulable]
                self._event(pod, "Warning", "FailedScheduling", self.no_node)
                self._touch(pod)
            await asyncio.sleep(0.02)
        pod.manifest["spec"]["nodeName"] = "node-1"
        pod.status["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        pod.status["startTime"] = now()
        self._touch(pod)
        for container in pod.manifest["spec"].get("initContainers") or []:
            if not await self._run(pod, container, "initContainerStatuses"):
                if pod.status["phase"] == "Pending":
                    pod.status["phase"] = "Failed"
                    self._touch(pod)
                return
        well = await self._run(pod, pod.container, "containerStatuses")
        if well is not None and pod.status["phase"] == "Running":
            pod.status["phase"] = "Succeeded" if well else "Failed"
            self._touch(pod)

    async def _run(self, pod: Pod, container: dict[str, Any], statuses: str) -> bool | None:
        """Run a container to its end; whether it ended well, None when it never ran."""
        status = {
            "name": container["name"], "image": container["image"], "imageID": "", "ready": False, "restartCount": 0,
            "state": {"waiting": {"reason": "ContainerCreating"}},
        }  # fmt: skip
        pod.status.setdefault(statuses, []).append(status)
        self._touch(pod)
        if container["image"] not in self.images:
            pull = {
                "reason": "ImagePullBackOff",
                "message": f'Back-off pulling image "{container["image"]}": not found',
            }
            status["state"] = {"waiting": pull}
            self._event(pod, "Warning", "Failed", pull["message"])
            self._touch(pod)
            return None
        environment = self._environment(container)
        if isinstance(environment, str):
            status["state"] = {"waiting": {"reason": "CreateContainerConfigError", "message": environment}}
            self._touch(pod)
            return None
        command = [*(container.get("command") or self.images[container["image"]]), *(container.get("args") or [])]
        started = now()
        pod.process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self._cwd,
            env=environment | {"PATH": os.environ["PATH"]},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        status["state"] = {"running": {"startedAt": started}}
        if statuses == "containerStatuses":
            pod.status["phase"] = "Running"
        self._touch(pod)
        assert pod.process.stdout is not None
        mine: list[str] = []
        async for line in pod.process.stdout:
            text = line.decode(errors="replace").rstrip("\n")
            mine.append(text)
            if statuses == "containerStatuses":
                pod.log.append((datetime.now(UTC), text))
        code = await pod.process.wait()
        code = 128 - code if code < 0 else code
        end = {
            "exitCode": code, "reason": "OOMKilled" if pod.oom else "Completed" if code == 0 else "Error",
            "startedAt": started, "finishedAt": now(),
        }  # fmt: skip
        if code and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            end["message"] = "\n".join(mine[-80:])[-2048:]
        status["state"] = {"terminated": end}
        self._touch(pod)
        return code == 0

    def _environment(self, container: dict[str, Any]) -> dict[str, str] | str:
        """The container's variables with references resolved, or the kubelet's complaint about one."""
        values: dict[str, str] = {}
        for source in container.get("envFrom") or []:
            for kind, store in (("secretRef", self.secrets), ("configMapRef", self.config_maps)):
                if reference := source.get(kind):
                    if reference["name"] in store:
                        values |= store[reference["name"]]
                    elif not reference.get("optional"):
                        return f'{kind.removesuffix("Ref").lower()} "{reference["name"]}" not found'
        for variable in container.get("env") or []:
            source = variable.get("valueFrom") or {}
            reference = source.get("secretKeyRef")
            if field := source.get("resourceFieldRef"):
                kind, _, resource = field["resource"].partition(".")
                quantity = str(container["resources"][kind][resource])
                # Whole cores, rounded up, as with the API's default divisor.
                cores = float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)
                values[variable["name"]] = str(math.ceil(cores))
            elif reference is None:
                values[variable["name"]] = variable.get("value", "")
            elif reference["key"] in self.secrets.get(reference["name"], {}):
                values[variable["name"]] = self.secrets[reference["name"]][reference["key"]]
            elif not reference.get("optional"):
                return f'secret "{reference["name"]}" not found'
        return values

    def _end(self, pod: Pod, status: dict[str, Any]) -> None:
        if pod.life:
            pod.life.cancel()
        self._kill_process(pod)
        pod.manifest["status"] = {"phase": "Failed", "startTime": pod.status.get("startTime"), **status}
        self._touch(pod)

    def _preempt(self, pod: Pod, condition: dict[str, Any]) -> None:
        pod.status["conditions"] = [*(pod.status.get("conditions") or []), condition]
        self._touch(pod)
        self._delete(pod, None)

    def _vanish(self, pod: Pod) -> None:
        if pod.life:
            pod.life.cancel()
        self._kill_process(pod)
        if self._pods.pop(pod.name, None):
            self._touch(pod, "DELETED")

    def _silence(self, pod: Pod) -> None:
        if pod.life:
            pod.life.cancel()
        self._kill_process(pod)
        long_ago = datetime.now(UTC) - timedelta(minutes=10)
        pod.manifest["metadata"]["deletionTimestamp"] = long_ago.strftime("%Y-%m-%dT%H:%M:%SZ")
        self._touch(pod)

    def _out_of_memory(self, pod: Pod) -> None:
        pod.oom = True
        self._kill_process(pod)

    @staticmethod
    def _kill_process(pod: Pod) -> None:
        if pod.process and pod.process.returncode is None:
            os.killpg(pod.process.pid, signal.SIGKILL)

    def _delete(self, pod: Pod, grace: int | None) -> None:
        """Mark the pod, ask its process to end, and remove it once it has, or once the grace period is over."""
        if pod.manifest["metadata"].get("deletionTimestamp"):
            return
        if grace is None:
            grace = pod.manifest["spec"].get("terminationGracePeriodSeconds", GRACE_SECONDS)
        until = datetime.now(UTC) + timedelta(seconds=grace)
        pod.manifest["metadata"] |= {
            "deletionTimestamp": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "deletionGracePeriodSeconds": grace,
        }
        self._touch(pod)
        self._loop.create_task(self._remove(pod, grace))

    async def _remove(self, pod: Pod, grace: int) -> None:
        if pod.process and pod.process.returncode is None:
            pod.process.terminate()
            try:
                await asyncio.wait_for(pod.process.wait(), grace)
            except TimeoutError:
                self._kill_process(pod)
        if pod.life and pod.process:
            await asyncio.wait([pod.life], timeout=5)
        self._vanish(pod)

    def _touch(self, pod: Pod, kind: str = "MODIFIED") -> None:
        self._version += 1
        pod.manifest["metadata"]["resourceVersion"] = str(self._version)
        for queue in self._changed:
            queue.put_nowait({"type": kind, "object": json.loads(json.dumps(pod.manifest))})

    def _event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        self._version += 1
        about = {"kind": "Pod", "name": pod.name, "namespace": pod.manifest["metadata"]["namespace"]}
        metadata = {
            "name": f"{pod.name}.{self._version}", "namespace": about["namespace"], "uid": str(uuid.uuid4()),
            "resourceVersion": str(self._version), "creationTimestamp": now(),
        }  # fmt: skip
        event = {
            "kind": "Event", "apiVersion": "v1", "metadata": metadata, "involvedObject": about, "type": kind,
            "reason": reason, "message": message, "count": 1,
        }  # fmt: skip
        self._events.append(event)
        for queue in self._changed:
            queue.put_nowait({"type": "ADDED", "object": event})

    # The API

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._ready.set()
        self._loop.run_forever()

    async def _listen(self) -> None:
        app = web.Application(middlewares=[self._gate])
        pods, pod = "/api/v1/namespaces/{namespace}/pods", "/api/v1/namespaces/{namespace}/pods/{name}"
        app.add_routes(
            [
                web.post(pods, self._create),
                web.get(pods, self._list_pods),
                web.get(pod, self._read),
                web.patch(pod, self._patch),
                web.delete(pod, self._remove_pod),
                web.get(f"{pod}/log", self._read_log),
                web.post(f"{pod}/eviction", self._remove_pod),
                web.get("/api/v1/namespaces/{namespace}/events", self._list_events),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _shut_down(self) -> None:
        for pod in self.pods:
            self._vanish(pod)
        await self._runner.cleanup()

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        if self.silent:
            assert request.transport is not None
            request.transport.close()
        reply: web.StreamResponse = await handler(request)
        if self.before_reply:
            await asyncio.to_thread(self.before_reply, request.method)
        return reply

    async def _create(self, request: web.Request) -> web.Response:
        manifest = await request.json()
        if self.forbidden:
            return _failure(403, "Forbidden", self.forbidden)
        if complaint := complaints(manifest):
            return _failure(422, "Invalid", f"Pod is invalid: {complaint}")
        metadata = manifest["metadata"]
        if metadata["name"] in self._pods:
            return _failure(409, "AlreadyExists", f'pods "{metadata["name"]}" already exists')
        metadata |= {"namespace": request.match_info["namespace"], "uid": str(uuid.uuid4()), "creationTimestamp": now()}
        manifest["status"] = {"phase": "Pending"}
        pod = Pod(manifest)
        self._pods[pod.name] = pod
        self.created.append(pod)
        self._touch(pod, "ADDED")
        pod.life = self._loop.create_task(self._live(pod))
        if self.lose_first_reply:
            self.lose_first_reply = False
            return _failure(503, "ServiceUnavailable", "the reply was lost")
        return web.json_response(manifest, status=201)

    async def _list_pods(self, request: web.Request) -> web.StreamResponse:
        selects = selector(request.query.get("labelSelector", ""))
        name = _named(request.query.get("fieldSelector", ""), "metadata.name")
        wanted = [p.manifest for p in self.pods if selects(p.labels) and name in (None, p.name)]
        if request.query.get("watch") in ("true", "True", "1"):
            return await self._watch(
                request, [], lambda o: o["kind"] == "Pod" and name in (None, o["metadata"]["name"])
            )
        return web.json_response(
            {
                "kind": "PodList",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": str(self._version)},
                "items": wanted,
            }
        )

    async def _list_events(self, request: web.Request) -> web.StreamResponse:
        name = _named(request.query.get("fieldSelector", ""), "involvedObject.name")
        since = int(request.query.get("resourceVersion") or 0)
        wanted = [e for e in self._events if name in (None, e["involvedObject"]["name"])]
        if request.query.get("watch") in ("true", "True", "1"):
            late = [e for e in wanted if int(e["metadata"]["resourceVersion"]) > since]
            return await self._watch(
                request, late, lambda o: o["kind"] == "Event" and name in (None, o["involvedObject"]["name"])
            )
        return web.json_response(
            {
                "kind": "EventList",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": str(self._version)},
                "items": wanted,
            }
        )

    async def _watch(self, request: web.Request, first: list[dict[str, Any]], wants: Any) -> web.StreamResponse:
        """A stream of changes, one JSON object a line, until the asked time is over."""
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._changed.append(queue)
        try:
            for item in first:
                await response.write(json.dumps({"type": "ADDED", "object": item}).encode() + b"\n")
            async with asyncio.timeout(float(request.query.get("timeoutSeconds") or 30)):
                while True:
                    change = await queue.get()
                    if wants(change["object"]):
                        await response.write(json.dumps(change).encode() + b"\n")
        except TimeoutError:
            return response
        finally:
            self._changed.remove(queue)

    def _found(self, request: web.Request) -> Pod | None:
        return self._pods.get(request.match_info["name"])

    async def _read(self, request: web.Request) -> web.Response:
        pod = self._found(request)
        return web.json_response(pod.manifest) if pod else _not_found(request)

    async def _patch(self, request: web.Request) -> web.Response:
        pod = self._found(request)
        if pod is None:
            return _not_found(request)
        patch = await request.json()
        pod.manifest["metadata"].setdefault("labels", {}).update(patch["metadata"]["labels"])
        self._touch(pod)
        return web.json_response(pod.manifest)

    async def _remove_pod(self, request: web.Request) -> web.Response:
        pod = self._found(request)
        if pod is None:
            return _not_found(request)
        body = await request.json() if request.can_read_body else {}
        grace = request.query.get("gracePeriodSeconds", (body or {}).get("gracePeriodSeconds"))
        self._delete(pod, None if grace is None else int(grace))
        return web.json_response(pod.manifest)

    async def _read_log(self, request: web.Request) -> web.StreamResponse:
        pod = self._found(request)
        if pod is None:
            return _not_found(request)
        if not any("waiting" not in s["state"] for s in pod.status.get("containerStatuses") or []):
            return _failure(
                400, "BadRequest", f'container "{pod.container["name"]}" in pod "{pod.name}" is waiting to start'
            )
        seconds = request.query.get("sinceSeconds")
        since = datetime.now(UTC) - timedelta(seconds=int(seconds)) if seconds else datetime.min.replace(tzinfo=UTC)
        stamped, follow = (request.query.get(key) in ("true", "True") for key in ("timestamps", "follow"))
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        sent = 0
        while True:
            for at, line in pod.log[sent:]:
                sent += 1
                if at >= since:
                    stamp = f"{at.strftime('%Y-%m-%dT%H:%M:%S.%f')}000Z " if stamped else ""
                    await response.write(f"{stamp}{line}\n".encode())
            alive = pod.process is not None and pod.process.returncode is None and pod.name in self._pods
            if not follow or (not alive and sent == len(pod.log)):
                return response
            await asyncio.sleep(0.02)


def complaints(manifest: dict[str, Any]) -> str:
    """What the API server would refuse: the schema's complaint, or a label that is no label value."""
    try:
        kubernetes_validate.validate(manifest, API_VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    for key, value in (manifest["metadata"].get("labels") or {}).items():
        if not re.fullmatch(r"(?!.{64})([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?", value):
            return f"metadata.labels: Invalid value: {key}={value}"
    name = manifest["metadata"]["name"]
    return (
        "" if re.fullmatch(r"(?!.{64})[a-z0-9]([a-z0-9-]*[a-z0-9])?", name) else f"metadata.name: Invalid value: {name}"
    )


def selector(text: str) -> Any:
    """A label selector's predicate, of the forms a=b, a!=b, a and !a."""
    terms = [term for term in text.split(",") if term]

    def selects(labels: dict[str, str]) -> bool:
        for term in terms:
            if "!=" in term:
                key, _, value = term.partition("!=")
                matches = labels.get(key) != value
            elif "=" in term:
                key, _, value = term.partition("=")
                matches = labels.get(key) == value.lstrip("=")
            else:
                matches = (term.lstrip("!") in labels) != term.startswith("!")
            if not matches:
                return False
        return True

    return selects


def _named(text: str, key: str) -> str | None:
    return dict(term.split("=", 1) for term in text.split(",") if term).get(key)


def _failure(code: int, reason: str, message: str) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }
    return web.json_response(body, status=code)


def _not_found(request: web.Request) -> web.Response:
    return _failure(404, "NotFound", f'pods "{request.match_info["name"]}" not found')
