"""A torch_tpu wheel of one's own in the place of the locked one: ``bake --wheel PATH``.

The locks in ``lock/`` stay as they are. The image gets a lock of its own, the *overlay*: the locked
packages with the given wheel's version and digest, and everything that tells what is in the image
says so. A wheel that does not go with the rest of the lock is refused before anything is baked.

Formats: wheel names and tags (PEP 427, PEP 425), core metadata (PEP 566).
"""

from __future__ import annotations

import errno
import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from tpuforge.archives import BAD_ARCHIVE, is_damage, read_member
from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.lockfile import Locked, content_digest
from tpuforge.paths import read_json, sha256_file, user_path
from tpuforge.target import environment, fitting

NAME = "torch-tpu"
_AUDIT = "tpuforge.audit/1"
_COMMIT = "torch_tpu/include/XLA_COMMIT"
_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")
_TEXT_MOST = 4 << 20
_HEX40 = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Wheel:
    """A wheel that was given.

    Attributes:
        path: Where it lies.
        version: Its version.
        sha256: Its digest.
        requires_python: The Pythons it is for; empty for any.
        requires: Its requirements, as its metadata state them.
        xla_commit: The XLA commit that it records.
        audit: What its audit came to, in a few words; empty for well.
    """

    path: Path
    version: str
    sha256: str
    requires_python: str
    requires: tuple[str, ...]
    xla_commit: str
    audit: str

    @property
    def file(self) -> str:
        """Its file name."""
        return self.path.name

    @property
    def locked(self) -> Locked:
        """It as an entry of a lock."""
        return Locked(NAME, self.version, self.sha256)

    @property
    def tag(self) -> str:
        """What it adds to the tag of an image, so that no such image is taken for a pinned one."""
        return f"wheel.{self.sha256[:8]}"


def read_wheel(path: Path, progress: Progress, *, unaudited: bool) -> Wheel:
    """Read a wheel and see that it is one of torch_tpu, and whole enough to tell what it is.

    Args:
        path: The file.
        progress: Told what happens.
        unaudited: Take it although its audit found errors.

    Returns:
        What it says of itself.

    Raises:
        ForgeError: If it cannot be read (exit code 2), or is not what is asked for (1).
    """
    path = user_path(path)
    try:
        # a path to nothing first: that is no fault of a wheel, whatever its name
        path.lstat()
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise _not_one(path, f"its name is not that of a wheel: {error}") from error
    try:
        if path.exists() and not path.is_file():
            # the open of a pipe would wait for its other end
            raise OSError(errno.ENOTSUP, "not a regular file")
        with progress.step(f"reading {path.name}", path.stat().st_size):
            digest = sha256_file(path, progress.advance)
        with zipfile.ZipFile(path) as archive:
            inside = [one for one in archive.namelist() if _METADATA.fullmatch(one)]
            if len(inside) != 1:
                raise _not_one(path, f"it has {len(inside)} METADATA files instead of one")
            text = read_member(archive, inside[0], _TEXT_MOST).decode("utf-8", "replace")
            commits = archive.namelist().count(_COMMIT)
            line = read_member(archive, _COMMIT, _TEXT_MOST) if commits else b""
            commit = line.decode("ascii", "replace").strip()
    except OSError as error:
        if is_damage(error):
            raise _not_one(path, f"it is not a zip archive that can be read: {error}") from error
        raise _unreadable(path, error) from error
    except BAD_ARCHIVE as error:
        raise _not_one(path, f"it is not a zip archive that can be read: {error}") from error
    fields = HeaderParser().parsestr(text)
    stated, its = str(fields["Name"]), str(fields["Version"])
    if name != NAME or canonicalize_name(stated) != NAME:
        raise _not_one(path, f"it is a wheel of {stated}, and named one of {name}")
    if its != str(version) and not _same(its, version):
        raise _not_one(path, f"its name says version {version}, its metadata {its}")
    if not _HEX40.fullmatch(commit):
        raise _not_one(path, f"{_COMMIT} holds {commit[:60]!r} instead of an XLA commit")
    return Wheel(
        path,
        str(version),
        digest,
        str(fields.get("Requires-Python") or ""),
        tuple(str(one) for one in fields.get_all("Requires-Dist", [])),
        commit,
        _audited(path, digest, allowed=unaudited),
    )


def _same(text: str, version: Version) -> bool:
    try:
        return Version(text) == version
    except InvalidVersion:
        return False


def _unreadable(path: Path, error: OSError) -> ForgeError:
    return ForgeError(
        f"{path} cannot be read: {error.strerror or error}",
        expected="the torch_tpu wheel that the image is to hold",
        mend="name a file: ls out/wheels/*.whl",
    )


def _not_one(path: Path, why: str) -> ForgeError:
    return ForgeError(
        f"{path.name} is no wheel of torch_tpu that an image can hold: {why}",
        expected="a torch_tpu wheel, such as build_wheel leaves in out/wheels",
        mend="./forge build_wheel, then: ./forge bake --wheel out/wheels/FILE.whl",
        exit_code=Exit.FAULT,
    )


