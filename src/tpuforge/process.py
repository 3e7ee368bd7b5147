"""Subprocesses: a scrubbed environment, a time limit, and nothing left behind.

Every child gets its own process group. When it overruns its limit, or this process is told to
stop, the whole group is ended: TERM first, KILL after a grace period.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import functools
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from tpuforge.errors import Exit, ForgeError

_KEPT = (
    # where programs and the user are; the user's name for tools that refuse to run without one
    "HOME",
    "PATH",
    "USER",
    "LOGNAME",
    "TMPDIR",
    # the machine's certificate bundle and proxies: how to reach a source, never what it holds
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
# schemes and names are short: without a bound, one long line of a linker would take minutes
_URL = re.compile(r"[a-z][a-z0-9+.-]{0,30}://[^\s'\"<>]+", re.IGNORECASE)
# a password may hold @, and a careless one a slash; host:8080/path@v1 and name@sha256: have none
_USERINFO = re.compile(r"(?<=://)(?:[^/\s]*@|[^/\s:@]+:(?!\d+(?:/|$))\S*@)(?!sha256:)")
_QUERY = re.compile(r"(?<=[?&])([\w.~%-]+=)[^&#]+")
_SECRET = re.compile(
    r"(?P<name>(?:authorization|password|passwd|token|secret|api[-_]?key)\S{0,99}?\s*[=:]\s*)"
    r"(?:(?:bearer|basic)\s+)?\S+",
    re.IGNORECASE,
)
# what is held of one line before it is handed on in pieces, and of it what may be half a secret
_LINE = 1 << 16
_TAIL = 1 << 10
_MOST_OUTPUT = 1 << 26
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
_SHORTEST = 6
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 10.0
"""Seconds between TERM and KILL for a process group."""


def clean_env(**extra: str) -> dict[str, str]:
    """The environment of every child: fixed locale and zone, no PIP_*, UV_*, DOCKER_*, BAZEL*.

    Args:
        **extra: Variables to add, on purpose and by name.

    Returns:
        A fresh dictionary.
    """
    env = {name: os.environ[name] for name in _KEPT if name in os.environ}
    env |= {
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "UV_NO_CONFIG": "1",
    }
    env.setdefault("PATH", os.defpath)
    return env | extra


def redact(text: str) -> str:
    """A text without credentials: user names, passwords and queries in URLs, tokens, passwords.

    Args:
        text: Anything about to be shown or written.
    """
    for password in _passwords(tuple(os.environ.get(name, "") for name in _PROXIES)):
        text = text.replace(password, "***")
    return _SECRET.sub(r"\g<name>***", _URL.sub(_redact_url, text))


@functools.cache
def _passwords(proxies: tuple[str, ...]) -> tuple[str, ...]:
    """The passwords of the user's own proxies, which a program may print without their address."""
    found = set()
    for proxy in proxies:
        user = (proxy.partition("://")[2] or proxy).rpartition("@")[0]
        password = user.partition(":")[2]
        found |= {password, urllib.parse.unquote(password)}
    # a shorter one would blot half of every text
    return tuple(sorted((one for one in found if len(one) >= _SHORTEST), key=len, reverse=True))


def _redact_url(found: re.Match[str]) -> str:
    return _QUERY.sub(r"\1***", _USERINFO.sub("***@", found[0], count=1))


@dataclass(frozen=True)
class Completed:
    """A child that ended.

    Attributes:
        argv: What was run.
        code: Its exit code (negative: the signal that ended it).
        output: Standard output and standard error, interleaved, redacted; of more than 64 MB the
            end alone, under a line that says so.
        seconds: Wall time.
    """

    argv: tuple[str, ...]
    code: int
    output: str
    seconds: float

    @property
    def tail(self) -> str:
        """The last 15 lines of the output."""
        return "\n".join(self.output.rstrip().splitlines()[-15:])


def run(
    argv: Sequence[str | Path],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int | None = None,
    check: bool = True,
    on_line: Callable[[str], None] | None = None,
    log: Path | None = None,
    doing: str = "",
    mend: str = "",
    stop: threading.Event | None = None,
) -> Completed:
    """Run a child to its end.

    Args:
        argv: The program and its arguments; no shell is involved.
        timeout: Seconds after which the child's process group is ended.
        env: The whole environment; :func:`clean_env` if not given.
        cwd: The child's folder.
        stdin: A file descriptor for the child's standard input; empty if not given.
        check: Raise when the exit code is not 0.
        on_line: Called with every (redacted) line of output as it comes; a line of more than 64 kB
            comes in pieces.
        log: A file that gets the whole (redacted) output, as far as the disk has room for it.
        doing: What this child is for, used in errors ("resolving runtime for 3.11").
        mend: What to try when it fails, used in errors.
        stop: Ends the child when it is set: for a thread that cannot be interrupted itself.

    Returns:
        The ended child.

    Raises:
        ForgeError: If the program is missing, overran its limit, was stopped, or failed (with
            ``check``).
    """
    words = tuple(str(word) for word in argv)
    what = doing or Path(words[0]).name
    started = time.monotonic()
    output = _Output()
    late, code = False, None
    with contextlib.ExitStack() as stack:
        sink = log.open("w", encoding="utf-8") if log is not None else None
        if sink is not None:
            stack.callback(_close, sink)
        # a signal in the midst of this would leave a child that nobody knows
        with undisturbed():
            child = _start(words, what, mend, env=env, cwd=cwd, stdin=stdin)
            stack.callback(_end, child)

        def take(piece: str, ended: bool) -> None:
            line = redact(piece)
            text = line + "\n" if ended else line
            output.add(text)
            if sink is not None:
                # the child's own end says more than a log that a full disk did not take
                with contextlib.suppress(OSError):
                    sink.write(text)
            if on_line is not None:
                on_line(line)

        try:
            late = not _drain(child, started + timeout, take, stop)
            code = child.wait(timeout=GRACE_S) if not late else None
        except subprocess.TimeoutExpired:
            late = True
    done = Completed(words, child.returncode, output.text(), time.monotonic() - started)
    if late and stop is not None and stop.is_set():
        raise ForgeError(f"{what}: stopped", exit_code=Exit.INTERRUPTED)
    if late or code is None:
        raise ForgeError(
            f"{what}: not done after {timeout:.0f} s; ended\n{done.tail}".rstrip(),
            expected=f"an end within {timeout:.0f} s",
            mend=mend or f"try by hand: {redact(shlex.join(words))}",
        )
    if check and code != 0:
        raise ForgeError(
            f"{what}: exit code {code}\n{done.tail}".rstrip(),
            expected="exit code 0",
            mend=mend or f"try by hand: {redact(shlex.join(words))}",
            exit_code=Exit.CANNOT,
        )
    return done


