"""All TPU chips of a host, or of a slice of several hosts, in one PyTorch process group.

The launch is TorchTPU's own public one: ``torch.tpu.distributed.set_tpu_launch_env`` fills the
environment from the chips of this host and from ``TPU_WORKER_HOSTNAMES``, and
``torch.multiprocessing.spawn`` starts one process for each chip. Functions here are called through
:mod:`smoke.isolate` and return JSON. With one chip, real or simulated, the group has one member.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

BACKEND = "tpu_dist"
"""The name by which TorchTPU registers its process group."""

_LENGTH = 1024


def hosts(environ: Mapping[str, str]) -> int:
    """How many hosts the slice of this one has.

    Args:
        environ: ``TPU_WORKER_HOSTNAMES`` in it names them, by commas.
    """
    return max(
        1, len([name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name])
    )


def memory() -> dict[str, Any]:
    """Memory of the first chip, as PyTorch's public function tells it.

    Returns:
        ``total_bytes`` and ``free_bytes``; both None where the backend does not tell, with
        ``why``.
    """
    import torch

    torch.ones(2, device="tpu").cpu()
    try:
        free, total = torch.accelerator.get_memory_info(0)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return {"free_bytes": None, "total_bytes": None, "why": str(error).splitlines()[0]}
    if not total:
        return {"free_bytes": None, "total_bytes": None, "why": "it says 0 bytes"}
    return {"free_bytes": int(free), "total_bytes": int(total), "why": ""}


def environment(processes: int) -> dict[str, str]:
    """What TorchTPU's launch sets, on this host, for so many processes; nothing is started.

    Args:
        processes: Processes on this host.
    """
    before = dict(os.environ)
    _set_launch_env(processes)
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def together(patience: float) -> dict[str, Any]:
    """Start one process for each chip and let them add their ranks up.

    Args:
        patience: Seconds to wait for the other processes, those of other hosts included.

    Returns:
        Processes of this host and of all hosts, and the seconds of the first and a later sum.

    Raises:
        AssertionError: If a process found another sum than it should.
    """
    import torch

    count = torch.accelerator.device_count()
    assert count > 0, "PyTorch sees no accelerator"
    _set_launch_env(count)
    nodes, node = int(os.environ.get("NNODES", "1")), int(os.environ.get("NODE_RANK", "0"))
    if nodes == 1:
        os.environ["MASTER_ADDR"] = "localhost"
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    world = nodes * count
    place = (node * count, count, world)
    try:
        torch.multiprocessing.spawn(_member, (place, patience, queue), count)
    except torch.multiprocessing.ProcessRaisedException as error:
        last = str(error).strip().splitlines()[-1]
        raise AssertionError(f"a process of the group failed: {last}") from error
    found = [queue.get() for _ in range(count)]
    right = world * (world + 1) / 2
    for rank, first, last, _, _ in sorted(found):
        assert (first, last) == (right, right), (
            f"process {rank} of {world} found the sum {first}, then {last}, and not {right}"
        )
    return {
        "processes": count,
        "world": world,
        "hosts": nodes,
        "topology": os.environ.get("TORCH_TPU_TOPOLOGY", ""),
        "first_seconds": max(one[3] for one in found),
        "later_seconds": max(one[4] for one in found),
    }


def _set_launch_env(processes: int) -> None:
    import torch  # noqa: F401 - loads torch_tpu, which makes torch.tpu
    from torch.tpu import distributed

    distributed.set_tpu_launch_env(nproc_per_node=processes)


def _member(local: int, place: tuple[int, int, int], patience: float, queue: Any) -> None:
    """One process of the group; its place: first rank of this host, processes here, and in all."""
    first, count, world = place
    rank = first + local
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(count),
    }
    import torch
    from torch import distributed

    limit = datetime.timedelta(seconds=patience)
    distributed.init_process_group(BACKEND, rank=rank, world_size=world, timeout=limit)
    sums, seconds = [], []
    for _ in range(2):
        started = time.perf_counter()
        value = torch.full((_LENGTH,), float(rank + 1), device="tpu")
        distributed.all_reduce(value)
        back = value.cpu()
        seconds.append(time.perf_counter() - started)
        assert bool((back == back[0]).all()), "the sum is not the same everywhere"
        sums.append(float(back[0]))
    queue.put((rank, *sums, *seconds))
    distributed.destroy_process_group()
