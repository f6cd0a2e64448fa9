"""When a CPU's engine compiles its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from shard_runner.engines.compiling import PRICE, WORTH_LOADING, Compiled, processor


@pytest.fixture(autouse=True)
def a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard_runner.engines.compiling.shutil.which", lambda name: name)


def compiled(cache: Path, block_size: int = 32) -> Compiled:
    return Compiled(cache, {"model": "m", "block_size": block_size}, "0.32.0")


def test_a_machine_compiles_for_a_shard_that_repays_it_alone(tmp_path: Path) -> None:
    assert compiled(tmp_path).pays(PRICE)
    assert not compiled(tmp_path).pays(PRICE - 1)


def test_small_shards_repay_it_together_and_very_small_ones_never_load_it(tmp_path: Path) -> None:
    shards = 0
    while not compiled(tmp_path).pays(1250):
        compiled(tmp_path).count(1250)
        shards += 1
    assert (shards - 1) * 1250 < PRICE - 1250 <= shards * 1250
    assert compiled(tmp_path).pays(WORTH_LOADING + 250)
    assert not compiled(tmp_path).pays(WORTH_LOADING - 1)


def test_other_settings_are_counted_apart(tmp_path: Path) -> None:
    compiled(tmp_path).count(PRICE)
    assert compiled(tmp_path).pays(WORTH_LOADING)
    assert not compiled(tmp_path, block_size=64).pays(WORTH_LOADING)


def test_what_one_processor_compiled_is_not_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    intel = "processor\t: 0\nmodel name\t: Xeon\ncpu MHz\t\t: 2100.0\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t: 1\nflags\t: fpu\n"
    same, older, arm = (
        intel.replace("2100.0", "1800.5"),
        intel.replace(" avx512f", ""),
        "Features\t: fp asimd\nCPU part\t: 0xd0c\n",
    )
    found = []
    for text in (intel, same, older, arm):
        monkeypatch.setattr(Path, "read_text", lambda path, encoding, text=text: text)
        found.append(processor())
    assert found[0] == found[1] and len(set(found)) == 3


def test_nothing_is_compiled_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard_runner.engines.compiling.shutil.which", lambda name: None)
    assert not compiled(tmp_path).pays(PRICE)


def test_a_cache_that_cannot_be_written_or_was_torn_counts_nothing_and_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    compiled(tmp_path / "file").count(PRICE)
    assert not compiled(tmp_path / "file").pays(WORTH_LOADING)
    compiled(tmp_path).count(PRICE)
    for torn in (tmp_path / "shard_runner").iterdir():
        torn.write_text("")
    assert not compiled(tmp_path).pays(WORTH_LOADING)
