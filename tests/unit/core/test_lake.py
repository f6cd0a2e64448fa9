"""The two promises of the lake: atomic replacement, and exactly one winner of a conditional creation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.errors import ConfigError, NotFoundError
from millrace.lake import Lake


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


def test_of_many_creators_exactly_one_wins_and_its_bytes_stay(lake: Lake) -> None:
    with ThreadPoolExecutor(16) as pool:
        wins = list(pool.map(lambda i: lake.create("a/complete.json", str(i).encode()), range(64)))
    assert wins.count(True) == 1
    assert lake.read("a/complete.json") == str(wins.index(True)).encode()


def test_write_replaces_the_whole_file(lake: Lake) -> None:
    lake.write("a/b.json", b"a long first version")
    lake.write("a/b.json", b"short")
    assert lake.read("a/b.json") == b"short"
    assert lake.size("a/b.json") == 5


def test_missing_files_are_none_or_an_error_that_names_them(lake: Lake) -> None:
    assert lake.size("no/such") is None
    assert lake.read_or_none("no/such") is None
    with pytest.raises(NotFoundError, match="no/such"):
        lake.read("no/such")


def test_lists_files_sorted_and_folders_by_name(lake: Lake) -> None:
    for name in ("b/2", "a/1", "a/c/3"):
        lake.write(f"root/{name}", b"x")
    assert [f.path for f in lake.list("root")] == ["root/a/1", "root/a/c/3", "root/b/2"]
    assert lake.folders("root") == ["a", "b"]
    assert list(lake.list("nothing")) == []
    assert lake.folders("nothing") == []


def test_parquet_streams_out_and_in(lake: Lake) -> None:
    schema = pa.schema([pa.field("id", pa.string(), nullable=False)])
    with lake.parquet_writer("x/part.parquet", schema) as writer:
        writer.write_table(pa.table({"id": ["a"]}, schema=schema))
        writer.write_table(pa.table({"id": ["b"]}, schema=schema))
    file = lake.parquet("x/part.parquet")
    assert file.num_row_groups == 2
    assert file.schema_arrow == schema
    assert file.read().column("id").to_pylist() == ["a", "b"]


def test_uris_round_trip_and_foreign_ones_are_refused(lake: Lake, tmp_path: Path) -> None:
    for uri in (lake.uri("x/y"), lake.spark_uri("x/y"), f"file:{lake.uri('x/y')}"):
        assert lake.relative(uri) == "x/y"
    with pytest.raises(ConfigError, match="does not lie in the lake"):
        lake.relative(str(tmp_path / "other"))
    s3 = Lake("s3://bucket/prefix/")
    assert s3.spark_uri("x") == "s3a://bucket/prefix/x"
    assert s3.relative("s3a://bucket/prefix/x") == "x"


def test_other_stores_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="MILLRACE_LAKE"):
        Lake("gs://bucket")


def test_a_streamed_file_is_seen_whole_or_not_at_all(lake: Lake) -> None:
    """An extract that finds a torn answer file, and finds it whole when it looks again, asks and reuses the same request."""
    schema = pa.schema([("a", pa.int64())])

    def seen() -> list[str]:
        return [file.path for file in lake.list("x") if file.path.endswith(".parquet")]

    with lake.parquet_writer("x/part.parquet", schema) as writer:
        writer.write_table(pa.table({"a": [1]}, schema))
        assert seen() == []
    assert seen() == ["x/part.parquet"]

    def write_and_fail() -> None:
        with lake.parquet_writer("x/other.parquet", schema) as writer:
            writer.write_table(pa.table({"a": [1]}, schema))
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        write_and_fail()
    assert [file.path for file in lake.list("x")] == ["x/part.parquet"]
