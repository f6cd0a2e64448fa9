"""The test command's last line is true, and silence is a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import run_tests


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one tier, `unit`, whose tests the real pytest runs."""
    (tmp_path / ".venv").symlink_to(Path(__file__).resolve().parents[2] / ".venv")
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # Airflow's and kmock's plugins take 4 s to load
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(run_tests, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run_tests, "TIERS", {"unit": (".venv", ("tests/unit",))})
    return folder


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.strip().splitlines()[-1]


def test_passed_and_failed_are_counted(tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tier / "test_a.py").write_text("def test_one(): pass\ndef test_two(): pass\ndef test_three(): assert 1 == 2\n")
    assert run_tests.main(["unit"]) == 1
    assert last_line(capsys) == "2 passed, 1 failed"


def test_a_tier_that_passes_ends_with_0(tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tier / "test_a.py").write_text("def test_one(): pass\n")
    assert run_tests.main(["unit"]) == 0
    assert last_line(capsys) == "1 passed, 0 failed"


def test_a_tier_without_a_test_has_failed(tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tests.main(["unit"]) == 1
    assert last_line(capsys) == "0 passed, 1 failed"


def test_a_module_that_cannot_be_imported_has_failed(tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tier / "test_a.py").write_text("def test_one(): pass\n")
    (tier / "test_b.py").write_text("import nothing_of_this_name\n")
    assert run_tests.main(["unit"]) == 1
    assert last_line(capsys).endswith("1 failed")


def test_a_test_file_outside_every_tier_is_found(tier: Path) -> None:
    (tier.parent / "elsewhere").mkdir()
    (tier.parent / "elsewhere" / "test_lost.py").touch()
    assert run_tests.orphans() == ["tests/elsewhere/test_lost.py"]
