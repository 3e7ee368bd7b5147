"""Programs that tests run to their end, or to a point on the way."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def call(
    words: Sequence[str | Path], *, timeout: float = 300, check: bool = False, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program within some seconds; what it printed as text.

    ``more`` goes to :func:`subprocess.run`, such as ``env`` and ``cwd``.
    """
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, check=check, **more
    )


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until something is so; fail when it never is."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)
