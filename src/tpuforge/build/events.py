"""Bazel's build events: how far a build is, what it made, and why it failed.

The JSON form of the build event protocol is one event a line. It states where each output is and
its digest, so nothing has to be guessed from ``bazel-bin``, where older outputs stay; and it names
the action that failed, with the file that holds its standard error. Only progress, and what older
Bazels leave out of the protocol, is read from Bazel's lines on standard error.

The file of events also holds the whole environment and command line of the build: it belongs in a
folder of its own that is removed, and nothing but the fields named here is taken from it.

Read off real runs of Bazel 2.1.0 and 7.7.1. In 7.7.1 ``action.exitCode`` is Bazel's own code for
the kind of failure; the exit code of the action itself is ``failureDetail.spawn.spawnExitCode``.
2.1.0 has neither, and says it on standard error only.
"""

from __future__ import annotations

import base64
import binascii
import collections
import json
import os
import re
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuforge.build.checkout import TARGET
from tpuforge.console import size
from tpuforge.process import redact

TAIL_LINES = 40
"""How much of a failing action's standard error is shown."""

_TAIL_BYTES = 64 * 1024
_LINE_CHARS = 400
_RECENT_LINES = 16
_POLL_S = 0.25
# Bazel may wait for ever on a full disk (2.1.0 does, when it cannot write its own log), and not
# always has it said so: what it wanted to say may be what found no room
_FULL_S = 20.0
# what still counts as a full disk: Bazel writes in pieces, and the last one seldom fits
_NO_ROOM = 1 << 20
# an idle server of Bazel uses far less of a processor in that time, a compiler far more
_BUSY_S = 1.0

# the exit codes of Bazel that tell more than "failed"
_USAGE = 2
_INTERRUPTED = 8
_LOCKED = 9
_OUT_OF_HEAP = 33
_REMOTE = (32, 34, 38, 39, 45)
_MACHINE = 36
_CRASHED = 37
_KILLED = 137
# how Bazel's own lines name the signal that ended an action
_SIGNALS = {"Killed": 137, "Aborted": 134, "Segmentation fault": 139, "Terminated": 143}

_ENDED = re.compile(r" failed:? \((?:Exit (\d+)|([A-Z][a-z]+(?: [a-z]+)?))\)")
_STEP = re.compile(r"^\[([\d,]+) / ([\d,]+)\] ?(.*)$")
_RUNNING = re.compile(r"\s*(?:\.\.\. )?\((?:\d+ actions, )?(\d+)(?: actions?)? running\)$")
_SECONDS = re.compile(r"; \d+s [\w, -]+$")
_WAITED = re.compile(r"; \d+s\b")
_PHASE = re.compile(r"^(Loading|Analyzing): (.*)$")
_COUNTS = re.compile(r"(\d+ packages? loaded(?:, \d+ targets? configured)?)")
_FETCHING = re.compile(r"^\s+Fetching (.+)$")

_MEMORY = re.compile(
    r"Killed signal terminated program|unable to execute command: Killed|std::bad_alloc"
    r"|virtual memory exhausted|out of memory|ld terminated with signal 9|Cannot allocate memory"
    r"|java\.lang\.OutOfMemoryError",
    re.IGNORECASE,
)
_DISK = re.compile(
    r"No space left on device|Disk quota exceeded|\bENOSPC\b"
    r"|I/O error while writing action log"  # what Bazel says where an action's output finds no room
)
_CREDENTIALS = re.compile(
    r"Failed to init auth credentials|Application Default Credentials|UNAUTHENTICATED"
    r"|PERMISSION_DENIED|\b401 Unauthorized|\b403 Forbidden"
)
_FETCH = re.compile(
    r"during the fetch of repository|which failed to fetch|Error downloading \["
    r"|Failed to fetch registry file|GET returned \d{3}"
)
_REPOSITORY = re.compile(r"fetch of repository '(?:@@)?([^']+)'")
_WHY_FETCH = re.compile(r"(?:IOException|Exception|Error accessing registry [^:]*:[^:]*): (.+)$")
_CONFIG = re.compile(r"Config value '?([\w.:/-]+?)'? is not defined")
_WHEEL_FLAG = re.compile(r"wheel_common|wheel_build|wheel_base")
_UNREACHABLE = re.compile(r"\bUNAVAILABLE\b|\bDEADLINE_EXCEEDED\b|Failed to query remote execution")
_NO_BAZEL = re.compile(
    r"could not (?:download|start|run|resolve|determine|get|install|find)[^\n]*"
    r"|unable to find Bazel",
    re.IGNORECASE,
)
_CACHE_TROUBLE = re.compile(
    r"^WARNING: (?:Reading from |Writing to )?Remote Cache:[ \t]*(?:\d+ errors[^\n]*)?\n?"
    r"(?:com\.google[\w.]+: )?([^\n]+)$",
    re.MULTILINE,
)
_SERVER_DIED = re.compile(r"Server (?:terminated abruptly|crashed)[^\n]*")


