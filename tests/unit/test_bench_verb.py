"""The verb bench over a Docker client made here: what it asks for, what it says is missing."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

import smoke_host_support as support
from smoke_host_support import DIGEST, fake_engine, fill, forge, forge_apart, runs
from tpuforge.smoke import container, simulator


def found(out: Path) -> dict[str, Any]:
    data = json.loads((out / "bench/runtime-py311/bench.json").read_text())
    return {item["id"]: item for item in data["measurements"]}


def test_what_cannot_be_measured_says_why(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=support.bench())
    done = forge("smoke.bench", "--samples", "2", "--target", "v6e:2x2", out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the simulator could not be made: xla-cpu-pjrt" in done.stderr
    assert "not run: import.cold: in use" in done.stdout
    (words,) = runs(client)
    command = words[words.index(DIGEST) + 4 :]
    assert command[:7] == [
        *("bench", "--samples", "2", "--target", "v6e:2x2"),
        *("--only", "import,compile,step"),
    ]
    measured = found(tmp_path)
    assert measured["import.warm"]["samples"] == [2.0, 3.0, 4.0]
    assert measured["install.wheels"]["median"] is None
    assert (
        measured["install.wheels"]["not_run"]
        == "runtime-py311.txt is no longer the lock that the image was baked from"
    )


def test_a_run_without_its_simulator_is_repeated(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=support.bench())
    for _ in range(2):
        assert forge("smoke.bench", out=tmp_path).returncode == 0
    assert len(runs(client)) == 2


def test_a_measurement_that_is_kept_waits_for_no_run(tmp_path: Path) -> None:
    fill(tmp_path, bench_data=support.bench())
    client = fake_engine(tmp_path, tmp_path / "client", report=support.bench())
    path = tmp_path / "bench/runtime-py311/run.json"
    inputs = {
        "the image": DIGEST,
        "the simulator": simulator.key(python=None),
        "the number of samples": "3",
        "the choice of targets": "",
    }
    more = {"key": container.key_of(inputs), "exit_code": 0, "seconds": 9.0, "notes": []}
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    (tmp_path / ".locks").mkdir(exist_ok=True)
    with (tmp_path / ".locks/smoke").open("w", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = forge_apart("smoke.bench", out=tmp_path, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "bench: nothing to do" in done.stdout
    assert "waiting" not in done.stderr
    assert runs(client) == []


def test_a_measurement_that_failed_is_exit_code_1(tmp_path: Path) -> None:
    fill(tmp_path)
    fake_engine(tmp_path, tmp_path / "client", report=support.bench(), code=1)
    assert forge("smoke.bench", out=tmp_path).returncode == 1


@pytest.mark.parametrize(
    "report", [None, {"schema": "x"}, {**support.bench(), "measurements": [{}]}]
)
def test_benchmarks_that_left_no_result(tmp_path: Path, report: Any) -> None:
    fill(tmp_path)
    fake_engine(tmp_path, tmp_path / "client", code=2, report=report)
    done = forge("smoke.bench", out=tmp_path)
    assert done.returncode == 2
    assert "the benchmarks ended with exit code 2 and left no result" in done.stderr
    assert "some output" in done.stderr
    assert not (tmp_path / "bench/runtime-py311").exists()


def test_of_an_image_by_reference_the_wheels_are_not_known(tmp_path: Path) -> None:
    fake_engine(tmp_path, tmp_path / "client", report=support.bench())
    done = forge("smoke.bench", "--image-ref", DIGEST, out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not run: install.wheels: only for a baked image" in done.stdout


@pytest.mark.parametrize("samples", ["0", "-1"])
def test_usage(tmp_path: Path, samples: str) -> None:
    fill(tmp_path)
    done = forge("smoke.bench", f"--samples={samples}", out=tmp_path)
    assert done.returncode == 2
    assert "expected: 1 or more" in done.stderr
