"""``forge export``: a lock in the forms that other tools read, under ``out/export``.

The lock itself is a requirements file that pip and uv read. Beside it: ``pylock.toml`` (PEP 751),
a constraints file, and a CycloneDX 1.6 bill of materials. The same lock gives the same bytes; only
``pylock.toml`` needs to be told where the files are, since its format demands it.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.lock import provenance
from tpuforge.lock.inputs import lock_path, torch_wheel
from tpuforge.lock.provenance import Listed
from tpuforge.lock.resolve import targets
from tpuforge.lock.resolver import home_python, workspace
from tpuforge.lock.sources import read_source
from tpuforge.lockfile import Locked, read_lock
from tpuforge.paths import out_dir, write_atomic, write_json
from tpuforge.pins import Pins, load
from tpuforge.verb import Outcome, parser, run_verb

_VERB = "export"
FORMS = ("constraints", "pylock", "sbom")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb.

    Args:
        argv: Its arguments; the process's own if not given.

    Returns:
        The exit code.
    """
    arguments = parser(_VERB, "Write a lock in the forms that other tools read.")
    arguments.add_argument("--flavour", help="a flavour, or all")
    arguments.add_argument("--python", help="X.Y, or all")
    arguments.add_argument("--form", choices=FORMS, action="append", help="only this form")
    return run_verb(_VERB, arguments, _export, argv)


def _export(options: argparse.Namespace, progress: Progress) -> Outcome:
    pins = load()
    forms = options.form or FORMS
    written: list[str] = []
    for flavour, python in targets(pins, options.flavour or pins.default_flavour, options.python):
        packages = read_lock(lock_path(flavour, python))
        name = lock_path(flavour, python).stem
        place = out_dir() / "export" / name
        if "constraints" in forms:
            write_atomic(place / "constraints.txt", constraints_text(packages))
            written.append(f"{name}/constraints.txt")
        if "sbom" in forms:
            write_json(place / "sbom.cdx.json", sbom(pins, flavour, python, packages))
            written.append(f"{name}/sbom.cdx.json")
        if "pylock" in forms:
            with progress.step(f"asking where the files of {name} are"):
                files = _places(pins, python, packages)
            write_atomic(place / "pylock.toml", pylock_text(python, packages, files))
            written.append(f"{name}/pylock.toml")
    where = out_dir() / "export"
    return Outcome("done", f"wrote {', '.join(written)} in {where}", {"written": written})


def constraints_text(packages: Sequence[Locked]) -> str:
    """A constraints file: versions without hashes, for an environment of one's own.

    Args:
        packages: What a lock holds.
    """
    return "".join(f"{p.name}=={p.version}\n" for p in sorted(packages))


def _places(pins: Pins, python: str, packages: Sequence[Locked]) -> dict[str, Listed]:
    """Where each file is: the index is asked, torch's place follows from the pins."""
    wheel = torch_wheel(pins, python)
    # a plus sign in a path may be read as a space
    url = f"{pins.torch.index}/{quote(wheel.file)}"
    files = {wheel.sha256: Listed(None, None, wheel.file, url)}
    source = read_source(Path(sys.executable))
    rest = [package for package in packages if package.sha256 not in files]
    with workspace() as work:
        files |= provenance.listed(source, home_python(), rest, work)
    missing = [package.name for package in packages if package.sha256 not in files]
    if missing:
        raise ForgeError(
            f"{source.name} does not list the locked file of {', '.join(missing)}",
            expected="every file of the lock, by its digest",
            mend="use the index that the lock was made from: pip config list",
            exit_code=Exit.FAULT,
        )
    return files


def pylock_text(python: str, packages: Sequence[Locked], files: Mapping[str, Listed]) -> str:
    """A lock in the format of PEP 751.

    Args:
        python: ``X.Y``.
        packages: What the lock holds.
        files: Where each file is, by SHA-256.
    """
    lines = [
        'lock-version = "1.0"',
        f"environments = [{_text(_environment(python))}]",
        f'requires-python = "=={python}.*"',
        'created-by = "tpuforge"',
    ]
    for package in sorted(packages):
        file = files[package.sha256]
        lines += ["", "[[packages]]", f"name = {_text(package.name)}"]
        lines += [f"version = {_text(package.version)}", "", "[[packages.wheels]]"]
        lines += [f"name = {_text(file.file)}", f"url = {_text(file.url)}"]
        if file.uploaded:
            lines.append(f"upload-time = {file.uploaded}")
        if file.size:
            lines.append(f"size = {file.size}")
        lines.append(f'hashes = {{ sha256 = "{package.sha256}" }}')
    return "\n".join(lines) + "\n"


def _environment(python: str) -> str:
    """The marker of what a lock was made for."""
    return (
        f"python_version == '{python}' and sys_platform == 'linux' "
        "and platform_machine == 'x86_64' and implementation_name == 'cpython'"
    )


def _text(value: str) -> str:
    """A basic string of TOML: JSON's escapes are among its own."""
    return json.dumps(value, ensure_ascii=True)


def sbom(pins: Pins, flavour: str, python: str, packages: Sequence[Locked]) -> dict[str, Any]:
    """A bill of materials in the form of CycloneDX 1.6.

    Args:
        pins: The pins.
        flavour: Such as ``runtime``.
        python: ``X.Y``.
        packages: What the lock holds.

    Returns:
        The document. Its serial number and time follow from the lock and the pins, so that the
        same lock gives the same bytes.
    """
    name = lock_path(flavour, python).stem
    why = provenance.read(flavour, python)
    digests = "\n".join(f"{p.name} {p.sha256}" for p in sorted(packages))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, f'{name} {digests}')}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(pins.epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "tools": {"components": [{"type": "application", "name": "tpuforge"}]},
            "component": {"type": "application", "bom-ref": name, "name": name},
        },
        "components": [_component(pins, p, why.get(p.name, {})) for p in sorted(packages)],
    }


def _component(pins: Pins, package: Locked, why: Mapping[str, Any]) -> dict[str, Any]:
    purl = f"pkg:pypi/{package.name}@{quote(package.version)}"
    if why.get("index") == provenance.PYTORCH:
        place = urlsplit(pins.torch.index)
        purl += f"?repository_url={quote(place.netloc + place.path, safe='')}"
    made: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": package.name,
        "version": package.version,
        "purl": purl,
        "hashes": [{"alg": "SHA-256", "content": package.sha256}],
        "properties": [{"name": "tpuforge:why", "value": " > ".join(why.get("why", []))}],
    }
    said = why.get("licence")
    if said:
        try:
            made["licenses"] = [{"expression": canonicalize_license_expression(said)}]
        except InvalidLicenseExpression:
            made["licenses"] = [{"license": {"name": said}}]
    return made


if __name__ == "__main__":
    raise SystemExit(main())
