"""Tier *device*: the same programs on a TPU. Without one the tier is not run."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from smoke import chips, isolate, launch, workloads
from smoke.plugin import Check

_LIMIT_S = 300.0
_PATIENCE_S = 120.0
"""How long processes of one group wait for each other, on all hosts."""

_BUSY = re.compile(
    r"already in use|device or resource busy|EBUSY|lockfile|ALREADY_EXISTS", re.IGNORECASE
)
_ABSENT = re.compile(r"DistStoreError|DistNetworkError")
"""What PyTorch says when the processes of a group do not all come; later errors are others."""

_REMEDY = (
    "compare with the simulate tier; if that passes, look at the driver and runtime of this host"
)
_UNUSABLE: list[str] = []
"""Why the TPU cannot be used, once the first check has found out."""


@pytest.fixture(scope="session")
def given(tpus: list[chips.Chip]) -> list[chips.Chip]:
    """The chips that may be used here."""
    return chips.given(tpus) or tpus


@pytest.fixture(scope="session")
def runtime(given: list[chips.Chip], kind: str | None) -> dict[str, str]:
    """Variables for libtpu: none on a TPU VM, a single host's where no server tells of a slice."""
    return chips.runtime_env(given, os.environ, kind is not None)


@pytest.mark.check(
    id="device.usable",
    purpose="the TPU of this host can be opened and runs an operation",
    severity="critical",
    remedy="end the process that holds the TPU, or give the container its device files",
)
def test_usable(
    check: Check, tpus: list[chips.Chip], given: list[chips.Chip], runtime: dict[str, str]
) -> None:
    check.figures |= {"chips": len(given), "generation": given[0].generation, "env": runtime}
    state = chips.state(tpus)
    check.figures["state"] = state.what
    if not state.usable:
        _UNUSABLE.append(f"the TPU is {state.what}")
        raise AssertionError(f"the TPU is {state.what}: {state.why}")
    ended = check.isolated(workloads.matmul_2x2, timeout=_LIMIT_S, env=runtime)
    if ended.error is not None:
        what = "busy" if _BUSY.search(f"{ended.error}\n{ended.output}") else "unusable"
        check.figures["state"] = what
        _UNUSABLE.append(f"the TPU is {what}")
        raise AssertionError(f"the TPU is {what}: {ended.story}")
    check.detail = f"TPU {given[0].generation}: {state.why}"


@pytest.mark.check(
    id="device.chips",
    purpose="this host has as many chips of one generation as its kind of TPU has",
    severity="warning",
    remedy="give the container all device files of the host, or reboot the host if one is missing",
)
def test_chips(check: Check, given: list[chips.Chip], kind: str | None) -> None:
    said = os.environ.get("TPU_ACCELERATOR_TYPE") or kind
    generation = given[0].generation
    check.figures |= {"chips": len(given), "generation": generation, "type": said or ""}
    odd = chips.miscounted(given, said)
    assert not odd, odd
    check.detail = f"{len(given)} of TPU {generation}" + (f", slice {said}" if said else "")


@pytest.fixture
def usable() -> None:
    """A TPU that the first check has not found unusable."""
    if _UNUSABLE:
        pytest.skip(_UNUSABLE[0])


def _training(check: Check, compiled: bool, runtime: dict[str, str]) -> None:
    bounds = workloads.BFLOAT16_PASSES
    found = check.value(workloads.train, compiled, *bounds, timeout=_LIMIT_S, env=runtime)
    check.figures |= found
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


@pytest.mark.check(
    id="device.memory",
    purpose="a chip has the memory of its generation",
    severity="warning",
    remedy="end what else runs on this TPU; if the memory stays short, take another host",
)
@pytest.mark.usefixtures("usable")
def test_memory(check: Check, given: list[chips.Chip], runtime: dict[str, str]) -> None:
    found = check.value(launch.memory, timeout=_LIMIT_S, env=runtime)
    check.figures |= found
    if found["total_bytes"] is None:
        check.cannot(f"the backend does not tell its memory: {found['why']}")
    expected = chips.MEMORY_GIB[given[0].generation]
    total = found["total_bytes"] / 2**30
    assert 0.95 * expected <= total <= 1.05 * expected, (
        f"{total:.2f} GiB, where a TPU {given[0].generation} has {expected:g} (within 5 %)"
    )
    check.detail = f"{total:.2f} GiB"


def _together(check: Check, runtime: dict[str, str]) -> isolate.Ended:
    return check.isolated(launch.together, _PATIENCE_S, timeout=_LIMIT_S, env=runtime)


def _say(check: Check, found: dict[str, Any]) -> None:
    check.figures |= found
    check.detail = (
        f"processes: {found['world']}, hosts: {found['hosts']}, topology {found['topology']}; "
        f"first sum {found['first_seconds']:.2f} s, then {found['later_seconds'] * 1e3:.1f} ms"
    )


@pytest.mark.check(
    id="device.launch",
    purpose="one process for each chip of this host, launched TorchTPU's way, add up their ranks",
    severity="warning",
    remedy="see that device.chips passes; then look at the links between the chips of this host",
)
@pytest.mark.usefixtures("usable")
def test_launch(check: Check, runtime: dict[str, str]) -> None:
    if (hosts := launch.hosts({**os.environ, **runtime})) > 1:
        check.cannot(f"this host is one of {hosts}: device.slice takes all of them")
    _say(check, check.took(_together(check, runtime)))


@pytest.mark.check(
    id="device.slice",
    purpose="all chips of all hosts of a slice, launched TorchTPU's way, add up their ranks",
    severity="warning",
    remedy="start the same command on all hosts at once; see that each can reach the first one",
)
@pytest.mark.usefixtures("usable")
def test_slice(check: Check, runtime: dict[str, str]) -> None:
    hosts = launch.hosts({**os.environ, **runtime})
    if hosts == 1:
        check.cannot("this host stands alone: TPU_WORKER_HOSTNAMES names no other one")
    ended = _together(check, runtime)
    if ended.error and _ABSENT.search(ended.error):
        check.cannot(f"not all of the {hosts} hosts came within {_PATIENCE_S:.0f} s")
    _say(check, check.took(ended))
