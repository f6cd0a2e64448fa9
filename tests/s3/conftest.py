from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from millrace.lake import Lake
from tests.s3.server import BUCKET, s3_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The AWS_* variables that reach the S3 server."""
    with s3_server(tmp_path_factory.mktemp("s3")) as variables:
        yield variables


@pytest.fixture
def lake(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Lake:
    """An empty lake on the S3 server."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return Lake(f"s3://{BUCKET}/{secrets.token_hex(4)}")
