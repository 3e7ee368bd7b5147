"""The audit of operators in the real image, on the real simulator: a slice of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bake_support import Image, result

SLICE = (
    "add", "mm", "sum", "sort", "view", "nn.functional.layer_norm", "randn", "empty", "bmm",
    "linalg.eigh", "cumsum", "nn.functional.pad.replicate_negative", "__radd__",
)  # fmt: skip


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


@pytest.fixture(scope="module")
def found(image: Image, simulated: tuple[str, ...]) -> dict[str, Any]:
    """The table of the slice; one worker, so that it meets its own programs again."""
    names = "|".join(name.replace(".", r"\.") for name in SLICE)
    words = ("--only", names, "--dtype", "float32,int64", "--jobs", "1", "--json", "-")
    done = image.run("health", "operators", *words, options=simulated, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    table: dict[str, Any] = json.loads(done.stdout)
    return table


def test_a_slice_of_the_audit(found: dict[str, Any]) -> None:
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


def test_operators_that_share_a_program_all_list_it(found: dict[str, Any]) -> None:
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
    assert found["counts_of_ways"]["inplace"]["float32"]["passes"] >= 1
