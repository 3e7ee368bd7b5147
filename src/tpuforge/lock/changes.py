"""What an upgrade changed, as the text of a pull request: version, size, and why it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpuforge.lock import provenance
from tpuforge.lock.compatibility import table
from tpuforge.lock.inputs import lock_path

Held = Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]]
"""Provenance by package name, of each flavour and Python."""


def held(locks: Sequence[tuple[str, str]]) -> Held:
    """What some locks hold now.

    Args:
        locks: Flavours and Pythons.
    """
    return {(flavour, python): provenance.read(flavour, python) for flavour, python in locks}


def pull_request(before: Held, after: Held, since: str, until: str) -> str:
    """The text of a pull request.

    Args:
        before: What the locks held.
        after: What they hold now; the same flavours and Pythons.
        since: The cutoff before.
        until: The cutoff now.

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
    title = f"Move the locks from {since} to {until}"
    if not rows:
        return f"# {title}\n\nNo package changed.\n"
    head = ["package", "from", "to", "MB", "why it is there", "locks"]
    count = f"{len({row[0] for row in rows})} packages changed in {len(after)} locks."
    return f"# {title}\n\n{count}\n\n{table(head, rows)}"


def _megabytes(entry: Mapping[str, Any]) -> str:
    if not entry:
        return "0"
    return f"{entry['bytes'] / 1e6:.1f}" if entry["bytes"] else "?"