@dataclass(frozen=True)
class Actions:
    """How many actions a build took.

    Attributes:
        total: Actions that were done, whoever did them.
        cached: Those whose result came from the disk cache or a remote cache.
        remote: Those that a remote executor ran.
    """

    total: int = 0
    cached: int = 0
    remote: int = 0

    @property
    def text(self) -> str:
        """For people: ``5,310 actions: 3,206 from caches, 12 on the remote``."""
        parts = [f"{self.cached:,} from caches"]
        if self.remote:
            parts.append(f"{self.remote:,} on the remote")
        return f"{self.total:,} actions: {', '.join(parts)}"


@dataclass(frozen=True)
class Failure:
    """The first action that failed.

    Attributes:
        label: The target that it belongs to.
        mnemonic: What kind of action it is, such as ``CppCompile``.
        exit_code: Its own exit code, 128 + N for signal N; None where Bazel did not say.
        stderr: The end of its own output, at most 40 lines, without credentials.
    """

    label: str
    mnemonic: str
    exit_code: int | None
    stderr: str


@dataclass
class Built:
    """What Bazel's build events say.

    Attributes:
        finished: Whether Bazel got as far as a result.
        wheels: Every ``.whl`` among the outputs of the target, with the digest Bazel states.
        begun: Whether there are events at all; without them there was no Bazel.
        exit_name: The name of Bazel's exit code, such as ``BUILD_FAILURE``.
        detail: The kind of failure and its code, such as ``spawn`` and ``NON_ZERO_EXIT``; empty
            where the Bazel is too old to say.
        message: Bazel's own words for the failure, without credentials.
        failure: The action that failed.
        failed: How many actions failed.
        actions: How many there were.
    """

    finished: bool
    wheels: tuple[tuple[str, str | None], ...] = ()
    begun: bool = False
    exit_name: str = ""
    detail: tuple[str, str] = ("", "")
    message: str = ""
    failure: Failure | None = None
    failed: int = 0
    actions: Actions = Actions()


@dataclass(frozen=True)
class Cause:
    """Why a build most likely failed.

    Attributes:
        kind: One word for machines: ``memory``, ``disk``, ``credentials``, ``remote``, ``fetch``,
            ``config``, ``line``, ``flag``, ``source``, ``action``, ``time``, ``interrupted``,
            ``lock``, ``machine``, ``server``, ``bazel`` or ``unknown``.
        found: One sentence.
        remedy: What to do about it.
        about_source: Whether it speaks of what was built, and not of this machine, the network or
            the remote.
    """

    kind: str
    found: str
    remedy: str
    about_source: bool = False


def read_events(path: Path) -> Built:
    """Read the file of build events of a build that ended.

    Args:
        path: The file that ``--build_event_json_file`` named.

    Returns:
        What it says; nothing where there is no such file. A last line that was cut off is left
        out. The files of failing actions' output are read too, so call it before Bazel's folders
        change again.
    """
    reading = _Reading()
    for event in _events(path):
        reading.take(event)
    reading.built.wheels = reading.wheels()
    return reading.built


