"""A plain import of torch, and what it makes of torch's spare backend.

Call it through :mod:`smoke.isolate`.
"""

from __future__ import annotations

from typing import Any

from smoke import workloads

UNNAMED = "privateuseone"
"""What torch calls its spare backend as long as nobody has named it."""


def import_plain() -> dict[str, Any]:
    """Import torch as a user does, with backends loaded by torch itself.

    Returns:
        What :func:`smoke.workloads.import_torch` gives, and ``spare``: the name, the device and the
        package of torch's spare backend, and what is left of its unnamed self.
    """
    found = workloads.import_torch(True)
    import torch

    name = str(torch._C._get_privateuse1_backend_name())
    module = getattr(torch, "tpu", None)
    left = [f"torch.{UNNAMED}"] if hasattr(torch, UNNAMED) else []
    if hasattr(torch.Tensor, f"is_{UNNAMED}"):
        left.append(f"torch.Tensor.is_{UNNAMED}")
    spare = {
        "name": name,
        "device": str(torch.device(name, 0)),
        "package": type(module).__module__.partition(".")[0] if module is not None else None,
        "leftovers": left,
    }
    return found | {"spare": spare}
