"""What the JVM's settings for small sources save: one small Spark application under spark-submit, three ways in turn.

    .venv/bin/python benchmarks/spark_start.py --rounds 5

The application is the one whose classes scripts/archive_spark_classes.py archives: it reads, hashes, sorts, joins and writes a
thousand rows, so nearly all of it is the start. `plain` is the JVM as it comes; `one_compiler` leaves out its second compiler, as
Millrace does up to SMALL_SOURCE_BYTES; `archive` also maps Spark's classes from CLASS_ARCHIVE. Medians of wall and CPU seconds,
children included; the first round of each warms the file cache and is not counted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from millrace.settings import Settings
from millrace.spark.session import CLASS_ARCHIVE, submit_conf
from scripts.archive_spark_classes import submit


def ways() -> dict[str, str]:
    """Options for the JVM by name of the way."""
    if not CLASS_ARCHIVE.exists():
        raise SystemExit(f"{CLASS_ARCHIVE} does not exist; `make setup` makes it.")
    options = submit_conf(Settings.from_env().spark_apps, "1g", source_bytes=0)["spark.driver.extraJavaOptions"].split()
    one_compiler = [option for option in options if "SharedArchiveFile" not in option]
    plain = [option for option in one_compiler if "TieredStopAtLevel" not in option]
    return {"plain": " ".join(plain), "one_compiler": " ".join(one_compiler), "archive": " ".join(options)}


def start(options: str) -> tuple[float, float]:
    """Wall and CPU seconds of one start."""

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    began, before = time.monotonic(), cpu()
    submit(options)
    return time.monotonic() - began, cpu() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    taken: dict[str, list[tuple[float, float]]] = {}
    for round_number in range(args.rounds + 1):
        for way, options in ways().items():
            seconds = start(options)
            print(f"round {round_number}  {way:12}  {seconds[0]:5.1f} s  {seconds[1]:5.1f} CPU s", flush=True)
            if round_number:
                taken.setdefault(way, []).append(seconds)
    medians = {
        way: [round(statistics.median(values), 1) for values in zip(*s, strict=True)] for way, s in taken.items()
    }
    print(json.dumps({way: {"wall_s": wall, "cpu_s": cpu} for way, (wall, cpu) in medians.items()}))


if __name__ == "__main__":
    main()
