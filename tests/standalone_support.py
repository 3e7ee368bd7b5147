"""A standalone build of CPython for tests, made of the Python that runs them.

It has the form of a release of python-build-standalone (``install_only_stripped``), with things in
it that a base must leave out. A Python of a machine may need libraries of that machine: then they
come along, and a script in the program's place tells the loader.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tarfile
from pathlib import Path

from process_support import call

VERSION = ".".join(str(part) for part in sys.version_info[:3])
SHORT = ".".join(str(part) for part in sys.version_info[:2])
FILE = f"cpython-{VERSION}+20260101-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz"
PINNED = re.compile(r'\[python\.standalone\."3\.12"\]\n(?:\w+ = .*\n){3}')
_LIBC = re.compile(r"lib(c|m|dl|pthread|util|rt)\.so|ld-linux")
# enough for a Python that starts, compiles and hashes
_FOLDERS = ("collections", "concurrent", "ctypes", "encodings", "importlib", "json", "re", "urllib")
_DYNAMIC = re.compile(r"_(struct|hashlib|json|ctypes|opcode|random|sha.*)\..*\.so|math\..*\.so")


def make_build(folder: Path) -> Path:
    """Write the build into a folder."""
    library = Path(os.__file__).parent
    real = Path(sys.executable).resolve()
    needed = [
        Path(form[1])
        for form in re.finditer(r"=> (/\S+)", call(["ldd", real], check=True).stdout)
        if not _LIBC.match(Path(form[1]).name)
    ]
    inner = f"python/lib/python{SHORT}"
    program = real.read_bytes()
    path = folder / FILE
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        if needed:
            home = f"/usr/local/lib/python{SHORT}/machine"
            for one in [real, *needed]:
                _put(tar, f"{inner}/machine/{one.name}", one.read_bytes(), 0o755)
            line = f'#!/bin/sh\nLD_LIBRARY_PATH={home} exec {home}/{real.name} "$@"\n'
            program = line.encode()
        _put(tar, f"python/bin/python{SHORT}", program, 0o755)
        _put(tar, "python/bin/pip3", b"#!/bin/sh\n", 0o755)
        _put(tar, "python/include/Python.h", b"", 0o644)
        _put(tar, f"{inner}/site-packages/pip/__init__.py", b"", 0o644)
        _put(tar, f"{inner}/test/bad.py", b"this is no Python", 0o644)
        _put(tar, f"{inner}/__pycache__/os.cpython-312.pyc", b"stale", 0o644)
        for source in sorted([*library.glob("*.py"), *library.glob("lib-dynload/*.so")]):
            if source.suffix == ".py" or _DYNAMIC.match(source.name):
                _put(tar, f"{inner}/{source.relative_to(library)}", source.read_bytes(), 0o600)
        for name in _FOLDERS:
            for source in sorted((library / name).rglob("*.py")):
                if "test" not in source.parts:
                    _put(tar, f"{inner}/{source.relative_to(library)}", source.read_bytes(), 0o644)
    return path


def _put(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.uid, entry.uname = len(data), mode, 1234, "somebody"
    entry.mtime = 1
    tar.addfile(entry, io.BytesIO(data))


def pins_with(text: str, sha256: str) -> str:
    """The pins, with this build instead of theirs, and a base that carries it."""
    table = f'[python.standalone."{SHORT}"]\nversion = "{VERSION}"\n'
    url = f"https://release.example/{FILE}"
    text, count = PINNED.subn(f'{table}url = "{url}"\nsha256 = "{sha256}"\n', text)
    assert count == 1
    text = text.replace('python = "3.12"\n', f'python = "{SHORT}"\n')
    suites = re.sub(rf'"({re.escape(SHORT)}|3\.12)" = "[^"]*", ', "", text)
    return suites.replace("suite = { ", f'suite = {{ "{SHORT}" = "trixie-py312", ', 1)
