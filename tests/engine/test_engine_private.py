"""A real private daemon: started, found again, stopped without a trace."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_support import engine, environment, record
from process_support import call

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a private dockerd")


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """An out folder so deep that the sockets need a short folder elsewhere."""
    folder = tmp_path / "ein tiefer Ordner, größer als ein Socketpfad" / ("x" * 40)
    yield folder
    engine(environment(folder), "--stop")


def processes(needle: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if needle in line and "dockerd" in line:
            found.append(line)
    return found


def test_a_private_engine_from_start_to_stop(out: Path) -> None:
    env = environment(out)
    code, output = engine(env, "--private")
    assert code == 0, output
    first = record(out)
    assert first["private"] is True
    assert first["store"] == "containerd"
    socket = str(first["docker_host"]).removeprefix("unix://")
    assert socket.startswith("/run/tpuforge-")

    started = time.monotonic()
    code, output = engine(env, "--private", "--no-install")
    assert code == 0
    assert "nothing to do" in output
    assert time.monotonic() - started < 5, "a warm call takes about half a second"
    assert record(out) == first

    shown = call(
        [str(first["docker"]), "-H", str(first["docker_host"]), "network", "ls", "-q"], check=True
    )
    assert len(shown.stdout.split()) == 2, "networks host and none, no bridge"

    code, output = engine(env, "--stop")
    assert code == 0
    assert "is stopped" in output
    assert not (out / "engine" / "engine.json").exists()
    assert processes(str(out)) == []
    assert str(out) not in Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    assert not Path(socket).exists()
    assert (out / "engine" / "data").is_dir(), "the build cache stays"


def test_another_dockers_bridge_is_left_alone(out: Path) -> None:
    """In a network of its own, with a bridge docker0 in it that stands for another daemon's."""
    script = (
        "ip link add docker0 type bridge && ip link set docker0 up || exit 99; "
        '"$@"; code=$?; ip link show docker0 >/dev/null || exit 98; exit $code'
    )
    prefix = ["unshare", "--net", "sh", "-c", script, "sh"]
    code, output = engine(environment(out), "--private", prefix=prefix)
    assert code != 99, "this kernel cannot make a bridge, so nothing could be judged"
    assert code != 98, "the private engine removed docker0"
    assert code == 0, output
