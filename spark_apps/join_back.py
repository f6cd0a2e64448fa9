"""Fan a run's answers out to its rows, below the enriched table: `spark-submit spark_apps/join_back.py --run <run>`.

Refuses unless every shard of the manifest is proved complete. Reads the run's rows and reused answers and the files that completion
records name; writes below `dt=<D>/<plan id>-<attempt>/` of the table, where no reader looks before publish, then `joined.json`.
Safe to run twice and at once: each attempt has a folder of its own.
"""

from pyspark.sql import SparkSession

from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.spark.join_back import describe, join_back
from millrace.spark.session import run_app


def step(spark: SparkSession, lake: Lake, paths: RunPaths) -> str:
    return describe(join_back(spark, lake, paths))


if __name__ == "__main__":
    run_app("join_back", step)
