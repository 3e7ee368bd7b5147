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
from packaging.version import Version

from tpuforge.lock.inputs import lock_path
from tpuforge.lock.names import CANONICAL, LOCK_DIR, is_cuda
from tpuforge.lock.resolver import Job, home_python
from tpuforge.lockfile import read_lock
from tpuforge.pins import Pins
from tpuforge.tables import Table, read

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
    top = read(path, "docs/lock.md")
    return top.ended([_conflict(pins, entry) for entry in top.tables("conflict")])


def _conflict(pins: Pins, entry: Table) -> Conflict:
    """One entry, checked: its name goes to pip, so it must be a name and nothing else."""
    made = Conflict(
        flavour=entry.text("flavour", CANONICAL),
        name=entry.text("name", CANONICAL),
        version=entry.version("version"),
        python=entry.text("python"),
        states=entry.text("states"),
        against=entry.text("against"),
        why=entry.text("why"),
    )
    if str(Version(made.version)) != made.version:
        raise entry.bad("version", made.version, str(Version(made.version)))
    try:
        address = made.line.url
    except InvalidRequirement as error:
        raise entry.bad("states", made.states, "a requirement (PEP 508)") from error
    if address is not None:
        raise entry.bad("states", made.states, "a requirement without an address")
    for key, value, known in (
        ("python", made.python, pins.pythons),
        ("against", made.against, tuple(pins.flavours)),
    ):
        if value not in known:
            raise entry.bad(key, value, f"one of {', '.join(known)}")
    return entry.ended(made)


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
