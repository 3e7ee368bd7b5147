"""The simulator built from the real wheels: the same bytes everywhere, and mended when damaged."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bake_support import result, simulator_wheels, verb
from tpuforge.smoke.simulator import GENERATIONS

MODULE = "tpuforge.smoke.simulator"


def build(out: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the verb on an out folder."""
    done = verb(MODULE, *arguments, "--json", TPUFORGE_OUT=str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads(done.stdout)


@pytest.fixture(scope="module")
def wheelhouse() -> None:
    """The wheelhouse, filled if it is not."""
    result("tpuforge.build.wheelhouse")


@pytest.mark.usefixtures("wheelhouse")
def test_two_builds_in_two_folders_are_equal_and_a_damaged_one_is_built_again(
    tmp_path: Path,
) -> None:
    _, first = build(simulator_wheels(tmp_path / "one"))
    _, second = build(simulator_wheels(tmp_path / "zwei mit Lücke"))
    assert (first["status"], second["status"]) == ("done", "done")
    assert first["data"]["files"] == second["data"]["files"]
    trees = ("pci", *(f"generations/{name}" for name in GENERATIONS))
    assert set(first["data"]["files"]) == {
        "wrapper.so",
        "plugin.so",
        "bus.so",
        "vfio",
        *(
            f"{tree}/0000:00:05.0/{name}"
            for tree in trees
            for name in ("vendor", "device", "class")
        ),
    }
    folder = Path(first["data"]["folder"])
    chip = folder / "pci/0000:00:05.0"
    assert (chip / "iommu_group").readlink().name == "7"
    assert not (chip / "iommu_group").exists()
    assert (chip / "device").read_text() == "0x006f\n"
    numbers = {
        name: (folder / "generations" / name / chip.name / "device").read_text().strip()
        for name in GENERATIONS
    }
    assert numbers == {
        "v4": "0x005e", "v5e": "0x0063", "v5p": "0x0062", "v6e": "0x006f", "v7": "0x0076",
    }  # fmt: skip
    assert all(path.stat().st_mode & 0o004 for path in folder.rglob("*") if path.is_file())
    assert list(folder.parent.iterdir()) == [folder]

    done, again = build(tmp_path / "one")
    assert again["status"] == "unchanged"

    library = bytearray((folder / "wrapper.so").read_bytes())
    library[len(library) // 2] ^= 1
    (folder / "wrapper.so").write_bytes(library)
    build(tmp_path / "one")
    done, mended = build(tmp_path / "one")
    assert mended["data"]["files"] == first["data"]["files"]
    assert mended["status"] == "unchanged", done.stderr
    assert (folder / "wrapper.so").read_bytes() != bytes(library)