class _Reading:
    """What was gathered from the events so far."""

    def __init__(self) -> None:
        self.built = Built(False)
        self.sets: dict[str, dict[str, Any]] = {}
        self.roots: list[str] = []

    def take(self, event: dict[str, Any]) -> None:
        name, built = event.get("id", {}), self.built
        built.begun = True
        if "namedSet" in name:
            self.sets[name["namedSet"]["id"]] = event.get("namedSetOfFiles", {})
        elif name.get("targetCompleted", {}).get("label", "").removeprefix("@@") == TARGET:
            for group in event.get("completed", {}).get("outputGroup", []):
                if group.get("name") == "default":
                    self.roots += [entry["id"] for entry in group.get("fileSets", [])]
        elif "actionCompleted" in name:
            self._action(name["actionCompleted"], event.get("action", {}))
        elif "finished" in event:
            built.finished = True
            built.exit_name = event["finished"].get("exitCode", {}).get("name", "")
            self._detail(event["finished"].get("failureDetail", {}))
        elif "buildMetrics" in event:
            self._metrics(event["buildMetrics"].get("actionSummary", {}))
        elif "buildToolLogs" in event:
            self._tool_logs(event["buildToolLogs"].get("log", []))
        # the reason that is most to the point comes first, and is the only one with words
        if not built.message:
            built.message = redact(event.get("aborted", {}).get("description", ""))

    def _action(self, name: dict[str, Any], action: dict[str, Any]) -> None:
        if action.get("success"):
            return
        self.built.failed += 1
        if self.built.failure is None:
            spawn = action.get("failureDetail", {}).get("spawn", {})
            self.built.failure = Failure(
                label=name.get("label", "").removeprefix("@@") or name.get("primaryOutput", ""),
                mnemonic=action.get("type", ""),
                exit_code=spawn.get("spawnExitCode"),
                stderr=_said(action),
            )

    def _detail(self, detail: dict[str, Any]) -> None:
        for category, value in detail.items():
            if isinstance(value, dict):
                self.built.detail = (category, value.get("code", ""))
        self.built.message = redact(detail.get("message", "")) or self.built.message

    def _metrics(self, summary: dict[str, Any]) -> None:
        counts = {
            one.get("name", ""): one.get("count", 0) for one in summary.get("runnerCount", [])
        }
        self._count(int(summary.get("actionsExecuted", 0)), counts)

    def _tool_logs(self, logs: list[dict[str, Any]]) -> None:
        """The counts of a Bazel that does not have them in its metrics: ``3 remote cache hit``."""
        for log in logs:
            if log.get("name") == "process stats":
                words = _decode(log.get("contents", "")).rpartition(":")[2]
                pairs = [part.strip(" .\n").partition(" ") for part in words.split(",")]
                counts = {kind: int(count) for count, _, kind in pairs if count.isdigit()}
                self._count(self.built.actions.total, counts)

    def _count(self, total: int, counts: dict[str, int]) -> None:
        known = self.built.actions
        cached = sum(count for kind, count in counts.items() if kind.endswith("cache hit"))
        remote = known.remote or counts.get("remote", 0)
        self.built.actions = Actions(total, known.cached or cached, remote)

    def wheels(self) -> tuple[tuple[str, str | None], ...]:
        """Every wheel among the outputs of the target, with its digest if there is one."""
        wheels: dict[str, str | None] = {}
        seen: set[str] = set()
        roots = list(self.roots)
        while roots:
            key = roots.pop()
            if key in seen:
                continue
            seen.add(key)
            members = self.sets.get(key, {})
            roots += [entry["id"] for entry in members.get("fileSets", [])]
            for file in members.get("files", []):
                if file.get("name", "").endswith(".whl"):
                    wheels[file.get("uri", "")] = file.get("digest")
        return tuple(sorted(wheels.items()))


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole event of a file, one line at a time: a real build's file is long."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event


def _decode(text: str) -> str:
    try:
        return base64.b64decode(text).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return ""


def _said(action: dict[str, Any]) -> str:
    """The end of what a failing action wrote, its standard error first of all."""
    for stream in ("stderr", "stdout"):
        text = _content(action.get(stream, {}))
        if text.strip():
            return _tail(text)
    return ""


def _content(file: dict[str, Any]) -> str:
    if "contents" in file:
        return _decode(file["contents"])
    parts = urllib.parse.urlsplit(file.get("uri", ""))
    if parts.scheme != "file":
        return ""
    path = Path(urllib.request.url2pathname(parts.path))
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _tail(text: str) -> str:
    lines = [line.rstrip()[:_LINE_CHARS] for line in redact(text).rstrip().splitlines()]
    return "\n".join(lines[-TAIL_LINES:])


