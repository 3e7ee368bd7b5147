"""The corpus of programs, and the baseline that their figures are held to."""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path

import pytest
from smoke import pjrt, programs

from tpuforge.lockfile import read_lock

ROOT = Path(__file__).resolve().parents[2]
GOOD = [one for one in programs.corpus() if not one.refused]
FIGURES = {"code_bytes": 1000, "peak_device_bytes": 1000, "flops": 1000}


def _libtpu() -> str:
    pins = read_lock(ROOT / "lock" / "runtime-py311.txt")
    return next(one.version for one in pins if one.name == "libtpu")


@pytest.mark.parametrize("name", [one.name for one in programs.corpus()])
def test_every_program_is_there_and_names_no_place_of_any_machine(name: str) -> None:
    text = programs.named(name).text()
    # MLIR byte code, or a text
    assert text[:4] == b"ML\xefR" or text.startswith(b"//")
    for place in (bytes(ROOT), b"/root/", b"/home/", b"/opt/", b"site-packages"):
        assert place not in text


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in programs.HERE.glob("*.mlir*")) < 300_000


def test_nothing_lies_there_that_is_no_program() -> None:
    names = {path.name.partition(".")[0] for path in programs.HERE.glob("*.mlir*")}
    assert names == {one.name for one in programs.corpus()}


def test_a_program_that_was_exchanged_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(programs.HERE / "corpus.toml", tmp_path)
    (tmp_path / "large.mlir.xz").write_bytes(lzma.compress(programs.named("small").text()))
    monkeypatch.setattr(programs, "HERE", tmp_path)
    with pytest.raises(ValueError, match="is not the program that"):
        programs.named("large").text()


def test_there_is_no_such_program() -> None:
    with pytest.raises(KeyError):
        programs.named("nothing")


@pytest.mark.parametrize("target", pjrt.ALL_TARGETS)
def test_the_baseline_has_every_program_for_the_locked_libtpu(target: str) -> None:
    found = programs.read_baseline()[_libtpu()][target]
    assert set(found) == {one.name for one in GOOD}
    assert all(set(figures) <= set(programs.JUDGED) for figures in found.values())
    assert all(figures["code_bytes"] > 0 for figures in found.values())


def test_the_baseline_comes_back_as_it_was_written(tmp_path: Path) -> None:
    whole = {"0.0.1": {"v6e:2x2": {"small": FIGURES, "sharded-256": {"code_bytes": 1}}}}
    path = tmp_path / "baseline.toml"
    path.write_text(programs.write_baseline(whole))
    assert programs.read_baseline(path) == whole
    assert programs.read_baseline(tmp_path / "none.toml") == {}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, None),
        ({"code_bytes": 1100, "peak_device_bytes": 950}, None),
        ({"code_bytes": 1101}, "code_bytes is 1101, the baseline has 1000 (within 10%)"),
        ({"peak_device_bytes": 949}, "peak_device_bytes is 949, the baseline has 1000 (within 5%)"),
        ({"flops": 1001}, "flops is 1001, the baseline has 1000 (exactly)"),
        ({"flops": -3}, "flops is -3, the baseline has 1000 (exactly)"),
    ],
)
def test_figures_are_held_to_their_bands(change: dict[str, int], wrong: str | None) -> None:
    baseline = {"1": {"v6e:2x2": {"small": FIGURES}}}
    compared = programs.compare("small", "v6e:2x2", "1", FIGURES | change, baseline)
    assert compared.judged
    assert compared.wrong == ((wrong,) if wrong else ())


def test_what_the_baseline_lacks_is_recorded_and_not_judged() -> None:
    baseline = {"1": {"v6e:2x2": {"small": FIGURES}}}
    for name, target, version, lacking in (
        ("small", "v6e:2x2", "2", "libtpu 2"),
        ("small", "v5e:2x2", "1", "small for v5e:2x2"),
        ("large", "v6e:2x2", "1", "large for v6e:2x2"),
    ):
        compared = programs.compare(name, target, version, FIGURES, baseline)
        assert not compared.judged
        assert compared.why.startswith("recorded, not judged")
        assert lacking in compared.why


def test_a_program_for_many_devices_gets_a_topology_that_has_them() -> None:
    many = programs.named("sharded-256")
    assert many.topology("v6e:2x2") == "v6e:16x16"
    assert many.topology("tpu7x:2x2x1") == "tpu7x:4x4x8"
    assert programs.named("small").topology("v6e:4x4") == "v6e:4x4"
    # a generation that nobody knows is left to libtpu, which says so
    assert many.topology("v9:2x2") == "v9:2x2"


def test_all_means_one_host_of_every_generation() -> None:
    assert pjrt.targets(None) == pjrt.DEFAULT_TARGETS
    assert pjrt.targets(["all"]) == pjrt.ALL_TARGETS
    assert pjrt.targets(["v6e:4x4", "all", "v6e:4x4"]) == ("v6e:4x4", *pjrt.ALL_TARGETS)
