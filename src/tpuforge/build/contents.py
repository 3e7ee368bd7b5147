"""A wheel as it lies on disk: every file read once, hashed, searched, and ELF files understood.

Nothing is unpacked by name: an ELF file goes into a nameless temporary file, which the kernel
drops when the process ends, however it ends. At most one is there at a time.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from tpuforge.archives import BAD_ARCHIVE, is_damage
from tpuforge.build import elf
from tpuforge.console import size

_CHUNK = 1 << 20
_KEPT = 4 << 20
"""Bytes up to which the text files that rules read are kept in memory."""
_LARGEST = 16 << 30
"""Bytes that a wheel may claim to unpack to; torch with all of CUDA has 5 GB."""
_SUSPECT, _RATIO_MOST = 1 << 30, 100
"""From this size on, by how much a wheel may have been compressed; libraries shrink to a third."""
_MEMBERS_MOST = 30_000
"""Files that a wheel may have; the CPU build of torch has 12,248."""
_KEPT_ALL = 256 << 20
"""Bytes up to which the text files of a whole wheel are kept."""
_LOOK = 256
"""Bytes before and after a finding that are looked at."""
_NOTED = 5
"""Paths of the building machine that are kept of each file."""
_NOTES = 2000
"""Paths that are looked at in each file: the same one may stand there a thousand times."""
_LOOKS = 100_000
"""Traces that are looked at in each file; one of nothing else would take hours."""

# Where compilers run: homes, and the folders of Bazel. The homes count at the start of a path
# only, since "google/internal/home/foyer" is the name of a package.
_HOMES = (b"/home/", b"/root/")
_BAZEL = (b"/execroot/", b"/_bazel_")
_IN_PATH = re.compile(rb"[\w.+~$}/-]")
_PATH_END = re.compile(rb"[\w.+~@%=/-]+")
# Bazel's output folders are called CPU-MODE, with a suffix for each further configuration
_OUTPUT = re.compile(rb"[/\\]\w+-(opt|dbg|fastbuild)(?:-[\w-]+)?$")
# pybind11 compares the version that it was compiled for, a text of its own, with the running one
_COMPARES = b"module was compiled for Python"
_PYTHON = re.compile(rb"\x00(3\.\d{1,2})\x00")
_VERSIONED = re.compile(r"(?P<module>.+?)(?:_\d+_\d+_\d+)?\.so")


@dataclass
class Member:
    """One file of a wheel.

    Attributes:
        name: Its path in the wheel.
        length: Its size in bytes.
        sha256: Its digest as RECORD writes it: URL-safe base64 without padding.
        elf: What it says about itself, if it is an ELF file that can be read.
        damage: Why an ELF file cannot be read, or an empty text.
        build_paths: Paths of the machine where it was built.
        modes: Bazel's compilation modes that its paths tell of: ``opt``, ``dbg``, ``fastbuild``.
        pythons: The Pythons that its pybind11 was compiled for, such as ``3.11``.
    """

    name: str
    length: int = 0
    sha256: str = ""
    elf: elf.Elf | None = None
    damage: str = ""
    build_paths: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()
    pythons: frozenset[str] = frozenset()


@dataclass
class Contents:
    """A whole wheel.

    Attributes:
        path: The wheel.
        length: Its size in bytes.
        faults: What is wrong with the archive itself; empty for a good one.
        members: Its files by name; incomplete when the archive is bad.
        kept: The bytes of the text files that rules read, by name.
    """

    path: Path
    length: int
    faults: list[str] = field(default_factory=list)
    members: dict[str, Member] = field(default_factory=dict)
    kept: dict[str, bytes] = field(default_factory=dict)

    def elf_files(self) -> list[tuple[Member, elf.Elf]]:
        """The ELF files that could be read."""
        return [(member, member.elf) for member in self.members.values() if member.elf]


def read(path: Path, work: Path, advance: Callable[[int], None] = lambda _: None) -> Contents:
    """Read a wheel from its first byte to its last.

    Args:
        path: The wheel.
        work: A folder on a disk with space for its largest file.
        advance: Called with the unpacked bytes as they come.

    Returns:
        Its contents; a bad archive has faults instead of an exception.

    Raises:
        OSError: If the wheel cannot be read, or the disk is full.
    """
    contents = Contents(path, path.stat().st_size)
    try:
        with zipfile.ZipFile(path) as archive:
            _read_all(archive, contents, work, advance)
    except (*BAD_ARCHIVE, OSError) as error:
        if not is_damage(error):
            raise
        contents.faults.append(f"the archive cannot be read: {error}")
    return contents


def _read_all(
    archive: zipfile.ZipFile, contents: Contents, work: Path, advance: Callable[[int], None]
) -> None:
    claimed = sum(info.file_size for info in archive.infolist())
    if claimed > _LARGEST or claimed > max(_SUSPECT, _RATIO_MOST * contents.length):
        contents.faults.append(
            f"with {size(contents.length)} it claims to unpack to {size(claimed)}"
        )
        return
    if len(archive.infolist()) > _MEMBERS_MOST:
        contents.faults.append(
            f"it has {len(archive.infolist()):,} files, more than {_MEMBERS_MOST:,}"
        )
        return
    meter, kept = elf.Meter(), 0
    for info in archive.infolist():
        fault = _bad_entry(info, contents)
        if fault:
            contents.faults.append(fault)
        elif not info.is_dir():
            member = Member(info.filename)
            with archive.open(info) as source:
                contents.members[info.filename] = member
                kept += _read_one(source, member, contents, work, advance, meter=meter)
            if kept > _KEPT_ALL:
                contents.faults.append(f"its metadata and Python files have over {size(kept)}")
                return


def _bad_entry(info: zipfile.ZipInfo, contents: Contents) -> str:
    """Why an installer must not unpack this entry, or an empty text."""
    name = info.filename
    parts = PurePosixPath(name).parts
    if not parts:
        return "an entry has no name"
    if name.startswith("/") or "\\" in name or re.match(r"[A-Za-z]:", name):
        return f"{name} is an absolute path"
    if ".." in parts:
        return f"{name} leaves the folder of the installation"
    if name in contents.members:
        return f"{name} is there twice"
    mode = info.external_attr >> 16
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return f"{name} is a link or a special file"
    if info.flag_bits & 1:
        return f"{name} is encrypted"
    if not 0 <= info.header_offset < contents.length:
        return f"{name} is outside of the archive"
    return ""


def _read_one(
    source: IO[bytes],
    member: Member,
    contents: Contents,
    work: Path,
    advance: Callable[[int], None],
    *,
    meter: elf.Meter,
) -> int:
    """Read one file; how many of its bytes are kept."""
    digest = hashlib.sha256()
    search = _Search(extension=not PurePosixPath(member.name).name.startswith("lib"))
    kept = bytearray()
    head = source.read(_CHUNK)
    is_elf = head.startswith(elf.MAGIC)
    with tempfile.TemporaryFile(dir=work) if is_elf else io.BytesIO() as copy:
        chunk = head
        while chunk:
            digest.update(chunk)
            search.feed(chunk)
            if is_elf:
                copy.write(chunk)
            elif member.length < _KEPT:
                kept += chunk
            member.length += len(chunk)
            advance(len(chunk))
            chunk = source.read(_CHUNK)
        search.end()
        if is_elf:
            try:
                member.elf = elf.read(copy, member.length, _asked(member.name), meter)
            except elf.DamagedElfError as error:
                member.damage = str(error)
        elif _is_read(member.name) and member.length <= _KEPT:
            contents.kept[member.name] = bytes(kept)
    member.sha256 = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    member.build_paths = frozenset(search.build_paths)
    member.modes = frozenset(search.modes)
    member.pythons = frozenset(search.pythons) if search.compares else frozenset()
    return len(contents.kept.get(member.name, b""))


def _is_read(name: str) -> bool:
    """Whether a rule wants to read this file: metadata, Python modules, recorded commits."""
    return ".dist-info/" in name or name.endswith((".py", "_COMMIT"))


def module_of(name: str) -> str:
    """The module that an extension file is, without the torch version in its name.

    Args:
        name: A path, such as ``torch_tpu/_internal/env_2_13_0.so``.

    Returns:
        Such as ``env``; an empty text if the name is not that of a shared library.
    """
    found = _VERSIONED.fullmatch(PurePosixPath(name).name)
    return found["module"] if found else ""


def _asked(name: str) -> tuple[str, ...]:
    return ("GetPjrtApi", f"PyInit_{module_of(name)}")


class _Search:
    """Looks for traces of the build in a stream of bytes, chunk by chunk.

    Args:
        extension: Whether it may be an extension module, which tells the Python it is for.
    """

    def __init__(self, *, extension: bool) -> None:
        self._extension = extension
        self.build_paths: set[str] = set()
        self.modes: set[str] = set()
        self.pythons: set[str] = set()
        self.compares = False
        self._noted = 0
        self._looked = 0
        self._rest = b""
        self._seen = 0  # bytes at the start of the rest that were searched before

    def feed(self, chunk: bytes) -> None:
        """Search one more chunk, all but its last bytes, whose neighbours have not come yet."""
        data = self._rest + chunk
        border = len(data) - _LOOK
        if border <= self._seen:
            self._rest = data
            return
        self._search(data, self._seen, border)
        cut = max(0, border - _LOOK)
        self._rest, self._seen = data[cut:], border - cut

    def end(self) -> None:
        """Search what is left."""
        self._search(self._rest, self._seen, len(self._rest))
        self._rest = b""

    def _search(self, data: bytes, start: int, stop: int) -> None:
        for word in _HOMES + _BAZEL:
            if len(self.build_paths) >= _NOTED or self._noted >= _NOTES:
                break
            end = start
            for place in _places(data, word, start, stop):
                inside = place > 0 and _IN_PATH.match(data, place - 1)
                if place >= end and (word in _BAZEL or not inside):
                    end = self._note(data, place)
                    if len(self.build_paths) >= _NOTED or self._noted >= _NOTES:
                        break
        for place in _places(data, b"/bin/", start, stop):
            self._looked += 1
            if self._looked > _LOOKS:
                break
            found = _OUTPUT.search(data[max(0, place - _LOOK) : place])
            if found:
                self.modes.add(found[1].decode())
        if not self._extension:
            return  # a quarter of the time of a large library
        if not self.compares:
            self.compares = data.find(_COMPARES, start, stop + len(_COMPARES)) >= 0
        for place in _places(data, b"\x003.", start, stop):
            self._looked += 1
            if self._looked > _LOOKS:
                break
            version = _PYTHON.match(data, place)
            if version:
                self.pythons.add(version[1].decode())

    def _note(self, data: bytes, place: int) -> int:
        """Keep a path with what stands before it, and tell where it ends."""
        self._noted += 1
        first = place
        while first > max(0, place - _LOOK) and _IN_PATH.match(data, first - 1):
            first -= 1
        path = _PATH_END.match(data, place, place + _LOOK)
        if path is None:
            return place
        self.build_paths.add(data[first : path.end()].decode("ascii", "replace"))
        return path.end()


def _places(data: bytes, word: bytes, start: int, stop: int) -> Iterator[int]:
    """Where a word begins between two positions."""
    place = data.find(word, start)
    while 0 <= place < stop:
        yield place
        place = data.find(word, place + 1)
