"""Runs the programs of the *simulate* tier: one process for each theme, two processes at a time.

A theme is started when a worker is free, in the order of :data:`THEMES`, while the checks wait for
their own program's result one after the other. If a theme's process dies, each of its programs is
run again alone, so that only the one that ends its process is blamed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smoke import isolate
from smoke.plugin import Check
from smoke.simulator import programs

LIMIT_S = 480.0
CACHE_ROOT = "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"
_NODE_CACHE_NAME = "TORCH_TPU_TIER2_COMPILATION_CACHE"
_NODE_CACHES = Path("/dev/shm/torch_tpu_cache")
"""With a persistent cache torch_tpu keeps a copy there, and takes programs from it: by name."""

# a flag that ends processes is the business of import.flags alone
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "XLA_FLAGS": None, "LIBTPU_INIT_ARGS": None}
_AT_ONCE = 2


@dataclass(frozen=True)
class Theme:
    """Programs that share a process.

    Attributes:
        programs: Functions of :mod:`smoke.simulator.programs`.
        after: A theme that must have ended before.
        cached: Whether it uses the persistent compile cache.
        generation: The chip that it sees, if not the mounted one.
    """

    programs: tuple[str, ...]
    after: str | None = None
    cached: bool = False
    generation: str | None = None


GENERATIONS = ("v4", "v5e", "v5p", "v6e", "v7")
"""The simulator has a tree for each of them."""

THEMES = {
    "compile": Theme(("compile_forward", "compile_train", "shapes", "modes", "cache")),
    "eager": Theme(
        (
            "readme",
            "train",
            "eager",
            "autograd",
            "optimizers",
            "amp",
            "checkpoint",
            "fallback",
            "public_api",
        )
    ),
    "cold": Theme(("counted_work",), cached=True),
    "limits": Theme(("limits",)),
    "distributed": Theme(("collectives", "ddp", "fsdp2", "dtensor")),
    "warm": Theme(("counted_work",), cached=True, after="cold"),
    **{name: Theme(("generation",), generation=name) for name in GENERATIONS},
}


@dataclass
class Crew:
    """The running themes.

    Args:
        chosen: Theme and program of each check that will be run; the others are not started.
    """

    chosen: Sequence[tuple[str, str]]
    _ends: dict[str, Future[isolate.Ended]] = field(init=False)
    _threads: list[threading.Thread] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._programs = {
            name: tuple(one for one in theme.programs if (name, one) in self.chosen)
            for name, theme in THEMES.items()
        }
        self._ends = {name: Future() for name, some in self._programs.items() if some}
        self._waiting = list(self._ends)
        self._room = Path(tempfile.mkdtemp(prefix="tpuforge-cache-"))

    def start(self) -> None:
        """Start the first themes."""
        lanes = min(_AT_ONCE, len(os.sched_getaffinity(0)), len(self._ends))
        for _ in range(lanes):
            thread = threading.Thread(target=self._work, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End what still runs, and remove what it left."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        shutil.rmtree(self._room, ignore_errors=True)
        shutil.rmtree(_NODE_CACHES / self._room.name, ignore_errors=True)

    def figures(self, check: Check, theme: str, program: str) -> dict[str, Any]:
        """Wait for one program.

        Args:
            check: Who asks; it gets the figures and the memory of the process.
            theme: The theme.
            program: Its program.

        Returns:
            What the program returned.

        Raises:
            AssertionError: If it failed.
        """
        ended = self._ends[theme].result()
        if ended.kind == "killed":
            check.cannot(ended.story)
        if ended.error is not None and len(self._programs[theme]) > 1:
            ended = self._run(theme, (program,))
        result = check.took(ended)[program]
        if "cannot" in result:
            check.cannot(result["cannot"])
        if "error" in result:
            raise AssertionError(result["error"])
        figures: dict[str, Any] = result["value"]
        check.detail = figures.pop("detail")
        check.figures |= figures | {"program_seconds": round(result["seconds"], 3)}
        return figures

    def _work(self) -> None:
        while (name := self._next()) is not None:
            try:
                self._ends[name].set_result(self._run(name, self._programs[name]))
            except BaseException as error:  # handed to the one who waits
                self._ends[name].set_exception(error)

    def _next(self) -> str | None:
        """The next theme whose condition is met; themes are listed after those they wait for."""
        with self._lock:
            if self._stop.is_set() or not self._waiting:
                return None
            name = self._waiting.pop(0)
        before = THEMES[name].after
        if before in self._ends:
            self._ends[before].exception()
        return name

    def _run(self, name: str, chosen: Sequence[str]) -> isolate.Ended:
        theme = THEMES[name]
        env = dict(_QUIET)
        if theme.cached:
            env |= {CACHE_ROOT: str(self._room), _NODE_CACHE_NAME: self._room.name}
        if theme.generation is not None:
            env |= other_chip(Path(os.environ["TPUFORGE_SIMULATOR"]), theme.generation, os.environ)
        return isolate.run(programs.run, list(chosen), timeout=LIMIT_S, env=env, stop=self._stop)


def other_chip(simulator: Path, generation: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that show a process the chip of another generation than the mounted one.

    Args:
        simulator: The simulator's folder.
        generation: Such as ``v5e``.
        environ: What is preloaded stays.
    """
    preloaded = [*environ.get("LD_PRELOAD", "").split(), str(simulator / "bus.so")]
    return {
        "LD_PRELOAD": ":".join(preloaded),
        "TPUFORGE_PCI_DEVICES": str(simulator / "generations" / generation),
    }
