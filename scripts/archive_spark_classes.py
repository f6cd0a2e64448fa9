"""Keep the classes that Spark loads at its start in a file that a JVM maps, instead of reading and checking them one by one.

    JAVA_HOME=... .venv/bin/python scripts/archive_spark_classes.py

Makes `millrace.spark.session.CLASS_ARCHIVE` (180 MB), Java's dynamic archive of what a small application loaded that does the steps'
kinds of work. A JVM takes it where its version and every jar are those that it was made with, and else starts as it would without.
https://docs.oracle.com/en/java/javase/17/docs/specs/man/java.html#application-class-data-sharing
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from millrace.settings import Settings
from millrace.spark.session import CLASS_ARCHIVE, start_session, submit_conf


def archive() -> None:
    """Run the application in a JVM that writes the archive when it ends."""
    CLASS_ARCHIVE.unlink(missing_ok=True)
    written = CLASS_ARCHIVE.with_suffix(".partial")
    conf = submit_conf(Settings.from_env().spark_apps, "1g", source_bytes=0)
    # The JVM would warn of each class that it leaves out.
    submit(f"{conf['spark.driver.extraJavaOptions']} -XX:ArchiveClassesAtExit={written} -Xlog:cds*=off")
    written.replace(CLASS_ARCHIVE)


def submit(java_options: str) -> None:
    """Run this file's application under spark-submit, as the steps are. Raises CalledProcessError when it fails."""
    spark_submit = Path(sys.executable).with_name("spark-submit")
    subprocess.run(
        [spark_submit, "--master", "local[2]", "--driver-java-options", java_options, __file__, "--work"],
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},
        check=True,
    )


def work(spark: SparkSession, folder: str) -> None:
    """Read, hash, take the distinct, sort, write, join and count rows of no meaning."""
    numbers = spark.range(1000).select(F.col("id").cast("string").alias("key"), (F.col("id") % 100).alias("text"))
    numbers.select("key", F.to_json(F.struct("text")).alias("input")).write.parquet(f"{folder}/source")
    rows = spark.read.parquet(f"{folder}/source").withColumn("request_id", F.sha2("input", 256))
    requests = rows.where(~F.col("input").rlike(r"\s")).select("request_id", "input").distinct()
    requests.repartition(2, "request_id").sortWithinPartitions("request_id").write.parquet(f"{folder}/requests")
    joined = rows.join(spark.read.parquet(f"{folder}/requests"), "request_id", "left")
    joined.groupBy("request_id").agg(F.count_if(F.col("key").isNull()), F.max(F.length("key"))).collect()


if __name__ == "__main__":
    if sys.argv[1:] == ["--work"]:
        with tempfile.TemporaryDirectory() as folder:
            work(start_session("millrace archive_spark_classes"), Path(folder).as_uri())
    else:
        archive()
