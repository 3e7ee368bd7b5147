"""The published wheels of torch_tpu and libtpu, fetched by digest and audited, for every Python."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from smoke import elf as loader_view

from build_support import LOCK
from memory_support import run_measured
from tpuforge import pins
from tpuforge.build import elf

ROOT = LOCK.parent
LARGEST_MEMORY = 300 << 20
"""Bytes of resident memory that the tool itself may use at its peak."""
PACKAGES = "torch-tpu,libtpu"
# as docs/audit_wheel.md tells of them
FINDINGS = {
    "torch-tpu": {("licence", "warning"), ("runpath", "note")},
    "libtpu": {("symbols", "warning")},
}


def run(out: Path, module: str, *arguments: str) -> tuple[int, int, dict[str, Any]]:
    """Run a verb; its exit code, its peak memory in bytes, and what it printed as JSON."""
    command = [sys.executable, "-m", f"tpuforge.build.{module}", *arguments, "--json"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TPUFORGE_OUT": str(out)}
    out.mkdir(parents=True, exist_ok=True)
    printed = out / "printed.json"
    with printed.open("w") as file:
        code, memory = run_measured(command, out, env=env, cwd=ROOT, stdout=file)
    return code, memory, json.loads(printed.read_text())


def fetch(out: Path, python: str) -> tuple[int, int, dict[str, Any]]:
    # a wheelhouse that is here already saves the network, and is only read
    have = ROOT / "out" / "wheelhouse"
    source = ["--source", str(have)] if have.is_dir() else []
    return run(out, "wheelhouse", "--python", python, "--only", PACKAGES, *source)


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("python", pins.load().pythons)
def test_published_wheels_pass(python: str, tmp_path: Path) -> None:
    code, memory, record = fetch(tmp_path, python)
    assert code == 0, record
    assert memory < LARGEST_MEMORY
    reports = {
        report["wheel"]["name"]: report
        for audit in record["data"]["audits"]
        for report in [json.loads((tmp_path / audit["report"]).read_text())]
    }
    assert set(reports) == set(FINDINGS)
    for name, report in reports.items():
        assert report["ok"]
        assert {(one["rule"], one["severity"]) for one in report["findings"]} == FINDINGS[name]
        not_judged = {one["id"] for one in report["rules"] if one["status"] == "not judged"}
        assert not_judged == ({"pjrt"} if name == "libtpu" else set())
    seen = {one["id"]: one["detail"] for one in reports["torch-tpu"]["rules"]}
    assert "GLIBC_2.30, GLIBCXX_3.4.26" in seen["symbols"]
    assert seen["glue"].startswith("17 files for each of torch 2.11.0, 2.12.0, 2.13.0")
    assert seen["torch"].endswith("torch 2.13.0+cpu loads the glue of 2.13.0")
    assert seen["python"].endswith(f"80 extensions compiled for {python}")
    assert seen["xla-commit"] == pins.load().torch_tpu.xla_commit
    assert seen["elf"] == "86 ELF files for x86_64"

    code, _, record = fetch(tmp_path, python)
    assert (code, record["status"]) == (0, "unchanged")
    if python == pins.load().default_python:
        loads_and_tells_its_version(tmp_path, python)
        readers_agree(next(tmp_path.glob("wheelhouse/*/torch_tpu-*.whl")), tmp_path)
    shutil.rmtree(tmp_path / "wheelhouse")


def loads_and_tells_its_version(out: Path, python: str) -> None:
    code, memory, record = run(out, "audit", "--python", python, "--load")
    assert code == 0
    assert memory < LARGEST_MEMORY
    (libtpu,) = [one for one in record["data"]["wheels"] if one["wheel"]["name"] == "libtpu"]
    (ruling,) = [one for one in libtpu["rules"] if one["id"] == "pjrt"]
    assert ruling["status"] == "passed"
    assert ruling["detail"].startswith("PJRT API 0.1")
    # nothing of the loaded library stays
    assert not list(out.glob(".audit-*"))


def readers_agree(wheel: Path, folder: Path) -> None:
    """The suite in the image reads ELF files as the loader does; both must see the same."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(("_2_13_0.so", "_base.so"))]
        assert len(names) == 17
        for name in names:
            place = Path(archive.extract(name, folder / "unpacked"))
            with place.open("rb") as file:
                ours = elf.read(file, place.stat().st_size)
            theirs = loader_view.read(place)
            assert list(ours.needed) == theirs.needed
            assert list(ours.runpath) == [*theirs.runpath, *theirs.rpath]
            assert ours.soname == theirs.soname
            assert ours.wants == {lib: frozenset(all_) for lib, all_ in theirs.wants.items()}
    shutil.rmtree(folder / "unpacked")
