"""The room: real remote services on the loopback, for the tests of ``build_wheel --remote``.

A root file system of Debian forky holds PostgreSQL, BuildGrid with buildbox's worker, nginx and
Bazel 7; nothing of it touches this machine's own packages. It is made once (some four minutes)
and kept in ``out/remote``; the services run in namespaces of their own and end with the tests.

Pinned: BuildGrid and its libraries by digest, in ``buildgrid.txt``. The Debian packages are those
that forky has now, checked by Debian's signatures; ``packages.txt`` in the room lists them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from process_support import call
from tpuforge.errors import ForgeError
from tpuforge.mirrors import find_mirror, keyring
from tpuforge.paths import exclusive, out_dir, sha256_text, sha256_tree
from tpuforge.process import run

HERE = Path(__file__).resolve().parent
SUITE = "forky"
PACKAGES = (
    "bazel-bootstrap",
    "buildbox",
    "nginx-light",
    "postgresql",
    "python3-venv",
)
USER, PASSWORD = "forge", "guarded-word"
"""Who may use the guarded cache; the script ``services`` has them too."""

_PARTS = ("services", "buildgrid.yml", "buildgrid.txt")
_ROOT_S = 1200.0
_READY_S = 120.0
# which wheels fit forky's Python
_WHEELS = [
    *("--python-version", "3.14", "--implementation", "cp"),
    *("--abi", "cp314", "--abi", "abi3", "--abi", "none"),
    *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_17_x86_64"),
    *("--platform", "manylinux2014_x86_64", "--platform", "any"),
]


@dataclass(frozen=True)
class Services:
    """Where the services listen.

    Attributes:
        executor: BuildGrid: cache, contents and execution.
        cache: nginx, for everybody.
        guarded: nginx, for who knows the password.
    """

    executor: str
    cache: str
    guarded: str


def hindrance() -> str:
    """Why this machine cannot have a room; empty if it can."""
    if os.geteuid() != 0:
        return "the room needs root: it mounts, and makes a root file system"
    if platform.machine() != "x86_64":
        return f"the room is made for x86_64, and this is {platform.machine()}"
    missing = [name for name in ("mmdebstrap", "unshare", "chroot") if not shutil.which(name)]
    if missing:
        return f"the room needs {', '.join(missing)}: apt-get install mmdebstrap util-linux"
    return ""


def make_room() -> Path:
    """The room's root; made if it is not there.

    Raises:
        ForgeError: If it cannot be made.
    """
    made_of = [SUITE, *PACKAGES, sha256_tree(*(HERE / name for name in _PARTS))]
    key = sha256_text(*made_of)[:16]
    home = out_dir() / "remote"
    final = home / key
    with exclusive("remote"):
        if not final.is_dir():
            home.mkdir(exist_ok=True)
            for old in home.iterdir():
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            _make(home, final)
    return final


def _make(home: Path, final: Path) -> None:
    made = Path(tempfile.mkdtemp(prefix=".room-", dir=home))
    made.chmod(0o755)
    root = made / "root"
    log = home / "room.log"
    run(
        [
            "mmdebstrap",
            "--variant=apt",
            f"--include={','.join(PACKAGES)}",
            f"--keyring={keyring()}",
            # forky's list of packages has a short life, and a mirror or a clock may be behind
            '--aptopt=Acquire::Check-Valid-Until "false"',
            '--aptopt=APT::Sandbox::User "root"',
            "--dpkgopt=force-unsafe-io",
            SUITE,
            str(root),
            find_mirror().main,
        ],
        timeout=_ROOT_S,
        log=log,
        doing="making the root file system of the room",
        mend=f"read {log}",
    )
    room = root / "srv" / "room"
    room.mkdir()
    for name in _PARTS:
        shutil.copy(HERE / name, room / name)
    # the user's own pip and its settings say where wheels are; the digests say which
    fetched = call(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps"),
            *("--only-binary", ":all:", *_WHEELS),
            *("--requirement", str(HERE / "buildgrid.txt"), "--dest", str(room / "wheels")),
        ]
    )
    if fetched.returncode:
        raise ForgeError(f"BuildGrid's wheels: {fetched.stderr[-2000:]}")
    install = (
        "python3 -m venv /srv/room/buildgrid && /srv/room/buildgrid/bin/pip install --quiet"
        " --no-index --find-links /srv/room/wheels --require-hashes --no-deps"
        " --requirement /srv/room/buildgrid.txt"
    )
    chroot = ["chroot", str(root), "/bin/sh", "-c"]
    run([*chroot, install], timeout=_ROOT_S, doing="installing BuildGrid")
    listed = run([*chroot, "dpkg-query --show"], timeout=60)
    (made / "packages.txt").write_text(listed.output + "\n")
    made.rename(final)


def enter(root: Path, shared: Sequence[Path], command: str) -> str:
    """A shell line that runs a command in the room's root, in a mount namespace of its own.

    Args:
        root: The root.
        shared: Folders of this machine that are seen there, at the same paths.
        command: A shell line that ends in the command to run there, after ``chroot $root``.
    """
    mounts = [f"root={shlex.quote(str(root))}"]
    for folder in (Path("/dev"), Path("/proc"), *shared):
        name = shlex.quote(str(folder))
        mounts.append(f'mkdir -p "$root"{name} && mount --rbind {name} "$root"{name}')
    return " && ".join([*mounts, command])


def make_bazel(room: Path, path: Path, shared: Sequence[Path]) -> Path:
    """A program that is the room's Bazel.

    Args:
        room: The room.
        path: Where it goes.
        shared: Folders that it sees.
    """
    inside = enter(
        room / "root",
        shared,
        'exec chroot "$root" /usr/bin/env -C "$PWD" /usr/bin/bazel'
        # where its own files are stands in Debian's settings, and the verb reads no system's
        ' --bazelrc=/etc/bazel/bazelrc --server_javabase=/usr/lib/jvm/default-java "$@"',
    )
    script = f"exec unshare --mount --propagation private sh -c {shlex.quote(inside)} bazel"
    path.write_text(f'#!/bin/sh\n[ $# != 0 ] || set -- help\n{script} "$@"\n')
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def services(room: Path, ports: Sequence[int], log: Path) -> Iterator[Services]:
    """Run the room's services.

    Args:
        room: The room.
        ports: Five free ports of the loopback.
        log: Gets their output.
    """
    words = " ".join(str(port) for port in ports)
    inside = enter(room / "root", (), f'exec chroot "$root" /bin/bash /srv/room/services {words}')
    with log.open("wb") as sink:
        child = subprocess.Popen(
            [
                *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
                *("--propagation", "private", "sh", "-c", inside),
            ],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + _READY_S
        while b"the room is ready" not in log.read_bytes():
            if child.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-3000:]
                raise ForgeError(f"the services of the room do not start\n{tail}")
            time.sleep(0.1)
        _, grid, _, plain, guarded = ports
        yield Services(
            f"grpc://127.0.0.1:{grid}",
            f"http://127.0.0.1:{plain}",
            f"http://127.0.0.1:{guarded}",
        )
    finally:
        child.kill()
        child.wait()
