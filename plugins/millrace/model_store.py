"""The model store: `$MILLRACE_MODELS/<name>/<digest>/`, one folder per version of a model, never changed.

The digest is the SHA-256 over the folder's files, so whoever loads a model can prove that it is the one the plan names. Hidden
files (`.gitattributes`, `.cache/`) are no part of a model: they are neither copied nor hashed. Hubs are read here only, never by a pod.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.canonical import content_hash
from millrace.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from millrace.config_db import ConfigDb

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredModel:
    name: str
    digest: str
    folder: Path

    @property
    def location(self) -> str:
        """As `PinnedModel.location` has it: relative to the store."""
        return f"{self.name}/{self.digest}"

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in _files(self.folder))

    @property
    def config(self) -> dict[str, Any]:
        """The model's own config.json."""
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return config

    @property
    def context_tokens(self) -> int:
        """The longest context the model was made for; 2048 where its config does not say."""
        return int(self.config.get("max_position_embeddings") or 2048)


def _files(folder: Path) -> list[Path]:
    found = [
        f for f in folder.rglob("*") if f.is_file() and not any(p.startswith(".") for p in f.relative_to(folder).parts)
    ]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def folder_digest(folder: Path) -> str:
    """SHA-256 of the canonical JSON of [[relative path, sha256 of the file], ...], sorted by path. About 1 GB/s."""
    return content_hash([[file.relative_to(folder).as_posix(), _sha256(file)] for file in _files(folder)])


def verify(folder: Path, digest: str) -> None:
    """Raise NotFoundError when the folder is not there, ConfigError when its files are not those of `digest`."""
    if not folder.is_dir():
        raise NotFoundError(
            f"The model folder '{folder.parent.name}/{folder.name}' is not in the store '{folder.parent.parent}' (MILLRACE_MODELS). "
            "Add it with `millrace models add`."
        )
    found = folder_digest(folder)
    if found != digest:
        raise ConfigError(
            f"The model folder '{folder}' was changed: its files hash to {found[:12]}…, not {digest[:12]}…. "
            "Remove the folder and add the model again with `millrace models add`."
        )


def find(store: str | Path, location: str) -> Path:
    """The folder of a `<name>/<digest>` in the store. Raises NotFoundError; its files are not read (see `verify`)."""
    folder = Path(store) / location
    if not folder.is_dir():
        name = location.split("/")[0]
        raise NotFoundError(
            f"The model '{location}' is not in the store '{store}' (MILLRACE_MODELS). "
            f"Add it with `millrace models add {name} --from PATH`."
        )
    return folder


def stored_models(store: str | Path) -> list[StoredModel]:
    """Every model of the store by name, its newest version first."""
    found = [
        StoredModel(folder.parent.name, folder.name, folder)
        for folder in Path(store).glob("*/*")
        if folder.is_dir() and _DIGEST.fullmatch(folder.name)
    ]
    return sorted(found, key=lambda model: (model.name, -model.folder.stat().st_mtime_ns))


def add_model(source: str, name: str, store: str | Path) -> StoredModel:
    """Copy a model folder into the store, whole or not at all; a model that is there already is left alone.

    `source` is a folder, a `file://` or `s3://` URL, or `hf://<owner>/<repository>[@revision]`. Raises ConfigError when it
    is no model folder or cannot be read.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' cannot be a model's name; use letters, digits, dots and hyphens, e.g. smollm2-135m-instruct."
        )
    with _local(source) as folder:
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"'{source}' is not a model folder: it has no config.json. Name the folder that holds it."
            )
        digest = folder_digest(folder)
        model = StoredModel(name, digest, Path(store) / name / digest)
        if model.folder.is_dir():
            return model
        model.folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the models, so that no one takes it for one if this process is killed.
        copy = Path(store) / f".adding-{secrets.token_hex(8)}"
        try:
            for file in _files(folder):
                to = copy / file.relative_to(folder)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, to)
            if folder_digest(copy) != digest:
                raise ConfigError(f"'{source}' changed while it was copied. Add it again once it is at rest.")
            try:
                copy.rename(model.folder)
            except OSError:
                if not model.folder.is_dir():  # else another process has just added the same model
                    raise
        finally:
            shutil.rmtree(copy, ignore_errors=True)
    return model


@contextmanager
def _local(source: str) -> Iterator[Path]:
    """The source as a local folder, for as long as it is copied."""
    scheme, separator, rest = source.partition("://")
    if not separator or scheme == "file":
        folder = Path(rest if separator else source).expanduser()
        if not folder.is_dir():
            raise NotFoundError(f"There is no folder '{folder}'. Name the folder that holds the model's config.json.")
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="millrace-model-") as temporary:
        folder = Path(temporary)
        if scheme == "s3":
            _download_s3(source, folder)
        elif scheme == "hf":
            _download_hub(rest, folder)
        else:
            raise ConfigError(f"'{source}': models come from a folder, or a file://, s3:// or hf:// URL.")
        yield folder


def _download_s3(source: str, folder: Path) -> None:
    import obstore

    from millrace.lake import Lake

    lake = Lake(source)
    for file in lake.list(""):
        to = folder / file.path
        to.parent.mkdir(parents=True, exist_ok=True)
        with to.open("wb") as stream:
            for chunk in obstore.get(lake.store, file.path).stream():
                stream.write(chunk)


def _download_hub(repository: str, folder: Path) -> None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            "hf:// needs the package huggingface_hub, which this environment lacks. Install it, "
            "or download the model yourself and give its folder."
        ) from None
    repo_id, _, revision = repository.partition("@")
    try:
        snapshot_download(repo_id, revision=revision or None, local_dir=os.fspath(folder))
    except Exception as error:  # the hub client raises its own, requests' and httpx' errors
        raise ConfigError(
            f"hf://{repository} could not be downloaded: {type(error).__name__}. Check name, revision and network."
        ) from error


def register(db: ConfigDb, model: StoredModel, **columns: Any) -> None:
    """Point the config table's row of a model at this version; `columns` are further columns of the row."""
    defaults = {"engine": "vllm", "context_tokens": model.context_tokens}
    db.upsert_model(model.name, **(defaults | {"digest": model.digest, "location": model.location} | columns))


def sync_models(db: ConfigDb, store: str | Path) -> list[str]:
    """Register every model of the store that the config table does not know, at its newest version; returns their names."""
    known = {row.name for row in db.models()}
    added = []
    for model in stored_models(store):
        if model.name not in known:
            register(db, model)
            known.add(model.name)
            added.append(model.name)
    return added
