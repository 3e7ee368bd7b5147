"""Where each package of a lock comes from and why it is there: ``lock/<flavour>-pyXY.json``.

A lock says *what*; the file beside it says *why*: the kind of index, size, licence, upload time,
and the shortest chain of parents from an input. A package without such a chain has no business in
a lock, whatever a resolver or an index says. No host stands in the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from tpuforge.errors import Exit, ForgeError
from tpuforge.lock.inputs import holds, lock_path, requirements
from tpuforge.lock.names import is_canonical, is_line, load_names
from tpuforge.lockfile import Locked
from tpuforge.paths import read_json
from tpuforge.pins import Pins

SCHEMA = "tpuforge.provenance/1"
MAIN = "main index"
PYTORCH = "PyTorch index"
FOLLOWS = "nothing else requires it"
_ADDRESS = re.compile(r"\s*[(<]?\b\w+://[^\s)>]+[)>]?")


def _version(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(Version(value)) and not re.search(r"\s", value)
    except InvalidVersion:
        return False


def _digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _size(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _moment(value: Any) -> bool:
    try:
        return value is None or as_moment(datetime.fromisoformat(value)) == value
    except (TypeError, ValueError):
        return False


def as_moment(when: datetime) -> str:
    """A moment to the second, as the files in ``lock/`` have it: ``2026-11-30T00:00:00Z``.

    Args:
        when: The moment.
    """
    return f"{when.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _licence(value: Any) -> bool:
    return value is None or (is_line(value) and "://" not in value)


def _chain(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_canonical, value))


_FORMS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "packages": {
        "name": is_canonical,
        "version": _version,
        "sha256": _digest,
        "index": lambda value: value in (MAIN, PYTORCH),
        "bytes": _size,
        "uploaded": _moment,
        "licence": _licence,
        "why": _chain,
    },
    "left_out": {
        "name": is_canonical,
        "version": _version,
        "bytes": _size,
        "why": _chain,
        "reason": is_line,
    },
}


@dataclass(frozen=True)
class Listed:
    """What an index lists about a file.

    Attributes:
        size: Bytes; None if it does not say.
        uploaded: When it was uploaded, to the second, in UTC; None if it does not say.
        file: The name of the file; empty if it was not asked.
        url: Where it is; empty if it was not asked. It holds a host: never into ``lock/``.
    """

    size: int | None
    uploaded: str | None
    file: str = ""
    url: str = ""


def path_of(flavour: str, python: str) -> Path:
    """Where the provenance of a lock stands.

    Args:
        flavour: Such as ``runtime``.
        python: ``X.Y``.
    """
    return lock_path(flavour, python).with_suffix(".json")


@dataclass(frozen=True)
class Provenance:
    """What stands beside a lock.

    Attributes:
        document: The whole of it, of whatever form; None if it is not there.
        wrong: What is wrong with its form, the first thing that is; empty if nothing is.
        packages: Its entries by package name; none where the form is wrong.
        left_out: What the lock does not hold although it is required, in the same way.
    """

    document: Any
    wrong: str
    packages: Mapping[str, Mapping[str, Any]]
    left_out: Mapping[str, Mapping[str, Any]]


def read(flavour: str, python: str) -> Provenance:
    """The provenance of a lock as it stands in ``lock/``.

    Args:
        flavour: Such as ``runtime``.
        python: ``X.Y``.
    """
    path = path_of(flavour, python)
    if not path.is_file():
        return Provenance(None, "it is not there", {}, {})
    document = read_json(path)
    wrong = _fault(document, flavour, python)
    if wrong:
        return Provenance(document, wrong, {}, {})
    packages, left_out = ({one["name"]: one for one in document[kind]} for kind in _FORMS)
    return Provenance(document, "", packages, left_out)


def _fault(held: Any, flavour: str, python: str) -> str:
    """What is wrong with the form of a document, in one sentence."""
    wanted = {"schema": SCHEMA, "flavour": flavour, "python": python}
    if not isinstance(held, dict) or held.keys() != {*wanted, *_FORMS}:
        return f"it is not of the form: no object with {', '.join([*wanted, *_FORMS])}"
    for key, value in wanted.items():
        if held[key] != value:
            return f"it is not of the form: {key} is {held[key]!r} instead of {value!r}"
    for kind, form in _FORMS.items():
        if not isinstance(held[kind], list):
            return f"it is not of the form: {kind} is no list"
        names = set()
        for entry in held[kind]:
            if not isinstance(entry, dict) or entry.keys() != form.keys():
                return f"it is not of the form: {kind} has an entry without {', '.join(form)}"
            for key, right in form.items():
                if not right(entry[key]):
                    return f"it is not of the form: {key} of {entry['name']!r} is {entry[key]!r}"
            if entry["name"] in names:
                return f"it is not of the form: {entry['name']} stands there twice"
            names.add(entry["name"])
    return ""


def differences(held: Any, fresh: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where the provenance of a lock is not what a resolution comes to.

    Args:
        held: The document that stands in ``lock/``.
        fresh: The one of :func:`document`.

    Returns:
        The package (empty if it is about all), and what is different.
    """
    if held == fresh:
        return []
    found = []
    for kind in _FORMS:
        now = {entry["name"]: entry for entry in fresh[kind]}
        was = {entry["name"]: entry for entry in held[kind]}
        for name in sorted(was.keys() | now.keys()):
            one, other = was.get(name, {}), now.get(name, {})
            for key in sorted(one.keys() | other.keys()):
                if one.get(key) != other.get(key):
                    what = f"{key} is {one.get(key)!r} here, and {other.get(key)!r} anew"
                    found.append((name, what))
    return found or [("", "it stands there in another order than ./forge lock writes")]


