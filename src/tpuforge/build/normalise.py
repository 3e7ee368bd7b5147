"""Same bytes from two builds: a wheel rewritten so that nothing but its content decides them.

What a zip holds beside its content (order, times, permissions, the compressor's choices) comes
from the machine and the moment of a build. Here each has one value:

* members sorted by the bytes of their names, ``.dist-info`` after everything else, as the wheel
  specification asks, and ``RECORD`` last of all;
* one time for all of them, the source's (``SOURCE_DATE_EPOCH``);
* mode 0755 for programs and 0644 for the rest, told from name and content. The modes of the wheel
  at hand do not count: Bazel's remote execution protocol gives every input as executable, so the
  same source file has another mode when it was packed on another machine;
* members stored, not deflated: the bytes of a deflated member depend on the zlib build (zlib,
  zlib-ng, versions of each), those of a stored one on nothing;
* no extra fields, no comments, no entries for folders.

The content of the members stays as it is, but for ``RECORD``, which is written anew in the order
of the members. Its digests must have been right before: a wrong one is a sign of damage, and is
refused rather than mended.
"""

from __future__ import annotations

import base64
import calendar
import csv
import hashlib
import io
import itertools
import stat
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from tpuforge.archives import BAD_ARCHIVE, is_damage
from tpuforge.console import size
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import atomic_file, sha256_file

_CHUNK = 1 << 20
# the first and the last moment that a zip can hold; it counts in steps of two seconds
_FIRST = calendar.timegm((1980, 1, 1, 0, 0, 0))
_LAST = calendar.timegm((2107, 12, 31, 23, 59, 58))
_UNIX = 3
# what RECORD may be made with; the wheel specification rules out md5 and sha1
_HASHES = ("sha256", "sha384", "sha512")
_MARK_BYTES = 18
# ELF's e_type: a program, a position-independent program or library
_ELF_PROGRAMS = (2, 3)
_TROUBLE = (*BAD_ARCHIVE, csv.Error, OSError)
_SHOWN_DIFFERENCES = 20
_Moment = tuple[int, int, int, int, int, int]


def normalise(wheel: Path, target: Path, epoch: int) -> str:
    """Write a wheel again, so that equal content makes equal bytes.

    Args:
        wheel: A wheel.
        target: Where the new one goes, by rename; may be the same path.
        epoch: Time of every member, seconds since 1970 in UTC. A zip holds nothing before 1980,
            and even seconds only: earlier moments become its first, odd ones are rounded down.

    Returns:
        The SHA-256 of the new wheel. Doing it again changes nothing.

    Raises:
        ForgeError: For a file that is not a whole wheel: a zip that is cut off or fails its
            check sums, a name twice, absolute or leading out of the wheel, a link, an encrypted
            member, or a RECORD that does not tell the content.
        OSError: If reading or writing fails.
    """
    moment = _moment(epoch)
    try:
        with zipfile.ZipFile(wheel) as source:
            members, dist_info = _members(wheel, source)
            record = f"{dist_info}/RECORD"
            stated = _read_record(wheel, source, record)
            with (
                atomic_file(target) as temporary,
                zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as new,
            ):
                lines = []
                for member in members[:-1]:
                    row = _copy(source, member, new, moment, stated.get(member.filename))
                    if row is None:
                        raise _damaged(wheel, f"{member.filename} is not what RECORD says")
                    lines.append(row)
                lines.append((record, "", ""))
                missing = stated.keys() - {name for name, _, _ in lines}
                if missing:
                    raise _damaged(wheel, f"RECORD names {min(missing)}, which is not there")
                text = io.StringIO()
                csv.writer(text, lineterminator="\n").writerows(lines)
                written = text.getvalue().encode()
                _store(new, record, len(written), moment, iter((written,)))
                new.close()
                digest = sha256_file(temporary)
    except _TROUBLE as error:
        if is_damage(error):
            raise _damaged(wheel, str(error) or type(error).__name__) from error
        raise
    return digest


def differences(first: Path, second: Path, limit: int = _SHOWN_DIFFERENCES) -> list[str]:
    """Name what differs between two wheels.

    Args:
        first: A wheel.
        second: Another, of the same source.
        limit: How many differing members are told; a last line counts the others.

    Returns:
        One line for each; none if the files are the same byte for byte. Content comes before
        what only surrounds it.

    Raises:
        OSError: If a file cannot be read.
    """
    if sha256_file(first) == sha256_file(second):
        return []
    try:
        with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as two:
            found = [*_content_differences(one, two), *_frame_differences(one, two)]
    except _TROUBLE as error:
        if not is_damage(error):
            raise
        found = [f"not two whole zips ({error})"]
    if not found:
        found = ["the members agree"]
    if len(found) > limit:
        found = [*found[:limit], f"and {len(found) - limit} more"]
    with first.open("rb") as left, second.open("rb") as right:
        where = _first_difference(left, right)
    return [*found, f"the files differ from byte {where} on"]


