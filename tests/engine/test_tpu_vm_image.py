"""``tpu-run`` and the real image in a real engine, on a made-up host with the simulated chip."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bake_support import Image, result
from process_support import call
from tpu_vm_support import BUS, FOLDER, host, put

_PROGRAM = """
import json, os, torch
x = torch.ones(2, 2, device="tpu")
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
open("/cache/compiled", "w").close()
print(json.dumps({
    "sum": (x @ x).sum().item(),
    "ids": [os.getuid(), os.getgid()],
    "devices": sorted(os.listdir("/dev/vfio")),
    "rights": [int(status["CapEff"], 16), int(status["NoNewPrivs"])],
    "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
}), flush=True)
raise SystemExit(7)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host with one v6e chip, whose device files Docker can hand on."""
    root = host(tmp_path_factory.mktemp("vm") / "host")
    put(root, f"{BUS}/0000:01:04.0/class", "0x120000\n")
    for name in ("0", "vfio"):
        (root / "dev/vfio" / name).unlink()
        # the device of /dev/null: the simulated chip is never opened
        try:
            os.mknod(root / "dev/vfio" / name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError as error:
            pytest.skip(f"not run: the device files of a made-up host cannot be made: {error}")
        (root / "dev/vfio" / name).chmod(0o666)
    # what this machine lets its engine do
    for name in ("self/limits", "1/status"):
        put(root, f"proc/{name}", Path("/proc", name).read_text())
    return root


def words(image: Image, tree: Path, *options: str, command: Sequence[str]) -> list[str]:
    """The command line of ``tpu-run``."""
    own = ["--root", str(tree), "--docker", image.engine.docker, "--shm-size", "256m"]
    own += ["--ignore", "memlock", "--allow-tag", "--pull", "never", *options, image.name]
    return [sys.executable, "-B", str(FOLDER / "tpu-run"), *own, *command]


def test_torch_runs_on_the_chip_with_no_right_to_anything_else(image: Image, tree: Path) -> None:
    simulator = Path(result("tpuforge.smoke.simulator")["folder"])
    options = ["--read-only", "--cache", str(tree / "cache"), "--json", str(tree / "found.json")]
    options += ["-v", f"{simulator}:/opt/simulator:ro"]
    options += ["-e", "TPU_LIBRARY_PATH=/opt/simulator/wrapper.so"]
    done = call(
        words(image, tree, *options, command=["python", "-c", _PROGRAM]),
        env={**os.environ, **image.engine.env},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 7, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert seen == {
        "sum": 8.0,
        "ids": [1000, 1000],
        "devices": ["0", "vfio"],
        "rights": [0, 1],
        "shm": 256 << 20,
    }
    assert (tree / "cache/compiled").stat().st_uid == 1000
    found = json.loads((tree / "found.json").read_text())
    # by what nobody can move, though a tag was given
    assert "sha256:" in found["image"]["run"]
    assert shlex.split(found["line"]) == found["command"]
    assert "--privileged" not in found["command"]


def test_a_signal_reaches_the_container(image: Image, tree: Path) -> None:
    program = "import time; print('up', flush=True); time.sleep(100)"
    with subprocess.Popen(
        words(image, tree, "--no-cache", command=["python", "-c", program]),
        env={**os.environ, **image.engine.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
            child.send_signal(signal.SIGTERM)
            assert child.wait(timeout=30) == 128 + signal.SIGTERM
        finally:
            child.kill()
