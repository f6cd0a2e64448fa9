"""Set-up is quick when nothing changed, whole after a kill, and clear when it cannot go on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import setup


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout that set-up takes for its own."""
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "STATE", tmp_path / ".millrace")
    monkeypatch.setattr(setup, "LOG", tmp_path / ".millrace" / "setup.log")
    monkeypatch.setattr(setup, "ENV_FILE", tmp_path / ".millrace" / "env")
    monkeypatch.delenv("MILLRACE_MODELS", raising=False)
    (tmp_path / ".millrace").mkdir()
    (tmp_path / ".millrace" / "setup.log").touch()
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "installer.txt").write_text("uv==1\n")
    (tmp_path / "lock.txt").write_text("a==1\n")
    return tmp_path


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tools that set-up ran, in order; every one of them succeeds, and `-m venv` makes its folder."""
    ran: list[str] = []

    def run(command: list[object]) -> bool:
        ran.append(" ".join(str(word) for word in command))
        if "venv" in command:
            Path(str(command[-1])).mkdir()
        return True

    monkeypatch.setattr(setup, "run", run)
    return ran


ENVIRONMENT = setup.Environment(".venv", ("installer.txt", "lock.txt"), packages=(".",))


def made_venvs(commands: list[str]) -> int:
    return sum(" -m venv " in command for command in commands)


def test_an_environment_made_from_the_same_locks_runs_no_tool(checkout: Path, commands: list[str]) -> None:
    assert setup.build_environment(ENVIRONMENT) is None
    commands.clear()
    assert setup.build_environment(ENVIRONMENT) == "up to date"
    assert commands == []


def test_a_changed_lock_is_installed_over_a_finished_environment(checkout: Path, commands: list[str]) -> None:
    setup.build_environment(ENVIRONMENT)
    (checkout / "lock.txt").write_text("a==2\n")
    commands.clear()
    setup.build_environment(ENVIRONMENT)
    assert made_venvs(commands) == 0
    assert any("-r lock.txt" in command for command in commands)
    assert setup.build_environment(ENVIRONMENT) == "up to date"


def installed(name: str, direct_url: str = "") -> None:
    """Leave what an installer leaves in the environment for a package."""
    packages = ENVIRONMENT.path / "lib" / f"python{setup.sysconfig.get_python_version()}" / "site-packages"
    info = packages / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    if direct_url:
        (info / "direct_url.json").write_text(direct_url)


def test_what_a_changed_lock_no_longer_names_is_removed_and_nothing_else(checkout: Path, commands: list[str]) -> None:
    (checkout / "lock.txt").write_text("a==1\nzope.interface[test]==1 \\\n    --hash=sha256:0\ngone==1\n")
    setup.build_environment(ENVIRONMENT)
    for name in ("a", "zope_interface", "Gone", "pip", "uv", "by-hand"):
        installed(name)
    installed("millrace", '{"dir_info": {"editable": true}, "url": "file:///checkout"}')
    (checkout / "lock.txt").write_text("a==1\nzope.interface[test]==1 \\\n    --hash=sha256:0\n")
    commands.clear()
    setup.build_environment(ENVIRONMENT)
    (removal,) = (command for command in commands if "uninstall" in command)
    assert removal.endswith("-m pip uninstall --yes by-hand gone")
    assert "-e ./." in commands[-1]


def test_an_environment_that_was_never_finished_is_built_from_nothing(checkout: Path, commands: list[str]) -> None:
    half_written = checkout / ".venv" / "half-written"
    half_written.parent.mkdir()
    half_written.touch()
    setup.build_environment(ENVIRONMENT)
    assert made_venvs(commands) == 1
    assert not half_written.exists()


def test_an_environment_of_a_checkout_that_was_moved_is_built_from_nothing(checkout: Path, commands: list[str]) -> None:
    setup.build_environment(ENVIRONMENT)
    place, inputs = ENVIRONMENT.stamp.read_text().splitlines()
    ENVIRONMENT.stamp.write_text(f"/elsewhere{place}\n{inputs}\n")
    commands.clear()
    setup.build_environment(ENVIRONMENT)
    assert made_venvs(commands) == 1


def test_a_failed_install_leaves_no_stamp(checkout: Path, commands: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    setup.build_environment(ENVIRONMENT)
    (checkout / "lock.txt").write_text("a==2\n")
    monkeypatch.setattr(setup, "run", lambda command: False)
    with pytest.raises(setup.SetupError, match="proxy"):
        setup.build_environment(ENVIRONMENT)
    assert not ENVIRONMENT.stamp.exists()


def test_pip_installs_where_uv_cannot(checkout: Path, commands: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    succeed = setup.run
    monkeypatch.setattr(setup, "run", lambda command: succeed(command) and "bin/uv" not in str(command[0]))
    setup.build_environment(ENVIRONMENT)
    assert any("-m pip install --no-deps --require-hashes -r lock.txt" in command for command in commands)
    assert ENVIRONMENT.stamp.exists()


@pytest.fixture
def java(tmp_path: Path) -> Callable[[str, bool], Path]:
    """Makes a Java of a version, with or without the module that Spark's launcher asks for."""

    def make(version: str, vector: bool = True) -> Path:
        home = tmp_path / f"java-{version}-{vector}"
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "java").write_text(
            f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\nexit {int(not vector)}\n"
        )
        (home / "bin" / "java").chmod(0o755)
        return home

    return make