def _moment(epoch: int) -> _Moment:
    if not 0 <= epoch <= _LAST:
        raise ForgeError(
            f"the source's time is {epoch}",
            expected=f"seconds since 1970, at most {_LAST}, the last that a zip can hold",
            mend="look at SOURCE_DATE_EPOCH, or at the date of the commit",
        )
    return time.gmtime(max(epoch - epoch % 2, _FIRST))[:6]


def _damaged(wheel: Path, found: str) -> ForgeError:
    return ForgeError(
        f"{wheel.name}: {found}",
        expected="a whole wheel: each name once, inside the wheel, with the content of its RECORD",
        mend="build or fetch it again",
        exit_code=Exit.FAULT,
    )


def _members(wheel: Path, source: zipfile.ZipFile) -> tuple[list[zipfile.ZipInfo], str]:
    """The files of a wheel in their new order, and the name of its ``.dist-info``."""
    files: dict[str, zipfile.ZipInfo] = {}
    for member in source.infolist():
        name = member.filename
        # zipfile cuts a name at its first NUL
        if name != member.orig_filename or "\\" in name:
            raise _damaged(wheel, f"a name that is not plain: {member.orig_filename!r}")
        if name.startswith("/") or ":" in name.partition("/")[0]:
            raise _damaged(wheel, f"the absolute name {name!r}")
        parts = name.removesuffix("/").split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise _damaged(wheel, f"the name {name!r}, which leads out of the wheel")
        if name in files:
            raise _damaged(wheel, f"the name {name} stands in it twice")
        kind = stat.S_IFMT(member.external_attr >> 16)
        if member.create_system == _UNIX and kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _damaged(wheel, f"{name} is neither a file nor a folder")
        files[name] = member
    files = {name: member for name, member in files.items() if not member.is_dir()}
    for name in files:
        above = next((str(p) for p in PurePosixPath(name).parents if str(p) in files), None)
        if above is not None:
            raise _damaged(wheel, f"{above} is a file, and {name} is in it")
    top = {name.partition("/")[0] for name in files}
    infos = sorted(name for name in top if name.endswith(".dist-info"))
    if len(infos) != 1:
        raise _damaged(wheel, f"{len(infos)} folders .dist-info ({', '.join(infos) or 'none'})")
    (info,) = infos
    for name in ("METADATA", "WHEEL", "RECORD"):
        if f"{info}/{name}" not in files:
            raise _damaged(wheel, f"no {info}/{name}")
    for name in ("RECORD.jws", "RECORD.p7s"):
        if f"{info}/{name}" in files:
            raise _damaged(wheel, f"{name} signs its RECORD, which would be written anew")

    def place(name: str) -> tuple[bool, bool, bytes]:
        return name == f"{info}/RECORD", name.startswith(f"{info}/"), name.encode()

    return [files[name] for name in sorted(files, key=place)], info


def _read_record(wheel: Path, source: zipfile.ZipFile, record: str) -> dict[str, tuple[str, str]]:
    """Name to digest and size, as a wheel's RECORD states them; without RECORD itself."""
    text = source.read(record).decode("utf-8")
    stated: dict[str, tuple[str, str]] = {}
    for row in csv.reader(io.StringIO(text, newline="")):
        if not row:
            continue
        if len(row) != 3:
            raise _damaged(wheel, f"RECORD has a line of {len(row)} fields: {','.join(row)[:80]}")
        name, digest, count = row
        if name in stated:
            raise _damaged(wheel, f"RECORD names {name} twice")
        stated[name] = digest, count
    stated.pop(record, None)
    return stated


def _copy(
    source: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    new: zipfile.ZipFile,
    moment: _Moment,
    stated: tuple[str, str] | None,
) -> tuple[str, str, str] | None:
    """Copy one member; its new line of RECORD, or None if the old one is missing or wrong."""
    digest, count = stated or ("", "")
    algorithm, _, value = digest.partition("=")
    if algorithm not in _HASHES:
        return None
    ours = hashlib.sha256()
    theirs = ours if algorithm == "sha256" else hashlib.new(algorithm)
    copied = 0

    def counted(content: IO[bytes]) -> Iterator[bytes]:
        nonlocal copied
        while chunk := content.read(_CHUNK):
            copied += len(chunk)
            ours.update(chunk)
            if theirs is not ours:
                theirs.update(chunk)
            yield chunk

    with source.open(member) as content:
        _store(new, member.filename, member.file_size, moment, counted(content))
    # zipfile does not mind a member that is shorter than its header says
    if copied != member.file_size:
        raise zipfile.BadZipFile(f"{member.filename} has {copied} bytes, not {member.file_size}")
    if _urlsafe(theirs.digest()) != value.rstrip("=") or count not in ("", str(copied)):
        return None
    return member.filename, f"sha256={_urlsafe(ours.digest())}", str(copied)


