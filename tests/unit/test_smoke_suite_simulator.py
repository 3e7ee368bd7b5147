"""The simulator's inputs: what changes its key, and what is refused before anything is built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from process_support import call
from smoke_suite_support import ROOT
from tpuforge.console import Progress
from tpuforge.errors import ForgeError
from tpuforge.lockfile import read_lock
from tpuforge.pins import load
from tpuforge.smoke import simulator

LOCK = ROOT / "lock" / f"simulator-py{load().default_python.replace('.', '')}.txt"


def _forge(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TPUFORGE_OUT": str(out)}
    return call(
        [sys.executable, "-m", "tpuforge.smoke.simulator", *arguments], env=env, timeout=120
    )


def test_the_key_follows_every_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {simulator.key(generation) for generation in simulator.GENERATIONS}
    assert len(keys) == len(simulator.GENERATIONS)
    before = simulator.key()
    assert before == simulator.key() == simulator.key("v6e")
    source = tmp_path / "wrapper.c"
    source.write_text(simulator.WRAPPER.read_text() + "\n")
    monkeypatch.setattr(simulator, "WRAPPER", source)
    assert simulator.key() != before
    monkeypatch.undo()
    lock = tmp_path / LOCK.name
    # without its head, which vouches for the other lines
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines)
    changed = text.replace("sha256:5", "sha256:6", 1)
    assert changed != text
    lock.write_text(changed)
    monkeypatch.setattr(simulator, "LOCKS", tmp_path)
    assert simulator.key() != before


def test_an_unknown_generation_is_refused(tmp_path: Path) -> None:
    done = _forge(tmp_path, "--generation", "v99")
    assert done.returncode == 2
    assert "there is no TPU generation v99" in done.stderr
    assert "v5e, v5p, v6e, v7" in done.stderr


def test_a_lock_without_the_plugin_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / LOCK.name
    lock.write_text(f"ziglang==1.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(simulator, "LOCKS", tmp_path)
    with pytest.raises(ForgeError, match="has no xla-cpu-pjrt"):
        simulator.key()


def test_a_missing_wheel_is_named_with_what_mends_it(tmp_path: Path) -> None:
    done = _forge(tmp_path)
    assert done.returncode == 2
    assert "xla-cpu-pjrt 0.0.1 is not in the wheelhouse" in done.stderr
    assert "./forge fetch_wheel" in done.stderr
    assert list((tmp_path / "simulator").iterdir()) == []


def test_a_wheel_with_another_digest_is_refused(tmp_path: Path) -> None:
    pin = next(one for one in read_lock(LOCK) if one.name == "xla-cpu-pjrt")
    folder = tmp_path / "wheelhouse" / pin.sha256
    folder.mkdir(parents=True)
    (folder / "xla_cpu_pjrt-0.0.1-py3-none-manylinux_2_27_x86_64.whl").write_bytes(b"flipped")
    done = _forge(tmp_path)
    assert done.returncode == 1
    assert "in the wheelhouse has the digest" in done.stderr
    assert list((tmp_path / "simulator").iterdir()) == []


def test_the_python_that_is_asked_for_names_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "LOCKS", tmp_path)
    for python in load().pythons:
        with pytest.raises(ForgeError, match=f"simulator-py{python.replace('.', '')}.txt"):
            simulator.key(python=python)
    with pytest.raises(ForgeError, match=r"Python 2\.7 is not supported"):
        simulator.key(python="2.7")


@pytest.mark.parametrize(
    "record",
    [
        [],
        {"key": "k"},
        {"key": "k", "plugin": 7, "files": {"wrapper.so": "0", "plugin.so": "0"}},
        {"key": "k", "plugin": {"wheel": "w"}, "files": ["wrapper.so", "plugin.so"]},
        {"key": "k", "plugin": {"wheel": "w"}, "files": {"wrapper.so": 1, "plugin.so": None}},
    ],
)
def test_an_odd_record_is_a_simulator_to_be_made_again(tmp_path: Path, record: object) -> None:
    (tmp_path / "simulator.json").write_text(json.dumps(record))
    for name in ("wrapper.so", "plugin.so"):
        (tmp_path / name).write_bytes(b"")
    assert not simulator._intact(tmp_path, "k")


def test_a_simulator_that_nobody_asked_for_in_a_day_goes_and_all_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path))
    monkeypatch.setattr(simulator, "_intact", lambda folder, _: folder.is_dir())
    wanted = simulator.key()
    hours = {wanted: 100, "1" * 64: 25, "2" * 64: 23, "not-a-key": 100}
    for name, age in hours.items():
        folder = tmp_path / "simulator" / name
        folder.mkdir(parents=True)
        (folder / "plugin.so").write_bytes(b"")
        os.utime(folder, (0, time.time() - age * 3600))
    made = simulator.ensure_simulator(Progress("test", quiet=True))
    assert made == tmp_path / "simulator" / wanted
    assert {path.name for path in made.parent.iterdir()} == {wanted, "2" * 64, "not-a-key"}
    # it was asked for now: another key's run leaves it for a day
    assert time.time() - made.stat().st_mtime < 60
