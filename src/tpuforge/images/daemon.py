"""The private Docker daemon: its packages, its start, its end, and what a crash leaves behind.

It has its own socket, data, run folder and process id file, the containerd image store, and leaves
the machine's network alone. Only processes that carry this daemon's own paths in their command
line are ever ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import tempfile
import time
from pathlib import Path

from tpuforge import mirrors
from tpuforge.console import Progress
from tpuforge.errors import ForgeError
from tpuforge.host import (
    apt_install,
    can_install,
    distributions,
    remove_tree,
    take_from_next,
    unmount_below,
    which,
)
from tpuforge.paths import out_dir, write_json
from tpuforge.process import clean_env, run

OLDEST = 26
"""The oldest engine with BuildKit 0.13, for daemons that do not tell their BuildKit's version."""

_KEPT_CACHE = "20GB"
"""What the private engine keeps of its build cache; the whole set of images leaves some 15 GB."""
_PROBE = ".overlay-"
# containerd refuses longer socket paths, before the kernel does (107)
_SOCKET_LIMIT = 104
_LONGEST_SOCKET = "exec/containerd/containerd.sock.ttrpc"
_START_S = 60.0
_STOP_S = 20.0
_DOCKER = ("docker.io", "docker-cli", "docker-buildx", "containerd")
_START = """
log=$1; pid=$2; shift 2
setsid --fork "$@" >"$log" 2>&1 </dev/null
n=0
while [ ! -s "$pid" ] && [ $n -lt 100 ]; do sleep 0.1; n=$((n + 1)); done
"""


def folder() -> Path:
    """The daemon's own folder, with its data."""
    return out_dir() / "engine"


def run_folder() -> Path:
    """The folder of its sockets.

    A Unix socket's path holds 107 bytes, so a deep out folder gets a short one below ``/run``.
    """
    own = folder() / "run"
    if len(os.fsencode(own / _LONGEST_SOCKET)) <= _SOCKET_LIMIT:
        return own
    name = hashlib.sha256(os.fsencode(folder())).hexdigest()[:12]
    return Path("/run") / f"tpuforge-{name}"


def socket_path() -> Path:
    """The socket of its API."""
    return run_folder() / "docker.sock"


def _config_path() -> Path:
    return folder() / "daemon.json"


def _pid_path() -> Path:
    return folder() / "dockerd.pid"


def _log_path() -> Path:
    return folder() / "dockerd.log"


def usable_dockerd() -> str:
    """The dockerd of this machine that is new enough; empty if there is none."""
    dockerd = which("dockerd")
    return dockerd if dockerd and _major(dockerd) >= OLDEST else ""


def _major(dockerd: str) -> int:
    words = run([dockerd, "--version"], timeout=30, check=False).output.split("version", 1)
    digits = words[-1].strip().split(".")[0]
    return int(digits) if digits.isdigit() else 0


def ensure_packages(progress: Progress) -> None:
    """Have dockerd, a client and buildx on this machine.

    Args:
        progress: Told what happens.

    Raises:
        ForgeError: If they are missing or too old and cannot be installed.
    """
    dockerd = which("dockerd")
    if dockerd and not usable_dockerd():
        raise ForgeError(
            f"{dockerd} is older than {OLDEST}, and it is not replaced without asking",
            expected=f"Docker {OLDEST} or newer",
            mend="remove or upgrade the package docker.io (or docker-ce), then run it again",
        )
    if dockerd and which("docker") and which("containerd") and which("runc"):
        return
    if not can_install():
        raise ForgeError(
            "Docker is not complete here",
            expected="dockerd, docker, containerd and runc",
            mend="install Docker for this distribution",
        )
    packages = [*_DOCKER, "ca-certificates"]
    if _kernel_has_apparmor() and not which("apparmor_parser"):
        packages.append("apparmor")
    release = mirrors.os_release()
    if release.get("ID") == "debian" and release.get("VERSION_ID") == "12":
        _add_next_suite(progress)
    elif "ubuntu" in distributions():
        # Ubuntu's docker.io holds the client as well
        packages.remove("docker-cli")
    apt_install(packages, progress)
    if not dockerd:
        _leave_off(progress)
    if not usable_dockerd():
        raise ForgeError(
            "this distribution's Docker is too old: "
            + run([which("dockerd"), "--version"], timeout=30, check=False).output.strip(),
            expected=f"Docker {OLDEST} or newer, as in Debian 12 and 13 and Ubuntu 22.04 and newer",
            mend="use another Docker: set DOCKER_HOST",
        )


