"""No Bazel is left behind, however a run ends.

Bazel's server is in a session of its own, and so are its actions: ending the client leaves both.
A run that ends in order asks the server to go. One that is killed (signal 9, or the kernel's
choice when memory is short) can do nothing any more, so a guard, a small process of its own, waits
for the end of the run and then does it in its place. Should the guard be killed as well, the next
run with the same folder ends what it finds, and a server that is idle ends itself.

Facts, read off Bazel 2.1.0 and 7.7.1: the server ends on TERM, and leaves the action that it was
running; ``process-wrapper`` stays in the server's session, the action below it has its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import tpuforge
from tpuforge.errors import ForgeError
from tpuforge.process import clean_env, run, undisturbed

LOCK = ".lock"
"""The lock file in the folder of everything that Bazel keeps; who holds it has the folder alone."""

MAX_IDLE_S = 300
"""After how long an idle server ends itself, if nobody else does: Bazel's own choice is 3 hours."""

_PATIENCE_S = 5.0
_GUARD_START_S = 30.0
_LAST_S = 60.0
# what the guard hears when a run ends in order; silence is a killed run
_IN_ORDER = b"."


@dataclass(frozen=True)
class _Process:
    number: int
    parent: int
    session: int
    ticks: int


def end_all(work: Path) -> None:
    """End every process of Bazel that works for a folder: clients, servers and their actions.

    The caller holds the folder's lock, so all of them are left from earlier runs, or its own.

    Args:
        work: Folder for everything that Bazel keeps.
    """
    root = work / "root"
    for client in _clients(root):
        _kill(client, signal.SIGKILL)
    for file in root.glob("*/server/server.pid.txt"):
        server = _server(file)
        actions = _actions(file, server)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if server is None:
                break
            _kill(server, number)
            deadline = time.monotonic() + _PATIENCE_S
            while (server := _server(file)) is not None and time.monotonic() < deadline:
                time.sleep(0.05)
        actions |= _actions(file, None)
        for action in actions:
            _kill(action, signal.SIGKILL)
        deadline = time.monotonic() + _PATIENCE_S
        while any(map(_words, actions)) and time.monotonic() < deadline:
            time.sleep(0.02)
    # Bazel's log of itself begins with its whole environment, the password of a proxy included
    for log in root.glob("*/java.log*"):
        # only where a server of Bazel was: the folder may have been somebody's before
        if (log.parent / "server").is_dir():
            log.unlink(missing_ok=True)


def servers(work: Path) -> list[int]:
    """The process ids of the servers that run for a folder.

    Args:
        work: Folder for everything that Bazel keeps.
    """
    found = [_server(file) for file in (work / "root").glob("*/server/server.pid.txt")]
    return [number for number in found if number is not None]


def processor_s(work: Path) -> float:
    """How many seconds of processor time Bazel, and all that it runs for a folder, have used.

    Args:
        work: Folder for everything that Bazel keeps.

    Returns:
        The sum for what runs now. Bazel is told by the folder on its command line, since a pid file
        from a container speaks of other numbers.
    """
    root = os.fsencode(work / "root")
    table = _processes()
    found = {
        process.number
        for process in table
        if process.number != os.getpid() and any(root in word for word in _words(process.number))
    }
    while more := {process.number for process in table if process.parent in found} - found:
        found |= more
    ticks = sum(process.ticks for process in table if process.number in found)
    return ticks / os.sysconf("SC_CLK_TCK")


def _server(file: Path) -> int | None:
    """The running server that a pid file speaks of, if its command line names its folder."""
    base = os.fsencode(file.parent.parent)
    try:
        number = int(file.read_text().strip())
    except (OSError, ValueError):
        return None
    return number if any(base in word for word in _words(number)) else None


def _clients(root: Path) -> list[int]:
    """Bazelisk and Bazel's client, told by the folder that they were given."""
    option = os.fsencode(f"--output_user_root={root}")
    return [
        process.number
        for process in _processes()
        if process.number != os.getpid() and option in _words(process.number)[1:8]
    ]


def _actions(file: Path, server: int | None) -> set[int]:
    """What a server runs, or ran: its session, and everything below.

    A process id may have been given anew after the server's end, so that a member of the session
    of a server that is gone counts only if it works in the server's folder.
    """
    try:
        session = int(file.read_text().strip())
    except (OSError, ValueError):
        return set()
    base = os.fsencode(file.parent.parent)
    table = _processes()
    found = {
        process.number
        for process in table
        if process.session == session
        and process.number != session
        and (server is not None or _folder(process.number).startswith(base))
    }
    if server is not None:
        found.add(server)
    while more := {process.number for process in table if process.parent in found} - found:
        found |= more
    return found - {server, os.getpid()}


def _processes() -> list[_Process]:
    """All processes of this machine, as ``/proc/<pid>/stat`` has them."""
    table = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            stat = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # the name of the program is in parentheses, and may hold anything
        fields = stat.rpartition(")")[2].split()
        # its own, and those of the children that it has seen end
        ticks = sum(map(int, fields[11:15]))
        table.append(_Process(int(entry.name), int(fields[1]), int(fields[3]), ticks))
    return table


def _words(number: int) -> list[bytes]:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _folder(number: int) -> bytes:
    try:
        return os.fsencode(Path(f"/proc/{number}/cwd").readlink())
    except OSError:
        return b""


def _kill(number: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(number, how)


@contextlib.contextmanager
def guarded(work: Path, doomed: Path, last: Sequence[str] = ()) -> Iterator[None]:
    """Have a guard end what this process would leave if it were killed.

    Args:
        work: Folder for everything that Bazel keeps; this process holds its lock.
        doomed: A file that must not stay: the build events, which hold the environment.
        last: The words of one more command that the guard runs, such as the removal of a container.

    Yields:
        Nothing.
    """
    reader, writer = os.pipe()
    package = Path(tpuforge.__file__).resolve().parents[1]
    words = [sys.executable, "-m", __name__, str(work), str(doomed), *last]

    def watch() -> None:
        # without a guard there are still the next run and the server's own patience
        with contextlib.suppress(ForgeError, OSError):
            env = clean_env(PYTHONPATH=str(package))
            run(words, timeout=threading.TIMEOUT_MAX, env=env, stdin=reader, check=False)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        with undisturbed():
            os.write(writer, _IN_ORDER)
            os.close(writer)
            thread.join(_GUARD_START_S)
            os.close(reader)


def _locked(lock: IO[str]) -> bool:
    """Take the lock of a run that was killed, unless the next run has it, which does all this.

    The kernel lets go of what a killed process held piece by piece, so the lock may come a little
    after the word of its end.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        else:
            return True


def main(argv: Sequence[str] | None = None) -> int:
    """Be the guard: wait for the end of the run, and clean up if it was killed.

    Args:
        argv: The folder, the file that must not stay, and the words of one more command.

    Returns:
        The exit code.
    """
    work, doomed, *last = sys.argv[1:] if argv is None else argv
    if sys.stdin.buffer.read():
        return 0
    with Path(work, LOCK).open("a", encoding="utf-8") as lock:
        if _locked(lock):
            Path(doomed).unlink(missing_ok=True)
            if last:
                with contextlib.suppress(ForgeError):
                    run(last, timeout=_LAST_S, check=False)
            end_all(Path(work))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
