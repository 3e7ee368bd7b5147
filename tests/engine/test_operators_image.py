"""The audit of operators in the real image, on the real simulator: a slice of it, and a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bake_support import Image, result

SLICE = (
    "add", "mm", "sum", "sort", "view", "nn.functional.layer_norm", "randn", "empty", "bmm",
    "linalg.eigh", "cumsum", "nn.functional.pad.replicate_negative",
)  # fmt: skip

# no operator ends the present plugin; a worker that has it loaded is ended here by hand
CRASH = """
import ctypes

def worker():
    import torch
    torch.ones(1).to("tpu").cpu()

    def handle(crash):
        return ctypes.string_at(0) if crash else torch.full((2,), 3.0, device="tpu").cpu().tolist()

    return handle
"""

CREW = """
import json, sys
sys.path.insert(0, "/opt/tpuforge")
from smoke.operators.crew import Crew
made = Crew("crash:worker", count=1, env={"PYTHONPATH": "/crash", "TF_CPP_MIN_LOG_LEVEL": "3"})
ends = made.do([False, True, False])
print(json.dumps([[end.kind, end.value, end.message] for end in ends]))
"""


@pytest.fixture(scope="module")
def simulated() -> tuple[str, ...]:
    """The options of a hardened container that is shown a simulated chip."""
    folder = result("tpuforge.smoke.simulator")["folder"]
    mounts = {folder: "/opt/simulator", f"{folder}/pci": "/sys/bus/pci/devices"}
    mounts[f"{folder}/vfio"] = "/dev/vfio/7"
    return (
        *("--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--user=4242:4242"),
        *("--env=TPU_LIBRARY_PATH=/opt/simulator/wrapper.so",),
        *("--env=TPUFORGE_SIMULATOR=/opt/simulator",),
        *(f"--mount=type=bind,source={a},target={b},readonly" for a, b in mounts.items()),
    )


def test_a_slice_of_the_audit(image: Image, simulated: tuple[str, ...]) -> None:
    names = "|".join(name.replace(".", r"\.") for name in SLICE)
    words = ("--only", names, "--dtype", "float32,int64", "--json", "-")
    done = image.run("health", "operators", *words, options=simulated, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert set(found["operators"]) == set(SLICE)
    status = {op: cells["float32"]["status"] for op, cells in found["operators"].items()}
    assert status == {
        **dict.fromkeys(SLICE, "passes"),
        "linalg.eigh": "unsupported",
        "cumsum": "simulator limit",
        "nn.functional.pad.replicate_negative": "error",
    }
    cells = {op: cells["float32"] for op, cells in found["operators"].items()}
    assert cells["linalg.eigh"]["missing"] == ["_linalg_eigh.eigenvalues"]
    assert "known" in cells["nn.functional.pad.replicate_negative"]
    assert cells["randn"]["values"] is False and cells["empty"]["values"] is False
    assert "values" not in cells["mm"]
    # the program that is executed here is the one that libtpu compiles for a TPU
    assert cells["mm"]["programs"]
    assert cells["mm"]["compiles"] == {"v6e:2x2": {"status": "yes"}}
    assert cells["view"]["compiles"] == {"v6e:2x2": {"status": "nothing to compile"}}
    assert all(one["v6e:2x2"]["code_bytes"] > 0 for one in found["programs"].values())
    whole = found["operators"]["linalg.eigh"]["int64"]
    assert (whole["status"], whole["detail"]) == ("not run", "PyTorch itself has it not for int64")
    assert found["operators"]["bmm"]["int64"]["status"] == "unsupported"
    assert found["disagreements"] == []
    assert cells["nn.functional.layer_norm"]["gradient"]["status"] == "passes"
    assert cells["cumsum"]["gradient"]["detail"] == "its forward does not pass"
    # without a word on ways they are tried for float32 alone
    assert "gradient" not in found["operators"]["mm"].get("int64", {})
    assert found["exercised"]["direct_operators"] >= 8
    assert "add" not in found["exercised"]["missing"]
    assert 0 < found["peak_memory_bytes"] < 2_000_000_000
    census = found["census"]
    assert census["overloads"] == sum(census["counts"].values()) > 3000
    assert census["core"]["missing"] == []


def test_an_operator_that_ends_its_process_takes_no_other_with_it(
    image: Image, simulated: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "crash.py").write_text(CRASH)
    tmp_path.chmod(0o755)
    options = (*simulated, f"--mount=type=bind,source={tmp_path},target=/crash,readonly")
    done = image.run("python", "-c", CREW, options=options, timeout=600)
    assert done.returncode == 0, done.stderr
    first, crashed, last = json.loads(done.stdout.splitlines()[-1])
    assert first == last == ["done", [3.0, 3.0], ""]
    assert crashed[0] == "signal" and "SIGSEGV" in crashed[2], crashed


def test_without_a_simulator_there_is_the_census_and_no_verdict(image: Image) -> None:
    done = image.run("health", "operators", timeout=300)
    assert done.returncode == 2
    assert "core ATen 193 of 193" in done.stdout
    assert "audit: not run: no simulator is mounted" in done.stdout


def test_operators_that_share_a_program_all_list_it(
    image: Image, simulated: tuple[str, ...]
) -> None:
    # one worker, so that the second finds the program of the first in torch_tpu's own cache
    words = ("--only", "add|__radd__|mm", "--dtype", "float32", "--jobs", "1")
    done = image.run("health", "operators", *words, "--json", "-", options=simulated, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    cells = {op: cells["float32"] for op, cells in found["operators"].items()}
    assert cells["add"]["programs"] == cells["__radd__"]["programs"] != []
    assert not set(cells["mm"]["programs"]) & set(cells["add"]["programs"])
    # so do two ways of calling the same operator: out= first makes a result of its shape
    assert cells["__radd__"]["gradient"]["programs"] == cells["add"]["gradient"]["programs"] != []
    assert set(cells["add"]["out"]["programs"]) > set(cells["add"]["gradient"]["programs"])
    # a backward pass computes more than a forward one
    assert len(cells["mm"]["gradient"]["programs"]) > len(cells["mm"]["programs"])
    assert cells["mm"]["gradient"]["status"] == cells["mm"]["out"]["status"] == "passes"
    assert cells["add"]["inplace"]["status"] == "passes"
    assert "inplace" not in cells["__radd__"]
    assert found["counts_of_ways"]["inplace"]["float32"]["passes"] == 1
