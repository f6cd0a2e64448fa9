from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.lake import Lake
from tests.unit.publishing.runs import read_rows


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


@pytest.fixture
def keys(lake: Lake) -> Callable[..., list[tuple[str, str]]]:
    """(date, key) of every row readers see."""
    return lambda version=None: [(row["dt"], row["id"]) for row in read_rows(lake, version=version)]
