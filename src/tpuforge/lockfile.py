"""Readers of the two digest formats that stages hand to each other.

A *lock* is a pip requirements file with one hash per package; a *digest table* is what
``sha256sum`` writes and ``sha256sum -c`` checks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import ROOT, read_regular, sha256_text

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CONTENT = re.compile(r"^# content sha256:(?P<digest>[0-9a-f]{64})$", re.MULTILINE)
# what ends a line for some readers and not for others: digests of text would not see the difference
_OTHER_BREAKS = re.compile("[\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_MOST_BYTES = 1 << 24
_RELOCK = "./forge lock"
_PIN = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;\\]+)")


@dataclass(frozen=True, order=True)
class Locked:
    """One package of a lock.

    Attributes:
        name: Canonical name (PEP 503), such as ``torch-tpu``.
        version: Version as it stands in the lock, local part included (``2.13.0+cpu``).
        sha256: Digest of the one wheel for the target platform, 64 hex digits.
    """

    name: str
    version: str
    sha256: str


def content_digest(text: str) -> str:
    """The number that the head of a lock gives for the lines below it.

    Args:
        text: A lock, with or without its head.
    """
    lines = text.splitlines(keepends=True)
    return sha256_text("".join(line for line in lines if not line.startswith("#")))


def read_text(path: Path) -> str:
    """The text of a lock or a digest table, byte for byte.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If it is not there.
        ForgeError: If it is no regular file, not UTF-8, or has line ends other than LF; exit
            code 1.
    """
    try:
        if path.exists() and not path.is_file():
            raise _bad(path, 1, "it is no regular file", _put_back(path))
        text = read_regular(path, _MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise _bad(path, 1, "it is not UTF-8 text", _put_back(path)) from error
    found = _OTHER_BREAKS.search(text)
    if found is not None:
        number = text.count("\n", 0, found.start()) + 1
        what = f"it has {found[0]!r} where lines end with a line feed alone"
        raise _bad(path, number, what, _put_back(path))
    return text


def _put_back(path: Path) -> str:
    return f"git checkout -- {_shown(path)}, or ./forge lock"


def _shown(path: Path) -> Path:
    """A file as a command in the checkout names it."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def read_lock(path: Path) -> list[Locked]:
    """Read a lock, strictly: every package pinned by ``==``, with exactly one SHA-256.

    Args:
        path: A lock, such as ``lock/runtime-py311.txt``.

    Returns:
        Its packages, in the order of the file.

    Raises:
        ForgeError: If the file is missing (exit code 2), any line is not a hashed pin, or the
            lines are not those that its head tells of; exit code 1.
    """
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise ForgeError(
            f"{path.name}: there is no such lock", expected=str(path), mend=_RELOCK
        ) from error
    found = parse_lock(path, text)
    told = _CONTENT.search(text)
    if told is not None and told["digest"] != content_digest(text):
        what = "it was edited by hand: its lines are not those its head tells"
        raise _bad(path, 1, what)
    return found


def parse_lock(path: Path, text: str) -> list[Locked]:
    """The packages of a lock that was read, whether or not its head tells of them.

    Args:
        path: Where it stands.
        text: From :func:`read_text`.

    Raises:
        ForgeError: If any line is not a hashed pin; exit code 1.
    """
    found: list[Locked] = []
    names: set[str] = set()
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not joined and (not line.strip() or line.lstrip().startswith("#")):
            continue
        start = start if joined else number
        joined += " " + line.strip().removesuffix("\\")
        if line.rstrip().endswith("\\"):
            continue
        package = _locked(path, start, joined.strip())
        if package.name in names:
            raise _bad(path, start, f"{package.name} stands there twice")
        names.add(package.name)
        found.append(package)
        joined = ""
    if joined:
        raise _bad(path, start, "the file ends in the middle of a line")
    if not found:
        raise _bad(path, 1, "it holds no package")
    return found


def _locked(path: Path, number: int, line: str) -> Locked:
    words = line.split()
    if not words:
        raise _bad(path, number, "a backslash with nothing after it")
    pin = _PIN.fullmatch(words[0])
    if pin is None:
        raise _bad(path, number, f"{words[0]!r} is not a pin of the form name==version")
    try:
        Version(pin["version"])
    except InvalidVersion as error:
        raise _bad(path, number, f"{pin['version']!r} is not a version") from error
    name = canonicalize_name(pin["name"])
    hashes = [word.removeprefix("--hash=") for word in words[1:]]
    if not hashes:
        raise _bad(path, number, f"{name} has no hash")
    if len(hashes) > 1:
        raise _bad(path, number, f"{name} has {len(hashes)} hashes instead of one")
    kind, _, value = hashes[0].partition(":")
    if not words[1].startswith("--hash=") or kind != "sha256" or not _DIGEST.fullmatch(value):
        raise _bad(path, number, f"{name} has {words[1]!r} instead of --hash=sha256:<64 hex>")
    return Locked(name, pin["version"], value)


def _bad(path: Path, number: int, what: str, mend: str = _RELOCK) -> ForgeError:
    return ForgeError(
        f"{path.name}, line {number}: {what}",
        expected="a readable file with one pinned, hashed package per line",
        mend=mend,
        exit_code=Exit.FAULT,
    )


def read_digests(path: Path) -> dict[str, str]:
    """Read a digest table in the format of ``sha256sum``.

    Args:
        path: Such as ``lock/torch-cpu.sha256`` or ``lock/debian/bookworm.lock``.

    Returns:
        File name to SHA-256 (64 hex digits). Lines that start with ``#`` are comments.

    Raises:
        ForgeError: If the file is missing (exit code 2) or a line is malformed (exit code 1).
    """
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise ForgeError(
            f"{path.name}: there is no such digest table", expected=str(path), mend="./forge lock"
        ) from error
    table: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        digest, gap, name = line[:64], line[64:66], line[66:]
        if not _DIGEST.fullmatch(digest) or gap not in ("  ", " *") or not name or "/" in name:
            raise ForgeError(
                f"{path.name}, line {number}: {line[:80]!r} is not a line of sha256sum",
                expected="<64 hex digits>, two spaces, a file name without folders",
                mend=f"git checkout -- {_shown(path)}, or write the line again with sha256sum",
                exit_code=Exit.FAULT,
            )
        if table.setdefault(name, digest) != digest:
            raise ForgeError(
                f"{path.name}, line {number}: a second digest for {name}",
                expected="one line per file",
                mend=f"remove the wrong line from {_shown(path)}",
                exit_code=Exit.FAULT,
            )
    return table
