"""What a plan reads of a source on S3, and a model that is fetched from there."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from millrace import model_store
from millrace.enrichment import Enrichment, parse_enrichment
from millrace.errors import ConfigError, NotFoundError
from millrace.lake import Lake
from millrace.publishing import storage_options
from millrace.source_snapshot import snapshot

ROWS = pa.table({"id": ["1", "2"], "body": ["nice", "awful"]})


def enrichment(path: str) -> Enrichment:
    return parse_enrichment(
        {
            "name": "mood",
            "source": {"path": path, "key": "id", "text": "body"},
            "prompt": "mood",
            "answer": {"mood": {"labels": ["good", "bad"]}},
            "target": {"path": "enriched/mood"},
        }
    )


def test_partition_is_the_same_snapshot_until_a_file_of_it_changes(lake: Lake) -> None:
    lake.write_parquet("source/t/dt=2026-11-01/part-0.parquet", ROWS)
    before = snapshot(lake, enrichment("source/t"), "2026-11-01")
    assert [file.path for file in before.files] == [lake.uri("source/t/dt=2026-11-01/part-0.parquet")]
    lake.write_parquet("source/t/dt=2026-11-02/part-0.parquet", ROWS)
    assert snapshot(lake, enrichment("source/t"), "2026-11-01") == before
    lake.write_parquet("source/t/dt=2026-11-01/part-0.parquet", ROWS.take([1, 0]))
    assert snapshot(lake, enrichment("source/t"), "2026-11-01") != before


def test_source_may_lie_outside_the_lake(lake: Lake, tmp_path: Path) -> None:
    lake.write_parquet("t/dt=2026-11-01/part-0.parquet", ROWS)
    found = snapshot(Lake(str(tmp_path)), enrichment(lake.uri("t")), "2026-11-01")
    assert [file.path for file in found.files] == [lake.uri("t/dt=2026-11-01/part-0.parquet")]
    with pytest.raises(NotFoundError, match="2026-11-01"):
        snapshot(Lake(str(tmp_path)), enrichment(lake.uri("t")), "2026-11-02")


def test_delta_table_gives_its_live_files(lake: Lake) -> None:
    for text in ("old", "new"):
        rows = pa.table({"id": ["1"], "body": [text], "dt": ["2026-11-01"]})
        write_deltalake(
            lake.uri("t"), rows, partition_by=["dt"], mode="overwrite", storage_options=storage_options(lake)
        )
    (file,) = snapshot(lake, enrichment("t"), "2026-11-01").files
    assert lake.parquet(lake.relative(file.path)).read()["body"].to_pylist() == ["new"]


def test_model_is_fetched_whole(lake: Lake, tmp_path: Path) -> None:
    lake.write("models/m/config.json", b"{}")
    lake.write("models/m/tokenizer/vocab.txt", b"a\n")
    model = model_store.add_model(lake.uri("models/m"), "m", tmp_path)
    model_store.verify(model.folder, model.digest)
    assert (model.folder / "tokenizer" / "vocab.txt").read_bytes() == b"a\n"
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model_store.add_model(lake.uri("models/nothing"), "m", tmp_path)