def explain(built: Built, output: str, code: int) -> Cause:
    """Why a build failed, from the codes that Bazel gives, and from its words where it gives none.

    Args:
        built: What the build events say.
        output: What Bazelisk and Bazel wrote.
        code: The exit code of Bazelisk.

    Returns:
        The likely cause and its remedy.
    """
    failure = _with_exit_code(built, output)
    errors = errors_of(output)
    # what speaks of this failure: the action's own words, or else Bazel's
    said = failure.stderr if failure is not None and failure.stderr else ""
    words = "\n".join([said, errors, built.message])
    for judge in (_of_machine, _of_network, _of_line, _of_source):
        cause = judge(built, failure, words, output, code)
        if cause is not None:
            return cause
    last = errors.splitlines()
    found = f"Bazel ended with exit code {code}" + (f": {last[-1]}" if last else "")
    return Cause("unknown", found, "read the log", about_source=built.finished and code in (1, 3))


def errors_of(output: str) -> str:
    """The lines of Bazel's output that say what went wrong, each once, at most 40.

    Args:
        output: What Bazelisk and Bazel wrote.
    """
    kept: list[str] = []
    for line in output.splitlines():
        bad = line.startswith(("ERROR: ", "FATAL: ", "Error in ", "Error: "))
        if (bad or _NO_BAZEL.search(line)) and line not in kept:
            kept.append(line[:_LINE_CHARS])
    return "\n".join(kept[-TAIL_LINES:])


def describe(built: Built, cause: Cause, output: str = "") -> str:
    """A failed build for people: what failed, its own words, the likely cause.

    Args:
        built: What the build events say.
        cause: What :func:`explain` made of it.
        output: What Bazelisk and Bazel wrote, for a failure that is not an action's.

    Returns:
        A few lines, never more than some fifty.
    """
    failure = _with_exit_code(built, output)
    if failure is None:
        said = errors_of(output)
        return f"{cause.found}\n{said}".rstrip() if said else cause.found
    facts = [fact for fact in (failure.mnemonic, _ending(failure.exit_code)) if fact]
    more = f"; {built.failed - 1} more failed" if built.failed > 1 else ""
    head = f"{failure.label} failed" + (f" ({', '.join(facts)}{more})" if facts else more)
    # Bazel's words tell why an action was not run; of one that was they only repeat its line
    ran = built.detail[0] in ("", "spawn") and built.detail[1] in ("", "NON_ZERO_EXIT", "TIMEOUT")
    said = failure.stderr or ("" if ran else _tail(built.message)) or "(it wrote nothing)"
    return f"{head}\n{said}\nlikely cause: {cause.found}"


def cache_trouble(output: str) -> str:
    """Why a remote cache was of no use to a build that may have ended well without it.

    Bazel only warns, and builds everything here: a wrong password makes hours out of minutes.

    Args:
        output: What Bazel wrote.

    Returns:
        The first complaint, such as ``401 Unauthorized``; empty if there was none.
    """
    found = _CACHE_TROUBLE.search(output)
    return redact(found[1].strip())[:_LINE_CHARS] if found else ""


def _ending(code: int | None) -> str:
    if code is None:
        return ""
    return f"ended by signal {code - 128}" if code > 128 else f"exit code {code}"


def _with_exit_code(built: Built, output: str) -> Failure | None:
    """The failure with the exit code that an old Bazel only wrote down in its lines."""
    failure = built.failure
    if failure is None or failure.exit_code is not None or built.detail != ("", ""):
        return failure
    lines = [line for line in output.splitlines() if line.startswith("ERROR: ")]
    endings = [(line, found) for line in lines if (found := _ENDED.search(line)) is not None]
    own = [found for line, found in endings if f"{failure.label} " in line]
    if not own and built.failed == 1:
        own = [found for _, found in endings]
    if not own:
        return failure
    number, signal_name = own[0].groups()
    code = int(number) if number else _SIGNALS.get(signal_name)
    return Failure(failure.label, failure.mnemonic, code, failure.stderr)


