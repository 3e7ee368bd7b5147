"""The typed reader of ``lock/pins.toml``: every version, digest, suite and date, once.

Facts behind the checks: ``torch_tpu`` states the torch and libtpu ranges it accepts in its wheel
metadata, and publishes no wheel outside manylinux x86-64.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tpuforge.errors import ForgeError
from tpuforge.paths import ROOT
from tpuforge.process import redact
from tpuforge.tables import Table, read

PINS_FILE = ROOT / "lock" / "pins.toml"
SCHEMA = 1

_HEX64 = re.compile(r"[0-9a-f]{64}")
_HEX40 = re.compile(r"[0-9a-f]{40}")
_PYTHON = re.compile(r"3\.\d{1,2}")
_NAME = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclass(frozen=True)
class CpuBuild:
    """The CPU build of a package whose build on the main index is one for CUDA.

    Attributes:
        version: Release number without the local part.
        local: Local version label; always ``cpu``.
    """

    version: str
    local: str

    @property
    def full(self) -> str:
        """The version as it stands in a lock, such as ``2.13.0+cpu``."""
        return f"{self.version}+{self.local}"


@dataclass(frozen=True)
class Torch(CpuBuild):
    """The CPU build of PyTorch.

    Attributes:
        version: Release number without the local part.
        local: Local version label; always ``cpu``.
        index: The index that carries it, and every other CPU build.
    """

    index: str


@dataclass(frozen=True)
class TorchTpu:
    """The TorchTPU wheel.

    Attributes:
        version: Its release.
        torch: The torch releases it accepts.
        libtpu: The libtpu releases it accepts.
        xla_commit: The XLA commit recorded in the wheel, 40 hex digits.
    """

    version: str
    torch: SpecifierSet
    libtpu: SpecifierSet
    xla_commit: str


@dataclass(frozen=True)
class Flavour:
    """One set of packages, ``lock/<name>.in``.

    Attributes:
        name: Such as ``runtime``.
        pythons: The Pythons it is locked for, ``X.Y``.
        on: The flavour whose lock it holds unchanged; empty if it stands alone.
        apart: Whether it may hold other releases than its neighbours on the same flavour.
    """

    name: str
    pythons: tuple[str, ...]
    on: str
    apart: bool = False


@dataclass(frozen=True)
class Standalone:
    """A build of CPython that stands on its own, for a Python that no Debian suite has.

    Attributes:
        version: Its release, ``X.Y.Z``.
        url: Where its project releases it.
        sha256: Digest of that file, 64 hex digits.
    """

    version: str
    url: str
    sha256: str

    @property
    def file(self) -> str:
        """The file's name, as the address ends: a plus is written ``%2B`` there."""
        return unquote(self.url.rpartition("/")[2])


@dataclass(frozen=True)
class Suite:
    """One set of packages of one Debian suite: what a base is made from.

    Attributes:
        name: Code name of the suite, such as ``bookworm``.
        packages: What the base asks for, beside the suite's essential packages.
        extra: Name of the set, such as ``builder``; empty for the suite's own packages, which
            every other set of it holds as well, but for those it is said to be without.
        python: The Python of which the set carries a standalone build, ``X.Y``; empty for none.
        rolling: Whether the suite changes from day to day, as Debian's testing does.
    """

    name: str
    packages: tuple[str, ...]
    extra: str = ""
    python: str = ""
    rolling: bool = False

    @property
    def label(self) -> str:
        """Its name among all sets, its lock and its base: ``bookworm``, ``bookworm-builder``."""
        return f"{self.name}-{self.extra}" if self.extra else self.name


@dataclass(frozen=True)
class Bazelisk:
    """The native Bazelisk binary.

    Attributes:
        version: Its release.
        npm: The npm package that ships it.
        file: The binary's name in that package.
        sha256: The binary's digest, 64 hex digits.
        release: Where the same file is among the releases of its project.
    """

    version: str
    npm: str
    file: str
    sha256: str
    release: str


@dataclass(frozen=True)
class Machine:
    """What a machine needs to build the wheel in comfort.

    Attributes:
        disk_gb: Free space, in 10^9 bytes.
        memory_gb: Memory, in 10^9 bytes.
        cores: Processor cores.
    """

    disk_gb: int
    memory_gb: int
    cores: int


@dataclass(frozen=True)
class Upstream:
    """The source of TorchTPU.

    Attributes:
        repository: Git URL.
        ref: Tag or commit.
        commit: The commit that the ref has to name, 40 hex digits; None where it is not known.
        machine: What its authors build on.
    """

    repository: str
    ref: str
    commit: str | None
    machine: Machine


