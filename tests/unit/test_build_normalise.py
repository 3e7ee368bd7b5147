"""Two wheels of the same content become the same bytes; a damaged one is refused, not mended."""

from __future__ import annotations

import base64
import hashlib
import re
import stat
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tpuforge.build.normalise import differences, normalise
from tpuforge.errors import Exit, ForgeError

EPOCH = 1_795_996_801
INFO = "torch_tpu-0.2.0.dist-info"
RECORD = f"{INFO}/RECORD"
ELF_PROGRAM = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + bytes(40)
ELF_SHARED = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00" + bytes(40)
CONTENT = {
    "torch_tpu/__init__.py": b"import os\n",
    "torch_tpu/b.so": ELF_SHARED,
    "torch_tpu/B.txt": "größer\n".encode(),
    "torch_tpu/tool": ELF_PROGRAM,
    "torch_tpu/run.sh": b"#!/bin/sh\n",
    "torch_tpu/empty": b"",
    "torch_tpu-0.2.0.data/scripts/start": b"start\n",
    "zzz/last.py": b"",
    f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.2.0\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\r\nTag: cp311-cp311-manylinux_2_31_x86_64\r\n",
}


def line(name: str, content: bytes, algorithm: str = "sha256") -> str:
    digest = base64.urlsafe_b64encode(hashlib.new(algorithm, content).digest()).decode()
    return f"{name},{algorithm}={digest.rstrip('=')},{len(content)}"


def make(
    path: Path,
    content: Mapping[str, bytes] = CONTENT,
    *,
    record: str | None = None,
    backwards: bool = False,
    year: int = 2020,
    mode: int = 0o100644,
    method: int = zipfile.ZIP_DEFLATED,
    folders: bool = False,
    comment: bytes = b"",
) -> Path:
    """A wheel; everything but its content can be chosen."""
    names = sorted(content, reverse=backwards)
    lines = [*(line(name, content[name]) for name in names), f"{RECORD},,"]
    files = {name: content[name] for name in names}
    files[RECORD] = ("\n".join(lines) + "\n" if record is None else record).encode()
    if backwards:
        files = dict(reversed(files.items()))
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = comment
        if folders:
            archive.mkdir("torch_tpu")
        for name, data in files.items():
            info = zipfile.ZipInfo(name, (year, 5, 6, 7, 8, 10))
            info.external_attr = mode << 16
            info.compress_type = method
            archive.writestr(info, data)
    return path


def test_what_surrounds_the_content_does_not_count(tmp_path: Path) -> None:
    first = make(tmp_path / "a.whl")
    second = make(
        tmp_path / "b.whl",
        backwards=True,
        year=2024,
        mode=0o100555,
        method=zipfile.ZIP_BZIP2,
        folders=True,
        comment=b"made by somebody",
    )
    out = tmp_path / "out" / "w.whl"
    digest = normalise(first, out, EPOCH)
    assert digest == hashlib.sha256(out.read_bytes()).hexdigest()
    assert normalise(second, tmp_path / "other.whl", EPOCH) == digest
    assert normalise(out, out, EPOCH) == digest
    assert [path.name for path in out.parent.iterdir()] == ["w.whl"]
    assert stat.S_IMODE(out.stat().st_mode) == 0o644


def test_the_very_bytes(tmp_path: Path) -> None:
    # the same on every machine: a change of Python or zlib that changes this is a fault
    digest = normalise(make(tmp_path / "a.whl"), tmp_path / "w.whl", EPOCH)
    assert digest == "be668fd0c316e39f211eaf493b6226b03bbce0fcca168f8738ae8e12ddcf4115"


