"""What the benchmarks time. Each function runs in a process of its own (see ``isolate``)."""

from __future__ import annotations

import time
from pathlib import Path

from smoke.bench import pagecache

PROGRAMS = Path(__file__).resolve().parent


def import_torch() -> dict[str, float | int | None]:
    """Import torch, which loads the TPU backend by itself.

    Returns:
        ``seconds`` of the import, interpreter start not included; ``read_bytes`` from storage in
        the process's whole life, and ``file_bytes`` of files in its memory, where the kernel
        counts them.
    """
    started = time.perf_counter()
    import torch

    spent = time.perf_counter() - started
    assert torch.__version__
    return {
        "seconds": spent,
        "read_bytes": pagecache.read_bytes(),
        "file_bytes": pagecache.file_bytes(),
    }


def steps(warmup: int, count: int) -> dict[str, object]:
    """Train a small network on the accelerator, step by step, each waited for.

    Args:
        warmup: Steps before the steady state, the first included.
        count: Steps of the steady state.

    Returns:
        ``device`` (None where torch finds none; nothing is timed then), and the seconds of each
        step: ``warmup`` and ``steady``.

    Raises:
        RuntimeError: If the loss is not finite.
    """
    import torch

    if not torch.accelerator.is_available():
        return {"device": None, "warmup": [], "steady": []}
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, wanted = (torch.randn(64, 256).to(device) for _ in range(2))
    torch.accelerator.synchronize()

    def step() -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        torch.accelerator.synchronize()
        return time.perf_counter() - started

    spent = [step() for _ in range(warmup + count)]
    loss = torch.nn.functional.mse_loss(model(inputs), wanted).cpu()
    if not torch.isfinite(loss):
        raise RuntimeError(f"the loss is {loss.item()}")
    return {"device": str(device), "warmup": spent[:warmup], "steady": spent[warmup:]}


def compile_programs(target: str, names: list[str]) -> dict[str, float]:
    """Compile programs for a TPU topology with libtpu; no TPU takes part.

    Args:
        target: A topology that libtpu knows, such as ``v6e:2x2``.
        names: Programs beside this file, without suffix, compiled in this order.

    Returns:
        Seconds to load libtpu (``load``), and to compile and serialize each program.

    Raises:
        RuntimeError: If a program came out empty.
    """
    started = time.perf_counter()
    import libtpu
    import pypjrt

    plugin = pypjrt.Plugin(libtpu.get_library_path())
    plugin.initialize()
    spent = {"load": time.perf_counter() - started}
    with pypjrt.Topology.create(plugin, target) as topology:
        for name in names:
            program = (PROGRAMS / f"{name}.mlir").read_text(encoding="utf-8")
            started = time.perf_counter()
            executable = topology.compile(program)
            spent[name] = time.perf_counter() - started
            if not executable:
                raise RuntimeError(f"libtpu made nothing of {name}")
    return spent