def _leave_off(progress: Progress) -> None:
    """Keep the service of a Docker that only this project needs from starting with the machine.

    It would answer on Docker's default socket, with an image store that cannot bake.
    """
    systemctl = which("systemctl")
    if not systemctl:
        return
    services = ("docker.service", "docker.socket")
    done = run([systemctl, "disable", *services], timeout=60, check=False)
    by_hand = f"systemctl {'disable' if done.code else 'enable --now'} {' '.join(services)}"
    said = f"could not be turned off ({done.tail})" if done.code else "is left off"
    progress.note(f"the Docker service that was installed {said}; by hand: {by_hand}")


def _kernel_has_apparmor() -> bool:
    try:
        enabled = Path("/sys/module/apparmor/parameters/enabled").read_text(encoding="ascii")
    except OSError:
        return False
    return enabled.strip() == "Y"


def _add_next_suite(progress: Progress) -> None:
    """Let Debian 12 take Docker, and nothing else, from Debian 13.

    Debian 12's own engine is 20.10. These four packages need no newer C library; runc stays with
    Debian 12, because that of Debian 13 does need one.
    """
    progress.note(f"Debian 12's Docker is too old: taking {', '.join(_DOCKER)} from Debian 13")
    take_from_next("docker", _DOCKER, progress)


def _command_line(pid: int) -> list[str]:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in raw.split(b"\0") if word]


def _is_ours(words: list[str]) -> bool:
    """Whether a command line is this daemon's own, or one of its helpers'."""
    if not words:
        return False
    name = Path(words[0]).name
    if name == "dockerd":
        return f"--config-file={_config_path()}" in words
    if name in ("containerd", "containerd-shim-runc-v2"):
        return any(word.startswith(f"{run_folder()}/exec/") for word in words)
    return False


