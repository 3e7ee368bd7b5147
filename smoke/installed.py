"""What is installed in a site-packages folder, judged without importing any of it.

Formats: *Recording installed projects* and *Core metadata* of the Python Packaging User Guide;
pyc headers as in PEP 552.
"""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import importlib.util
import os
import re
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from smoke import elf

_CHUNK = 1 << 20
_CUDA_DISTRIBUTION = re.compile(
    r"(nvidia|cuda|cupy|triton|pytorch-triton|pytorch-cuda)(-.*|\d.*)?|cupy.*|.*-cu1[0-9]+"
)
_CUDA_LIBRARY = re.compile(
    r"lib(cudart|cublas(lt)?|cudnn\w*|cufft\w*|curand|cusolver\w*|cusparse\w*|cupti|nccl|nvrtc"
    r"[\w-]*|nvjitlink|nvshmem\w*|nvtoolsext|torch_cuda\w*|c10_cuda|triton)[.\-]\S*",
    re.IGNORECASE,
)
_BACKENDS = "torch.backends"
_TAG = re.compile(r"Tag:")
_LIBRARY_FOLDERS = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
    "/usr/local/lib",
)


@dataclass(frozen=True)
class Distribution:
    """One installed package.

    Attributes:
        name: Normalized name (PEP 503).
        version: Version, local part included.
        info: Its ``.dist-info`` folder.
        requires: Its ``Requires-Dist`` lines.
    """

    name: str
    version: str
    info: Path
    requires: tuple[str, ...]


