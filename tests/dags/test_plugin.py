"""`plugins/` holds a registration file that Airflow finds and a package that it must not load file by file."""

from __future__ import annotations

import subprocess
import sys


def test_airflow_loads_the_registration_file_and_nothing_of_the_package() -> None:
    """Without `.airflowignore` each module of millrace would be imported again under its bare name: `errors`, `cli`, `plan`."""
    code = """
import sys
from airflow import plugins_manager
plugins, errors = plugins_manager._get_plugins()
assert not errors, errors
print(*(plugin.name for plugin in plugins if plugin.name == "millrace"))
bare = {"errors", "settings", "lake", "plan", "records", "operators", "tasks", "local", "session", "tables"}
print(*sorted(name for name in bare & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["millrace", ""]


def test_the_package_is_one_whichever_way_it_is_reached() -> None:
    code = """
from airflow.plugins_manager import get_priority_weight_strategy_plugins
from millrace.airflow.priority import ScheduledFirst
assert get_priority_weight_strategy_plugins()["millrace.airflow.priority.ScheduledFirst"] is ScheduledFirst
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
