"""The known limits of the simulator, and a probe for each.

``limits.toml`` names them. A probe does what is said to fail, and may end its process, so each one
runs in a fork of a process that has imported torch and has not used the device yet.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("limits.toml")
_FIELDS = {"what", "reason", "instead", "probe", "match"}
_PATIENCE_S = 60.0
_KEPT = 2000


def listed(file: Path = FILE) -> list[dict[str, str]]:
    """The limits that are known.

    Args:
        file: The list.

    Returns:
        One mapping per limit.

    Raises:
        AssertionError: If an entry lacks a field, has another one, or names no probe.
    """
    with file.open("rb") as opened:
        entries: list[dict[str, str]] = tomllib.load(opened)["limit"]
    for entry in entries:
        assert entry.keys() == _FIELDS, f"{entry.get('what', 'an entry')}: not the fields it needs"
        assert all(entry.values()), f"{entry['what']}: an empty field"
        assert entry["probe"] in PROBES, f"{entry['what']}: there is no probe {entry['probe']}"
    return entries


def judge(entry: Mapping[str, str], failure: str | None) -> str | None:
    """What is wrong with an entry, by what its probe did.

    Args:
        entry: The limit.
        failure: How the probe failed; None if it did not.

    Returns:
        A sentence, or None if the limit is as it was.
    """
    if failure is None:
        return f"{entry['what']}: this works by now; take it out of {FILE.name}"
    if not re.search(entry["match"], failure):
        return f"{entry['what']}: this fails in another way than {FILE.name} says: {failure}"
    return None


def probe_all() -> dict[str, str | None]:
    """Try every probe, each in a process of its own.

    Returns:
        Probe to how it failed, in one line; None if it did not fail.
    """
    import torch

    # the fork shares the import, seconds of it; the device's threads start with its first use
    assert torch.accelerator.is_available(), "there is no simulated chip"
    return {name: _forked(function) for name, function in PROBES.items()}


def _forked(function: Callable[[Any], None]) -> str | None:
    import torch

    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            function(torch)
            words = b"-"
        except BaseException as error:
            words = f"+{type(error).__name__}: {error}".encode()[:_KEPT]
        os.write(write, words)
        # no clean-up: this process is a copy of one that goes on
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], _PATIENCE_S)
    if not ready:
        os.kill(child, signal.SIGKILL)
    answer = os.read(read, _KEPT) if ready else b""
    os.close(read)
    _, status = os.waitpid(child, 0)
    if not ready:
        return f"not done after {_PATIENCE_S:.0f} s"
    if answer:
        return None if answer == b"-" else " ".join(answer[1:].decode("utf-8", "replace").split())
    code = os.waitstatus_to_exitcode(status)
    return f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


def _attention_kernel(torch: Any) -> None:
    q = torch.ones(2, 4, 128, 64, device="tpu")
    torch.nn.functional.scaled_dot_product_attention(q, q, q).cpu()


def _scan(torch: Any) -> None:
    torch.cumsum(torch.arange(6.0).to("tpu"), 0).cpu()


def _lu_decomposition(torch: Any) -> None:
    torch.linalg.solve(torch.eye(3).to("tpu"), torch.ones(3, 1).to("tpu")).cpu()


def _unique(torch: Any) -> None:
    torch.unique(torch.linspace(-1, 1, 25).to("tpu")).cpu()


def _bounded_shapes(torch: Any) -> None:
    x = torch.ones(3, 4, device="tpu")
    torch._dynamo.mark_dynamic(x, 0, min=2, max=16)
    torch.compile(lambda value: (value * 2).sum(0))(x).cpu()


def _pinned_memory(torch: Any) -> None:
    torch.ones(3, device="tpu").to("cpu", non_blocking=True)
    torch.accelerator.synchronize()


def _memory_statistics(torch: Any) -> None:
    kept = torch.ones(1024, device="tpu")
    torch.accelerator.synchronize()
    used = torch.accelerator.memory_allocated()
    assert used >= kept.numel(), f"{used} bytes are in use"


def _devices(torch: Any) -> None:
    count = torch.accelerator.device_count()
    assert count > 1, f"there is {count} device"


def _short_sums(torch: Any) -> None:
    total = torch.ones(20, 20, dtype=torch.bfloat16, device="tpu").sum().item()
    assert total == 400, f"the sum of 400 ones is {total:g}"


PROBES: dict[str, Callable[[Any], None]] = {
    "attention_kernel": _attention_kernel,
    "scan": _scan,
    "lu_decomposition": _lu_decomposition,
    "unique": _unique,
    "bounded_shapes": _bounded_shapes,
    "pinned_memory": _pinned_memory,
    "memory_statistics": _memory_statistics,
    "devices": _devices,
    "short_sums": _short_sums,
}
"""Probe by the name that ``limits.toml`` uses."""
