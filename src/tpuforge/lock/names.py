"""Which names may not enter a lock: ``lock/names.toml``, and all of the CUDA world.

An exception names one package and one flavour, says why, and ends on a day: from then on the lock
is bad, so that somebody looks whether it is still needed. There are two kinds. A package that is
*allowed* stands in the lock. One that is *left out* does not, although a package of the lock
requires it: its imports were shown to do without.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

from packaging.utils import canonicalize_name

from tpuforge.paths import ROOT
from tpuforge.tables import Table, read

LOCK_DIR = ROOT / "lock"
NAMES_FILE = LOCK_DIR / "names.toml"
CANONICAL = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
"""A package name as PEP 503 writes it."""

_CUDA = re.compile(
    r"(nvidia|cupy|triton|pytorch-triton)(-.*|\d.*)?"  # nvidia-nccl-cu12, cupy-cuda12x, triton
    r"|(.*-)?cuda[0-9a-z]*(-.*)?"  # cuda-bindings, jax-cuda13-plugin
    r"|.*-cu1\d(-.*)?"  # cudf-cu12
)


def is_canonical(name: object) -> bool:
    """Whether something is a package name as PEP 503 writes it, and nothing else.

    Args:
        name: Anything that a file of a person's holds.
    """
    return isinstance(name, str) and CANONICAL.fullmatch(name) is not None


def is_line(text: object) -> bool:
    """Whether something is one line of words.

    Args:
        text: Anything that a file of a person's holds.
    """
    return isinstance(text, str) and bool(text.strip()) and text.isprintable()


def is_cuda(name: str) -> bool:
    """Whether a package belongs to the CUDA world, by its name.

    Args:
        name: A package name in any spelling.
    """
    return _CUDA.fullmatch(canonicalize_name(name)) is not None


@dataclass(frozen=True)
class Allowed:
    """One exception from "no CUDA": a package that a lock may hold.

    Attributes:
        name: Canonical name of a CUDA package.
        flavour: The flavour that may hold it.
        until: The last day.
        why: Why it may.
    """

    name: str
    flavour: str
    until: date
    why: str


@dataclass(frozen=True)
class LeftOut(Allowed):
    """One package that a lock does not hold, although something in it requires it.

    Attributes:
        by: Canonical name of the one package that requires it.
    """

    by: str


@dataclass(frozen=True)
class Names:
    """What is said about names.

    Attributes:
        refused: Canonical name to reason.
        allowed: Exceptions from "no CUDA".
        left_out: What locks do not hold, although it is required.
    """

    refused: Mapping[str, str]
    allowed: tuple[Allowed, ...]
    left_out: tuple[LeftOut, ...]

    def left_out_of(self, flavour: str) -> list[LeftOut]:
        """What the lock of a flavour leaves out, by name.

        Args:
            flavour: Such as ``serve``.
        """
        found = [one for one in self.left_out if one.flavour == flavour]
        return sorted(found, key=lambda one: (one.name, one.by))

    def refusal(self, name: str, flavour: str, today: date | None = None) -> str:
        """Why a package may not enter the lock of a flavour.

        Args:
            name: Its canonical name.
            flavour: Such as ``runtime``.
            today: The day that exceptions are held against; the present one, in UTC, if not given.

        Returns:
            The reason; empty if it may.
        """
        if name in self.refused:
            return self.refused[name]
        if not is_cuda(name):
            return ""
        for one in self.allowed:
            if (one.name, one.flavour) == (name, flavour):
                return ended(one, today)
        return "it is a CUDA package"


def ended(one: Allowed, today: date | None = None) -> str:
    """Whether an exception is over.

    Args:
        one: Which one.
        today: The day it is held against; the present one, in UTC, if not given.

    Returns:
        When it ended; empty if it still holds.
    """
    over = (today or datetime.now(UTC).date()) > one.until
    return f"its exception ended on {one.until}" if over else ""


@functools.cache
def load_names(path: Path = NAMES_FILE) -> Names:
    """Read the names, strictly.

    Args:
        path: A file of names.

    Raises:
        ForgeError: If it is missing (exit code 2), is no TOML, or an entry is not of the form
            (exit code 1).
    """
    top = read(path, "docs/lock.md")
    refused = {}
    if "refused" in top.names():
        table = top.table("refused")
        for name in table.names():
            if not is_canonical(name):
                raise table.bad(name, "a name", "one in canonical form, such as torch-tpu")
            refused[name] = table.text(name)
    allowed = [one.ended(Allowed(*_exception(one))) for one in top.tables("allowed")]
    taken = {(one.name, one.flavour) for one in allowed}
    left_out = []
    for entry in top.tables("left_out"):
        one = entry.ended(LeftOut(*_exception(entry), entry.text("by", CANONICAL)))
        if (one.name, one.flavour) in taken:
            expected = "each package once for a flavour: allowed, or left out for one package alone"
            raise entry.bad("name", f"{one.name} for {one.flavour} again", expected)
        taken.add((one.name, one.flavour))
        left_out.append(one)
    return top.ended(Names(refused, tuple(allowed), tuple(left_out)))


def _exception(entry: Table) -> tuple[str, str, date, str]:
    name = entry.text("name", CANONICAL)
    if not is_cuda(name):
        raise entry.bad("name", name, "the name of a CUDA package")
    flavour = entry.text("flavour", CANONICAL)
    return name, flavour, entry.day("until"), entry.text("why")
