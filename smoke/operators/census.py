"""The static census: which ATen overloads torch_tpu serves, read from PyTorch's dispatch table.

No device, no plugin and no simulator are needed: importing torch_tpu registers its kernels, and the
dispatcher tells for each overload what it would call for the key ``PrivateUse1``, which is the one
TorchTPU uses. Fact: the line of an overload ends with ``[kernel]`` where the backend registered a
kernel of its own, with ``[math kernel]`` or ``[default backend kernel]`` where PyTorch composes it
of others, and with ``[backend fallback]`` where the backend has nothing but its error message.

The table says what is there and never what works: that is what the audit is for.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any

KEY = "PrivateUse1"
_LINE = re.compile(rf"^{KEY}: .*\[([a-z ]+)\]$", re.MULTILINE)
_KINDS = {
    "kernel": "direct",
    "math kernel": "composite",
    "default backend kernel": "composite",
    "backend fallback": "unsupported",
}


def kind_of(table: str) -> str:
    """What PyTorch would call for a TPU tensor.

    Args:
        table: The dispatch table of one overload, as PyTorch dumps it.

    Returns:
        ``direct``, ``composite`` or ``unsupported``.

    Raises:
        ValueError: If the table has a line for the key that says something new.
    """
    found = _LINE.search(table)
    if found is None:
        return "unsupported"
    if found[1] not in _KINDS:
        raise ValueError(f"the dispatch table says [{found[1]}], which nobody has explained yet")
    return _KINDS[found[1]]


def base_name(overload: str) -> str:
    """The operator of an overload; one that works in place counts as the same operator.

    Args:
        overload: Such as ``aten::add.Tensor`` or ``aten::add_.Tensor``.

    Returns:
        Such as ``add``.
    """
    name = overload.removeprefix("aten::").partition(".")[0]
    return name if name.endswith("__") else name.removesuffix("_")


def take() -> dict[str, Any]:
    """Take the census; call it through :mod:`smoke.isolate`.

    Returns:
        ``seconds`` of the census itself, ``overloads``, ``counts``, ``direct_operators`` (how many
        base names have a direct kernel), ``direct``, ``composite`` and ``unsupported`` (lists of
        overloads without ``aten::``), and ``core`` with ``overloads`` and what is ``missing``.
    """
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch
    import torch_tpu  # noqa: F401 - registers the kernels

    started = time.perf_counter()
    overloads = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    kinds = {name: kind_of(torch._C._dispatch_dump_table(name)) for name in sorted(overloads)}
    core = [name for name in kinds if _is_core(torch, name)]
    listed: dict[str, list[str]] = {
        kind: [name.removeprefix("aten::") for name, one in kinds.items() if one == kind]
        for kind in ("direct", "composite", "unsupported")
    }
    return {
        "seconds": time.perf_counter() - started,
        "overloads": len(kinds),
        "counts": {kind: len(names) for kind, names in listed.items()},
        "direct_operators": len({base_name(name) for name in listed["direct"]}),
        "core": {
            "overloads": len(core),
            "missing": [n.removeprefix("aten::") for n in core if kinds[n] == "unsupported"],
        },
        **listed,
    }


def _is_core(torch: Any, overload: str) -> bool:
    """Whether PyTorch counts an overload among its core ATen operators."""
    name, _, variant = overload.removeprefix("aten::").partition(".")
    found = getattr(getattr(torch.ops.aten, name, None), variant or "default", None)
    return torch.Tag.core in getattr(found, "tags", ())
