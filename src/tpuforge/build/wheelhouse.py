"""``fetch_wheel``: fill the wheelhouse with the wheels that the locks name.

The wheelhouse is content-addressed: ``out/wheelhouse/<sha256>/<file name>.whl``. A file gets there
by rename, once its digest is proven, and its digest is proven again by every run, because a file
can change in place. The user's pip settings say where to look; the digest alone says what to take.
The wheels of torch_tpu and libtpu are audited as well (``audit_wheel``), once per digest.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import os
import queue
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import canonicalize_name, parse_wheel_filename

from tpuforge import pins as pins_module
from tpuforge import tree
from tpuforge.build import audit
from tpuforge.build.sources import (
    Kind,
    Offer,
    Source,
    Sources,
    configured,
    is_release,
    offers,
    shown,
)
from tpuforge.console import Progress, size
from tpuforge.download import RefusedError, UnreachableError, Web, WrongBytesError
from tpuforge.errors import Exit, ForgeError
from tpuforge.lockfile import read_digests, read_lock
from tpuforge.paths import ROOT, exclusive, out_dir, sha256_file
from tpuforge.target import fitting
from tpuforge.verb import Outcome, parser, run_verb

VERB = "fetch_wheel"
PARALLEL = 4
"""Wheels fetched at a time."""

_CHUNK = 1 << 20
# what runs inside the images and beside them, whatever the flavour
_COMPANIONS = ("smoke", "simulator")
# an image's pip comes from its wheel too, as does uv, which installs its wheels; the tools' lock is
# where both are locked
_TOOLS, _INSTALLERS = "tools", ("pip", "uv")


@dataclass(frozen=True)
class Wanted:
    """A wheel that at least one lock names.

    Attributes:
        name: Canonical project name.
        version: As it stands in the lock.
        sha256: Its digest.
        file: Its file name, where a digest table tells it; otherwise a source does.
        locks: The locks that name it.
    """

    name: str
    version: str
    sha256: str
    file: str | None
    locks: tuple[str, ...]

    @property
    def title(self) -> str:
        """The wheel for people."""
        return self.file or f"{self.name} {self.version}"


@dataclass
class _Report:
    """What a run did, filled by several threads under :attr:`guard`."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    fetched: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: dict[Wanted, list[str]] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    fatal: BaseException | None = None

    def count(self, kind: Kind, came: int) -> None:
        with self.guard:
            place = self.fetched.setdefault(kind, {"files": 0, "bytes": 0})
            place["files"] += 1
            place["bytes"] += came


