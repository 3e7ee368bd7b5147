"""What can be wrong with a zip archive that a stranger made, told apart from a bad disk."""

from __future__ import annotations

import errno
import lzma
import struct
import zipfile
import zlib

BAD_ARCHIVE = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    # a password is wanted, or the method is not known
    RuntimeError,
    ValueError,
    struct.error,
)
"""What :mod:`zipfile` raises on bytes that are no archive, and on damaged members."""


def is_damage(error: Exception) -> bool:
    """Whether an error comes from the bytes of an archive, and not from the file system.

    Args:
        error: What :mod:`zipfile` raised, one of :data:`BAD_ARCHIVE` or an OSError: of the latter,
            a damaged bzip2 member has no number, and an impossible offset is an invalid argument.
    """
    return not isinstance(error, OSError) or error.errno in (None, errno.EINVAL)


def read_member(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """The bytes of a member that is meant to be small.

    Args:
        archive: The archive.
        name: The member's name.
        most: The most bytes that it may have.

    Raises:
        ValueError: If it has more.
    """
    with archive.open(name) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{name} has more than {most:,} bytes")
    return data
