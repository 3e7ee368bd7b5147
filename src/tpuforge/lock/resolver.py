"""The resolution: which packages, and which one file of each.

Two steps, both against one view of one index (:mod:`tpuforge.lock.view`), from a scrubbed
environment:

1. *Which versions.* pip-compile under an interpreter of the target version; where this machine
   has none, uv, which evaluates markers for a Python that is not there. Both read metadata only.
2. *Which file.* Of each release the wheel with the target's best tag, as pip would take it. The
   digest is the one that the index lists for that file.

pip-compile's own ``--generate-hashes`` is not used: against an index it hashes every platform's
file (gigabytes), and where a listed file is missing it hashes the error page. Here no digest is
ever made from what a server answers; :func:`verify` downloads a file to compare, never to learn.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from tpuforge.errors import Exit, ForgeError
from tpuforge.lock.inputs import (
    CpuWheel,
    base_packages,
    constraints,
    cpu_wheel,
    cpu_wheels,
    lock_path,
    metadata_fields,
    needs,
    requirements,
    write_standin,
)
from tpuforge.lock.names import LeftOut, ended, load_names
from tpuforge.lock.provenance import Listed, as_moment, walk
from tpuforge.lock.sources import Source
from tpuforge.lock.view import Chosen, View, open_view
from tpuforge.lockfile import Locked, read_lock
from tpuforge.paths import home, out_dir, sha256_text
from tpuforge.pins import Pins
from tpuforge.process import Completed, run
from tpuforge.target import platforms

WAYS = ("auto", "pip-tools", "uv")
_making = threading.Lock()
RUNNING = f"{sys.version_info[0]}.{sys.version_info[1]}"
_TIME_LIMIT_S = 300.0
_RESOLVERS = ("pip", "pip-tools", "uv")
_PIN = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;]+)")
_NO_SOLUTION = re.compile(
    r"No matching distribution|ResolutionImpossible|Could not find a version|No solution found"
)
_OTHER_METADATA = re.compile(r"metadata (?:name|version) \S+ does not match")
_ASK_PYTHON = (
    "import platform, sys, venv;"
    "print(platform.python_implementation(), '%d.%d' % sys.version_info[:2])"
)


@dataclass(frozen=True)
class Resolved:
    """A resolution.

    Attributes:
        packages: What goes into the lock, by name.
        left_out: What does not, since ``lock/names.toml`` leaves it out, and what only that needs.
        metadata: What both say about themselves, in the JSON form of PEP 566, by name.
        files: What the index lists about their files, by SHA-256; nothing about CPU builds.
        way: ``pip-tools`` or ``uv``.
    """

    packages: tuple[Locked, ...]
    left_out: tuple[Locked, ...]
    metadata: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, Listed]
    way: str


@contextmanager
def workspace() -> Iterator[Path]:
    """A fresh folder under ``out/lock``, gone afterwards.

    Yields:
        Its path.
    """
    parent = out_dir() / "lock"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="work-", dir=parent) as name:
        yield Path(name)


def home_python() -> Path:
    """The running Python, once it is known to have the locked resolvers.

    Raises:
        ForgeError: If it has others: their results could differ.
    """
    path = lock_path("tools", RUNNING)
    locked = {p.name: p.version for p in read_lock(path)} if path.exists() else {}
    for name in _RESOLVERS:
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "none"
        if found != locked.get(name):
            raise ForgeError(
                f"this Python has {name} {found}",
                expected=f"{name} {locked.get(name, 'as locked')}, as in lock/{path.name}",
                mend="run it in the locked environment: ./forge lock",
            )
    return Path(sys.executable)


def sweep() -> None:
    """Remove what a killed run left in ``out/lock``; only for the one run that may be there."""
    for left in (out_dir() / "lock").glob("work-*"):
        shutil.rmtree(left, ignore_errors=True)


def target_python(python: str, source: Source) -> Path | None:
    """A Python of the target version with the locked resolvers, if its interpreter is at hand.

    Args:
        python: ``X.Y``.
        source: Where packages come from.

    Returns:
        Its path; None where this machine has no such interpreter, is no Linux on x86-64, or there
        are no locked tools for that Python.

    Raises:
        ForgeError: If the environment cannot be made.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    if python == RUNNING:
        return home_python()
    with _making:
        interpreter = _interpreter(python)
        if interpreter is None or not lock_path("tools", python).exists():
            return None
        return _environment(python, interpreter, source)


