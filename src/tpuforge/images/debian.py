"""Debian packages by name, version and digest: mirrors, locks, and fetching with apt.

apt runs in a folder of its own: its own sources, lists, cache and (empty) dpkg status, with
Debian's archive keyring. Of the machine's apt configuration only what says *how to reach* a mirror
counts (``Acquire::`` and the credentials in ``auth.conf``), never what to take from it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tpuforge.console import Progress, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.host import remove_tree
from tpuforge.lockfile import read_digests
from tpuforge.mirrors import Mirror, image_mirror, snapshot_of
from tpuforge.paths import ROOT, atomic_file, out_dir, scratch_dir, sha256_file, write_atomic
from tpuforge.pins import Suite
from tpuforge.process import Completed, clean_env, redact, run

ARCH = "amd64"
RELOCK = "./forge base --relock"
FULL = os.strerror(errno.ENOSPC)
"""What the programs that run here say of a full disk, in the locale that they are given."""
_DEB = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9.+-]+)_(?P<version>[0-9A-Za-z.+~:%-]+)_(?P<arch>amd64|all)\.deb"
)
_STAMP = re.compile(r"\d{8}T\d{6}Z")
_PRINTED = re.compile(r"'[^']*' (?P<file>\S+) (?P<size>\d+) SHA256:(?P<sha256>[0-9a-f]{64})")
_INDEXED = (
    *("Package", "Version", "Architecture", "Multi-Arch", "Essential", "Protected", "Priority"),
    *("Depends", "Pre-Depends", "Provides", "Conflicts", "Breaks", "Replaces"),
)
# what apt and the programs that check signatures say of a moment that does not fit
_BY_THE_CLOCK = ("is expired", "is not valid yet", "EXPKEYSIG", "EXPSIG", "Not live until")
_UPDATE_S = 120.0
_SNAPSHOT_S = 20.0
_DOWNLOAD_S = 1800.0


@dataclass(frozen=True, order=True)
class Deb:
    """One Debian package file.

    Attributes:
        name: Package name, such as ``libc6``.
        version: Debian version, epoch included (``1:4.13+dfsg1-1``).
        arch: ``amd64`` or ``all``.
        sha256: Digest of the file, 64 hex digits.
    """

    name: str
    version: str
    arch: str
    sha256: str

    @property
    def file(self) -> str:
        """The file's name as apt writes it: the epoch's colon as ``%3a``."""
        return f"{self.name}_{self.version.replace(':', '%3a')}_{self.arch}.deb"

    @property
    def stored(self) -> Path:
        """Its place in ``out/debs``, whether it is there or not."""
        return out_dir() / "debs" / self.sha256 / self.file

    def as_dict(self) -> dict[str, str]:
        """The package for machines."""
        return {
            "name": self.name,
            "version": self.version,
            "arch": self.arch,
            "sha256": self.sha256,
        }


@dataclass(frozen=True)
class DebLock:
    """The locked packages of one set.

    Attributes:
        suite: Code name of the suite.
        asked: What the pins asked for when the lock was written.
        snapshot: When it was written, as the snapshot archive names moments.
        debs: The packages, in the order of the file.
        sha256: Digest of the lock's own bytes.
    """

    suite: str
    asked: tuple[str, ...]
    snapshot: str
    debs: tuple[Deb, ...]
    sha256: str


def parse_deb(file: str, sha256: str) -> Deb | None:
    """The package that a file name and a digest stand for; None if the name has another form.

    Args:
        file: Such as ``login_1%3a4.13+dfsg1-1_amd64.deb``.
        sha256: 64 hex digits.
    """
    form = _DEB.fullmatch(file)
    if form is None:
        return None
    return Deb(form["name"], form["version"].replace("%3a", ":"), form["arch"], sha256)


def lock_path(label: str) -> Path:
    """Where the lock of a set of packages stands.

    Args:
        label: The set, such as ``bookworm`` or ``bookworm-builder``.
    """
    return ROOT / "lock" / "debian" / f"{label}.lock"


def read_deb_lock(path: Path) -> DebLock:
    """Read a lock of Debian packages.

    Args:
        path: Such as ``lock/debian/bookworm.lock``.

    Returns:
        The lock.

    Raises:
        ForgeError: If it is missing (exit code 2) or malformed (exit code 1).
    """
    if not path.is_file():
        raise ForgeError(f"{path.name}: there is no such lock", expected=str(path), mend=RELOCK)
    table = read_digests(path)
    header: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and ": " in line:
            key, _, value = line[2:].partition(": ")
            header.setdefault(key, value.strip())
    debs: list[Deb] = []
    for file, sha256 in table.items():
        deb = parse_deb(file, sha256)
        if deb is None:
            raise _bad(path, f"{file!r} is not name_version_arch.deb for {ARCH} or all")
        if any(deb.name == other.name for other in debs):
            raise _bad(path, f"{deb.name} stands there twice")
        debs.append(deb)
    if not debs:
        raise _bad(path, "it holds no package")
    for key in ("suite", "packages", "snapshot"):
        if not header.get(key):
            raise _bad(path, f"its header has no line '# {key}: …'")
    if not _STAMP.fullmatch(header["snapshot"]):
        raise _bad(path, f"its snapshot {header['snapshot']!r} is not of the form 20261130T000000Z")
    return DebLock(
        header["suite"],
        tuple(header["packages"].split()),
        header["snapshot"],
        tuple(debs),
        sha256_file(path),
    )


def _bad(path: Path, what: str) -> ForgeError:
    return ForgeError(
        f"{path.name}: {what}",
        expected="a lock as 'base --relock' writes it (docs/base.md)",
        mend=f"git checkout -- lock/debian/{path.name}, or: {RELOCK}",
        exit_code=Exit.FAULT,
    )


def check_asked(lock: DebLock, suite: Suite, path: Path) -> None:
    """Refuse a lock that was written for other pins.

    Args:
        lock: The lock.
        suite: The suite of the pins.
        path: Where the lock stands, for the message.

    Raises:
        ForgeError: If suite or packages differ; exit code 1.
    """
    if lock.suite != suite.name:
        raise _bad(path, f"it is the lock of {lock.suite}, not of {suite.name}")
    more = sorted(set(suite.packages) - set(lock.asked))
    less = sorted(set(lock.asked) - set(suite.packages))
    if more or less:
        changes = [f"+{name}" for name in more] + [f"-{name}" for name in less]
        raise ForgeError(
            f"{path.name} is stale: the pins of {suite.label} changed since ({' '.join(changes)})",
            expected="a lock written for the packages in lock/pins.toml",
            mend=RELOCK,
            exit_code=Exit.FAULT,
        )
    missing = sorted(set(suite.packages) - {deb.name for deb in lock.debs})
    if missing:
        raise _bad(path, f"it does not hold {', '.join(missing)}")


def write_deb_lock(path: Path, suite: Suite, debs: Iterable[Deb]) -> None:
    """Write a lock, stamped with the present moment.

    Args:
        path: Where it goes.
        suite: What was asked for.
        debs: What it came to.
    """
    rolling = int(suite.rolling)
    lines = [
        "# Debian packages of the base image: sha256sum format, checked before every use.",
        f"# Written by: {RELOCK}",
        *(
            ["# Debian's testing moves every day; what it had is in the snapshot archive."]
            * rolling
        ),
        f"# suite: {suite.name}",
        f"# packages: {' '.join(suite.packages)}",
        f"# snapshot: {datetime.now(UTC):%Y%m%dT%H%M%SZ}",
        *(f"{deb.sha256}  {deb.file}" for deb in sorted(debs)),
    ]
    write_atomic(path, "\n".join(lines) + "\n")


class Apt:
    """apt in a folder of its own, bound to some sources.

    Args:
        folder: Its folder; made if missing.
        sources: The text of its ``sources.list``.
        patience: Seconds to wait for a silent mirror.
    """

    def __init__(self, folder: Path, sources: str, *, patience: int = 15) -> None:
        self._folder = folder
        for name in ("lists/partial", "archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "status").write_bytes(b"")
        # proxies and mirrors may be written with their passwords, and an out folder is handed on
        scratch = contextlib.ExitStack()
        private = scratch.enter_context(scratch_dir())
        weakref.finalize(self, scratch.close)
        self._sources = private / "sources.list"
        self._sources.write_text(sources, encoding="utf-8")
        self._config = private / "apt.conf"
        self._config.write_text(self._settings(patience), encoding="utf-8")

    def _settings(self, patience: int) -> str:
        # by way of a file: what run() returns has lost the passwords of proxies
        dump = self._config.with_name("host.conf")
        show = ["sh", "-c", 'exec apt-config dump >"$1"', "sh", str(dump)]
        run(show, timeout=30, doing="reading apt's configuration", mend="install apt")
        lines = dump.read_text(encoding="utf-8", errors="replace").splitlines()
        reach = [line for line in lines if line.startswith("Acquire::")]
        here = str(self._folder).replace('"', '\\"')
        own = {
            "Dir": here,
            "Dir::State": here,
            "Dir::State::Lists": f"{here}/lists",
            "Dir::State::status": f"{here}/status",
            "Dir::Cache": here,
            "Dir::Cache::Archives": f"{here}/archives",
            "Dir::Etc::SourceList": str(self._sources).replace('"', '\\"'),
            "Dir::Etc::netrc": "/etc/apt/auth.conf",
            "Dir::Etc::netrcparts": "/etc/apt/auth.conf.d",
            **dict.fromkeys(
                (
                    "Dir::Etc::Main",
                    "Dir::Etc::Parts",
                    "Dir::Etc::SourceParts",
                    "Dir::Etc::Preferences",
                    "Dir::Etc::PreferencesParts",
                    "Dir::Etc::Trusted",
                    "Dir::Etc::TrustedParts",
                ),
                os.devnull,
            ),
            "APT::Architecture": ARCH,
            "APT::Sandbox::User": "root",
            "APT::Install-Recommends": "false",
            "APT::Update::Error-Mode": "any",
            "Acquire::Languages": "none",
            "Acquire::ForceHash": "SHA256",
            "Acquire::Retries": "1",
            "Acquire::http::Timeout": str(patience),
            "Acquire::https::Timeout": str(patience),
            # apt counts itself as essential unless told otherwise
            "pkgCacheGen::ForceEssential": ",",
        }
        lines = [*reach, *(f'{key} "{value}";' for key, value in own.items())]
        return "\n".join([*lines, f'APT::Architectures {{ "{ARCH}"; }};']) + "\n"

    def update(self, *, timeout: float = _UPDATE_S) -> str:
        """Fetch the package lists.

        Args:
            timeout: Seconds for all of them.

        Returns:
            Empty if all came, else what went wrong.
        """
        try:
            done = self._run(["apt-get", "update"], timeout, "fetching Debian's package lists")
        except ForgeError as error:
            if "not done after" not in error.found:
                raise
            return error.found
        if done.code == 0:
            return ""
        wrong = [line for line in done.output.splitlines() if line.startswith(("E:", "W:"))]
        return "\n".join(wrong[:6]) or done.tail

    def has(self, debs: Sequence[Deb]) -> set[Deb]:
        """Those of some packages that the sources offer in exactly that version.

        Args:
            debs: The packages.
        """
        names = sorted({deb.name for deb in debs})
        done = self._run(["apt-cache", "madison", *names], 120, "looking up Debian packages")
        rows = [line.split("|") for line in done.output.splitlines() if line.count("|") == 2]
        offered = {(name.strip(), version.strip()) for name, version, _ in rows}
        return {deb for deb in debs if (deb.name, deb.version) in offered}

    def resolve(self, packages: Sequence[str]) -> list[Deb]:
        """The newest essential set together with some packages and all they depend on.

        Args:
            packages: Package names.

        Raises:
            ForgeError: If apt cannot make such a set.
        """
        # usr-is-merged: the base starts with merged folders, so the converter (and perl) can stay
        argv = ["apt-get", "install", "--print-uris", "-qq", "-y", "?essential", "usr-is-merged"]
        done = self._run([*argv, *packages], 120, "resolving Debian packages")
        debs = [
            deb
            for form in map(_PRINTED.match, done.output.splitlines())
            if form and (deb := parse_deb(form["file"], form["sha256"])) is not None
        ]
        if done.code != 0 or not debs:
            raise ForgeError(
                f"apt cannot resolve {', '.join(packages)}\n{done.tail}",
                expected="Debian packages that can be installed together",
                mend="edit debian.<suite>.packages in lock/pins.toml",
                exit_code=Exit.FAULT,
            )
        return sorted(debs)

    def download(self, debs: Sequence[Deb], folder: Path, progress: Progress) -> None:
        """Fetch packages into a folder.

        Args:
            debs: What to fetch, by name and version.
            folder: Where the files go.
            progress: Told apt's last word.

        Raises:
            ForgeError: If apt fails.
        """
        argv = ["apt-get", "download", *(f"{deb.name}={deb.version}" for deb in debs)]
        done = run(
            argv,
            timeout=_DOWNLOAD_S,
            env=clean_env(APT_CONFIG=str(self._config)),
            cwd=folder,
            check=False,
            on_line=progress.detail,
            doing="fetching Debian packages",
        )
        if done.code != 0 and FULL in done.output:
            raise no_space(folder, done.tail)
        if done.code != 0:
            raise ForgeError(
                f"Debian packages could not be fetched\n{done.tail}",
                expected="a mirror that serves what its own list names",
                mend="run it again; if that fails, set TPUFORGE_DEBIAN_MIRROR to another mirror",
            )

    def _run(self, argv: Sequence[str], timeout: float, doing: str) -> Completed:
        return run(
            argv,
            timeout=timeout,
            env=clean_env(APT_CONFIG=str(self._config)),
            check=False,
            doing=doing,
            mend="set TPUFORGE_DEBIAN_MIRROR to a mirror that answers",
        )


def good(debs: Sequence[Deb], progress: Progress) -> set[Deb]:
    """Those of some packages whose files are stored with the right digest.

    A file with another digest is removed: it will be fetched again.

    Args:
        debs: The packages.
        progress: Told of every file that is thrown away.
    """
    found = set()
    for deb in debs:
        if not deb.stored.is_file():
            continue
        if sha256_file(deb.stored) == deb.sha256:
            found.add(deb)
        else:
            progress.note(f"{deb.file} in out/debs is damaged: fetching it again", loud=True)
            deb.stored.unlink()
    return found


def fetch(lock: DebLock, progress: Progress) -> list[Deb]:
    """Bring the locked packages into ``out/debs``, each verified by its digest.

    Args:
        lock: What to fetch.
        progress: Told what happens.

    Returns:
        The packages that neither the mirror nor the snapshot archive has; empty if all are there.

    Raises:
        ForgeError: If the mirror does not answer (exit code 2), or sends other bytes than locked
            (exit code 1).
    """
    with progress.step(f"checking {len(lock.debs)} Debian packages"):
        have = good(lock.debs, progress)
    missing = [deb for deb in lock.debs if deb not in have]
    if not missing:
        return []
    mirror = image_mirror()
    apt = Apt(_folder("mirror"), mirror.sources(lock.suite))
    with progress.step("fetching Debian's package lists"):
        problem = apt.update()
    if problem:
        raise unreachable(mirror, problem, [deb.file for deb in missing])
    offered = apt.has(missing)
    _take(apt, [deb for deb in missing if deb in offered], progress)
    gone = [deb for deb in missing if deb not in offered]
    if not gone:
        return []
    archive = snapshot_of(mirror, lock.snapshot)
    if archive is None:
        progress.note("no snapshot archive can be named for this mirror", loud=True)
        return gone
    apt = Apt(_folder("snapshot"), archive.sources(lock.suite), patience=5)
    with progress.step(f"{len(gone)} locked packages left the mirror: asking {archive.origin}"):
        problem = apt.update(timeout=_SNAPSHOT_S)
    if problem:
        progress.note(f"{archive.origin} does not answer: {problem.splitlines()[0]}", loud=True)
        return gone
    offered = apt.has(gone)
    _take(apt, [deb for deb in gone if deb in offered], progress)
    return [deb for deb in gone if deb not in offered]


def resolve(suite: Suite, progress: Progress) -> list[Deb]:
    """What the mirror offers today for the packages of a suite.

    Args:
        suite: The suite and its packages.
        progress: Told what happens.

    Raises:
        ForgeError: If the mirror does not answer, or apt cannot make a set.
    """
    mirror = image_mirror()
    apt = Apt(_folder("mirror"), mirror.sources(suite.name))
    with progress.step(f"resolving the packages of {suite.label}"):
        problem = apt.update()
        if problem:
            raise unreachable(mirror, problem, list(suite.packages))
        return apt.resolve(suite.packages)


def unreachable(mirror: Mirror, problem: str, wanted: Sequence[str]) -> ForgeError:
    """The error for a mirror that does not answer.

    Args:
        mirror: The mirror.
        problem: apt's words.
        wanted: What is needed from it.
    """
    if FULL in problem:
        return no_space(out_dir() / "debs", problem)
    if any(words in problem for words in _BY_THE_CLOCK):
        return ForgeError(
            f"by this machine's clock ({datetime.now(UTC):%Y-%m-%d %H:%M} UTC) the lists of the "
            f"Debian mirror {redact(mirror.main)} ({mirror.origin}) do not hold\n{problem}",
            expected="a clock that is right, and lists that are renewed",
            mend="set the clock; if it is right, this mirror is behind (set TPUFORGE_DEBIAN_MIRROR "
            "to another) or the keyring is (sudo apt-get install debian-archive-keyring)",
        )
    if "NO_PUBKEY" in problem:
        return ForgeError(
            f"Debian's archive keyring here is too old for this archive\n{problem}",
            expected="a debian-archive-keyring that knows who signs it",
            mend="sudo apt-get install --only-upgrade debian-archive-keyring, or install the "
            "package of that name from a newer Debian",
        )
    some = ", ".join(wanted[:4]) + (f" and {len(wanted) - 4} more" if len(wanted) > 4 else "")
    return ForgeError(
        f"the Debian mirror {redact(mirror.main)} ({mirror.origin}) does not answer\n{problem}",
        expected=f"a mirror that serves {some}",
        mend="check the network, or set TPUFORGE_DEBIAN_MIRROR to a mirror that answers",
    )


def no_space(folder: Path, problem: str) -> ForgeError:
    """The error for a full disk.

    Args:
        folder: Where something was to be written.
        problem: The words of what was to write it.
    """
    return ForgeError(
        f"no space left in {folder}: {problem}",
        expected="500 MB for a base: its packages, apt's lists, mmdebstrap's tar and the layer",
        mend="free some space, or set TPUFORGE_OUT to a larger disk",
    )


def _folder(name: str) -> Path:
    return out_dir() / "debs" / ".apt" / name


def _take(apt: Apt, debs: Sequence[Deb], progress: Progress) -> None:
    """Fetch, verify and store packages."""
    if not debs:
        return
    store = out_dir() / "debs"
    for old in store.glob(".partial-*"):
        # of a run that was killed: whoever fetches holds the lock of the bases
        remove_tree(old)
    with (
        progress.step(f"fetching {len(debs)} Debian packages"),
        tempfile.TemporaryDirectory(prefix=".partial-", dir=store) as partial,
    ):
        apt.download(debs, Path(partial), progress)
        total = 0
        for deb in debs:
            came = Path(partial) / deb.file
            if not came.is_file():
                raise ForgeError(
                    f"apt fetched no {deb.file}",
                    expected=f"{deb.file} beside what else was fetched",
                    mend="run it again; if that fails, set TPUFORGE_DEBIAN_MIRROR",
                )
            digest = sha256_file(came)
            if digest != deb.sha256:
                raise ForgeError(
                    f"{deb.file} from the mirror has the digest {digest}",
                    expected=f"{deb.sha256}, as locked",
                    mend="set TPUFORGE_DEBIAN_MIRROR to another mirror; do not trust this one",
                    exit_code=Exit.FAULT,
                )
            total += came.stat().st_size
            with atomic_file(deb.stored) as target:
                shutil.copyfile(came, target)
        progress.advance(total)
    progress.note(f"{len(debs)} Debian packages fetched and verified ({size(total)})")


def flat_repository(debs: Sequence[Deb], folder: Path) -> None:
    """Make a flat apt repository of stored packages.

    The digests are in its index, so apt checks the bytes again while it installs them.

    Args:
        debs: Packages that are stored.
        folder: An empty folder.

    Raises:
        ForgeError: If dpkg-deb cannot read one.
    """
    show = 'set -e; for deb; do dpkg-deb --field "$deb" ' + " ".join(_INDEXED) + "; echo; done"
    stored = [str(deb.stored) for deb in debs]
    fields = run(["sh", "-c", show, "sh", *stored], timeout=300, doing="reading Debian packages")
    index = []
    for deb, control in zip(debs, fields.output.strip().split("\n\n"), strict=True):
        # a name without '%': apt would take it for an escape
        link = folder / f"{deb.sha256}.deb"
        os.link(deb.stored, link)
        index.append(
            f"{control.strip()}\nFilename: ./{link.name}\n"
            f"Size: {link.stat().st_size}\nSHA256: {deb.sha256}\n"
        )
    (folder / "Packages").write_text("\n".join(index), encoding="utf-8")
