"""Small PyTorch programs that run on a TPU, real or simulated, and are compared with the CPU.

Each function is called through :mod:`smoke.isolate` and returns JSON. The simulate and device
tiers, and the benchmarks, share them. They use public PyTorch only: the device is ``tpu``, found by
PyTorch's own autoloading, and synchronised through ``torch.accelerator``. The one exception is
:func:`cache_counters`, which says so.

Tolerances: ``torch.testing.assert_close`` with the given bounds. On a CPU plugin float32 results
differ from eager CPU by the order of sums only; a TPU multiplies float32 matrices in bfloat16
passes unless told otherwise, so the device tier gives wider ones.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

FLOAT32 = (1e-4, 1e-5)
"""Relative and absolute tolerance for float32 results on the simulator."""

BFLOAT16_PASSES = (2e-2, 2e-2)
"""The same for a TPU, whose default float32 matrix product has bfloat16 inputs."""

HIDDEN = 64
STEPS = 5


def import_torch(autoload: bool) -> dict[str, Any]:
    """Import torch and use it on the CPU.

    Args:
        autoload: Let PyTorch load device backends, as a user's ``import torch`` does.

    Returns:
        Version, seconds of the import, whether an accelerator is there, and glue in memory.
    """
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1" if autoload else "0"
    started = time.perf_counter()
    import torch

    seconds = time.perf_counter() - started
    product = torch.ones(64, 64) @ torch.full((64, 64), 2.0)
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "import_seconds": seconds,
        "product": float(product.sum()),
        "available": bool(torch.accelerator.is_available()),
        "torch_tpu_loaded": "torch_tpu" in sys.modules,
        "glue": loaded_glue(),
    }


def import_torch_tpu() -> dict[str, Any]:
    """Import torch_tpu by name, without autoloading.

    Returns:
        Seconds of the import (torch included), the file it came from, and glue in memory.
    """
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    started = time.perf_counter()
    import torch_tpu

    seconds = time.perf_counter() - started
    import torch

    return {
        "import_seconds": seconds,
        "file": torch_tpu.__file__,
        "torch": torch.__version__,
        "glue": loaded_glue(),
    }


def loaded_glue() -> list[str]:
    """File names of torch_tpu's version-specific libraries that this process has mapped."""
    with Path("/proc/self/maps").open(encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/") > 1}
    own = {path for path in paths if "/torch_tpu/" in path and ".so" in path}
    return sorted(Path(path).name for path in own)


def expected_glue(torch: str, bundled: list[str]) -> str:
    """The glue that TorchTPU must pick: the newest one that is not newer than torch.

    Args:
        torch: torch's version, such as ``2.13.0+cpu``.
        bundled: The versions it bundles, such as ``2_13_0``.

    Returns:
        One of them.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", torch)
    assert match, f"torch calls itself {torch!r}, which is not a release"
    own = tuple(int(part) for part in match.groups())
    fitting = [one for one in bundled if tuple(map(int, one.split("_"))) <= own]
    assert fitting, f"torch_tpu has no glue for torch {torch}: it has {', '.join(bundled)}"
    return max(fitting, key=lambda one: tuple(map(int, one.split("_"))))


def matmul_2x2() -> dict[str, Any]:
    """The first program of TorchTPU's README: two 2x2 matrices on the TPU, multiplied.

    Returns:
        The device, the largest difference from the CPU's product, and the scale of its terms.
    """
    torch = _torch()
    torch.manual_seed(0)
    a = torch.randn(2, 2, device="tpu")
    b = torch.randn(2, 2, device="tpu")
    started = time.perf_counter()
    product = a @ b
    torch.accelerator.synchronize()
    seconds = time.perf_counter() - started
    found = product.cpu()
    return {
        "device": str(product.device.type),
        "accelerator": str(torch.accelerator.current_accelerator()),
        "available": bool(torch.accelerator.is_available()),
        "difference": float((found - a.cpu() @ b.cpu()).abs().max()),
        "scale": float((a.cpu().abs() @ b.cpu().abs()).max()),
        "finite": bool(torch.isfinite(found).all()),
        "first_seconds": seconds,
    }


def train(compiled: bool, relative: float, absolute: float) -> dict[str, Any]:
    """A few training steps of a small network on the TPU and on the CPU, compared.

    Forward, cross entropy, backward and SGD with momentum, from the same weights and batches.

    Args:
        compiled: Compile the model with ``torch.compile`` on the TPU.
        relative: Relative tolerance of losses and weights, and of how far training moved each
            parameter: five steps may move one by less than ``absolute``.
        absolute: Absolute tolerance of losses and weights.

    Returns:
        Losses of both, the largest difference of a weight, the largest part of a parameter's
        movement that is wrong, and seconds of the first and of a later step.

    Raises:
        AssertionError: If losses, weights or movements differ by more than the tolerances.
    """
    torch = _torch()
    torch.manual_seed(0)
    batches = [(torch.randn(32, HIDDEN), torch.randint(0, 10, (32,))) for _ in range(STEPS)]
    model = _network(torch)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    cpu_losses, cpu_state, _ = _train(torch, model, batches, "cpu", False)
    model = _network(torch)
    model.load_state_dict(state)
    losses, trained, seconds = _train(torch, model, batches, "tpu", compiled)
    difference = max(float((trained[n] - cpu_state[n]).abs().max()) for n in cpu_state)
    for name, value in cpu_state.items():
        torch.testing.assert_close(
            trained[name], value, rtol=relative, atol=absolute, msg=lambda m, n=name: f"{n}: {m}"
        )
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(cpu_losses), rtol=relative, atol=absolute
    )
    errors = {
        name: float((trained[name] - value).norm() / (value - state[name]).norm())
        for name, value in cpu_state.items()
    }
    for name, error in errors.items():
        assert error < relative, f"{name}: its movement is not close to the CPU's: {error:.1e} off"
    return {
        "losses": losses,
        "cpu_losses": cpu_losses,
        "largest_weight_difference": difference,
        "largest_movement_error": max(errors.values()),
        "first_step_seconds": seconds[0],
        "steady_step_seconds": min(seconds[1:]),
        "steps": STEPS,
    }


def _network(torch: Any) -> Any:
    norm = torch.nn.LayerNorm(128)
    # PyTorch begins with ones and zeros: a device that leaves them out would give the same
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    torch.nn.init.uniform_(norm.bias, -0.5, 0.5)
    return torch.nn.Sequential(
        torch.nn.Linear(HIDDEN, 128), torch.nn.GELU(), norm, torch.nn.Linear(128, 10)
    )


def _train(torch: Any, model: Any, batches: Any, device: str, compiled: bool) -> Any:
    model = model.to(device)
    step = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, seconds = [], []
    moved = [(inputs.to(device), labels.to(device)) for inputs, labels in batches]
    for inputs, labels in moved:
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(step(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach().cpu()))
        seconds.append(time.perf_counter() - started)
    return losses, {n: v.detach().cpu() for n, v in model.state_dict().items()}, seconds


def compile_forward(relative: float, absolute: float) -> dict[str, Any]:
    """``torch.compile`` of a forward pass on the TPU, compared with eager CPU.

    Args:
        relative: Relative tolerance.
        absolute: Absolute tolerance.

    Returns:
        The largest difference, seconds of the first and of a later call, and how many graphs
        Dynamo made.

    Raises:
        AssertionError: If results differ by more than the tolerances.
    """
    torch = _torch()
    torch.manual_seed(0)
    model = _network(torch).eval()
    inputs = torch.randn(32, HIDDEN)
    with torch.no_grad():
        expected = model(inputs)
        on_tpu = model.to("tpu")
        moved = inputs.to("tpu")
        torch._dynamo.reset()
        compiled = torch.compile(on_tpu, fullgraph=True)
        started = time.perf_counter()
        found = compiled(moved).cpu()
        first = time.perf_counter() - started
        started = time.perf_counter()
        again = compiled(moved).cpu()
        later = time.perf_counter() - started
    torch.testing.assert_close(found, expected, rtol=relative, atol=absolute)
    torch.testing.assert_close(again, found, rtol=0, atol=0)
    return {
        "difference": float((found - expected).abs().max()),
        "first_seconds": first,
        "later_seconds": later,
    }


def cache_counters() -> dict[str, Any]:
    """Whether the same operation again is served from the compile cache.

    TorchTPU 0.2.0 has no public counters: ``torch.tpu._get_cache_stats`` is private and the only
    one. If it has gone, the result says so.

    Returns:
        Requests, hits and compilations of a first round, a second one of the same shapes, and a
        third one of a new shape.
    """
    torch = _torch()
    stats = getattr(torch.tpu, "_get_cache_stats", None)
    if stats is None:
        return {"counters": None}

    def round_of(size: int) -> dict[str, int]:
        before = stats()
        x = torch.ones(size, size).to("tpu")
        float((torch.tanh(x @ x) + x).sum().cpu())
        torch.accelerator.synchronize()
        after = stats()
        names = ("num_cache_reqs", "num_cache_hits", "num_compilations")
        return {name: int(getattr(after, name)) - int(getattr(before, name)) for name in names}

    return {"counters": [round_of(8), round_of(8), round_of(9)]}


def _torch() -> Any:
    import torch

    return torch
