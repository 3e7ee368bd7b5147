"""What a base takes from a standalone CPython, and from where the file may come."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from standalone_support import FILE, SHORT, VERSION
from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.images import standalone
from tpuforge.pins import Standalone

EPOCH = 1795996800
LIBRARY = f"python/lib/python{SHORT}"
WHOLE = {
    f"python/bin/python{SHORT}": b"\x7fELF",
    "python/bin/python3-config": b"#!/bin/sh\n",
    "python/bin/pip3": b"#!/bin/sh\n",
    "python/include/Python.h": b"",
    "python/share/man/man1/python3.1": b"",
    f"python/lib/libpython{SHORT}.so.1.0": b"\x7fELF",
    "python/lib/libpython3.so": b"\x7fELF",
    "python/lib/tcl8.6/init.tcl": b"",
    f"{LIBRARY}/os.py": b"",
    f"{LIBRARY}/turtle.py": b"",
    f"{LIBRARY}/lib-dynload/_ctypes.cpython-312-x86_64-linux-gnu.so": b"\x7fELF",
    f"{LIBRARY}/lib-dynload/_tkinter.cpython-312-x86_64-linux-gnu.so": b"\x7fELF",
    f"{LIBRARY}/config-{SHORT}-x86_64-linux-gnu/Makefile": b"",
    f"{LIBRARY}/json/__init__.py": b"",
    f"{LIBRARY}/json/__pycache__/__init__.cpython-312.pyc": b"",
    f"{LIBRARY}/lib2to3/tests/data/bad.py": b"",
    f"{LIBRARY}/site-packages/pip/__init__.py": b"",
    f"{LIBRARY}/ensurepip/__init__.py": b"",
    f"{LIBRARY}/LICENSE.txt": b"",
}


def write(
    path: Path, files: dict[str, bytes], *, mtime: int = 1, links: tuple[str, ...] = ()
) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.uid, entry.uname = len(data), mtime, mtime, f"u{mtime}"
            entry.mode = 0o755 if "/bin/" in name else 0o600
            tar.addfile(entry, io.BytesIO(data))
        for name in links:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(entry)
    return path


def names(path: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(path) as tar:
        return {member.name: member for member in tar}


def test_a_base_takes_the_program_and_its_library_and_no_more(tmp_path: Path) -> None:
    build = write(tmp_path / FILE, WHOLE)
    standalone.write_tar(build, tmp_path / "out.tar", VERSION, EPOCH)
    taken = names(tmp_path / "out.tar")
    library = f"usr/local/lib/python{SHORT}"
    assert set(taken) == {
        f"usr/local/bin/python{SHORT}",
        "usr/local/bin/python3",
        f"{library}/os.py",
        f"{library}/json/__init__.py",
        f"{library}/lib-dynload/_ctypes.cpython-312-x86_64-linux-gnu.so",
        f"{library}/LICENSE.txt",
    }
    assert {member.mtime for member in taken.values()} == {EPOCH}
    assert {member.uid for member in taken.values()} == {0}
    assert taken[f"usr/local/bin/python{SHORT}"].mode == 0o755
    assert taken[f"{library}/os.py"].mode == 0o644
    assert taken["usr/local/bin/python3"].linkname == f"python{SHORT}"


@pytest.mark.parametrize("place", ["", "$ORIGIN/../lib/"])
def test_a_program_that_needs_its_shared_library_gets_it(tmp_path: Path, place: str) -> None:
    needs = {f"python/bin/python{SHORT}": f"\x7fELF\0{place}libpython{SHORT}.so.1.0\0".encode()}
    build = write(tmp_path / FILE, WHOLE | needs)
    standalone.write_tar(build, tmp_path / "out.tar", VERSION, EPOCH)
    assert f"usr/local/lib/libpython{SHORT}.so.1.0" in names(tmp_path / "out.tar")


def test_order_times_and_owners_of_the_build_do_not_matter(tmp_path: Path) -> None:
    one = write(tmp_path / "1.tar.gz", WHOLE)
    two = write(tmp_path / "2.tar.gz", dict(reversed(WHOLE.items())), mtime=2_000_000_000)
    for build in (one, two):
        standalone.write_tar(build, build.with_suffix(".out"), VERSION, EPOCH)
    assert one.with_suffix(".out").read_bytes() == two.with_suffix(".out").read_bytes()


@pytest.mark.parametrize(
    ("files", "links", "said"),
    [
        ({}, (), f"no python{SHORT} with a standard library"),
        (dict(list(WHOLE.items())[:8]), (), "with a standard library"),
        (WHOLE | {"etc/passwd": b""}, (), "'etc/passwd' is not below python/"),
        (WHOLE | {"python/../etc/passwd": b""}, (), "is not below python/"),
        (WHOLE, (f"{LIBRARY}/passwd.py",), "links to '/etc/passwd'"),
    ],
)
def test_what_is_no_build_is_refused(
    tmp_path: Path, files: dict[str, bytes], links: tuple[str, ...], said: str
) -> None:
    build = write(tmp_path / FILE, files, links=links)
    with pytest.raises(ForgeError) as caught:
        standalone.write_tar(build, tmp_path / "out.tar", VERSION, EPOCH)
    assert said in caught.value.found
    assert caught.value.exit_code is Exit.FAULT


def test_bytes_that_are_no_archive_are_refused(tmp_path: Path) -> None:
    for data in (b"", b"<html>", write(tmp_path / "whole.tar.gz", WHOLE).read_bytes()[:-40]):
        (tmp_path / FILE).write_bytes(data)
        with pytest.raises(ForgeError, match="is not a standalone build"):
            standalone.write_tar(tmp_path / FILE, tmp_path / "out.tar", VERSION, EPOCH)


@pytest.fixture
def pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standalone:
    """The pin of a small file, which lies in the folder that the setting names."""
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "out"))
    folder = tmp_path / "builds"
    folder.mkdir()
    monkeypatch.setenv(standalone.SETTING, str(folder))
    build = write(folder / FILE, WHOLE)
    sha256 = hashlib.sha256(build.read_bytes()).hexdigest()
    url = f"https://release.example/{FILE.replace('+', '%2B')}"
    return Standalone(VERSION, url, sha256)


def test_the_setting_may_name_a_folder_or_the_file(
    pin: Standalone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pin.file == FILE
    with Progress("base", quiet=True) as progress:
        first = standalone.have(pin, progress)
        # kept, so the setting is not asked again; a damaged one is
        monkeypatch.setenv(standalone.SETTING, str(tmp_path / "nowhere"))
        assert standalone.have(pin, progress) == first
        first.write_bytes(first.read_bytes()[:-1])
        monkeypatch.setenv(standalone.SETTING, str(tmp_path / "builds" / FILE))
        assert standalone.have(pin, progress) == first
    assert hashlib.sha256(first.read_bytes()).hexdigest() == pin.sha256


def test_another_file_in_that_place_is_refused(pin: Standalone, tmp_path: Path) -> None:
    file = tmp_path / "builds" / FILE
    file.write_bytes(b"another")
    with Progress("base", quiet=True) as progress:
        with pytest.raises(ForgeError, match="has the SHA-256") as caught:
            standalone.have(pin, progress)
        assert caught.value.exit_code is Exit.FAULT
        file.unlink()
        with pytest.raises(ForgeError, match="is not there") as caught:
            standalone.have(pin, progress)
        assert caught.value.exit_code is Exit.CANNOT
    assert not list((tmp_path / "out").rglob("*.tar.gz"))
