"""What an audit needs to know of one ELF file, read with pyelftools.

Nothing of the file is run, and only the sections that are asked for are read, so a library of
600 MB takes milliseconds and a few megabytes. Structures: System V ABI ("Dynamic Section", "Hash
Table") and the symbol versioning of the Linux Standard Base.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

from elftools.elf.elffile import ELFFile

MAGIC = b"\x7fELF"

# pyelftools' names to those of wheel tags (PEP 425, PEP 600)
_MACHINES = {
    "EM_X86_64": "x86_64",
    "EM_AARCH64": "aarch64",
    "EM_386": "i686",
    "EM_ARM": "armv7l",
    "EM_PPC64": "ppc64le",
    "EM_S390": "s390x",
    "EM_RISCV": "riscv64",
}
_SYMBOLS = (".symtab", ".strtab")
# torch 2.13.0, torch_tpu 0.2.0 and libtpu 0.0.50 take 130,000 to 750,000 readings of 5 MB in all
_READS_MOST = 3_000_000
_BYTES_MOST = 256 << 20
_NAME_MOST = 4096


class DamagedElfError(ValueError):
    """The file begins like an ELF file and cannot be one."""


class Meter:
    """How much may be read of all ELF files of a wheel: tables can be told to be without an end."""

    def __init__(self) -> None:
        self.reads = _READS_MOST
        self.bytes = _BYTES_MOST

    def take(self, count: int) -> None:
        """Note a reading.

        Args:
            count: Its bytes.

        Raises:
            DamagedElfError: If it is one too many.
        """
        self.reads -= 1
        self.bytes -= count
        if self.reads < 0 or self.bytes < 0:
            raise DamagedElfError("has tables that take more reading than any real library's")


class _Metered:
    """A file that counts what is read of it; the few methods that pyelftools uses."""

    def __init__(self, file: IO[bytes], meter: Meter) -> None:
        self._file = file
        self._meter = meter
        self.seek = file.seek
        self.tell = file.tell

    def read(self, count: int = -1) -> bytes:
        if count > self._meter.bytes:
            self._meter.take(count)
        data = self._file.read(count)
        self._meter.take(len(data))
        return data


@dataclass(frozen=True)
class Elf:
    """One shared library or program.

    Attributes:
        machine: What it runs on, as wheel tags call it, such as ``x86_64``.
        soname: Its own name, or an empty text.
        needed: Names of the libraries it needs.
        runpath: Folders where it looks for them, ``$ORIGIN`` not replaced; old RPATH included.
        wants: Library name to the symbol versions it needs from it, such as ``GLIBC_2.30``.
        exports: Those of the asked-for symbols that it defines.
        debug_bytes: Size of its debugging sections.
        symbol_bytes: Size of the symbol tables that a strip would remove.
    """

    machine: str
    soname: str
    needed: tuple[str, ...]
    runpath: tuple[str, ...]
    wants: Mapping[str, frozenset[str]]
    exports: frozenset[str]
    debug_bytes: int
    symbol_bytes: int


def read(
    file: IO[bytes], length: int, asked: Collection[str] = (), meter: Meter | None = None
) -> Elf:
    """Read an ELF file.

    Args:
        file: The file, at any position; it must allow seeking.
        length: Its size in bytes.
        asked: Symbols to look up among those it exports.
        meter: What may still be read of the files of its wheel; that of one file if not given.

    Returns:
        What it says about itself.

    Raises:
        DamagedElfError: If it is cut short or makes no sense.
    """
    try:
        return _read(_Metered(file, meter or Meter()), length, asked)
    except DamagedElfError:
        raise
    except Exception as error:
        # on bytes that make no sense the library raises whatever its parsers happen to raise
        raise DamagedElfError(f"cannot be read: {type(error).__name__} {error}".rstrip()) from error


def _read(file: _Metered, length: int, asked: Collection[str]) -> Elf:
    elf = ELFFile(cast("IO[bytes]", file))
    if elf.elfclass != 64 or not elf.little_endian:
        raise DamagedElfError("is not a 64-bit little-endian file")
    # which methods a section has depends on its kind, beyond what its type says
    sections: dict[str, Any] = {section.name: section for section in elf.iter_sections()}
    for section in sections.values():
        end = section["sh_offset"] + section["sh_size"]
        if section["sh_type"] not in ("SHT_NULL", "SHT_NOBITS") and end > length:
            raise DamagedElfError(f"is cut short: {section.name} ends at {end} of {length} bytes")
    for segment in elf.iter_segments():
        end = segment["p_offset"] + segment["p_filesz"]
        if end > length:
            raise DamagedElfError(f"is cut short: a segment ends at {end} of {length} bytes")
    loaded = any(segment["p_type"] == "PT_DYNAMIC" for segment in elf.iter_segments())
    if loaded and ".dynamic" not in sections:
        raise DamagedElfError("has no section table, so its symbol versions cannot be read")
    needed, runpath, soname = [], [], ""
    if ".dynamic" in sections:
        for tag in sections[".dynamic"].iter_tags():
            if tag.entry.d_tag == "DT_NEEDED":
                needed.append(str(tag.needed))
            elif tag.entry.d_tag == "DT_RUNPATH":
                runpath += str(tag.runpath).split(":")
            elif tag.entry.d_tag == "DT_RPATH":
                runpath += str(tag.rpath).split(":")
            elif tag.entry.d_tag == "DT_SONAME":
                soname = str(tag.soname)
    if max(map(len, (soname, *needed, *runpath))) > _NAME_MOST:
        raise DamagedElfError("names a library or folder that no system could have")
    debug = [one for name, one in sections.items() if name.startswith((".debug_", ".zdebug_"))]
    symbols = [sections[name] for name in _SYMBOLS if name in sections]
    machine = str(elf["e_machine"])
    return Elf(
        machine=_MACHINES.get(machine, machine.removeprefix("EM_").lower()),
        soname=soname,
        needed=tuple(needed),
        runpath=tuple(runpath),
        wants=_wants(sections),
        exports=_exports(sections, asked),
        debug_bytes=sum(int(section["sh_size"]) for section in debug),
        symbol_bytes=sum(int(section["sh_size"]) for section in symbols),
    )


def _wants(sections: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    section = sections.get(".gnu.version_r")
    if section is None:
        return {}
    # each record has 16 bytes; a damaged file may tell of millions, all at the same place
    left = section["sh_size"] // 16
    wants: dict[str, frozenset[str]] = {}
    for library, versions in section.iter_versions():
        names = set()
        left -= 1
        for version in versions:
            names.add(str(version.name))
            left -= 1
            if left < 0:
                break
        if left < 0:
            raise DamagedElfError("has more symbol versions than fit in their section")
        wants[str(library.name)] = frozenset(names)
    return wants


def _exports(sections: Mapping[str, Any], asked: Collection[str]) -> frozenset[str]:
    if ".gnu.hash" in sections:
        # the table that the loader uses; walking 280,000 symbols would take seconds
        found = {name: sections[".gnu.hash"].get_symbol(name) for name in asked}
    elif ".dynsym" in sections:
        symbols = sections[".dynsym"].iter_symbols()
        found = {symbol.name: symbol for symbol in symbols if symbol.name in asked}
    else:
        return frozenset()
    return frozenset(
        name for name, symbol in found.items() if symbol and symbol["st_shndx"] != "SHN_UNDEF"
    )