def test_members_of_the_new_wheel(tmp_path: Path) -> None:
    made = tmp_path / "w.whl"
    normalise(make(tmp_path / "a.whl", backwards=True, mode=0o100777), made, EPOCH)
    with zipfile.ZipFile(made) as archive:
        assert archive.testzip() is None
        members = archive.infolist()
        names = [member.filename for member in members]
        assert {name: archive.read(name) for name in CONTENT} == CONTENT
        record = archive.read(RECORD).decode()
    assert names == [
        *sorted(name for name in CONTENT if not name.startswith(INFO)),
        f"{INFO}/METADATA",
        f"{INFO}/WHEEL",
        RECORD,
    ]
    assert record == "".join(f"{line(name, CONTENT[name])}\n" for name in names[:-1]) + (
        f"{RECORD},,\n"
    )
    for member in members:
        assert member.date_time == (2026, 11, 30, 0, 0, 0)
        assert (member.compress_type, member.extra, member.create_system) == (0, b"", 3)
    programs = {m.filename for m in members if m.external_attr >> 16 == 0o100755}
    assert programs == {
        "torch_tpu/tool",
        "torch_tpu/run.sh",
        "torch_tpu-0.2.0.data/scripts/start",
    }
    assert {m.external_attr >> 16 for m in members} == {0o100755, 0o100644}


@pytest.mark.parametrize(
    ("epoch", "moment"),
    [
        (0, (1980, 1, 1, 0, 0, 0)),
        (951_782_399, (2000, 2, 28, 23, 59, 58)),
        (4_354_819_199, (2107, 12, 31, 23, 59, 58)),
    ],
)
def test_moments(tmp_path: Path, epoch: int, moment: tuple[int, ...]) -> None:
    made = tmp_path / "w.whl"
    if epoch > 4_354_819_198:
        with pytest.raises(ForgeError, match="the source's time is"):
            normalise(make(tmp_path / "a.whl"), made, epoch)
        epoch -= 1
    normalise(make(tmp_path / "a.whl"), made, epoch)
    with zipfile.ZipFile(made) as archive:
        assert {member.date_time for member in archive.infolist()} == {moment}


def test_a_record_with_longer_digests(tmp_path: Path) -> None:
    lines = [line(name, content, "sha512") for name, content in CONTENT.items()]
    wheel = make(tmp_path / "a.whl", record="\n".join([*lines, f"{RECORD},,"]))
    plain = normalise(make(tmp_path / "b.whl"), tmp_path / "x.whl", EPOCH)
    assert normalise(wheel, tmp_path / "w.whl", EPOCH) == plain


def record_without(name: str) -> str:
    return "\n".join(line(n, c) for n, c in CONTENT.items() if n != name) + f"\n{RECORD},,\n"


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (record_without("zzz/last.py"), "zzz/last.py is not what RECORD says"),
        (record_without("") + line("gone.py", b"") + "\n", "names gone.py, which is not there"),
        (record_without("") + line("zzz/last.py", b"") + "\n", "names zzz/last.py twice"),
        (
            record_without("zzz/last.py") + line("zzz/last.py", b"other") + "\n",
            "zzz/last.py is not what RECORD says",
        ),
        (
            record_without("zzz/last.py") + line("zzz/last.py", b"", "md5") + "\n",
            "zzz/last.py is not what RECORD says",
        ),
        ("one,two\n", "a line of 2 fields"),
    ],
)
def test_a_wrong_record_is_not_mended(tmp_path: Path, record: str, found: str) -> None:
    refused(tmp_path, make(tmp_path / "a.whl", record=record), found)


def refused(tmp_path: Path, wheel: Path, found: str) -> None:
    """The wheel is refused, and what stood at the target is still there, alone."""
    target = tmp_path / "out" / "w.whl"
    target.parent.mkdir()
    target.write_bytes(b"before")
    with pytest.raises(ForgeError, match=re.escape(found)) as caught:
        normalise(wheel, target, EPOCH)
    assert caught.value.exit_code == Exit.FAULT
    assert target.read_bytes() == b"before"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("/etc/passwd", "the absolute name"),
        ("C:/windows", "the absolute name"),
        ("../up", "leads out of the wheel"),
        ("a/../../up", "leads out of the wheel"),
        ("a//b", "leads out of the wheel"),
        ("a\\b", "a name that is not plain"),
        ("zzz/last.py/inside", "zzz/last.py is a file"),
        ("other-1.dist-info/METADATA", "2 folders .dist-info"),
        (f"{INFO}/RECORD.jws", "signs its RECORD"),
    ],
)
def test_names_that_no_wheel_has(tmp_path: Path, name: str, found: str) -> None:
    refused(tmp_path, make(tmp_path / "a.whl", {**CONTENT, name: b"x"}), found)


