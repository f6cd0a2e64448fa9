"""The lake's promises where they rest on conditional puts, multipart uploads and listings by page."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

import millrace
from millrace.errors import ConfigError, NotFoundError, UnavailableError
from millrace.lake import Lake
from millrace.records import FileRef, IncompleteError
from tests.s3.server import BUCKET, Relay

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])


def run_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that imports millrace as this one does."""
    env = os.environ | {"PYTHONPATH": str(Path(millrace.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=env, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


def test_of_many_threads_exactly_one_creates_a_file_and_its_bytes_stay(lake: Lake) -> None:
    with ThreadPoolExecutor(16) as pool:
        wins = list(pool.map(lambda i: lake.create("a/complete.json", str(i).encode()), range(48)))
    assert wins.count(True) == 1
    assert lake.read("a/complete.json") == str(wins.index(True)).encode()


_CREATE = """
import sys
from millrace.lake import Lake
lake, me = Lake(sys.argv[1]), sys.argv[2]
lake.exists("x")  # imported and connected
print("ready", flush=True)
sys.stdin.readline()
print([name for name in map(str, range(30)) if lake.create(f"race/{name}", me.encode())])
"""


def test_of_several_processes_exactly_one_creates_each_of_many_files(lake: Lake) -> None:
    racers = [run_python(_CREATE, lake.root, f"racer {i}") for i in range(4)]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = {f"racer {i}": eval(racer.communicate(timeout=60)[0]) for i, racer in enumerate(racers)}
    assert sorted(name for names in won.values() for name in names) == sorted(map(str, range(30)))
    for me, names in won.items():
        assert {lake.read(f"race/{name}").decode() for name in names} <= {me}


def test_a_winner_whose_answer_was_lost_on_the_way_still_knows_that_it_won(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = Relay(os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
    behind_relay = Lake(lake.root)
    assert behind_relay.create("complete.json", b"mine") is True
    assert relay.lost == 1
    assert behind_relay.create("complete.json", b"another's") is False
    assert lake.read("complete.json") == b"mine"
    relay.close()


def test_write_replaces_the_whole_file(lake: Lake) -> None:
    lake.write("a/b.json", b"a long first version")
    lake.write("a/b.json", b"short")
    assert (lake.read("a/b.json"), lake.size("a/b.json")) == (b"short", 5)


def test_missing_files_are_none_or_an_error_that_names_them(lake: Lake) -> None:
    assert lake.size("no/such") is None
    assert lake.read_or_none("no/such") is None
    with pytest.raises(NotFoundError, match="no/such"):
        lake.read("no/such")
    with pytest.raises(IncompleteError, match="no/such' is missing"):
        FileRef(path="no/such", size=1, rows=1).check(lake)


def test_lists_files_sorted_and_folders_by_name(lake: Lake) -> None:
    for name in ("b/2", "a/1", "a/c/3"):
        lake.write(f"root/{name}", b"x")
    lake.write("rooted/4", b"x")
    assert [(file.path, file.size) for file in lake.list("root")] == [
        ("root/a/1", 1),
        ("root/a/c/3", 1),
        ("root/b/2", 1),
    ]
    assert lake.folders("root") == ["a", "b"]
    assert (list(lake.list("nothing")), lake.folders("nothing")) == ([], [])


def test_more_files_than_a_page_of_a_listing_are_listed_and_deleted(lake: Lake) -> None:
    names = [f"many/{i:04}/complete.json" for i in range(1100)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: lake.write(name, b"{}"), names))
    assert [file.path for file in lake.list("many")] == names
    assert lake.folders("many") == [f"{i:04}" for i in range(1100)]
    lake.delete([*names[:-1], "many/never/was"])
    assert [file.path for file in lake.list("many")] == names[-1:]


def test_names_of_partitions_and_runs_are_the_same_to_every_library(lake: Lake) -> None:
    """obstore writes, pyarrow reads, and the other way round: equals signs, spaces, colons and letters of any language."""
    table = pa.table({"id": [1], "text": ["a"]}, schema=SCHEMA)
    for folder in ("answers/fingerprint=f0", "source/dt=2026-11-01", "source/dt=a b:c", "source/dt=größe 評"):
        lake.write_parquet(f"{folder}/one.parquet", table)
        with lake.parquet_writer(f"{folder}/two.parquet", SCHEMA) as writer:
            writer.write_table(table)
        assert [file.path for file in lake.list(folder)] == [f"{folder}/one.parquet", f"{folder}/two.parquet"]
        for name in ("one", "two"):
            assert lake.parquet(f"{folder}/{name}.parquet").read() == table


def test_parquet_streams_out_and_in_by_row_group(lake: Lake) -> None:
    """About 24 MB: several parts of an upload, and reads of single row groups."""
    text = os.urandom(6_000_000).hex()
    with lake.parquet_writer("x/big.parquet", SCHEMA) as writer:
        for group in range(4):
            writer.write_table(pa.table({"id": [group], "text": [text[group:]]}, schema=SCHEMA))
    assert (lake.size("x/big.parquet") or 0) > 20_000_000
    with lake.parquet("x/big.parquet") as file:
        assert file.schema_arrow == SCHEMA
        assert [file.read_row_group(i)["id"].to_pylist() for i in range(file.num_row_groups)] == [[0], [1], [2], [3]]
        assert file.read_row_group(3)["text"].to_pylist() == [text[3:]]


_TORN = """
import os, sys
import pyarrow as pa
from millrace.lake import Lake
schema = pa.schema([pa.field("text", pa.string())])
with Lake(sys.argv[1]).parquet_writer("torn.parquet", schema) as writer:
    for _ in range(3):
        writer.write_table(pa.table({"text": [os.urandom(6_000_000).hex()]}, schema=schema))
    print("written", flush=True)
    sys.stdin.readline()
"""


def test_a_writer_that_is_killed_leaves_no_file_behind(lake: Lake) -> None:
    process = run_python(_TORN, lake.root)
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert lake.size("torn.parquet") is None
    assert list(lake.list("")) == []


def test_wrong_keys_are_a_configuration_error_that_names_the_variables(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(lake.list("")) == []  # connected while the keys were right
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    stranger = Lake(lake.root)
    for ask in (
        lambda: stranger.read("a"),
        lambda: stranger.write("a", b"x"),
        lambda: stranger.create("a", b"x"),
        lambda: stranger.folders(""),
        lambda: list(stranger.list("")),
    ):
        with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY") as caught:
            ask()
        assert "wrong" not in str(caught.value)
    assert list(lake.list("")) == []


def test_a_bucket_that_is_not_there_is_named(lake: Lake) -> None:
    elsewhere = Lake("s3://no-such-bucket/lake")
    for ask in (lambda: elsewhere.write("a", b"x"), lambda: elsewhere.create("a", b"x")):
        with pytest.raises(ConfigError, match=r"no-such-bucket.*Create its bucket"):
            ask()


def test_a_store_that_does_not_answer_is_worth_a_retry(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Relay(os.environ["AWS_ENDPOINT_URL"])
    gone.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", gone.url)
    with pytest.raises(UnavailableError, match=rf"s3://{BUCKET}.*then retry"):
        Lake(lake.root).read("a")
