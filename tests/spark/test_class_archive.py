"""The archive of Spark's classes: of use to the Java and the jars at hand, and harmless where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.settings import Settings
from millrace.spark import session


def start(*options: str) -> subprocess.CompletedProcess[str]:
    """Start Spark's launcher with options for the JVM; it prints its version and ends."""
    command = [Path(sys.executable).with_name("spark-submit"), "--driver-java-options", " ".join(options), "--version"]
    env = os.environ | {"PYSPARK_PYTHON": sys.executable}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def options() -> list[str]:
    conf = session.submit_conf(Settings.from_env().spark_apps, "1g")
    return conf["spark.driver.extraJavaOptions"].split()


def test_the_archive_that_set_up_made_is_taken() -> None:
    """With -Xshare:on a JVM refuses to start where it cannot take the archive."""
    assert session.CLASS_ARCHIVE.exists(), "set-up did not make it; .millrace/setup.log says why"
    done = start(*options(), "-Xshare:on")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "version 4." in done.stderr


def test_an_archive_of_something_else_is_passed_over_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "CLASS_ARCHIVE", tmp_path / "spark-classes.jsa")
    session.CLASS_ARCHIVE.write_bytes(os.urandom(1 << 16))
    assert start(*options(), "-Xshare:on").returncode != 0
    done = start(*options())
    assert done.returncode == 0
    assert "version 4." in done.stderr
    assert "cds" not in done.stdout + done.stderr
