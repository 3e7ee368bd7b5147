"""The programs of the *simulate* tier, grouped by what they share a process with.

An import of torch with the backend loaded takes seconds, so a theme is one process that runs
several programs one after the other. Each program is a function without arguments that returns its
figures and raises AssertionError where the TPU's result differs from the CPU's by more than the
tolerance it states. The device is ``tpu``; the API is PyTorch's own, and where a program needs a
private name of torch_tpu it says so and reports when the name has gone.

Tolerances are relative and absolute bounds for ``torch.testing.assert_close``. The simulator
computes float32 in float32, so results differ from the CPU's by the order of sums only.
"""

from __future__ import annotations

import io
import os
import re
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smoke import workloads
from smoke.simulator import api

FLOAT32 = workloads.FLOAT32
BFLOAT16 = (3e-2, 3e-2)
"""Bfloat16 keeps 8 bits: a result may be off by a few units of its last place."""

_STEPS = 4
_WARM_UP = 2
"""The first step compiles; the second one finds the optimizer's state made, and compiles too."""

_ROUNDS = 30
_COUNTERS = ("num_cache_reqs", "num_cache_hits", "num_compilations")


class CannotError(Exception):
    """A program that cannot tell anything here; its message says why."""


class Differences:
    """Compares results with the CPU's and keeps the largest difference.

    Attributes:
        largest: The largest absolute difference seen.
        count: How many results were compared.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self.count = 0

    def close(
        self, name: str, found: Any, expected: Any, bounds: tuple[float, float] = FLOAT32
    ) -> None:
        """Compare one tensor.

        Args:
            name: What it is, for the message.
            found: The TPU's.
            expected: The CPU's.
            bounds: Relative and absolute tolerance.

        Raises:
            AssertionError: If it is not on the TPU, or differs in type, shape or values.
        """
        torch = _torch()
        assert found.device.type == "tpu", f"{name} is on {found.device}"
        home = found.detach().cpu()
        torch.testing.assert_close(
            home, expected.detach(), rtol=bounds[0], atol=bounds[1], msg=lambda m: f"{name}: {m}"
        )
        self.count += 1
        if home.numel() and not home.dtype.is_complex and home.dtype != torch.bool:
            difference = float((home.double() - expected.detach().double()).abs().max())
            self.largest = max(self.largest, difference)

    def figures(self, bounds: tuple[float, float] = FLOAT32) -> dict[str, Any]:
        """What a program returns of its comparisons.

        Args:
            bounds: The tolerance that was used.
        """
        return {
            "detail": f"{self.count} results, the largest difference {self.largest:.1e}",
            "compared": self.count,
            "largest_difference": self.largest,
            "relative_tolerance": bounds[0],
            "absolute_tolerance": bounds[1],
        }


def readme() -> dict[str, Any]:
    """The README's first program."""
    found = workloads.matmul_2x2()
    assert found["available"], "torch.accelerator.is_available() is False"
    assert found["device"] == "tpu", f"the product is on {found['device']}"
    assert found["finite"] and found["difference"] < FLOAT32[1], (
        f"the product differs from the CPU's by {found['difference']}"
    )
    return found | {"detail": f"within {found['difference']:.1e} of the CPU's"}


def generation() -> dict[str, Any]:
    """What a plain import makes of the chip on the bus, and one operation on it.

    Name and memory are public and experimental in torch_tpu 0.2.0; so is the launch, which fills
    in the shape of a host with four processes.
    """
    torch = _torch()
    seen = Differences()
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    seen.close("product", x.to("tpu") @ x.t().to("tpu"), x @ x.t())
    found = seen.figures() | {
        "name": str(torch.tpu.get_device_name()),
        "memory_bytes": int(torch.tpu.get_device_properties(0).total_memory),
    }
    torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=4)
    return found | {"topology_of_4": os.environ.get("TORCH_TPU_TOPOLOGY")}


def limits() -> dict[str, Any]:
    """How the probes of the known limits fail; it must run before the device is used."""
    from smoke.simulator import limits as known

    return {"failures": known.probe_all(), "detail": ""}


def train() -> dict[str, Any]:
    """Training steps, eager."""
    return _trained(compiled=False)


def compile_train() -> dict[str, Any]:
    """Training steps of a compiled model."""
    return _trained(compiled=True)