class Wheelhouse:
    """The folder of verified wheels.

    Args:
        root: ``out/wheelhouse``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.partial = root / ".partial"
        self.bad = root / ".bad"

    def find(self, wanted: Wanted) -> list[Path]:
        """What lies in the place of a wheel: one file, none, or something that must go."""
        try:
            return sorted((self.root / wanted.sha256).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def good(self, wanted: Wanted, path: Path, on_bytes: Callable[[int], None]) -> bool:
        """Whether a file is the wheel, by its name and by every byte of it."""
        return (
            not path.is_symlink()
            and path.is_file()
            and is_release(path.name, wanted.name, wanted.version)
            and sha256_file(path, on_bytes) == wanted.sha256
        )

    def quarantine(self, path: Path) -> Path:
        """Move a file out of the way, for whoever wants to know what happened to it.

        Returns:
            Where it is now; an earlier one of the same place is gone.
        """
        away = self.bad / path.parent.name / path.name
        away.parent.mkdir(parents=True, exist_ok=True)
        if away.is_dir() and not away.is_symlink():
            shutil.rmtree(away)
        path.replace(away)
        return away

    def keep(self, wanted: Wanted, file: str, partial: Path) -> Path:
        """Put a verified file in its place."""
        final = self.root / wanted.sha256 / file
        final.parent.mkdir(parents=True, exist_ok=True)
        partial.chmod(0o644)
        partial.replace(final)
        for folder in (final.parent, self.root):
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        return final

    def sweep(self, missing: Sequence[Wanted]) -> None:
        """Drop what dead runs left half-done, except what this run can go on with."""
        useful = {wanted.sha256 for wanted in missing}
        with contextlib.suppress(FileNotFoundError):
            for path in self.partial.iterdir():
                if path.name not in useful or not path.is_file() or path.is_symlink():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.partial.mkdir(parents=True, exist_ok=True)


def wanted_wheels(folder: Path, flavour: str, python: str) -> list[Wanted]:
    """What the locks of a flavour and its companions name, and pip; each wheel once.

    Args:
        folder: ``lock/``.
        flavour: Such as ``runtime``; empty for what its companions and pip need alone.
        python: ``X.Y``.

    Returns:
        The wheels, in the order of the locks.

    Raises:
        ForgeError: If a lock is missing or malformed.
    """
    table = folder / "torch-cpu.sha256"
    files = {digest: name for name, digest in read_digests(table).items()} if table.exists() else {}
    found: dict[str, Wanted] = {}
    for lock in dict.fromkeys((*([flavour] if flavour else []), *_COMPANIONS, _TOOLS)):
        path = folder / f"{lock}-py{python.replace('.', '')}.txt"
        for package in read_lock(path):
            if lock == _TOOLS and lock != flavour and package.name not in _INSTALLERS:
                continue
            known = found.get(package.sha256)
            locks = (*known.locks, path.name) if known else (path.name,)
            found[package.sha256] = Wanted(
                package.name, package.version, package.sha256, files.get(package.sha256), locks
            )
    return list(found.values())


class _Filling:
    """Fetching wheels, several at a time; one that fails does not keep the others from coming.

    Args:
        house: The wheelhouse.
        sources: Where to look.
        tags: What fits the Python of the lock.
        advance: Called with bytes as they come.
    """

    def __init__(
        self,
        house: Wheelhouse,
        sources: Sources,
        tags: frozenset[Tag],
        advance: Callable[[int], None],
    ) -> None:
        self._house = house
        self._sources = sources
        self._tags = tags
        self._advance = advance
        self._web = Web(sources.access)
        self._stop = threading.Event()
        self._work: queue.SimpleQueue[Wanted] = queue.SimpleQueue()
        self._report = _Report()

    def run(self, missing: Sequence[Wanted]) -> _Report:
        """Fetch what is missing.

        Returns:
            What came from where, and for every wheel that did not come, why.

        Raises:
            ForgeError: If there is no space left.
            OSError: If the wheelhouse cannot be written.
        """
        for wanted in missing:
            self._work.put(wanted)
        # daemons: a thread that waits for a silent server must not keep an interrupted run alive
        threads = [
            threading.Thread(target=self._fetch_some, daemon=True)
            for _ in range(min(PARALLEL, len(missing)))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.1)
        finally:
            self._stop.set()
        if self._report.fatal is not None:
            raise _no_space(self._house, self._report.fatal) from self._report.fatal
        return self._report

    def _fetch_some(self) -> None:
        """What each thread does: take wheels from the queue until it is empty."""
        while not self._stop.is_set():
            try:
                self._fetch(self._work.get_nowait())
            except (queue.Empty, InterruptedError):
                return
            except BaseException as error:
                # a fault of this machine, such as a full disk: raised again in the main thread
                with self._report.guard:
                    self._report.fatal = self._report.fatal or error
                self._stop.set()

    def _fetch(self, wanted: Wanted) -> None:
        """Fetch one wheel from the first source that really has it, or note why none has."""
        problems: list[str] = []
        for source in self._sources.for_version(wanted.version):
            try:
                listed = offers(source, wanted.name, wanted.version, self._web)
            except (UnreachableError, RefusedError) as error:
                problems.append(f"{source.label}: {error}")
                continue
            likely = self._likely(listed, wanted)
            if not likely and source.kind != "directory":
                others = f"; it lists {len(listed)} others of this release" if listed else ""
                problems.append(f"{source.label}: no file with this digest{others}")
            for offer in likely:
                if self._accept(wanted, source, offer, problems):
                    return
        with self._report.guard:
            self._report.problems[wanted] = problems

    def _accept(self, wanted: Wanted, source: Source, offer: Offer, problems: list[str]) -> bool:
        """Bring one offer into the wheelhouse; False (with why) if it is not the wheel."""
        partial = self._house.partial / wanted.sha256
        try:
            came = self._take(offer, partial, wanted.sha256)
        except WrongBytesError as error:
            text = f"{shown(offer.place)}: has SHA-256 {error}"
            problems.append(text)
            # a file for another Python lies beside the right one by right
            if offer.sha256 is not None or _fits(offer.file, self._tags):
                with self._report.guard:
                    self._report.wrong.append(text)
            return False
        except (UnreachableError, RefusedError) as error:
            problems.append(f"{shown(offer.place)}: {error}")
            return False
        if _fits(offer.file, self._tags):
            self._house.keep(wanted, offer.file, partial)
            self._report.count(source.kind, came)
        else:
            partial.unlink()
            with self._report.guard:
                self._report.foreign.append(offer.file)
        return True

    def _likely(self, listed: Sequence[Offer], wanted: Wanted) -> list[Offer]:
        """The offers worth reading: those that claim the digest, then those that claim none."""
        claimed = [offer for offer in listed if offer.sha256 == wanted.sha256]
        silent = [offer for offer in listed if offer.sha256 is None]
        return claimed + sorted(silent, key=lambda offer: not _fits(offer.file, self._tags))

    def _take(self, offer: Offer, partial: Path, sha256: str) -> int:
        """Bring an offer's bytes into a partial file; how many had to be read."""
        if isinstance(offer.place, str):
            return self._web.download(
                offer.place, partial, sha256, on_bytes=self._advance, stop=self._stop
            )
        came, found = self._copy(offer.place, partial)
        if found != sha256:
            partial.unlink()
            self._advance(-came)
            raise WrongBytesError(found)
        return came

    def _copy(self, source: Path, partial: Path) -> tuple[int, str]:
        """Copy a local file, never link it: its owner may change it later.

        Returns:
            The number of bytes, and their digest.
        """
        digest = hashlib.sha256()
        came = 0
        try:
            file = source.open("rb", buffering=0)
        except OSError as error:
            raise RefusedError(error.strerror or str(error)) from error
        with file, partial.open("wb", buffering=0) as target:
            while True:
                try:
                    chunk = file.read(_CHUNK)
                except OSError as error:
                    raise RefusedError(error.strerror or str(error)) from error
                if not chunk:
                    break
                if self._stop.is_set():
                    raise InterruptedError("stopped")
                view = memoryview(chunk)
                while view:
                    view = view[target.write(view) :]
                digest.update(chunk)
                came += len(chunk)
                self._advance(len(chunk))
            os.fsync(target.fileno())
        return came, digest.hexdigest()