@dataclass(frozen=True)
class Pins:
    """Everything in ``lock/pins.toml``.

    Attributes:
        epoch: Seconds since 1970 given to everything inside an image.
        cutoff: Uploads after this moment do not exist for the resolver.
        later: The same for single packages that were upgraded alone, by canonical name.
        platform: Wheel platform tag that is resolved for.
        pythons: Supported Python versions, ``X.Y``.
        suites: Python version to the set of Debian packages that its images stand on, by label: a
            suite whose own python3 it is, or a set that carries a standalone build of it.
        standalone: Standalone builds of CPython by ``X.Y``.
        flavours: Flavours by name, each after the one it builds on.
        default_python: Python taken when none is named.
        default_flavour: Lock taken when none is named.
        default_image: Image taken when none is named.
        torch: The CPU build of PyTorch.
        torchvision: The CPU build of torchvision.
        torch_tpu: The TorchTPU wheel.
        libtpu: libtpu's version.
        libtpu_of: libtpu's version for a Python that has another one.
        debian: Sets of Debian packages by label, such as ``bookworm`` and ``bookworm-builder``.
        bazelisk: The Bazelisk binary.
        bazel: Version of a Bazel that is known to the digest of its Linux x86-64 binary.
        upstream: The source of TorchTPU.
    """

    epoch: int
    cutoff: datetime
    later: Mapping[str, datetime]
    platform: str
    pythons: tuple[str, ...]
    suites: Mapping[str, str]
    standalone: Mapping[str, Standalone]
    flavours: Mapping[str, Flavour]
    default_python: str
    default_flavour: str
    default_image: str
    torch: Torch
    torchvision: CpuBuild
    torch_tpu: TorchTpu
    libtpu: str
    libtpu_of: Mapping[str, str]
    debian: Mapping[str, Suite]
    bazelisk: Bazelisk
    bazel: Mapping[str, str]
    upstream: Upstream

    @property
    def glibc(self) -> str:
        """The newest glibc that a wheel may ask for, such as ``2.31``."""
        return ".".join(self.platform.split("_")[1:3])

    @property
    def cpu_builds(self) -> Mapping[str, CpuBuild]:
        """The packages that are taken as CPU builds from the PyTorch index, by canonical name."""
        return {"torch": self.torch, "torchvision": self.torchvision}

    def python(self, version: str | None) -> str:
        """A supported Python version, the default one when none is named.

        Args:
            version: ``X.Y``, or None.

        Raises:
            ForgeError: If that Python is not supported.
        """
        chosen = version or self.default_python
        if chosen not in self.pythons:
            raise ForgeError(
                f"Python {chosen} is not supported",
                expected=f"one of {', '.join(self.pythons)}",
                mend=f"use --python {self.default_python}",
            )
        return chosen


def load(path: Path = PINS_FILE) -> Pins:
    """Read and check the pins.

    Args:
        path: A pins file.

    Returns:
        The pins.

    Raises:
        ForgeError: For a file that is missing, is not TOML, has an unknown or missing key, a
            value of the wrong form, or an impossible pair; the message names the key.
    """
    top = read(path, "docs/pins.md")
    schema = top.integer("schema")
    if schema != SCHEMA:
        raise top.bad("schema", f"{schema}", f"{SCHEMA}")
    default = top.table("default")
    python = top.table("python")
    resolver = top.table("resolver")
    libtpu = top.table("libtpu")
    pins = Pins(
        epoch=top.integer("epoch"),
        cutoff=resolver.moment("cutoff"),
        later=_later(resolver),
        platform=resolver.text("platform", re.compile(r"manylinux_2_\d{2}_x86_64")),
        pythons=python.texts("supported", _PYTHON),
        suites=_suites(python.table("suite")),
        standalone=_standalone(python),
        flavours=_flavours(top.table("flavour")),
        default_python=default.text("python", _PYTHON),
        default_flavour=default.text("flavour", _NAME),
        default_image=default.text("image", _NAME),
        torch=_torch(top.table("torch")),
        torchvision=_torchvision(top.table("torchvision")),
        torch_tpu=_torch_tpu(top.table("torch_tpu")),
        libtpu=libtpu.version("version"),
        libtpu_of=_libtpu_of(libtpu),
        debian=_debian(top.table("debian")),
        bazelisk=_bazelisk(top.table("bazelisk")),
        bazel=_bazel(top.table("bazel")),
        upstream=_upstream(top.table("upstream")),
    )
    for table in (default, python, resolver, top):
        table.end()
    _check_pairs(top, pins)
    return pins


