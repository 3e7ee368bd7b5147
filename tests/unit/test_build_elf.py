"""The ELF reader: what it tells of a library, and of bytes that are none."""

from __future__ import annotations

import io
import random
import struct
import sysconfig
from pathlib import Path

import pytest

from elf_support import AARCH64, GLIBC, make_elf
from tpuforge.build import elf


def read(data: bytes, *asked: str) -> elf.Elf:
    return elf.read(io.BytesIO(data), len(data), asked)


def test_what_a_library_says_of_itself() -> None:
    made = make_elf(
        needed=("libc.so.6", "libm.so.6"),
        soname="libx.so.1",
        runpath="$ORIGIN/a:/b",
        rpath="/c",
        wants=GLIBC,
        exports=("first", "second", "third"),
        debug=100,
    )
    found = read(made, "third", "first", "missing")
    assert found.machine == "x86_64"
    assert found.needed == ("libc.so.6", "libm.so.6")
    assert found.soname == "libx.so.1"
    assert found.runpath == ("$ORIGIN/a", "/b", "/c")
    assert found.wants == {library: frozenset(names) for library, names in GLIBC.items()}
    assert found.exports == {"first", "third"}
    assert found.debug_bytes == 100


def test_a_library_without_a_hash_table() -> None:
    made = make_elf(exports=("first", "second"), imports=("third",), hashed=False)
    assert read(made, "second", "third", "missing").exports == {"second"}


def test_another_machine() -> None:
    assert read(make_elf(machine=AARCH64)).machine == "aarch64"


def test_a_library_that_a_real_linker_made() -> None:
    folder = Path(sysconfig.get_config_var("DESTSHARED"))
    place = next(folder.glob("_ctypes_test.*.so"), None) or next(folder.glob("*.so"))
    name = f"PyInit_{place.name.partition('.')[0]}"
    found = read(place.read_bytes(), name, "PyInit_of_nothing")
    assert found.exports == {name}
    assert "libc.so.6" in found.needed
    assert any(version.startswith("GLIBC_2.") for version in found.wants["libc.so.6"])


@pytest.mark.parametrize("left", [5, 40, 64, 200, -64, -1])
def test_a_file_that_is_cut_short(left: int) -> None:
    with pytest.raises(elf.DamagedElfError):
        read(make_elf(wants=GLIBC)[:left])


def test_a_file_without_its_section_table() -> None:
    made = bytearray(make_elf(wants=GLIBC))
    struct.pack_into("<Q", made, 40, 0)
    struct.pack_into("<HH", made, 60, 0, 0)
    with pytest.raises(elf.DamagedElfError, match="no section table"):
        read(bytes(made))


def test_a_32_bit_file() -> None:
    made = bytearray(make_elf())
    made[4] = 1
    with pytest.raises(elf.DamagedElfError):
        read(bytes(made))


def test_random_damage_is_read_or_refused_and_nothing_else() -> None:
    made = make_elf(wants=GLIBC, exports=("one", "two"), runpath="$ORIGIN")
    chance = random.Random(7)
    refused = 0
    for _ in range(200):
        spoiled = bytearray(made)
        for _ in range(chance.randint(1, 8)):
            spoiled[chance.randrange(4, len(spoiled))] = chance.randrange(256)
        try:
            read(bytes(spoiled), "one", "zero")
        except elf.DamagedElfError:
            refused += 1
    assert refused > 20


def _header(sections: int, offset: int) -> bytes:
    return (
        b"\x7fELF\2\1\1"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, offset, 0, 64, 56, 0, 64, sections, 1)
    )


def _section(
    name: int, kind: int, offset: int, size: int, *, link: int = 0, each: int = 0
) -> bytes:
    return struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, link, 0, 1, each)


def _one_long_name_for_all() -> bytes:
    names = b"\0" + b"n" * 200_000 + b"\0"
    table = _section(0, 0, 0, 0) + _section(1, 3, 64, len(names)) * 20_000
    return _header(20_001, 64 + len(names)) + names + table


def _needs(count: int, length: int) -> bytes:
    """A library that needs one of a long name, again and again."""
    strings = b"\0" + b"l" * length + b"\0"
    dynamic = struct.pack("<qQ", 1, 1) * count
    names = b"\0.dynamic\0.dynstr\0.shstrtab\0"
    at = [64, 64 + len(names), 64 + len(names) + len(strings)]
    end = at[2] + len(dynamic)
    table = _section(0, 0, 0, 0) + _section(19, 3, at[0], len(names))
    table += _section(1, 6, at[2], len(dynamic), link=3, each=16) + _section(
        10, 3, at[1], len(strings)
    )
    return _header(4, end) + names + strings + dynamic + table


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (_one_long_name_for_all(), "more reading than any real"),
        (_needs(20_000, 100_000), "more reading than any real"),
        (_needs(1, 5000), "no system could have"),
    ],
    ids=["sections", "needed", "name"],
)
def test_names_without_an_end(data: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the same bound in a tenth of the time
    monkeypatch.setattr(elf, "_READS_MOST", 100_000)
    with pytest.raises(elf.DamagedElfError, match=said):
        read(data)


def test_the_files_of_a_wheel_share_one_bound() -> None:
    data, meter = make_elf(needed=("libc.so.6",)), elf.Meter()
    elf.read(io.BytesIO(data), len(data), meter=meter)
    spent = elf.Meter().reads - meter.reads
    assert 0 < spent < 1000
    meter.reads = spent
    elf.read(io.BytesIO(data), len(data), meter=meter)
    with pytest.raises(elf.DamagedElfError):
        elf.read(io.BytesIO(data), len(data), meter=meter)
