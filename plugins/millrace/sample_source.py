"""The sample tables: the review data of `data/` as partitioned source tables with dates, so that several days can be run.

| table                   | from                              | columns                            |
| ----------------------- | --------------------------------- | ---------------------------------- |
| source/product_reviews  | data/amazon_review_sentences.parquet | comment_id, comment_text, rating |
| source/shop_reviews_zh  | data/online_reviews_zh.parquet    | comment_id, comment_text, polarity |

A day holds a slice of the data in a fixed shuffled order (by hash of the id), the next day the slice after it; past the end the
data starts over, so that later days repeat texts as real logs do.
"""

from __future__ import annotations

import io
from datetime import date, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.canonical import sha256_hex
from millrace.errors import ConfigError, NotFoundError
from millrace.lake import PARQUET_OPTIONS, Lake

FIRST_DAY = date(2026, 11, 1)
TABLES = {
    "source/product_reviews": "amazon_review_sentences.parquet",
    "source/shop_reviews_zh": "online_reviews_zh.parquet",
}


def partitions(days: int) -> list[str]:
    """The sample's dates: the demo date 2026-11-01 and the days after it.

    >>> partitions(2)
    ['2026-11-01', '2026-11-02']
    """
    return [(FIRST_DAY + timedelta(days=day)).isoformat() for day in range(days)]


def load(lake: Lake, data: Path, rows: int | None = None, days: int = 3) -> dict[str, dict[str, int]]:
    """Write `days` partitions of `rows` rows (default: all that a table has) into each sample table.

    Returns table -> partition -> rows. A partition that has this content already keeps its file, so that loading twice
    gives the same plans; other partitions are left alone. Raises NotFoundError when the data is not there.
    """
    if days < 1 or (rows is not None and rows < 1):
        raise ConfigError("The sample needs at least one day and one row a day.")
    loaded: dict[str, dict[str, int]] = {}
    for table, name in TABLES.items():
        shuffled = _shuffled(data / name)
        size = len(shuffled) if rows is None else min(rows, len(shuffled))
        loaded[table] = {}
        for day, partition in enumerate(partitions(days)):
            positions = [(day * size + i) % len(shuffled) for i in range(size)]
            _write(lake, f"{table}/dt={partition}/part-00000.parquet", shuffled.take(positions))
            loaded[table][partition] = size
    return loaded


def _shuffled(file: Path) -> pa.Table:
    if not file.is_file():
        raise NotFoundError(
            f"The sample data '{file.name}' is not in '{file.parent}'. Check the checkout's data/ folder."
        )
    table = pq.read_table(file)
    hashes = [sha256_hex(key) for key in table["comment_id"].to_pylist()]
    return table.take(sorted(range(len(hashes)), key=hashes.__getitem__))


def _write(lake: Lake, path: str, table: pa.Table) -> None:
    sink = io.BytesIO()
    pq.write_table(table, sink, **PARQUET_OPTIONS)
    if lake.read_or_none(path) != sink.getvalue():
        lake.write(path, sink.getvalue())