def running_pid() -> int | None:
    """The process id of the private daemon, if it runs."""
    try:
        pid = int(_pid_path().read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    words = _command_line(pid)
    return pid if words and Path(words[0]).name == "dockerd" and _is_ours(words) else None


def answers() -> bool:
    """Whether the private daemon answers on its socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        try:
            client.connect(str(socket_path()))
            client.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in client.recv(64)
        except OSError:
            return False


def start(progress: Progress) -> int:
    """Start the private daemon, after clearing what an earlier one may have left.

    Args:
        progress: Told what happens.

    Returns:
        Its process id.

    Raises:
        ForgeError: If it does not answer in time; with the end of its log.
    """
    end_all(progress)
    runs = run_folder()
    for path in (folder() / "data", runs / "exec"):
        path.mkdir(parents=True, exist_ok=True)
    runs.chmod(0o700)
    _check_file_system()
    config = {
        "features": {"containerd-snapshotter": True},
        # every new base or suite leaves what was built on the old one: without a bound a week of
        # bakes fills a disk
        "builder": {"gc": {"enabled": True, "defaultKeepStorage": _KEPT_CACHE}},
        "data-root": str(folder() / "data"),
        "exec-root": str(runs / "exec"),
        "pidfile": str(_pid_path()),
        "hosts": [f"unix://{socket_path()}"],
        "bridge": "none",
        "iptables": False,
        "ip6tables": False,
        "ip-forward": False,
        "ip-masq": False,
    }
    write_json(_config_path(), config)
    command = [which("dockerd"), f"--config-file={_config_path()}"]
    if any(name == "docker0" for _, name in socket.if_nameindex()):
        # with "bridge": "none" dockerd removes a docker0 it finds, and this one is another's
        command = [which("unshare"), "--net", "--", *command]
    env = clean_env()
    env["PATH"] += ":/usr/sbin:/sbin"
    with progress.step("starting the private engine"):
        run(
            ["sh", "-c", _START, "sh", _log_path(), _pid_path(), *command],
            timeout=_START_S,
            env=env,
            doing="starting dockerd",
        )
        deadline = time.monotonic() + _START_S
        while not answers():
            if running_pid() is None or time.monotonic() > deadline:
                tail = _log_tail()
                end_all(progress)
                raise ForgeError(
                    f"the private engine did not start\n{tail}",
                    expected="a dockerd that answers within a minute",
                    mend=f"read {_log_path()}; free some space or use another Docker (DOCKER_HOST)",
                )
            time.sleep(0.1)
    pid = running_pid()
    if pid is None:
        raise ForgeError(
            f"the private engine ended at once\n{_log_tail()}",
            expected="a dockerd that stays",
            mend=f"read {_log_path()}",
        )
    return pid


def _check_file_system() -> None:
    """Refuse a file system that cannot hold a container's upper layer, such as another's layer.

    dockerd starts there all the same, and then every build step fails.
    """
    with tempfile.TemporaryDirectory(prefix=_PROBE, dir=folder()) as name:
        parts = {part: Path(name) / part for part in ("lower", "upper", "work", "merged")}
        for path in parts.values():
            path.mkdir()
        # relative names: the mount option has no way to write a comma or a colon in a path
        layers = "lowerdir=lower,upperdir=upper,workdir=work"
        mount = ["mount", "-t", "overlay", "-o", layers, "overlay", "merged"]
        done = run(mount, timeout=30, cwd=Path(name), check=False, doing="mounting an overlay")
        if done.code == 0:
            run(["umount", "merged"], timeout=30, cwd=Path(name), doing="unmounting an overlay")
            return
    raise ForgeError(
        f"the file system of {folder()} cannot hold a private engine's layers\n{done.tail}",
        expected="one that carries overlay mounts, such as ext4, xfs or btrfs (a container's own "
        "file system does not), and the right to mount",
        mend="set TPUFORGE_OUT to a folder on such a file system, or DOCKER_HOST to a Docker",
    )


def _log_tail() -> str:
    try:
        lines = _log_path().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "it left no log"
    return "\n".join(lines[-8:])


def stop(progress: Progress) -> bool:
    """Stop the private daemon and clear what it mounted.

    Args:
        progress: Told what happens.

    Returns:
        Whether there was anything to stop.
    """
    with progress.step("stopping the private engine"):
        return end_all(progress)


def end_all(progress: Progress) -> bool:
    """End the private daemon and its helpers, and clear its mounts and sockets.

    Args:
        progress: Told of leftovers.

    Returns:
        Whether a process or a mount was there.

    Raises:
        ForgeError: If a mount cannot be taken away.
    """
    pid = running_pid()
    if pid is not None:
        _end([pid], signal.SIGTERM, _STOP_S)
    # a killed dockerd leaves containerd and shims, which would keep the next one from starting
    rest = _ours()
    if rest:
        _end(rest, signal.SIGTERM, 5.0)
        _end(_ours(), signal.SIGKILL, 5.0)
    mounts = unmount_below(folder() / "data") + unmount_below(run_folder())
    for probe in folder().glob(f"{_PROBE}*"):
        remove_tree(probe)
    if (rest or mounts) and pid is None:
        progress.note(f"cleared {len(rest)} processes and {mounts} mounts of a killed engine")
    _pid_path().unlink(missing_ok=True)
    # sockets and process ids; below /run nobody else would ever remove it
    remove_tree(run_folder())
    return bool(pid or rest or mounts)


def _ours() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _is_ours(_command_line(int(entry.name))):
            found.append(int(entry.name))
    return found


def _end(pids: list[int], number: signal.Signals, patience: float) -> None:
    """Signal processes that are ours, and wait for their end."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and any(_is_ours(_command_line(pid)) for pid in pids):
        time.sleep(0.05)
