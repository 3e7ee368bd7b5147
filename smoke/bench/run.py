"""The command ``bench``: what an image costs in time, each cost apart, with its spread.

Every sample comes from a fresh process. A measurement that could not be made says why and has no
sample; nothing is estimated. The result is ``tpuforge.bench/1`` (docs/bench.md).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from smoke import isolate, output
from smoke.bench import pagecache, work

SCHEMA = "tpuforge.bench/1"
GROUPS = ("import", "step", "compile")
TARGETS = ("v6e:2x2", "v5e:2x2")
PROGRAMS = ("matmul_2x2", "matmul_8192")
WARMUP_STEPS = 3
STEADY_STEPS = 20
COLD = 0.5
"""An import is called cold when storage gave at least this share of the files in its memory."""
LIMIT_S = 120.0
COMPILE_ENV = {
    # the real compiler: neither a simulator's plugin nor a machine's metadata server
    "TPU_LIBRARY_PATH": None,
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass
class Measurement:
    """One thing measured.

    Attributes:
        id: Its name, group first.
        what: What was measured, for people.
        unit: Of the samples: ``s`` or ``MB`` (a million bytes).
        samples: The values, in the order they were taken.
        not_run: Why there is no sample; None if there is one.
        failed: Whether it should have worked here.
    """

    id: str
    what: str
    unit: str = "s"
    samples: list[float] = field(default_factory=list)
    not_run: str | None = None
    failed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The measurement as it stands in ``bench.json``."""
        found = self.samples
        return {
            "id": self.id,
            "what": self.what,
            "unit": self.unit,
            "samples": [_round(value) for value in found],
            "min": _round(min(found)) if found else None,
            "median": _round(statistics.median(found)) if found else None,
            "max": _round(max(found)) if found else None,
            "not_run": None if found else self.not_run or "no sample",
            "failed": self.failed,
        }


def _round(value: float) -> float:
    return round(value, 6)


Say = Callable[[str], None]


def imports(samples: int, say: Say) -> Iterator[Measurement]:
    """Time ``import torch``, cold and warm, and its memory.

    Args:
        samples: How many of each.
        say: Takes a line of progress.

    Yields:
        The measurements.
    """
    cold = Measurement(
        "import.cold",
        "import torch (with torch_tpu), the content of its files not in the page cache",
    )
    fetched = Measurement("import.cold_read", "read from storage by the cold import", "MB")
    roots = [Path(sys.prefix), Path(sysconfig.get_path("stdlib"))]
    for number in range(samples):
        say(f"import torch, cold, {number + 1} of {samples}")
        pagecache.drop(roots)
        ended = isolate.run(work.import_torch, timeout=LIMIT_S)
        why = None if ended.error else _warm(ended.value)
        if why:
            for measurement in (cold, fetched):
                measurement.samples.clear()
                measurement.not_run = why
            break
        if not _add(cold, ended):
            fetched.not_run = cold.not_run
            break
        fetched.samples.append(ended.value["read_bytes"] / 1e6)
    yield cold
    yield fetched
    warm = Measurement("import.warm", "import torch (with torch_tpu) again")
    memory = Measurement("import.memory", "peak resident memory of import torch", "MB")
    # the cold imports have filled the page cache; one that failed will fail again
    for number in range(1 if ended.error else samples):
        say(f"import torch, warm, {number + 1} of {samples}")
        ended = isolate.run(work.import_torch, timeout=LIMIT_S)
        if not _add(warm, ended):
            memory.not_run, memory.failed = warm.not_run, True
            break
        memory.samples.append(ended.peak_memory_bytes / 1e6)
    yield warm
    yield memory


def _warm(value: dict[str, Any]) -> str | None:
    """Why an import was not cold, or None if it was."""
    fetched, needed = value["read_bytes"], value["file_bytes"]
    if fetched is None or not needed:
        return "this system does not count what a process reads from storage"
    if fetched < COLD * needed:
        return (
            f"only {fetched / 1e6:.0f} MB of {needed / 1e6:.0f} MB came from storage: "
            "the page cache could not be emptied, other processes use these files"
        )
    return None


def _add(measurement: Measurement, ended: isolate.Ended) -> bool:
    """Take a sample of a process that returned its seconds, or note why there is none."""
    if ended.error is not None:
        measurement.samples.clear()
        measurement.not_run, measurement.failed = f"failed: {ended.error}", True
        return False
    measurement.samples.append(float(ended.value["seconds"]))
    return True


