"""The real locks against the real package index, and the two ways to resolve against each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lock_support import ROOT
from tpuforge.lock.inputs import existing, lock_path, torch_wheel, wheel_metadata
from tpuforge.lock.resolver import Job, resolve, target_python
from tpuforge.lock.sources import Source, read_source
from tpuforge.paths import out_dir, sha256_file
from tpuforge.pins import load

pytestmark = pytest.mark.network


@pytest.fixture(scope="module")
def source() -> Source:
    return read_source(Path(sys.executable))


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_pip_tools_and_uv_come_to_the_same_files(python: str, source: Source) -> None:
    if target_python(python, source) is None:
        pytest.skip(f"this machine has no Python {python}")
    job = Job(load(), "runtime", python, source)
    by_pip_tools = resolve(job, way="pip-tools")
    by_uv = resolve(job, way="uv")
    assert (by_pip_tools.way, by_uv.way) == ("pip-tools", "uv")
    assert by_pip_tools.packages == by_uv.packages
    assert len(by_uv.packages) > 20


def test_locks_are_fresh_whatever_the_place_zone_and_language(tmp_path: Path) -> None:
    place = tmp_path / "öut dir"
    env = {**os.environ, "TPUFORGE_OUT": str(place), "TZ": "Asia/Tokyo", "LANG": "de_DE.UTF-8"}
    words = [sys.executable, "-m", "tpuforge.lock.check", "--json"]
    done = subprocess.run(
        words,
        env=env | {"PYTHONPATH": str(ROOT / "src")},
        umask=0o077,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    locks = json.loads(done.stdout)["data"]["locks"]
    assert {(lock["flavour"], lock["python"]) for lock in locks} == set(existing(load()))
    assert all(lock["sound"] for lock in locks)
    fresh = {lock["flavour"] for lock in locks if lock["fresh"]}
    assert fresh == {"runtime", "smoke", "simulator"}


def test_locks_name_no_place() -> None:
    for flavour, python in existing(load()):
        text = lock_path(flavour, python).read_text(encoding="utf-8")
        assert "://" not in text
        assert str(ROOT) not in text


def test_metadata_beside_the_table_is_that_of_the_real_wheel(source: Source) -> None:
    torch = torch_wheel(load(), "3.11")
    held = [out_dir() / "wheelhouse" / torch.sha256, *source.folders]
    wheels = [folder / torch.file for folder in held if (folder / torch.file).is_file()]
    if not wheels:
        pytest.skip(
            f"{torch.file} is neither in the wheelhouse nor in a folder that pip is told of"
        )
    assert sha256_file(wheels[0]) == torch.sha256
    real = [line for line in wheel_metadata(wheels[0]).splitlines() if "Requires-Dist: " in line]
    assert real == [line for line in torch.metadata.splitlines() if "Requires-Dist: " in line]