def _of_machine(
    built: Built, failure: Failure | None, words: str, output: str, code: int
) -> Cause | None:
    """Causes that lie in this machine or in who runs it."""
    category, name = built.detail
    if code == _INTERRUPTED or category == "interrupted":
        return Cause("interrupted", "the build was interrupted", "run the same command again")
    killed = failure is not None and failure.exit_code == _KILLED
    starved = (category, name) in (("spawn", "OUT_OF_MEMORY"), ("crash", "CRASH_OOM"))
    if killed or starved or code == _OUT_OF_HEAP or _MEMORY.search(words):
        who = "Bazel itself" if code == _OUT_OF_HEAP or category == "crash" else "the action"
        return Cause(
            "memory",
            f"{who} ran out of memory"
            + (" (the kernel ends a process with signal 9 when memory is short)" if killed else ""),
            "build with fewer jobs at a time (--jobs N; about 4 GB of memory for each), "
            "or on a machine with more memory",
        )
    # Bazel goes on after some of these for a while, so every line counts
    full = _DISK.search(words) or _DISK.search(output)
    if full:
        return _full(full[0])
    if (category, name) == ("spawn", "TIMEOUT"):
        return Cause(
            "time",
            "the action ran into its own time limit",
            "run the same command again; what is done is in the caches",
        )
    if code == _LOCKED or "Another command" in words:
        return Cause(
            "lock",
            "another Bazel works in the same folder",
            "wait for its end, then run the same command again",
        )
    return None


def _full(words: str) -> Cause:
    return Cause(
        "disk",
        f"a disk is full ({words})",
        "free some space, or keep the caches elsewhere: --cache DIR; then run the same "
        "command again",
    )


def _of_network(
    built: Built, failure: Failure | None, words: str, output: str, code: int
) -> Cause | None:
    """Causes that lie in the network, the remote, or the right to use it."""
    category, name = built.detail
    if _FETCH.search(words) or category in ("externalDeps", "externalRepository"):
        return _of_fetch(words)
    if (
        name in ("CREDENTIALS_INIT_FAILURE", "CREDENTIALS_READ_FAILURE")
        or _CREDENTIALS.search(words)
        or (code in _REMOTE and _CREDENTIALS.search(output))
    ):
        return Cause(
            "credentials",
            "the remote refuses, or there are no credentials for it",
            "build without it (--remote none), or log in first: "
            "gcloud auth application-default login",
        )
    remote = category in ("remoteExecution", "remoteOptions") or (category, name) in (
        ("spawn", "EXECUTION_FAILED"),
        ("spawn", "REMOTE_CACHE_FAILED"),
        ("spawn", "REMOTE_CACHE_EVICTED"),
    )
    # outputs stay at a cache until they are needed: when it dies then, an old Bazel blames this
    # machine
    trouble = cache_trouble(output) if code == _MACHINE else ""
    unreachable = _UNREACHABLE.search(words)
    if code in _REMOTE or remote or trouble or (unreachable and not built.finished):
        why = unreachable[0] if unreachable else trouble or f"Bazel's exit code {code}"
        return Cause(
            "remote",
            f"the remote cache or executor cannot be reached, or it failed ({why})",
            "check its address and that it runs, or build without it: --remote none",
        )
    return None


def _of_fetch(words: str) -> Cause:
    repository = _REPOSITORY.search(words)
    what = f"the external repository {repository[1]}" if repository else "an external dependency"
    reasons = [found[1] for line in words.splitlines() if (found := _WHY_FETCH.search(line))]
    reason = f": {reasons[0][:_LINE_CHARS]}" if reasons else ""
    return Cause(
        "fetch",
        f"{what} could not be fetched{reason}",
        "check the network and the proxy settings (HTTPS_PROXY), then run the same command again; "
        "what was fetched is kept",
    )


