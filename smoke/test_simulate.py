"""Tier *simulate*: the real torch_tpu wheel on a CPU plugin, loaded for a simulated chip."""

from __future__ import annotations

import pytest

from smoke import workloads
from smoke.plugin import Check

_LIMIT_S = 240.0
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
_REMEDY = "compare with the device tier on a TPU; if only the simulator fails, build it again"


def _training(check: Check, compiled: bool) -> None:
    found = check.value(workloads.train, compiled, *workloads.FLOAT32, timeout=_LIMIT_S, env=_QUIET)
    check.figures |= found
    assert found["largest_weight_step"] > 0.01, "training moved no weight"
    check.detail = (
        f"{found['steps']} steps, weights within {found['largest_weight_difference']:.1e} of the "
        f"CPU's; first step {found['first_step_seconds']:.2f} s, "
        f"then {found['steady_step_seconds'] * 1e3:.1f} ms"
    )


@pytest.mark.check(
    id="simulate.readme",
    purpose="the first program of TorchTPU's README runs on device tpu, with no private call",
    severity="critical",
    remedy=_REMEDY,
)
def test_readme(check: Check) -> None:
    found = check.value(workloads.matmul_2x2, timeout=_LIMIT_S, env=_QUIET)
    check.figures |= found
    assert found["available"], "torch.accelerator.is_available() is False"
    assert found["device"] == "tpu", f"the product is on {found['device']}"
    assert found["finite"] and found["difference"] < 1e-5, (
        f"the product differs from the CPU's by {found['difference']}"
    )
    check.detail = f"device {found['accelerator']}, within {found['difference']:.1e} of the CPU's"


@pytest.mark.check(
    id="simulate.train",
    purpose="training steps on device tpu give the CPU's losses and weights",
    severity="critical",
    remedy=_REMEDY,
)
def test_train(check: Check) -> None:
    _training(check, compiled=False)


@pytest.mark.check(
    id="simulate.compile-forward",
    purpose="torch.compile of a forward pass gives the CPU's result, the second time as well",
    severity="critical",
    remedy=_REMEDY,
)
def test_compile_forward(check: Check) -> None:
    found = check.value(workloads.compile_forward, *workloads.FLOAT32, timeout=_LIMIT_S, env=_QUIET)
    check.figures |= found
    check.detail = (
        f"within {found['difference']:.1e} of the CPU's; "
        f"first call {found['first_seconds']:.2f} s, then {found['later_seconds'] * 1e3:.1f} ms"
    )


@pytest.mark.check(
    id="simulate.compile-train",
    purpose="training steps of a compiled model give the CPU's losses and weights",
    severity="critical",
    remedy=_REMEDY,
)
def test_compile_train(check: Check) -> None:
    _training(check, compiled=True)


@pytest.mark.check(
    id="simulate.cache",
    purpose="the same operation again compiles nothing; a new shape does",
    severity="critical",
    remedy=_REMEDY,
)
def test_compile_cache(check: Check) -> None:
    found = check.value(workloads.cache_counters, timeout=_LIMIT_S, env=_QUIET)
    if found["counters"] is None:
        check.cannot(
            "this torch_tpu has no torch.tpu._get_cache_stats, the only counters there are"
        )
    first, second, third = found["counters"]
    check.figures |= {"first": first, "second": second, "new_shape": third}
    assert first["num_compilations"] > 0, "the first round compiled nothing: counters do not count"
    assert second["num_compilations"] == 0, (
        f"the same operations were compiled {second['num_compilations']} times again"
    )
    assert second["num_cache_hits"] == second["num_cache_reqs"] > 0, "the cache was not asked"
    assert third["num_compilations"] > 0, "a new shape was not compiled"
    check.detail = (
        f"{first['num_compilations']} compilations, then {second['num_cache_hits']} hits and none"
    )