def _fits(file: str, tags: frozenset[Tag]) -> bool:
    return not parse_wheel_filename(file)[3].isdisjoint(tags)


def _no_space(house: Wheelhouse, error: BaseException) -> BaseException:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ForgeError(
            f"no space left in {house.root}",
            expected="space for the wheels of the lock (about 0.7 GB)",
            mend="free some space, or set TPUFORGE_OUT to a larger disk; what came is kept",
        )
    return error


def fetch(options: argparse.Namespace, progress: Progress) -> Outcome:
    """The verb: verify what is there, fetch what is not.

    Args:
        options: Its arguments.
        progress: Its display.

    Returns:
        What was verified and fetched.

    Raises:
        ForgeError: If a wheel is missing at the end, a lock cannot be used, or there is no such
            image.
    """
    pins = pins_module.load()
    python = pins.python(options.python)
    flavour = flavour_of(options.image, options.flavour, python, pins)
    named = wanted_wheels(ROOT / "lock", flavour, python)
    wheels = _only(named, options.only) if options.only else named
    plan = _Plan(
        python=python,
        flavour=flavour,
        wheels=wheels,
        tags=fitting(python, pins.glibc),
        torch=next((one.version for one in named if one.name == "torch"), pins.torch.full),
        torch_tpu=pins.torch_tpu,
    )
    house = Wheelhouse(out_dir() / "wheelhouse")
    with exclusive("wheelhouse", on_wait=lambda who: progress.note(f"waiting for {who}")):
        return _fetch_all(house, plan, pins.torch.index, options, progress)


