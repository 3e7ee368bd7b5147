"""The engine under fire: a killed daemon, one that cannot start, an address that is not there."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_support import engine, environment, record
from process_support import own_mounts


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "out"
    engine(environment(tmp_path / "out"), "--stop")


def test_an_address_where_nothing_answers_is_named(tmp_path: Path) -> None:
    """No private engine is started in place of the Docker that a user asked for."""
    host = f"unix://{tmp_path}/nothing.sock"
    started = time.monotonic()
    code, output = engine(environment(tmp_path / "out", DOCKER_HOST=host))
    assert time.monotonic() - started < 20
    assert code == 2
    assert "nothing.sock" in output
    assert "DOCKER_HOST" in output
    assert not (tmp_path / "out" / "engine").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a private dockerd")
def test_a_killed_engine_is_started_again(out: Path) -> None:
    env = environment(out)
    code, output = engine(env, "--private")
    assert code == 0, output
    before = record(out)
    os.kill(int(str(before["pid"])), signal.SIGKILL)
    code, output = engine(env, "--private", "--no-install")
    assert code == 2, "only looking must not start anything"
    code, output = engine(env, "--private")
    assert code == 0, output
    after = record(out)
    assert after["pid"] != before["pid"]
    alive = subprocess.run(
        [str(after["docker"]), "-H", str(after["docker_host"]), "version"],
        capture_output=True,
        check=False,
    )
    assert alive.returncode == 0
    assert engine(env, "--stop")[0] == 0
    assert str(out) not in Path("/proc/self/mountinfo").read_text(encoding="utf-8")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a private dockerd")
def test_an_engine_that_cannot_start_says_why(out: Path) -> None:
    """A file where its data should be: the daemon's own words come through, nothing stays."""
    (out / "engine").mkdir(parents=True)
    (out / "engine" / "data").mkdir()
    (out / "engine" / "data" / "buildkit").write_text("not a folder")
    code, output = engine(environment(out), "--private")
    assert code == 2
    assert "the private engine did not start" in output
    assert "buildkit" in output
    assert not (out / "engine" / "engine.json").exists()
    assert not (out / "engine" / "dockerd.pid").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a private dockerd")
def test_a_file_system_without_overlays_is_refused(out: Path, tmp_path: Path) -> None:
    """An out folder on a container's own file system: dockerd would start, and no build could."""
    for part in ("lower", "upper", "work", "out"):
        (tmp_path / part).mkdir()
    layers = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    mount = 'mount -t overlay -o "$0" overlay "$1" && shift && exec "$@"'
    prefix = [*own_mounts(), "sh", "-c", mount, layers, str(out)]
    code, output = engine(environment(out), "--private", prefix=prefix)
    assert code == 2, output
    assert "cannot hold a private engine's layers" in output
    assert "set TPUFORGE_OUT" in output