def _of_line(
    built: Built, failure: Failure | None, words: str, output: str, code: int
) -> Cause | None:
    """Causes that lie in the command line, in Bazelisk, or in Bazel's server."""
    undefined = _CONFIG.search(words)
    if undefined:
        return Cause(
            "config",
            f"the configuration {undefined[1]} is not defined in the source's .bazelrc",
            "look for its name there (grep '^[a-z]*:' .bazelrc), or take another source",
            about_source=True,
        )
    if code == _USAGE:
        said = errors_of(output).splitlines()
        return Cause(
            "line",
            "Bazel refused its command line"
            + (f": {said[0].removeprefix('ERROR: ')}" if said else ""),
            "the source may want another Bazel than the one that ran: see its .bazelversion",
        )
    died = _SERVER_DIED.search(output)
    if died or code == _CRASHED:
        return Cause(
            "server",
            "Bazel's server came to a bad end" + (f" ({died[0]})" if died else ""),
            "see whether the kernel ended it for want of memory (dmesg); then run the same "
            "command again",
        )
    if code == _MACHINE:
        return Cause(
            "machine",
            f"Bazel found something wrong with this machine: {built.message or built.exit_name}",
            "mend that, then run the same command again",
        )
    if not built.begun:
        reason = _NO_BAZEL.search(output)
        return Cause(
            "bazel",
            "there was no Bazel to run" + (f": {reason[0][:_LINE_CHARS]}" if reason else ""),
            "check the network, or name one: --bazel VERSION_OR_PATH, --bazel-url URL",
        )
    return None


def _of_source(
    built: Built, failure: Failure | None, words: str, output: str, code: int
) -> Cause | None:
    """Causes that lie in what was built."""
    category, _ = built.detail
    if failure is not None:
        return Cause(
            "action",
            "the action itself says so above: its source, its compiler or its flags",
            "read its output",
            about_source=True,
        )
    if _WHEEL_FLAG.search(words):
        return Cause(
            "flag",
            "the source refuses to make a wheel without the flag that wheel_common sets",
            "let wheel_common set --//:wheel_build=True in the source's .bazelrc",
            about_source=True,
        )
    loading = built.exit_name == "PARSING_FAILURE" or category in (
        "analysis",
        "packageLoading",
        "starlarkLoading",
        "targetPatterns",
    )
    if loading:
        why = built.message.strip().splitlines()
        return Cause(
            "source",
            f"Bazel cannot make sense of the source: {why[-1] if why else built.exit_name}",
            "look at the file and the line that Bazel names",
            about_source=True,
        )
    return None