def flavour_of(image: str | None, flavour: str | None, python: str, pins: pins_module.Pins) -> str:
    """The flavour whose wheels are wanted: the image's own, the one that was named, or the default.

    Args:
        image: The image that was named, if one was.
        flavour: The flavour that was named, if one was.
        python: ``X.Y``.
        pins: The pins.

    Returns:
        Its name; empty for an image that holds no wheels.

    Raises:
        ForgeError: If there is no such image, or it is not made from that flavour or Python.
    """
    if image is None:
        return flavour or pins.default_flavour
    declared = tree.images(ROOT / "images")
    if image not in declared:
        raise ForgeError(
            f"there is no image {image!r}",
            expected=f"one of {', '.join(declared)}",
            mend="see images/docker-bake.hcl; docs/images.md says how to add one",
        )
    named = declared[image]
    alone = f"./forge fetch_wheel --image {image}"
    if not named.wheels:
        if flavour is not None:
            raise ForgeError(
                f"the image {image} holds no wheels",
                expected=f"--image {image} without --flavour",
                mend=alone,
            )
        return ""
    own = named.flavour
    if own and flavour not in (None, own):
        raise ForgeError(
            f"the image {image} is made from the flavour {own}, not from {flavour}",
            expected=f"--image {image} alone",
            mend=alone,
        )
    pythons = pins.flavours[own].pythons if own in pins.flavours else ()
    if pythons and python not in pythons:
        raise ForgeError(
            f"there is no flavour {own!r} for Python {python}",
            expected=f"Python {' or '.join(pythons)}, for which the pins have it locked",
            mend=f"{alone} --python {pythons[0]}",
        )
    return own or flavour or pins.default_flavour


def _only(wheels: Sequence[Wanted], names: str) -> list[Wanted]:
    """The wheels of some packages alone, named with commas between them."""
    asked = {canonicalize_name(name.strip()) for name in names.split(",") if name.strip()}
    unknown = sorted(asked - {wanted.name for wanted in wheels})
    if unknown or not asked:
        raise ForgeError(
            f"--only: no lock names {', '.join(unknown) or 'a package without a name'}",
            expected=f"some of {', '.join(sorted({wanted.name for wanted in wheels}))}",
            mend="./forge fetch_wheel --only torch-tpu,libtpu",
        )
    return [wanted for wanted in wheels if wanted.name in asked]


@dataclass(frozen=True)
class _Plan:
    """What a run is to bring about."""

    python: str
    flavour: str
    wheels: Sequence[Wanted]
    tags: frozenset[Tag]
    torch: str
    torch_tpu: pins_module.TorchTpu


