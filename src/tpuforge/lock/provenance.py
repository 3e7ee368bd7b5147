"""Where each package of a lock comes from and why it is there: ``lock/<flavour>-pyXY.json``.

A lock says *what*; the file beside it says *why*: the kind of index, size, licence, upload time,
and the shortest chain of parents from an input. A package without such a chain has no business in
a lock, whatever a resolver or an index says. No host stands in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tpuforge.errors import Exit, ForgeError
from tpuforge.lock.inputs import holds, lock_path, requirements
from tpuforge.lock.sources import Source
from tpuforge.lockfile import Locked
from tpuforge.paths import read_json
from tpuforge.pins import Pins

SCHEMA = "tpuforge.provenance/1"
MAIN = "main index"
PYTORCH = "PyTorch index"
_TIME_LIMIT_S = 300.0
# pip's own session knows the user's certificates, proxy and credentials; what it finds goes out in
# hex, because file names must come through the redaction of output unharmed
_ASK = """
import concurrent.futures, json, sys, urllib.parse
from pip._internal.commands import create_command
command = create_command("download")
options, _ = command.parse_args([])
kind = "application/vnd.pypi.simple.v1+json"

def ask(name):
    session = command._build_session(options)
    url = options.index_url.rstrip("/") + "/" + name + "/"
    answer = session.get(url, headers={"Accept": kind})
    answer.raise_for_status()
    if kind not in answer.headers.get("Content-Type", ""):
        return {}
    return {
        entry["hashes"]["sha256"]: [
            entry.get("size"),
            entry.get("upload-time"),
            entry["filename"],
            urllib.parse.urljoin(answer.url, entry["url"]),
        ]
        for entry in answer.json()["files"]
        if entry.get("hashes", {}).get("sha256") in wanted
    }

wanted = set(json.loads(sys.argv[1]))
found = {}
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    for part in pool.map(ask, json.loads(sys.argv[2])):
        found.update(part)
print(json.dumps(found).encode().hex())
"""


@dataclass(frozen=True)
class Listed:
    """What an index lists about a file.

    Attributes:
        size: Bytes; None if it does not say.
        uploaded: When it was uploaded, to the second, in UTC; None if it does not say.
        file: The name of the file; empty if it was not asked.
        url: Where it is; empty if it was not asked. It may hold a host: never into ``lock/``.
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


def read(flavour: str, python: str) -> dict[str, dict[str, Any]]:
    """The provenance of a lock, by package name; empty where there is none that can be read.

    Args:
        flavour: Such as ``runtime``.
        python: ``X.Y``.
    """
    held = read_json(path_of(flavour, python))
    if not isinstance(held, dict) or held.get("schema") != SCHEMA:
        return {}
    return {str(entry["name"]): entry for entry in held["packages"]}


def listed(
    source: Source, python: Path, packages: Sequence[Locked], work: Path
) -> dict[str, Listed]:
    """Ask the index for size and upload time of files.

    Args:
        source: The index.
        python: A Python with pip.
        packages: Which files.
        work: The child's folder.

    Returns:
        What is listed, by SHA-256; a file without an entry if the index does not list it.

    Raises:
        UnreachableError: If the index does not answer.
        ForgeError: If it cannot be asked.
    """
    digests = json.dumps([package.sha256 for package in packages])
    names = json.dumps([package.name for package in packages])
    done = source.run([python, "-I", "-c", _ASK, digests, names], _TIME_LIMIT_S, work)
    if done.code:
        source.refuse(done.output)
        raise ForgeError(
            f"{source.name} cannot be asked about its files:\n{done.tail}",
            expected="the simple repository API (PEP 691)",
            mend="as the lines above say; then run it again",
        )
    found: dict[str, Any] = json.loads(bytes.fromhex(done.output.split()[-1]))
    return {
        digest: Listed(size, str(uploaded)[:19] + "Z" if uploaded else None, file, url)
        for digest, (size, uploaded, file, url) in found.items()
    }


def chains(
    pins: Pins, flavour: str, python: str, requires: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """For each package that the inputs reach, the shortest chain of parents to it.

    Args:
        pins: The pins.
        flavour: Such as ``runtime``.
        python: ``X.Y``.
        requires: ``Requires-Dist`` by canonical name.

    Returns:
        Names from an input down to the package itself; among equals, the first by name.
    """
    found: dict[str, list[str]] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    level: list[tuple[str, frozenset[str], tuple[str, ...]]] = [
        (canonicalize_name(one.name), frozenset(one.extras), ())
        for one in sorted(requirements(pins, flavour), key=str)
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
                    below.append((child, frozenset(parsed.extras), (*parents, name)))
        level = sorted(below, key=lambda item: (item[2], item[0], sorted(item[1])))
    return found


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
    said = str(metadata.get("license") or "").strip()
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
    metadata: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, Listed],
) -> dict[str, Any]:
    """The provenance of a lock.

    Args:
        pins: The pins.
        flavour: Such as ``runtime``.
        python: ``X.Y``.
        packages: What the lock holds.
        metadata: Core metadata in the JSON form of PEP 566, by name.
        files: What is known about the files, by SHA-256.

    Raises:
        ForgeError: If no input leads to a package; exit code 1.
    """
    requires = {name: list(one.get("requires_dist", [])) for name, one in metadata.items()}
    why = chains(pins, flavour, python, requires)
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
                "index": PYTORCH if p.name == "torch" else MAIN,
                "bytes": files.get(p.sha256, nothing).size,
                "uploaded": files.get(p.sha256, nothing).uploaded,
                "licence": licence(metadata[p.name]),
                "why": why[p.name],
            }
            for p in sorted(packages)
        ],
    }
