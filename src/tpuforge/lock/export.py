"""``./forge export``: a lock in the forms that other tools read, under ``out/export``.

The lock itself is a requirements file that pip and uv read. Beside it: ``pylock.toml`` (PEP 751),
a constraints file, and a CycloneDX 1.6 bill of materials. The same lock gives the same bytes; only
``pylock.toml`` needs to be told where the files are, since its format demands it. Each document is
written by the library that keeps its format, and checked by it before it is there.
"""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import tomli_w
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from packageurl import PackageURL
from packaging.markers import Marker
from packaging.pylock import Package, PackageWheel, Pylock, PylockValidationError
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tpuforge import bom
from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.lock import provenance
from tpuforge.lock.inputs import CPU_DIGESTS, lock_path, read_head
from tpuforge.lock.provenance import Listed
from tpuforge.lock.resolve import targets
from tpuforge.lock.resolver import view_of
from tpuforge.lock.sources import read_source
from tpuforge.lockfile import Locked, read_digests, read_lock, read_text
from tpuforge.paths import out_dir, write_atomic
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
    arguments.add_argument(
        "--flavour", metavar="NAME", help="one lock, or all (default: lock/pins.toml's)"
    )
    arguments.add_argument(
        "--python", metavar="X.Y", help="one Python, or all (default: lock/pins.toml's)"
    )
    arguments.add_argument("--form", choices=FORMS, action="append", help="only this form")
    return run_verb(_VERB, arguments, _export, argv)


def _export(options: argparse.Namespace, progress: Progress) -> Outcome:
    pins = load()
    forms = options.form or FORMS
    chosen = targets(pins, options.flavour or pins.default_flavour, options.python)
    # every lock is read before the first file is written
    locks = [(flavour, python, _read(flavour, python)) for flavour, python in chosen]
    written: list[str] = []
    for flavour, python, packages in locks:
        name = lock_path(flavour, python).stem
        place = out_dir() / "export" / name
        if "constraints" in forms:
            write_atomic(place / "constraints.txt", constraints_text(packages))
            written.append(f"{name}/constraints.txt")
        if "sbom" in forms:
            why = _provenance(flavour, python, packages)
            write_atomic(place / "sbom.cdx.json", sbom_text(pins, name, packages, why))
            written.append(f"{name}/sbom.cdx.json")
        if "pylock" in forms:
            with progress.step(f"asking where the files of {name} are"):
                files = _places(pins, packages)
            write_atomic(place / "pylock.toml", pylock_text(python, packages, files))
            written.append(f"{name}/pylock.toml")
    where = out_dir() / "export"
    return Outcome("done", f"wrote {', '.join(written)} in {where}", {"written": written})


def _read(flavour: str, python: str) -> list[Locked]:
    """A lock, exactly as the resolver wrote it."""
    path = lock_path(flavour, python)
    mend = f"./forge lock --flavour {flavour} --python {python}"
    if not path.exists():
        raise ForgeError(f"{path.name}: there is no such lock", expected=str(path), mend=mend)
    packages = read_lock(path)
    # other tools will trust what is exported, so a head that was taken off is no way around it
    if not read_head(read_text(path)).intact:
        raise ForgeError(
            f"{path.name}, line 1: its head does not tell of its lines",
            expected="a lock as ./forge lock writes it",
            mend=mend,
            exit_code=Exit.FAULT,
        )
    return packages


def _provenance(
    flavour: str, python: str, packages: Sequence[Locked]
) -> Mapping[str, Mapping[str, Any]]:
    """What is known about each package of a lock, once it is known to be about these files."""
    path = provenance.path_of(flavour, python)
    stated = provenance.read(flavour, python)
    why = stated.packages
    held = {Locked(name, one["version"], one["sha256"]) for name, one in why.items()}
    whole = all(
        one["why"][-1] == name and why.keys() >= set(one["why"]) for name, one in why.items()
    )
    if held != set(packages) or not whole:
        other = sorted(one.name for one in set(packages) - held)
        missing = f"does not tell of {', '.join(other) or 'these packages alone'}"
        raise ForgeError(
            f"{path.name}: {stated.wrong}" if stated.wrong else f"{path.name} {missing}",
            expected=f"the version, digest and parents of each package of {flavour}, as locked",
            mend=f"git checkout -- lock/{path.name}, or ./forge lock --flavour {flavour} "
            f"--python {python}",
            exit_code=Exit.FAULT,
        )
    return why


def constraints_text(packages: Sequence[Locked]) -> str:
    """A constraints file: versions without hashes, for an environment of one's own.

    Args:
        packages: What a lock holds.
    """
    return "".join(f"{p.name}=={p.version}\n" for p in sorted(packages))