def test_java_is_taken_from_17_on_and_only_with_the_vector_module(java: Callable[..., Path], tmp_path: Path) -> None:
    assert setup.java_version(java("17.0.15")) == 17
    assert setup.java_version(java("25")) == 25
    assert setup.java_version(java("11.0.2")) is None
    assert setup.java_version(java("1.8.0_412")) is None
    assert setup.java_version(java("21.0.1", vector=False)) is None
    assert setup.java_version(tmp_path / "nothing") is None


def test_a_java_that_spark_is_tested_on_is_preferred_to_a_newer_one(
    java: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    newer, tested = java("25"), java("21.0.1")
    monkeypatch.setattr(setup, "java_homes", lambda: iter([newer, tested]))
    assert setup.find_java() == (tested, 21)
    monkeypatch.setattr(setup, "java_homes", lambda: iter([newer]))
    assert setup.find_java() == (newer, 25)


def test_java_home_is_written_for_the_makefile(
    checkout: Path, java: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = java("17.0.15")
    monkeypatch.setattr(setup, "java_homes", lambda: iter([home]))
    setup.provide_java()
    assert (checkout / ".millrace" / "env").read_text() == f"JAVA_HOME={home}\n"


def test_without_any_java_the_message_says_what_to_install(
    checkout: Path, commands: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "java_homes", lambda: iter([]))
    monkeypatch.setattr(setup.os, "geteuid", lambda: 1000)
    with pytest.raises(setup.SetupError, match=r"apt-get install openjdk-17-jre-headless.*JAVA_HOME"):
        setup.provide_java()
    assert any("jdk.install" in command for command in commands)


@pytest.fixture
def finished(checkout: Path, java: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with its environment and a Java, as they are before Spark's classes are archived. Returns the Java."""
    monkeypatch.setattr(setup, "ORCHESTRATOR", ENVIRONMENT)
    ENVIRONMENT.path.mkdir()
    home = java("17.0.15")
    (home / "release").write_text('JAVA_RUNTIME_VERSION="17.0.15+6"\n')
    setup.ENV_FILE.write_text(f"JAVA_HOME={home}\n")
    return home


def test_sparks_classes_are_archived_again_for_other_packages_or_another_java_only(
    checkout: Path, finished: Path, commands: list[str]
) -> None:
    assert setup.archive_spark_classes() is None
    assert f"JAVA_HOME={finished} " in commands[0]
    assert setup.archive_spark_classes() == "up to date"
    (finished / "release").write_text('JAVA_RUNTIME_VERSION="17.0.16+8"\n')
    assert setup.archive_spark_classes() is None
    (checkout / "lock.txt").write_text("a==2\n")
    assert setup.archive_spark_classes() is None
    assert len(commands) == 3


def test_where_sparks_classes_cannot_be_archived_set_up_goes_on_and_does_not_try_each_time(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "run", lambda command: False)
    assert "not made (see .millrace/setup.log); Spark starts without" in (setup.archive_spark_classes() or "")
    assert setup.archive_spark_classes() == "up to date"


def test_a_demo_model_in_the_store_is_not_made_again(checkout: Path, commands: list[str]) -> None:
    folder = checkout / ".millrace" / "models" / setup.DEMO_MODEL / "0123abcd"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert setup.add_demo_model() == "up to date"
    assert commands == []


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_a_python_the_locks_are_not_for_is_refused_by_name(
    version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.sys, "version_info", (*version, 0))
    with pytest.raises(setup.SetupError, match=rf"Python 3\.{version[1]};(.|\n)*PYTHON=python3"):
        setup.check_machine()


def test_a_failing_step_is_named_with_its_reason_and_ends_set_up(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        setup.must([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], "What to do next.")

    later: list[str] = []
    monkeypatch.setattr(setup, "STEPS", (("first step", fail), ("second step", lambda: later.append("ran"))))
    assert setup.setup() == 1
    printed = capsys.readouterr().out
    assert "step 1, first step" in printed
    assert "the reason" in printed and "What to do next." in printed
    assert later == []


def test_a_second_set_up_waits_until_the_first_and_its_installers_are_gone(checkout: Path) -> None:
    """The lock outlives a killed set-up as long as an installer that it started still writes."""
    holder = f"""
import subprocess, sys
from pathlib import Path
from scripts import setup
setup.STATE = Path({str(setup.STATE)!r})
with setup.only_one():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=sys.stdin, close_fds=False)
    print("held", flush=True)
    child.wait()
"""
    repository = Path(__file__).resolve().parents[2]
    first = subprocess.Popen(
        [sys.executable, "-c", holder], cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout and first.stdin
    assert first.stdout.readline() == "held\n"
    first.kill()
    first.wait()
    second = subprocess.Popen(
        [sys.executable, "-c", holder], cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert second.stdout and second.stdin
    assert "waiting" in second.stdout.readline()
    first.stdin.write("\n")
    first.stdin.close()
    assert second.stdout.readline() == "held\n"
    second.communicate("\n")


def test_clean_keeps_runs_and_tables(checkout: Path) -> None:
    table = checkout / ".millrace" / "lake" / "enriched" / "part.parquet"
    table.parent.mkdir(parents=True)
    table.touch()
    for folder in (".venv", ".venv-inference"):
        (checkout / folder).mkdir()
    setup.clean()
    assert table.exists()
    assert not (checkout / ".venv").exists() and not (checkout / ".venv-inference").exists()
