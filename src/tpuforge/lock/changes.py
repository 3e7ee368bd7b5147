"""Upgrades: the moments in the pins that move, and what changed as the text of a pull request.

Two kinds of moment stand in the pins: ``resolver.cutoff`` holds for every package, and
``[resolver.later]`` gives single packages, upgraded alone, a later one. Both are inputs like any
other: whoever resolves from the same pins gets the same locks.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from packaging.utils import canonicalize_name

from tpuforge.errors import Exit, ForgeError
from tpuforge.lock import provenance
from tpuforge.lock.compatibility import table
from tpuforge.lock.inputs import constraints, lock_path
from tpuforge.lock.provenance import as_moment
from tpuforge.pins import PINS_FILE, Pins

_CUTOFF = re.compile(r"^cutoff = \"[^\"]*\"$", re.MULTILINE)
_LATER = re.compile(r"^\n*\[resolver\.later\]\n(?:[^\[\n][^\n]*\n)*", re.MULTILINE)
_RESOLVER = re.compile(r"^\[resolver\]\n(?:[^\[\n][^\n]*\n)*", re.MULTILINE)

Held = Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]]
"""Provenance by package name, of each flavour and Python."""


def held(locks: Sequence[tuple[str, str]]) -> Held:
    """What some locks hold now.

    Args:
        locks: Flavours and Pythons.
    """
    return {target: provenance.read(*target).packages for target in locks}


def with_moments(text: str, cutoff: datetime, later: Mapping[str, datetime]) -> str:
    """The text of the pins with other moments, and everything else as it was.

    Args:
        text: The pins.
        cutoff: The cutoff of every package.
        later: The cutoffs of single packages.

    Raises:
        ForgeError: If the text has another form than this project writes.
    """
    text, count = _CUTOFF.subn(f'cutoff = "{as_moment(cutoff)}"', _LATER.sub("", text))
    tables = len(_RESOLVER.findall(text))
    if count != 1 or tables != 1:
        raise ForgeError(
            f"{PINS_FILE.name} has {tables} table(s) [resolver] with {count} line(s) cutoff = …",
            expected="one of each",
            mend=f"edit {PINS_FILE.name} by hand",
        )
    if not later:
        return text
    lines = "".join(f'{name} = "{as_moment(when)}"\n' for name, when in sorted(later.items()))
    what = "# Upgraded alone: for these, files count that were uploaded before their own moment.\n"
    return _RESOLVER.sub(lambda found: f"{found[0]}\n[resolver.later]\n{what}{lines}", text)


def check_names(pins: Pins, names: Collection[str], locked: Collection[str]) -> list[str]:
    """The packages to upgrade alone, in canonical form.

    Args:
        pins: The pins.
        names: What the user wrote.
        locked: The names in all locks.

    Raises:
        ForgeError: If a package is in no lock, or its version is decided by the pins.
    """
    found = []
    for name in names:
        canonical = canonicalize_name(name)
        decided = constraints(pins, pins.default_python).get(canonical)
        if decided is not None:
            key = canonical.replace("-", "_")
            raise ForgeError(
                f"the version of {canonical} stands in the pins: {decided}",
                expected="a package whose version the resolver chooses",
                mend=f"edit {key}.version in lock/pins.toml, then: ./forge lock",
                exit_code=Exit.CANNOT,
            )
        if canonical not in locked:
            near = difflib.get_close_matches(canonical, sorted(locked), n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ForgeError(
                f"no lock holds {canonical}{hint}",
                expected="a package of a lock, or a day, YYYY-MM-DD, for all of them",
                mend="cat lock/*.txt shows the packages; a new one goes into lock/<flavour>.in",
            )
        found.append(str(canonical))
    return sorted(set(found))


def pull_request(before: Held, after: Held, title: str, means: str) -> str:
    """The text of a pull request.

    Args:
        before: What the locks held.
        after: What they hold now; the same flavours and Pythons.
        title: Its title.
        means: What the change of the pins means, in a sentence.

    Returns:
        Markdown; one row for each package and change, with the locks that have it.
    """
    found: dict[tuple[str, str, str], list[tuple[str, Any, Any]]] = {}
    for target, now in after.items():
        was = before.get(target, {})
        for name in sorted(was.keys() | now.keys()):
            old, new = was.get(name, {}), now.get(name, {})
            if old.get("sha256") == new.get("sha256"):
                continue
            key = (name, old.get("version", ""), new.get("version", ""))
            found.setdefault(key, []).append((lock_path(*target).stem, old, new))
    rows = []
    for (name, version_before, version_now), places in sorted(found.items()):
        _, old, new = places[0]
        locks = ", ".join(stem for stem, _, _ in places)
        why = " > ".join((new or old)["why"])
        sizes = f"{_megabytes(old)} → {_megabytes(new)}"
        rows.append([name, version_before or "new", version_now or "gone", sizes, why, locks])
    if not rows:
        return f"# {title}\n\n{means}\n\nNo package changed.\n"
    head = ["package", "from", "to", "MB", "why it is there", "locks"]
    count = f"{len({row[0] for row in rows})} packages changed in {len(after)} locks."
    return f"# {title}\n\n{means}\n\n{count}\n\n{table(head, rows)}"


def _megabytes(entry: Mapping[str, Any]) -> str:
    if not entry:
        return "0"
    return f"{entry['bytes'] / 1e6:.1f}" if entry["bytes"] else "?"
