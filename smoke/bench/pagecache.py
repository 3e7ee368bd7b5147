"""Empty the page cache of chosen files, and prove it: what makes a "cold" import cold.

``posix_fadvise(POSIX_FADV_DONTNEED)`` drops the clean pages of one file, needs no rights beyond
reading it, and leaves the rest of the machine alone. It is advice: pages that some process has
mapped stay. So the residue is measured, with reads that refuse to wait for the disk
(``RWF_NOWAIT``). Directory entries and inodes stay cached; only file content becomes cold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_STRIDE = 1 << 18
"""One byte is tried in every 256 KiB: small files count once, large ones throughout."""


def drop(roots: Sequence[Path]) -> float:
    """Advise the kernel to forget the content of all files below some folders.

    Args:
        roots: Folders; links are not followed.

    Returns:
        The share of the content that stayed in memory all the same, 0 to 1.

    Raises:
        OSError: If the kernel or the file system cannot tell (no ``RWF_NOWAIT``).
    """
    for path in _files(roots):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    tried = stayed = 0
    for path in _files(roots):
        one, other = _probe(path)
        tried += one
        stayed += other
    return stayed / tried if tried else 0.0


def _files(roots: Sequence[Path]) -> Iterator[Path]:
    for root in roots:
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder, name)
                if path.is_file() and not path.is_symlink() and os.access(path, os.R_OK):
                    yield path


def _probe(path: Path) -> tuple[int, int]:
    """How many places of a file were tried, and how many of them were in memory."""
    tried = stayed = 0
    byte = bytearray(1)
    handle = os.open(path, os.O_RDONLY)
    try:
        for offset in range(0, os.fstat(handle).st_size, _STRIDE):
            tried += 1
            try:
                os.preadv(handle, [byte], offset, os.RWF_NOWAIT)
                stayed += 1
            except BlockingIOError:
                pass
    finally:
        os.close(handle)
    return tried, stayed