def _later(resolver: Table) -> dict[str, datetime]:
    """The moments of single packages; the table is there only after one was upgraded alone."""
    if "later" not in resolver.names():
        return {}
    table = resolver.table("later")
    return table.ended({name: table.moment(name) for name in table.names()})


def _check_pairs(top: Table, pins: Pins) -> None:
    """Refuse values that are well formed alone and impossible together."""
    now = datetime.now(UTC)
    if not 0 < pins.epoch <= now.timestamp():
        clock = f"not ahead of this machine's clock ({now:%Y-%m-%d})"
        raise top.bad("epoch", f"{pins.epoch}", f"seconds since 1970, more than 0 and {clock}")
    if pins.cutoff > datetime.now(UTC):
        raise top.bad(
            "resolver.cutoff", pins.cutoff.isoformat(), "a moment in the past: a later one drifts"
        )
    for name, moment in pins.later.items():
        if canonicalize_name(name) != name:
            raise top.bad(f"resolver.later.{name}", "a name", canonicalize_name(name))
        if not pins.cutoff < moment <= datetime.now(UTC):
            expected = "a moment in the past, later than resolver.cutoff"
            raise top.bad(f"resolver.later.{name}", moment.isoformat(), expected)
    if pins.default_python not in pins.pythons:
        raise top.bad("default.python", pins.default_python, f"one of {', '.join(pins.pythons)}")
    if pins.default_flavour not in pins.flavours:
        known = ", ".join(pins.flavours)
        raise top.bad("default.flavour", pins.default_flavour, f"one of {known}")
    for flavour in pins.flavours.values():
        where = f"flavour.{flavour.name}"
        below = pins.flavours.get(flavour.on)
        if flavour.apart and not flavour.on:
            raise top.bad(f"{where}.apart", "true", "that of a flavour that builds on another")
        # one layer is all that is needed, and it keeps every lock one step from its base
        if flavour.on and (below is None or below.on):
            raise top.bad(f"{where}.on", flavour.on, "a flavour that stands alone")
        for version in flavour.pythons:
            if version not in pins.pythons:
                raise top.bad(f"{where}.pythons", version, "Pythons of python.supported")
            if below is not None and version not in below.pythons:
                raise top.bad(f"{where}.pythons", version, f"Pythons that {below.name} has too")
    for version, suite in pins.suites.items():
        if version not in pins.pythons:
            raise top.bad(f'python.suite."{version}"', version, "a Python of python.supported")
        found = pins.debian.get(suite)
        if found is None or (found.extra and not found.python):
            raise top.bad(f'python.suite."{version}"', suite, f"a table [debian.{suite}]")
        if found.python not in ("", version):
            expected = f"a set with Python {version}, not {found.python}"
            raise top.bad(f'python.suite."{version}"', suite, expected)
    for suite in set(pins.suites.values()):
        several = [version for version, label in pins.suites.items() if label == suite]
        if len(several) > 1:
            # a base has one Python
            raise top.bad(f'python.suite."{several[0]}"', suite, f"not that of {several[1]} too")
    for one in pins.debian.values():
        if one.python and one.python not in pins.standalone:
            where = f"debian.{one.name}.{one.extra}.python"
            raise top.bad(where, one.python, f'a table [python.standalone."{one.python}"]')
    if pins.torch.version not in pins.torch_tpu.torch:
        raise top.bad(
            "torch.version",
            pins.torch.version,
            f"a torch that torch_tpu {pins.torch_tpu.version} accepts: {pins.torch_tpu.torch}",
        )
    for version in pins.libtpu_of:
        if version not in pins.pythons:
            raise top.bad(f'libtpu.python."{version}"', version, "a Python of python.supported")
    named = {f'libtpu.python."{python}"': number for python, number in pins.libtpu_of.items()}
    for key, number in {"libtpu.version": pins.libtpu, **named}.items():
        if number not in pins.torch_tpu.libtpu:
            accepted = f"{pins.torch_tpu.version} accepts: {pins.torch_tpu.libtpu}"
            raise top.bad(key, number, f"a libtpu that torch_tpu {accepted}")


def _torch(table: Table) -> Torch:
    made = Torch(table.version("version"), table.text("local"), table.text("index"))
    if not made.index.startswith("https://"):
        raise table.bad("index", made.index, "an https address")
    _check_cpu(table, made)
    return table.ended(made)


def _torchvision(table: Table) -> CpuBuild:
    made = CpuBuild(table.version("version"), table.text("local"))
    _check_cpu(table, made)
    return table.ended(made)