def _start(
    words: Sequence[str],
    what: str,
    mend: str,
    *,
    env: Mapping[str, str] | None,
    cwd: Path | None,
    stdin: int | None,
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            words,
            env=dict(env) if env is not None else clean_env(),
            cwd=cwd,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        if cwd is not None and not cwd.is_dir():
            raise ForgeError(
                f"{what}: the folder {cwd} is not there",
                expected="nobody who removes it meanwhile",
                mend="run the same command again",
            ) from error
        raise ForgeError(
            f"{what}: the program {words[0]} is not there",
            expected=f"{Path(words[0]).name} on PATH",
            mend=mend or f"install {Path(words[0]).name}",
        ) from error


def _end(child: subprocess.Popen[bytes]) -> None:
    with undisturbed():
        end_group(child)
    if child.stdout is not None:
        child.stdout.close()


def _close(sink: IO[str]) -> None:
    with contextlib.suppress(OSError):
        sink.close()


def heed_signals() -> None:
    """Let in the signals that ``./forge`` holds back from its first line on.

    One that came meanwhile takes effect here, so handlers and whatever catches have to be there.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let no signal break off what must be done whole, such as the cleaning up after a Ctrl-C.

    INT, TERM and HUP that come meanwhile take effect afterwards, unless a run is ending on account
    of an earlier one anyway. In a thread that is not the main one, where no signal arrives, this
    does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reason = sys.exc_info()[1]
    ending = reason is not None and not isinstance(reason, Exception)
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        came.append(number)

    # a handler, and not SIG_IGN: that one would be handed on to children
    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was set by something that is not Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if came and not ending:
        signal.raise_signal(came[0])


class _Output:
    """What a child said: all of it, or the end of a lot."""

    def __init__(self) -> None:
        self._pieces: collections.deque[str] = collections.deque()
        self._size = 0
        self._dropped = 0

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self._size += len(text)
        while self._size > _MOST_OUTPUT:
            gone = len(self._pieces.popleft())
            self._size -= gone
            self._dropped += gone

    def text(self) -> str:
        said = "".join(self._pieces).removesuffix("\n")
        if not self._dropped:
            return said
        return f"({self._dropped:,} characters before this are not kept)\n{said}"


def _cut(line: str) -> int:
    """Where a long line is cut in two, so that redaction still sees each secret whole."""
    at = _LINE - _TAIL
    spans = [found.span() for pattern in (_URL, _SECRET) for found in pattern.finditer(line)]
    for start, end in sorted(spans, reverse=True):
        if start < at < end:
            at = start
    return at or _LINE


def _drain(
    child: subprocess.Popen[bytes],
    deadline: float,
    take: Callable[[str, bool], None],
    stop: threading.Event | None = None,
) -> bool:
    """Hand a child's output on, in lines; False when the deadline or the stop came first.

    A piece of a line is handed on with False, the end of a line with True.
    """
    assert child.stdout is not None  # noqa: S101 - Popen was given a pipe
    handle = child.stdout.fileno()
    os.set_blocking(handle, False)
    # a character may come in two chunks
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest, begun = "", False
    with selectors.DefaultSelector() as selector:
        selector.register(handle, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or (stop is not None and stop.is_set()):
                return False
            # a grandchild may hold the pipe open after the child has ended
            ready = selector.select(min(left, 0.5))
            if not ready:
                if child.poll() is not None:
                    break
                continue
            chunk = os.read(handle, 1 << 16)
            if not chunk:
                break
            *full, rest = (rest + decoder.decode(chunk).replace("\r", "\n")).split("\n")
            for line in full:
                take(line, True)
                begun = False
            while len(rest) > _LINE:
                at = _cut(rest)
                take(rest[:at], False)
                rest, begun = rest[at:], True
    rest += decoder.decode(b"", final=True)
    if rest or begun:
        take(rest, True)
    while child.poll() is None:
        if time.monotonic() > deadline or (stop is not None and stop.is_set()):
            return False
        time.sleep(0.01)
    return True


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End a child and everything in its process group: TERM, then KILL after a grace period.

    Args:
        child: A child started with ``start_new_session=True``, running or ended.
    """
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        try:
            os.killpg(child.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and _group_alive(child):
            time.sleep(0.02)
        if not _group_alive(child):
            break
    if child.poll() is None:
        child.wait(timeout=GRACE_S)


def _group_alive(child: subprocess.Popen[bytes]) -> bool:
    child.poll()
    try:
        os.killpg(child.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
