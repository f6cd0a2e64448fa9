"""What ships for a cluster: valid by the API's own schemas, locked down, and pinned by lock files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from millrace.airflow.pod_template import template_for
from millrace.errors import ConfigError
from millrace.plan import PinnedModel
from tests.kubernetes.cluster import API_VERSION
from tests.kubernetes.conftest import ROOT

IMAGES = ROOT / "inference_images"
ENGINES = ("vllm", "vllm-cpu", "openai")
DEPLOY = sorted((ROOT / "deploy" / "kubernetes").rglob("*.yaml"))


def model(engine: str = "vllm", **resources: Any) -> PinnedModel:
    return PinnedModel(name="m", digest="d" * 64, engine=engine, location="m/d", resources=resources)


def template(engine: str) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load((IMAGES / engine / "pod_template.yaml").read_text())
    return manifest


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [*manifest["spec"].get("initContainers", []), *manifest["spec"]["containers"]]


@pytest.mark.parametrize("file", DEPLOY, ids=lambda file: file.name)
def test_what_is_deployed_fits_the_apis_schemas(file: Path) -> None:
    documents = list(yaml.safe_load_all(file.read_text()))
    assert documents
    for document in documents:
        kubernetes_validate.validate(document, API_VERSION, strict=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_pod_templates_fit_the_apis_schema(engine: str) -> None:
    kubernetes_validate.validate(template(engine), API_VERSION, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(template(engine) | {"spec": {"container": []}}, API_VERSION, strict=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_pods_have_no_rights_that_they_do_not_need(engine: str) -> None:
    spec = template(engine)["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(template(engine)):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_only_the_gpu_template_asks_for_a_gpu_and_checks_it_first() -> None:
    asking = {
        e for e in ENGINES for c in containers(template(e)) if "nvidia.com/gpu" in c["resources"].get("limits", {})
    }
    assert asking == {"vllm"}
    assert template("vllm")["spec"]["initContainers"][0]["args"] == ["check-device"]


@pytest.mark.parametrize("engine", ["vllm", "openai"])
def test_a_models_engine_chooses_its_template(engine: str) -> None:
    made = template_for(model(engine), {"MILLRACE_HOME": str(ROOT), "MILLRACE_LAKE": "s3://lake"})
    assert made.image == f"millrace/{engine}:local"
    assert {"name": "MILLRACE_LAKE", "value": "s3://lake"} in made.manifest["spec"]["containers"][0]["env"]


def test_a_models_resources_replace_the_templates() -> None:
    env = {"MILLRACE_HOME": str(ROOT), "MILLRACE_IMAGE_VLLM_CPU": "registry/cpu@sha256:1"}
    made = template_for(model(memory="80Gi", cpu=12, gpu=2), env)
    assert made.manifest["spec"]["containers"][0]["resources"] == {
        "requests": {"cpu": "12", "memory": "80Gi", "nvidia.com/gpu": "2"},
        "limits": {"memory": "80Gi", "nvidia.com/gpu": "2"},
    }
    assert (made.schedule_seconds, made.startup_seconds) == (3600, 1800)
    assert template_for(model(template="vllm-cpu"), env).image == "registry/cpu@sha256:1"


def test_an_engine_on_a_cpu_gets_as_many_threads_as_its_pod_asks_for_cores() -> None:
    made = template_for(model(template="vllm-cpu", cpu=3), {"MILLRACE_HOME": str(ROOT)})
    (threads,) = [v for v in made.manifest["spec"]["containers"][0]["env"] if v["name"] == "OMP_NUM_THREADS"]
    assert threads["valueFrom"] == {"resourceFieldRef": {"resource": "requests.cpu"}}
    assert made.manifest["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "3"


def test_a_resource_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="'gpus' is not one of"):
        template_for(model(gpus=1), {"MILLRACE_HOME": str(ROOT)})


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("kind: Deployment", "not a Pod manifest"),
        ("{", "not YAML"),
        ("{kind: Pod, spec: {containers: [{name: base, image: x}]}}", "must be called 'runner'"),
        ("{kind: Pod, spec: {containers: [{name: runner}]}}", "names no image"),
        (
            "{kind: Pod, spec: {containers: [{name: runner, image: x, env: [{name: AWS_SECRET_ACCESS_KEY, value: k}]}]}}",
            "secretKeyRef",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_named(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "pod_template.yaml").write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        template_for(model(), {"MILLRACE_POD_TEMPLATES": str(tmp_path)})


def test_a_template_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MILLRACE_POD_TEMPLATES"):
        template_for(model(), {"MILLRACE_POD_TEMPLATES": str(tmp_path)})


@pytest.mark.parametrize("engine", ENGINES)
def test_images_copy_what_exists_lock_file_first_and_run_as_a_plain_user(engine: str) -> None:
    text = (IMAGES / engine / "Dockerfile").read_text()
    copied = [
        source for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for source in line.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
    assert text.index(".lock.txt") < text.index("COPY plugins")
    assert "USER 10001:0" in text
    assert 'ENTRYPOINT ["shard-runner"]' in text
    assert re.search(r"^ARG PYTHON_IMAGE=", text, re.MULTILINE)
    assert all(" AS " in line for line in text.splitlines() if line.startswith("FROM"))


@pytest.mark.parametrize("engine", ["vllm", "openai"])
def test_every_package_of_an_images_lock_file_is_pinned_by_hash(engine: str) -> None:
    lock = (IMAGES / engine / "requirements.lock.txt").read_text()
    pinned = re.findall(r"^([a-zA-Z0-9_.\[\]-]+)==\S+ (?:; .*)?\\\n    --hash=sha256:", lock, re.MULTILINE)
    assert len(pinned) == len(re.findall(r"^\S+==", lock, re.MULTILINE)) > 20
    asked = re.findall(r"^([a-z0-9]+)", (IMAGES / engine / "requirements.in").read_text(), re.MULTILINE)
    assert set(asked) <= {name.split("[")[0].lower() for name in pinned}


def test_the_images_build_steps_run_without_docker(tmp_path: Path) -> None:
    """The endpoint image's, to its end; no index is asked for our own packages, and the runner starts."""
    script = IMAGES / "install.sh"
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    env = os.environ | {"DRY_RUN": "1"}
    lock = "inference_images/openai/requirements.lock.txt"
    done = subprocess.run([script, venv, "dependencies", lock], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wrong = subprocess.run([script, venv, "nonsense"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2
