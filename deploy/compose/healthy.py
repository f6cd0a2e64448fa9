"""Is a part of Airflow healthy? Ends with 0 or 1, for health checks.

    python deploy/compose/healthy.py scheduler

Asks the API server what it knows from the parts' heartbeats: `airflow jobs check` says the same, but takes 5 s of processor time to
import Airflow, each time and in each container.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request


def main(part: str) -> int:
    base = os.environ["AIRFLOW__CORE__EXECUTION_API_SERVER_URL"].removesuffix("/execution/")
    try:
        with urllib.request.urlopen(f"{base}/api/v2/monitor/health", timeout=8) as answer:
            status = json.load(answer)[part]["status"]
    except (OSError, ValueError, KeyError) as error:
        print(f"{part}: the API server does not say ({type(error).__name__})")
        return 1
    print(f"{part}: {status}")
    return int(status != "healthy")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
