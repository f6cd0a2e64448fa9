"""Turn a partition's rows into distinct requests, cut into shards: `spark-submit spark_apps/extract.py --run <run>`.

Reads the source files that `plan.json` names and the answers given before; writes below `extract/<attempt>/` of the run, then
`manifest.json`, once. Safe to run twice and at once: the first manifest stands, later runs only check it.
"""

from pyspark.sql import SparkSession

from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.spark.extract import describe, extract
from millrace.spark.session import run_app


def step(spark: SparkSession, lake: Lake, paths: RunPaths) -> str:
    return describe(extract(spark, lake, paths))


if __name__ == "__main__":
    run_app("extract", step)