def _cpu_files() -> dict[str, str]:
    """SHA-256 to file name of the CPU builds, which stand on the PyTorch index alone."""
    return {digest: file for file, digest in read_digests(CPU_DIGESTS).items()}


def _places(pins: Pins, packages: Sequence[Locked]) -> dict[str, Listed]:
    """Where each file is: the index is asked, a CPU build's place follows from the pins."""
    cpu = _cpu_files()
    # a plus sign in a path may be read as a space
    files = {
        package.sha256: Listed(
            None,
            None,
            cpu[package.sha256],
            f"{pins.torch.index}/{quote(cpu[package.sha256])}",
        )
        for package in packages
        if package.sha256 in cpu
    }
    source = read_source(Path(sys.executable))
    rest = [package for package in packages if package.sha256 not in files]
    if rest:
        with view_of(pins, source, [package.name for package in rest]) as view:
            files |= view.listed(rest)
    missing = [package.name for package in rest if package.sha256 not in files]
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

    Raises:
        ForgeError: If an index says what the format does not take, such as a file name that is
            not of its package; exit code 1.
    """
    try:
        made = Pylock(
            lock_version=Version("1.0"),
            environments=[Marker(_environment(python))],
            requires_python=SpecifierSet(f"=={python}.*"),
            created_by="tpuforge",
            packages=[
                Package(
                    name=canonicalize_name(package.name),
                    version=Version(package.version),
                    wheels=[_wheel(package, files[package.sha256])],
                )
                for package in sorted(packages)
            ],
        )
        made.validate()
    except (PylockValidationError, ValueError) as error:
        raise ForgeError(
            f"what the index says is no lock of PEP 751: {error}",
            expected="names of wheels of the locked releases, sizes, and times of upload",
            mend="use the index that the lock was made from: pip config list",
            exit_code=Exit.FAULT,
        ) from error
    return tomli_w.dumps(made.to_dict())


def _wheel(package: Locked, file: Listed) -> PackageWheel:
    return PackageWheel(
        name=file.file,
        url=file.url,
        upload_time=datetime.fromisoformat(file.uploaded) if file.uploaded else None,
        size=file.size,
        hashes={"sha256": package.sha256},
    )


def _environment(python: str) -> str:
    """The marker of what a lock was made for."""
    return (
        f"python_version == '{python}' and sys_platform == 'linux' "
        "and platform_machine == 'x86_64' and implementation_name == 'cpython'"
    )


def sbom_text(
    pins: Pins, name: str, packages: Sequence[Locked], why: Mapping[str, Mapping[str, Any]]
) -> str:
    """A bill of materials in the form of CycloneDX 1.6, valid by its official schema.

    Args:
        pins: The pins.
        name: What the bill is of, such as ``runtime-py311``.
        packages: What the lock holds.
        why: The provenance of each package, by name.

    Returns:
        The document as JSON. Its serial number and time follow from the lock and the pins, so
        that the same lock gives the same bytes.

    Raises:
        ForgeError: If the schema refuses it; exit code 1.
    """
    cpu = _cpu_files()
    of = Component(type=ComponentType.APPLICATION, name=name, bom_ref=name)
    components = {p.name: _component(pins, p, why[p.name], p.sha256 in cpu) for p in packages}
    digests = "\n".join(f"{p.name} {p.sha256}" for p in sorted(packages))
    made = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_OID, f"{name} {digests}"),
        components=components.values(),
        metadata=BomMetaData(
            component=of,
            properties=[
                Property(
                    name="tpuforge:dependencies",
                    value="one chain of parents to each package, not every edge",
                )
            ],
        ),
    )
    for package in packages:
        *parents, _ = why[package.name]["why"]
        parent = components[parents[-1]] if parents else of
        made.register_dependency(parent, [components[package.name]])
    what = f"the bill of materials of {name}"
    mend = f"look at lock/{name}.json: it holds what the schema refuses"
    return bom.written(made, what, epoch=pins.epoch, version=None, mend=mend)


def _component(pins: Pins, package: Locked, why: Mapping[str, Any], cpu: bool) -> Component:
    index = urlsplit(pins.torch.index)
    place = {"repository_url": index.netloc + index.path} if cpu else None
    purl = PackageURL("pypi", None, package.name, package.version, place)
    said = why.get("licence")
    return Component(
        type=ComponentType.LIBRARY,
        bom_ref=purl.to_string(),
        name=package.name,
        version=package.version,
        purl=purl,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=package.sha256)],
        licenses=[LicenseFactory().make_from_string(said)] if said else None,
        properties=[Property(name="tpuforge:why", value=" > ".join(why["why"]))],
    )


if __name__ == "__main__":
    raise SystemExit(main())
