"""A node's copy of a model: made once, whole or absent, never a wrong one; and the check of the device before it is loaded."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.errors import ConfigError, NotFoundError, UnavailableError
from millrace.model_store import folder_digest
from millrace.plan import PinnedModel
from shard_runner.device import check_device
from shard_runner.model_cache import cached_folder
from shard_runner.models import model_folder


def _copy(model: PinnedModel, store: str, cache: Path, copies: multiprocessing.Queue[int]) -> None:
    from millrace import model_store

    original = model_store.add_model

    def counted(*arguments: str) -> model_store.StoredModel:
        copies.put(1)
        return original(*arguments)

    model_store.add_model = counted
    cached_folder(model, store, cache)


def test_two_pods_of_a_node_copy_a_model_once(model: PinnedModel, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    copies: multiprocessing.Queue[int] = fork.Queue()
    arguments = (model, str(tmp_path / "models"), tmp_path / "cache", copies)
    pods = [fork.Process(target=_copy, args=arguments) for _ in range(2)]
    for pod in pods:
        pod.start()
    for pod in pods:
        pod.join(30)
    assert [pod.exitcode for pod in pods] == [0, 0]
    assert copies.get(timeout=5) == 1
    assert copies.empty()
    assert folder_digest(tmp_path / "cache" / model.location) == model.digest


def test_the_runner_loads_from_the_cache_where_there_is_one(
    model: PinnedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_MODEL_CACHE", str(tmp_path / "cache"))
    assert model_folder(model) == tmp_path / "cache" / model.location


def test_a_damaged_copy_is_made_again(model: PinnedModel, tmp_path: Path) -> None:
    store, cache = str(tmp_path / "models"), tmp_path / "cache"
    file = cached_folder(model, store, cache) / "config.json"
    file.write_text("{}")
    assert folder_digest(cached_folder(model, store, cache)) == model.digest


def test_a_changed_model_of_the_store_is_never_loaded(model: PinnedModel, tmp_path: Path) -> None:
    (tmp_path / "models" / model.location / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="was changed"):
        cached_folder(model, str(tmp_path / "models"), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/*"))


def test_a_model_that_the_store_does_not_have_is_named(model: PinnedModel, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="tiny"):
        cached_folder(model, str(tmp_path / "nowhere"), tmp_path / "cache")


def test_a_machine_without_a_gpu_fails_the_check_of_the_device() -> None:
    with pytest.raises(UnavailableError, match="no GPU is usable"):
        check_device()


def test_the_check_of_the_device_ends_as_an_engine_that_is_unavailable() -> None:
    done = subprocess.run([sys.executable, "-m", "shard_runner", "check-device"], capture_output=True, text=True)
    assert done.returncode == 3
    assert "no GPU is usable" in done.stdout
