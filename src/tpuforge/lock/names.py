"""Which names may not enter a lock: ``lock/names.toml``, and all of the CUDA world.

An exception names one package and one flavour, says why, and ends on a day: from then on the lock
is bad, so that somebody looks whether it is still needed. There are two kinds. A package that is
*allowed* stands in the lock. One that is *left out* does not, although a package of the lock
requires it: its imports were shown to do without.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import ROOT

LOCK_DIR = ROOT / "lock"
NAMES_FILE = LOCK_DIR / "names.toml"
_ALLOWED = {"name": str, "flavour": str, "until": date, "why": str}
_LEFT_OUT = {**_ALLOWED, "by": str}
_CANONICAL = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
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
    return isinstance(name, str) and _CANONICAL.fullmatch(name) is not None


def is_line(text: object) -> bool:
    """Whether something is one line of words.

    Args:
        text: Anything that a file of a person's holds.
    """
    return isinstance(text, str) and bool(text.strip()) and text.isprintable()


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file that people write by hand.

    Args:
        path: Such as ``lock/names.toml``.

    Raises:
        FileNotFoundError: If it is not there.
        ValueError: If it is no regular file, not UTF-8 or no TOML.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")
    try:
        return tomllib.loads(path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8 text") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


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
class LeftOut:
    """One package that a lock does not hold, although something in it requires it.

    Attributes:
        name: Canonical name of a CUDA package.
        flavour: The flavour whose lock leaves it out.
        by: Canonical name of the one package that requires it.
        until: The last day.
        why: What was proven about doing without it.
    """

    name: str
    flavour: str
    by: str
    until: date
    why: str


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


def ended(one: Allowed | LeftOut, today: date | None = None) -> str:
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
    try:
        top = read_toml(path)
    except FileNotFoundError as error:
        raise ForgeError(
            f"{path.name} is not there",
            expected="names that are refused or allowed",
            mend=f"git checkout -- lock/{path.name}",
        ) from error
    except ValueError as error:
        raise _bad(path, str(error)) from error
    refused = top.pop("refused", {})
    allowed, left_out = top.pop("allowed", []), top.pop("left_out", [])
    lists = isinstance(allowed, list) and isinstance(left_out, list)
    if top or not isinstance(refused, dict) or not lists:
        raise _bad(path, f"{', '.join(top) or 'a table'} is not of the form")
    for name, why in refused.items():
        if not is_canonical(name) or not is_line(why):
            raise _bad(path, f"{name} is no canonical name with a reason")
    for entry in allowed:
        _check(path, entry, _ALLOWED)
    for entry in left_out:
        _check(path, entry, _LEFT_OUT)
        if not is_canonical(entry["by"]):
            raise _bad(path, f"{entry['by']} is no canonical name")
    names = Names(
        refused,
        tuple(Allowed(**entry) for entry in allowed),
        tuple(LeftOut(**entry) for entry in left_out),
    )
    for one in names.left_out:
        if any((one.name, one.flavour) == (other.name, other.flavour) for other in names.allowed):
            raise _bad(path, f"{one.name} is allowed in {one.flavour} and left out of it")
        if sum((one.name, one.flavour) == (o.name, o.flavour) for o in names.left_out) > 1:
            raise _bad(path, f"{one.name} is left out of {one.flavour} twice: one package alone")
    return names


def _check(path: Path, entry: object, form: Mapping[str, type]) -> None:
    if (
        not isinstance(entry, dict)
        or {key: type(value) for key, value in entry.items()} != form
        or not is_line(entry["why"])
        or not is_canonical(entry["flavour"])
    ):
        raise _bad(path, f"the exception {entry} is not of the form")
    if not is_canonical(entry["name"]) or not is_cuda(entry["name"]):
        raise _bad(path, f"{entry['name']} is no canonical name of a CUDA package")


def _bad(path: Path, what: str) -> ForgeError:
    return ForgeError(
        f"{path.name}: {what}",
        expected="[refused] with name = reason; [[allowed]] with name, flavour, until (a day), "
        "why; [[left_out]] with these and by",
        mend=f"edit lock/{path.name}",
        exit_code=Exit.FAULT,
    )
