"""The rules of the audit, one function each.

A rule looks at the contents of a wheel and says what is wrong with it: what was found, what was
expected, what mends it. It answers with what it saw, or that it cannot judge, and why.

Sources: the wheel format (PEP 427, core metadata, PEP 639), manylinux (PEP 513, PEP 600), the
loader of TorchTPU (``torch_tpu/_versioned_so_loader.py`` in its wheel), and the published wheels
of torch_tpu 0.2.0 and libtpu, which all of them have been tried on.
"""

from __future__ import annotations

import configparser
import csv
import io
import re
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import PurePosixPath
from posixpath import normpath

from packaging.metadata import RawMetadata, parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag
from packaging.utils import (
    InvalidWheelFilename,
    NormalizedName,
    canonicalize_name,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from tpuforge.build.contents import Contents, Member, module_of
from tpuforge.build.findings import LIBTPU, TORCH_TPU, Severity
from tpuforge.console import size

_AGAIN = "fetch the wheel again, by its digest, or build it again"
_BUILD = "build it as upstream documents: ./forge build_wheel"
_WHEEL_COMMON = "build it with --config=wheel_common: ./forge build_wheel"

# What manylinux lets a wheel take from the system (PEP 513, extended by PEP 599 and PEP 600).
_SYSTEM = frozenset(
    {
        "ld-linux-x86-64.so.2",
        "libanl.so.1",
        "libatomic.so.1",
        "libc.so.6",
        "libdl.so.2",
        "libgcc_s.so.1",
        "libm.so.6",
        "libmvec.so.1",
        "libnsl.so.1",
        "libpthread.so.0",
        "libresolv.so.2",
        "librt.so.1",
        "libstdc++.so.6",
        "libutil.so.1",
        "libz.so.1",
    }
)
# What torch's own wheel brings, in site-packages/torch/lib.
_TORCH = frozenset(
    {
        "libc10.so",
        "libshm.so",
        "libtorch.so",
        "libtorch_cpu.so",
        "libtorch_global_deps.so",
        "libtorch_python.so",
    }
)
# Newest symbol versions of GCC's libraries on a system with glibc 2.N, by the oldest N that has
# them; facts of the distributions, as the policies of PyPA's auditwheel list them.
_GCC_STEPS = (
    (5, {"GLIBCXX": "3.4.8", "CXXABI": "1.3.1", "GCC": "4.2.0"}),
    (12, {"GLIBCXX": "3.4.13", "CXXABI": "1.3.3", "GCC": "4.3.0"}),
    (17, {"GLIBCXX": "3.4.19", "CXXABI": "1.3.7", "GCC": "4.8.0"}),
    (24, {"GLIBCXX": "3.4.22", "CXXABI": "1.3.10", "GCC": "4.8.0"}),
    (27, {"GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"}),
    (31, {"GLIBCXX": "3.4.28", "CXXABI": "1.3.12", "GCC": "7.0.0"}),
    (34, {"GLIBCXX": "3.4.29", "CXXABI": "1.3.13", "GCC": "7.0.0"}),
    (35, {"GLIBCXX": "3.4.30", "CXXABI": "1.3.13", "GCC": "12.0.0"}),
    (39, {"GLIBCXX": "3.4.33", "CXXABI": "1.3.15", "GCC": "14.0.0"}),
)
_OLD_NAMES = {"manylinux1": 5, "manylinux2010": 12, "manylinux2014": 17}
_MANYLINUX = re.compile(r"manylinux_2_(\d+)_(\w+)")
_OLD_MANYLINUX = re.compile(r"(manylinux1|manylinux2010|manylinux2014)_(\w+)")
_LINUX = re.compile(r"linux_(\w+)")
_SYMBOL = re.compile(r"(GLIBC|GLIBCXX|CXXABI|GCC)_(.+)")
_NUMBER = re.compile(r"\d+(\.\d+)*")
_CPYTHON = re.compile(r"cp3(\d+)")

_TAGS_MOST = 1000
_BASE = "libxla_base.so"
_BAZEL_FOLDER = re.compile("/execroot/|/_bazel_")
_COMMIT = "torch_tpu/include/XLA_COMMIT"
_GLUE = re.compile(r"_(\d+)_(\d+)_(\d+)(?:_common)?\.so$")
_ENTRY = ("torch.backends", "torch_tpu", "torch_tpu._loader:load")
_FOREIGN = re.compile(
    r"lib(torch|c10|caffe2|shm)(_\w+)?\.so(\.\d+)*"
    r"|lib(cuda|cudart|cudnn|cublas|cufft|cupti|curand|cusolver|cusparse|nccl|nv)\w*\.so(\.\d+)*"
    r"|libtriton\.so"
)
_CUDA = re.compile(r"nvidia-.+|cuda-.+|cupy.*|triton|pytorch-triton.*")
_LICENCE = re.compile(r"(licen[cs]e|copying|notice)([._-].*)?", re.IGNORECASE)


class UnjudgedError(Exception):
    """A rule that cannot judge, and why; something else is wrong, or was not asked for."""


@dataclass
class Subject:
    """A wheel under audit.

    Args:
        contents: What is in it.
        torch: The torch it will meet, such as ``2.13.0+cpu``; None if nobody knows.
        xla_commit: The XLA commit it must record; None if any will do.
        measure_pjrt: Loads the library of this name and gives its PJRT API version; None if that
            was not asked for.
    """

    contents: Contents
    torch: str | None = None
    xla_commit: str | None = None
    measure_pjrt: Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        try:
            name, version, _, tags = parse_wheel_filename(self.contents.path.name)
        except InvalidWheelFilename:
            self.file_name: tuple[NormalizedName, Version, frozenset[Tag]] | None = None
        else:
            self.file_name = (name, version, tags)
        folders = {name.partition("/")[0] for name in self.contents.members}
        self.dist_infos = sorted(name for name in folders if name.endswith(".dist-info"))
        self.raw: RawMetadata = {}
        metadata = self.dist_info("METADATA")
        if metadata is not None:
            self.raw = parse_email(metadata)[0]

    @property
    def kind(self) -> str:
        """Which package it is: by its metadata, or by its file name if they do not say."""
        if self.raw.get("name"):
            return canonicalize_name(self.raw["name"])
        return self.file_name[0] if self.file_name else ""

    def dist_info(self, file: str) -> bytes | None:
        """A file of the ``.dist-info`` folder, or None without it or without such a folder."""
        if len(self.dist_infos) != 1:
            return None
        return self.contents.kept.get(f"{self.dist_infos[0]}/{file}")

    def metadata(self) -> RawMetadata:
        """The fields of METADATA.

        Raises:
            UnjudgedError: If there are none.
        """
        if not self.raw:
            raise UnjudgedError("there is no METADATA to read")
        return self.raw

    def wheel(self) -> Message:
        """The fields of WHEEL.

        Raises:
            UnjudgedError: If there are none.
        """
        text = self.dist_info("WHEEL")
        if text is None:
            raise UnjudgedError("there is no WHEEL to read")
        return Parser().parsestr(text.decode("utf-8", "replace"))

    def tags(self) -> frozenset[Tag]:
        """The tags of the file name.

        Raises:
            UnjudgedError: If it has none.
        """
        if self.file_name is None:
            raise UnjudgedError("the file name tells no tags")
        return self.file_name[2]

    def requirements(self) -> list[Requirement]:
        """What it requires; lines that are no requirements are the business of ``metadata``."""
        made = []
        for line in self.metadata().get("requires_dist", []):
            try:
                made.append(Requirement(line))
            except InvalidRequirement:
                continue
        return made


Fault = Callable[..., None]


def _several(names: Collection[str], most: int = 4) -> str:
    """A list for people: the first few, and how many more."""
    first = sorted(names)[:most]
    rest = len(names) - len(first)
    return ", ".join(first) + (f" and {rest} more" if rest else "")


# --- any wheel ---------------------------------------------------------------------------------


def _archive(subject: Subject, fault: Fault) -> str:
    contents = subject.contents
    for text in contents.faults:
        fault(text, "a zip archive that an installer can unpack safely", _AGAIN)
    unpacked = sum(member.length for member in contents.members.values())
    return f"{len(contents.members)} files, {size(contents.length)}, unpacked {size(unpacked)}"


def _metadata(subject: Subject, fault: Fault) -> str:
    if len(subject.dist_infos) != 1:
        found = _several(subject.dist_infos) or "none"
        fault(f"folders *.dist-info: {found}", "exactly one", _AGAIN)
        return ""
    for file in ("METADATA", "WHEEL", "RECORD"):
        if subject.dist_info(file) is None:
            fault(f"{subject.dist_infos[0]}/{file} is missing", "METADATA, WHEEL, RECORD", _AGAIN)
    if subject.dist_info("METADATA") is None:
        return ""
    raw = subject.raw
    for key, text in (("metadata_version", "Metadata-Version"), ("name", "Name")):
        if not raw.get(key):
            fault(f"METADATA has no {text}", "Metadata-Version, Name and Version", _AGAIN)
    try:
        Version(raw.get("version", ""))
    except InvalidVersion:
        fault(f"METADATA: Version is {raw.get('version')!r}", "a version (PEP 440)", _AGAIN)
    for line in raw.get("requires_dist", []):
        try:
            Requirement(line)
        except InvalidRequirement:
            fault(f"METADATA: Requires-Dist is {line!r}", "a requirement (PEP 508)", _AGAIN)
    try:
        SpecifierSet(raw.get("requires_python", ""))
    except InvalidSpecifier:
        fault(
            f"METADATA: Requires-Python is {raw.get('requires_python')!r}",
            "a range, such as >=3.11",
            _AGAIN,
        )
    return f"{raw.get('name')} {raw.get('version')}, metadata {raw.get('metadata_version')}"


def _record(subject: Subject, fault: Fault) -> str:
    text = subject.dist_info("RECORD")
    if text is None:
        raise UnjudgedError("there is no RECORD to read")
    own = f"{subject.dist_infos[0]}/RECORD"
    # signatures over RECORD cannot stand in it
    unlisted = {own, f"{own}.jws", f"{own}.p7s"}
    members = subject.contents.members
    listed: set[str] = set()
    try:
        rows = list(csv.reader(io.StringIO(text.decode("utf-8", "replace"), newline="")))
    except csv.Error as error:
        fault(f"RECORD cannot be read: {error}", "comma-separated values", _AGAIN)
        return ""
    for row in rows:
        if len(row) != 3:
            fault(f"RECORD: the line {','.join(row)!r}", "path,sha256=…,size", _AGAIN)
            continue
        name, digest, length = row
        if name in listed:
            fault(f"RECORD lists {name} twice", "each file once", _AGAIN)
        listed.add(name)
        member = members.get(name)
        if member is None:
            fault(f"RECORD lists {name}, which is not in the wheel", "only its files", _AGAIN)
        elif name not in unlisted:
            if digest != f"sha256={member.sha256}":
                fault(
                    f"{name} is sha256={member.sha256}",
                    f"{digest or 'no digest'}, as RECORD says",
                    "do not install it: the file was changed after the wheel was made",
                )
            if length != str(member.length):
                fault(
                    f"{name} has {member.length} bytes",
                    f"{length or 'no size'}, as RECORD says",
                    _AGAIN,
                )
    extra = set(members) - listed - unlisted
    if extra:
        fault(f"RECORD does not list {_several(extra)}", "every file of the wheel", _AGAIN)
    return f"{len(listed)} files, all digests and sizes right"


def _name(subject: Subject, fault: Fault) -> str:
    file = subject.contents.path.name
    if subject.file_name is None:
        fault(f"the file is called {file}", "NAME-VERSION-PYTHON-ABI-PLATFORM.whl", "rename it")
        return ""
    name, version, _ = subject.file_name
    raw = subject.metadata()
    told = (raw.get("name", ""), raw.get("version", ""))
    if canonicalize_name(told[0]) != name or not _same_version(told[1], version):
        fault(
            f"the file name says {name} {version}, METADATA says {told[0]} {told[1]}",
            "the same name and version in both",
            "do not rename wheels; build it with the version it is to have",
        )
    folder = subject.dist_infos[0].removesuffix(".dist-info").rpartition("-")
    if canonicalize_name(folder[0]) != name or not _same_version(folder[2], version):
        fault(
            f"the folder is {subject.dist_infos[0]}",
            f"name and version of the file, {name} {version}",
            _AGAIN,
        )
    return f"{name} {version} in the file name, METADATA and {subject.dist_infos[0]}"


def _same_version(text: str, version: Version) -> bool:
    try:
        return Version(text.replace("_", "+")) == version
    except InvalidVersion:
        return False


def _tags(subject: Subject, fault: Fault) -> str:
    named = {str(tag) for tag in subject.tags()}
    wheel = subject.wheel()
    told: set[str] = set()
    for line in wheel.get_all("Tag", []):
        pythons, abis, platforms = (
            part.split(".") for part in f"{str(line).strip()}--".split("-", 3)[:3]
        )
        if len(told) + len(pythons) * len(abis) * len(platforms) > _TAGS_MOST:
            fault(f"WHEEL has more than {_TAGS_MOST} tags", "those of the file name", _AGAIN)
            return ""
        told |= {
            f"{one}-{abi}-{platform}" for one in pythons for abi in abis for platform in platforms
        }
    if told != named:
        fault(
            f"WHEEL has the tags {_several(told) or 'none'}",
            f"those of the file name: {_several(named)}",
            "build it for the Python and platform that it is to be tagged with",
        )
    if str(wheel.get("Wheel-Version", "")).partition(".")[0] != "1":
        fault(f"Wheel-Version is {wheel.get('Wheel-Version')}", "1.0", _AGAIN)
    pure = str(wheel.get("Root-Is-Purelib", "")).strip().lower() == "true"
    if pure and subject.contents.elf_files():
        fault("Root-Is-Purelib is true", "false: there are shared libraries in it", _AGAIN)
    return _several(named)


def _python(subject: Subject, fault: Fault) -> str:
    tagged = sorted(
        int(found[1])
        for tag in subject.tags()
        if (found := _CPYTHON.fullmatch(tag.interpreter)) and tag.abi == tag.interpreter
    )
    try:
        wanted = SpecifierSet(subject.metadata().get("requires_python", ""))
    except InvalidSpecifier as error:
        raise UnjudgedError("Requires-Python is not a range") from error
    for minor in tagged:
        # any bug-fix release will do, so ask for one that every ">=3.N.k" lets in
        if f"3.{minor}.99" not in wanted:
            fault(
                f"Requires-Python is {wanted}",
                f"a range with Python 3.{minor}, which the wheel is tagged for",
                "build it for the Python that it is to be tagged with",
            )
    compiled: dict[str, list[str]] = defaultdict(list)
    for member in subject.contents.members.values():
        for version in member.pythons:
            compiled[version].append(member.name)
    right = {f"3.{minor}" for minor in tagged}
    for version, names in sorted(compiled.items()):
        if right and version not in right:
            fault(
                f"{_several(names, 2)}: compiled for Python {version}",
                f"Python {', '.join(sorted(right))}, which the wheel is tagged for",
                "give Bazel the same Python twice: HERMETIC_PYTHON_VERSION and PYTHON_VERSION",
            )
    count = sum(len(names) for names in compiled.values())
    also = f"; {count} extensions compiled for {_several(compiled)}" if compiled else ""
    return f"Requires-Python {wanted or 'any'}{also}"


def _elf(subject: Subject, fault: Fault) -> str:
    for member in subject.contents.members.values():
        if member.damage:
            fault(f"{member.name} {member.damage}", "a whole ELF file", _AGAIN)
        elif member.name.endswith(".so") and member.elf is None:
            fault(f"{member.name} is not an ELF file", "a shared library", _AGAIN)
    machines = {machine for _, machine in _platforms(subject)}
    files = subject.contents.elf_files()
    wrong: dict[str, list[str]] = defaultdict(list)
    for member, elf in files:
        if elf.machine not in machines:
            wrong[elf.machine].append(member.name)
    for machine, names in sorted(wrong.items()):
        fault(
            f"{_several(names)}: for {machine}",
            f"{', '.join(sorted(machines)) or 'no shared library'}, as tagged",
            "build it on the platform that it is to be tagged with",
        )
    seen = _several({elf.machine for _, elf in files})
    return f"{len(files)} ELF file{'s' * (len(files) != 1)}" + (f" for {seen}" if seen else "")


def _platforms(subject: Subject) -> list[tuple[int | None, str]]:
    """The platforms of the tags: N of glibc 2.N (None for plain ``linux``), and the machine."""
    found: list[tuple[int | None, str]] = []
    for platform in sorted({tag.platform for tag in subject.tags()}):
        if new := _MANYLINUX.fullmatch(platform):
            found.append((int(new[1]), new[2]))
        elif old := _OLD_MANYLINUX.fullmatch(platform):
            found.append((_OLD_NAMES[old[1]], old[2]))
        elif plain := _LINUX.fullmatch(platform):
            found.append((None, plain[1]))
    return found


def _symbols(subject: Subject, fault: Fault) -> str:
    numbers = [number for number, _ in _platforms(subject) if number is not None]
    if not numbers:
        raise UnjudgedError("it has no manylinux tag, which would promise a glibc")
    floor = min(numbers)
    most = {"GLIBC": Version(f"2.{floor}")}
    for number, versions in _GCC_STEPS:
        if number <= floor:
            most |= {family: Version(version) for family, version in versions.items()}
    newest: dict[str, Version] = {}
    wrong: dict[str, set[str]] = defaultdict(set)
    private: set[str] = set()
    for member, elf in subject.contents.elf_files():
        for version in {one for versions in elf.wants.values() for one in versions}:
            found = _SYMBOL.fullmatch(version)
            if not found or found[1] not in most:
                continue
            family = found[1]
            if _NUMBER.fullmatch(found[2]):
                newest[family] = max(newest.get(family, Version("0")), Version(found[2]))
                if Version(found[2]) > most[family]:
                    wrong[version].add(member.name)
            elif version == "GLIBC_PRIVATE":
                private.add(member.name)
            elif family == "GLIBC":
                # the marks of newer loaders, such as GLIBC_ABI_DT_RELR of 2.36
                wrong[version].add(member.name)
    for version, names in sorted(wrong.items()):
        fault(
            f"{_several(names)}: needs {version}",
            f"at most {', '.join(f'{family}_{number}' for family, number in most.items())}, which"
            f" manylinux_2_{floor} promises",
            "build it in the builder image, whose libraries are old enough",
        )
    if private:
        fault(
            f"{_several(private)}: needs GLIBC_PRIVATE",
            "symbols that glibc promises to keep",
            "run it with the glibc that it was tried with, as the images do",
            severity=Severity.WARNING,
        )
    return ", ".join(f"{family}_{number}" for family, number in sorted(newest.items()))


def _libraries(subject: Subject, fault: Fault) -> str:
    files = subject.contents.elf_files()
    inside: dict[str, set[str]] = defaultdict(set)
    for member, elf in files:
        place = PurePosixPath(member.name)
        for name in {place.name, elf.soname} - {""}:
            inside[name].add(str(place.parent))
    for_torch = subject.kind == TORCH_TPU or any(
        canonicalize_name(one.name) == "torch" for one in subject.requirements()
    )
    foreign: dict[str, set[str]] = defaultdict(set)
    lost: dict[str, set[str]] = defaultdict(set)
    outside: set[str] = set()
    for member, elf in files:
        folder = PurePosixPath(member.name).parent
        looked = {normpath(_from_origin(entry, folder)) for entry in elf.runpath}
        for name in elf.needed:
            if for_torch and name in _TORCH:
                if "torch/lib" not in looked:
                    lost[name].add(member.name)
                outside.add(name)
            elif name in inside:
                if not looked & inside[name]:
                    lost[name].add(member.name)
            elif name not in _SYSTEM:
                foreign[name].add(member.name)
    for name, names in sorted(foreign.items()):
        fault(
            f"{_several(names)}: needs {name}",
            "libraries of this wheel, of torch, or those that manylinux takes from the system",
            "link it statically, or bring it in the wheel",
        )
    for name, names in sorted(lost.items()):
        fault(
            f"{_several(names)}: needs {name} and does not look where it is",
            "its folder among the RUNPATH entries",
            _BUILD,
        )
    return f"each found in the wheel or the system; from torch: {_several(outside, 9) or 'none'}"


def _from_origin(entry: str, folder: PurePosixPath) -> str:
    return re.sub(r"\$(ORIGIN|\{ORIGIN\})", str(folder), entry)


def _runpath(subject: Subject, fault: Fault) -> str:
    absolute: dict[str, set[str]] = defaultdict(set)
    leaving: dict[str, set[str]] = defaultdict(set)
    for member, elf in subject.contents.elf_files():
        folder = PurePosixPath(member.name).parent
        for entry in elf.runpath:
            if not re.match(r"\$(ORIGIN|\{ORIGIN\})(/|$)", entry):
                absolute[entry].add(member.name)
            elif normpath(_from_origin(entry, folder)).startswith(".."):
                leaving[entry].add(member.name)
    for entry, names in sorted(absolute.items()):
        fault(
            f"{_several(names)}: looks for libraries in {entry or 'the current folder'!r}",
            "$ORIGIN and folders below it",
            "build it without -Wl,-rpath to a folder of the build machine",
        )
    if leaving:
        files = {name for names in leaving.values() for name in names}
        fault(
            f"{len(files)} files look for libraries outside site-packages as well, such as"
            f" {min(leaving, key=len)}",
            "entries that stay in site-packages",
            "none is needed unless others can write there; they are leftovers of Bazel's folders",
            severity=Severity.NOTE,
        )
    return "all relative to the file itself"


def _paths(subject: Subject, fault: Fault) -> str:
    for member in subject.contents.members.values():
        if not member.build_paths:
            continue
        # a docstring may well name the home of somebody; a compiler names only real ones
        example = not member.elf and not any(map(_BAZEL_FOLDER.search, member.build_paths))
        fault(
            f"{member.name}: holds {_several(member.build_paths, 2)}",
            "no path of the machine where it was built",
            "build it in Bazel's sandbox, and generate no file with absolute paths",
            severity=Severity.WARNING if example else Severity.ERROR,
        )
    return "no home, no Bazel folder"


def _debug(subject: Subject, fault: Fault) -> str:
    files = subject.contents.elf_files()
    debug = {member.name: elf.debug_bytes for member, elf in files if elf.debug_bytes}
    if debug:
        fault(
            f"{_several(debug)}: {size(sum(debug.values()))} of debugging sections",
            "none in a wheel",
            "build it without -g, or strip it",
            severity=Severity.WARNING,
        )
    symbols = sum(elf.symbol_bytes for _, elf in files)
    return f"none; {size(symbols)} of symbol tables that a strip would remove"


def _licence(subject: Subject, fault: Fault) -> str:
    raw = subject.metadata()
    folder = subject.dist_infos[0]
    missing = [
        name
        for name in raw.get("license_files", [])
        if not {f"{folder}/licenses/{name}", f"{folder}/{name}"} & set(subject.contents.members)
    ]
    if missing:
        fault(
            f"METADATA names the licence files {_several(missing)}, which are not in the wheel",
            f"{folder}/licenses/",
            "add them to the wheel",
        )
    texts = [name for name in subject.contents.members if _LICENCE.fullmatch(name.split("/")[-1])]
    marks = [one for one in raw.get("classifiers", []) if one.startswith("License ::")]
    stated = raw.get("license_expression") or raw.get("license") or "".join(marks[:1])
    if not texts and not stated:
        fault("no licence is stated", "a licence file, and its name in METADATA", _BUILD)
    elif not texts and not missing:
        fault(
            f"METADATA states {stated.splitlines()[0]!r}, and its text is not in the wheel",
            "the licence's text, which whoever passes the wheel on has to pass on too",
            "add LICENSE to the wheel's dist-info/licenses",
            severity=Severity.WARNING,
        )
    return f"{stated.splitlines()[0] if stated else 'not stated'}; {_several(texts) or 'no text'}"


# --- torch_tpu ---------------------------------------------------------------------------------


def _xla_base(subject: Subject, fault: Fault) -> str:
    found = [one for one in subject.contents.members if PurePosixPath(one).name == _BASE]
    if len(found) != 1:
        fault(
            f"{len(found)} files {_BASE}" + (f": {_several(found)}" if found else ""),
            "exactly one: XLA registers itself once per process, and a second copy aborts it",
            _WHEEL_COMMON,
        )
        return ""
    return f"{found[0]}, {size(subject.contents.members[found[0]].length)}"


def _sets(subject: Subject) -> dict[Version, dict[str, Member]]:
    """The glue by torch version: module, with its folder, to the file."""
    made: dict[Version, dict[str, Member]] = defaultdict(dict)
    for member in subject.contents.members.values():
        found = _GLUE.search(member.name)
        if found:
            version = Version(".".join(found.groups()))
            text = "_".join(found.groups())
            made[version][member.name.replace(f"_{text}", "_X_Y_Z")] = member
    return dict(sorted(made.items()))


def _glue(subject: Subject, fault: Fault) -> str:
    sets = _sets(subject)
    if not sets:
        fault(
            "no file is for a torch version",
            "a set of *_X_Y_Z.so for each torch that broke its ABI",
            _WHEEL_COMMON,
        )
        return ""
    every = {name for one in sets.values() for name in one}
    for fixed in ("libpywrap_X_Y_Z_common.so", "env_X_Y_Z.so"):
        if not any(name.endswith(f"/{fixed}") for name in every):
            fault(f"no {fixed} for any torch", "one per torch", _WHEEL_COMMON)
    for version, files in sets.items():
        text = str(version).replace(".", "_")
        missing = every - set(files)
        if missing:
            fault(
                f"the set of torch {version} has no {_several(missing)}",
                f"the {len(every)} files that the other sets have",
                _WHEEL_COMMON,
            )
        for member in files.values():
            if member.elf is None:
                continue
            module = module_of(member.name)
            common = f"libpywrap_{text}_common.so"
            own = member.name.endswith("_common.so")
            if not own and f"PyInit_{module}" not in member.elf.exports:
                fault(
                    f"{member.name} does not export PyInit_{module}",
                    "an extension module of the name that its file has",
                    _WHEEL_COMMON,
                )
            wrong = [
                name
                for name in member.elf.needed
                if name.startswith("libpywrap_") and name != common
            ]
            bound = common in member.elf.needed or own
            if wrong or not bound or _BASE not in member.elf.needed:
                fault(
                    f"{member.name} needs {_several(wrong or member.elf.needed, 9) or 'nothing'}",
                    f"{_BASE}" + ("" if own else f" and {common}, the part for its own torch"),
                    _WHEEL_COMMON,
                )
    return f"{len(every)} files for each of torch {', '.join(map(str, sets))}"


def _torch(subject: Subject, fault: Fault) -> str:
    wanted = [one for one in subject.requirements() if canonicalize_name(one.name) == "torch"]
    if not wanted:
        fault("Requires-Dist names no torch", "the range of torch that it works with", _BUILD)
        return ""
    built = list(_sets(subject))
    if not built:
        raise UnjudgedError("there is no glue")
    admitted = wanted[0].specifier
    for bound in admitted:
        if bound.operator not in (">=", "~=", "=="):
            continue
        if Version(bound.version.removesuffix(".*")) < built[0]:
            fault(
                f"Requires-Dist admits torch {bound.version}, and the oldest glue is {built[0]}",
                "a glue for every torch that it admits",
                "build it for that torch as well, or narrow Requires-Dist",
            )
    if subject.torch is None:
        return f"{admitted}; glue for {', '.join(map(str, built))}"
    torch = Version(subject.torch)
    if not admitted.contains(torch, prereleases=True):
        fault(
            f"Requires-Dist is torch{admitted}",
            f"a range with torch {torch}, which the lock holds",
            "choose a torch_tpu for the locked torch, or lock another torch",
        )
    serving = [version for version in built if version <= Version(torch.base_version)]
    if not serving:
        fault(
            f"the oldest glue is for torch {built[0]}",
            f"one for torch {torch}, which the lock holds, or for an older one",
            "choose a torch_tpu for the locked torch, or lock another torch",
        )
        return ""
    return f"{admitted}; torch {torch} loads the glue of {serving[-1]}"


def _bundled(subject: Subject, fault: Fault) -> str:
    found = [one for one in subject.contents.members if _FOREIGN.fullmatch(PurePosixPath(one).name)]
    if found:
        fault(
            f"it brings {_several(found)}",
            "no library of torch or CUDA: two copies of torch in a process break it",
            _BUILD,
        )
    cuda = {one.name for one in subject.requirements() if _CUDA.fullmatch(one.name.lower())}
    if cuda:
        fault(f"it requires {_several(cuda)}", "nothing of CUDA on a TPU", _BUILD)
    return "nothing of torch or CUDA inside, nothing of CUDA required"


def _xla_commit(subject: Subject, fault: Fault) -> str:
    text = subject.contents.kept.get(_COMMIT)
    if text is None:
        fault(f"{_COMMIT} is missing", "the XLA commit it was built from", _BUILD)
        return ""
    commit = text.decode("ascii", "replace").strip()
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        fault(f"{_COMMIT} holds {commit[:60]!r}", "40 hexadecimal digits", _BUILD)
    elif subject.xla_commit not in (None, commit):
        fault(
            f"{_COMMIT} holds {commit}",
            f"{subject.xla_commit}, as lock/pins.toml says",
            "compare the wheel with the published one, or mend xla_commit in lock/pins.toml",
        )
    return commit


def _optimised(subject: Subject, fault: Fault) -> str:
    modes: dict[str, list[str]] = defaultdict(list)
    for member, _ in subject.contents.elf_files():
        for mode in member.modes:
            modes[mode].append(member.name)
    for mode, names in sorted(modes.items()):
        if mode != "opt":
            fault(
                f"{_several(names)}: compiled in {mode} mode, as Bazel's folder names in it tell",
                "-c opt",
                "build it without -c dbg, -c fastbuild and --//:allow_unoptimized_wheel",
            )
    if not modes:
        fault(
            "no name of a Bazel folder is left in it, so its compilation mode cannot be told",
            "-c opt",
            "see TORCH_TPU_IS_OPTIMIZED_BUILD of torch_tpu._internal.env once it is installed",
            severity=Severity.WARNING,
        )
        return ""
    return f"{len(modes['opt'])} files name Bazel folders of -c opt, none of another mode"


def _entry_point(subject: Subject, fault: Fault) -> str:
    group, name, target = _ENTRY
    remedy = "without it torch does not find the backend; " + _BUILD
    if len(subject.dist_infos) != 1:
        raise UnjudgedError("there is not one .dist-info folder to look in")
    text = subject.dist_info("entry_points.txt")
    points = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    points.optionxform = str  # type: ignore[method-assign, assignment]
    try:
        points.read_string((text or b"").decode("utf-8", "replace"))
    except configparser.Error as error:
        fault(f"entry_points.txt cannot be read: {error.message}", "an INI file", remedy)
        return ""
    found = points.get(group, name, fallback="")
    if found != target:
        fault(
            f"[{group}] {name} is {found or 'missing'} in entry_points.txt",
            f"{name} = {target}",
            remedy,
        )
        return ""
    module, _, function = target.partition(":")
    file = module.replace(".", "/") + ".py"
    source = subject.contents.kept.get(file, b"").decode("utf-8", "replace")
    if not re.search(rf"^def {function}\(", source, re.MULTILINE):
        fault(f"{file} has no function {function}", target, remedy)
    return f"[{group}] {name} = {target}"


# --- libtpu ------------------------------------------------------------------------------------


def _libtpu(subject: Subject, fault: Fault) -> str:
    member = subject.contents.members.get("libtpu/libtpu.so")
    if member is None:
        fault(
            "libtpu/libtpu.so is missing",
            "the TPU runtime, a PJRT plugin",
            "choose another release of libtpu: some on the index are empty",
        )
        return ""
    if member.elf is None:
        raise UnjudgedError("libtpu/libtpu.so is no whole library")
    if "GetPjrtApi" not in member.elf.exports:
        fault("libtpu/libtpu.so does not export GetPjrtApi", "a PJRT plugin", _AGAIN)
    return f"libtpu/libtpu.so, {size(member.length)}, exports GetPjrtApi"


def _pjrt(subject: Subject, fault: Fault) -> str:
    if subject.measure_pjrt is None:
        raise UnjudgedError("the version is told by the loaded library alone, and --load not given")
    member = subject.contents.members.get("libtpu/libtpu.so")
    if member is None or member.elf is None:
        raise UnjudgedError("there is no library to load")
    version = subject.measure_pjrt(member.name)
    if not re.fullmatch(r"\d+\.\d+", version):
        fault(f"libtpu/libtpu.so does not load: {version}", "a PJRT API version", _AGAIN)
        return ""
    return f"PJRT API {version}"


# --- all of them -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        id: Its name in reports; never reused for another rule.
        title: What it proves.
        judge: The function.
        kind: The only package it is for, or an empty text for any wheel.
    """

    id: str
    title: str
    judge: Callable[[Subject, Fault], str]
    kind: str = ""


RULES = (
    Rule("archive", "an archive that unpacks safely", _archive),
    Rule("metadata", "complete metadata", _metadata),
    Rule("record", "RECORD lists every file, with the right digest", _record),
    Rule("name", "file name, folder and metadata agree", _name),
    Rule("tags", "the tags of WHEEL and file name agree", _tags),
    Rule("python", "made for the Python it is tagged for", _python),
    Rule("elf", "whole ELF files for the tagged machine", _elf),
    Rule("symbols", "no newer glibc or GCC than the tag promises", _symbols),
    Rule("libraries", "every needed library can be found", _libraries),
    Rule("runpath", "libraries are looked for in relative folders", _runpath),
    Rule("paths", "no path of the build machine inside", _paths),
    Rule("debug", "no debugging sections", _debug),
    Rule("licence", "the licence is stated and included", _licence),
    Rule("xla-base", "exactly one libxla_base.so", _xla_base, TORCH_TPU),
    Rule("glue", "a complete set of glue per torch", _glue, TORCH_TPU),
    Rule("torch", "serves the torch of the lock", _torch, TORCH_TPU),
    Rule("bundled", "nothing of torch or CUDA inside", _bundled, TORCH_TPU),
    Rule("xla-commit", "the XLA commit is recorded", _xla_commit, TORCH_TPU),
    Rule("optimised", "an optimised build", _optimised, TORCH_TPU),
    Rule("entry-point", "torch finds the backend", _entry_point, TORCH_TPU),
    Rule("libtpu", "libtpu.so is there, and a PJRT plugin", _libtpu, LIBTPU),
    Rule("pjrt", "its PJRT API version", _pjrt, LIBTPU),
)
