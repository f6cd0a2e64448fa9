"""The profile `kubernetes`: what is applied to the node, the pods' template, and Airflow's way in. `kubectl` is a stand-in here."""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from millrace.airflow.pod_template import template_for
from millrace.plan import PinnedModel
from tests.compose.conftest import ROOT, Site

COMPOSE = ROOT / "deploy" / "compose"
VERSION = "1.34"  # of k3s in docker-compose.yaml

# Keeps what it is given, by the words of its command line, and answers as a cluster would.
KUBECTL = """#!/bin/sh
echo "$@" >> "$CALLS/arguments"
case "$*" in
  "apply -f -") cat >> "$CALLS/applied"; echo --- >> "$CALLS/applied" ;;
  create\\ secret*) echo "kind: Secret"; echo "stringData: {given: '$(tr '\\n' ' ' < /dev/stdin)'}" ;;
  *data.token*) [ -e "$CALLS/asked" ] && printf %s "$TOKEN" || touch "$CALLS/asked" ;;
  *data.ca*) printf %s Q0E= ;;
esac
"""


@pytest.fixture
def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((COMPOSE / "kubernetes.yaml").read_text().replace("SUBNET", "172.30.78")))


def test_every_document_is_one_the_cluster_knows(documents: list[dict[str, Any]]) -> None:
    assert len(documents) == 7
    for document in documents:
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_validation_would_notice_a_wrong_field(documents: list[dict[str, Any]]) -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(documents[0] | {"spec": {"no_such_field": 1}}, VERSION, strict=True)


def test_airflow_may_handle_pods_of_its_namespace_and_nothing_else(documents: list[dict[str, Any]]) -> None:
    (role,) = (d for d in documents if d["kind"] == "Role")
    allowed = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert {resource for resource, _ in allowed} == {"pods", "pods/log", "events"}
    assert not [verb for _, verb in allowed if verb == "*"]
    assert not [d for d in documents if d["kind"].startswith("Cluster")]


def test_pods_find_the_store_where_compose_puts_it(
    ready: Callable[[str], Site], documents: list[dict[str, Any]]
) -> None:
    services = ready("kubernetes").config()["services"]
    (slice_,) = (d for d in documents if d["kind"] == "EndpointSlice")
    assert slice_["endpoints"] == [{"addresses": [services["s3"]["networks"]["default"]["ipv4_address"]]}]
    (service,) = (d for d in documents if d["kind"] == "Service")
    url = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert services["scheduler"]["environment"]["AWS_ENDPOINT_URL"] == url == variables(pod())["AWS_ENDPOINT_URL"]


def pod() -> dict[str, Any]:
    """The pod of the demo model's shard as `infer` would start it."""
    model = PinnedModel(
        name="m", digest="d" * 64, engine="vllm", location="m/" + "d" * 64, resources={"template": "vllm-cpu"}
    )
    env = {
        "MILLRACE_HOME": str(ROOT),
        "MILLRACE_POD_TEMPLATES": str(COMPOSE / "pods"),
        "MILLRACE_LAKE": "s3://millrace/lake",
    }
    return template_for(model, env).manifest


def variables(manifest: dict[str, Any]) -> dict[str, str]:
    return {v["name"]: v["value"] for v in manifest["spec"]["containers"][0]["env"] if "value" in v}


def test_the_pod_is_valid_reads_models_where_they_are_mounted_and_refers_to_its_secrets(
    ready: Callable[[str], Site],
) -> None:
    manifest = pod()
    kubernetes_validate.validate(manifest | {"metadata": {"name": "x"}}, VERSION, strict=True)
    (runner,) = manifest["spec"]["containers"]
    (path,) = (v["hostPath"]["path"] for v in manifest["spec"]["volumes"] if "hostPath" in v)
    services = ready("kubernetes").config()["services"]
    assert path in {mount["target"] for mount in services["k3s"]["volumes"]}
    assert variables(manifest)["MILLRACE_MODELS"] in {mount["mountPath"] for mount in runner["volumeMounts"]}
    assert variables(manifest)["MILLRACE_LAKE"] == services["scheduler"]["environment"]["MILLRACE_LAKE"]
    references = {v["name"]: v["valueFrom"]["secretKeyRef"] for v in runner["env"] if "valueFrom" in v}
    assert references == {
        name: {"name": "millrace-store", "key": name} for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    }


def test_the_node_is_prepared_and_airflow_gets_a_way_in_of_its_own(
    ready: Callable[[str], Site], tmp_path: Path
) -> None:
    site = ready("kubernetes")
    services = site.config()["services"]
    (tmp_path / "kube").mkdir()
    admin = {"clusters": [{"name": "default", "cluster": {"server": "https://127.0.0.1:6443"}}]}
    (tmp_path / "kube" / "admin.yaml").write_text(yaml.safe_dump(admin))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").write_text(KUBECTL)
    (tmp_path / "bin" / "kubectl").chmod(0o755)
    env = services["k3s-init"]["environment"] | {
        "KUBE": str(tmp_path / "kube"),
        "TMPDIR": str(tmp_path),
        "CALLS": str(tmp_path),
        "TOKEN": base64.b64encode(b"a-token").decode(),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }
    (shell, script) = services["k3s-init"]["entrypoint"]
    done = subprocess.run([shell, str(site.folder) + script], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr

    config = yaml.safe_load((tmp_path / "kube" / "airflow.yaml").read_text())
    assert config["clusters"][0]["cluster"] == {"server": "https://k3s:6443", "certificate-authority-data": "Q0E="}
    assert config["users"][0]["user"] == {"token": "a-token"}
    assert config["contexts"][0]["context"] == {"cluster": "k3s", "user": "airflow", "namespace": "millrace"}
    assert stat.S_IMODE((tmp_path / "kube" / "airflow.yaml").stat().st_mode) == 0o640
    assert "https://k3s:6443" in (tmp_path / "admin.yaml").read_text()

    applied = (tmp_path / "applied").read_text()
    assert "SUBNET" not in applied.split("kind: Namespace")[1]
    assert f'addresses: ["{env["MILLRACE_SUBNET"]}.10"]' in applied
    keys = f"AWS_ACCESS_KEY_ID={site.env['S3_ACCESS_KEY']} AWS_SECRET_ACCESS_KEY={site.env['S3_SECRET_KEY']}"
    assert keys in applied
    assert site.env["S3_SECRET_KEY"] not in (tmp_path / "arguments").read_text()


def test_airflows_connection_names_the_file_and_the_namespace_that_are_made(ready: Callable[[str], Site]) -> None:
    services = ready("kubernetes").config()["services"]
    extra = json.loads(services["scheduler"]["environment"]["AIRFLOW_CONN_KUBERNETES_DEFAULT"])["extra"]
    kube = {mount["source"]: mount["target"] for mount in services["scheduler"]["volumes"]}["kube"]
    assert extra == {"kube_config_path": f"{kube}/airflow.yaml", "namespace": "millrace"}
    assert re.search(r"--tls-san=k3s\b", " ".join(services["k3s"]["command"]))
