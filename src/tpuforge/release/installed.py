"""Are the files of an image's wheels those that its lock names?

Each installed distribution has a ``RECORD`` of its files with their digests. The files in the
layers are held against it, and it against the ``RECORD`` in the wheel itself, if that wheel, of
the locked digest, is in the wheelhouse: so a changed file is found even where its record was
changed with it.

Format: recording installed projects (PEP 376, PEP 627): ``path,sha256=<urlsafe base64>,size``.
"""

from __future__ import annotations

import base64
import csv
import io
import posixpath
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tpuforge.paths import out_dir, sha256_file
from tpuforge.release.inventory import ENVIRONMENTS, Inventory, Wheel

# what pip writes itself, and what a launcher is made of: not a file of the wheel
_PIPS_OWN = ("INSTALLER", "RECORD", "REQUESTED", "direct_url.json")


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Paths and hex digests of a record; files without a digest are left out."""
    for row in csv.reader(io.StringIO(text)):
        if len(row) < 2 or not row[1].startswith("sha256="):
            continue
        word = row[1].removeprefix("sha256=")
        try:
            yield row[0], base64.urlsafe_b64decode(word + "=" * (-len(word) % 4)).hex()
        except ValueError:
            yield row[0], ""


def _record(wheel: Wheel, found: Inventory) -> tuple[str, str]:
    """Path and text of a distribution's record."""
    start = f"{wheel.place}/"
    for path, text in found.records.items():
        name, _, _ = path.removeprefix(start).partition(".dist-info/")
        stem = f"{wheel.name.replace('-', '_')}-{wheel.version}".lower()
        if path.startswith(start) and name.lower().replace(".", "_") == stem.replace(".", "_"):
            return path, text
    return "", ""


def changed(found: Inventory) -> list[str]:
    """What of the environments is not as the records of their distributions say.

    Args:
        found: What is in an image, with its contents.

    Returns:
        A line for each file that is missing, has other bytes, or belongs to no distribution; byte
        code is written by the bake and belongs to its source.
    """
    wrong: list[str] = []
    known: set[str] = set()
    for wheel in found.wheels:
        if not f"{wheel.place}/".startswith(ENVIRONMENTS):
            continue
        path, text = _record(wheel, found)
        if not path:
            wrong.append(f"{wheel.name} {wheel.version} has no RECORD")
            continue
        known.add(path)
        for name, sha256 in _lines(text):
            whole = _place(wheel, name, found.contents)
            real = found.contents.get(whole)
            if real is None:
                wrong.append(f"/{whole} of {wheel.name} is missing")
            elif real != sha256:
                wrong.append(f"/{whole} of {wheel.name} has other bytes than its RECORD says")
        # one without a digest in the record is known all the same
        known |= {
            _place(wheel, row[0], found.contents) for row in csv.reader(io.StringIO(text)) if row
        }
    places = tuple({f"{wheel.place}/" for wheel in found.wheels})
    wrong += [
        f"/{path} belongs to no wheel"
        for path in sorted(set(found.contents) - known)
        if path.startswith(places) and not path.endswith(".pyc")
    ]
    return wrong


def _place(wheel: Wheel, name: str, contents: Mapping[str, str]) -> str:
    """Where a file of a record is.

    ``pip install --target`` writes down where a command would go in an environment, and puts it
    into ``bin`` below the target.
    """
    whole = posixpath.normpath(f"{wheel.place}/{name}")
    if whole not in contents and name.startswith("../../bin/"):
        return f"{wheel.place}/bin/{name.rpartition('/')[2]}"
    return whole


def unlike(found: Inventory, digests: Mapping[tuple[str, str], str]) -> tuple[list[str], list[str]]:
    """What records say otherwise than the wheels that the lock names.

    Args:
        found: What is in an image.
        digests: SHA-256 of wheels by name and version.

    Returns:
        A line for each file that differs; the wheels that are not in the wheelhouse.
    """
    wrong: list[str] = []
    absent: list[str] = []
    for wheel in found.wheels:
        sha256 = digests.get((wheel.name, wheel.version))
        if sha256 is None:
            continue
        file = _wheel(sha256)
        if file is None:
            absent.append(f"{wheel.name} {wheel.version}")
            continue
        _, text = _record(wheel, found)
        said = dict(_lines(text))
        for name, digest in _of_the_wheel(file).items():
            if said.get(name) != digest:
                wrong.append(f"{name} of {wheel.name} is not that of {file.name}")
    return wrong, absent


def _wheel(sha256: str) -> Path | None:
    for path in (out_dir() / "wheelhouse" / sha256).glob("*.whl"):
        if sha256_file(path) == sha256:
            return path
    return None


def _of_the_wheel(file: Path) -> dict[str, str]:
    """The files that a wheel installs as they are, beside its packages."""
    with zipfile.ZipFile(file) as archive:
        # not one of a package that it carries inside
        record = next(
            name
            for name in archive.namelist()
            if name.endswith(".dist-info/RECORD") and name.count("/") == 1
        )
        text = archive.read(record).decode("utf-8", "replace")
    return {
        name: digest
        for name, digest in _lines(text)
        # what stands in .data goes to other places, scripts with another first line
        if ".data/" not in name and name.rpartition("/")[2] not in _PIPS_OWN
    }
