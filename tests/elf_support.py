"""Small ELF files and a small torch_tpu wheel, made byte by byte: no compiler is needed.

The ELF files have what a loader and an audit look at (dynamic section, symbols with a hash table,
symbol versions) and no code. Each wheel is right in every respect, for a test to spoil one.
"""

from __future__ import annotations

import base64
import hashlib
import struct
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

X86_64, AARCH64 = 62, 183
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TORCH = "2.13.0+cpu"
PYBIND = b"Python version mismatch: module was compiled for Python %s\0"

_STRTAB, _DYNSYM, _DYNAMIC, _PROGBITS = 3, 11, 6, 1
_HASH, _VERNEED = 0x6FFFFFF6, 0x6FFFFFFE
_DT_NEEDED, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT = 1, 5, 6, 10, 11
_DT_SONAME, _DT_HASH, _DT_RUNPATH, _DT_RPATH = 14, 0x6FFFFEF5, 29, 15
_DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFE, 0x6FFFFFFF


class _Strings:
    """A string table."""

    def __init__(self) -> None:
        self.data = b"\0"

    def add(self, text: str) -> int:
        place = len(self.data)
        self.data += text.encode() + b"\0"
        return place


def _hash(name: str) -> int:
    """The hash of GNU's table of symbols."""
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) % 2**32
    return value


def make_elf(
    *,
    needed: Sequence[str] = ("libc.so.6",),
    soname: str = "",
    runpath: str = "",
    rpath: str = "",
    wants: Mapping[str, Sequence[str]] | None = None,
    exports: Sequence[str] = (),
    imports: Sequence[str] = (),
    hashed: bool = True,
    machine: int = X86_64,
    data: bytes = b"",
    debug: int = 0,
) -> bytes:
    """A shared library without code.

    Args:
        needed: Libraries it needs.
        soname: Its own name.
        runpath: Where it looks for them.
        rpath: The same in the older form.
        wants: Library to the symbol versions it needs from it.
        exports: Functions it defines.
        imports: Symbols that it wants from others.
        hashed: Whether its symbols can be looked up by a hash table.
        machine: The ABI's number of its processor.
        data: Its read-only data.
        debug: Bytes of debugging information.
    """
    strings = _Strings()
    dynamic = [(_DT_NEEDED, strings.add(name)) for name in needed]
    for tag, text in ((_DT_SONAME, soname), (_DT_RUNPATH, runpath), (_DT_RPATH, rpath)):
        if text:
            dynamic.append((tag, strings.add(text)))
    symbols = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    for name in imports:
        symbols += struct.pack("<IBBHQQ", strings.add(name), 0x10, 0, 0, 0, 0)
    for name in exports:
        symbols += struct.pack("<IBBHQQ", strings.add(name), 0x12, 0, 1, 64, 1)
    # one bucket: a chain through all that is defined, whose last hash is odd; a filter of ones
    first = 1 + len(imports)
    chain = [_hash(name) & ~1 for name in exports]
    chain[-1:] = [value | 1 for value in chain[-1:]]
    table = struct.pack("<IIIIQI", 1, first, 1, 0, 2**64 - 1, first if exports else 0)
    table += struct.pack(f"<{len(chain)}I", *chain)
    versions = b""
    libraries = list((wants or {}).items())
    for index, (library, names) in enumerate(libraries):
        last = index == len(libraries) - 1
        following = 0 if last else 16 + 16 * len(names)
        versions += struct.pack("<HHIII", 1, len(names), strings.add(library), 16, following)
        for number, name in enumerate(names):
            after = 0 if number == len(names) - 1 else 16
            versions += struct.pack("<IHHII", 0, 0, 2, strings.add(name), after)
    parts: list[tuple[str, int, bytes, int, int, int]] = [
        # name, type, bytes, link, info, size of an entry
        (".dynstr", _STRTAB, strings.data, 0, 0, 0),
        (".dynsym", _DYNSYM, symbols, 1, 1, 24),
        (".rodata", _PROGBITS, data, 0, 0, 0),
    ]
    if hashed:
        parts.append((".gnu.hash", _HASH, table, 2, 0, 0))
    if versions:
        parts.append((".gnu.version_r", _VERNEED, versions, 1, len(libraries), 0))
    if debug:
        parts.append((".debug_info", _PROGBITS, bytes(debug), 0, 0, 0))
    return _assemble(parts, dynamic, len(libraries), machine)


