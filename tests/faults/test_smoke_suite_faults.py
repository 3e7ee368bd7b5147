"""The suite and the simulator under kill, starvation and two runs at once."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bake_support import ROOT, result, simulator_wheels
from process_support import call, wait_for

SIMULATOR = [sys.executable, "-m", "tpuforge.smoke.simulator", "--json"]


def _env(out: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TPUFORGE_OUT": str(out)}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An out folder with nothing but the simulator's two wheels."""
    result("tpuforge.build.wheelhouse")
    return simulator_wheels(tmp_path)


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def test_kill_9_of_the_suite_leaves_no_check_behind(tmp_path: Path) -> None:
    code = "import time; from smoke import isolate; isolate.run(time.sleep, 600, timeout=600)"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env)
    wait_for(lambda: _children(parent.pid))
    (child,) = _children(parent.pid)
    # only once the child has asked the kernel for it does it die with its parent
    status = Path(f"/proc/{child}/cmdline")
    wait_for(lambda: b"time:sleep" in status.read_bytes())
    time.sleep(1)
    parent.kill()
    parent.wait()
    wait_for(lambda: not _lives(child))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_kill_9_while_building_the_simulator_then_again(out: Path) -> None:
    first = subprocess.Popen(SIMULATOR, env=_env(out), stdout=subprocess.DEVNULL)
    wait_for(lambda: list(out.glob("simulator/.new-*/*/ziglang/zig")))
    first.kill()
    first.wait()
    assert not list(out.glob("simulator/*/simulator.json"))
    assert list(out.glob("simulator/.new-*"))
    pair = [
        subprocess.Popen(SIMULATOR, env=_env(out), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ended = [one.communicate(timeout=300)[0] for one in pair]
    assert [one.returncode for one in pair] == [0, 0]
    folders = {json.loads(text)["data"]["folder"] for text in ended}
    assert len(folders) == 1
    # what the killed run left is gone, and there is one finished simulator
    assert [str(path) for path in (out / "simulator").iterdir()] == list(folders)


def test_a_full_disk_ends_with_2_and_leaves_nothing_that_looks_finished(out: Path) -> None:
    def starve() -> None:
        # the plugin is larger than any file may now become
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000_000, 50_000_000))

    done = call(SIMULATOR, env=_env(out), preexec_fn=starve)  # fmt: skip
    assert done.returncode == 2
    assert "free some space" in done.stderr
    assert list((out / "simulator").iterdir()) == []
