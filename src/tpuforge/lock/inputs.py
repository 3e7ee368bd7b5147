"""What goes into a lock and what comes out: inputs, constraints, keys, and the file itself.

An input (``lock/<flavour>.in``) names packages; the versions of torch, torch_tpu and libtpu come
from the pins alone, as constraints. A lock carries two numbers in its head: one names the inputs
it was made from, so that a stale lock is seen without a network; one names its content, so that
an edit by hand is.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from tpuforge.errors import Exit, ForgeError
from tpuforge.lock.names import LOCK_DIR, is_cuda, load_names
from tpuforge.lockfile import Locked, content_digest, read_digests, read_lock
from tpuforge.paths import out_dir, sha256_file, sha256_text
from tpuforge.pins import Pins
from tpuforge.target import environment, platforms

CPU_DIGESTS = LOCK_DIR / "torch-cpu.sha256"
_FORMAT = "tpuforge.lock/1"

_HEAD = re.compile(r"# (?P<what>inputs|content) sha256:(?P<digest>[0-9a-f]{64})")
# nothing else of a machine may decide what is asked for
_PYTHON = r'python_version (==|!=|<|<=|>|>=) "3\.\d{1,2}"'
_MARKER = re.compile(rf"{_PYTHON}( (and|or) {_PYTHON})*")
_FIELDS = ("Name", "Version", "Requires-Python", "Requires-Dist", "Provides-Extra")


def lock_path(flavour: str, python: str) -> Path:
    """Where the lock of a flavour for a Python stands.

    Args:
        flavour: Such as ``runtime``.
        python: ``X.Y``.
    """
    return LOCK_DIR / f"{flavour}-py{python.replace('.', '')}.txt"


def flavours(pins: Pins) -> list[str]:
    """The flavours that have an input, each after the one it builds on.

    Args:
        pins: The pins.
    """
    return [name for name in pins.flavours if (LOCK_DIR / f"{name}.in").exists()]


def check_flavour(pins: Pins, name: str) -> str:
    """A flavour that has an input and stands in the pins.

    Args:
        pins: The pins.
        name: What the user asked for.

    Raises:
        ForgeError: If there is no such flavour.
    """
    if name not in flavours(pins):
        raise ForgeError(
            f"there is no flavour {name!r}",
            expected=f"one of {', '.join(flavours(pins))}, or all",
            mend=f"write lock/{name}.in and [flavour.{name}] in lock/pins.toml if you mean a new "
            "one: docs/lock.md",
        )
    return name


def existing(pins: Pins) -> list[tuple[str, str]]:
    """Flavour and Python of every lock that stands in ``lock/``, each after what it builds on.

    Args:
        pins: The pins.
    """
    return [
        (flavour, python)
        for flavour in flavours(pins)
        for python in pins.flavours[flavour].pythons
        if lock_path(flavour, python).exists()
    ]


def requirements(pins: Pins, flavour: str, python: str) -> list[Requirement]:
    """What a flavour asks for: its own input, and that of the flavour it builds on.

    Args:
        pins: The pins.
        flavour: Such as ``train``.
        python: ``X.Y``; a line whose marker does not hold for it does not count.

    Returns:
        Requirements without markers.

    Raises:
        ForgeError: If an input is bad; exit code 1.
    """
    pinned = constraints(pins, python)
    on = pins.flavours[flavour].on
    found = {}
    for name in filter(None, (on, flavour)):
        for requirement in read_input(LOCK_DIR / f"{name}.in", pinned):
            if holds(requirement, python):
                requirement.marker = None
                found[str(requirement)] = requirement
    return list(found.values())


def base_packages(pins: Pins, flavour: str, python: str) -> list[Locked]:
    """The lock that a flavour holds unchanged; nothing if it stands alone.

    Args:
        pins: The pins.
        flavour: Such as ``train``.
        python: ``X.Y``.

    Raises:
        ForgeError: If that lock is missing or malformed.
    """
    on = pins.flavours[flavour].on
    return read_lock(lock_path(on, python)) if on else []


def constraints(pins: Pins, python: str) -> dict[str, str]:
    """The versions that the pins decide, by canonical package name.

    Args:
        pins: The pins.
        python: ``X.Y``.
    """
    return {
        "libtpu": pins.libtpu_of.get(python, pins.libtpu),
        "torch-tpu": pins.torch_tpu.version,
        **{name: build.full for name, build in pins.cpu_builds.items()},
    }


def read_input(path: Path, pinned: Mapping[str, str]) -> list[Requirement]:
    """Read an input, strictly: one package per line, and no version where the pins have one.

    Args:
        path: Such as ``lock/runtime.in``.
        pinned: The versions that stand in the pins, by canonical name.

    Returns:
        Its requirements, in the order of the file.

    Raises:
        ForgeError: If it is not there, or for a line that is no plain requirement, asks for a CUDA
            package, or states a version that belongs in the pins; exit code 1.
    """
    try:
        text = _text(path)
    except FileNotFoundError as error:
        raise _bad(path, 1, "it is not there", "a text file", _put_back(path)) from error
    found: dict[str, Requirement] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw).strip()
        if not line:
            continue
        requirement = _requirement(path, number, line, pinned)
        name = canonicalize_name(requirement.name)
        if name in found:
            raise _bad(path, number, f"{name} stands there twice", "each package once")
        found[name] = requirement
    if not found:
        raise _bad(path, 1, "it names no package", "one package per line")
    return list(found.values())


def _requirement(path: Path, number: int, line: str, pinned: Mapping[str, str]) -> Requirement:
    """One line of an input, checked."""
    if line.startswith("-"):
        raise _bad(
            path,
            number,
            f"{line!r} is an option of pip",
            "package names: neither options, editables nor other files decide what is locked",
            f"remove the line from lock/{path.name}",
        )
    try:
        requirement = Requirement(line)
    except InvalidRequirement as error:
        what = f"{line!r} is no requirement: {str(error).splitlines()[0]}"
        expected = "a package name, with a range where one is needed"
        raise _bad(path, number, what, expected) from error
    name = canonicalize_name(requirement.name)
    if requirement.url is not None:
        raise _bad(
            path,
            number,
            f"{name} is asked for by its address",
            "a package name: one index decides where packages come from",
            f"write {name} alone in lock/{path.name}",
        )
    if is_cuda(name):
        raise _bad(
            path,
            number,
            f"{name} is a CUDA package",
            "packages that run on a TPU host: nothing here may bring CUDA",
            f"remove the line from lock/{path.name}",
        )
    if name in pinned and requirement.specifier:
        hint = (
            f"; an index's {name} without +cpu is a CUDA build"
            if pinned[name].endswith("+cpu") and "+cpu" not in str(requirement.specifier)
            else ""
        )
        raise _bad(
            path,
            number,
            f"{line!r} states a version{hint}",
            f"{name} alone: its version stands in lock/pins.toml",
            f"write {name} in lock/{path.name}, and its version in lock/pins.toml",
        )
    if requirement.marker is not None and not _MARKER.fullmatch(str(requirement.marker)):
        what = f"{name} has the marker {requirement.marker}"
        expected = "a marker that asks for python_version alone: one lock holds for one target"
        raise _bad(path, number, what, expected)
    return requirement


def _bad(path: Path, number: int, what: str, expected: str, mend: str = "") -> ForgeError:
    return ForgeError(
        f"{path.name}, line {number}: {what}",
        expected=expected,
        mend=mend or f"edit lock/{path.name}",
        exit_code=Exit.FAULT,
    )


def _text(path: Path) -> str:
    """The text of a file that people write by hand.

    Raises:
        FileNotFoundError: If it is not there.
        ForgeError: If it is no regular file, or not UTF-8; exit code 1.
    """
    what = "it is no regular file"
    try:
        if path.is_file() or not path.exists():
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        what = "it is not UTF-8 text"
    raise _bad(path, 1, what, "a text file", _put_back(path))


def _put_back(path: Path) -> str:
    return f"git checkout -- lock/{path.name}, or write it anew"


@dataclass(frozen=True)
class CpuWheel:
    """The CPU build of a package for one Python.

    Attributes:
        name: Canonical name, such as ``torch``.
        version: Its version, such as ``2.13.0+cpu``.
        file: Its file name.
        sha256: Its digest, from the table.
        metadata: What it requires, as the text of a METADATA file.
    """

    name: str
    version: str
    file: str
    sha256: str
    metadata: str


def metadata_path(name: str) -> Path:
    """Where the requirements of a CPU build stand.

    Args:
        name: Such as ``torch``.
    """
    return LOCK_DIR / f"{name}-cpu.metadata"


def cpu_wheels(pins: Pins, python: str) -> dict[str, CpuWheel]:
    """The CPU builds that the digest table has for a Python, with the metadata beside the table.

    Args:
        pins: The pins.
        python: ``X.Y``.

    Returns:
        Wheels by canonical name; a build without one for this Python is not among them.

    Raises:
        ForgeError: If the metadata is missing, or of another version.
    """
    tag = f"cp{python.replace('.', '')}"
    accepted = set(platforms(pins.glibc))
    found: dict[str, CpuWheel] = {}
    for file, digest in read_digests(CPU_DIGESTS).items():
        try:
            name, version, _, tags = parse_wheel_filename(file)
        except InvalidWheelFilename:
            continue
        build = pins.cpu_builds.get(name)
        fits = any(t.interpreter == t.abi == tag and t.platform in accepted for t in tags)
        if build is not None and str(version) == build.full and fits:
            metadata = _cpu_metadata(name, build.full)
            found[name] = CpuWheel(name, build.full, file, digest, metadata)
    return found


def cpu_wheel(pins: Pins, name: str, python: str) -> CpuWheel:
    """The CPU build of one package for a Python.

    Args:
        pins: The pins.
        name: Such as ``torch``.
        python: ``X.Y``.

    Raises:
        ForgeError: If the table has no such wheel, or the metadata is of another version.
    """
    found = cpu_wheels(pins, python).get(name)
    if found is not None:
        return found
    version, tag = pins.cpu_builds[name].full, f"cp{python.replace('.', '')}"
    raise ForgeError(
        f"{CPU_DIGESTS.name} has no digest of {name} {version} for Python {python}",
        expected=f"a line for {name}-{version}-{tag}-{tag}-<platform>.whl",
        mend="add the line, checked as docs/lock.md says",
        exit_code=Exit.FAULT,
    )


def held_wheel(wheel: CpuWheel, folders: Sequence[Path]) -> Path | None:
    """The real wheel of a CPU build, where the wheelhouse or a folder of the user's holds it.

    Args:
        wheel: Which one.
        folders: Folders of wheels; a file there counts if it has the digest of the table.
    """
    # the wheelhouse holds a file only once its digest was verified
    held = out_dir() / "wheelhouse" / wheel.sha256 / wheel.file
    if held.is_file():
        return held
    for folder in folders:
        file = folder / wheel.file
        if file.is_file() and sha256_file(file) == wheel.sha256:
            return file
    return None


def _cpu_metadata(name: str, version: str) -> str:
    path = metadata_path(name)
    try:
        text = _text(path)
    except FileNotFoundError as error:
        raise ForgeError(
            f"{path.name} is not there",
            expected=f"the requirements of {name} {version}",
            mend="take it from the wheel as docs/lock.md says",
            exit_code=Exit.FAULT,
        ) from error
    fields = metadata_fields(text)
    if fields["Name"] != [name] or fields["Version"] != [version]:
        raise ForgeError(
            f"{path.name} is of {' '.join(fields['Name'] + fields['Version'])}",
            expected=f"{name} {version}, as in lock/pins.toml",
            mend="take it from the wheel as docs/lock.md says",
            exit_code=Exit.FAULT,
        )
    return text


def metadata_fields(text: str) -> dict[str, list[str]]:
    """The fields of a METADATA file that decide a resolution, sorted.

    Args:
        text: Core metadata (PEP 566).
    """
    message = HeaderParser().parsestr(text)
    return {field: sorted(message.get_all(field) or []) for field in _FIELDS}


def wheel_metadata(path: Path) -> str:
    """The METADATA text of a wheel.

    Args:
        path: A wheel.

    Raises:
        ForgeError: If it is not a readable wheel.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(
                n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)
            )
            return archive.read(name).decode()
    except (OSError, StopIteration, zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise ForgeError(
            f"{path.name} is not a readable wheel", expected="a wheel", mend=f"remove {path}"
        ) from error


def write_standin(wheel: CpuWheel, folder: Path) -> None:
    """Make the metadata-only wheel that stands for a CPU build while resolving.

    No byte of it reaches a lock: the digest there is the table's.

    Args:
        wheel: Which one.
        folder: Where to put it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, version, *tag = wheel.file.removesuffix(".whl").split("-")
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / wheel.file, "w") as archive:
        archive.writestr(f"{info}/METADATA", wheel.metadata)
        archive.writestr(
            f"{info}/WHEEL",
            f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {'-'.join(tag)}\n",
        )
        archive.writestr(f"{info}/RECORD", "")


def inputs_key(
    pins: Pins,
    flavour: str,
    python: str,
    reached: Iterable[str],
    base: Sequence[Locked] | None = None,
) -> str:
    """The number that names everything a lock is made from.

    Args:
        pins: The pins.
        flavour: Such as ``runtime``.
        python: ``X.Y``.
        reached: Canonical names of the packages in the lock: a pin of a package that is not among
            them has no part in it, so a new torch leaves the lock of the tools alone.
        base: What :func:`base_packages` gave; it is read if not given.

    Returns:
        64 hex digits; another one as soon as an input, a pin that matters, what is left out, the
        digest of a CPU build or its requirements change. Comments and order do not count.

    Raises:
        ForgeError: If the input or the table is bad.
    """
    decided = constraints(pins, python)
    parts = [_FORMAT, python, pins.platform, pins.cutoff.isoformat()]
    parts += sorted(str(requirement) for requirement in requirements(pins, flavour, python))
    base = base_packages(pins, flavour, python) if base is None else base
    parts += [f"{p.name}=={p.version} {p.sha256}" for p in base]
    present = sorted(decided.keys() & set(reached))
    parts += [f"{name}=={decided[name]}" for name in present]
    later = sorted(pins.later.keys() & set(reached))
    parts += [f"{name} until {pins.later[name].isoformat()}" for name in later]
    for wheel in cpu_wheels(pins, python).values():
        if wheel.name in present:
            fields = metadata_fields(wheel.metadata)
            parts += [wheel.file, wheel.sha256]
            parts += [f"{field}: {value}" for field in _FIELDS for value in fields[field]]
    left_out = load_names().left_out_of(flavour)
    parts += [f"{one.name} of {one.by} is left out" for one in left_out]
    return sha256_text(*parts)


def render(packages: Iterable[Locked], key: str, python: str) -> str:
    """The text of a lock.

    Args:
        packages: What it holds.
        key: From :func:`inputs_key`.
        python: ``X.Y``.
    """
    body = "".join(
        f"{p.name}=={p.version} \\\n    --hash=sha256:{p.sha256}\n" for p in sorted(packages)
    )
    return (
        f"# Python {python}. Written by forge lock; what the two numbers prove: docs/lock.md.\n"
        f"# inputs sha256:{key}\n"
        f"# content sha256:{content_digest(body)}\n"
        f"{body}"
    )


@dataclass(frozen=True)
class Head:
    """The head of a lock.

    Attributes:
        inputs: The number of the inputs it says it was made from; empty if it has none.
        intact: Whether its content is what was written.
    """

    inputs: str
    intact: bool


def read_head(text: str) -> Head:
    """Read the head of a lock and compare its content with it.

    Args:
        text: The lock.
    """
    found: Mapping[str, str] = {
        m["what"]: m["digest"] for line in text.splitlines() if (m := _HEAD.fullmatch(line))
    }
    return Head(found.get("inputs", ""), found.get("content") == content_digest(text))


def needs(requirement: str, python: str) -> str | None:
    """The canonical name of a ``Requires-Dist`` that holds on the target, else None.

    Args:
        requirement: One ``Requires-Dist``; those of extras do not hold.
        python: ``X.Y`` of the target, a Linux on x86-64.
    """
    parsed = Requirement(requirement)
    return canonicalize_name(parsed.name) if holds(parsed, python) else None


def holds(requirement: Requirement, python: str, extras: Iterable[str] = ()) -> bool:
    """Whether a ``Requires-Dist`` holds on the target.

    Args:
        requirement: One ``Requires-Dist``.
        python: ``X.Y`` of the target, a Linux on x86-64.
        extras: The extras that are asked for.
    """
    marker, here = requirement.marker, environment(python)
    if marker is None:
        return True
    return any(marker.evaluate({**here, "extra": extra}) for extra in ("", *extras))
