"""Before hours of building: has this machine what the build needs?

Every figure comes with what is wanted and what mends it. Only what is certain to end the build
stops it; less than upstream's own machines have is said, and the build goes on.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpuforge.console import size
from tpuforge.paths import read_regular
from tpuforge.pins import Machine

NETWORK_LIMIT_S = 1.2
"""Seconds that all hosts together get to answer."""

_DISK_FLOOR_GB = 1
_GB = 10**9
_HOSTS_SHOWN = 4
# bounds for files that a stranger wrote
_FILES_MOST = 200
_FILE_MOST = 1 << 20
_HOSTS_MOST = 64
_URL_HOST = re.compile(r"https://([\w.-]+)")
# files in which a Bazel workspace names what it downloads
_WORKSPACE_FILES = ("MODULE.bazel", "WORKSPACE", "WORKSPACE.bazel", "*/*.bzl")
_CGROUP = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")  # noqa: S108 - not for a file of ours: the mount itself is judged


@dataclass(frozen=True)
class Figure:
    """One thing that was measured.

    Attributes:
        name: What, such as ``disk``.
        found: What is there.
        wanted: What should be there, and who says so.
        ok: Whether it is.
        remedy: What mends it; empty where it is well.
        stops: Whether the build cannot succeed without it.
    """

    name: str
    found: str
    wanted: str
    ok: bool
    remedy: str = ""
    stops: bool = False

    @property
    def line(self) -> str:
        """One line for people."""
        state = "ok" if self.ok else "STOP" if self.stops else "low"
        mend = "" if self.ok else f"; {self.remedy}"
        return f"{state:<5}{self.name:<12}{self.found} (wanted: {self.wanted}){mend}"


@dataclass(frozen=True)
class Needs:
    """What a build is going to use.

    Attributes:
        work: Folder of Bazel's caches and outputs; it need not exist yet.
        machine: What upstream builds on.
        glibc: Release of glibc that the host's programs need, ``2.31``; None in a container.
        git: Why git is needed; empty if it is not.
        hosts: Host and port to what it is for; without one of these there is no build.
        helpful: Host and port to what it is for; the caches may hold what they have.
        credentials: The file with the credentials that were asked for; None if none were.
    """

    work: Path
    machine: Machine
    glibc: str | None
    git: str = ""
    hosts: Mapping[tuple[str, int], str] = field(default_factory=dict)
    helpful: Mapping[tuple[str, int], str] = field(default_factory=dict)
    credentials: Path | None = None


def measure(needs: Needs) -> list[Figure]:
    """Measure this machine, in less than 2 s.

    Args:
        needs: What the build is going to use.

    Returns:
        A figure each for disk, memory, cores, glibc, ``/dev/shm``, git, network and credentials.
    """
    return [
        _disk(needs),
        _memory(needs.machine),
        _cores(needs.machine),
        _glibc(needs.glibc),
        _shm(),
        _git(needs.git),
        *_network(needs),
        _credentials(needs.credentials),
    ]


def hosts_of(source: Path) -> dict[tuple[str, int], str]:
    """The hosts that a Bazel workspace names for its downloads.

    Args:
        source: The workspace.

    Returns:
        Host and port to the file that names it; comments do not count.
    """
    found: dict[tuple[str, int], str] = {}
    for pattern in _WORKSPACE_FILES:
        for path in sorted(itertools.islice(source.glob(pattern), _FILES_MOST)):
            try:
                lines = read_regular(path, _FILE_MOST).decode("utf-8").splitlines()
            except (OSError, UnicodeDecodeError):
                continue
            for line in lines:
                for host in _URL_HOST.findall(line.partition("# ")[0]):
                    found.setdefault((host, 443), path.relative_to(source).as_posix())
    return dict(itertools.islice(found.items(), _HOSTS_MOST))


def _disk(needs: Needs) -> Figure:
    there = needs.work
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    writable = os.access(there, os.W_OK)
    wanted = needs.machine.disk_gb
    return Figure(
        "disk",
        f"{size(free)} free in {needs.work}" + ("" if writable else ", which cannot be written"),
        f"{wanted} GB, to which TorchTPU's .bazelrc lets the disk cache grow",
        writable and free >= wanted * _GB,
        "free some space, or name a folder on a larger disk: --cache DIR",
        # Bazel and its Java runtime alone, unpacked, take a good part of this
        stops=not writable or free < _DISK_FLOOR_GB * _GB,
    )


def _memory(machine: Machine) -> Figure:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_number("memory.max")
    if limit is not None:
        total = min(total, limit)
    jobs = max(1, total * machine.cores // (machine.memory_gb * _GB))
    return Figure(
        "memory",
        size(total),
        f"{machine.memory_gb} GB for {machine.cores} cores, as upstream's own builds have",
        # a core needs its share, however many there are
        total >= machine.memory_gb * _GB * min(1.0, _count_cores() / machine.cores),
        f"if the compiler is killed, run fewer at once: --jobs {jobs}",
    )


def _cores(machine: Machine) -> Figure:
    cores = _count_cores()
    return Figure(
        "cores",
        f"{cores}",
        f"{machine.cores}, as upstream's own builds have",
        cores >= machine.cores,
        "expect the build to take longer, or use a cache: --remote public-cache",
    )


def _count_cores() -> int:
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def _cgroup_number(name: str) -> int | None:
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):
        # no such file, or "max"
        return None


def _glibc(wanted: str | None) -> Figure:
    if wanted is None:
        return Figure("glibc", "that of the builder image", "no more", True)
    try:
        found = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        found = ""
    version = found.removeprefix("glibc ")
    return Figure(
        "glibc",
        version or "another C library",
        f"{wanted} or later, the sysroot that TorchTPU's build tools are linked with",
        bool(version) and _numbers(version) >= _numbers(wanted),
        "build in the builder image: --where container",
        stops=True,
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _shm() -> Figure:
    there = _SHM.is_dir() and os.access(_SHM, os.W_OK)
    found = f"{size(shutil.disk_usage(_SHM).free)} free" if there else "missing or read-only"
    return Figure(
        str(_SHM),
        found,
        "a folder that can be written: Python keeps the locks of multiprocessing there",
        there,
        "mount a tmpfs on /dev/shm",
    )


def _git(why: str) -> Figure:
    path = shutil.which("git")
    found = path or "not on PATH"
    if not why:
        return Figure("git", found, "nothing: the source is no git checkout", True)
    return Figure("git", found, why, path is not None, "install git", stops=True)


def _network(needs: Needs) -> list[Figure]:
    asked = {**needs.helpful, **needs.hosts}
    if not asked:
        return [Figure("network", "not asked", "no host that is known before the build", True)]
    began = time.monotonic()
    failed = _unreachable(list(asked))
    spent = time.monotonic() - began
    figures = []
    for hosts, stops in ((needs.hosts, True), (needs.helpful, False)):
        bad = [host for host in hosts if host in failed and (stops or host not in needs.hosts)]
        shown = [f"{host[0]} ({failed[host]})" for host in bad[:_HOSTS_SHOWN]]
        if len(bad) > _HOSTS_SHOWN:
            shown.append(f"{len(bad) - _HOSTS_SHOWN} more")
        if not hosts:
            continue
        names = ", ".join(sorted({hosts[host] for host in hosts}))
        found = f"no answer from {', '.join(shown)}" if bad else f"all answered in {spent:.2f} s"
        figures.append(
            Figure(
                "network" if stops else "downloads",
                found,
                f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}, for {names}",
                not bad,
                "check the network, or set https_proxy"
                if stops
                else "set https_proxy, unless the caches hold what these hosts have",
                stops=stops,
            )
        )
    return figures


def _unreachable(hosts: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Which hosts (or the proxies in front of them) take no connection, and why."""
    failed: dict[tuple[str, int], str] = dict.fromkeys(hosts, "no answer in time")
    lock = threading.Lock()

    def ask(host: tuple[str, int]) -> None:
        why = ""
        try:
            # the name server is asked in here as well, and may be slow
            socket.create_connection(_door(host), timeout=NETWORK_LIMIT_S).close()
        except (OSError, UnicodeError) as error:
            # the latter where it cannot be the name of a host
            why = getattr(error, "strerror", "") or str(error)
        with lock:
            if why:
                failed[host] = why
            else:
                failed.pop(host, None)

    threads = [threading.Thread(target=ask, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + NETWORK_LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    with lock:
        return dict(failed)


def _door(host: tuple[str, int]) -> tuple[str, int]:
    """The proxy for a host, if the environment names one, else the host."""
    proxy = urllib.request.getproxies_environment().get("https" if host[1] != 80 else "http")
    if proxy is None or urllib.request.proxy_bypass_environment(host[0]):  # type: ignore[attr-defined]
        return host
    parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts.hostname or host[0], parts.port or 80


def _credentials(file: Path | None) -> Figure:
    if file is None:
        return Figure("credentials", "none", "none: no remote service was asked for with any", True)
    there = file.is_file() and os.access(file, os.R_OK)
    return Figure(
        "credentials",
        f"{file}" if there else f"{file} cannot be read",
        "the file that --credentials names, or that gcloud leaves",
        there,
        "gcloud auth application-default login, or name another: --credentials FILE",
        stops=True,
    )
