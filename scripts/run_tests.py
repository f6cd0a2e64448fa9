"""Run the tests by tier and end with one line: how many passed and how many failed.

    .venv/bin/python scripts/run_tests.py               all tiers, in the order below
    .venv/bin/python scripts/run_tests.py unit dags     these

A tier is a folder of tests/ and the environment it runs in. `lint` and `types` count as one check each. A tier that
runs no test has failed, and so has a folder of tests that belongs to no tier: silence proves nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".millrace"
RESULTS = STATE / "test-results"
CODE = ("plugins", "dags", "spark_apps", "inference_images", "deploy", "benchmarks", "scripts", "tests")

# Cheap tiers first: what fails in a second should not wait for an engine.
TIERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "unit": (".venv", ("tests/unit", "tests/setup")),
    "runner": (".venv-inference", ("tests/runner",)),
    "spark": (".venv", ("tests/spark",)),
    "dags": (".venv", ("tests/dags",)),
    "kubernetes": (".venv", ("tests/kubernetes",)),
    "services": (".venv", ("tests/s3", "tests/compose")),
    "vllm": (".venv-inference", ("tests/runner_vllm",)),
    "e2e": (".venv", ("tests/e2e",)),
    "operations": (".venv", ("tests/operations",)),
}


@dataclass
class Outcome:
    tier: str
    passed: int
    failed: int
    skipped: int = 0
    seconds: float = 0.0


def environment() -> dict[str, str]:
    """The tests' environment: this one, with what set-up found (JAVA_HOME) and without Airflow's or Millrace's settings."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "MILLRACE_"))}
    if (STATE / "env").exists():
        env |= dict(line.split("=", 1) for line in (STATE / "env").read_text().splitlines() if "=" in line)
    return env


def call(command: list[str]) -> int:
    print(f"$ {' '.join(command)}", flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode


def check(name: str) -> Outcome:
    """Lint or types, over the folders of code that exist."""
    folders = [folder for folder in CODE if (ROOT / folder).is_dir()]
    if name == "lint":
        code = call([".venv/bin/ruff", "check", *folders])
        code = call([".venv/bin/ruff", "format", "--check", *folders]) or code
    else:
        # tests/ is left out: its fakes and fixtures gain nothing from annotations. Each job or DAG is a script, so
        # modules of the same name in two folders are not one module.
        scripts = [f for f in folders if f not in ("tests", "plugins", "inference_images")]
        code = call([".venv/bin/mypy", "-p", "millrace", "-p", "shard_runner"])
        for folder in scripts:
            code = call([".venv/bin/mypy", folder]) or code
    return Outcome(name, passed=int(code == 0), failed=int(code != 0))


def tests(name: str) -> Outcome:
    """One tier's tests, counted from pytest's own record of them."""
    venv, folders = TIERS[name]
    record = RESULTS / f"{name}.xml"
    record.unlink(missing_ok=True)
    code = call([f"{venv}/bin/python", "-m", "pytest", "-q", f"--junitxml={record}", *folders])
    if not record.exists():
        return Outcome(name, passed=0, failed=1)
    counts = {key: sum(int(suite.get(key, 0)) for suite in ElementTree.parse(record).iter("testsuite"))
              for key in ("tests", "failures", "errors", "skipped")}  # fmt: skip
    failed, skipped = counts["failures"] + counts["errors"], counts["skipped"]
    passed = counts["tests"] - failed - skipped
    if failed == 0 and (code != 0 or passed == 0):
        failed = 1
    return Outcome(name, passed, failed, skipped)


def orphans() -> list[str]:
    """Test files that no tier would run."""
    known = [ROOT / folder for _, folders in TIERS.values() for folder in folders]
    files = (ROOT / "tests").rglob("test_*.py")
    return [str(f.relative_to(ROOT)) for f in files if not any(f.is_relative_to(folder) for folder in known)]


def main(wanted: list[str]) -> int:
    names = wanted or ["lint", "types", *TIERS]
    unknown = [name for name in names if name not in ("lint", "types", *TIERS)]
    if unknown:
        print(f"No such tier: {', '.join(unknown)}. There are lint, types, {', '.join(TIERS)}.")
        return 2
    RESULTS.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for name in names:
        began = time.monotonic()
        print(f"\n== {name}", flush=True)
        outcome = tests(name) if name in TIERS else check(name)
        outcome.seconds = time.monotonic() - began
        outcomes.append(outcome)
    lost = orphans() if not wanted else []
    if lost:
        print(f"\nIn no tier, so never run: {', '.join(lost)}")
        outcomes.append(Outcome("orphans", passed=0, failed=len(lost)))

    print(f"\n{'tier':<10}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for o in outcomes:
        print(f"{o.tier:<10}{o.passed:>8}{o.failed:>8}{o.skipped:>9}{o.seconds:>9.0f}")
    passed, failed, skipped = (sum(getattr(o, key) for o in outcomes) for key in ("passed", "failed", "skipped"))
    print(f"\n{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
