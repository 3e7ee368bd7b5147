"""A crew of worker processes: many small tasks, each of which may end its process.

Code that loads a plugin ends the whole process when it is unhappy, and starting a process that has
torch in it takes seconds. So a worker does one task after the other, and when it dies, the task it
had at that moment is blamed and the rest goes on in a new one. A task is blamed only after it has
ended a second, fresh worker as well.

The work is named, not pickled: ``module:function`` is called once per worker with JSON arguments
and gives the function that does the tasks. Tasks and replies travel as lines of JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smoke import isolate

_WORKER = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from smoke.operators import crew
sys.exit(crew._worker(json.loads(sys.argv[1])))
"""
"""What a worker's interpreter runs; nobody's working directory or variables lead it elsewhere."""


class CrewError(Exception):
    """No worker can be started, so no task can be done."""


@dataclass(frozen=True)
class Ended:
    """How one task ended.

    Attributes:
        value: What the work's function returned; None if it did not.
        kind: ``done``, ``raised``, ``signal`` (it ended its worker, twice), ``exit`` (the same,
            without a signal), ``timeout``, or ``killed`` (somebody else ended the worker, twice).
        message: Why there is no value; empty if there is one.
        seconds: Wall time of the task.
        again: Whether it ended a worker once and was then done by a fresh one.
    """

    value: Any
    kind: str
    message: str
    seconds: float
    again: bool = False


