"""Which names may not enter a lock: ``lock/names.toml``, and all of the CUDA world.

An exception names one package and one flavour, says why, and ends on a day: from then on the lock
is bad, so that somebody looks whether it is still needed.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from tpuforge.errors import Exit, ForgeError
from tpuforge.lock.inputs import LOCK_DIR, is_cuda

NAMES_FILE = LOCK_DIR / "names.toml"
_FORM = {"name": str, "flavour": str, "until": date, "why": str}


@dataclass(frozen=True)
class Allowed:
    """One exception.

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
class Names:
    """What is said about names.

    Attributes:
        refused: Canonical name to reason.
        allowed: Exceptions from "no CUDA".
    """

    refused: Mapping[str, str]
    allowed: tuple[Allowed, ...]

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
                over = (today or datetime.now(UTC).date()) > one.until
                return f"its exception ended on {one.until}" if over else ""
        return "it is a CUDA package"


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
        top = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ForgeError(
            f"{path.name} is not there",
            expected="names that are refused or allowed",
            mend=f"git checkout -- lock/{path.name}",
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise _bad(path, str(error)) from error
    refused, entries = top.pop("refused", {}), top.pop("allowed", [])
    if top or not isinstance(refused, dict) or not isinstance(entries, list):
        raise _bad(path, f"{', '.join(top) or 'a table'} is not of the form")
    for name, why in refused.items():
        if name != canonicalize_name(name) or not isinstance(why, str) or not why:
            raise _bad(path, f"{name} is no canonical name with a reason")
    return Names(refused, tuple(_allowed(path, entry) for entry in entries))


def _allowed(path: Path, entry: dict[str, Any]) -> Allowed:
    if {key: type(value) for key, value in entry.items()} != _FORM or not entry["why"]:
        raise _bad(path, f"the exception {entry} is not of the form")
    if entry["name"] != canonicalize_name(entry["name"]) or not is_cuda(entry["name"]):
        raise _bad(path, f"{entry['name']} is no canonical name of a CUDA package")
    return Allowed(**entry)


def _bad(path: Path, what: str) -> ForgeError:
    return ForgeError(
        f"{path.name}: {what}",
        expected="[refused] with name = reason; [[allowed]] with name, flavour, until (a day), why",
        mend=f"edit lock/{path.name}",
        exit_code=Exit.FAULT,
    )