def _fetch_all(
    house: Wheelhouse,
    plan: _Plan,
    torch_index: str,
    options: argparse.Namespace,
    progress: Progress,
) -> Outcome:
    wheels = plan.wheels
    named = [wanted.file for wanted in wheels if wanted.file is not None]
    _refuse_foreign([file for file in named if not _fits(file, plan.tags)], plan.python)
    started = time.monotonic()
    present, spoiled = _verify(house, wheels, progress)
    verified_s = time.monotonic() - started
    _refuse_foreign(
        [path.name for path in present.values() if not _fits(path.name, plan.tags)], plan.python
    )
    missing = [wanted for wanted in wheels if wanted not in present]
    notes = [f"{text} did not have its digest any more and was fetched again" for text in spoiled]
    report = _Report()
    if missing or house.partial.exists():
        house.sweep(missing)
    fetch_s = 0.0
    if missing:
        for text in spoiled:
            progress.note(f"{text} does not have its digest any more; moved to .bad", loud=True)
        started = time.monotonic()
        sources = configured(options.source, torch_index, offline=options.offline)
        with progress.step(f"fetching {len(missing)} of {len(wheels)} wheels"):
            report = _Filling(house, sources, plan.tags, _counter(progress)).run(missing)
        fetch_s = time.monotonic() - started
        _refuse_foreign(report.foreign, plan.python)
        for wanted in missing:
            if wanted not in report.problems:
                present[wanted] = house.find(wanted)[0]
    audits = _audit(present, plan, progress)
    if missing and report.problems:
        raise _missing(house, len(wheels), report, spoiled, sources, audits=audits)
    _refuse_bad([one for one, _ in audits])
    notes += [f"{text}, which is not the locked file; passed over" for text in report.wrong]
    sizes = {wanted: path.stat().st_size for wanted, path in present.items()}
    total = sum(sizes.values())
    brought = sum(place["bytes"] for place in report.fetched.values())
    plural = "s" if len(wheels) > 1 else ""
    summary = f"{len(wheels)} wheel{plural}, {size(total)}, all digests verified: {_whence(wheels)}"
    if missing:
        ways = ", ".join(
            f"{count['files']} from {_KINDS[kind]}"
            for kind, count in sorted(report.fetched.items())
        )
        summary += f"; {len(missing)} fetched ({size(brought)}: {ways})"
    if audits:
        summary += f"; audited: {_verdicts(audits)}"
    return Outcome(
        status="done" if missing or any(fresh for _, fresh in audits) else "unchanged",
        summary=summary,
        notes=notes,
        data={
            "python": plan.python,
            "flavour": plan.flavour or None,
            "wheels": len(wheels),
            "bytes": total,
            "verify_seconds": round(verified_s, 3),
            "fetch_seconds": round(fetch_s, 3),
            "fetched": report.fetched,
            "quarantined": spoiled,
            "audits": [
                {
                    "file": one.file,
                    "ok": one.ok,
                    "verdict": one.verdict,
                    "report": f"audit/{one.sha256}.json",
                }
                for one, _ in audits
            ],
            "files": [
                {
                    "name": wanted.name,
                    "version": wanted.version,
                    "sha256": wanted.sha256,
                    "file": present[wanted].name,
                    "bytes": sizes[wanted],
                    "locks": list(wanted.locks),
                }
                for wanted in wheels
            ],
        },
    )


def _whence(wheels: Sequence[Wanted]) -> str:
    """How many wheels each lock names, those of several at the first of them."""
    counts = Counter(wanted.locks[0] for wanted in wheels)
    return ", ".join(f"{count} of {lock}" for lock, count in counts.items())


_KINDS = {
    "directory": "local directories",
    "index": "package indexes",
    "torch index": "the PyTorch index",
}


def _counter(progress: Progress) -> Callable[[int], None]:
    """A counter of bytes that several threads may call."""
    guard = threading.Lock()

    def advance(count: int) -> None:
        with guard:
            progress.advance(count)

    return advance


def _verify(
    house: Wheelhouse, wheels: Sequence[Wanted], progress: Progress
) -> tuple[dict[Wanted, Path], list[str]]:
    """Prove every wheel that is there; move away what is not what its place says.

    Returns:
        The proven ones, and the names of the ones moved away.
    """
    found = [(wanted, path) for wanted in wheels for path in house.find(wanted)]
    if not found:
        return {}, []
    # the largest first, so that the last thread is not left alone with it
    found.sort(key=lambda pair: -pair[1].lstat().st_size)
    total = sum(path.lstat().st_size for _, path in found)
    advance = _counter(progress)
    present: dict[Wanted, Path] = {}
    spoiled: list[str] = []
    with (
        progress.step(f"verifying {len(found)} wheels", total),
        ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool,
    ):
        answers = pool.map(lambda pair: house.good(pair[0], pair[1], advance), found)
        for (wanted, path), good in zip(found, answers, strict=True):
            if good and wanted not in present:
                present[wanted] = path
            else:
                house.quarantine(path)
                spoiled.append(path.name)
    return present, spoiled


