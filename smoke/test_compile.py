"""Tier *compile*: the real libtpu compiles for real TPUs, with no TPU here.

Every program of the corpus is a check. The slow ones carry the marker ``full`` and are left out
unless ``--corpus full`` asks for them.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

import pytest

from smoke import flavours, pjrt, programs
from smoke.place import Place
from smoke.plugin import REBAKE, Check

_LIMIT_S = 240.0
# what a person sets for the compiler is judged once, by compile.flags
_ENV: dict[str, str | None] = {**pjrt.QUIET, "XLA_FLAGS": None, "LIBTPU_INIT_ARGS": None}
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_SHOWN = 200
_REMEDY = (
    "install the libtpu that the lock names; if the change is wanted, renew the baseline "
    "(docs/compile.md)"
)


pytestmark = pytest.mark.usefixtures("pypjrt")


@pytest.fixture(scope="session")
def baseline() -> programs.Baseline:
    """The figures written down for each libtpu."""
    return programs.read_baseline()


def _parameter(program: programs.Program, verb: str, remedy: str) -> Any:
    marks = [
        pytest.mark.check(
            id=f"compile.{program.name}",
            purpose=f"libtpu {verb} {program.what}",
            severity="critical",
            remedy=remedy,
        )
    ]
    if program.slow:
        marks.append(pytest.mark.full)
    return pytest.param(program, marks=marks, id=program.name)


def _good() -> list[Any]:
    return [_parameter(one, "compiles", _REMEDY) for one in programs.corpus() if not one.refused]


def _bad() -> list[Any]:
    remedy = "the compiler says yes to everything: " + REBAKE
    return [_parameter(one, "refuses", remedy) for one in programs.corpus() if one.refused]


def _known(check: Check, found: dict[str, Any], topology: str, chosen: bool) -> None:
    if found["stage"] == "topology":
        words = f"libtpu knows no target {topology}: {found['error']}"
        # a target of a person's own choice says nothing about the image
        if chosen:
            check.cannot(words)
        raise AssertionError(words)


def _compile(check: Check, program: programs.Program, target: str, chosen: bool) -> dict[str, Any]:
    topology = program.topology(target)
    found = check.value(pjrt.compile_program, program.name, topology, timeout=_LIMIT_S, env=_ENV)
    _known(check, found, topology, chosen)
    check.figures |= {
        name: value for name, value in found.items() if name not in ("stage", "error", "kind")
    }
    check.figures["topology"] = topology
    if found["chips"] < program.devices:
        check.cannot(f"{topology} has {found['chips']} devices; this needs {program.devices}")
    return dict(found)


@pytest.mark.parametrize("program", _good())
def test_compiles(
    check: Check,
    program: programs.Program,
    target: str,
    targets_chosen: bool,
    baseline: programs.Baseline,
) -> None:
    found = _compile(check, program, target, targets_chosen)
    assert found["stage"] == "done", f"libtpu refused the program: {found.get('error')}"
    assert found["code_bytes"] > 0, "libtpu made a program without code"
    assert found["peak_device_bytes"] < found["memory_of_chip_bytes"], "it does not fit the chip"
    if program.flops is not None:
        assert found["flops"] == program.flops, (
            f"it counts {found['flops']} operations instead of {program.flops}"
        )
    version = metadata.version("libtpu")
    compared = programs.compare(program.name, target, version, found, baseline)
    check.figures["baseline"] = "within its bands" if compared.judged else compared.why
    assert not compared.wrong, f"libtpu {version}: {'; '.join(compared.wrong)}"
    check.detail = (
        f"{found['compile_seconds']:.2f} s, {found['code_bytes'] / 1e3:.0f} kB of code, "
        f"{found['peak_device_bytes'] / 2**20:.1f} MiB on {found['chip']}; "
        f"{'as the baseline' if compared.judged else compared.why}"
    )


@pytest.mark.check(
    id="compile.flags",
    purpose="libtpu compiles with what XLA_FLAGS and LIBTPU_INIT_ARGS of this environment say",
    severity="critical",
    remedy="correct or remove the flag that the message names, then unset the variable to see that "
    "everything else passes",
)
def test_flags(check: Check, target: str) -> None:
    given = {name: value for name in _FLAGS if (value := os.environ.get(name))}
    check.figures["named"] = sorted(given)
    if not given:
        check.detail = "neither is set"
        return
    ended = check.isolated(
        pjrt.compile_program, "small", target, timeout=_LIMIT_S, env={**_ENV, **given}
    )
    said = [f"{name}={value[:_SHOWN]}" for name, value in given.items()]
    why = ended.story if ended.error is not None else str(ended.value.get("error") or "")
    done = ended.error is None and ended.value["stage"] == "done"
    assert done, f"with {' and '.join(said)} not even a 2x2 product compiles: {why}"
    check.detail = f"the 2x2 product compiles with {' and '.join(said)}"


@pytest.mark.check(
    id="compile.pallas",
    purpose="a kernel written in Pallas compiles for the TPU, in an image of the flavour pallas",
    severity="critical",
    remedy="install the jax that the lock names beside this libtpu; " + REBAKE,
)
def test_pallas(check: Check, here: Place, target: str, targets_chosen: bool) -> None:
    flavours.own(check, here, "checks")
    found = check.value(flavours.compile_kernel, target, timeout=_LIMIT_S, env=_ENV)
    _known(check, found, target, targets_chosen)
    check.figures |= {name: value for name, value in found.items() if name != "stage"}
    check.detail = (
        f"{found['compile_seconds']:.2f} s, {found['code_bytes'] / 1e3:.0f} kB of code, "
        f"{found['peak_device_bytes'] / 2**20:.1f} MiB on {found['chip']}"
    )


@pytest.mark.parametrize("program", _bad())
def test_refuses(
    check: Check, program: programs.Program, target: str, targets_chosen: bool
) -> None:
    found = _compile(check, program, target, targets_chosen)
    assert found["stage"] == "compile", f"libtpu compiled {program.what}"
    error = " ".join(str(found["error"]).split())
    refused = str(program.refused)
    assert program.kind in ("", found["kind"]), f"it was refused for another reason: {error}"
    assert refused in error, f"it was refused for another reason: {error}"
    check.detail = f"refused in {found['compile_seconds']:.2f} s: {error[:160]}"
