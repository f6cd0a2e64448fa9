"""docker-compose.yaml as Compose itself understands it, from a copy of the files it needs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.s3.server import program

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Site:
    """A checkout with its `.env`."""

    folder: Path

    def make_env(self, *words: str) -> subprocess.CompletedProcess[str]:
        script = self.folder / "deploy" / "compose" / "make_env.py"
        return subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=False)

    @property
    def env(self) -> dict[str, str]:
        lines = (self.folder / ".env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))

    def compose(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Compose sees this folder's `.env` and nothing of the machine's environment."""
        return subprocess.run(
            [program("docker-compose"), *words], cwd=self.folder, env={"HOME": str(self.folder)}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip

    def config(self, *words: str) -> dict[str, Any]:
        done = self.compose(*words, "config", "--format", "json")
        assert done.stdout, done.stderr  # the wheel's wrapper ends with 0 in any case
        config: dict[str, Any] = json.loads(done.stdout)
        return config


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A checkout without `.env`."""
    for name in ("docker-compose.yaml", ".env.example"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    return Site(tmp_path)


@pytest.fixture
def ready(site: Site) -> Callable[[str], Site]:
    """The checkout with an `.env` for a profile."""

    def make(profile: str) -> Site:
        done = site.make_env(profile)
        assert done.returncode == 0, done.stdout + done.stderr
        return site

    return make
