"""The real locks against the real package index, and the two ways to resolve against each other."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lock_support import ROOT
from process_support import call
from tpuforge.lock.inputs import cpu_wheel, existing, held_wheel, lock_path, wheel_metadata
from tpuforge.lock.resolver import Job, resolve, target_python, view_of
from tpuforge.lock.sources import Source, read_source
from tpuforge.lock.view import View
from tpuforge.lockfile import read_lock
from tpuforge.paths import sha256_file
from tpuforge.pins import load

pytestmark = pytest.mark.network


@pytest.fixture(scope="module")
def source() -> Source:
    return read_source(Path(sys.executable))


@pytest.fixture(scope="module")
def view(source: Source) -> Iterator[View]:
    """One view for all: each page of the index is fetched once."""
    with view_of(load(), source) as one:
        yield one


@pytest.mark.parametrize(
    ("flavour", "python"),
    [("runtime", "3.11"), ("runtime", "3.12"), ("runtime", "3.13"), ("serve", "3.12")],
)
def test_pip_tools_and_uv_come_to_the_same_files(
    flavour: str, python: str, source: Source, view: View
) -> None:
    if target_python(python, source) is None:
        pytest.skip(f"this machine has no Python {python}")
    job = Job(load(), flavour, python, source, view)
    by_pip_tools = resolve(job, way="pip-tools")
    by_uv = resolve(job, way="uv")
    assert (by_pip_tools.way, by_uv.way) == ("pip-tools", "uv")
    assert by_pip_tools.packages == by_uv.packages
    assert by_pip_tools.left_out == by_uv.left_out
    # and that is what is locked
    assert list(by_uv.packages) == read_lock(lock_path(flavour, python))


def test_locks_are_fresh_whatever_the_place_zone_and_language(tmp_path: Path) -> None:
    place = tmp_path / "öut dir"
    env = {**os.environ, "TPUFORGE_OUT": str(place), "TZ": "Asia/Tokyo", "LANG": "de_DE.UTF-8"}
    words = [sys.executable, "-m", "tpuforge.lock.check", "--json"]
    done = call(words, env=env | {"PYTHONPATH": str(ROOT / "src")}, umask=0o077)
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


@pytest.mark.parametrize(("name", "python"), [("torch", "3.11"), ("torchvision", "3.12")])
def test_metadata_beside_the_table_is_that_of_the_real_wheel(
    name: str, python: str, source: Source
) -> None:
    build = cpu_wheel(load(), name, python)
    wheel = held_wheel(build, source.folders)
    if wheel is None:
        pytest.skip(
            f"{build.file} is neither in the wheelhouse nor in a folder that pip is told of"
        )
    assert sha256_file(wheel) == build.sha256
    real = [line for line in wheel_metadata(wheel).splitlines() if "Requires-Dist: " in line]
    assert real == [line for line in build.metadata.splitlines() if "Requires-Dist: " in line]
