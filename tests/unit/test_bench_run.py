"""The benchmarks that travel in the image: arithmetic, merging, usage, and what "cold" means."""

from __future__ import annotations

import importlib
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from process_support import call

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def smoke_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return call(
        [sys.executable, "-m", "smoke.bench.run", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=60,
    )


@pytest.mark.usefixtures("smoke_on_path")
def test_a_measurement_has_its_spread() -> None:
    run = importlib.import_module("smoke.bench.run")
    made = run.Measurement("a.b", "what", samples=[3.0, 1.0, 2.0, 9.0]).as_dict()
    assert (made["min"], made["median"], made["max"]) == (1.0, 2.5, 9.0)
    assert made["samples"] == [3.0, 1.0, 2.0, 9.0]
    assert made["not_run"] is None
    nothing = run.Measurement("a.b", "what").as_dict()
    assert (nothing["median"], nothing["not_run"]) == (None, "no sample")


def test_without_torch_and_libtpu_it_fails_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = bench("--samples", "1", "--only", "compile", "--target", "v6e:2x2", "--json", str(path))
    assert done.returncode == 1
    result = json.loads(path.read_text())
    assert result["schema"] == "tpuforge.bench/1"
    assert {item["id"] for item in result["measurements"]} == {
        "compile.load",
        "compile.v6e:2x2.matmul_2x2",
        "compile.v6e:2x2.matmul_8192",
    }
    for item in result["measurements"]:
        assert item["median"] is None
        assert item["not_run"].startswith("failed: ")
        assert item["failed"] is True


def test_merging_keeps_what_is_not_measured_now(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"
    kept = {
        "id": "import.warm",
        "unit": "s",
        "samples": [1.0],
        "min": 1.0,
        "median": 1.0,
        "max": 1.0,
        "not_run": None,
    }
    replaced = {**kept, "id": "compile.load"}
    earlier.write_text(json.dumps({"measurements": [kept, replaced]}))
    path = tmp_path / "bench.json"
    bench("--samples", "1", "--only", "compile", "--merge", str(earlier), "--json", str(path))
    found = {item["id"]: item for item in json.loads(path.read_text())["measurements"]}
    assert found["import.warm"] == kept
    assert found["compile.load"]["median"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "nonsense"), "expected one of import, step, compile"),
        (("--samples", "0"), "expected 1 or more"),
        (("--merge", "/nowhere.json"), "not a bench result"),
    ],
)
def test_usage(arguments: tuple[str, ...], message: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_an_unwritable_result(tmp_path: Path) -> None:
    done = bench("--only", "", "--json", str(tmp_path / "no" / "folder.json"))
    assert done.returncode == 2
    assert "cannot be written" in done.stderr


@pytest.mark.usefixtures("smoke_on_path")
def test_only_what_came_from_storage_is_called_cold() -> None:
    run = importlib.import_module("smoke.bench.run")
    assert run._warm({"read_bytes": 190_000_000, "file_bytes": 200_000_000}) is None
    assert "only 1 MB of 200 MB" in run._warm({"read_bytes": 10**6, "file_bytes": 2 * 10**8})
    assert "does not count" in run._warm({"read_bytes": None, "file_bytes": 200_000_000})


@pytest.mark.usefixtures("smoke_on_path")
def test_a_process_knows_what_it_holds_of_files() -> None:
    pagecache = importlib.import_module("smoke.bench.pagecache")
    program = Path(sys.executable).resolve()
    before = pagecache.file_bytes()
    with program.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) > 0  # every page is in memory now
        held = pagecache.file_bytes()
    assert held - before > program.stat().st_size / 2
    assert pagecache.read_bytes() >= 0


@pytest.mark.usefixtures("smoke_on_path")
def test_dropping_changes_no_file(tmp_path: Path) -> None:
    pagecache = importlib.import_module("smoke.bench.pagecache")
    data = os.urandom(1 << 20)
    (tmp_path / "library.so").write_bytes(data)
    (tmp_path / "link").symlink_to("nowhere")
    pagecache.drop([tmp_path, tmp_path / "missing"])
    assert (tmp_path / "library.so").read_bytes() == data
