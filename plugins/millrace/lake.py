"""The lake: one small interface over a local folder or an S3 bucket.

Paths are relative to the lake's root, with forward slashes. What makes runs safe to repeat and to kill rests on two
promises of this module: `write` replaces a file atomically (readers see the old bytes or the new ones), and `create` lets
exactly one of any number of concurrent writers win. docs/lake.md says what they rest on.
"""

from __future__ import annotations

import io
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, S3Store

from millrace.errors import ConfigError, NotFoundError, UnavailableError
from millrace.settings import Settings

# Zstandard level 1: about as fast as the default snappy and smaller on text columns.
PARQUET_OPTIONS: dict[str, Any] = {"compression": "zstd", "compression_level": 1}


@dataclass(frozen=True)
class FileInfo:
    path: str
    size: int  # bytes
    modified: datetime  # UTC


class Lake:
    """A folder or an s3:// URL that holds runs, answers and tables.

    Credentials and endpoints of S3 come from the standard AWS_* variables, never from arguments.
    """

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        if "://" in root and not root.startswith("s3://"):
            raise ConfigError(f"MILLRACE_LAKE is '{root}'; it must be a path or an s3:// URL.")
        self.is_local = not root.startswith("s3://")
        if self.is_local:
            self.root = os.path.abspath(self.root)

    @classmethod
    def from_env(cls) -> Lake:
        return cls(Settings.from_env().lake)

    @cached_property
    def store(self) -> LocalStore | S3Store:
        if self.is_local:
            # A folder whose last file is deleted goes too, as on an object store: an empty one would look like a run.
            return LocalStore(self.root, mkdir=True, automatic_cleanup=True)
        # A plain-http endpoint is a store on this machine or inside the cluster; S3Store refuses it unless told.
        http = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        return S3Store.from_url(self.root, client_options={"allow_http": True} if http else {})

    @cached_property
    def fs(self) -> pafs.FileSystem:
        """The lake as a pyarrow file system rooted at the lake."""
        if self.is_local:
            Path(self.root).mkdir(parents=True, exist_ok=True)
            return pafs.SubTreeFileSystem(self.root, pafs.LocalFileSystem())
        endpoint = os.environ.get("AWS_ENDPOINT_URL")
        options: dict[str, Any] = {"endpoint_override": endpoint} if endpoint else {}
        return pafs.SubTreeFileSystem(self.root.removeprefix("s3://"), pafs.S3FileSystem(**options))

    def uri(self, path: str) -> str:
        """The absolute path or URL of a file, as people and deltalake write it."""
        return f"{self.root}/{path}" if path else self.root

    def spark_uri(self, path: str) -> str:
        """The same in Spark's form: `file:///...` or `s3a://...`."""
        return f"file://{self.uri(path)}" if self.is_local else "s3a://" + self.uri(path).removeprefix("s3://")

    def relative(self, uri: str) -> str:
        """The path inside the lake of an absolute path or URL. ConfigError when it lies elsewhere."""
        plain = re.sub(r"^(file:(//)?|s3a://)", lambda m: "s3://" if m[0] == "s3a://" else "", uri)
        if self.is_local and not plain.startswith("s3://"):
            plain = os.path.abspath(plain)
        if not plain.startswith(self.root + "/"):
            raise ConfigError(f"'{uri}' does not lie in the lake '{self.root}' (MILLRACE_LAKE).")
        return plain[len(self.root) + 1 :]

    @contextmanager
    def _asking(self, path: str) -> Iterator[None]:
        """Whose fault is it, and does retrying help? obstore itself has retried by then, for up to three minutes."""
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError, GenericError) as error:
            # The first line says what happened; the rest is a dump of the error's internals.
            said = str(error).splitlines()[0][:300]
            # A listing that is refused has no class of its own (obstore 0.12).
            if isinstance(error, GenericError) and not re.search(r"status code: 40[13]\b", said):
                raise UnavailableError(
                    f"The lake '{self.root}' failed at '{path}': {said}. Mend the store, then retry."
                ) from error
            raise ConfigError(
                f"The lake '{self.root}' refuses access to '{path}'. Check the owner of the folder, or AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY and what their owner may do."
            ) from error

    def read(self, path: str) -> bytes:
        data = self.read_or_none(path)
        if data is None:
            raise NotFoundError(f"'{path}' does not exist in the lake '{self.root}'.")
        return data

    def read_or_none(self, path: str) -> bytes | None:
        try:
            with self._asking(path):
                return bytes(obstore.get(self.store, path).bytes())
        except FileNotFoundError:
            return None

    def write(self, path: str, data: bytes) -> None:
        """Write or replace a whole file atomically."""
        with self._asking(path), self._bucket():
            obstore.put(self.store, path, data, mode="overwrite")

    def create(self, path: str, data: bytes) -> bool:
        """Write a file unless it exists. True for the one writer whose bytes are there from then on."""
        try:
            with self._asking(path), self._bucket():
                obstore.put(self.store, path, data, mode="create")
        except AlreadyExistsError:
            # A store may write a file and answer 503, and the repeated request then meets our own file (seen on a relay
            # that does so). A winner that took itself for the loser would throw away what its record names.
            return self.read_or_none(path) == data
        return True

    @contextmanager
    def _bucket(self) -> Iterator[None]:
        """Only a bucket that is not there makes a write end with "not found"."""
        try:
            yield
        except FileNotFoundError as error:
            raise ConfigError(f"The lake '{self.root}' (MILLRACE_LAKE) does not exist. Create its bucket.") from error

    def size(self, path: str) -> int | None:
        """Size in bytes, or None when the file does not exist."""
        try:
            with self._asking(path):
                return int(obstore.head(self.store, path)["size"])
        except FileNotFoundError:
            return None

    def exists(self, path: str) -> bool:
        return self.size(path) is not None

    def list(self, prefix: str) -> Iterator[FileInfo]:
        """Every file below a folder, sorted by path."""
        with self._asking(prefix):
            found = [
                FileInfo(meta["path"], int(meta["size"]), meta["last_modified"])
                for batch in obstore.list(self.store, prefix)
                for meta in batch
            ]
        yield from sorted(found, key=lambda file: file.path)

    def folders(self, prefix: str) -> Sequence[str]:
        """Names of the folders directly below a folder."""
        with self._asking(prefix):
            prefixes = obstore.list_with_delimiter(self.store, prefix)["common_prefixes"]
        return sorted(p.rstrip("/").rsplit("/", 1)[-1] for p in prefixes)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete files; one that is gone already is no error."""
        if not paths:
            return
        with self._asking(paths[0]):
            try:
                obstore.delete(self.store, paths)
            except FileNotFoundError:  # a local folder says so, and stops there
                for path in paths:
                    with suppress(FileNotFoundError):
                        obstore.delete(self.store, path)

    def parquet(self, path: str) -> pq.ParquetFile:
        """Open one Parquet file for streaming; never reads it whole."""
        return pq.ParquetFile(path, filesystem=self.fs, memory_map=False)

    def write_parquet(self, path: str, table: pa.Table) -> int:
        """Write a small table atomically; returns its size in bytes."""
        sink = io.BytesIO()
        pq.write_table(table, sink, **PARQUET_OPTIONS)
        data = sink.getvalue()
        self.write(path, data)
        return len(data)

    @contextmanager
    def parquet_writer(self, path: str, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
        """Stream row groups into one file, which appears whole or not at all. It counts only once a record names it with its size.

        An extract reads the cache twice while other runs write to it. A file that was torn the first time and whole the second
        would be asked and reused at once (seen: each row doubled). A killed writer leaves a `.tmp` file behind.
        """
        if not self.is_local:  # an object appears when its upload is completed
            with pq.ParquetWriter(path, schema, filesystem=self.fs, **PARQUET_OPTIONS) as writer:
                yield writer
            return
        whole = Path(self.uri(path))
        whole.parent.mkdir(parents=True, exist_ok=True)
        torn = whole.with_name(f"{whole.name}.{secrets.token_hex(4)}.tmp")
        try:
            with pq.ParquetWriter(str(torn), schema, **PARQUET_OPTIONS) as writer:
                yield writer
            torn.replace(whole)
        finally:
            torn.unlink(missing_ok=True)