def _audited(path: Path, digest: str, *, allowed: bool) -> str:
    """What the audit beside a wheel says against it; an error unless that is allowed."""
    beside = path.with_name(f"{path.name}.audit.json")
    if not beside.is_file():
        return f"it was not audited: there is no {beside.name} beside it"
    record = read_json(beside)
    mend = f"./forge audit_wheel {path}; or take it as it is: --unaudited"
    whole = isinstance(record, dict) and record.get("schema") == _AUDIT
    wheel = record.get("wheel") if whole else None
    if not isinstance(wheel, dict) or not isinstance(record.get("ok"), bool):
        why = f"{beside.name} is damaged"
    elif wheel.get("sha256") != digest:
        why = f"{beside.name} is the audit of a file with SHA-256 {wheel.get('sha256')}"
    elif record["ok"]:
        return ""
    else:
        found = record.get("findings")
        errors = [
            f"{one.get('rule')}: {one.get('what')}"
            for one in (found if isinstance(found, list) else [])
            if isinstance(one, dict) and one.get("severity") == "error"
        ]
        why = "its audit found errors: " + "; ".join(errors[:3])
    if allowed:
        return f"{why} (taken with --unaudited)"
    raise ForgeError(
        f"{path.name} is not fit for an image: {why}",
        expected="an audit of this very file, without errors",
        mend=mend,
        exit_code=Exit.FAULT,
    )


def check_fit(wheel: Wheel, python: str, glibc: str, lock: Sequence[Locked], name: str) -> None:
    """See that a wheel goes with a Python, a base and the rest of a lock.

    Args:
        wheel: The wheel.
        python: ``X.Y`` of the image.
        glibc: glibc's release in the base, such as ``2.36``.
        lock: The packages of the lock that it is to join.
        name: The lock's file name, for messages.

    Raises:
        ForgeError: If it does not; every reason is named. Exit code 1.
    """
    wrong: list[str] = []
    tags = parse_wheel_filename(wheel.file)[3]
    if not tags & fitting(python, glibc):
        shown = ", ".join(sorted(map(str, tags)))
        wrong.append(f"it is for {shown}, the image has Python {python} and glibc {glibc}")
    try:
        if not SpecifierSet(wheel.requires_python).contains(f"{python}.0", prereleases=True):
            wrong.append(f"it wants Python {wheel.requires_python}, the image has {python}")
    except InvalidSpecifier:
        wrong.append(f"its Requires-Python is {wheel.requires_python!r}")
    wrong += _unmet(wheel.requires, python, {one.name: one.version for one in lock})
    if wrong:
        raise ForgeError(
            f"{wheel.file} does not go with {name}:\n" + "\n".join(f"  {line}" for line in wrong),
            expected=f"a wheel for Python {python} whose requirements {name} meets",
            mend=f"build it for this Python (./forge build_wheel --python {python}); or lock what "
            "it wants: edit lock/pins.toml, then ./forge lock and ./forge fetch_wheel",
            exit_code=Exit.FAULT,
        )


def _unmet(requires: Iterable[str], python: str, locked: dict[str, str]) -> list[str]:
    """The requirements that a lock does not meet, one line each."""
    here = {**environment(python), "extra": ""}
    wrong = []
    for line in requires:
        try:
            wanted = Requirement(line)
        except InvalidRequirement as error:
            wrong.append(f"it requires {line!r}, which cannot be read: {error}")
            continue
        if wanted.marker is not None and not wanted.marker.evaluate(here):
            continue
        version = locked.get(canonicalize_name(wanted.name))
        if version is None:
            wrong.append(f"it requires {line}, which the lock does not hold")
        elif not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"it requires {line}, the lock has {version}")
    return wrong


def overlay_lock(wheel: Wheel, lock: Sequence[Locked], name: str, sha256: str) -> str:
    """The lock of an image that holds a given wheel.

    Args:
        wheel: The wheel.
        lock: The packages of the lock that it joins.
        name: That lock's file name.
        sha256: That lock's digest.

    Returns:
        A lock in the form of those in ``lock/``: the same packages in the same order.
    """
    before = next(one for one in lock if one.name == NAME)
    body = "".join(
        f"{one.name}=={one.version} \\\n    --hash=sha256:{one.sha256}\n"
        for one in overlaid(wheel, lock)
    )
    head = (
        f"# Overlay of {name}, sha256:{sha256}; what it is: docs/bake.md.\n"
        f"# In the place of {NAME}=={before.version}, sha256:{before.sha256}: {wheel.file}\n"
    )
    return f"{head}# content sha256:{content_digest(body)}\n{body}"


def overlaid(wheel: Wheel, lock: Sequence[Locked]) -> list[Locked]:
    """The packages of a lock with a given wheel in the place of the locked one.

    Args:
        wheel: The wheel.
        lock: The packages of the lock.
    """
    return [wheel.locked if one.name == NAME else one for one in lock]
