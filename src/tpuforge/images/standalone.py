"""A standalone CPython for a base whose Debian suite has another Python: fetched, checked, trimmed.

The builds of python-build-standalone (the kind ``install_only_stripped``) hold a folder ``python``
with ``bin``, ``lib``, ``include`` and ``share``. A base takes the program and its standard library
into ``/usr/local``, and leaves out what Debian's own ``python3`` does not have either: pip, Tk,
headers, tests. The library is compiled in the base itself: the builds hold no byte code.

Facts, read off the project's own build script: since 2025 the program has libpython in itself, and
the shared one is there for extension modules that name it, as Debian's package ``libpython3.X`` is.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import quote, urlsplit

from tpuforge.archives import BAD_ARCHIVE
from tpuforge.console import Progress
from tpuforge.download import (
    Access,
    RefusedError,
    UnreachableError,
    Web,
    WrongBytesError,
    certificates,
)
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import atomic_file, out_dir, sha256_file, user_path
from tpuforge.pins import Standalone
from tpuforge.process import redact

SETTING = "TPUFORGE_PYTHON_STANDALONE"
PREFIX = "usr/local"
_TOP = "python/"
# folders of the standard library that no program needs at run time
_LEFT_OUT = frozenset(
    {
        *("__pycache__", "ensurepip", "idlelib", "lib2to3/tests", "site-packages", "test"),
        *("tkinter", "turtledemo"),
    }
)
_LEFT_OUT_FILE = re.compile(r"turtle\.py|lib-dynload/_tkinter\..*\.so|.*\.pyc|.*\.a")
_LARGEST = 1 << 29


def compile_command(version: str) -> list[str]:
    """What compiles the standard library, inside the base; it proves the program as well.

    The byte code names its source by hash, so that no time is in it.

    Args:
        version: The release, ``X.Y.Z``.
    """
    short = version.rpartition(".")[0]
    check = (
        "import compileall, sys; found = '%d.%d.%d' % sys.version_info[:3]; "
        f"found == {version!r} or sys.exit(f'this Python is {{found}}, not {version}'); "
        "from py_compile import PycInvalidationMode as Mode; "
        f"sys.exit(not compileall.compile_dir('/{PREFIX}/lib/python{short}', quiet=1, "
        "invalidation_mode=Mode.UNCHECKED_HASH))"
    )
    return [f"/{PREFIX}/bin/python{short}", "-I", "-B", "-c", check]


def have(pin: Standalone, progress: Progress) -> Path:
    """Bring the pinned build into ``out/python``, verified by its digest.

    Args:
        pin: The build.
        progress: Told what happens.

    Returns:
        The file.

    Raises:
        ForgeError: If it cannot be had (exit code 2), or other bytes came (exit code 1).
    """
    path = out_dir() / "python" / pin.sha256 / pin.file
    if path.is_file():
        if sha256_file(path) == pin.sha256:
            return path
        progress.note(f"{path.name} in out/python is damaged: fetching it again", loud=True)
        path.unlink()
    setting = os.environ.get(SETTING, "")
    with progress.step(f"fetching CPython {pin.version}, a standalone build"):
        if setting and urlsplit(setting).scheme not in ("http", "https"):
            _copy(user_path(setting), pin, path)
        else:
            place = f"{setting.rstrip('/')}/{quote(pin.file)}" if setting else pin.url
            _download(place, pin, path, progress)
    return path


def _copy(place: Path, pin: Standalone, path: Path) -> None:
    source = place / pin.file if place.is_dir() else place
    if not source.is_file():
        raise ForgeError(
            f"{SETTING} names {place}, and {pin.file} is not there",
            expected=f"the build with the SHA-256 {pin.sha256}",
            mend=f"put the file there, or unset {SETTING}",
        )
    with atomic_file(path) as target:
        shutil.copyfile(source, target)
        _check(sha256_file(target), str(source), pin)


def _download(url: str, pin: Standalone, path: Path, progress: Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # of one name, so that a run which was ended goes on where it stopped
    partial = path.with_name(f".{path.name}.partial")
    try:
        Web(Access(certificates=certificates())).download(
            url, partial, pin.sha256, on_bytes=progress.advance, stop=threading.Event()
        )
    except WrongBytesError as error:
        _check(str(error), redact(url), pin)
    except (UnreachableError, RefusedError) as error:
        raise ForgeError(
            f"CPython {pin.version} cannot be had from {redact(url)}: {error}",
            expected=f"{pin.file}, with the SHA-256 {pin.sha256}",
            mend=f"check the network, or let {SETTING} name a folder or an address that has it",
        ) from error
    partial.chmod(0o644)
    partial.rename(path)


def _check(found: str, where: str, pin: Standalone) -> None:
    if found != pin.sha256:
        raise ForgeError(
            f"{where} has the SHA-256 {found}",
            expected=f"{pin.sha256}, as lock/pins.toml says",
            mend="do not use it; look at who changed what: the file or the pin",
            exit_code=Exit.FAULT,
        )


def write_tar(build: Path, target: Path, version: str, epoch: int) -> None:
    """Write what a base takes from a build, ready to be unpacked at its root.

    Args:
        build: The build, verified.
        target: The tar to write, the same for the same build.
        version: Its release, ``X.Y.Z``.
        epoch: Modification time of every entry, seconds since 1970.

    Raises:
        ForgeError: If it is not such a build, or holds what no build has; exit code 1.
    """
    short = version.rpartition(".")[0]
    try:
        with (
            gzip.open(build) as packed,
            tempfile.TemporaryFile(dir=target.parent) as plain,
            _unpacked(packed, plain) as old,
            tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as new,
        ):
            members = dict(sorted(_chosen(old, build, short)))
            program = members.get(f"bin/python{short}")
            if program is None or f"lib/python{short}/os.py" not in members:
                raise _strange(build, f"it has no python{short} with a standard library")
            file = old.extractfile(program)
            # releases since 2025 have the library in the program; earlier ones name it by a path
            named = re.compile(rf"[\0/]libpython{re.escape(short)}\.so".encode())
            shared = file is not None and named.search(file.read()) is not None
            for name, member in members.items():
                if shared or not name.startswith("lib/libpython"):
                    _add(old, new, member, f"{PREFIX}/{name}", epoch)
            link = tarfile.TarInfo(f"{PREFIX}/bin/python3")
            link.type, link.linkname, link.mtime = tarfile.SYMTYPE, f"python{short}", epoch
            new.addfile(link)
    except (tarfile.TarError, gzip.BadGzipFile, *BAD_ARCHIVE) as error:
        raise _strange(build, str(error)) from error


def _unpacked(packed: gzip.GzipFile, plain: IO[bytes]) -> tarfile.TarFile:
    """The tar without its compression: its members are read in another order than they stand in."""
    shutil.copyfileobj(packed, plain)
    plain.seek(0)
    return tarfile.open(fileobj=plain)


def _chosen(tar: tarfile.TarFile, build: Path, short: str) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """What a base takes from a build, by its name below ``python/``."""
    library = f"lib/python{short}/"
    shared = re.compile(rf"lib/libpython{re.escape(short)}\.so[.\d]*")
    for member in tar:
        name = member.name.removeprefix("./").rstrip("/")
        if not name.startswith(_TOP) or ".." in name.split("/"):
            if name in (".", "python"):
                continue
            raise _strange(build, f"{name!r} is not below {_TOP}")
        name = name.removeprefix(_TOP)
        program = name == f"bin/python{short}"
        wanted = program or shared.fullmatch(name) is not None
        if name.startswith(library):
            wanted = not _left_out(name.removeprefix(library))
        if wanted:
            if not (member.isreg() or member.isdir() or member.issym()):
                raise _strange(build, f"{name!r} is no file, folder or link")
            if member.size > _LARGEST:
                raise _strange(build, f"{name!r} has {member.size:,} bytes")
            link = member.linkname
            if member.issym() and (link.startswith("/") or ".." in link.split("/")):
                # nothing of a library has to lie outside it
                raise _strange(build, f"{name!r} links to {link!r}")
            yield name, member


def _left_out(inner: str) -> bool:
    parts = inner.split("/")
    folders = {"/".join(parts[:count]) for count in range(1, len(parts) + 1)} | set(parts)
    static = parts[0].startswith("config-")
    return static or bool(folders & _LEFT_OUT) or bool(_LEFT_OUT_FILE.fullmatch(inner))


def _add(
    old: tarfile.TarFile, new: tarfile.TarFile, member: tarfile.TarInfo, name: str, epoch: int
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mtime = member.type, epoch
    entry.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    if member.issym():
        entry.linkname, entry.mode = member.linkname, 0o777
        new.addfile(entry)
        return
    if member.isdir():
        new.addfile(entry)
        return
    entry.size = member.size
    new.addfile(entry, old.extractfile(member) or io.BytesIO())


def _strange(build: Path, what: str) -> ForgeError:
    return ForgeError(
        f"{build.name} is not a standalone build of CPython: {what}",
        expected="a file of the kind install_only_stripped, with everything in a folder python",
        mend="see python.standalone in lock/pins.toml (docs/pins.md)",
        exit_code=Exit.FAULT,
    )