@dataclass
class Crew:
    """Worker processes that share one list of tasks.

    Attributes:
        work: ``module:function``; the function gets ``arguments`` and returns the one that does a
            task.
        arguments: JSON values.
        count: How many workers.
        limit: Seconds that one task may take.
        start_limit: Seconds that a worker may take until it can do tasks.
        env: Variables to set (a text) or to remove (None); the rest is inherited.
        peak_memory_bytes: Largest resident set of a worker so far.
        restarts: How many workers were replaced because one had died.
    """

    work: str
    arguments: Sequence[Any] = ()
    count: int = 2
    limit: float = 60.0
    start_limit: float = 300.0
    env: Mapping[str, str | None] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    restarts: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._workers: set[_Worker] = set()

    def do(
        self, tasks: Sequence[Any], done: Callable[[int, Ended], None] | None = None
    ) -> list[Ended]:
        """Do all tasks.

        Args:
            tasks: JSON values.
            done: Called with a task's number and its end, one call at a time.

        Returns:
            One end per task, in the order of the tasks.

        Raises:
            CrewError: If workers cannot be started.
        """
        self._stop.clear()
        queue = deque(enumerate(tasks))
        ends: list[Ended | None] = [None] * len(tasks)
        trouble: list[BaseException] = []

        def hand() -> None:
            try:
                self._serve(queue, ends, done)
            except BaseException as error:  # handed to the caller's thread
                trouble.append(error)
                self._end_all()

        threads = [
            threading.Thread(target=hand, daemon=True) for _ in range(min(self.count, len(tasks)))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._end_all()
            for thread in threads:
                if thread.is_alive():
                    thread.join(timeout=10)
        if trouble:
            raise trouble[0]
        return [end for end in ends if end is not None]

    def _end_all(self) -> None:
        """Stop: every thread sees its worker gone, clears up after it and ends."""
        self._stop.set()
        with self._lock:
            left = list(self._workers)
        for worker in left:
            worker.kill()

    def _serve(
        self,
        queue: deque[tuple[int, Any]],
        ends: list[Ended | None],
        done: Callable[[int, Ended], None] | None,
    ) -> None:
        """One worker's share: tasks until none is left. The thread outlives its workers."""
        worker: _Worker | None = None
        try:
            while not self._stop.is_set():
                with self._lock:
                    if not queue:
                        return
                    number, task = queue.popleft()
                worker = worker or self._start()
                end = worker.do(task, self.limit)
                if not worker.alive:
                    self._retire(worker)
                    worker = None
                    if end.kind != "timeout" and not self._stop.is_set():
                        worker = self._start(replaces=True)
                        end = worker.do(task, self.limit, again=True)
                        if not worker.alive:
                            self._retire(worker)
                            worker = None
                ends[number] = end
                if done is not None:
                    with self._lock:
                        done(number, end)
        finally:
            if worker is not None:
                self._retire(worker)

    def _start(self, *, replaces: bool = False) -> _Worker:
        if replaces:
            with self._lock:
                self.restarts += 1
        worker = _Worker(self)
        with self._lock:
            self._workers.add(worker)
        if self._stop.is_set():
            worker.kill()
        why = worker.ready(self.start_limit)
        if why:
            self._retire(worker)
            raise CrewError(f"no worker can be started: {why}")
        return worker

    def _retire(self, worker: _Worker) -> None:
        peak = worker.end()
        with self._lock:
            self._workers.discard(worker)
            self.peak_memory_bytes = max(self.peak_memory_bytes, peak)


class _Worker:
    """One process and the three pipes and files to it."""

    def __init__(self, crew: Crew) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tpuforge-crew-"))
        self._log = self._folder / "log"
        self._peak = 0
        self._buffer = b""
        self.alive = True
        replies, replies_in = os.pipe()
        self._replies = replies
        os.set_blocking(replies, False)
        request = {
            "work": crew.work,
            "arguments": list(crew.arguments),
            "replies": replies_in,
            "parent": os.getpid(),
        }
        variables = {**os.environ, "TMPDIR": str(self._folder), **crew.env}
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _WORKER, json.dumps(request)],
                env={name: value for name, value in variables.items() if value is not None},
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                pass_fds=(replies_in,),
                start_new_session=True,
            )
        os.close(replies_in)

    def ready(self, limit: float) -> str:
        """Wait for the worker's first words: why it cannot work, or nothing."""
        answer = self._read(time.monotonic() + limit)
        if isinstance(answer, dict):
            return str(answer.get("error") or "")
        if answer == "timeout":
            return f"not ready after {limit:.0f} s"
        return self._obituary()[1]

    def do(self, task: Any, limit: float, *, again: bool = False) -> Ended:
        """Do one task; afterwards ``alive`` says whether the worker can go on."""
        started = time.monotonic()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._read(started + limit)
        except BrokenPipeError:
            answer = "end"
        seconds = time.monotonic() - started
        if isinstance(answer, dict):
            if "error" in answer:
                return Ended(None, "raised", str(answer["error"]), seconds, again)
            return Ended(answer["value"], "done", "", seconds, again)
        self.alive = False
        if answer == "timeout":
            return Ended(None, "timeout", f"not done after {limit:.0f} s; ended", seconds, again)
        kind, message = self._obituary()
        return Ended(None, kind, message, seconds, again)

    def _read(self, deadline: float) -> dict[str, Any] | str:
        """The next reply; ``end`` when the worker is gone, ``timeout`` when it is late."""
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            if not select.select([self._replies], [], [], left)[0]:
                continue
            chunk = os.read(self._replies, 1 << 16)
            if not chunk:
                return "end"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        self._peak = max(self._peak, int(answer.get("peak", 0)))
        return dict(answer)

    def _obituary(self) -> tuple[str, str]:
        """Kind and words of an end that the worker did not choose."""
        self.alive = False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.poll()
        if code is None:
            return "exit", "the process closed its side and did not end"
        return isolate.obituary(code, isolate.end_of(self._log))

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process and what it started; any thread may."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def end(self) -> int:
        """End the process and what it started, and clear up; its peak memory in bytes."""
        self.alive = False
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.kill(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=2)
        os.close(self._replies)
        shutil.rmtree(self._folder, ignore_errors=True)
        return self._peak


def _peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _worker(request: dict[str, Any]) -> int:
    """The worker's side: get ready, then one reply per line of input."""
    if not isolate.settle(request["parent"]):
        return 1
    # what a task prints must not be read as a reply, nor its input as a task
    tasks = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with os.fdopen(request["replies"], "w", encoding="utf-8") as replies:

        def say(answer: dict[str, Any]) -> None:
            replies.write(json.dumps(answer | {"peak": _peak()}) + "\n")
            replies.flush()

        module, _, name = request["work"].partition(":")
        try:
            handle = getattr(importlib.import_module(module), name)(*request["arguments"])
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})
            return 1
        say({})
        for line in tasks:
            try:
                say({"value": handle(json.loads(line))})
            except Exception as error:
                traceback.print_exc()
                say({"error": f"{type(error).__name__}: {error}"})
    # no interpreter shutdown: plugins take their time, or crash, when they are unloaded
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
