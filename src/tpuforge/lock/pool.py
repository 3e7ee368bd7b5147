"""Several locks resolved side by side, from one view of the index.

``lock`` and ``lock_check`` both resolve many locks, and both here, so they come to the same bytes
in the same way: each page of the index is fetched once for all of them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from packaging.utils import canonicalize_name

from tpuforge.console import Progress
from tpuforge.lock.inputs import lock_path, requirements
from tpuforge.lock.resolver import Job, view_of
from tpuforge.lock.sources import Source
from tpuforge.lockfile import read_lock
from tpuforge.pins import Pins

_T = TypeVar("_T")


class Board:
    """What several threads are at, in the one line that a step has.

    Args:
        progress: The display.
        total: How many locks there are.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._guard = threading.Lock()
        self._at: dict[str, str] = {}
        self._done = 0

    def show(self, job: Job, what: str) -> None:
        """Say what is done for a lock now.

        Args:
            job: The lock.
            what: Such as ``resolving``.
        """
        with self._guard:
            self._at[job.who] = what
            self._refresh()

    def end(self, job: Job, said: str) -> None:
        """Say how a lock came out.

        Args:
            job: The lock.
            said: One line for people.
        """
        with self._guard:
            del self._at[job.who]
            self._done += 1
            self._refresh()
        self._progress.note(f"{job.who}: {said}")

    def count(self, size: int) -> None:
        """Count bytes downloaded.

        Args:
            size: Bytes.
        """
        with self._guard:
            self._progress.advance(size)

    def _refresh(self) -> None:
        at = ", ".join(f"{who}: {what}" for who, what in self._at.items())
        self._progress.detail(f"{self._done} of {self._total} done; {at}")


def together(
    pins: Pins,
    chosen: Sequence[tuple[str, str]],
    source: Source,
    progress: Progress,
    *,
    title: str,
    one: Callable[[Job, Board], _T],
) -> list[_T]:
    """Work on locks side by side, on each after the one it builds on.

    When one fails, or a person stops it, the children of the others are ended, and their jobs'
    ``stop`` is set: nothing is written after that.

    Args:
        pins: The pins.
        chosen: Flavours and Pythons.
        source: Where packages come from.
        progress: The display.
        title: What the step is called.
        one: What is done for each, in a thread of the pool.

    Returns:
        What came of each, in the order of ``chosen``.

    Raises:
        UnreachableError: If the index does not answer within seconds.
        ForgeError: What the first one that failed raised.
    """
    stop = threading.Event()
    board = Board(progress, len(chosen))
    held = {
        target: read_lock(lock_path(*target)) for target in chosen if lock_path(*target).exists()
    }
    expect = {package.name for packages in held.values() for package in packages}
    done: dict[tuple[str, str], _T] = {}
    flavour, python = chosen[0]
    first = canonicalize_name(requirements(pins, flavour, python)[0].name)
    with contextlib.ExitStack() as stack:
        with progress.step("asking the package index"):
            expect -= pins.cpu_builds.keys()
            view = stack.enter_context(view_of(pins, source, expect, first))
            view.probe(python, first)
        stack.enter_context(progress.step(title))
        pool = stack.enter_context(ThreadPoolExecutor(os.cpu_count() or 1))
        for on_top in (False, True):
            level = [target for target in chosen if bool(pins.flavours[target[0]].on) is on_top]
            # the largest first, so that none of them is alone at the end
            level.sort(key=lambda target: -len(held.get(target, ())))
            jobs = [Job(pins, *target, source, view, stop) for target in level]
            futures = {pool.submit(one, job, board): job for job in jobs}
            try:
                for future in as_completed(futures):
                    job = futures[future]
                    done[job.flavour, job.python] = future.result()
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
    return [done[target] for target in chosen]
