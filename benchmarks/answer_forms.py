"""Form `json` against form `compact` on the golden set of the demo enrichment: tokens per answer, rows/s, share right.

    .venv-inference/bin/python benchmarks/answer_forms.py

Each form is asked with its own few-shot answers, in one engine start each, its prefix cache warm. The last line is JSON with both forms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import orjson
from sample_run import sample_run

from shard_runner.ask import Asker
from shard_runner.engines import open_engine
from shard_runner.golden import read_golden
from shard_runner.leash import kill_descendants
from shard_runner.pump import Pump, Reading

FORMS = ("json", "compact")


def measure(form: str, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        sample = sample_run(Path(folder), 1, form=form)
        plan = sample.run.plan
        golden = {row.request.request_id: row for row in read_golden(sample.run.lake, plan)}
        pump = Pump(lambda: open_engine(sample.spec), Reading.of(plan.enrichment, lambda ask: None))
        asker = Asker(plan, sample.spec.model, pump.engine.tokenizer)

        def ask() -> list[Any]:
            return list(pump.answers(asker.asks(row.request for row in golden.values())))

        ask()
        speeds = []
        for _ in range(repeats):
            started = time.monotonic()
            answers = ask()
            speeds.append(len(answers) / (time.monotonic() - started))
        right = labelled = 0
        for answer in answers:
            values = orjson.loads(answer.values) if answer.values else {}
            for name, expected in golden[answer.request_id].expected.items():
                labelled += 1
                right += values.get(name) == expected
        return {
            "rows": len(answers),
            "tokens_per_answer": round(statistics.mean(answer.completion_tokens or 0 for answer in answers), 2),
            "rows_per_s": round(statistics.median(speeds), 2),
            "usable": round(sum(answer.status == "ok" for answer in answers) / len(answers), 3),
            "right": round(right / labelled, 3),
        }


def leave(result: dict[str, Any]) -> NoReturn:
    """vLLM's processes do not end with the interpreter on a CPU: an ordinary exit waits for them for ever."""
    print(json.dumps(result), flush=True)
    kill_descendants()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.form:
        leave(measure(args.form, args.repeats))
    result = {}
    for form in FORMS:
        command = [sys.executable, __file__, "--repeats", str(args.repeats), "--form", form]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        result[form] = json.loads(done.stdout.splitlines()[-1])
        print(form, result[form], flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