@dataclass(frozen=True)
class Closure:
    """What the inputs of a flavour reach.

    Attributes:
        why: For each package the shortest chain of parents: names from an input down to the
            package itself; among equals, the first by name.
        by: For each package that something reached requires, which packages those are.
    """

    why: Mapping[str, list[str]]
    by: Mapping[str, set[str]]


def walk(pins: Pins, flavour: str, python: str, requires: Mapping[str, Sequence[str]]) -> Closure:
    """Follow the requirements of a flavour's inputs, extras and markers included.

    Args:
        pins: The pins.
        flavour: Such as ``runtime``.
        python: ``X.Y``.
        requires: ``Requires-Dist`` by canonical name; a package that is not among them is not
            reached, and nothing through it.
    """
    found: dict[str, list[str]] = {}
    by: dict[str, set[str]] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    level: list[tuple[str, frozenset[str], tuple[str, ...]]] = [
        (canonicalize_name(one.name), frozenset(one.extras), ())
        for one in sorted(requirements(pins, flavour, python), key=str)
    ]
    while level:
        below: list[tuple[str, frozenset[str], tuple[str, ...]]] = []
        for name, extras, parents in level:
            if (name, extras) in done or name not in requires:
                continue
            done.add((name, extras))
            found.setdefault(name, [*parents, name])
            for line in requires[name]:
                parsed = Requirement(line)
                if holds(parsed, python, extras):
                    child = canonicalize_name(parsed.name)
                    by.setdefault(child, set()).add(name)
                    below.append((child, frozenset(parsed.extras), (*parents, name)))
        level = sorted(below, key=lambda item: (item[2], item[0], sorted(item[1])))
    return Closure(found, by)


def licence(metadata: Mapping[str, Any]) -> str | None:
    """What a package says about its licence, in one line.

    Args:
        metadata: Core metadata in the JSON form of PEP 566.

    Returns:
        The licence expression; else the first line of a short licence field; else what the
        classifiers say; None if it says nothing.
    """
    expression = metadata.get("license_expression")
    if expression:
        return str(expression)
    # an address in it says nothing that the name does not
    said = _ADDRESS.sub("", str(metadata.get("license") or "")).strip()
    # many put the whole text there; its first line is no name of a licence
    if said and "\n" not in said and len(said) < 100 and said.upper() != "UNKNOWN":
        return said
    classifiers = [str(one) for one in metadata.get("classifier", [])]
    names = [one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License :: ")]
    return ", ".join(sorted(names)) or None


def document(
    pins: Pins,
    flavour: str,
    python: str,
    *,
    packages: Sequence[Locked],
    left_out: Sequence[Locked],
    metadata: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, Listed],
) -> dict[str, Any]:
    """The provenance of a lock.

    Args:
        pins: The pins.
        flavour: Such as ``runtime``.
        python: ``X.Y``.
        packages: What the lock holds.
        left_out: What it does not hold, although something requires it.
        metadata: Core metadata in the JSON form of PEP 566, by name.
        files: What is known about the files, by SHA-256.

    Raises:
        ForgeError: If no input leads to a package; exit code 1.
    """
    requires = {name: list(one.get("requires_dist", [])) for name, one in metadata.items()}
    whole = walk(pins, flavour, python, requires).why
    reasons = {one.name: one.why for one in load_names().left_out_of(flavour)}
    gone = {package.name for package in left_out}
    held = {name: needed for name, needed in requires.items() if name not in gone}
    why = walk(pins, flavour, python, held).why
    lost = [package.name for package in packages if package.name not in why]
    if lost:
        raise ForgeError(
            f"no input of {flavour} leads to {', '.join(lost)}",
            expected="packages that an input asks for, or one of its parents",
            mend="look at the index: it offers what nothing requires",
            exit_code=Exit.FAULT,
        )
    nothing = Listed(None, None)
    return {
        "schema": SCHEMA,
        "flavour": flavour,
        "python": python,
        "packages": [
            {
                "name": p.name,
                "version": p.version,
                "sha256": p.sha256,
                "index": index_of(pins, p.name),
                "bytes": files.get(p.sha256, nothing).size,
                "uploaded": files.get(p.sha256, nothing).uploaded,
                "licence": licence(metadata[p.name]),
                "why": why[p.name],
            }
            for p in sorted(packages)
        ],
        "left_out": [
            {
                "name": p.name,
                "version": p.version,
                "bytes": files.get(p.sha256, nothing).size,
                "why": whole[p.name],
                "reason": reasons.get(p.name, FOLLOWS),
            }
            for p in sorted(left_out)
        ],
    }


def index_of(pins: Pins, name: str) -> str:
    """Which index a package may come from.

    Args:
        pins: The pins.
        name: Its canonical name.
    """
    return PYTORCH if name in pins.cpu_builds else MAIN
