"""The model store: whole folders under the hash of their files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millrace import model_store
from millrace.config_db import ConfigDb
from millrace.errors import ConfigError, NotFoundError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    (folder / "tokenizer" / "vocab.txt").write_text("a\nb\n")
    (folder / ".gitattributes").write_text("not part of the model")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "models"


def test_digest_depends_on_names_and_content_and_on_nothing_else(source: Path, tmp_path: Path) -> None:
    digest = model_store.folder_digest(source)
    (source / ".cache").mkdir()
    (source / ".cache" / "x").write_text("hidden")
    os.utime(source / "config.json", (1, 1))
    assert model_store.folder_digest(source) == digest
    (source / "tokenizer" / "vocab.txt").rename(source / "tokenizer" / "vocab2.txt")
    assert model_store.folder_digest(source) != digest


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_added_model_is_a_whole_copy_that_verifies(source: Path, store: Path, prefix: str) -> None:
    model = model_store.add_model(f"{prefix}{source}", "m", store)
    assert sorted(p.relative_to(model.folder).as_posix() for p in model.folder.rglob("*") if p.is_file()) == [
        "config.json",
        "tokenizer/vocab.txt",
    ]
    assert model.folder == store / "m" / model.digest == model_store.find(store, model.location)
    assert model.context_tokens == 4096
    model_store.verify(model.folder, model.digest)


def test_adding_twice_leaves_the_first_copy_alone(source: Path, store: Path) -> None:
    first = model_store.add_model(str(source), "m", store)
    before = (first.folder / "config.json").stat().st_ino
    assert model_store.add_model(str(source), "m", store) == first
    assert (first.folder / "config.json").stat().st_ino == before
    assert [p.name for p in store.iterdir()] == ["m"]


def test_copy_that_fails_leaves_nothing_behind(source: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_store.shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        model_store.add_model(str(source), "m", store)
    assert model_store.stored_models(store) == []
    assert not list(store.glob(".adding-*"))


def test_folder_of_a_killed_copy_is_no_model(source: Path, store: Path) -> None:
    torn = store / ".adding-0123"
    torn.mkdir(parents=True)
    (torn / "config.json").write_text("{}")
    assert model_store.stored_models(store) == []


def test_changed_file_is_found_before_loading(source: Path, store: Path) -> None:
    model = model_store.add_model(str(source), "m", store)
    (model.folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="was changed"):
        model_store.verify(model.folder, model.digest)
    with pytest.raises(NotFoundError, match="MILLRACE_MODELS"):
        model_store.verify(store / "m" / ("0" * 64), model.digest)


def test_what_is_no_model_is_refused(source: Path, store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model_store.add_model(str(source / "tokenizer"), "m", store)
    with pytest.raises(NotFoundError, match="There is no folder"):
        model_store.add_model(str(tmp_path / "nowhere"), "m", store)
    with pytest.raises(ConfigError, match="cannot be a model's name"):
        model_store.add_model(str(source), "../m", store)
    with pytest.raises(ConfigError, match="file://, s3:// or hf://"):
        model_store.add_model("ftp://host/m", "m", store)
    assert not store.exists()


def test_models_of_the_store_are_registered_once_and_rows_that_exist_are_kept(
    source: Path, store: Path, config_db_url: str
) -> None:
    db = ConfigDb(config_db_url)
    name = "store-test"
    first = model_store.add_model(str(source), name, store)
    assert model_store.sync_models(db, store) == [name]
    row = db.model(name)
    assert (row.digest, row.location, row.engine, row.context_tokens) == (first.digest, first.location, "vllm", 4096)
    (source / "config.json").write_text("{}")
    model_store.add_model(str(source), name, store)
    assert model_store.sync_models(db, store) == []
    assert db.model(name).digest == first.digest


def test_newest_version_is_the_one_registered(source: Path, store: Path, config_db_url: str) -> None:
    db = ConfigDb(config_db_url)
    old = model_store.add_model(str(source), "two-versions", store)
    os.utime(old.folder, (1, 1))
    (source / "config.json").write_text("{}")
    new = model_store.add_model(str(source), "two-versions", store)
    model_store.sync_models(db, store)
    assert db.model("two-versions").digest == new.digest
