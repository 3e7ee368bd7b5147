"""Programs that tests run to their end, or to a point on the way; small disks for them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest


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


@contextlib.contextmanager
def disk_of(folder: Path, room: str, *, lazy: bool = False) -> Iterator[Path]:
    """A file system with so much room in a new folder; skips a test where none can be mounted.

    It has to be free of whatever used it at the end, or ``lazy`` lets it go all the same.
    """
    folder.mkdir(exist_ok=True)
    mounted = call(["mount", "-t", "tmpfs", "-o", f"size={room}", "tpuforge-test", folder])
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", *(["--lazy"] if lazy else []), folder], check=True)


def own_mounts() -> list[str]:
    """What begins a command with mounts of its own, which end with it; skips where none can be."""
    # root needs no other user for that
    words = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    tried = call([*words, "mount", "-t", "tmpfs", "none", "/tmp"])
    if tried.returncode:
        pytest.skip(f"nothing can be mounted here: {tried.stderr.strip()}")
    return words
