"""Empty the page cache of chosen files, and count what a process then reads: a "cold" import.

``posix_fadvise(POSIX_FADV_DONTNEED)`` drops the clean pages of one file, needs no rights beyond
reading it, and leaves the rest of the machine alone. It is advice: pages that some process has
mapped stay. So the process that is timed says how much it read from storage, which the kernel
counts in ``/proc/self/io``. Directory entries stay cached; only file content becomes cold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

_IO = Path("/proc/self/io")
_STATUS = Path("/proc/self/status")


def drop(roots: Sequence[Path]) -> None:
    """Advise the kernel to forget the content of all files below some folders.

    Args:
        roots: Folders; links are not followed, and what cannot be read is left alone.
    """
    for root in roots:
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder, name)
                if path.is_file() and not path.is_symlink() and os.access(path, os.R_OK):
                    handle = os.open(path, os.O_RDONLY)
                    try:
                        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                    finally:
                        os.close(handle)


def read_bytes() -> int | None:
    """Bytes that this process has had fetched from storage; None where the kernel does not count.

    Returns:
        The count since the process started.
    """
    return _number(_IO, r"read_bytes: (\d+)")


def file_bytes() -> int | None:
    """Bytes of files in this process's resident memory; None where the kernel does not say.

    Returns:
        The count at this moment.
    """
    found = _number(_STATUS, r"RssFile:\s+(\d+) kB")
    return None if found is None else found * 1024


def _number(path: Path, pattern: str) -> int | None:
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return int(found[1]) if found else None