@pytest.mark.parametrize("name", ["METADATA", "WHEEL"])
def test_a_wheel_without_its_metadata(tmp_path: Path, name: str) -> None:
    content = {n: c for n, c in CONTENT.items() if n != f"{INFO}/{name}"}
    refused(tmp_path, make(tmp_path / "a.whl", content), f"no {INFO}/{name}")


def test_a_name_twice(tmp_path: Path) -> None:
    wheel = make(tmp_path / "a.whl")
    with warnings.catch_warnings(), zipfile.ZipFile(wheel, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("zzz/last.py", b"again")
    refused(tmp_path, wheel, "zzz/last.py stands in it twice")


def test_a_link(tmp_path: Path) -> None:
    wheel = make(tmp_path / "a.whl", mode=stat.S_IFLNK | 0o777)
    refused(tmp_path, wheel, "is neither a file nor a folder")


def test_a_flipped_byte(tmp_path: Path) -> None:
    wheel = make(tmp_path / "a.whl", method=zipfile.ZIP_STORED)
    data = bytearray(wheel.read_bytes())
    data[data.index(b"import os")] ^= 1
    wheel.write_bytes(data)
    refused(tmp_path, wheel, "Bad CRC-32")


@pytest.mark.parametrize("keep", [0, 10, 700, -1, -30])
def test_a_cut_off_wheel(tmp_path: Path, keep: int) -> None:
    wheel = make(tmp_path / "a.whl")
    wheel.write_bytes(wheel.read_bytes()[:keep])
    refused(tmp_path, wheel, "a.whl: ")


def test_a_member_shorter_than_its_header_says(tmp_path: Path) -> None:
    wheel = make(tmp_path / "a.whl", {**CONTENT, "long": b"x" * 999})
    data = bytearray(wheel.read_bytes())
    old, new = (999).to_bytes(4, "little"), (1000).to_bytes(4, "little")
    # in the directory at the end, which is the one that counts
    where = data.rindex(old)
    data[where : where + 4] = new
    wheel.write_bytes(data)
    refused(tmp_path, wheel, "long has 999 bytes, not 1000")


def test_no_such_file_is_not_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        normalise(tmp_path / "none.whl", tmp_path / "w.whl", EPOCH)


def test_no_difference(tmp_path: Path) -> None:
    assert differences(make(tmp_path / "a.whl"), make(tmp_path / "b.whl")) == []


def test_differences_in_content(tmp_path: Path) -> None:
    one = make(tmp_path / "a.whl")
    changed = {
        **CONTENT,
        "torch_tpu/__init__.py": b"import os\nbuilt = 17\n",
        "torch_tpu/b.so": ELF_SHARED[:-4] + b"/tmp",
        "new.py": b"",
    }
    del changed["zzz/last.py"]
    two = make(tmp_path / "b.whl", changed)
    found = differences(one, two)
    assert found[:4] == [
        "zzz/last.py: only in the first",
        "new.py: only in the second",
        "torch_tpu/__init__.py: 10 and 21 bytes, differs from byte 10 on; "
        "line 2: '' and 'built = 17'",
        "torch_tpu/b.so: 58 bytes in both, differs from byte 54 on",
    ]
    assert found[4].startswith(f"{RECORD}: ")
    assert re.fullmatch(r"the files differ from byte \d+ on", found[-1])
    assert differences(one, two, limit=2)[2] == f"and {len(found) - 3} more"


def test_differences_around_the_content(tmp_path: Path) -> None:
    one = make(tmp_path / "a.whl")
    found = differences(one, make(tmp_path / "b.whl", year=2021, mode=0o100755))
    assert found[0] == (
        "torch_tpu-0.2.0.data/scripts/start: time (2020, 5, 6, 7, 8, 10) and "
        "(2021, 5, 6, 7, 8, 10); mode 0o100644 and 0o100755"
    )
    found = differences(one, make(tmp_path / "c.whl", backwards=True))
    assert "the order of the members" in found
    found = differences(one, make(tmp_path / "d.whl", comment=b"x"))
    assert found[0] == "the members agree"


def test_differences_of_what_is_no_wheel(tmp_path: Path) -> None:
    one = make(tmp_path / "a.whl")
    two = tmp_path / "b.whl"
    two.write_bytes(one.read_bytes()[:100])
    found = differences(one, two)
    assert found[0].startswith("not two whole zips")
    assert found[1] == "the files differ from byte 100 on"