@functools.cache
def _interpreter(python: str) -> Path | None:
    """An interpreter of a version: on PATH, or one of pyenv's."""
    candidates = [shutil.which(f"python{python}")]
    pyenv = Path(os.environ.get("PYENV_ROOT") or (home() or Path("/")) / ".pyenv")
    candidates += [str(p) for p in sorted(pyenv.glob(f"versions/{python}.*/bin/python{python}"))]
    for candidate in candidates:
        if candidate is None:
            continue
        # a shim can stand for a version that is not installed: only running it tells
        done = run([candidate, "-I", "-c", _ASK_PYTHON], timeout=30, check=False)
        if done.code == 0 and done.output.split() == ["CPython", python]:
            return Path(candidate)
    return None


def _environment(python: str, interpreter: Path, source: Source) -> Path:
    """An environment with the locked tools of a Python, made once under ``out/lock``."""
    lock = lock_path("tools", python)
    packages = (f"{package.name} {package.sha256}" for package in read_lock(lock))
    key = sha256_text("compiled", str(interpreter.resolve()), *packages)[:16]
    stem = f"tools-py{python.replace('.', '')}-"
    place = out_dir() / "lock" / f"{stem}{key}"
    made = place / "bin" / "python"
    done = place / "made"
    if done.exists():
        return made
    for old in place.parent.glob(f"{stem}*"):
        shutil.rmtree(old, ignore_errors=True)
    # without pip: Debian's Python has none to give, and the lock brings one
    make = [str(interpreter), "-I", "-m", "venv", "--without-pip", str(place)]
    run(make, timeout=120, doing=f"making an environment of Python {python}")
    words: list[str | Path] = [home_python(), "-m", "uv", "pip", "install", "--quiet"]
    words += ["--no-config", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    # its children write no byte code, and compiling pip at each start costs more than most locks
    words += ["--compile-bytecode"]
    run(
        [*words, "--python", made, "--requirements", lock],
        timeout=_TIME_LIMIT_S,
        env=source.env(),
        doing=f"installing the locked tools for Python {python}",
    )
    done.write_text("", encoding="utf-8")
    return made


@dataclass(frozen=True)
class Job:
    """What is resolved, from where.

    Attributes:
        pins: The pins.
        flavour: Such as ``runtime``.
        python: ``X.Y``.
        source: Where packages come from.
        view: What the resolvers see of it; one of its own if there is none.
        stop: Ends its children when it is set.
    """

    pins: Pins
    flavour: str
    python: str
    source: Source
    view: View | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def who(self) -> str:
        """The job for the view."""
        return lock_path(self.flavour, self.python).stem

    @property
    def what(self) -> str:
        """The job for people."""
        return f"{self.flavour} for Python {self.python}"

    @property
    def cutoff(self) -> str:
        """The moment after which uploads do not exist, as pip and uv read it."""
        return as_moment(self.pins.cutoff)

    def run(self, words: Sequence[str | Path], work: Path) -> Completed:
        """Run a resolver in a workspace, in an environment that holds the view alone.

        Args:
            words: Program and arguments.
            work: The child's folder.

        Raises:
            ForgeError: If the index gave an answer that cannot be used.
        """
        assert self.view is not None  # noqa: S101 - resolve() sees to it
        env = self.view.env(self.who, self.python)
        done = run(words, timeout=_TIME_LIMIT_S, env=env, cwd=work, check=False, stop=self.stop)
        # also when it came to an end: it may have taken a page that failed for an empty one
        self.view.refuse(self.who)
        return done

    def target(self) -> list[str]:
        """Describe the target to pip: safe without dependencies, since no marker is read."""
        return [f"--uploaded-prior-to={self.cutoff}", *self.tags()]

    def tags(self) -> list[str]:
        """Describe the target to pip, without a cutoff."""
        words = ["--only-binary=:all:", f"--python-version={self.python}", "--implementation=cp"]
        return [*words, *(f"--platform={tag}" for tag in platforms(self.pins.glibc))]


def view_of(
    pins: Pins, source: Source, expect: Iterable[str] = (), first: str = ""
) -> AbstractContextManager[View]:
    """The view that :func:`open_view` runs with the locked pip; its arguments are told there."""
    return open_view(pins, source, home_python(), expect, first)


def resolve(job: Job, *, way: str = "auto") -> Resolved:
    """Resolve a flavour for a Python, from metadata alone.

    Args:
        job: What, from where.
        way: One of :data:`WAYS`.

    Returns:
        One file per package, none of them CUDA, CPU builds with the digests of the table.

    Raises:
        ForgeError: If there is no solution, a package would bring CUDA, or the index gives no
            digest (exit code 1); if it cannot be resolved here (exit code 2).
        UnreachableError: If the index does not answer.
    """
    if job.view is None:
        with view_of(job.pins, job.source) as view:
            return resolve(replace(job, view=view), way=way)
    target = _target(job, way)
    home = home_python()
    wheels = cpu_wheels(job.pins, job.python)
    names = requirements(job.pins, job.flavour, job.python)
    base = base_packages(job.pins, job.flavour, job.python)
    decided = constraints(job.pins, job.python) | {
        package.name: package.version for package in base
    }
    with workspace() as work:
        # a folder of its own: the solution must not see anything else that lies here
        (work / "standins").mkdir()
        for wheel in wheels.values():
            write_standin(wheel, work / "standins")
        _write(work / "in", [str(name) for name in names])
        _write(work / "constraints", [f"{name}=={number}" for name, number in decided.items()])
        versions = _uv(job, home, work) if target is None else _pip_compile(job, target, work)
    builds = _pop_cpu_builds(job, versions)
    _refuse_local(job, versions, decided)
    chosen = job.view.choose(job.who, job.python, versions)
    packages = [Locked(one.name, one.version, one.sha256) for one in chosen]
    metadata: dict[str, Mapping[str, Any]] = {one.name: one.metadata for one in chosen}
    files = {one.sha256: one.listed for one in chosen}
    for wheel in builds:
        packages.append(Locked(wheel.name, wheel.version, wheel.sha256))
        metadata[wheel.name] = _metadata(wheel)
    gone = _leave_out(job, metadata)
    left_out = [package for package in packages if package.name in gone]
    packages = [package for package in packages if package.name not in gone]
    _refuse_cuda(job, packages, metadata, gone)
    other = sorted(package.name for package in set(base) - set(packages))
    if other:
        below = lock_path(job.pins.flavours[job.flavour].on, job.python).name
        raise ForgeError(
            f"{job.what} would not hold the lock it builds on: {', '.join(other)} differ",
            expected=f"every line of {below}",
            mend="resolve that lock anew first, and look at the index if it then says the same",
            exit_code=Exit.FAULT,
        )
    way = "uv" if target is None else "pip-tools"
    return Resolved(tuple(sorted(packages)), tuple(sorted(left_out)), metadata, files, way)


def _refuse_local(job: Job, versions: Mapping[str, str], decided: Mapping[str, str]) -> None:
    """Refuse ``1.0+other`` where 1.0 is decided: by PEP 440 it fits ``==1.0``, and is higher."""
    for name, number in versions.items():
        if decided.get(name, number) != number:
            raise ForgeError(
                f"{job.source.name} gives {name} {number} for {name}=={decided[name]}",
                expected=f"{name} {decided[name]} itself",
                mend="look at the index: it offers a build of its own under that number",
                exit_code=Exit.FAULT,
            )


def _pop_cpu_builds(job: Job, versions: dict[str, str]) -> list[CpuWheel]:
    """Take the CPU builds out of what a resolver found; their files are those of the table."""
    found = []
    for name, build in job.pins.cpu_builds.items():
        number = versions.pop(name, None)
        if number is None:
            continue
        if number != build.full:
            raise _cuda(name, f"{number} is not {build.full}", job.flavour)
        found.append(cpu_wheel(job.pins, name, job.python))
    return found


def _metadata(wheel: CpuWheel) -> dict[str, Any]:
    """What a CPU build says about itself, in the JSON form of PEP 566."""
    fields = HeaderParser().parsestr(wheel.metadata)
    return {
        "requires_dist": metadata_fields(wheel.metadata)["Requires-Dist"],
        "license_expression": fields["License-Expression"],
        "license": fields["License"],
    }


def _leave_out(job: Job, metadata: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The packages that the lock does not hold, although a resolver found them.

    Both resolvers see every package, so they come to the same versions; what is left out goes
    afterwards, and with it what nothing else requires.

    Raises:
        ForgeError: If another package than the named one requires it, or the exception ended.
    """
    requires = {name: list(one.get("requires_dist", [])) for name, one in metadata.items()}
    names = load_names()
    whole = walk(job.pins, job.flavour, job.python, requires)
    for one in names.left_out_of(job.flavour):
        others = whole.by.get(one.name, set()) - {one.by}
        why = ended(one) if one.name in whole.why else ""
        if others:
            why = f"{', '.join(sorted(others))} requires it; it is left out for {one.by} alone"
        if why:
            raise _still_needed(one, why)
    left_out = {one.name for one in names.left_out_of(job.flavour)}
    rest = {name: needed for name, needed in requires.items() if name not in left_out}
    return whole.why.keys() - walk(job.pins, job.flavour, job.python, rest).why.keys()


def _still_needed(one: LeftOut, why: str) -> ForgeError:
    return ForgeError(
        f"{one.flavour} cannot leave out {one.name}: {why}",
        expected=f"{one.by} as the only package that requires it, and a last day to come",
        mend="prove anew that imports do without it, then edit lock/names.toml: docs/lock.md",
        exit_code=Exit.FAULT,
    )


def _refuse_cuda(
    job: Job,
    packages: Sequence[Locked],
    metadata: Mapping[str, Mapping[str, Any]],
    left_out: set[str],
) -> None:
    """Refuse a name that may not enter the lock, and a package that requires one."""
    names = load_names()
    for package in packages:
        why = names.refusal(package.name, job.flavour)
        if why:
            raise _cuda(package.name, why, job.flavour)
        for requirement in metadata[package.name].get("requires_dist", []):
            needed = needs(requirement, job.python)
            if needed is None or needed in left_out:
                continue
            why = names.refusal(needed, job.flavour)
            if why:
                raise _cuda(package.name, f"it requires {needed}; {why}", job.flavour)


def resolve_unguarded(job: Job) -> list[Chosen]:
    """What the input would bring if nothing kept torch on its CPU build: to measure, not to lock.

    Args:
        job: What, from where.

    Raises:
        ForgeError: If there is no solution, or it cannot be resolved here.
    """
    if job.view is None:
        with view_of(job.pins, job.source) as view:
            return resolve_unguarded(replace(job, view=view))
    plain = {name: build.version for name, build in job.pins.cpu_builds.items()}
    decided = constraints(job.pins, job.python) | plain
    names = requirements(job.pins, job.flavour, job.python)
    with workspace() as work:
        (work / "standins").mkdir()
        _write(work / "in", [str(name) for name in names])
        _write(work / "constraints", [f"{name}=={number}" for name, number in decided.items()])
        versions = _uv(job, home_python(), work)
    return job.view.choose(job.who, job.python, versions)


def _target(job: Job, way: str) -> Path | None:
    """The interpreter for pip-compile; None to resolve with uv."""
    if way == "uv":
        return None
    try:
        target = target_python(job.python, job.source)
    except ForgeError:
        # the two give the same bytes, so an environment that cannot be made here stops nothing
        if way == "pip-tools":
            raise
        return None
    if target is None and way == "pip-tools":
        raise ForgeError(
            f"there is no interpreter of Python {job.python} here for pip-tools",
            expected=f"python{job.python} on PATH, on a Linux on x86-64",
            mend="leave --way out: uv resolves for a Python that is not there",
        )
    return target


def _write(path: Path, lines: Sequence[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _pip_compile(job: Job, python: Path, work: Path) -> dict[str, str]:
    out = work / "versions"
    words: list[str | Path] = [python, "-m", "piptools", "compile", "--quiet", "--no-config"]
    words += ["--strip-extras", "--allow-unsafe", "--no-header", "--no-annotate"]
    words += ["--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host"]
    words += ["--no-emit-options", "--newline=lf", "--cache-dir", work / "cache"]
    words += ["--pip-args=--only-binary :all:"]
    words += ["--find-links", work / "standins", "--constraint", work / "constraints"]
    done = job.run([*words, "--output-file", out, work / "in"], work)
    if done.code and _NO_SOLUTION.search(done.output):
        # uv comes to the same end and can say why, where pip-compile shows a traceback
        _uv(job, home_python(), work)
    return _versions(job, done, out, "pip-tools")


def _uv(job: Job, home: Path, work: Path) -> dict[str, str]:
    out = work / "versions"
    words: list[str | Path] = [home, "-m", "uv", "pip", "compile", "--quiet", "--no-config"]
    words += ["--strip-extras", "--no-header", "--no-annotate", "--only-binary", ":all:"]
    words += ["--python-version", job.python]
    words += ["--python-platform", f"x86_64-{job.pins.platform.removesuffix('_x86_64')}"]
    words += ["--no-python-downloads", "--find-links", work / "standins"]
    words += ["--constraints", work / "constraints"]
    done = job.run([*words, "--output-file", out, work / "in"], work)
    return _versions(job, done, out, "uv")


def _versions(job: Job, done: Completed, out: Path, resolver: str) -> dict[str, str]:
    """The pins that a resolver wrote, by canonical name."""
    if done.code:
        raise _failed(job, done, f"{resolver} found no solution of {job.what}")
    found: dict[str, str] = {}
    for raw in out.read_text(encoding="utf-8").splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        pin = _PIN.fullmatch(line)
        if pin is None:
            other = "uv" if resolver == "pip-tools" else "pip-tools"
            raise ForgeError(
                f"{resolver} wrote {line!r}",
                expected="name==version",
                mend=f"resolve it with the other one: ./forge lock --way {other}",
            )
        found[canonicalize_name(pin["name"])] = str(Version(pin["version"]))
    return found


def _failed(job: Job, done: Completed, no_solution: str) -> ForgeError:
    """Tell a bad index, one that does not answer, and a question without an answer apart."""
    # of a traceback, only the last line speaks to a person
    said = done.tail.splitlines()[-1] if "Traceback (most" in done.output else done.tail
    if re.search(r"DO NOT MATCH THE HASHES|HashMismatch", done.output):
        return job.source.wrong("other bytes", said)
    if _OTHER_METADATA.search(done.output):
        return ForgeError(
            f"the metadata of a file is of another one:\n{said}",
            expected="metadata of the file that the index lists",
            mend="rm -r out/lock/cache; if it stays so, the index is wrong",
            exit_code=Exit.FAULT,
        )
    job.source.refuse(done.output)
    if _NO_SOLUTION.search(done.output):
        return ForgeError(
            f"{no_solution}:\n{said}",
            expected=f"releases that go together, with wheels for {job.pins.platform}, uploaded "
            f"before {job.cutoff}",
            mend=f"edit lock/{job.flavour}.in or lock/pins.toml as the lines above say",
            exit_code=Exit.FAULT,
        )
    if re.search(r"404 Client Error|HTTP error 404|404 Not Found", done.output):
        return job.source.wrong("missing", said)
    return ForgeError(
        f"resolving {job.what} failed:\n{said}",
        expected="a resolver that comes to an end",
        mend="as the lines above say; then run it again",
    )


def _cuda(name: str, why: str, flavour: str) -> ForgeError:
    return ForgeError(
        f"{flavour} would hold {name}: {why}",
        expected="a closure without CUDA, and without the names that lock/names.toml refuses",
        mend=f"take what brings it out of lock/{flavour}.in, or give it a range without CUDA",
        exit_code=Exit.FAULT,
    )


def verify(job: Job, packages: Sequence[Locked], work: Path) -> int:
    """Download files and compare them with the digests that the index lists.

    Args:
        job: What they are for, and where they come from.
        packages: What to verify; at least one.
        work: A folder of this run; the files stay there until it goes.

    Returns:
        Bytes downloaded.

    Raises:
        ForgeError: If a listed file is missing (exit code 2) or is not what is listed (1).
        UnreachableError: If the index does not answer.
    """
    home = home_python()
    _write(work / "new", [f"{p.name}=={p.version} --hash=sha256:{p.sha256}" for p in packages])
    words: list[str | Path] = [home, "-m", "pip", "download", "-q", "--no-deps"]
    words += ["--require-hashes", *job.tags(), "--dest", work / "files", "-r", work / "new"]
    done = job.source.run(words, _TIME_LIMIT_S, work, job.stop)
    if done.code == 0:
        return sum(path.stat().st_size for path in (work / "files").iterdir())
    raise _failed(job, done, f"there are not all files of {job.what}")
