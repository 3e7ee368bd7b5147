"""Tier *compile*: the real libtpu compiles for real TPUs, with no TPU here."""

from __future__ import annotations

from typing import Any

import pytest

from smoke import pjrt
from smoke.plugin import Check

_LIMIT_S = 120.0
_REBAKE = "pull the image again by its digest, or bake it again"
_BIG = 8192


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    """What drives libtpu must be there, or nothing can be judged."""
    pytest.importorskip("pypjrt", reason="pypjrt, which drives libtpu, is not on PYTHONPATH")


def _compile(check: Check, program: str, target: str, chosen: bool) -> dict[str, Any]:
    found = check.value(pjrt.compile_program, program, target, timeout=_LIMIT_S, env=pjrt.QUIET)
    if found["stage"] == "topology":
        words = f"libtpu knows no target {target}: {found['error']}"
        # a target of a person's own choice says nothing about the image
        if chosen:
            check.cannot(words)
        raise AssertionError(words)
    check.figures |= {
        name: value for name, value in found.items() if name not in ("stage", "error", "kind")
    }
    return dict(found)


def _done(check: Check, found: dict[str, Any], flops: float) -> None:
    assert found["stage"] == "done", f"libtpu refused the program: {found.get('error')}"
    assert found["code_bytes"] > 0, "libtpu made a program without code"
    assert found["flops"] == flops, f"it counts {found['flops']} operations instead of {flops}"
    check.detail = (
        f"{found['compile_seconds']:.2f} s, {found['code_bytes'] / 1e3:.0f} kB of code, "
        f"{found['peak_device_bytes'] / 2**20:.1f} MiB on {found['chip']}"
    )


@pytest.mark.check(
    id="compile.small",
    purpose="libtpu compiles the 2x2 matrix product of TorchTPU's README",
    severity="critical",
    remedy=_REBAKE,
)
def test_small(check: Check, target: str, targets_chosen: bool) -> None:
    found = _compile(check, "matmul_2x2", target, targets_chosen)
    _done(check, found, 2.0 * 2**3)


@pytest.mark.check(
    id="compile.large",
    purpose="libtpu compiles an 8192x8192 bfloat16 matrix product",
    severity="critical",
    remedy=_REBAKE,
)
def test_large(check: Check, target: str, targets_chosen: bool) -> None:
    found = _compile(check, "matmul_8192", target, targets_chosen)
    _done(check, found, 2.0 * _BIG**3)
    assert found["argument_bytes"] == 2 * 2 * _BIG**2, (
        f"its arguments take {found['argument_bytes']} bytes instead of {2 * 2 * _BIG**2}"
    )
    assert found["peak_device_bytes"] < found["memory_of_chip_bytes"], "it does not fit the chip"


@pytest.mark.check(
    id="compile.too-large",
    purpose="a program too large for the chip's memory is refused, with a clear error",
    severity="critical",
    remedy="the compiler says yes to everything: " + _REBAKE,
)
def test_too_large(check: Check, target: str, targets_chosen: bool) -> None:
    found = _compile(check, "too_large", target, targets_chosen)
    assert found["stage"] == "compile", "libtpu compiled a program of 1.5 TiB"
    error = " ".join(str(found["error"]).split())
    assert found["kind"] == "ResourceExhausted", f"it was refused for another reason: {error}"
    assert "HBM" in error, f"the error does not speak of HBM: {error}"
    check.detail = f"refused in {found['compile_seconds']:.2f} s: {error[:160]}"


@pytest.mark.check(
    id="compile.malformed",
    purpose="a program whose shapes do not fit is refused, with a clear error",
    severity="critical",
    remedy="the compiler says yes to everything: " + _REBAKE,
)
def test_malformed(check: Check, target: str, targets_chosen: bool) -> None:
    found = _compile(check, "malformed", target, targets_chosen)
    assert found["stage"] == "compile", "libtpu compiled a product whose shapes do not fit"
    error = " ".join(str(found["error"]).split())
    assert "contracting dimension" in error, f"it was refused for another reason: {error}"
    check.detail = f"refused: {error[:120]}"
