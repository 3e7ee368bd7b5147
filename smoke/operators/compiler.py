"""Every program that the audit lowered, compiled by the real libtpu for real chips."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from smoke import pjrt


def worker() -> Callable[[dict[str, str]], dict[str, Any]]:
    """Get ready to compile.

    Returns:
        A function that takes ``{"path": …, "target": …}`` and gives what
        :func:`smoke.pjrt.compile_text` gives.
    """
    import libtpu  # noqa: F401 - a worker without it says so before its first task
    import pypjrt  # noqa: F401

    def handle(task: dict[str, str]) -> dict[str, Any]:
        return pjrt.compile_text(Path(task["path"]).read_bytes(), task["target"])

    return handle


def told(kind: str, message: str, value: dict[str, Any] | None) -> dict[str, Any]:
    """What became of one program for one target.

    Args:
        kind: How its task ended, see :class:`smoke.operators.crew.Ended`.
        message: Why there is no value.
        value: What the worker found.

    Returns:
        ``status`` (``yes``, ``refused``, ``error`` or ``not run``), ``detail`` and figures.
    """
    if value is None:
        return {"status": "not run" if kind == "killed" else "error", "detail": message[:800]}
    if value["stage"] == "done":
        seconds = round(float(value["compile_seconds"]), 4)
        return {"status": "yes", "seconds": seconds, "code_bytes": value["code_bytes"]}
    if value["stage"] == "topology":
        return {"status": "not run", "detail": f"libtpu knows no such target: {value['error']}"}
    return {"status": "refused", "detail": str(value["error"])[:800]}