def normalized(name: str) -> str:
    """A package name as PEP 503 normalizes it.

    Args:
        name: Any spelling.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(site: Path) -> list[Distribution]:
    """All packages installed in a site-packages folder, by name.

    Args:
        site: The folder.

    Raises:
        AssertionError: If a ``.dist-info`` folder has no readable METADATA.
    """
    found = []
    for info in site.glob("*.dist-info"):
        try:
            text = (info / "METADATA").read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise AssertionError(f"{info.name} has no readable METADATA: {error}") from error
        headers = HeaderParser().parsestr(text)
        found.append(
            Distribution(
                normalized(headers["Name"] or info.name.split("-")[0]),
                headers["Version"] or "unknown",
                info,
                tuple(headers.get_all("Requires-Dist") or ()),
            )
        )
    return sorted(found, key=lambda one: (one.name, one.version))


def read_lock(path: Path) -> dict[str, str]:
    """Name to version of every pin in a lock.

    Args:
        path: A pip requirements file of ``name==version`` lines with hashes.

    Raises:
        AssertionError: If a line is not a pin, or there is none.
        OSError: If the file cannot be read.
    """
    pins: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, gap, version = words[0].partition("==")
        assert gap and version, f"{path.name}: {words[0]!r} is not a pin"
        pins[normalized(name)] = version
    assert pins, f"{path.name} holds no package"
    return pins


def closure_problems(site: Path, lock: Path) -> list[str]:
    """Where the installed set and the lock differ; pip itself stands in no lock.

    Args:
        site: The site-packages folder.
        lock: The lock the image was made from.

    Returns:
        One sentence per difference.
    """
    pins = read_lock(lock)
    problems: list[str] = []
    seen: dict[str, str] = {}
    for one in distributions(site):
        if one.name in seen:
            versions = f"{seen[one.name]} and {one.version}"
            problems.append(f"{one.name} is installed twice, as {versions}: remove one .dist-info")
        elif one.name not in pins:
            if one.name != "pip":
                problems.append(f"{one.name} {one.version} is installed and not in the lock")
        elif one.version != pins[one.name]:
            problems.append(f"{one.name} is {one.version}, the lock says {pins[one.name]}")
        seen[one.name] = one.version
    problems += [f"{name} {pins[name]} is missing" for name in sorted(pins.keys() - seen)]
    return problems


@dataclass
class RecordFigures:
    """What a check of RECORD files read.

    Attributes:
        files: Files whose digest was computed.
        size: Their bytes.
    """

    files: int = 0
    size: int = 0


def record_problems(site: Path) -> tuple[list[str], RecordFigures]:
    """Files that differ from their RECORD line: missing, another size, another digest.

    Args:
        site: The site-packages folder.

    Returns:
        One sentence per bad file, in a fixed order, and what was read.
    """
    jobs: list[tuple[Path, str, str, str]] = []
    problems: list[str] = []
    for one in distributions(site):
        try:
            text = (one.info / "RECORD").read_text(encoding="utf-8")
        except OSError:
            problems.append(f"{one.name} has no RECORD")
            continue
        rows = [row for row in csv.reader(text.splitlines()) if row]
        if not rows:
            problems.append(f"{one.name} has an empty RECORD")
        for row in rows:
            name, digest, size = ([*row, "", ""])[:3]
            if digest:
                jobs.append((site / name, digest, size, f"{one.name}: {name}"))
    figures = RecordFigures()
    # hashing releases the interpreter's lock, so threads are enough
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for (_, _, _, label), (why, size_read) in zip(jobs, pool.map(_judge, jobs), strict=True):
            figures.files += 1
            figures.size += size_read
            if why:
                problems.append(f"{label} {why}")
    return problems, figures


def _judge(job: tuple[Path, str, str, str]) -> tuple[str, int]:
    path, expected, size, _ = job
    kind, _, wanted = expected.partition("=")
    try:
        digest = hashlib.new(kind)
    except ValueError:
        return f"has a digest of the unknown kind {kind!r}", 0
    read = 0
    try:
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(_CHUNK)
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                read += count
    except OSError as error:
        return f"cannot be read: {error.strerror}", read
    if size.isdigit() and int(size) != read:
        return f"has {read} bytes, RECORD says {size}", read
    found = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    return ("" if found == wanted else "has another digest than RECORD says"), read


def unrecorded(site: Path) -> list[str]:
    """Files below a site-packages folder that no RECORD names, byte code apart.

    Args:
        site: The folder.

    Returns:
        Their paths relative to it, sorted.
    """
    known: set[str] = set()
    for one in distributions(site):
        record = one.info / "RECORD"
        if record.is_file():
            rows = csv.reader(record.read_text(encoding="utf-8").splitlines())
            known |= {os.path.normpath(row[0]) for row in rows if row}
    return sorted(name for name in _files(site) if name not in known and not name.endswith(".pyc"))


def _files(folder: Path) -> Iterator[str]:
    start = len(str(folder)) + 1
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            yield f"{root}/{name}"[start:]


def bytecode_problems(site: Path) -> tuple[list[str], int]:
    """Byte code that was not compiled from the source beside it.

    An image holds byte code that Python never compares with its source (PEP 552, unchecked hash),
    so an edit of a source, or a wrong file in ``__pycache__``, would go unnoticed.

    Args:
        site: A folder of packages.

    Returns:
        One sentence per bad file, and how many were read.
    """
    problems: list[str] = []
    count = 0
    for name in _files(site):
        if not name.endswith(".pyc") or "__pycache__" not in name:
            continue
        path = site / name
        source = path.parent.parent / f"{path.name.split('.')[0]}.py"
        with path.open("rb") as file:
            header = file.read(16)
        if not source.is_file():
            problems.append(f"{name} has no source")
        elif len(header) < 16:
            problems.append(f"{name} is cut short")
        elif int.from_bytes(header[4:8], "little") & 1:
            if header[8:16] != importlib.util.source_hash(source.read_bytes()):
                problems.append(f"{name} was compiled from another source")
        else:
            stat = source.stat()
            stamp = (int(stat.st_mtime) & 0xFFFFFFFF).to_bytes(4, "little")
            size = (stat.st_size & 0xFFFFFFFF).to_bytes(4, "little")
            if header[8:16] != stamp + size:
                problems.append(f"{name} is stale: its source has another time or size")
        count += 1
    return problems, count


def cuda_problems(site: Path) -> list[str]:
    """Every trace of CUDA: packages, libraries, and a torch that is not the CPU build.

    Args:
        site: The site-packages folder.

    Returns:
        One sentence per finding.
    """
    problems: list[str] = []
    torch: Distribution | None = None
    for one in distributions(site):
        if _CUDA_DISTRIBUTION.fullmatch(one.name):
            problems.append(f"the package {one.name} {one.version} is installed")
        if one.name == "torch":
            torch = one
        for line in one.requires:
            wanted = re.match(r"[A-Za-z0-9._-]+", line)
            required = ";" not in line or "extra" not in line.partition(";")[2]
            if wanted and required and _CUDA_DISTRIBUTION.fullmatch(normalized(wanted[0])):
                problems.append(f"{one.name} requires {line}")
    for name in _files(site):
        if _CUDA_LIBRARY.fullmatch(Path(name).name):
            problems.append(f"the library {name} is there")
    if torch is None:
        problems.append("torch is not installed")
        return problems
    if not torch.version.endswith("+cpu"):
        problems.append(f"torch is {torch.version}, not a +cpu build")
    version = site / "torch" / "version.py"
    text = version.read_text(encoding="utf-8") if version.is_file() else ""
    if not re.search(r"^cuda\b[^=\n]*=\s*None\s*$", text, re.MULTILINE):
        problems.append("torch/version.py does not say that torch was built without CUDA")
    if not re.search(r"^__version__\s*=\s*['\"][^'\"]*\+cpu['\"]", text, re.MULTILINE):
        problems.append("torch/version.py does not say +cpu")
    return problems


def requirement_problems(site: Path) -> tuple[list[str], int]:
    """Requirements of installed packages that the installed versions do not meet.

    Extras are left out: nobody knows which were asked for.

    Args:
        site: The site-packages folder.

    Returns:
        One sentence per requirement that is not met, and how many were looked at.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    found = distributions(site)
    versions: dict[str, list[str]] = {}
    for one in found:
        versions.setdefault(one.name, []).append(one.version)
    problems: list[str] = []
    count = 0
    for one in found:
        for line in one.requires:
            try:
                wanted = Requirement(line)
            except InvalidRequirement:
                problems.append(f"{one.name} {one.version} requires {line!r}, which means nothing")
                continue
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            count += 1
            name = normalized(wanted.name)
            what = f"{one.name} {one.version} needs {wanted.name}{wanted.specifier}"
            if name not in versions:
                problems.append(f"{what}, which is not installed")
            problems += [
                f"{what}, and {name} {version} is installed"
                for version in versions.get(name, ())
                if not wanted.specifier.contains(version, prereleases=True)
            ]
    return problems, count