def _trained(compiled: bool) -> dict[str, Any]:
    found = workloads.train(compiled, *FLOAT32)
    detail = (
        f"{found['steps']} steps, weights within {found['largest_weight_difference']:.1e} of the "
        f"CPU's; first step {found['first_step_seconds']:.2f} s, "
        f"then {found['steady_step_seconds'] * 1e3:.1f} ms"
    )
    return found | {"detail": detail}


def compile_forward() -> dict[str, Any]:
    """A compiled forward pass."""
    found = workloads.compile_forward(*FLOAT32)
    detail = (
        f"within {found['difference']:.1e} of the CPU's; "
        f"first call {found['first_seconds']:.2f} s, then {found['later_seconds'] * 1e3:.1f} ms"
    )
    return found | {"detail": detail}


def eager() -> dict[str, Any]:
    """One operation of every usual kind, in the types that models use."""
    torch = _torch()
    F = torch.nn.functional  # noqa: N806 - the name that everybody gives it
    torch.manual_seed(1)
    a, b = torch.randn(16, 24), torch.randn(24, 8)
    image, kernel = torch.randn(2, 3, 12, 12), torch.randn(5, 3, 3, 3)
    rows = torch.tensor([3, 0, 3, 9])
    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "elementwise": (lambda x: torch.exp(x).clamp(max=3) + torch.sin(x) * 2 - x / 3, (a,)),
        "where": (lambda x: torch.where(x > 0, x, x * 0.1), (a,)),
        "matrix product": (torch.matmul, (a, b)),
        "linear": (lambda x, w: F.linear(x, w.t(), torch.ones(8).to(x.device)), (a, b)),
        "reductions": (lambda x: torch.stack([x.sum(0), x.mean(0), x.amax(0), x.var(0)]), (a,)),
        "softmax": (lambda x: torch.softmax(x, -1), (a,)),
        "convolution": (lambda x, w: F.conv2d(x, w, padding=1), (image, kernel)),
        "pooling": (lambda x: F.max_pool2d(x, 2), (image,)),
        "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), (image,)),
        "layer norm": (lambda x: F.layer_norm(x, (24,)), (a,)),
        "group norm": (lambda x: F.group_norm(x, 3), (image,)),
        "embedding": (lambda w, i: F.embedding(i, w), (a, rows)),
        "index": (lambda x, i: x[i], (a, rows)),
        "gather": (lambda x, i: x.gather(0, i[:, None].expand(4, 24)), (a, rows)),
        "scatter": (lambda x, i: torch.zeros_like(x).index_add(0, i, x[:4]), (a, rows)),
        "sort": (lambda x: torch.sort(x, dim=1).values, (a,)),
        "top k": (lambda x: torch.topk(x, 3).values, (a,)),
        "arg max": (lambda x: x.argmax(1), (a,)),
        "views": (lambda x: x.t().reshape(4, 6, 16).permute(1, 0, 2).contiguous(), (a,)),
        "concatenation": (lambda x: torch.cat([x[:2], x[5:]]), (a,)),
        "in place": (lambda x: x.clone().mul_(2).add_(1), (a,)),
        "attention": (_attention, (torch.randn(2, 4, 8, 16),)),
        "int32": (lambda x: (x * 7 // 3) % 5, (torch.arange(20, dtype=torch.int32),)),
        "int64": (lambda x: x.sum() + x.max(), (torch.arange(20),)),
        "bool": (lambda x: (x > 0) & (x < 1), (a,)),
        "complex": (lambda x: torch.fft.ifft(torch.fft.fft(x)).real, (a,)),
    }
    seen = Differences()
    for name, (function, inputs) in programs.items():
        found = function(*(value.to("tpu") for value in inputs))
        seen.close(name, found, function(*inputs))
    for kind in (torch.bfloat16, torch.float16):
        x, w = a.to(kind), b.to(kind)
        found = torch.relu(x.to("tpu") @ w.to("tpu")) + 1
        seen.close(f"matrix product in {kind}", found, torch.relu(x @ w) + 1, BFLOAT16)
    return seen.figures()


def _attention(x: Any) -> Any:
    """Scaled dot product attention by its plain formula: its kernel needs a real TPU."""
    torch = _torch()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def autograd() -> dict[str, Any]:
    """Gradients of a convolutional, a recurrent and an embedding network; double backward."""
    torch = _torch()
    nn = torch.nn
    seen = Differences()
    torch.manual_seed(2)
    models = {
        "convolution": (
            nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
            ),
            torch.randn(2, 3, 8, 8),
        ),
        "recurrence": (nn.LSTM(6, 5, batch_first=True), torch.randn(2, 4, 6)),
        "embedding": (
            nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
            torch.tensor([[1, 2, 2], [10, 0, 1]]),
        ),
    }
    for name, (model, inputs) in models.items():
        state = {key: value.clone() for key, value in model.state_dict().items()}

        def gradients(device: str, model: Any = model, inputs: Any = inputs) -> dict[str, Any]:
            placed = model.to(device)
            output = placed(inputs.to(device))
            output = output[0] if isinstance(output, tuple) else output
            output.square().mean().backward()
            found = {key: value.grad for key, value in placed.named_parameters()}
            placed.zero_grad(set_to_none=True)
            return found

        expected = gradients("cpu")
        model.load_state_dict(state)
        for key, value in gradients("tpu").items():
            seen.close(f"{name}: gradient of {key}", value, expected[key])

    def twice(device: str) -> Any:
        x = torch.linspace(0.1, 2, 12).to(device).requires_grad_()
        (first,) = torch.autograd.grad((x**3 * torch.sin(x)).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return second

    seen.close("second derivative", twice("tpu"), twice("cpu"))
    return seen.figures()


def optimizers() -> dict[str, Any]:
    """Steps of SGD, Adam, AdamW and RMSprop."""
    torch = _torch()
    seen = Differences()
    # Adam divides by the root of a small number, which turns the last bit of a gradient into more
    bounds = (1e-3, 1e-4)
    made: dict[str, Callable[[Any], Any]] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
        "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=1e-2),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    }
    moved = {}
    for name, make in made.items():
        (before, expected), (_, found) = (_optimized(make, device) for device in ("cpu", "tpu"))
        for key, value in expected.items():
            seen.close(f"{name}: {key}", found[key], value, bounds)
        moved[name] = max(float((expected[k] - before[k]).abs().max()) for k in before)
        assert moved[name] > 1e-3, f"{name} moved no weight"
    return seen.figures(bounds) | {"largest_step": moved}


def _optimized(make: Callable[[Any], Any], device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights of a small network before and after a few steps of an optimizer."""
    torch = _torch()
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    inputs, labels = torch.randn(12, 8), torch.randn(12, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, inputs, labels = model.to(device), inputs.to(device), labels.to(device)
    optimizer = make(model.parameters())
    for _ in range(_STEPS):
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.mse_loss(model(inputs), labels).backward()
        optimizer.step()
    return before, {name: value.detach() for name, value in model.state_dict().items()}


def amp() -> dict[str, Any]:
    """Autocast to bfloat16, forward and backward."""
    torch = _torch()
    seen = Differences()

    def run(device: str) -> tuple[Any, Any, Any]:
        torch.manual_seed(4)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)
        )
        inputs = torch.randn(8, 16)
        model, inputs = model.to(device), inputs.to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            output = model(inputs)
            loss = output.float().square().mean()
        loss.backward()
        return output, loss, model[0].weight.grad

    found, expected = run("tpu"), run("cpu")
    assert found[0].dtype == torch.bfloat16, f"autocast gave {found[0].dtype}"
    assert found[2].dtype == torch.float32, f"the weight's gradient is {found[2].dtype}"
    for name, one, other in zip(("output", "loss", "gradient"), found, expected, strict=True):
        seen.close(name, one, other, BFLOAT16)
    return seen.figures(BFLOAT16)


def checkpoint() -> dict[str, Any]:
    """Activation checkpointing; saving weights and optimizer, and going on from them."""
    torch = _torch()
    from torch.utils.checkpoint import checkpoint as recompute

    seen = Differences()

    def gradients(again: bool) -> dict[str, Any]:
        model = _stack(torch).to("tpu")
        inputs = torch.linspace(-1, 1, 32).reshape(4, 8).to("tpu").requires_grad_()
        output = recompute(model, inputs, use_reentrant=False) if again else model(inputs)
        output.square().sum().backward()
        return {"inputs": inputs.grad, **{n: p.grad for n, p in model.named_parameters()}}

    plain = gradients(again=False)
    for name, value in gradients(again=True).items():
        seen.close(f"recomputed gradient of {name}", value, plain[name].cpu())

    def steps(model: Any, optimizer: Any, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            model(torch.ones(2, 8, device="tpu")).square().sum().backward()
            optimizer.step()

    model = _stack(torch).to("tpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    steps(model, optimizer, 2)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    steps(model, optimizer, 2)
    saved.seek(0)
    home = torch.load(saved, map_location="cpu", weights_only=True)
    devices = {value.device.type for value in home["model"].values()}
    assert devices == {"cpu"}, f"a checkpoint for the CPU was loaded to {devices}"
    other = _stack(torch)
    other.load_state_dict(home["model"])
    other = other.to("tpu")
    resumed = torch.optim.Adam(other.parameters(), lr=1e-2)
    resumed.load_state_dict(home["optimizer"])
    steps(other, resumed, 2)
    for name, value in other.state_dict().items():
        seen.close(f"resumed {name}", value, model.state_dict()[name].cpu(), (0.0, 0.0))
    return seen.figures() | {"bytes": len(saved.getvalue())}


def _stack(torch: Any) -> Any:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))


def public_api() -> dict[str, Any]:
    """TorchTPU's own public API, see :mod:`smoke.simulator.api`."""
    found = api.exercise(_torch())
    left = found["not_called"]
    detail = (
        f"of {found['names']} names {len(found['called'])} work, {len(found['refused'])} are kept "
        f"for PyTorch and say so, {len(left)} are not called: {', '.join(left)}"
    )
    return found | {"detail": detail}


def fallback() -> dict[str, Any]:
    """An operator without a kernel: refused by name, and run on the CPU when that is asked for.

    TorchTPU 0.2.0 has no public switch; ``torch_tpu._internal.execution_mode`` is its only one.
    """
    torch = _torch()
    matrix = torch.eye(3) * 4 + 1
    message = _refusal(lambda: torch.linalg.cholesky(matrix.to("tpu")))
    found: dict[str, Any] = {
        "detail": "off: refused; this torch_tpu has no switch to turn it on",
        "off": message,
        "on": None,
    }
    try:
        from torch_tpu._internal import execution_mode
    except ImportError:
        return found
    if not hasattr(execution_mode, "enable_cpu_fallback"):
        return found
    assert execution_mode.enable_cpu_fallback is False, "the fallback is on without being asked for"
    seen = Differences()
    execution_mode.enable_cpu_fallback = True
    try:
        result = torch.linalg.cholesky(matrix.to("tpu"))
        seen.close("the fallback's result", result, torch.linalg.cholesky(matrix))
    finally:
        execution_mode.enable_cpu_fallback = False
    _refusal(lambda: torch.linalg.cholesky(matrix.to("tpu")))
    detail = "off: refused by name; on: the CPU's result; off again: refused"
    return found | seen.figures() | {"on": True, "detail": detail}


def _refusal(function: Callable[[], Any]) -> str:
    try:
        function()
    except (RuntimeError, NotImplementedError) as error:
        message = str(error)
    else:
        raise AssertionError("an operator without a kernel was run, and nobody asked for that")
    expected = r"operator 'aten::\w+(\.\w+)?' is not implemented for TPU"
    assert re.search(expected, message), f"the refusal does not name the operator: {message}"
    return message.splitlines()[0]


def shapes() -> dict[str, Any]:
    """A compiled function and new shapes: each compiles once, and none twice.

    After some shapes Dynamo stops compiling and runs the function eagerly, which must give the
    same results. ``dynamic=True`` is refused by torch_tpu 0.2.0; a later one may do it right.
    """
    torch = _torch()
    stats = _stats()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.tanh(x) @ x.t() + 1)
    seen = Differences()
    made: dict[str, list[int]] = {"first": [], "again": []}
    for turn in made.values():
        for rows in (4, 5, 6):
            x = torch.linspace(-1, 1, rows * 8).reshape(rows, 8)
            on_tpu = x.to("tpu")
            before = _count(stats)
            found = compiled(on_tpu)
            seen.close(f"{rows} rows", found, torch.tanh(x) @ x.t() + 1)
            turn.append(_count(stats)["num_compilations"] - before["num_compilations"])
    figures = seen.figures() | {"compilations": made}
    assert all(made["first"]), f"a new shape was not compiled: {made['first']}"
    assert not any(made["again"]), f"a known shape was compiled again: {made['again']}"
    for rows in range(7, 7 + torch._dynamo.config.recompile_limit):
        x = torch.linspace(-1, 1, rows * 8).reshape(rows, 8)
        seen.close(f"{rows} rows", compiled(x.to("tpu")), torch.tanh(x) @ x.t() + 1)
    dynamic = "works"
    try:
        value = torch.compile(torch.tanh, dynamic=True)(x.to("tpu"))
    except Exception as error:
        message = " ".join(str(error).split())
        assert "NotImplementedError" in message and "dynamic" in message, (
            f"torch.compile(dynamic=True) fails without a clear refusal: {message}"
        )
        dynamic = "refused"
    else:
        seen.close("dynamic=True", value, torch.tanh(x))
    figures |= seen.figures() | {"dynamic_true": dynamic}
    detail = (
        f"{len(made['first'])} shapes, each compiled once; right beyond Dynamo's limit of "
        f"{torch._dynamo.config.recompile_limit}; dynamic=True {dynamic}"
    )
    return figures | {"detail": detail}


def modes() -> dict[str, Any]:
    """The three eager modes give the same results, and fusion asks the cache less often."""
    torch = _torch()
    stats = _stats()
    seen = Differences()
    expected = _loop(torch, "cpu")
    requests, seconds, results = {}, {}, {}
    names = {
        "blocking": "DEFER_NEVER_AND_LAUNCH_BLOCKING",
        "default": "DEFER_NEVER",
        "fused": "DEFER_AND_FUSE",
    }
    usual = torch.tpu.EagerMode.DEFER_NEVER
    assert torch.tpu.eager_mode == usual, f"the mode at the start is {torch.tpu.eager_mode}"
    for name, member in names.items():
        with torch.tpu.set_eager_mode(torch.tpu.EagerMode[member]):
            _loop(torch, "tpu").cpu()
            before = _count(stats)
            started = time.perf_counter()
            found = _loop(torch, "tpu")
            results[name] = found.cpu()
            seconds[name] = time.perf_counter() - started
            after = _count(stats)
        requests[name] = after["num_cache_reqs"] - before["num_cache_reqs"]
        seen.close(name, found, expected)
    torch.testing.assert_close(results["blocking"], results["default"], rtol=0, atol=0)
    assert requests["default"] >= 3 * _ROUNDS, f"{requests['default']} requests for 3 x {_ROUNDS}"
    assert requests["fused"] < requests["default"] / 2, (
        f"fusion made {requests['fused']} requests, the default mode {requests['default']}"
    )
    detail = ", ".join(
        f"{name} {seconds[name] * 1e3:.0f} ms and {requests[name]} requests" for name in names
    )
    figures = {"cache_requests": requests, "loop_seconds": seconds, "detail": detail}
    return seen.figures() | figures


def _loop(torch: Any, device: str) -> Any:
    x = torch.linspace(-1, 1, 1024).reshape(32, 32).to(device)
    y = x
    for _ in range(_ROUNDS):
        y = torch.tanh(y) * 1.5 + x
    return y


def cache() -> dict[str, Any]:
    """The cache within one process: single operations, and training after its warm-up."""
    found = workloads.cache_counters()
    if found["counters"] is None:
        raise CannotError(_NO_COUNTERS)
    first, second, third = found["counters"]
    assert first["num_compilations"] > 0, "the first round compiled nothing: counters do not count"
    assert second["num_compilations"] == 0, (
        f"the same operations were compiled {second['num_compilations']} times again"
    )
    assert second["num_cache_hits"] == second["num_cache_reqs"] > 0, "the cache was not asked"
    assert third["num_compilations"] > 0, "a new shape was not compiled"
    training = _compilations_of_training()
    assert training[0] > 0, "the first training step compiled nothing: counters do not count"
    assert not any(training[_WARM_UP:]), (
        f"training steps compile after {_WARM_UP} steps of warm-up: {training}"
    )
    detail = (
        f"{first['num_compilations']} compilations, then {second['num_cache_hits']} hits and none; "
        f"training steps: {', '.join(map(str, training))}"
    )
    figures = {"first": first, "second": second, "new_shape": third, "training_steps": training}
    return figures | {"detail": detail}


def _compilations_of_training() -> list[int]:
    """What each of a few training steps compiled."""
    torch = _torch()
    stats = _stats()
    model = _stack(torch).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.linspace(-1, 1, 96).reshape(12, 8).to("tpu")
    made = []
    for _ in range(_WARM_UP + _STEPS):
        before = _count(stats)["num_compilations"]
        optimizer.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()
        optimizer.step()
        torch.accelerator.synchronize()
        made.append(_count(stats)["num_compilations"] - before)
    return made


_NO_COUNTERS = "this torch_tpu has no torch.tpu._get_cache_stats, the only counters there are"


def counted_work() -> dict[str, Any]:
    """Eager and compiled work with the persistent cache, and what the whole process compiled."""
    torch = _torch()
    stats = _stats()
    root = os.environ["TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"]
    workloads.train(False, *FLOAT32)
    workloads.compile_forward(*FLOAT32)
    torch.accelerator.synchronize()
    files = [path for path in Path(root).rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return _count(stats) | {"files": len(files), "bytes": size, "detail": ""}


def _stats() -> Callable[[], Any]:
    """The counters of torch_tpu 0.2.0: private, and the only ones."""
    stats: Callable[[], Any] | None = getattr(_torch().tpu, "_get_cache_stats", None)
    if stats is None:
        raise CannotError(_NO_COUNTERS)
    return stats


def _count(stats: Callable[[], Any]) -> dict[str, int]:
    now = stats()
    return {name: int(getattr(now, name)) for name in _COUNTERS}


def collectives() -> dict[str, Any]:
    """The collectives of a world of one, whose results are known."""
    torch = _torch()
    dist = _world(torch)
    seen = Differences()
    x = torch.arange(6.0).reshape(2, 3)
    for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"):
        value = x.to("tpu")
        output = torch.zeros(2, 3).to("tpu")
        if name == "all_reduce":
            dist.all_reduce(value)
            output = value
        elif name == "broadcast":
            dist.broadcast(value, 0)
            output = value
        else:
            getattr(dist, name)(output, value)
        seen.close(name, output, x)
    output = torch.zeros(2, 3).to("tpu")
    dist.all_to_all_single(output, x.to("tpu"))
    seen.close("all_to_all_single", output, x)
    return seen.figures() | {"backend": dist.get_backend(), "world": dist.get_world_size()}


def ddp() -> dict[str, Any]:
    """A training step under DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    return _parallel(DistributedDataParallel)


def fsdp2() -> dict[str, Any]:
    """A training step under FSDP2 (``fully_shard``)."""

    def shard(model: Any) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model, mesh=init_device_mesh("tpu", (1,)))

    return _parallel(shard)


def dtensor() -> dict[str, Any]:
    """Sharded and replicated DTensors: a product and its redistribution."""
    torch = _torch()
    _world(torch)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("tpu", (1,))
    torch.manual_seed(6)
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    left = distribute_tensor(a.to("tpu"), mesh, [Shard(0)])
    right = distribute_tensor(b.to("tpu"), mesh, [Replicate()])
    product = left @ right
    seen = Differences()
    seen.close("sharded product", product.to_local(), a @ b)
    seen.close("gathered product", product.full_tensor(), a @ b)
    again = product.redistribute(mesh, [Replicate()])
    seen.close("replicated product", again.to_local(), a @ b)
    return seen.figures()


def _parallel(wrap: Callable[[Any], Any]) -> dict[str, Any]:
    torch = _torch()
    _world(torch)
    inputs = torch.linspace(-1, 1, 32).reshape(4, 8)

    def step(model: Any, device: str) -> tuple[Any, dict[str, Any]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(inputs.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        weights = {name.removeprefix("module."): p for name, p in model.named_parameters()}
        whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in weights.items()}
        return loss, whole

    loss, weights = step(_stack(torch), "cpu")
    found_loss, found = step(wrap(_stack(torch).to("tpu")), "tpu")
    seen = Differences()
    seen.close("loss", found_loss, loss)
    assert found.keys() == weights.keys(), f"the weights are called {sorted(found)}"
    for name, value in weights.items():
        seen.close(name, found[name], value)
    return seen.figures()


def _world(torch: Any) -> Any:
    """The process group of one process, made once."""
    dist = torch.distributed
    if not dist.is_initialized():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=1)
        dist.init_process_group("tpu_dist")
    return dist


def _torch() -> Any:
    import torch

    return torch


def run(names: Sequence[str]) -> dict[str, Any]:
    """Run programs of this module one after the other; one that fails does not stop the rest.

    Args:
        names: Their functions.

    Returns:
        For each name ``value`` (its figures) and ``seconds``, or ``error`` or ``cannot``.
    """
    results: dict[str, Any] = {}
    for name in names:
        started = time.perf_counter()
        try:
            value = globals()[name]()
        except CannotError as error:
            results[name] = {"cannot": str(error)}
        except Exception as error:
            traceback.print_exc()
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            results[name] = {"error": f"{kind}{error}"}
        else:
            results[name] = {"value": value, "seconds": time.perf_counter() - started}
    return results
