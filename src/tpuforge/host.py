"""What the images stage does to the machine it runs on: packages, and removing trees safely."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tpuforge import mirrors
from tpuforge.console import Progress
from tpuforge.errors import ForgeError
from tpuforge.paths import write_atomic
from tpuforge.process import clean_env, run

_POLICY = Path("/usr/sbin/policy-rc.d")
_NEXT = "trixie"
_APT = Path("/etc/apt")
_POLICY_TEXT = (
    "#!/bin/sh\n# written by tpuforge while it installs packages; safe to remove\nexit 101\n"
)


def can_install() -> bool:
    """Whether this is root on Debian or Ubuntu, with apt."""
    known = bool(distributions() & {"debian", "ubuntu"})
    return os.geteuid() == 0 and known and bool(which("apt-get"))


def distributions() -> set[str]:
    """The machine's distribution and those it is made from, such as ``{"ubuntu", "debian"}``."""
    release = mirrors.os_release()
    return {release.get("ID", ""), *release.get("ID_LIKE", "").split()} - {""}


def which(program: str) -> str:
    """The path of a program, looked up in the system's folders too; empty if it is not there.

    Args:
        program: Its name. A user's PATH often lacks ``/usr/sbin``.
    """
    path = os.environ.get("PATH", os.defpath)
    return shutil.which(program, path=f"{path}:/usr/sbin:/sbin") or ""


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    """Keep packages from starting services while they are installed."""
    try:
        mine = _POLICY.read_text(encoding="utf-8") == _POLICY_TEXT
    except FileNotFoundError:
        _POLICY.write_text(_POLICY_TEXT, encoding="utf-8")
        _POLICY.chmod(0o755)
        mine = True
    try:
        yield
    finally:
        if mine:
            _POLICY.unlink(missing_ok=True)


def apt_install(packages: Sequence[str], progress: Progress) -> None:
    """Install packages from the distribution; no service is started.

    Args:
        packages: Package names.
        progress: Told what happens.

    Raises:
        ForgeError: If apt fails.
    """
    env = clean_env(DEBIAN_FRONTEND="noninteractive")
    base = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120"]
    names = " ".join(packages)
    mend = f"apt-get update && apt-get install {names}"
    with progress.step(f"installing {names}"), _no_services():
        # an unreachable third-party source must not stop what the others serve
        run([*base, "update"], timeout=300, env=env, check=False, on_line=progress.detail)
        done = run(
            [*base, "install", "-y", "--no-install-recommends", *packages],
            timeout=1200,
            env=env,
            check=False,
            on_line=progress.detail,
            doing=f"installing {names}",
            mend=mend,
        )
    if done.code != 0:
        raise ForgeError(
            f"{names} could not be installed\n{done.tail}",
            expected="packages of this machine's distribution",
            mend=mend,
        )


def take_from_next(name: str, packages: Sequence[str], progress: Progress) -> None:
    """Let Debian 12 take some packages, and nothing else, from Debian 13.

    Args:
        name: What they are for, in the names of the two files that say so to apt.
        packages: Package names; they must need no newer C library.
        progress: Told what happens.

    Raises:
        ForgeError: If apt fails.
    """
    apt_install(["debian-archive-keyring"], progress)
    sources = _APT / "sources.list.d" / f"tpuforge-{name}.sources"
    preferences = _APT / "preferences.d" / f"tpuforge-{name}"
    progress.note(f"apt takes {', '.join(packages)} from Debian 13 by {sources}, {preferences}")
    lines = [
        f"# Written by tpuforge: {name} from Debian 13. Remove this file to undo.",
        "Types: deb",
        f"URIs: {mirrors.find_mirror().main}",
        f"Suites: {_NEXT}",
        "Components: main",
        f"Signed-By: {mirrors.keyring()}",
    ]
    write_atomic(sources, "\n".join(lines) + "\n")
    lines = [
        f"# Written by tpuforge: of Debian 13 only {name} is wanted.",
        "Package: *",
        f"Pin: release n={_NEXT}",
        "Pin-Priority: 100",
        "",
        f"Package: {' '.join(packages)}",
        f"Pin: release n={_NEXT}",
        "Pin-Priority: 990",
    ]
    write_atomic(preferences, "\n".join(lines) + "\n")


def mounts_below(folder: Path) -> list[Path]:
    """Mount points at or below a folder, deepest first.

    Args:
        folder: Any path.
    """
    root = os.path.realpath(folder)
    found = []
    # names in any encoding, with octal escapes for what would end a field
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        point = os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1"))
        if point == root or point.startswith(f"{root}/"):
            found.append(Path(point))
    return sorted(found, key=lambda path: len(str(path)), reverse=True)


def unmount_below(folder: Path) -> int:
    """Take away every mount at or below a folder.

    Args:
        folder: Any path.

    Returns:
        How many there were.

    Raises:
        ForgeError: If one cannot be unmounted.
    """
    points = mounts_below(folder)
    for point in points:
        run(["umount", "--lazy", point], timeout=30, doing=f"unmounting {point}")
    return len(points)


def remove_tree(folder: Path) -> None:
    """Remove a folder, after what is mounted below it: never through a mount or a link.

    Args:
        folder: Any path; it may be missing, or a file or a link that is in the folder's place.

    Raises:
        ForgeError: If something below it cannot be unmounted.
        OSError: If something cannot be removed.
    """
    if folder.is_dir() and not folder.is_symlink():
        unmount_below(folder)
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)
