"""docker-compose.yaml, `.env` and the image: what Compose accepts, and what a laptop must not expose."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.compose.conftest import ROOT, Site

SECRETS = {
    "POSTGRES_PASSWORD",
    "AIRFLOW_ADMIN_PASSWORD",
    "AIRFLOW_FERNET_KEY",
    "AIRFLOW_API_SECRET_KEY",
    "AIRFLOW_JWT_SECRET",
    "S3_ACCESS_KEY",
    "S3_SECRET_KEY",
    "ENDPOINT_KEY",
    "K3S_TOKEN",
}
AIRFLOW = {"volumes", "init", "api-server", "scheduler", "dag-processor", "triggerer"}
ALWAYS = {"postgres", "s3", *AIRFLOW}
PROFILES = {"endpoint": {"demo-model", "endpoint"}, "kubernetes": {"demo-model", "k3s", "k3s-init"}}
ONCE = {"volumes", "init", "demo-model", "k3s-init"}
DOCKERFILE = (ROOT / "deploy" / "orchestrator" / "Dockerfile").read_text()


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def services(ready: Callable[[str], Site], profile: str) -> dict[str, Any]:
    found: dict[str, Any] = ready(profile).config()["services"]
    return found


def test_a_profile_starts_its_services_and_no_others(services: dict[str, Any], profile: str) -> None:
    assert set(services) == ALWAYS | PROFILES[profile]


def test_the_backend_follows_the_profile(services: dict[str, Any], profile: str) -> None:
    backend = {"endpoint": "local", "kubernetes": "kubernetes"}[profile]
    assert {services[name]["environment"]["MILLRACE_BACKEND"] for name in AIRFLOW} == {backend}
    assert services["init"]["environment"]["COMPOSE_PROFILES"] == profile


def test_without_secrets_compose_refuses_and_says_what_to_run(site: Site) -> None:
    done = site.compose("config")
    assert done.stdout == ""
    assert "run deploy/compose/make_env.py" in done.stderr


def test_every_port_is_on_the_loopback_alone(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) >= 3
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}


def test_every_image_has_an_exact_tag(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert re.search(r":(local|v?\d+\.\d+[\w.-]*)$", service["image"]), (name, service["image"])


def test_an_image_can_be_pinned_by_digest(ready: Callable[[str], Site]) -> None:
    site = ready("endpoint")
    pinned = "postgres:18.1-bookworm@sha256:" + "0" * 64
    with (site.folder / ".env").open("a") as env:
        env.write(f"POSTGRES_IMAGE={pinned}\n")
    assert site.config()["services"]["postgres"]["image"] == pinned


def test_what_goes_on_has_a_health_check_and_what_ends_is_not_restarted(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if name in ONCE:
            assert service["restart"] == "no", name
        else:
            assert service["healthcheck"]["test"], name
            assert service["restart"] == "unless-stopped", name


def test_only_the_kubernetes_node_is_privileged_and_our_images_have_no_capability(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service.get("privileged", False) == (name == "k3s"), name
        if service["image"].startswith("millrace/"):
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name


def test_every_volume_is_named_and_every_mounted_file_is_in_the_checkout(ready: Callable[[str], Site]) -> None:
    site = ready("kubernetes")
    config = site.config("--profile", "endpoint")
    mounts = [mount for service in config["services"].values() for mount in service.get("volumes", [])]
    assert {m["source"] for m in mounts if m["type"] == "volume"} == set(config["volumes"])
    for mount in mounts:
        if mount["type"] == "bind":
            assert mount["read_only"] is True
            assert (ROOT / Path(mount["source"]).relative_to(site.folder)).exists(), mount["source"]


def test_no_secret_stands_in_a_command_or_a_health_check(ready: Callable[[str], Site]) -> None:
    site = ready("kubernetes")
    values = [site.env[name] for name in SECRETS]
    for name, service in site.config("--profile", "endpoint")["services"].items():
        words = json.dumps([service.get(key) for key in ("command", "entrypoint", "healthcheck", "image", "labels")])
        assert not [value for value in values if value in words], name


def test_the_password_of_the_ui_reaches_the_api_server_alone(services: dict[str, Any]) -> None:
    assert [name for name, s in services.items() if "AIRFLOW_ADMIN_PASSWORD" in s.get("environment", {})] == [
        "api-server"
    ]


def test_every_variable_is_explained_and_every_explained_one_is_used() -> None:
    text = (ROOT / "docker-compose.yaml").read_text()
    used = set(re.findall(r"\$\{([A-Z0-9_]+)", text))
    explained = set(re.findall(r"^#?([A-Z0-9_]+)=", (ROOT / ".env.example").read_text(), flags=re.M))
    assert used == explained


def test_no_secret_has_a_default() -> None:
    example = (ROOT / ".env.example").read_text()
    assert {name for name in SECRETS if re.search(rf"^{name}=$", example, flags=re.M)} == SECRETS
    for name, rest in re.findall(r"\$\{([A-Z0-9_]+)([^}]*)\}", (ROOT / "docker-compose.yaml").read_text()):
        if name in SECRETS:
            assert rest in ("", ":?run deploy/compose/make_env.py"), name


def test_defaults_that_are_shown_are_those_that_hold() -> None:
    shown = dict(re.findall(r"^#([A-Z0-9_]+)=(.*)$", (ROOT / ".env.example").read_text(), flags=re.M))
    held = dict(re.findall(r"\$\{([A-Z0-9_]+):-([^}]*)\}", (ROOT / "docker-compose.yaml").read_text()))
    assert {name: held[name] for name in shown} == shown


def test_make_env_gives_each_thing_a_secret_of_its_own_that_nobody_else_can_read(site: Site) -> None:
    assert site.make_env().returncode == 0
    values = [site.env[name] for name in SECRETS]
    assert len(set(values)) == len(SECRETS)
    assert min(map(len, values)) >= 16
    assert all(re.fullmatch(r"[\w-]+=?", value) for value in values)
    assert stat.S_IMODE((site.folder / ".env").stat().st_mode) == 0o600


def test_make_env_again_keeps_secrets_and_settings_and_changes_the_profile(ready: Callable[[str], Site]) -> None:
    site = ready("endpoint")
    file = site.folder / ".env"
    file.write_text(file.read_text().replace("#AIRFLOW_PORT=8080", "AIRFLOW_PORT=9090").replace("K3S_TOKEN=", "#"))
    before = site.env
    assert site.make_env("kubernetes").returncode == 0
    after = site.env
    assert {name: after[name] for name in before if not name.endswith(("PROFILES", "BACKEND"))} == {
        name: value for name, value in before.items() if not name.endswith(("PROFILES", "BACKEND"))
    }
    assert (after["COMPOSE_PROFILES"], after["MILLRACE_BACKEND"]) == ("kubernetes", "kubernetes")
    assert len(after["K3S_TOKEN"]) >= 16


def test_make_env_refuses_what_it_does_not_know(site: Site) -> None:
    done = site.make_env("production")
    assert done.returncode == 2
    assert "endpoint, kubernetes" in done.stdout
    assert not (site.folder / ".env").exists()


def test_git_does_not_see_the_secrets() -> None:
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


# The image


def test_everything_the_image_copies_is_in_the_checkout_and_in_the_build_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [
        word for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, flags=re.M) for word in line.split()[:-1]
    ]
    assert len(sources) > 8
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source.split('/')[0]}" in ignored, source


def test_the_s3_jar_is_of_the_version_that_spark_brings_and_goes_where_spark_looks() -> None:
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    (client,) = jars.glob("hadoop-client-api-*.jar")
    pom = (ROOT / "deploy" / "orchestrator" / "s3a" / "pom.xml").read_text()
    (version,) = re.findall(r"<artifactId>hadoop-aws</artifactId>\s*<version>(.+)</version>", pom)
    assert client.name == f"hadoop-client-api-{version}.jar"
    inside_venv = jars.relative_to(Path(pyspark.__file__).parents[4])
    (python,) = re.findall(r"^ARG PYTHON_IMAGE=python:(\d+\.\d+)\.", DOCKERFILE, flags=re.M)
    assert f".venv/lib/python{python}/{'/'.join(inside_venv.parts[2:])}/" in DOCKERFILE


def test_every_stage_is_named_and_the_last_runs_as_a_plain_user() -> None:
    stages = re.findall(r"^FROM \S+( AS \w+)?$", DOCKERFILE, flags=re.M)
    assert stages and all(stages)
    assert re.findall(r"^USER (.+)$", DOCKERFILE, flags=re.M) == ["10001:0"]


def test_base_images_are_the_same_in_the_image_and_in_compose() -> None:
    arguments = dict(re.findall(r"^ARG (\w+)=(.+)$", DOCKERFILE, flags=re.M))
    compose = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())
    given = compose["x-orchestrator"]["build"]["args"]
    assert {name: value.removeprefix(f"${{{name}:-").removesuffix("}") for name, value in given.items()} == arguments
