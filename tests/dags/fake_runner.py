"""Stands in for `shard-runner` in the operators' tests: does what FAKE_RUNNER says and writes the records that a runner would.

`how` is a word or, for each start in turn, a list of them: an exit code, `complete`, `liar` (exit 0, nothing done), `wait` (until
SIGTERM, then 75), or `kill` (SIGKILL). What it was started with is appended to the file `seen`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.records import Completion, FileRef, Manifest, Outcome, Phases, Tokens


def main() -> int:
    told = json.loads(os.environ["FAKE_RUNNER"])
    # Before the start is on record: a test may send the signal as soon as it sees that.
    told_to_stop: list[bool] = []
    if told["how"] == "wait":
        signal.signal(signal.SIGTERM, lambda *_: told_to_stop.append(True))
    seen = Path(told["seen"])
    starts = seen.read_text().splitlines() if seen.exists() else []
    with seen.open("a") as file:
        file.write(json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ)}) + "\n")
    how = told["how"]
    if isinstance(how, list):
        how = how[len(starts)]
    if sys.argv[1] == "probe":
        print(f"12:00:00 INFO 50 of 50 golden answers usable (exit {how})")
        return int(how)
    options = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    lake = Lake(os.environ["MILLRACE_LAKE"])
    paths = RunPaths.parse(options["--run"])[1]
    shard_id, attempt = options["--shard"], options["--attempt"]
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "wait":
        print("at work", flush=True)
        while not told_to_stop:
            time.sleep(0.01)
        how = 75
    if how == "liar":
        return 0
    code = 0 if how == "complete" else int(how)
    if code == 0:
        complete(lake, paths, shard_id, attempt)
    elif told.get("records", True):
        lake.write(
            f"{paths.shard_attempt(shard_id, attempt)}/outcome.json",
            Outcome(
                plan_id=paths.plan_id,
                shard_id=shard_id,
                attempt=attempt,
                exit_code=code,
                message="as told",
                answered=0,
                reasons={},
                started_at=datetime.now(UTC),
            ).dump(),
        )
    print(f"12:00:00 INFO ended as told (exit {code})")
    return code


def complete(lake: Lake, paths: RunPaths, shard_id: str, attempt: str) -> None:
    """Write the completion record of a shard, and an answer file of the stated size."""
    entry = next(s for s in Manifest.load(lake, paths.manifest).shards if s.shard_id == shard_id)
    path = f"answers/fingerprint=f/{shard_id}-{attempt}.parquet"
    lake.write(path, b"answers")
    lake.create(
        paths.complete(shard_id),
        Completion(
            plan_id=paths.plan_id,
            shard_id=shard_id,
            attempt=attempt,
            requests=entry.requests,
            statuses={"ok": entry.requests},
            reasons={},
            answers=FileRef(path=path, size=7, rows=entry.requests),
            resumed=0,
            tokens=Tokens(),
            phases=Phases(),
            engine={},
        ).dump(),
    )


if __name__ == "__main__":
    sys.exit(main())