def platform_problems(
    site: Path, supported: Container[str], minor: str, machine: str
) -> tuple[list[str], PlatformCount]:
    """Packages and libraries that were made for another Python or another machine.

    Args:
        site: The site-packages folder.
        supported: The wheel tags that the interpreter takes, such as ``cp311-cp311-linux_x86_64``.
        minor: The interpreter, such as ``311``.
        machine: The machine, as ``uname -m`` says it.

    Returns:
        One sentence per package or library, and how many of each were looked at.
    """
    problems: list[str] = []
    wheels = 0
    for one in distributions(site):
        path = one.info / "WHEEL"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        tags = [line.partition(":")[2].strip() for line in text.splitlines() if _TAG.match(line)]
        wheels += bool(tags)
        if tags and not any(tag in supported for tag in tags):
            problems.append(
                f"{one.name} {one.version} was made for {tags[0]}, "
                f"and this is Python {minor[0]}.{minor[1:]} on {machine}"
            )
    files = libraries(site)
    for file in files:
        label = file.relative_to(site)
        own = re.search(r"\.cpython-(\d+)-", file.name)
        if own and own[1] != minor:
            problems.append(f"{label} was made for Python {own[1][0]}.{own[1][1:]}")
        try:
            found = elf.read(file).machine
        except (elf.NotElfError, OSError):
            # the check of needed libraries names it
            continue
        if found != machine:
            problems.append(f"{label} was made for {found}, and this machine is {machine}")
    return problems, PlatformCount(wheels, len(files))


@dataclass(frozen=True)
class PlatformCount:
    """What a check of platforms read.

    Attributes:
        wheels: Packages that say what they were made for.
        libraries: Shared libraries.
    """

    wheels: int
    libraries: int


def backend_problems(site: Path) -> list[str]:
    """Packages other than torch_tpu that make themselves torch's extra backend, or its absence.

    torch has one spare backend ("PrivateUse1"), and loads whatever is registered for it.

    Args:
        site: The site-packages folder.
    """
    found: dict[str, list[str]] = {}
    for one in distributions(site):
        path = one.info / "entry_points.txt"
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
        try:
            parser.read_string(path.read_text(encoding="utf-8") if path.is_file() else "")
        except configparser.Error as error:
            return [f"the entry_points.txt of {one.name} cannot be read: {error}"]
        if parser.has_section(_BACKENDS):
            found.setdefault(one.name, []).extend(dict(parser.items(_BACKENDS)))
    own = found.pop("torch-tpu", [])
    problems = [
        f"{name} registers {', '.join(names) or 'nothing'} as torch's backend as well"
        for name, names in sorted(found.items())
    ]
    if "torch_tpu" not in own:
        problems.append("torch-tpu does not register itself as a backend of torch")
    return problems


@dataclass(frozen=True)
class Glues:
    """torch_tpu's libraries for versions of torch.

    Attributes:
        modules: Version, such as ``2_13_0``, to the modules that it has, by path.
        wanted: The range of torch that torch_tpu's metadata names.
        torch: The installed torch.
    """

    modules: dict[str, set[str]]
    wanted: str
    torch: str


_GLUE = re.compile(r"(.+?)_(\d+_\d+_\d+)(_common)?\.so")


