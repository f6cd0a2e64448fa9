"""The lock files pin everything that is asked for, by hash, and name no place to get it from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
IMAGES = ROOT / "inference_images"
LOCKS = sorted([*REQUIREMENTS.glob("*.lock.txt"), *IMAGES.glob("*/requirements.lock.txt")])
ASKED = sorted([*REQUIREMENTS.glob("*.in"), *IMAGES.glob("*/requirements.in")])
ASKED.remove(REQUIREMENTS / "inference.overrides.in")  # names what stays out


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def asked(path: Path) -> set[str]:
    """Names in a .in file."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return {normal(re.split(r"[^A-Za-z0-9._-]", line)[0]) for line in lines if line}


def pinned(path: Path) -> dict[str, str]:
    """Requirement blocks of a lock file by name: the pin with its hashes."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    return {normal(block.split("==")[0]): block for block in text.splitlines() if block.strip()}


@pytest.mark.parametrize("lock", LOCKS, ids=label)
def test_every_pin_has_a_version_and_a_hash(lock: Path) -> None:
    pins = pinned(lock)
    assert pins
    assert [name for name, block in pins.items() if "==" not in block or "--hash=sha256:" not in block] == []


@pytest.mark.parametrize("lock", LOCKS, ids=label)
def test_a_lock_names_no_index_and_no_folder(lock: Path) -> None:
    assert not re.search(r"://|--(extra-)?index|--find-links| @ ", lock.read_text())


@pytest.mark.parametrize("path", ASKED, ids=label)
def test_everything_asked_for_is_pinned(path: Path) -> None:
    """`make lock` was run after the last change of the .in file."""
    assert asked(path) - pinned(path.with_suffix(".lock.txt")).keys() == set()


@pytest.mark.parametrize("path", ASKED, ids=label)
def test_make_lock_writes_every_lock(path: Path) -> None:
    command = f"{label(path)} -o {label(path.with_suffix('.lock.txt'))}"
    makefile = (ROOT / "Makefile").read_text().replace("$(IMAGES)", label(IMAGES))
    assert command in re.sub(r"\s*\\\n\s*", " ", makefile)


@pytest.mark.parametrize("image", ["openai", "vllm"])
def test_an_image_reads_parquet_with_the_orchestrators_library(image: str) -> None:
    locks = (REQUIREMENTS / "orchestrator.lock.txt", IMAGES / image / "requirements.lock.txt")
    ours, theirs = (pinned(lock)["pyarrow"].split()[0] for lock in locks)
    assert ours == theirs


def test_what_does_not_fit_the_cpu_build_of_torch_stays_out() -> None:
    pins = pinned(REQUIREMENTS / "inference.lock.txt")
    assert pins.keys() & asked(REQUIREMENTS / "inference.overrides.in") == set()


def test_both_environments_write_parquet_with_the_same_library() -> None:
    orchestrator, inference = (pinned(REQUIREMENTS / f"{n}.lock.txt")["pyarrow"] for n in ("orchestrator", "inference"))
    assert orchestrator.split()[0] == inference.split()[0]
