"""The pod of a model: the platform team's template, with what only the plan knows filled in.

Templates are plain Pod manifests, `<MILLRACE_POD_TEMPLATES>/<engine>/pod_template.yaml` (default: `inference_images/`). Node selectors,
tolerations, volumes, queues, security and secrets are theirs alone. From the model's `resources` come `gpu`, `cpu`, `memory` and other
resource names (`amd.com/gpu`), which replace the template's; and `template`, the name of another folder than the engine's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from millrace.errors import ConfigError
from millrace.plan import PinnedModel
from millrace.settings import Settings

# The container of a template that runs `shard-runner`; others are sidecars.
CONTAINER = "runner"
# How long a pod may wait for a node, and then for its image and its model. Generous: a pod that waits costs nothing, and
# an image with CUDA in it is 10 GB. A template's annotations say otherwise.
SCHEDULE_SECONDS = 60 * 60
STARTUP_SECONDS = 30 * 60

_RESOURCE_NAMES = {"gpu": "nvidia.com/gpu", "cpu": "cpu", "memory": "memory", "ephemeral-storage": "ephemeral-storage"}
_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|ACCESS_KEY|API_KEY", re.IGNORECASE)


@dataclass(frozen=True)
class PodTemplate:
    """A Pod manifest for one model, with its image and its two time limits."""

    manifest: dict[str, Any]
    image: str
    schedule_seconds: int
    startup_seconds: int


def template_for(model: PinnedModel, env: Mapping[str, str] = os.environ) -> PodTemplate:
    """The filled-in template of a model. Raises ConfigError, naming the file, for one that cannot be used."""
    resources = dict(model.resources)
    name = str(resources.pop("template", model.engine))
    folder = Path(env.get("MILLRACE_POD_TEMPLATES") or Settings.from_env(env).home / "inference_images")
    file = folder / name / "pod_template.yaml"
    manifest = _read(file)
    container = _container(manifest, file)
    image = env.get(f"MILLRACE_IMAGE_{re.sub(r'[^A-Z0-9]', '_', name.upper())}") or container.get("image")
    if not image:
        raise ConfigError(
            f"'{file}' names no image for the container '{CONTAINER}'. Add `image:`, or set MILLRACE_IMAGE_{name.upper()}."
        )
    container["image"] = image
    _set_env(container, {"MILLRACE_LAKE": Settings.from_env(env).lake, "MILLRACE_IMAGE": image})
    _set_resources(container, resources, model)
    notes = manifest.get("metadata", {}).get("annotations") or {}
    try:
        schedule = int(notes.get("millrace/schedule-timeout-seconds", SCHEDULE_SECONDS))
        startup = int(notes.get("millrace/startup-timeout-seconds", STARTUP_SECONDS))
    except ValueError:
        raise ConfigError(f"'{file}': the annotations millrace/*-timeout-seconds must be whole numbers.") from None
    return PodTemplate(manifest, image, schedule, startup)


def _read(file: Path) -> dict[str, Any]:
    try:
        manifest = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"There is no pod template '{file}'. Set MILLRACE_POD_TEMPLATES to the folder that holds it."
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"'{file}' is not YAML: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != "Pod":
        raise ConfigError(f"'{file}' is not a Pod manifest (kind: Pod).")
    return manifest


def _container(manifest: dict[str, Any], file: Path) -> dict[str, Any]:
    """The runner's container, which must come first: Airflow merges its own into the first one."""
    containers = (manifest.get("spec") or {}).get("containers") or [{}]
    if containers[0].get("name") != CONTAINER:
        raise ConfigError(f"'{file}': the first container must be called '{CONTAINER}'.")
    for container in [*containers, *(manifest["spec"].get("initContainers") or [])]:
        for variable in container.get("env") or []:
            if "value" in variable and _SECRET.search(variable["name"]):
                raise ConfigError(
                    f"'{file}': {variable['name']} is written out. Put it into a Secret and refer to it (valueFrom.secretKeyRef)."
                )
    first: dict[str, Any] = containers[0]
    return first


def _set_env(container: dict[str, Any], values: dict[str, str]) -> None:
    """Add variables; what the template sets stands."""
    env = container["env"] = list(container.get("env") or [])
    given = {variable["name"] for variable in env}
    env.extend({"name": name, "value": value} for name, value in values.items() if name not in given)


def _set_resources(container: dict[str, Any], resources: dict[str, Any], model: PinnedModel) -> None:
    """Memory and devices are limits and requests alike; processor time is only requested, since a limit would throttle."""
    limits = dict((container.get("resources") or {}).get("limits") or {})
    requests = dict((container.get("resources") or {}).get("requests") or {})
    for key, value in resources.items():
        name = _RESOURCE_NAMES.get(key, key)
        if key not in _RESOURCE_NAMES and "/" not in key:
            raise ConfigError(
                f"model '{model.name}': resource '{key}' is not one of {', '.join(_RESOURCE_NAMES)}, template, or a "
                "resource name such as amd.com/gpu."
            )
        requests[name] = str(value)
        if name != "cpu":
            limits[name] = str(value)
        elif name in limits:
            del limits[name]
    container["resources"] = {"limits": limits, "requests": requests}