def first_and_steady(samples: int, say: Say) -> Iterator[Measurement]:
    """Time the first training steps against the steady state, on a TPU or a simulated one.

    The three names and what they mean are TorchTPU's own.

    Args:
        samples: How many processes.
        say: Takes a line of progress.

    Yields:
        The measurements.
    """
    simulated = "TPUFORGE_SIMULATOR" in os.environ
    where = "a simulated TPU (a CPU plugin: says nothing about a TPU's speed)"
    where = where if simulated else "a TPU"
    first = Measurement(
        "step.first_step_time_seconds", f"the first training step of a small network on {where}"
    )
    over = Measurement(
        "step.warmup_overhead_seconds",
        f"the first {WARMUP_STEPS} steps, beyond what {WARMUP_STEPS} steady steps take",
    )
    steady = Measurement(
        "step.post_warmup_step_time_seconds",
        f"a step after the warm-up, mean of {STEADY_STEPS} in one process",
    )
    every = (first, over, steady)
    for number in range(samples):
        say(f"first and steady steps, {number + 1} of {samples}")
        ended = isolate.run(
            work.steps,
            WARMUP_STEPS,
            STEADY_STEPS,
            timeout=LIMIT_S,
            env={"TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        if ended.error is not None:
            for measurement in every:
                measurement.samples.clear()
                measurement.not_run, measurement.failed = f"failed: {ended.error}", True
            break
        if ended.value["device"] is None:
            for measurement in every:
                measurement.not_run = "no TPU, and no simulator is mounted"
            break
        warm = statistics.fmean(ended.value["steady"])
        first.samples.append(ended.value["warmup"][0])
        over.samples.append(sum(ended.value["warmup"]) - warm * WARMUP_STEPS)
        steady.samples.append(warm)
    yield from every


def compiles(samples: int, targets: Sequence[str], say: Say) -> Iterator[Measurement]:
    """Time libtpu as a compiler, for each target.

    Args:
        samples: How many processes per target.
        targets: Topologies that libtpu knows.
        say: Takes a line of progress.

    Yields:
        The measurements.
    """
    load = Measurement("compile.load", "load libtpu and make it ready to compile")
    made: list[Measurement] = []
    for target in targets:
        group = [
            Measurement(
                f"compile.{target}.matmul_2x2",
                f"compile the 2x2 matmul for {target}, the first program of a process",
            ),
            Measurement(
                f"compile.{target}.matmul_8192",
                f"compile an 8192x8192 bfloat16 matmul for {target}",
            ),
        ]
        made += group
        for number in range(samples):
            say(f"compile for {target}, {number + 1} of {samples}")
            ended = isolate.run(
                work.compile_programs, target, list(PROGRAMS), timeout=LIMIT_S, env=COMPILE_ENV
            )
            if ended.error is not None:
                for measurement in group:
                    measurement.samples.clear()
                    measurement.not_run, measurement.failed = f"failed: {ended.error}", True
                break
            load.samples.append(ended.value["load"])
            for measurement, program in zip(group, PROGRAMS, strict=True):
                measurement.samples.append(ended.value[program])
    if not load.samples:
        load.not_run, load.failed = "failed: no process could load libtpu", True
    yield load
    yield from made


def host() -> dict[str, Any]:
    """The machine, as ``health.json`` describes it too."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench",
        allow_abbrev=False,
        description="Time imports, first and steady steps and compiles, each in fresh processes.",
        epilog="Exit codes: 0 measured (what could not run here says why), 1 a measurement "
        "failed, 2 usage or an unwritable result.",
    )
    parser.add_argument("--json", metavar="PATH", help="write the result as JSON; - is stdout")
    parser.add_argument(
        "--only",
        default=",".join(GROUPS),
        metavar="LIST",
        help=f"groups, by commas: {', '.join(GROUPS)}",
    )
    parser.add_argument(
        "--target",
        action="append",
        metavar="TOPOLOGY",
        help=f"compile for this (again for more); default {', '.join(TARGETS)}",
    )
    parser.add_argument("--samples", type=int, default=3, help="samples of each (default 3)")
    parser.add_argument(
        "--merge",
        type=Path,
        metavar="EARLIER.json",
        help="keep the measurements of an earlier result that are not made now",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks.

    Args:
        argv: Arguments; the process's own if not given.

    Returns:
        The exit code: 0 measured, 1 a measurement failed, 2 could not work.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    only = [word for word in options.only.split(",") if word]
    for word in only:
        if word not in GROUPS:
            parser.error(f"--only {word}: expected one of {', '.join(GROUPS)}")
    if options.samples < 1:
        parser.error("--samples: expected 1 or more")
    earlier: list[dict[str, Any]] = []
    if options.merge is not None:
        try:
            earlier = json.loads(options.merge.read_text(encoding="utf-8"))["measurements"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"--merge {options.merge}: not a bench result: {error}")
    started, clock = datetime.now(UTC), time.monotonic()

    def say(text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)

    made: list[Measurement] = []
    if "import" in only:
        made += imports(options.samples, say)
    if "step" in only:
        made += first_and_steady(options.samples, say)
    if "compile" in only:
        made += compiles(options.samples, options.target or TARGETS, say)
    fresh = {measurement.id for measurement in made}
    measurements = [item for item in earlier if item.get("id") not in fresh]
    measurements += [measurement.as_dict() for measurement in made]
    result = {
        "schema": SCHEMA,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - clock, 3),
        "host": host(),
        "measurements": measurements,
    }
    if options.json != "-":
        print(_table(measurements))
    try:
        output.write_json(options.json, result)
    except OSError as error:
        print(f"bench: {options.json} cannot be written: {error}", file=sys.stderr)
        return 2
    return 1 if any(measurement.failed for measurement in made) else 0


def _table(measurements: list[dict[str, Any]]) -> str:
    lines = []
    for item in measurements:
        if item["not_run"]:
            shown = f"not run: {item['not_run']}"
        else:
            low, middle, high = (f"{item[key]:.4g}" for key in ("min", "median", "max"))
            shown = f"{middle} {item['unit']}  ({low} to {high}, {len(item['samples'])}x)"
        lines.append(f"{item['id']:<36} {shown}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
