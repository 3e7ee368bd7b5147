"""Where things stand, and the few file operations that must never go half way.

Everything generated lives under ``out/``. A finished file appears there by rename only, so a
reader sees the old bytes or the new ones. ``flock`` guards what two runs must not do at once: the
kernel drops it when a process dies, so a killed run never leaves a stale lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from tpuforge.errors import ForgeError

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: the folder that holds ``lock/``, ``images/`` and ``smoke/``."""

_CHUNK = 1 << 20
_SCRATCH = "tpuforge-scratch-"
_SURROGATE = re.compile("[\ud800-\udfff]")


def out_dir() -> Path:
    """The folder of everything generated: ``out/`` in the checkout, or ``TPUFORGE_OUT``.

    Returns:
        An absolute path; the folder exists afterwards.
    """
    path = Path(os.environ.get("TPUFORGE_OUT") or ROOT / "out").absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


def python_path() -> str:
    """``PYTHONPATH`` of a module of this project in a process of its own: what this one has.

    Its Python may have the packages from elsewhere than from a folder of its own, as in a rebuild
    by another user (``reproduce``).
    """
    packages = [path for path in sys.path if path.endswith("site-packages")]
    return os.pathsep.join([str(ROOT / "src"), *packages])


def user_path(text: str | Path) -> Path:
    """A path as a person writes it, made absolute; ``~`` and ``~name`` are home folders.

    Args:
        text: The path.

    Raises:
        ForgeError: If it begins with the home folder of nobody.
    """
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ForgeError(
            f"{text}: there is no home folder of that name",
            expected="a path",
            mend="write it in full, from the first slash on",
        ) from error


def home() -> Path | None:
    """The home folder; None for a user without one, such as a bare number in a container."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a regular file that a stranger may have put there.

    Args:
        path: The file, or a link to it.
        most: The most bytes that it may have.

    Raises:
        OSError: If it cannot be read, is a pipe or a device, or has more bytes.
        ValueError: If its name cannot be that of a file.
    """
    # without waiting for the other end of a pipe
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
    return data


def sha256_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """The SHA-256 of a file.

    Args:
        path: The file to read.
        on_bytes: Called with the number of bytes after each chunk, for a progress display.

    Returns:
        64 lower-case hex digits.

    Raises:
        OSError: If the file cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return digest.hexdigest()


def sha256_text(*parts: str) -> str:
    """One SHA-256 over texts, with their borders: the key of "same inputs".

    Args:
        *parts: Any texts; order matters.

    Returns:
        64 lower-case hex digits.
    """
    digest = hashlib.sha256()
    for part in parts:
        # an argument that is not UTF-8 has surrogates in it
        data = part.encode("utf-8", "surrogatepass")
        digest.update(f"{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


def sha256_tree(*roots: Path) -> str:
    """One SHA-256 over the names, executable bits and bytes of all files below some paths.

    Times, owners and other mode bits do not count, so two checkouts of one commit agree.

    Args:
        *roots: Files or folders; names are taken relative to each one's parent.

    Returns:
        64 lower-case hex digits.

    Raises:
        OSError: If something cannot be read.
    """
    parts: list[str] = []
    for root in roots:
        files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
        for path in files:
            if "__pycache__" in path.parts:
                continue
            executable = "x" if path.stat().st_mode & 0o100 else "-"
            name = path.relative_to(root.parent).as_posix()
            parts += [name, executable, sha256_file(path)]
    return sha256_text(*parts)


@contextlib.contextmanager
def atomic_file(path: Path, *, mode: int = 0o644) -> Iterator[Path]:
    """Write a file beside its place; sync and rename it there when the block succeeds.

    Args:
        path: The final path; its folder is made if missing.
        mode: Permission bits of the finished file.

    Yields:
        A temporary path on the same file system, to be written by the caller.

    Raises:
        OSError: If writing fails; the final path is then untouched and the temporary file gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:80]}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_dir(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: str | bytes, *, mode: int = 0o644) -> None:
    """Put bytes or UTF-8 text at a path, all or nothing.

    What of a text is not UTF-8, such as bytes of a file name in it, is written as escapes.

    Args:
        path: The final path.
        data: The content.
        mode: Permission bits of the finished file.

    Raises:
        OSError: If writing fails; the final path is then untouched.
    """
    with atomic_file(path, mode=mode) as temporary:
        if isinstance(data, str):
            data = data.encode("utf-8", "backslashreplace")
        temporary.write_bytes(data)


def json_text(value: Any) -> str:
    """A JSON document with sorted keys, as UTF-8 can hold it.

    Args:
        value: Anything :mod:`json` can write. Bytes of an argument or a file name that are not
            UTF-8 become escapes within the text, a backslash, an x and two hex digits.
    """
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    # they stand within strings alone, where a backslash is written twice
    return _SURROGATE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    # PEP 383: U+DC80 to U+DCFF stand for bytes
    if 0xDC80 <= number <= 0xDCFF:
        return f"\\\\x{number - 0xDC00:02x}"
    return f"\\\\u{number:04x}"


def write_json(path: Path, value: Any) -> None:
    """Put a JSON document at a path, all or nothing, with sorted keys.

    Args:
        path: The final path.
        value: Anything :mod:`json` can write.
    """
    write_atomic(path, json_text(value) + "\n")


def read_json(path: Path) -> Any:
    """The JSON document at a path, or None where there is none that can be read.

    Args:
        path: A file that this project wrote; a damaged one counts as missing.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def parse_json(data: str | bytes) -> Any:
    """The JSON that a stranger wrote, such as a registry.

    Args:
        data: The document.

    Raises:
        ValueError: If it is none, or is nested so deeply that reading it takes the stack.
    """
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _sync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _holder(file: IO[str]) -> str:
    """Who holds a lock; it writes its name just after it has the lock, over an older one."""
    for _ in range(20):
        file.seek(0)
        text = file.read().strip()
        if text and Path("/proc", text.rpartition(" ")[2]).exists():
            return text
        time.sleep(0.05)
    return "another run"


@contextlib.contextmanager
def exclusive(name: str, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold ``out/.locks/NAME`` so that only one run does this work; wait for another's end.

    Args:
        name: What is guarded, such as ``wheelhouse``.
        on_wait: Called once, with who holds the lock, before waiting.

    Raises:
        ForgeError: If the lock file cannot be made.
    """
    path = out_dir() / ".locks" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ForgeError(
            f"the lock file {path} cannot be made: {error.strerror}",
            expected="a writable out folder",
            mend="free some space, or set TPUFORGE_OUT to a folder you can write",
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait(_holder(file))
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


@contextlib.contextmanager
def scratch_dir() -> Iterator[Path]:
    """A folder for this block, outside ``out/``: it may hold a secret, and that one is handed on.

    It is locked, so that one that a killed run left behind is known: that goes here first.

    Yields:
        A folder that only this user can read; it is gone afterwards.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):
            handle = _hold(left, fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
            os.close(handle)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        # another run may take it for left behind before the lock is on it
        with contextlib.suppress(FileNotFoundError):
            handle = _hold(folder)
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _hold(folder: Path, flags: int = 0) -> int:
    """Lock a scratch folder of this user, until what this gives is closed."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "another user's", str(folder))
        fcntl.flock(handle, fcntl.LOCK_EX | flags)
        folder.stat()
    except BaseException:
        os.close(handle)
        raise
    return handle
