"""Tier *device*: the same programs on a TPU. Without one the tier is not run."""

from __future__ import annotations

import os
import re
import socket

import pytest

from smoke import chips, workloads
from smoke.plugin import Check

_LIMIT_S = 300.0
_METADATA = ("169.254.169.254", 80)
"""The metadata server of a cloud VM, by its address: a name could take long to resolve."""

_BUSY = re.compile(
    r"already in use|device or resource busy|EBUSY|lockfile|ALREADY_EXISTS", re.IGNORECASE
)
_REMEDY = (
    "compare with the simulate tier; if that passes, look at the driver and runtime of this host"
)
_UNUSABLE: list[str] = []
"""Why the TPU cannot be used, once the first check has found out."""


@pytest.fixture(scope="session")
def runtime(tpus: list[chips.Chip]) -> dict[str, str]:
    """Variables for libtpu: none on a TPU VM, a single host's where no metadata server answers."""
    try:
        socket.create_connection(_METADATA, timeout=1.0).close()
        metadata = True
    except OSError:
        metadata = False
    return chips.runtime_env(tpus, os.environ, metadata)


@pytest.mark.check(
    id="device.usable",
    purpose="the TPU of this host can be opened and runs an operation",
    severity="critical",
    remedy="end the process that holds the TPU, or give the container its device files",
)
def test_usable(check: Check, tpus: list[chips.Chip], runtime: dict[str, str]) -> None:
    check.figures |= {"chips": len(tpus), "generation": tpus[0].generation, "env": runtime}
    state = chips.state(tpus)
    check.figures["state"] = state.what
    if not state.usable:
        _UNUSABLE.append(f"the TPU is {state.what}")
        raise AssertionError(f"the TPU is {state.what}: {state.why}")
    ended = check.isolated(workloads.matmul_2x2, timeout=_LIMIT_S, env=runtime)
    if ended.kind == "killed":
        check.cannot(ended.story)
    if ended.error is not None:
        what = "busy" if _BUSY.search(f"{ended.error}\n{ended.output}") else "unusable"
        check.figures["state"] = what
        _UNUSABLE.append(f"the TPU is {what}")
        raise AssertionError(f"the TPU is {what}: {ended.story}")
    check.detail = f"{len(tpus)} chips of TPU {tpus[0].generation}"


@pytest.fixture
def usable() -> None:
    """A TPU that the first check has not found unusable."""
    if _UNUSABLE:
        pytest.skip(_UNUSABLE[0])


def _training(check: Check, compiled: bool, runtime: dict[str, str]) -> None:
    bounds = workloads.BFLOAT16_PASSES
    found = check.value(workloads.train, compiled, *bounds, timeout=_LIMIT_S, env=runtime)
    check.figures |= found
    assert found["largest_weight_step"] > 0.01, "training moved no weight"
    check.detail = (
        f"weights within {found['largest_weight_difference']:.1e} of the CPU's; first step "
        f"{found['first_step_seconds']:.2f} s, then {found['steady_step_seconds'] * 1e3:.1f} ms"
    )


@pytest.mark.check(
    id="device.readme",
    purpose="the first program of TorchTPU's README gives the CPU's result on the TPU",
    severity="critical",
    remedy=_REMEDY,
)
@pytest.mark.usefixtures("usable")
def test_readme(check: Check, runtime: dict[str, str]) -> None:
    found = check.value(workloads.matmul_2x2, timeout=_LIMIT_S, env=runtime)
    check.figures |= found
    assert found["device"] == "tpu", f"the product is on {found['device']}"
    assert (
        found["finite"] and found["difference"] < workloads.BFLOAT16_PASSES[0] * found["scale"]
    ), f"the product differs from the CPU's by {found['difference']}"
    check.detail = f"within {found['difference']:.1e} of the CPU's"


@pytest.mark.check(
    id="device.train",
    purpose="training steps on the TPU give the CPU's losses and weights",
    severity="critical",
    remedy=_REMEDY,
)
@pytest.mark.usefixtures("usable")
def test_train(check: Check, runtime: dict[str, str]) -> None:
    _training(check, False, runtime)


@pytest.mark.check(
    id="device.compile-forward",
    purpose="torch.compile of a forward pass gives the CPU's result on the TPU",
    severity="critical",
    remedy=_REMEDY,
)
@pytest.mark.usefixtures("usable")
def test_compile_forward(check: Check, runtime: dict[str, str]) -> None:
    bounds = workloads.BFLOAT16_PASSES
    found = check.value(workloads.compile_forward, *bounds, timeout=_LIMIT_S, env=runtime)
    check.figures |= found
    check.detail = f"within {found['difference']:.1e} of the CPU's"


@pytest.mark.check(
    id="device.compile-train",
    purpose="training steps of a compiled model give the CPU's losses and weights on the TPU",
    severity="critical",
    remedy=_REMEDY,
)
@pytest.mark.usefixtures("usable")
def test_compile_train(check: Check, runtime: dict[str, str]) -> None:
    _training(check, True, runtime)
