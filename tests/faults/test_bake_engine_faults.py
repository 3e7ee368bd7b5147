"""Bakes in an engine of their own that is starved or killed; one more engine gives one digest."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bake_support import (
    ROOT,
    Image,
    agree,
    engine,
    image,
    private_out,
    start_bake,
    verb,
    wait_for_install,
)
from process_support import disk_of

__all__ = ["engine", "image"]

BAKE = "tpuforge.images.bake"


@pytest.fixture
def out(image: Image, tmp_path: Path) -> Path:
    """An out folder of its own with the real wheels and the real base, and nothing baked."""
    return private_out(tmp_path / "out", image.out)


@contextlib.contextmanager
def private_engine(out: Path) -> Iterator[None]:
    """The private engine of an out folder; one that runs goes before Docker's default one."""
    begin = (
        "from tpuforge.console import Progress; from tpuforge.images import daemon; "
        "progress = Progress('test', quiet=True); daemon.ensure_packages(progress); "
        "print(daemon.start(progress))"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("DOCKER_")}
    env |= {"PYTHONPATH": str(ROOT / "src"), "TPUFORGE_OUT": str(out)}
    try:
        subprocess.run([sys.executable, "-c", begin], env=env, check=True, timeout=300)
        yield
    finally:
        stop = [sys.executable, "-m", "tpuforge.images.engine", "--stop"]
        subprocess.run(stop, env=env, check=True, timeout=300)


@pytest.fixture
def no_docker_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("a private engine needs root")
    for name in [name for name in os.environ if name.startswith("DOCKER_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def small_engine(out: Path, no_docker_settings: None) -> Iterator[Path]:
    """An out folder whose private engine has 1 GB for its data."""
    with disk_of(out / "engine", "1g"), private_engine(out):
        yield out


def test_a_full_disk_of_the_engine_is_said(image: Image, small_engine: Path) -> None:
    done = verb(BAKE, TPUFORGE_OUT=str(small_engine))
    assert done.returncode == 2, done.stderr
    assert "a disk is full" in done.stderr
    assert "docker builder prune -f" in done.stderr
    assert not (small_engine / "images" / image.slug / "image.json").exists()
    # the engine lives on, and says so
    assert verb("tpuforge.images.engine", TPUFORGE_OUT=str(small_engine)).returncode == 0


@pytest.mark.slow
@pytest.mark.usefixtures("no_docker_settings")
def test_an_engine_killed_while_baking_and_a_new_engine_gives_the_same_digest(
    image: Image, out: Path
) -> None:
    with private_engine(out):
        child = start_bake("--no-load", TPUFORGE_OUT=str(out))
        wait_for_install(out, image)
        daemon = json.loads((out / "engine" / "engine.json").read_text())["pid"]
        os.kill(daemon, signal.SIGKILL)
        _, said = child.communicate(timeout=120)
        assert child.returncode == 2, said
        assert "the engine went away while it was baking" in said
        assert "./forge engine" in said
        assert not (out / "images").exists()
        # it is started again, with the data that the killed one left
        done = verb(BAKE, "--no-load", TPUFORGE_OUT=str(out))
        assert done.returncode == 0, done.stderr
        agree(out, image)
