"""The one place for Spark settings, and how a Spark application begins and ends.

`submit_conf` is for whoever calls spark-submit and imports no Spark. A master is never set where spark-submit gave one, so the
same application runs on `local[*]`, a standalone cluster or Kubernetes.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from millrace.errors import ConfigError, ExitCode, MillraceError
from millrace.lake import Lake
from millrace.layout import RunPaths
from millrace.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

# Bytes of compressed input that one task of a shuffle should see; text grows about threefold in memory.
BYTES_PER_TASK = 64 << 20
# Up to here the JVM's second compiler costs more than its code saves. CPU seconds with and without it: 24.5 and 15.1 for an application
# of 1,000 rows, 41 and 23 to extract 4.6 MB, 35,124 rows (docs/performance.md).
SMALL_SOURCE_BYTES = 8 << 20
# What scripts/archive_spark_classes.py makes for the Spark of this environment: the same application then takes 8.9 CPU seconds.
CLASS_ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Jobs of one application run beside each other; neither waits for the other's last task.
    "spark.scheduler.mode": "FAIR",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.adaptive.enabled": "true",
    # A partition value is the string it is: '007' is not 7, and '2026-11-01' is not a date.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.sql.caseSensitive": "true",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.hadoop.parquet.compression.codec.zstd.level": "1",
    # Output counts because a manifest names it with its size: a marker would prove nothing, and a second rename protects nothing.
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
}


def submit_conf(spark_apps: Path, driver_memory: str, source_bytes: int | None = None) -> dict[str, str]:
    """Settings that only count on spark-submit's command line, because the driver's JVM starts before the application.

    `source_bytes` is the size of the partition's files, None where it is not known.
    """
    options = [f"-Dlog4j2.configurationFile={spark_apps / 'log4j2.properties'}"]
    if source_bytes is not None and source_bytes <= SMALL_SOURCE_BYTES:
        options.append("-XX:TieredStopAtLevel=1")
    if CLASS_ARCHIVE.exists():
        # A JVM or a class path that it was not made for starts without it, and would say so in every log.
        options += [f"-XX:SharedArchiveFile={CLASS_ARCHIVE}", "-Xlog:cds*=off"]
    return {
        "spark.driver.memory": driver_memory,
        "spark.driver.extraJavaOptions": " ".join(options),
        "spark.ui.showConsoleProgress": "false",
    }


def start_session(name: str) -> SparkSession:
    """The application's session with Millrace's settings, on the master that spark-submit chose or else `local[*]`."""
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    conf = SparkConf()
    conf.setIfMissing("spark.master", "local[*]")
    submitted = submit_conf(Path(__file__).parents[3] / "spark_apps", Settings.from_env().spark_driver_memory)
    for key, value in (submitted | SETTINGS).items():
        conf.setIfMissing(key, value)
    session: SparkSession = SparkSession.builder.appName(name).config(conf=conf).getOrCreate()
    return session


def derived_session(spark: SparkSession, partitions: int) -> SparkSession:
    """A session of its own on the same engine, whose shuffles have exactly this many partitions.

    Adaptive execution may neither merge nor split them: one partition becomes one file, and which rows meet in it is a
    function of the data alone.
    """
    session = spark.newSession()
    for key, value in SETTINGS.items():
        if key.startswith("spark.sql."):
            session.conf.set(key, value)
    session.conf.set("spark.sql.shuffle.partitions", str(partitions))
    session.conf.set("spark.sql.adaptive.coalescePartitions.enabled", "false")
    session.conf.set("spark.sql.adaptive.skewJoin.enabled", "false")
    return session


def tasks_for(size: int) -> int:
    """Shuffle partitions for an input of `size` bytes.

    >>> tasks_for(0), tasks_for(64 << 20), tasks_for((64 << 20) + 1)
    (1, 1, 2)
    """
    return max(1, -(-size // BYTES_PER_TASK))


def spark_form(path: str) -> str:
    """An absolute path or URL in the form Spark's file systems know: `file:///...` or `s3a://...`.

    >>> spark_form("s3://bucket/a"), spark_form("/data/a")
    ('s3a://bucket/a', 'file:///data/a')
    """
    if path.startswith("s3://"):
        return "s3a://" + path.removeprefix("s3://")
    return path if "://" in path else f"file://{path}"


def in_spark(lake: Lake, paths: Iterable[str]) -> list[str]:
    """Paths inside the lake in Spark's form."""
    return [lake.spark_uri(path) for path in paths]


def run_app(name: str, step: Callable[[SparkSession, Lake, RunPaths], str]) -> None:
    """Parse the command line, run a step, print its one-line result, and end the process with the code of its outcome.

    Only Millrace's own messages are printed. Others can quote a row, be they Spark's, Java's, Arrow's or Python's: of these the class is
    printed, and where in Millrace it came up.
    """
    from pyspark.errors import PySparkException

    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument(
        "--run", required=True, help="runs/<enrichment>/<partition>/<plan id>, with or without the lake"
    )
    parser.add_argument("--lake", help="path or s3:// URL; default: the lake of --run, else MILLRACE_LAKE")
    args = parser.parse_args()
    try:
        root, paths = RunPaths.parse(args.run)
        named: str | None = args.lake or root
        lake = Lake(named) if named else Lake.from_env()
        message = step(start_session(f"millrace {name} {paths.enrichment} {paths.partition}"), lake, paths)
    except MillraceError as error:
        sys.exit(_failed(name, str(error), error.exit_code))
    except PySparkException as error:
        sys.exit(_failed(name, f"Spark failed with {error_class(error)} in {args.run}.", ExitCode.UNAVAILABLE))
    except Exception as error:
        said = (
            f"{type(error).__name__} at {_place(error)} in {args.run}. Clear the task; if it repeats, report this line."
        )
        sys.exit(_failed(name, said, ExitCode.UNAVAILABLE))
    print(f"{name}: {message}", flush=True)


def error_class(error: Exception) -> str:
    """Spark's name for an error, such as CAST_INVALID_INPUT: it never quotes a row."""
    condition = getattr(error, "getCondition", lambda: None)()
    return str(condition or type(error).__name__)


def _place(error: Exception) -> str:
    """File and line of the innermost of Millrace's own frames that an error passed through."""
    package = Path(__file__).parents[1]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"


def explain_rule_error(error: Exception, key: str) -> ConfigError:
    """The ConfigError for an SQL rule of the enrichment that Spark refused."""
    return ConfigError(
        f"{key} failed with {error_class(error)}. It is Spark SQL in ANSI mode, where a malformed value is an error: "
        "correct the rule, e.g. with try_cast(...), and clear `plan`."
    )


def _failed(name: str, message: str, code: int) -> int:
    print(f"{name}: {message}", file=sys.stderr, flush=True)
    return int(code)
