"""``fetch_wheel`` on the project's own locks and the real wheels: whole, quick, and frugal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from build_support import LOCK
from memory_support import run_measured
from tpuforge.build.wheelhouse import wanted_wheels

ROOT = LOCK.parent
LARGEST_MEMORY = 300 << 20
"""Bytes of resident memory that the tool itself may use at its peak."""


def fetch(out: Path, *arguments: str) -> tuple[int, int, dict[str, object]]:
    """Run the verb; its exit code, its peak memory in bytes, and its result."""
    command = [sys.executable, "-m", "tpuforge.build.wheelhouse", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TPUFORGE_OUT": str(out)}
    code, memory = run_measured(command, out, env=env, cwd=ROOT)
    record = json.loads((out / "results" / "fetch_wheel.json").read_text())
    return code, memory, record


@pytest.mark.network
def test_the_real_wheels(tmp_path: Path) -> None:
    # a wheelhouse that is here already saves the network, and is only read
    have = ROOT / "out" / "wheelhouse"
    source = ["--source", str(have)] if have.is_dir() else []
    code, memory, record = fetch(tmp_path, *source)
    assert code == 0
    assert record["status"] == "done"
    assert memory < LARGEST_MEMORY
    places = {}
    for wanted in wanted_wheels(LOCK, "runtime", "3.11"):
        (place,) = (tmp_path / "wheelhouse" / wanted.sha256).iterdir()
        places[wanted.name] = place
    sums = "".join(f"{place.parent.name}  {place}\n" for place in places.values())
    subprocess.run(["sha256sum", "--quiet", "-c"], input=sums, text=True, check=True)

    code, memory, record = fetch(tmp_path, "--offline")
    assert (code, record["status"]) == (0, "unchanged")
    assert memory < LARGEST_MEMORY

    with places["torch"].open("r+b") as file:
        file.seek(100_000_000)
        byte = file.read(1)[0]
        file.seek(100_000_000)
        file.write(bytes([byte ^ 0x10]))
    code, _, record = fetch(tmp_path, *source)
    assert (code, record["status"]) == (0, "done")
    assert record["data"]["quarantined"] == [places["torch"].name]  # type: ignore[index]
