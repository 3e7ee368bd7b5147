"""Programs that tests run to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
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
