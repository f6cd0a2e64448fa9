"""What extract and join_back cost beside bare Spark jobs, and how much memory they take.

    .venv/bin/python benchmarks/spark_scale.py --rows 1000000

Rows are made from the real Chinese reviews, about half of them repeats; each further copy of the corpus gets its number as a
suffix, so that the share of repeats stays. In one process, on one Spark, after a warm-up of all four jobs:

- bare extract: read, hash the text, take the distinct texts, write them (`both` also writes every row's key and hash, which
  is what a join back needs: the least job with the outputs of extract);
- extract: the step itself, from the source's files to the manifest;
- bare join: read extract's rows and the answers, join, write the same columns;
- join_back: the step itself, from proof to counted files, without the expectation suite (timed on its own: `suite_s`).

The last line is JSON. `..._vs_bare` compares wall time, `..._cpu_vs_bare` the CPU time of all processes, which a busy machine
disturbs less.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from millrace.enrichment import load_enrichment
from millrace.lake import PARQUET_OPTIONS, Lake
from millrace.layout import answers_file, new_attempt, published_prefix
from millrace.plan import Decision, PinnedModel, PinnedPrompt, Plan, PlanRecord, fingerprint
from millrace.prompts import read_prompt
from millrace.proof import prove_shards
from millrace.records import Completion, FileRef, Manifest, Phases, Tokens
from millrace.schemas import ANSWER
from millrace.settings import Settings
from millrace.source_snapshot import snapshot
from millrace.spark.extract import extract
from millrace.spark.join_back import join_back
from millrace.spark.session import SETTINGS, in_spark, start_session, tasks_for

DATE = "2026-11-01"
CORPUS = "online_reviews_zh.parquet"
REQUESTS_PER_SHARD = 20_000  # the default of an enrichment; the demo's own is made for a CPU
ROWS_PER_FILE = 500_000


def write_source(lake: Lake, folder: str, rows: int) -> None:
    corpus = pq.read_table(Settings.from_env().home / "data" / CORPUS)
    made, copies, buffered = 0, 0, []
    while made < rows:
        part = corpus.slice(0, min(len(corpus), rows - made))
        suffix = f" ({copies})" if copies else ""
        buffered.append(
            pa.table(
                {
                    "comment_id": pc.binary_join_element_wise(f"{copies}-", part["comment_id"], ""),
                    "comment_text": pc.binary_join_element_wise(part["comment_text"], suffix, ""),
                    "polarity": part["polarity"],
                }
            )
        )
        made, copies = made + len(part), copies + 1
        if made >= rows or sum(map(len, buffered)) >= ROWS_PER_FILE:
            path = Path(lake.uri(f"{folder}/part-{made:09d}.parquet"))
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.concat_tables(buffered).combine_chunks(), path, row_group_size=100_000, **PARQUET_OPTIONS)
            buffered = []


def make_plan(lake: Lake) -> Plan:
    """A plan as the `plan` step makes it, without a config table."""
    settings = Settings.from_env()
    enrichment = load_enrichment(settings.enrichments / "review_polarity_zh.yaml")
    limits = enrichment.limits.model_copy(update={"requests_per_shard": REQUESTS_PER_SHARD})
    enrichment = enrichment.model_copy(update={"limits": limits})
    prompt = read_prompt(settings.prompts / enrichment.prompt)
    model = PinnedModel(name="bench", digest="bench", engine="vllm", location="bench/bench")
    asked = fingerprint(enrichment, prompt, model, 8)
    decision = Decision(
        enrichment=enrichment.name,
        partition=DATE,
        spec=enrichment.spec(),
        prompt=PinnedPrompt(name=enrichment.prompt, version=1, system=prompt.system, body=prompt.body),
        golden="",
        models={model.name: model},
        default_model=model.name,
        max_tokens=8,
        fingerprints={model.name: asked},
        accepted_fingerprints=[asked],
        source=snapshot(lake, enrichment, DATE),
        row_sample=None,
        ask_mode="reuse",
    )
    plan = Plan.make(decision, PlanRecord(dag_run_id="benchmark", user="benchmark", params={}))
    plan.save(lake)
    return plan


def answer(lake: Lake, plan: Plan) -> None:
    """Answer and complete every shard, as the runner would."""
    for shard in Manifest.load(lake, plan.paths.manifest).shards:
        ids = pa.concat_arrays([c for f in shard.files for c in _ids(lake, f.path).chunks])
        attempt, count = new_attempt(), len(ids)
        values = pc.if_else(
            pc.less(pc.utf8_slice_codeunits(ids, 0, 1), "8"), '{"recommends":"yes"}', '{"recommends":"no"}'
        )
        constants = {
            "fingerprint": shard.fingerprint,
            "status": "ok",
            "reading": plan.reading,
            "repaired": False,
            "finish_reason": "stop",
            "prompt_tokens": 180,
            "cached_tokens": 128,
            "completion_tokens": 2,
            "asked": 1,
            "latency_ms": 100,
            "model": shard.model,
            "revision": "bench",
            "prompt_version": 1,
            "answered_at": datetime.now(UTC),
            "plan_id": plan.plan_id,
        }
        columns = {name: pa.repeat(pa.scalar(v, ANSWER.field(name).type), count) for name, v in constants.items()}
        columns |= {"request_id": ids, "values": values, "raw_text": values}
        for name in ("reason", "confidence"):
            columns[name] = pa.nulls(count, pa.string())
        path = answers_file(shard.fingerprint, shard.shard_id, attempt)
        size = lake.write_parquet(path, pa.table([columns[name] for name in ANSWER.names], schema=ANSWER))
        done = Completion(
            plan_id=plan.plan_id,
            shard_id=shard.shard_id,
            attempt=attempt,
            requests=count,
            statuses={"ok": count},
            reasons={},
            answers=FileRef(path=path, size=size, rows=count),
            resumed=0,
            tokens=Tokens(),
            phases=Phases(),
            engine={},
        )
        lake.create(plan.paths.complete(shard.shard_id), done.dump())


def _ids(lake: Lake, path: str) -> pa.ChunkedArray:
    with lake.parquet(path) as parquet:
        return parquet.read(columns=["request_id"])["request_id"]


def bare_session(spark: SparkSession, size: int) -> SparkSession:
    session = spark.newSession()
    for key, value in SETTINGS.items():
        if key.startswith("spark.sql."):
            session.conf.set(key, value)
    session.conf.set("spark.sql.shuffle.partitions", str(max(8, tasks_for(size))))
    return session


def bare_extract(spark: SparkSession, lake: Lake, plan: Plan, out: str) -> None:
    source = plan.decision.source.files
    session = bare_session(spark, sum(file.size for file in source))
    texts = session.read.parquet(*(f"file://{file.path}" for file in source))
    hashed = texts.select(F.sha2("comment_text", 256).alias("id"), "comment_text").distinct()
    hashed.write.parquet(lake.spark_uri(out))


def bare_rows(spark: SparkSession, lake: Lake, plan: Plan, out: str) -> None:
    source = plan.decision.source.files
    rows = bare_session(spark, 0).read.parquet(*(f"file://{file.path}" for file in source))
    rows.select("comment_id", "polarity", F.sha2("comment_text", 256).alias("id")).write.parquet(lake.spark_uri(out))


def bare_join(spark: SparkSession, lake: Lake, plan: Plan, out: str) -> None:
    manifest = Manifest.load(lake, plan.paths.manifest)
    files = [done.answers for done in prove_shards(lake, plan.paths, manifest)]
    session = bare_session(spark, sum(file.size for file in [*manifest.row_files, *files]))
    rows = session.read.parquet(*in_spark(lake, [file.path for file in manifest.row_files]))
    answers = session.read.parquet(*in_spark(lake, [file.path for file in files]))
    columns = ["status", "reason", "values", "fingerprint", "model", "revision", "prompt_version", "repaired"]
    columns += ["finish_reason", "latency_ms", "answered_at", "plan_id"]
    joined = rows.join(answers.select("request_id", *columns), "request_id", "left")
    joined.select("key", "polarity", "request_id", *columns).write.parquet(lake.spark_uri(out))


class Meter(threading.Thread):
    """Peak resident memory of this process and all below it, the JVM included."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.2):
            self.peak = max(self.peak, int(sum(_of_tree(lambda p: p.memory_info().rss))))