def _audit(
    present: Mapping[Wanted, Path], plan: _Plan, progress: Progress
) -> list[tuple[audit.Report, bool]]:
    """Audit the wheels of torch_tpu and libtpu that are there.

    Returns:
        The reports, each with whether the wheel had to be read for it.
    """
    made = []
    for wanted, path in present.items():
        if wanted.name in audit.PACKAGES:
            is_release = (wanted.name, wanted.version) == ("torch-tpu", plan.torch_tpu.version)
            made.append(
                audit.remembered(
                    path,
                    wanted.sha256,
                    torch=plan.torch,
                    xla_commit=plan.torch_tpu.xla_commit if is_release else None,
                    progress=progress,
                )
            )
    return sorted(made, key=lambda pair: pair[0].file)


def _verdicts(audits: Sequence[tuple[audit.Report, bool]]) -> str:
    return "; ".join(f"{one.package} {one.version}: {one.verdict}" for one, _ in audits)


def _refuse_bad(reports: Sequence[audit.Report]) -> None:
    bad = [report for report in reports if not report.ok]
    if bad:
        found = [f"{one.file}: {one.verdict}\n{audit.errors_text(one)}" for one in bad]
        raise ForgeError(
            "the audit finds errors in wheels that the lock names\n" + "\n".join(found),
            expected="wheels that are what they say",
            mend="choose other releases in lock/pins.toml; every rule: docs/audit_wheel.md",
            exit_code=Exit.FAULT,
        )


def _refuse_foreign(files: Sequence[str], python: str) -> None:
    if files:
        raise ForgeError(
            f"the lock names wheels that do not fit Python {python}: {', '.join(sorted(files))}",
            expected=f"a lock made for Python {python} on this platform",
            mend=f"./forge lock --python {python}",
            exit_code=Exit.FAULT,
        )


def _missing(
    house: Wheelhouse,
    count: int,
    report: _Report,
    spoiled: Sequence[str],
    sources: Sources,
    *,
    audits: Sequence[tuple[audit.Report, bool]],
) -> ForgeError:
    lines = []
    for wanted, problems in report.problems.items():
        lines.append(f"  {wanted.title}  sha256 {wanted.sha256}")
        lines += [f"    {problem}" for problem in problems]
    if spoiled:
        lines.append(f"  moved to {house.bad}, since the digest was wrong: {', '.join(spoiled)}")
    places = dict.fromkeys((*sources.general, *sources.torch))
    looked = [source.label for source in places if source.kind == "directory"]
    lines.append(f"  directories of this machine that were searched: {', '.join(looked) or 'none'}")
    bad = [one for one, _ in audits if not one.ok]
    if audits:
        lines.append(f"  what came is kept; audited: {_verdicts(audits)}")
        lines += [audit.errors_text(one) for one in bad]
    where = "no source has" if len(looked) < len(places) else "offline, and no directory has"
    return ForgeError(
        f"{len(report.problems)} of {count} wheels are missing: {where} them\n" + "\n".join(lines),
        expected="files with exactly these digests",
        mend="put each file into a directory DIR, then: ./forge fetch_wheel --source DIR",
        exit_code=Exit.FAULT if spoiled or report.wrong or bad else Exit.CANNOT,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb.

    Args:
        argv: Its arguments; the process's own if not given.

    Returns:
        Its exit code.
    """
    arguments = parser(VERB, "Fill the wheelhouse with the wheels that the locks name, by digest.")
    arguments.add_argument(
        "--python", metavar="X.Y", help="take the locks of this Python (default: lock/pins.toml's)"
    )
    arguments.add_argument(
        "--flavour", metavar="NAME", help="take this lock (default: lock/pins.toml's)"
    )
    arguments.add_argument("--image", metavar="NAME", help="take the lock of this image's flavour")
    arguments.add_argument("--only", metavar="NAME,…", help="fetch and audit these packages alone")
    arguments.add_argument(
        "--offline", action="store_true", help="use nothing but directories of this machine"
    )
    arguments.add_argument(
        "--source",
        metavar="DIR_OR_URL",
        action="append",
        default=[],
        help="a directory with wheels or a package index to ask first; may be repeated",
    )
    return run_verb(VERB, arguments, fetch, argv)


if __name__ == "__main__":
    raise SystemExit(main())
