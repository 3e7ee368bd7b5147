"""The little of ELF that tells whether a shared library finds what it needs.

Reads 64-bit little-endian files (x86-64 and aarch64 Linux) through their program headers, as the
loader does, so stripped files work too. Structures: System V ABI, "Dynamic Section", and the
symbol versioning chapters of the Linux Standard Base.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29
_DT_VERDEF, _DT_VERDEFNUM, _DT_VERNEED, _DT_VERNEEDNUM = (
    0x6FFFFFFC,
    0x6FFFFFFD,
    0x6FFFFFFE,
    0x6FFFFFFF,
)


class NotElfError(ValueError):
    """The file is not a 64-bit little-endian ELF file that can be read."""


@dataclass
class Library:
    """What the dynamic section of one file says.

    Attributes:
        path: The file.
        needed: Names of the libraries it needs.
        runpath: Folders it looks in first, ``$ORIGIN`` not yet replaced.
        soname: Its own name, or an empty text.
        wants: Library name to the symbol versions it needs from it.
        offers: Symbol versions it defines.
    """

    path: Path
    needed: list[str] = field(default_factory=list)
    runpath: list[str] = field(default_factory=list)
    soname: str = ""
    wants: dict[str, set[str]] = field(default_factory=dict)
    offers: set[str] = field(default_factory=set)

    def folders(self) -> list[Path]:
        """The folders of ``runpath``, with ``$ORIGIN`` replaced by the file's own folder."""
        origin = str(self.path.parent)
        return [
            Path(entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin))
            for entry in self.runpath
            if entry
        ]


def read(path: Path) -> Library:
    """Read the dynamic section of a shared library or program.

    Args:
        path: The file.

    Returns:
        What it needs and offers; a static file has neither.

    Raises:
        NotElfError: If it is no such file, or is cut short.
        OSError: If it cannot be read.
    """
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise NotElfError(f"{path} is empty") from error
        with data:
            try:
                return _read(path, data)
            except (struct.error, IndexError, UnicodeDecodeError) as error:
                raise NotElfError(f"{path} is cut short or damaged: {error}") from error


def _read(path: Path, data: mmap.mmap) -> Library:
    if data[:4] != b"\x7fELF" or data[4:6] != b"\x02\x01":
        raise NotElfError(f"{path} is not a 64-bit little-endian ELF file")
    table, size, count = (
        struct.unpack_from("<Q", data, 32)[0],
        struct.unpack_from("<H", data, 54)[0],
        struct.unpack_from("<H", data, 56)[0],
    )
    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] | None = None
    for index in range(count):
        kind, _, offset, address, _, filed = struct.unpack_from(
            "<IIQQQQ", data, table + index * size
        )
        if kind == _PT_LOAD:
            loads.append((address, filed, offset))
        elif kind == _PT_DYNAMIC:
            dynamic = (offset, filed)
    library = Library(path)
    if dynamic is None:
        return library
    entries: list[tuple[int, int]] = []
    for place in range(dynamic[0], dynamic[0] + dynamic[1], 16):
        tag, value = struct.unpack_from("<qQ", data, place)
        if tag == 0:
            break
        entries.append((tag, value))
    found = dict(entries)
    if _DT_STRTAB not in found:
        return library

    def where(address: int) -> int:
        for start, length, offset in loads:
            if start <= address < start + length:
                return address - start + offset
        raise NotElfError(f"{path} is damaged: address {address:#x} is in no segment")

    strings = where(found[_DT_STRTAB])

    def text(index: int) -> str:
        start = strings + index
        end = data.find(b"\0", start)
        if end < 0:
            raise NotElfError(f"{path} is damaged: a name has no end")
        return data[start:end].decode()

    for tag, value in entries:
        if tag == _DT_NEEDED:
            library.needed.append(text(value))
        elif tag in (_DT_RPATH, _DT_RUNPATH):
            library.runpath += text(value).split(":")
        elif tag == _DT_SONAME:
            library.soname = text(value)
    if _DT_VERNEED in found:
        place = where(found[_DT_VERNEED])
        for _ in range(found.get(_DT_VERNEEDNUM, 0)):
            _, number, name, first, following = struct.unpack_from("<HHIII", data, place)
            inner = place + first
            wanted = library.wants.setdefault(text(name), set())
            for _ in range(number):
                _, _, _, version, after = struct.unpack_from("<IHHII", data, inner)
                wanted.add(text(version))
                inner += after
            place += following
    if _DT_VERDEF in found:
        place = where(found[_DT_VERDEF])
        for _ in range(found.get(_DT_VERDEFNUM, 0)):
            _, _, _, _, _, first, following = struct.unpack_from("<HHHHIII", data, place)
            library.offers.add(text(struct.unpack_from("<I", data, place + first)[0]))
            place += following
    return library
