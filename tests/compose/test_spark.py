"""What S3A is told in the orchestrator's image. The jar itself is not to be had here: docs/compose.md says what that leaves untested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.compose.conftest import ROOT

_PRINT = """
from pyspark.sql import SparkSession
hadoop = SparkSession.builder.getOrCreate()._jsc.hadoopConfiguration()
for key in ("endpoint", "endpoint.region", "path.style.access", "access.key", "secret.key"):
    print(f"seen {key}={hadoop.get('fs.s3a.' + key)}")
"""


def test_the_aws_variables_become_s3as_settings(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(_PRINT)
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_CONF_DIR": str(ROOT / "deploy" / "orchestrator"),
        "AWS_ENDPOINT_URL": "http://s3:8333",
        "AWS_REGION": "eu-central-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    command = ["spark-submit", "--master", "local[1]", str(tmp_path / "app.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    seen = dict(line.removeprefix("seen ").split("=") for line in done.stdout.splitlines() if line.startswith("seen "))
    assert seen == {
        "endpoint": "http://s3:8333",
        "endpoint.region": "eu-central-1",
        "path.style.access": "true",
        "access.key": "key",
        "secret.key": "secret",
    }, done.stderr[-2000:]
