"""Run an enrichment's expectations over the source partition: `spark-submit spark_apps/check_source.py --run <run>`.

Reads the source files that `plan.json` names and `expectations/<name>/source.json`; writes `source_check.json`, which holds counts and
ids, never texts. Ends with 2 when a blocking check is unmet or any check could not be answered. Safe to run twice.
"""

from pyspark.sql import SparkSession

from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.spark.check_source import check_source
from millrace.spark.session import run_app


def step(spark: SparkSession, lake: Lake, paths: RunPaths) -> str:
    return check_source(spark, lake, paths)


if __name__ == "__main__":
    run_app("check_source", step)