def _of_tree(what: Callable[[psutil.Process], float]) -> list[float]:
    found = []
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            found.append(what(process))
        except psutil.NoSuchProcess:
            continue
    return found


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of some work."""

    def cpu() -> float:
        return sum(_of_tree(lambda p: sum(p.cpu_times()[:2])))

    wall, before = time.monotonic(), cpu()
    work()
    return time.monotonic() - wall, cpu() - before


def measure(spark: SparkSession, root: Path, rows: int) -> dict[str, float]:
    lake = Lake(str(root))
    write_source(lake, f"source/shop_reviews_zh/dt={DATE}", rows)
    plan = make_plan(lake)
    bare = timed(lambda: bare_extract(spark, lake, plan, "bare/extract"))
    both = [a + b for a, b in zip(bare, timed(lambda: bare_rows(spark, lake, plan, "bare/rows")), strict=True)]
    ours = timed(lambda: extract(spark, lake, plan.paths))
    answer(lake, plan)
    bare_joining = timed(lambda: bare_join(spark, lake, plan, "bare/join"))
    joined = []
    joining = timed(lambda: joined.append(join_back(spark, lake, plan.paths)))
    suite_s = joined[0].suite.seconds
    if joined[0].rows != rows or not joined[0].files[0].path.startswith(
        published_prefix(plan.enrichment.target.path, DATE, plan.plan_id, joined[0].attempt)
    ):
        raise SystemExit(f"join_back gave {joined[0].rows} rows for {rows}")
    return {
        "rows": rows,
        "requests": Manifest.load(lake, plan.paths.manifest).requests,
        "shards": len(Manifest.load(lake, plan.paths.manifest).shards),
        "extract_rows_per_s": round(rows / ours[0]),
        "join_back_rows_per_s": round(rows / (joining[0] - suite_s)),
        "extract_vs_bare": round(ours[0] / bare[0], 2),
        "join_back_vs_bare": round((joining[0] - suite_s) / bare_joining[0], 2),
        "extract_vs_bare_both": round(ours[0] / both[0], 2),
        "extract_cpu_vs_bare_both": round(ours[1] / both[1], 2),
        "extract_cpu_vs_bare": round(ours[1] / bare[1], 2),
        "bare_extract_rows_per_s": round(rows / bare[0]),
        "bare_join_rows_per_s": round(rows / bare_joining[0]),
        "suite_s": round(suite_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--warm-up-rows", type=int, default=100_000)
    args = parser.parse_args()
    meter = Meter()
    meter.start()
    root = Path(tempfile.mkdtemp(prefix="millrace-scale-"))
    try:
        spark = start_session("millrace spark_scale")
        print(f"warming up with {args.warm_up_rows:,} rows", flush=True)
        measure(spark, root / "warm", args.warm_up_rows)
        print(f"measuring {args.rows:,} rows", flush=True)
        result = measure(spark, root / "lake", args.rows)
        spark.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    meter.done.set()
    print(json.dumps(result | {"peak_rss_gib": round(meter.peak / 2**30, 2)}))


if __name__ == "__main__":
    main()