def glues(site: Path) -> Glues:
    """All glue that torch_tpu brings, and the versions of torch that it claims to serve.

    Args:
        site: The site-packages folder.

    Raises:
        AssertionError: If torch or torch_tpu is not installed.
    """
    from packaging.requirements import Requirement

    installed_now = {one.name: one for one in distributions(site)}
    assert {"torch", "torch-tpu"} <= installed_now.keys(), "torch and torch_tpu are not installed"
    wanted = [Requirement(line) for line in installed_now["torch-tpu"].requires]
    modules: dict[str, set[str]] = {}
    for name in _files(site / "torch_tpu"):
        path = Path(name)
        if match := _GLUE.fullmatch(path.name):
            folder = path.parent.as_posix().replace(match[2], "*")
            modules.setdefault(match[2], set()).add(f"{folder}/{match[1]}")
    return Glues(
        modules,
        next((str(one.specifier) for one in wanted if normalized(one.name) == "torch"), ""),
        installed_now["torch"].version,
    )


def glue_problems(found: Glues) -> tuple[list[str], dict[str, str]]:
    """Versions of torch that torch_tpu claims to serve, and has no whole glue for.

    A glue serves torch from its own version to that of the next glue, so the minor versions of the
    claimed range are looked at one by one.

    Args:
        found: What :func:`glues` gives.

    Returns:
        One sentence per gap, and each claimed minor version with the glue that serves it.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    if not found.modules:
        return ["torch_tpu has no glue at all"], {}
    whole = set.union(*found.modules.values())
    problems = [
        f"the glue for torch {version.replace('_', '.')} has no {sorted(whole - modules)[0]}"
        for version, modules in sorted(found.modules.items())
        if modules != whole
    ]
    claimed = SpecifierSet(found.wanted)
    named = {Version(one.version) for one in claimed if "*" not in one.version}
    built = sorted(Version(version.replace("_", ".")) for version in found.modules)
    last = max([*named, *built])
    minors = {version for version in [*named, *built] if version in claimed}
    minors |= {
        Version(f"{last.major}.{minor}.0")
        for minor in range(last.minor + 1)
        if Version(f"{last.major}.{minor}.0") in claimed
    }
    served: dict[str, str] = {}
    for version in sorted({*minors, Version(Version(found.torch).public)}):
        fitting = [one for one in built if one <= version]
        if fitting:
            served[str(version)] = str(fitting[-1])
        else:
            problems.append(f"torch_tpu has no glue for torch {version}, which it claims to serve")
    return problems, served


def abi_problems(site: Path, root: Path, version: str) -> tuple[list[str], int]:
    """Symbols that a glue needs and that neither torch, torch_tpu's XLA nor the system defines.

    The loader would say so for the first one only, and only when the glue is loaded.

    Args:
        site: The site-packages folder.
        root: The root of the file system.
        version: The glue's, such as ``2_13_0``.

    Returns:
        One sentence at most, and how many symbols were looked for.
    """
    system = system_folders(root)
    waiting = [
        path
        for path in libraries(site / "torch_tpu")
        if (match := _GLUE.fullmatch(path.name)) and match[2] == version
    ]
    # what the interpreter itself defines belongs to Python and not to torch
    names = {
        name
        for path in waiting
        for name in elf.undefined(path)
        if not name.startswith((b"Py", b"_Py"))
    }
    count = len(names)
    seen: set[str] = set()
    while waiting and names:
        path = waiting.pop(0)
        if path.name in seen:
            continue
        seen.add(path.name)
        names = elf.missing(path, names)
        library = elf.read(path)
        for needed in library.needed:
            folders = [*library.folders(), site / "torch" / "lib", *system]
            waiting += [found for f in folders if (found := f / needed).is_file()][:1]
    if not names:
        return [], count
    first = min(names).decode(errors="replace")
    return [
        f"the glue for torch {version.replace('_', '.')} needs {len(names)} symbols "
        f"that the installed torch does not define, such as {first}"
    ], count


def libraries(site: Path) -> list[Path]:
    """All shared libraries below a site-packages folder, by path.

    Args:
        site: The folder.
    """
    return [site / name for name in _files(site) if re.search(r"\.so(\.\d+)*$", name)]


def system_folders(root: Path, search_path: str = "") -> list[Path]:
    """Where the loader looks for libraries of the system.

    Args:
        root: The root of the file system.
        search_path: A value of ``LD_LIBRARY_PATH``.
    """
    named = [entry for entry in search_path.split(":") if entry]
    for conf in sorted((root / "etc/ld.so.conf.d").glob("*.conf")):
        for line in conf.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("/"):
                named.append(line.strip())
    unique = dict.fromkeys([*named, *_LIBRARY_FOLDERS])
    return [folder for entry in unique if (folder := root / entry.lstrip("/")).is_dir()]


@dataclass(frozen=True)
class LinkFigures:
    """What a check of shared libraries read.

    Attributes:
        files: Libraries read.
        floors: Such as ``GLIBC`` to the highest version that any library wants.
        offered: The same names to the highest version that the system's libraries define.
    """

    files: int
    floors: dict[str, str]
    offered: dict[str, str]


def link_problems(
    site: Path, root: Path, search_path: str = ""
) -> tuple[list[str], list[str], LinkFigures]:
    """Needed libraries that are nowhere, and symbol versions that the system does not define.

    A library without a run path, or below torch's importer, finds what torch has already loaded,
    so torch's own folder counts for all. Where one looks by the ``DT_RPATH`` of what loads it
    (ld.so(8)), that of every library that needs it counts.

    Args:
        site: The site-packages folder.
        root: The root of the file system.
        search_path: A value of ``LD_LIBRARY_PATH``.

    Returns:
        Problems of needed libraries, problems of symbol versions, and figures.
    """
    system = system_folders(root, search_path)
    usual = [site / "torch" / "lib", *system]
    cache: dict[str, elf.Library | None] = {}
    needs: list[str] = []
    versions: set[str] = set()
    floors: dict[str, str] = {}
    offered: dict[str, str] = {}
    files = libraries(site)
    read: dict[Path, elf.Library] = {}
    unreadable: dict[Path, Exception] = {}
    for path in files:
        try:
            read[path] = elf.read(path)
        except (elf.NotElfError, OSError) as error:
            unreadable[path] = error
    inherited = _inherited(read.values(), usual)
    for path in files:
        label = path.relative_to(site)
        if path in unreadable:
            needs.append(f"{label} cannot be read: {unreadable[path]}")
            continue
        library = read[path]
        folders = _searched(library, inherited.get(path.resolve(), ()), usual)
        for name in library.needed:
            if _found(name, folders) is None:
                needs.append(f"{label} needs {name}, which is nowhere")
        for name, wanted in library.wants.items():
            for version in wanted:
                _raise_floor(floors, version)
            found = _system_library(name, system, cache)
            if found is None:
                continue
            for version in found.offers:
                _raise_floor(offered, version)
            for version in sorted(wanted - found.offers):
                versions.add(f"{label} needs {version}, which the system's {name} does not define")
    return needs, sorted(versions), LinkFigures(len(files), floors, offered)


def _inherited(
    read: Collection[elf.Library], usual: Sequence[Path]
) -> dict[Path, dict[Path, None]]:
    """The folders that each library is handed down by those that need it, near or far.

    Args:
        read: The libraries that may hand down, and be handed.
        usual: Where every one of them looks last.

    Returns:
        Real path of a library to its folders, in order; a dictionary for its fast ``in``.
    """
    known = {library.path.resolve(): library for library in read}
    inherited: dict[Path, dict[Path, None]] = {path: {} for path in known}
    waiting = list(known)
    while waiting:
        path = waiting.pop()
        library, own = known[path], inherited[path]
        # what has a run path does not heed what it was handed, and passes it on all the same
        passed = dict.fromkeys([*library.handed_down(), *own])
        if not passed:
            continue
        folders = _searched(library, own, usual)
        for name in library.needed:
            found = _found(name, folders)
            needed = found.resolve() if found else None
            if needed not in known or passed.keys() <= inherited[needed].keys():
                continue
            inherited[needed] |= passed
            waiting.append(needed)
    return inherited


def _searched(library: elf.Library, inherited: Iterable[Path], usual: Sequence[Path]) -> list[Path]:
    """Where the loader looks for what a library needs itself, in order."""
    return [*library.folders(), *(() if library.runpath else inherited), *usual]


def _found(name: str, folders: Iterable[Path]) -> Path | None:
    return next((path for folder in folders if (path := folder / name).is_file()), None)


def _system_library(
    name: str, system: list[Path], cache: dict[str, elf.Library | None]
) -> elf.Library | None:
    if name not in cache:
        path = next((folder / name for folder in system if (folder / name).is_file()), None)
        cache[name] = elf.read(path) if path else None
    return cache[name]


def _raise_floor(floors: dict[str, str], version: str) -> None:
    name, _, number = version.rpartition("_")
    if re.fullmatch(r"[0-9.]+", number) and name in ("GLIBC", "GLIBCXX", "CXXABI", "GCC"):
        floors[name] = max(
            floors.get(name, "0"), number, key=lambda text: tuple(map(int, text.split(".")))
        )