def _assemble(
    parts: list[tuple[str, int, bytes, int, int, int]],
    dynamic: list[tuple[int, int]],
    libraries: int,
    machine: int,
) -> bytes:
    body = bytearray(64 + 2 * 56)
    placed: list[tuple[str, int, int, int, int, int, int]] = []

    def put(part: tuple[str, int, bytes, int, int, int]) -> int:
        name, kind, content, link, info, entry = part
        body.extend(bytes(-len(body) % 8))
        place = len(body)
        body.extend(content)
        placed.append((name, kind, place, len(content), link, info, entry))
        return place

    places = {part[0]: put(part) for part in parts}
    dynamic = [
        *dynamic,
        (_DT_STRTAB, places[".dynstr"]),
        (_DT_SYMTAB, places[".dynsym"]),
        (_DT_STRSZ, len(parts[0][2])),
        (_DT_SYMENT, 24),
    ]
    if ".gnu.hash" in places:
        dynamic.append((_DT_HASH, places[".gnu.hash"]))
    if libraries:
        dynamic += [(_DT_VERNEED, places[".gnu.version_r"]), (_DT_VERNEEDNUM, libraries)]
    table = b"".join(struct.pack("<qQ", *entry) for entry in (*dynamic, (0, 0)))
    at = put((".dynamic", _DYNAMIC, table, 1, 0, 16))
    names = _Strings()
    offsets = [names.add(one[0]) for one in placed]
    own = names.add(".shstrtab")
    put((".shstrtab", _STRTAB, names.data, 0, 0, 0))
    body.extend(bytes(-len(body) % 8))
    sections = len(body)
    body.extend(bytes(64))
    for (_, kind, place, length, link, info, entry), name in zip(
        placed, [*offsets, own], strict=True
    ):
        body.extend(
            struct.pack("<IIQQQQIIQQ", name, kind, 2, place, place, length, link, info, 8, entry)
        )
    body[:64] = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        3,
        machine,
        1,
        0,
        64,
        sections,
        0,
        64,
        56,
        2,
        64,
        len(placed) + 1,
        len(placed),
    )
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, sections, sections, 4096)
    body[64:120] = load
    body[120:176] = struct.pack("<IIQQQQQQ", 2, 4, at, at, at, len(table), len(table), 8)
    return bytes(body)


@dataclass
class WheelFixture:
    """The files of a wheel, to be changed and then written.

    Attributes:
        name: Project name in file name and metadata.
        version: Its version.
        tags: Its tags.
        files: Everything but RECORD.
        record: RECORD's lines, made from the files when it is written if None.
        links: Files that the archive marks as symbolic links.
        twice: A file that the archive has twice.
        file: Its file name, if not the one of its name, version and tags.
    """

    name: str = "torch_tpu"
    version: str = "0.2.0"
    tags: str = "cp311-cp311-manylinux_2_31_x86_64"
    files: dict[str, bytes] = field(default_factory=dict)
    record: list[str] | None = None
    links: tuple[str, ...] = ()
    twice: str = ""
    file: str = ""

    @property
    def dist_info(self) -> str:
        return f"{self.name}-{self.version}.dist-info"

    def change(self, file: str, old: str, new: str) -> None:
        """Replace a text in a file that has it."""
        text = self.files[file].decode()
        assert old in text
        self.files[file] = text.replace(old, new).encode()

    def record_lines(self) -> list[str]:
        lines = []
        for name, content in self.files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            lines.append(f"{name},sha256={digest.decode()},{len(content)}")
        return [*lines, f"{self.dist_info}/RECORD,,"]

    def write(self, folder: Path) -> Path:
        """Write the wheel; its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / (self.file or f"{self.name}-{self.version}-{self.tags}.whl")
        lines = self.record if self.record is not None else self.record_lines()
        record = "".join(f"{line}\n" for line in lines).encode()
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file, content in {**self.files, f"{self.dist_info}/RECORD": record}.items():
                info = zipfile.ZipInfo(file)
                kind = 0o120777 if file in self.links else 0o100644
                info.external_attr = kind << 16
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, content)
            if self.twice:
                with warnings.catch_warnings(action="ignore"):
                    archive.writestr(zipfile.ZipInfo(self.twice), self.files[self.twice])
        return path


GLIBC = {
    "libc.so.6": ["GLIBC_2.2.5", "GLIBC_2.30"],
    "libstdc++.so.6": ["GLIBCXX_3.4.26", "CXXABI_1.3.11"],
    "libgcc_s.so.1": ["GCC_3.0"],
}
XLA_BASE = "torch_tpu/csrc/common/libxla_base.so"
BAZEL = b"bazel-out/k8-opt-ST-0123456789ab/bin/external/protobuf/map.h\0"


def xla_base(**more: object) -> bytes:
    """The library that all glue shares."""
    settings: dict[str, object] = {
        "needed": ("libc10.so", "libtorch_cpu.so", "libc.so.6", "libstdc++.so.6"),
        "soname": "libxla_base.so",
        "runpath": "$ORIGIN/../../../torch/lib",
        "wants": GLIBC,
        "data": BAZEL,
    }
    return make_elf(**{**settings, **more})  # type: ignore[arg-type]


def common(torch: str, **more: object) -> bytes:
    """The common part of one torch's glue."""
    settings: dict[str, object] = {
        "needed": ("libxla_base.so", "libtorch_cpu.so", "libc.so.6"),
        "soname": f"libpywrap_{torch}_common.so",
        "runpath": "$ORIGIN/..:$ORIGIN/../../../../torch/lib",
        "data": BAZEL,
    }
    return make_elf(**{**settings, **more})  # type: ignore[arg-type]