def _check_cpu(table: Table, made: CpuBuild) -> None:
    if made.local != "cpu":
        raise table.bad("local", made.local, "cpu: TorchTPU images never carry CUDA")
    if "+" in made.version:
        raise table.bad("version", made.version, "the release alone; the local part is 'local'")


def _torch_tpu(table: Table) -> TorchTpu:
    return table.ended(
        TorchTpu(
            table.version("version"),
            table.specifiers("torch"),
            table.specifiers("libtpu"),
            table.text("xla_commit", _HEX40),
        )
    )


def _libtpu_of(table: Table) -> dict[str, str]:
    """The versions for single Pythons; the table is there only where a flavour needs one."""
    if "python" not in table.names():
        return table.ended({})
    versions = table.table("python")
    return table.ended(versions.ended({name: versions.version(name) for name in versions.names()}))


def _suites(table: Table) -> dict[str, str]:
    return {key: table.text(key, _NAME) for key in table.names()}


def _standalone(python: Table) -> dict[str, Standalone]:
    """The builds for single Pythons; the table is there only where a suite lacks one."""
    if "standalone" not in python.names():
        return {}
    table = python.table("standalone")
    made = {}
    for name in table.names():
        one = table.table(name)
        build = Standalone(
            one.text("version", re.compile(re.escape(name) + r"\.\d+")),
            one.text("url", re.compile(r"https://[^\s?#@]+\.tar\.gz")),
            one.text("sha256", _HEX64),
        )
        if build.version not in build.file:
            raise one.bad("url", build.url, f"the address of {build.version}")
        made[name] = one.ended(build)
    return table.ended(made)


def _flavours(table: Table) -> dict[str, Flavour]:
    made = {}
    for name in table.names():
        one = table.table(name)
        on = one.text("on", _NAME) if "on" in one.names() else ""
        apart = one.flag("apart") if "apart" in one.names() else False
        made[name] = one.ended(Flavour(name, one.texts("pythons", _PYTHON), on, apart))
    return dict(sorted(made.items(), key=lambda item: (bool(item[1].on), item[0])))


def _debian(table: Table) -> dict[str, Suite]:
    made = {}
    for name in table.names():
        suite = table.table(name)
        own = suite.texts("packages", _NAME)
        rolling = suite.flag("rolling") if "rolling" in suite.names() else False
        made[name] = Suite(name, own, rolling=rolling)
        for extra in suite.names():
            if extra not in ("packages", "rolling"):
                one = _further_set(suite.table(extra), made[name], extra)
                made[one.label] = one
        suite.end()
    return made


def _further_set(table: Table, suite: Suite, extra: str) -> Suite:
    """What a set has beside its suite's own packages, or in their place."""
    python = table.text("python", _PYTHON) if "python" in table.names() else ""
    # a set that carries a Python of its own may need no further package
    wants = "packages" in table.names() or not python
    packages = table.texts("packages", _NAME) if wants else ()
    without = table.texts("without", _NAME) if "without" in table.names() else ()
    twice = sorted(set(packages) & set(suite.packages))
    if twice:
        raise table.bad("packages", f"{twice!r}", "packages that the suite has not already")
    strange = sorted(set(without) - set(suite.packages))
    if strange:
        raise table.bad("without", f"{strange!r}", "packages that the suite asks for")
    kept = tuple(package for package in suite.packages if package not in without)
    if python and "python3" in (*kept, *packages):
        raise table.bad("python", python, 'without = ["python3"]: one Python in a base, not two')
    return table.ended(Suite(suite.name, (*kept, *packages), extra, python, suite.rolling))


def _bazelisk(table: Table) -> Bazelisk:
    made = Bazelisk(
        table.version("version"),
        table.text("npm"),
        table.text("file"),
        table.text("sha256", _HEX64),
        table.text("release", re.compile(r"https://\S+")),
    )
    if made.version not in made.release:
        raise table.bad("release", made.release, f"the address of {made.version}")
    return table.ended(made)


def _bazel(table: Table) -> dict[str, str]:
    return {version: table.text(version, _HEX64) for version in table.names()}


def _upstream(table: Table) -> Upstream:
    machine = table.table("machine")
    made = Upstream(
        table.text("repository"),
        table.text("ref"),
        table.text("commit", _HEX40) if "commit" in table.names() else None,
        machine.ended(
            Machine(
                machine.integer("disk_gb"), machine.integer("memory_gb"), machine.integer("cores")
            )
        ),
    )
    if redact(made.repository) != made.repository or not made.repository.startswith("https://"):
        # it goes into the labels of images
        raise table.bad("repository", redact(made.repository), "an https address, no credentials")
    return table.ended(made)