class Standstill:
    """Tells a build that stands still on a full disk, where Bazel may wait for ever.

    Bazel's own words are one sign of a full disk; the free space is another, for a Bazel that
    fell silent. Neither is enough: while something is done, or computed, the build goes on, and
    may end by itself.

    Args:
        folders: What Bazel writes to; they need not be there yet.
        spent: Says how many seconds of processor time Bazel and what it runs have used so far.
    """

    def __init__(
        self, folders: Sequence[Path] = (), spent: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._folders = folders
        self._spent = spent
        self._since: tuple[float, int, float] | None = None

    def look(self, now: float, signs: int, words: str) -> str:
        """Look once; to be called again and again.

        Args:
            now: The time, in seconds.
            signs: How many signs of progress the build has given so far.
            words: Bazel's own words for a full disk; empty if it said none.

        Returns:
            How a full disk shows, once there was no progress for 20 s; empty before.
        """
        full = words or next(filter(None, map(_lacks, self._folders)), "")
        if not full:
            self._since = None
            return ""
        spent = self._spent()
        if self._since is not None:
            began, signs_then, spent_then = self._since
            # what was used grows less when a process ends: that is a change as well
            if signs == signs_then and abs(spent - spent_then) <= _BUSY_S:
                return full if now - began > _FULL_S else ""
        self._since = (now, signs, spent)
        return ""


def _lacks(folder: Path) -> str:
    """What the file system of a folder has run out of, for people; empty if of nothing."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return ""
    # what is kept back is kept for root
    free = room.f_frsize * (room.f_bavail if os.geteuid() else room.f_bfree)
    if free < _NO_ROOM:
        return f"{size(free)} free in {folder}"
    # some file systems do not count their inodes, and say 0 of 0
    return f"no inode free in {folder}" if room.f_files and not room.f_ffree else ""


class Follower:
    """Follows a running build, and says in one line how far it is.

    Two sources feed it: Bazel's lines on standard error, given to :meth:`line`, and the growing
    file of build events, read by a thread.

    Args:
        path: The file that ``--build_event_json_file`` names; it may not be there yet.
        show: Called with one line whenever there is something new to say.
        standstill: Tells whether the build stands still on a full disk.

    Attributes:
        hopeless: Set when the build cannot go on and does not end either; see :attr:`why`.
    """

    def __init__(
        self, path: Path, show: Callable[[str], None], standstill: Standstill | None = None
    ) -> None:
        self._path = path
        self._show = show
        self._standstill = standstill or Standstill()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._phase = "starting Bazel"
        self._fetching = ""
        self._steps: tuple[int, int, int, str] | None = None
        self._failed: list[str] = []
        self._said = ""
        self._words = ""
        self._full = ""
        self._signs = 0
        self._recent: collections.deque[str] = collections.deque(maxlen=_RECENT_LINES)
        self.hopeless = threading.Event()

    @property
    def why(self) -> Cause | None:
        """Why the build is hopeless; None while it is not."""
        return _full(self._full) if self.hopeless.is_set() else None

    def start(self) -> None:
        """Begin to read the file of events."""
        self._tell()
        self._thread.start()

    def stop(self) -> None:
        """Read what there still is in the file, and end the thread."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def line(self, text: str) -> None:
        """Take one line that Bazel wrote to standard error.

        Args:
            text: The line, without its end.
        """
        full = _DISK.search(text)
        step = _STEP.match(text)
        phase = _PHASE.match(text)
        fetching = _FETCHING.match(text)
        with self._lock:
            if full is not None and not self._words:
                self._words = full[0]
            # Bazel says again and again that it still waits, and for how long
            bare = _WAITED.sub("", text)
            if bare not in self._recent:
                self._recent.append(bare)
                self._signs += 1
            if step is not None:
                done, total = (int(number.replace(",", "")) for number in step.groups()[:2])
                self._steps = (done, total, *_running(step[3]))
                self._fetching = ""
            elif phase is not None:
                counts = _COUNTS.search(phase[2])
                word = "loading" if phase[1] == "Loading" else "analysing"
                self._phase = f"{word} the source" + (f": {counts[1]}" if counts else "")
            elif fetching is not None:
                self._fetching = redact(fetching[1])
            else:
                return
        self._tell()

    def _follow(self) -> None:
        position, rest = 0, b""
        while True:
            last = self._over.wait(_POLL_S)
            try:
                with self._path.open("rb") as file:
                    file.seek(position)
                    data = file.read()
            except OSError:
                data = b""
            position += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._event(line)
            if last:
                return
            self._look()

    def _look(self) -> None:
        with self._lock:
            signs, words = self._signs, self._words
        full = self._standstill.look(time.monotonic(), signs, words)
        if full and not self.hopeless.is_set():
            self._full = full
            self.hopeless.set()

    def _event(self, line: bytes) -> None:
        # what Bazel says is told as an event too, and was counted as a line
        if not line.startswith(b'{"id":{"progress"'):
            with self._lock:
                self._signs += 1
        # the file is large, and few of its events are of use here: look before parsing
        if not line.startswith(b'{"id":{"actionCompleted"') or b'"success":true' in line:
            return
        try:
            event = json.loads(line)
        except ValueError:
            return
        label = event["id"]["actionCompleted"].get("label", "").removeprefix("@@")
        with self._lock:
            self._failed.append(label)
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            said = self._sentence()
            if said == self._said:
                return
            self._said = said
        self._show(said)

    def _sentence(self) -> str:
        parts = []
        if self._steps is None:
            parts.append(self._phase)
        else:
            done, total, running, what = self._steps
            count = f"{done:,} of {total:,} actions"
            now = f"{running} running: {what}" if what else f"{running} running"
            parts.append(f"{count}, {now}" if running else count)
        if self._fetching:
            parts.append(f"fetching {self._fetching}")
        if self._failed:
            parts.append(f"{len(self._failed)} failed: {self._failed[0]}")
        return "; ".join(parts)


def _running(text: str) -> tuple[int, str]:
    """How many actions run, and what the first of them is, from the rest of a progress line."""
    if not text or text.startswith(("no actions running", "checking cached actions")):
        return 0, ""
    count = _RUNNING.search(text)
    what = _SECONDS.sub("", _RUNNING.sub("", text)).strip()
    return (int(count[1]) if count else 1), what.removeprefix("[Prepa] ").removeprefix("[Sched] ")