def module(name: str, torch: str, python: str = "3.11", **more: object) -> bytes:
    """One extension module of one torch's glue."""
    settings: dict[str, object] = {
        "needed": ("libxla_base.so", f"libpywrap_{torch}_common.so", "libc.so.6"),
        "runpath": f"$ORIGIN/../csrc/common:$ORIGIN/../csrc/common/glue_{torch}",
        "exports": (f"PyInit_{name}",),
        "data": PYBIND + f"{python}\0".encode(),
    }
    return make_elf(**{**settings, **more})  # type: ignore[arg-type]


def glue(torch: str) -> dict[str, bytes]:
    """The glue of one torch, such as ``2_13_0``."""
    return {
        f"torch_tpu/csrc/common/glue_{torch}/libpywrap_{torch}_common.so": common(torch),
        f"torch_tpu/_internal/env_{torch}.so": module("env", torch),
        f"torch_tpu/_internal/testing_{torch}.so": module("testing", torch),
    }


def torch_tpu_wheel() -> WheelFixture:
    """A wheel as upstream's build makes it, in small, and with its licence's text."""
    made = WheelFixture()
    made.files = {
        "torch_tpu/__init__.py": b"",
        "torch_tpu/_loader.py": b'"""Loads the backend."""\n\n\ndef load():\n    pass\n',
        "torch_tpu/include/XLA_COMMIT": COMMIT.encode(),
        XLA_BASE: xla_base(),
        **glue("2_12_0"),
        **glue("2_13_0"),
        f"{made.dist_info}/METADATA": (
            b"Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.2.0\nLicense: Apache 2.0\n"
            b"Requires-Python: >=3.11\nRequires-Dist: numpy>=2\n"
            b"Requires-Dist: torch>=2.12.0,<=2.15.0\n\nWords.\n"
        ),
        f"{made.dist_info}/WHEEL": (
            b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\n"
            b"Tag: cp311-cp311-manylinux_2_31_x86_64\n"
        ),
        f"{made.dist_info}/entry_points.txt": (
            b"[torch.backends]\ntorch_tpu = torch_tpu._loader:load"
        ),
        f"{made.dist_info}/licenses/LICENSE": b"The text of the licence.\n",
    }
    return made


def libtpu_wheel() -> WheelFixture:
    """A wheel of libtpu in small: its library exports what a PJRT plugin does, without code."""
    made = WheelFixture(name="libtpu", version="0.0.7")
    made.files = {
        "libtpu/__init__.py": b"",
        "libtpu/libtpu.so": make_elf(exports=("GetPjrtApi", "other"), wants=GLIBC),
        "libtpu/LICENSE": b"Terms.\n",
        f"{made.dist_info}/METADATA": (
            b"Metadata-Version: 2.4\nName: libtpu\nVersion: 0.0.7\n"
            b"License: Terms\nRequires-Python: >=3.11\n"
        ),
        f"{made.dist_info}/WHEEL": (
            b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-manylinux_2_31_x86_64\n"
        ),
    }
    return made