def _urlsafe(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _store(
    new: zipfile.ZipFile,
    name: str,
    count: int,
    moment: _Moment,
    chunks: Iterator[bytes],
) -> None:
    """Add one member; ``count`` tells ahead whether it needs the large form of its header."""
    start = next(chunks, b"")
    info = zipfile.ZipInfo(name, moment)
    info.create_system = _UNIX
    info.external_attr = (stat.S_IFREG | (0o755 if _is_program(name, start) else 0o644)) << 16
    info.file_size = count
    with new.open(info, "w") as sink:
        for chunk in itertools.chain((start,), chunks):
            sink.write(chunk)


def _is_program(name: str, start: bytes) -> bool:
    """Whether a file is meant to be run: a script, or an ELF file that is no library."""
    parts = name.split("/")
    if len(parts) > 2 and parts[0].endswith(".data") and parts[1] == "scripts":
        return True
    if start.startswith(b"#!"):
        return True
    if not start.startswith(b"\x7fELF") or len(start) < _MARK_BYTES:
        return False
    little = start[5] != 2
    kind = int.from_bytes(start[16:18], "little" if little else "big")
    return kind in _ELF_PROGRAMS and ".so" not in PurePosixPath(name).suffixes


def _content_differences(one: zipfile.ZipFile, two: zipfile.ZipFile) -> Iterator[str]:
    left = {member.filename: member for member in one.infolist()}
    right = {member.filename: member for member in two.infolist()}
    for name in sorted(left.keys() - right.keys()):
        yield f"{name}: only in the first"
    for name in sorted(right.keys() - left.keys()):
        yield f"{name}: only in the second"
    # RECORD follows from the others, so it is told last
    shared = sorted(left.keys() & right.keys(), key=lambda n: (n.endswith("/RECORD"), n.encode()))
    for name in shared:
        a, b = left[name], right[name]
        if (a.file_size, a.CRC) == (b.file_size, b.CRC) and _same(one, two, name):
            continue
        with one.open(a) as first, two.open(b) as second:
            where = _first_difference(first, second)
        sizes = (
            f"{a.file_size} bytes in both"
            if a.file_size == b.file_size
            else f"{a.file_size} and {b.file_size} bytes"
        )
        yield f"{name}: {sizes}, differs from byte {where} on{_lines(one, two, name)}"


def _frame_differences(one: zipfile.ZipFile, two: zipfile.ZipFile) -> Iterator[str]:
    """What differs around the content."""
    left = {member.filename: member for member in one.infolist()}
    right = {member.filename: member for member in two.infolist()}
    shared = [name for name in left if name in right]
    if shared != [name for name in right if name in left]:
        yield "the order of the members"
    for name in shared:
        a, b = left[name], right[name]
        sides = [
            ("time", a.date_time, b.date_time),
            ("mode", oct(a.external_attr >> 16), oct(b.external_attr >> 16)),
            ("compression", a.compress_type, b.compress_type),
            ("system", a.create_system, b.create_system),
            ("extra field", a.extra.hex(), b.extra.hex()),
        ]
        differing = [f"{what} {x} and {y}" for what, x, y in sides if x != y]
        if a.CRC == b.CRC and a.compress_type == b.compress_type:
            packed = size(a.compress_size), size(b.compress_size)
            if a.compress_size != b.compress_size:
                differing.append(f"compressed to {packed[0]} and {packed[1]}")
        if differing:
            yield f"{name}: {'; '.join(differing)}"


def _same(one: zipfile.ZipFile, two: zipfile.ZipFile, name: str) -> bool:
    """Whether members with the same size and CRC are the same; a CRC is no proof."""
    digests = []
    for archive in (one, two):
        digest = hashlib.sha256()
        with archive.open(name) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        digests.append(digest.digest())
    return digests[0] == digests[1]


def _first_difference(left: IO[bytes], right: IO[bytes]) -> int:
    """Offset of the first byte that two files do not share."""
    offset = 0
    while True:
        a, b = left.read(_CHUNK), right.read(_CHUNK)
        if a != b or not a:
            pairs = enumerate(zip(a, b, strict=False))
            return offset + next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
        offset += len(a)


def _lines(one: zipfile.ZipFile, two: zipfile.ZipFile, name: str) -> str:
    """The first differing line of two texts; nothing for what is no text."""
    if max(archive.getinfo(name).file_size for archive in (one, two)) > _CHUNK:
        return ""
    try:
        left, right = (archive.read(name).decode().splitlines() for archive in (one, two))
    except UnicodeDecodeError:
        return ""
    if any("\0" in line for line in (*left[:1], *right[:1])):
        return ""
    for number, (a, b) in enumerate(itertools.zip_longest(left, right, fillvalue=""), 1):
        if a != b:
            return f"; line {number}: {a[:80]!r} and {b[:80]!r}"
    return ""
