"""The little of ELF that tells whether a shared library finds what it needs.

Reads 64-bit little-endian files (x86-64 and aarch64 Linux) through their program headers, as the
loader does, so stripped files work too. Structures: System V ABI, "Dynamic Section", and the
symbol versioning chapters of the Linux Standard Base; ``DT_GNU_HASH`` as glibc's loader reads it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

MACHINES = {62: "x86_64", 183: "aarch64"}
"""``e_machine`` to what ``uname -m`` says."""

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29
_DT_SYMTAB, _DT_GNU_HASH = 6, 0x6FFFFEF5
_SYMBOL = struct.Struct("<IBBHQQ")
_GLOBAL = 1
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
        runpath: Folders it looks in for what it needs itself, ``$ORIGIN`` not yet replaced.
        rpath: The same, and for what its libraries need as well; nobody heeds it where there is
            a ``runpath``.
        soname: Its own name, or an empty text.
        wants: Library name to the symbol versions it needs from it.
        offers: Symbol versions it defines.
        machine: What it is made for, such as ``x86_64``.
    """

    path: Path
    needed: list[str] = field(default_factory=list)
    runpath: list[str] = field(default_factory=list)
    rpath: list[str] = field(default_factory=list)
    soname: str = ""
    wants: dict[str, set[str]] = field(default_factory=dict)
    offers: set[str] = field(default_factory=set)
    machine: str = ""

    def folders(self) -> list[Path]:
        """Where it looks first for what it needs itself, ``$ORIGIN`` replaced."""
        return self._resolved(self.runpath or self.rpath)

    def handed_down(self) -> list[Path]:
        """Where the libraries that it loads look as well, and theirs: ld.so(8) on ``DT_RPATH``.

        A ``DT_RUNPATH`` is for the direct needs of its own file only, and puts the old tag out of
        force.
        """
        return [] if self.runpath else self._resolved(self.rpath)

    def _resolved(self, entries: list[str]) -> list[Path]:
        origin = str(self.path.parent)
        return [
            Path(entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin))
            for entry in entries
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
    return _with_data(path, _read)


def _with_data(path: Path, reader: Callable[[Path, mmap.mmap], _T]) -> _T:
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise NotElfError(f"{path} is empty") from error
        with data:
            try:
                return reader(path, data)
            except (struct.error, IndexError, UnicodeDecodeError) as error:
                raise NotElfError(f"{path} is cut short or damaged: {error}") from error


def undefined(path: Path) -> set[bytes]:
    """Names of the symbols that a library must get from others; weak ones may be missing.

    Args:
        path: A shared library with a GNU hash table, as every linker of today makes it.

    Raises:
        NotElfError: If it is no such file, or is cut short.
        OSError: If it cannot be read.
    """
    return _with_data(path, _undefined)


def _undefined(path: Path, data: mmap.mmap) -> set[bytes]:
    dynamic = _dynamic(path, data)
    found = dict(dynamic.entries)
    if not {_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH} <= found.keys():
        return set()
    strings, symbols = dynamic.where(found[_DT_STRTAB]), dynamic.where(found[_DT_SYMTAB])
    # what a library only wants is not hashed, so it stands before the first hashed symbol
    first = struct.unpack_from("<I", data, dynamic.where(found[_DT_GNU_HASH]) + 4)[0]
    names = set()
    for index in range(1, first):
        name, info, _, section, _, _ = _SYMBOL.unpack_from(data, symbols + index * _SYMBOL.size)
        if section == 0 and info >> 4 == _GLOBAL:
            names.add(data[strings + name : data.find(b"\0", strings + name)])
    return names


def missing(path: Path, names: Iterable[bytes]) -> set[bytes]:
    """Those of some names that a library or program does not define, looked up by its hash table.

    Args:
        path: The file.
        names: Symbol names.

    Raises:
        NotElfError: If it is no such file, or is cut short.
        OSError: If it cannot be read.
    """
    wanted = set(names)

    def look(_: Path, data: mmap.mmap) -> set[bytes]:
        return wanted - _defined(path, data, wanted)

    return _with_data(path, look)


def _defined(path: Path, data: mmap.mmap, wanted: set[bytes]) -> set[bytes]:
    dynamic = _dynamic(path, data)
    found = dict(dynamic.entries)
    if not {_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH} <= found.keys():
        return set()
    strings, symbols = dynamic.where(found[_DT_STRTAB]), dynamic.where(found[_DT_SYMTAB])
    table = dynamic.where(found[_DT_GNU_HASH])
    buckets, first, words, _ = struct.unpack_from("<IIII", data, table)
    heads = table + 16 + words * 8
    chains = heads + buckets * 4
    defined = set()
    for name in wanted:
        value = _gnu_hash(name)
        index = struct.unpack_from("<I", data, heads + value % buckets * 4)[0] if buckets else 0
        while index >= first > 0:
            hashed = struct.unpack_from("<I", data, chains + (index - first) * 4)[0]
            if hashed | 1 == value | 1:
                start = strings + struct.unpack_from("<I", data, symbols + index * 24)[0]
                if data[start : start + len(name) + 1] == name + b"\0":
                    defined.add(name)
                    break
            if hashed & 1:
                break
            index += 1
    return defined


def _gnu_hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


@dataclass
class _Dynamic:
    """The dynamic section of a file, and how to find an address in the file."""

    path: Path
    loads: list[tuple[int, int, int]] = field(default_factory=list)
    entries: list[tuple[int, int]] = field(default_factory=list)

    def where(self, address: int) -> int:
        for start, length, offset in self.loads:
            if start <= address < start + length:
                return address - start + offset
        raise NotElfError(f"{self.path} is damaged: address {address:#x} is in no segment")


def _dynamic(path: Path, data: mmap.mmap) -> _Dynamic:
    if data[:4] != b"\x7fELF" or data[4:6] != b"\x02\x01":
        raise NotElfError(f"{path} is not a 64-bit little-endian ELF file")
    table, size, count = (
        struct.unpack_from("<Q", data, 32)[0],
        struct.unpack_from("<H", data, 54)[0],
        struct.unpack_from("<H", data, 56)[0],
    )
    found = _Dynamic(path)
    section: tuple[int, int] | None = None
    for index in range(count):
        kind, _, offset, address, _, filed = struct.unpack_from(
            "<IIQQQQ", data, table + index * size
        )
        if kind == _PT_LOAD:
            found.loads.append((address, filed, offset))
        elif kind == _PT_DYNAMIC:
            section = (offset, filed)
    if section is None:
        return found
    for place in range(section[0], section[0] + section[1], 16):
        tag, value = struct.unpack_from("<qQ", data, place)
        if tag == 0:
            break
        found.entries.append((tag, value))
    return found


def _read(path: Path, data: mmap.mmap) -> Library:
    dynamic = _dynamic(path, data)
    number = struct.unpack_from("<H", data, 18)[0]
    library = Library(path, machine=MACHINES.get(number, f"machine number {number}"))
    found = dict(dynamic.entries)
    if _DT_STRTAB not in found:
        return library
    where = dynamic.where
    strings = where(found[_DT_STRTAB])

    def text(index: int) -> str:
        start = strings + index
        end = data.find(b"\0", start)
        if end < 0:
            raise NotElfError(f"{path} is damaged: a name has no end")
        return data[start:end].decode()

    for tag, value in dynamic.entries:
        if tag == _DT_NEEDED:
            library.needed.append(text(value))
        elif tag == _DT_RUNPATH:
            library.runpath += text(value).split(":")
        elif tag == _DT_RPATH:
            library.rpath += text(value).split(":")
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
