"""What cannot be locked beside the pins, as facts that can be checked: ``lock/conflicts.toml``.

An entry names a release, a line of its metadata and the lock that this line contradicts. From
files alone it is seen whether the line still contradicts the lock; the index, asked once for the
newest release, says whether the line is still there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from tpuforge.errors import Exit, ForgeError
from tpuforge.lock.inputs import lock_path
from tpuforge.lock.names import LOCK_DIR, is_canonical, is_cuda, is_line, read_toml
from tpuforge.lock.resolver import Job, home_python
from tpuforge.lockfile import read_lock
from tpuforge.pins import Pins

CONFLICTS_FILE = LOCK_DIR / "conflicts.toml"
# some publish for a newer glibc than the pins resolve for; what they state counts all the same
_ANY_GLIBC = "manylinux_2_43_x86_64"
_TIME_LIMIT_S = 120.0


@dataclass(frozen=True)
class Conflict:
    """One contradiction.

    Attributes:
        flavour: What people want, such as ``serve``.
        name: The package whose metadata contradicts a lock, by its canonical name.
        version: Its release: the newest one before the cutoff.
        python: The Python it was looked at for, ``X.Y``.
        states: The line of its metadata.
        against: The flavour whose lock it contradicts.
        why: What that means, in a few words.
    """

    flavour: str
    name: str
    version: str
    python: str
    states: str
    against: str
    why: str

    @property
    def line(self) -> Requirement:
        """The line of its metadata, parsed."""
        return Requirement(self.states)


def load_conflicts(pins: Pins, path: Path = CONFLICTS_FILE) -> list[Conflict]:
    """Read the conflicts, strictly.

    Args:
        pins: The pins.
        path: A file of conflicts.

    Raises:
        ForgeError: If it is missing (exit code 2), is no TOML, or an entry is not of the form
            (exit code 1).
    """
    try:
        top = read_toml(path)
        entries = top.pop("conflict", [])
        if top or not isinstance(entries, list):
            raise TypeError(f"{', '.join(top) or 'conflict'} is not of the form")
        found = [_conflict(pins, entry) for entry in entries]
    except FileNotFoundError as error:
        raise ForgeError(
            f"{path.name} is not there",
            expected="a list of conflicts, which may be empty",
            mend=f"git checkout -- lock/{path.name}",
        ) from error
    except (TypeError, ValueError, ForgeError) as error:
        raise ForgeError(
            f"{path.name}: {str(error).replace('Conflict.__init__() ', 'an entry ')}",
            expected=f"entries of {', '.join(one.name for one in dataclasses.fields(Conflict))}",
            mend=f"edit lock/{path.name}",
            exit_code=Exit.FAULT,
        ) from error
    return found


def _conflict(pins: Pins, entry: object) -> Conflict:
    """One entry, checked: its name goes to pip, so it must be a name and nothing else."""
    if not isinstance(entry, dict):
        raise TypeError(f"{entry!r} is no entry")
    made = Conflict(**entry)
    for key, value in entry.items():
        if not is_line(value):
            raise TypeError(f"{made.name} has a value that is no text in one line: {key}")
    for name in (made.name, made.flavour):
        if not is_canonical(name):
            raise TypeError(f"{name!r} is no canonical name")
    try:
        version = str(Version(made.version))
        requirement = made.line
    except (InvalidVersion, InvalidRequirement) as error:
        raise TypeError(str(error)) from error
    if version != made.version:
        raise TypeError(f"{made.name} has the version {made.version!r}, which reads {version}")
    if requirement.url is not None:
        raise TypeError(f"{made.name} states an address: {made.states}")
    pins.python(made.python)
    if made.against not in pins.flavours:
        raise TypeError(f"{made.name} is against {made.against!r}, which is no flavour")
    return made


def locked_version(conflict: Conflict) -> str | None:
    """The release that the contradicted lock holds; None if there is no such lock or package.

    Args:
        conflict: Which contradiction.
    """
    path = lock_path(conflict.against, conflict.python)
    if not path.exists():
        return None
    name = canonicalize_name(conflict.line.name)
    return next((p.version for p in read_lock(path) if p.name == name), None)


def over(conflict: Conflict) -> str:
    """Whether a contradiction is over, from files alone.

    Args:
        conflict: Which one.

    Returns:
        Why it is over; empty if it still stands.
    """
    line = conflict.line
    if is_cuda(line.name):
        return ""
    held = locked_version(conflict)
    if held is None:
        return f"lock/{lock_path(conflict.against, conflict.python).name} has no {line.name}"
    if line.specifier.contains(held, prereleases=True):
        return f"{line.name} {held} of {conflict.against} satisfies {conflict.states}"
    return ""


def moved(job: Job, conflicts: Sequence[Conflict], work: Path) -> str:
    """Whether the newest release still is the one that was looked at, and states the same.

    Args:
        job: The source, the pins and the Python; its flavour does not matter.
        conflicts: Contradictions of one package.
        work: The child's folder.

    Returns:
        What is different now; empty if nothing is.

    Raises:
        ForgeError: If the index cannot be asked.
    """
    name, python = conflicts[0].name, conflicts[0].python
    pins = dataclasses.replace(job.pins, platform=_ANY_GLIBC)
    target = dataclasses.replace(job, pins=pins, python=python).target()
    words: list[str | Path] = [home_python(), "-m", "pip", "install", "-q", "--dry-run"]
    words += ["--no-deps", "--ignore-installed", "--target", work / "nowhere", *target]
    words += ["--use-feature=fast-deps", "--report", work / "conflict.json"]
    words += ["--", name]
    done = job.source.run(words, _TIME_LIMIT_S, work)
    if done.code:
        job.source.refuse(done.output)
        return f"the index has no {name} for Python {python} any more"
    report = json.loads((work / "conflict.json").read_text(encoding="utf-8"))
    metadata: dict[str, Any] = report["install"][0]["metadata"]
    if metadata["version"] != conflicts[0].version:
        return f"{name} {metadata['version']} is out; {conflicts[0].version} was looked at"
    gone = [c.states for c in conflicts if c.states not in metadata.get("requires_dist", [])]
    return f"{name} {metadata['version']} does not state {', '.join(gone)}" if gone else ""
