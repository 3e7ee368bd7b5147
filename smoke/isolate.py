"""Run one function in a process of its own: time limit, peak memory, nothing left behind.

Whatever touches a device or a plugin runs here, because both end the whole process when they are
unhappy (SIGABRT, SIGSEGV). The function is named, not pickled; arguments and result travel as
JSON. The child gets its own session and its own temporary folder, and dies with its parent.

Run as a script this module is the child's side.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PARENT = Path(__file__).resolve().parent.parent
_GRACE_S = 2.0
_TAIL_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ended:
    """A child that ended, one way or another.

    Attributes:
        value: What the function returned (JSON types), or None.
        error: Why there is no value: the exception, the signal or the time limit; None if fine.
        kind: Name of the exception's class, ``signal``, ``killed`` (by somebody else: that says
            nothing about what ran), ``timeout`` or ``exit``; None if fine.
        seconds: Wall time of the whole process, interpreter start included.
        peak_memory_bytes: Largest resident set of the child or of a process it waited for.
        output: The end of its standard output and standard error.
    """

    value: Any
    error: str | None
    kind: str | None
    seconds: float
    peak_memory_bytes: int
    output: str

    @property
    def story(self) -> str:
        """Why there is no value, with the last lines of the output unless an exception says all."""
        last = self.output.strip().splitlines()[-8:]
        if self.kind in ("signal", "exit", "timeout") and last:
            return "\n".join([str(self.error), *last])
        return str(self.error)


def run(
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float,
    env: Mapping[str, str | None] | None = None,
    interpreter: tuple[str, ...] = (),
    stop: threading.Event | None = None,
) -> Ended:
    """Call a module-level function in a fresh interpreter.

    Args:
        function: A function of a module in this package; it imports what it needs when called.
        *arguments: JSON values.
        timeout: Seconds after which the child's whole process group is ended.
        env: Variables to set (a text) or to remove (None); the rest is inherited.
        interpreter: More options for Python, such as ``-X importtime``.
        stop: Ends the child before its time when it is set, as if it were too late.

    Returns:
        How it ended; this function raises nothing for a child that fails.

    Raises:
        OSError: If no process or temporary folder can be made at all.
    """
    folder = Path(tempfile.mkdtemp(prefix="tpuforge-"))
    reply_read, reply_write = os.pipe()
    child: subprocess.Popen[bytes] | None = None
    log = folder.with_name(f"{folder.name}.log")
    started = time.monotonic()
    try:
        variables = {**os.environ, "TMPDIR": str(folder), **(env or {})}
        request = {
            "function": f"{function.__module__}:{function.__qualname__}",
            "arguments": arguments,
            "reply": reply_write,
            "parent": os.getpid(),
        }
        with log.open("wb") as sink:
            child = subprocess.Popen(
                [sys.executable, "-P", *interpreter, __file__, json.dumps(request)],
                env={name: value for name, value in variables.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                pass_fds=(reply_write,),
                start_new_session=True,
            )
        os.close(reply_write)
        reply_write = -1
        code, peak, reply = _await(child, reply_read, started + timeout, stop)
        seconds = time.monotonic() - started
        output = end_of(log)
        value, error, kind = _outcome(code, reply, timeout, output)
        return Ended(value, error, kind, seconds, peak, output)
    finally:
        if child is not None:
            _end_group(child.pid)
            if child.returncode is None:
                child.wait()
        os.close(reply_read)
        if reply_write >= 0:
            os.close(reply_write)
        log.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _await(
    child: subprocess.Popen[bytes],
    reply_read: int,
    deadline: float,
    stop: threading.Event | None,
) -> tuple[int | None, int, bytes]:
    """Wait for the end, reading the reply meanwhile: exit code (None: too late), peak, reply."""
    os.set_blocking(reply_read, False)
    reply = b""
    while True:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(reply_read, 1 << 16):
                reply += chunk
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(BlockingIOError):
                while chunk := os.read(reply_read, 1 << 16):
                    reply += chunk
            return child.returncode, usage.ru_maxrss * 1024, reply
        if time.monotonic() > deadline or (stop is not None and stop.is_set()):
            _end_group(child.pid)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            return None, usage.ru_maxrss * 1024, reply
        time.sleep(0.01)


def _outcome(
    code: int | None, reply: bytes, timeout: float, output: str
) -> tuple[Any, str | None, str | None]:
    if code is None:
        return None, f"not done after {timeout:.0f} s; ended", "timeout"
    try:
        answer = json.loads(reply)
    except ValueError:
        answer = {}
    if code < 0:
        kind, words = obituary(code, output)
        return None, words, kind
    if "error" in answer:
        return None, answer["error"], answer["kind"]
    if code != 0 or "value" not in answer:
        return None, f"the process ended with exit code {code} and no result", "exit"
    return answer["value"], None, None


_STACK = (
    "@",
    "#",
    "File ",
    "***",
    "<",
    "Extension modules",
    "Current thread",
    "Thread 0x",
    "Fatal P",
)
"""How the lines begin that a crashing process writes about its stack."""


def obituary(code: int, output: str) -> tuple[str, str]:
    """How a process ended that was not meant to.

    Args:
        code: Its exit code; negative for a signal.
        output: The end of what it wrote; the last line that belongs to no stack is quoted.

    Returns:
        Kind (``killed``, ``signal`` or ``exit``) and words.
    """
    if code == -signal.SIGKILL:
        words = "the process was killed from outside; a memory limit does that, or a person"
        return "killed", words
    lines = (line.strip() for line in reversed(output.splitlines()))
    last = next((line[:400] for line in lines if line and not line.startswith(_STACK)), "")
    hint = f": {last}" if last else ""
    if code < 0:
        return "signal", f"the process was ended by {_signal_name(-code)}{hint}"
    return "exit", f"the process ended with exit code {code}{hint}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end_group(pid: int) -> None:
    """End a session that a child leads: TERM, a grace period, KILL."""
    for number, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, 0.0)):
        try:
            os.killpg(pid, number)
        except (ProcessLookupError, PermissionError):
            return
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and not _all_ended(pid):
            time.sleep(0.02)


def _all_ended(pid: int) -> bool:
    """Whether the leader of a session has ended, or, once it was waited for, the whole session."""
    try:
        # WNOWAIT leaves the status for the one who reads the child's memory figures
        return bool(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    except ChildProcessError:
        try:
            os.killpg(pid, 0)
        except (ProcessLookupError, PermissionError):
            return True
        return False


def end_of(log: Path) -> str:
    """The end of what a process wrote.

    Args:
        log: The file that it wrote to.
    """
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        return file.read().decode("utf-8", "replace")


def settle(parent: int) -> bool:
    """In a child: die with the parent, and write the stack of a crash.

    Args:
        parent: Its process number.

    Returns:
        Whether the parent still lives.
    """
    if hasattr(ctypes.CDLL(None), "prctl"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    faulthandler.enable()
    return os.getppid() == parent


def _child(request: dict[str, Any]) -> int:
    """The child's side: call the function, send the reply, leave without clean-up."""
    if not settle(request["parent"]):
        return 1
    sys.path.insert(0, str(_PARENT))
    module, _, name = request["function"].partition(":")
    answer: dict[str, Any]
    try:
        function = getattr(importlib.import_module(module), name)
        answer = {"value": function(*request["arguments"])}
        data = json.dumps(answer)
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}", "kind": type(error).__name__}
        data = json.dumps(answer)
    with os.fdopen(request["reply"], "w", encoding="utf-8") as reply:
        reply.write(data)
    sys.stdout.flush()
    sys.stderr.flush()
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(_child(json.loads(sys.argv[1])))
