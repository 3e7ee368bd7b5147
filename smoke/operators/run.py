"""The command ``health operators``: census, audit on the simulator, compiles for the target.

    health operators [--dtype T[,T…]] [--samples N] [--target TOPOLOGY]… [--only REGEX] …
    health operators --census
    health operators --compare OLD.json NEW.json

``docs/operators.md`` has the rules. Only the standard library is imported here: whatever touches
torch or a plugin runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from smoke import isolate, output, pjrt, place
from smoke.operators import audit, compiler, crew, table

DTYPES = ("float32", "bfloat16", "int64")
"""What is audited if nothing is named: what models compute in, and what they index with."""

WAYS_OF = ("float32",)
"""The dtypes for which operators are called in further ways if no way is named: all ways together
double the time, and what differs by way rather than by dtype shows in one."""

OP_LIMIT_S = 60.0
COMPILE_LIMIT_S = 300.0
"""The slowest program, that of ``scatter_reduce.mean`` for int64, takes 10 s of CPU."""
_SURVEY_LIMIT_S = 300.0
_TARGET = re.compile(r"[a-z0-9]+:\d+(x\d+){1,2}")
_EVERY_S = 10.0
_SIMULATED = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": None,
    # an operator that fails must fail while it runs, and not in the one after it
    "TORCH_TPU_LAUNCH_BLOCKING": "1",
    "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT": None,
    # one thread each: the workers share the cores
    "OMP_NUM_THREADS": "1",
}
_COMPILING = {**pjrt.QUIET, "TPU_LIBRARY_PATH": None, "TPU_LOG_DIR": "disabled"}


class CannotError(Exception):
    """The audit cannot do what it was asked to; exit code 2."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="health operators",
        allow_abbrev=False,
        description="Which operators of PyTorch this image runs on a TPU: a census of its kernels, "
        "every OpInfo entry run on the simulator and compared with the CPU, and every program that "
        "comes of it compiled by libtpu. Exit codes: 0 all as known, 1 something that nobody knew, "
        "2 could not be judged here.",
    )
    add = parser.add_argument
    add("--census", action="store_true", help="only the census, which needs no simulator")
    add(
        "--dtype",
        action="append",
        metavar="T[,T…]",
        help=f"dtypes, such as float16, bool, complex64; {','.join(DTYPES)} if not given",
    )
    add(
        "--ways",
        metavar="WAY[,WAY…]",
        help=f"how else to call what passes: {','.join(table.WAYS)}, or none; if not given, all of "
        f"them, for {', '.join(WAYS_OF)} alone",
    )
    add("--samples", type=int, default=1, metavar="N", help="samples of each entry (default 1)")
    add("--only", metavar="REGEX", help="only entries whose whole name matches")
    add(
        "--target",
        action="append",
        metavar="TOPOLOGY",
        help=f"compile for this TPU; again for more; {pjrt.DEFAULT_TARGETS[0]} if not given",
    )
    add("--no-compile", action="store_true", help="run the operators, and compile nothing")
    add("--jobs", type=int, metavar="N", help="worker processes; one per core if not given")
    add("--json", metavar="PATH", help="write the table there; - is standard output")
    add("--html", metavar="PATH", help="write one self-contained page there")
    add(
        "--compare",
        nargs=2,
        metavar=("OLD.json", "NEW.json"),
        help="tell what the newer of two tables gained and lost; exit code 1 if it lost anything",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: Its arguments.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(argv)
    try:
        if options.compare:
            return _compare(options)
        return _run(options)
    except (CannotError, crew.CrewError) as error:
        print(f"health operators: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # no temporary folder, no space, or no further process
        print(f"health operators: {error}; give the container --tmpfs /tmp", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    started, clock = datetime.now(UTC), time.monotonic()
    dtypes = _dtypes(options.dtype)
    targets, ways = _targets(options), _ways(options.ways)
    if options.samples < 1 or (options.jobs is not None and options.jobs < 1):
        raise CannotError("--samples and --jobs are 1 or more")
    only = _pattern(options.only)
    cores = len(os.sched_getaffinity(0))
    jobs = options.jobs or cores
    say = _Say(sys.stderr)
    here = place.here()
    say("taking the census")
    surveyed = isolate.run(audit.survey, timeout=_SURVEY_LIMIT_S, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
    if surveyed.error is not None:
        raise CannotError(f"the operators cannot be listed: {surveyed.story}")
    why_not = "only the census was asked for" if options.census else _closed(os.environ)
    found: dict[str, Any] = {
        "schema": table.SCHEMA,
        "image": here.facts,
        "versions": surveyed.value["versions"],
        "started": started.isoformat(timespec="seconds"),
        "host": {"cores": cores, "machine": os.uname().machine},
        "settings": {
            "dtypes": dtypes,
            "ways": ways,
            "ways_dtypes": [one for one in dtypes if options.ways is not None or one in WAYS_OF],
            "samples": options.samples,
            "only": options.only,
            "targets": targets,
            "jobs": jobs,
            "tolerances": {name: list(pair) for name, pair in audit.TOLERANCES.items()},
        },
        "census": surveyed.value["census"],
        "audited": why_not is None,
        "why_not": why_not,
        "entries": len(surveyed.value["entries"]),
        "operators": {},
        "programs": {},
        "stale": [],
        "seconds": {"survey": round(surveyed.seconds, 3)},
        "restarts": 0,
        "peak_memory_bytes": surveyed.peak_memory_bytes,
    }
    if why_not is None:
        entries = [one for one in surveyed.value["entries"] if only.fullmatch(one["op"])]
        if not entries:
            raise CannotError(f"no OpInfo entry is called {options.only}")
        with tempfile.TemporaryDirectory(prefix="tpuforge-programs-") as folder:
            _audit(found, entries, folder if targets else None, jobs, say)
            if targets:
                _compile(found, Path(folder), jobs, say)
        _finish(found, surveyed.value["entries"])
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["seconds"]["all"] = round(time.monotonic() - clock, 3)
    found["cpu_seconds"] = round(usage.ru_utime + usage.ru_stime, 1)
    found["exit_code"] = _exit_code(found, options.census)
    return _deliver(options, found)


def _audit(
    found: dict[str, Any], entries: list[dict[str, Any]], programs: str | None, jobs: int, say: _Say
) -> None:
    """Run every entry, then what passes in further ways; the cells go into ``found``."""
    samples, dtypes = found["settings"]["samples"], found["settings"]["dtypes"]
    tasks, operators = [], found["operators"]
    for entry in entries:
        operators[entry["op"]] = {}
        for dtype in dtypes:
            if dtype in entry["dtypes"]:
                tasks.append({"op": entry["op"], "dtype": dtype, "way": table.FORWARD})
            operators[entry["op"]][dtype] = {
                "status": table.NOT_RUN,
                "detail": f"PyTorch itself has it not for {dtype}",
            }
    limits, known = table.limits(), table.known()
    exercised: set[str] = set()
    clock = time.monotonic()
    workers = crew.Crew(
        "smoke.operators.audit:worker",
        (samples, programs),
        count=jobs,
        limit=OP_LIMIT_S,
        env=_SIMULATED,
    )

    def do(tasks: list[dict[str, str]], what: str) -> None:
        def done(number: int, end: crew.Ended) -> None:
            op, dtype, way = (tasks[number][key] for key in ("op", "dtype", "way"))
            cell = table.judge((op, dtype, way), vars(end), limits, known)
            if way == table.FORWARD:
                operators[op][dtype] = cell
            else:
                operators[op][dtype][way] = cell
            if cell["status"] == table.PASSES:
                exercised.update(end.value["overloads"])
            say.count(what, op, len(tasks))

        say.restart()
        workers.do(tasks, done)

    do(tasks, "running")
    do(_further(entries, operators, found["settings"]), "gradients, out= and in place:")
    found["exercised"] = table.exercised(exercised, found["census"])
    found["seconds"]["audit"] = round(time.monotonic() - clock, 3)
    found["restarts"] = workers.restarts
    found["peak_memory_bytes"] = max(found["peak_memory_bytes"], workers.peak_memory_bytes)


def _further(
    entries: list[dict[str, Any]], operators: dict[str, Any], settings: Mapping[str, Any]
) -> list[dict[str, str]]:
    """The tasks for the further ways of what passes; the others get a cell that says so."""
    tasks = []
    for entry in entries:
        for dtype in settings["ways_dtypes"]:
            cell = operators[entry["op"]][dtype]
            for way in settings["ways"]:
                if dtype not in entry["ways"][way]:
                    continue
                if cell["status"] == table.PASSES:
                    tasks.append({"op": entry["op"], "dtype": dtype, "way": way})
                else:
                    cell[way] = {"status": table.NOT_RUN, "detail": "its forward does not pass"}
    return tasks


def _compile(found: dict[str, Any], folder: Path, jobs: int, say: _Say) -> None:
    """Compile every program once per target; the results go to the programs and the cells."""
    targets = found["settings"]["targets"]
    paths = {path.stem: path for path in folder.glob("*/[0-9a-f]*.mlir")}
    tasks = [
        {"program": name, "path": str(path), "target": target}
        for target in targets
        for name, path in sorted(paths.items())
    ]
    found["programs"] = {name: {} for name in sorted(paths)}
    say.restart()

    def done(number: int, end: crew.Ended) -> None:
        task = tasks[number]
        told = compiler.told(end.kind, end.message, end.value)
        found["programs"][task["program"]][task["target"]] = told
        say.count(f"compiling for {task['target']}", "", len(tasks))

    clock = time.monotonic()
    workers = crew.Crew(
        "smoke.operators.compiler:worker", count=jobs, limit=COMPILE_LIMIT_S, env=_COMPILING
    )
    workers.do(tasks, done)
    found["seconds"]["compile"] = round(time.monotonic() - clock, 3)
    found["restarts"] += workers.restarts
    found["peak_memory_bytes"] = max(found["peak_memory_bytes"], workers.peak_memory_bytes)
    cells = (cell for cells in found["operators"].values() for _, _, cell in table.each(cells))
    table.join_compiles(cells, found["programs"], targets)


def _finish(found: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    limits, known = table.limits(), table.known()
    names = [one["op"] for one in entries]
    found["stale"] = table.stale(found["operators"], limits, known, names)
    settings = found["settings"]
    found["counts"] = table.counts(found["operators"], settings["dtypes"])
    found["counts_of_ways"] = {
        way: table.counts(found["operators"], settings["ways_dtypes"], way)
        for way in settings["ways"]
    }
    found["compiled"] = table.compiled(found["programs"], settings["targets"])
    found["disagreements"] = table.disagreements(found["operators"], found["census"])
    found["problems"] = table.problems(found)


def _exit_code(found: Mapping[str, Any], census_only: bool) -> int:
    if not found["audited"]:
        return 0 if census_only else 2
    if found["problems"]:
        return 1
    judged = sum(
        count
        for counts in found["counts"].values()
        for status, count in counts.items()
        if status != table.NOT_RUN
    )
    return 0 if judged else 2


def _dtypes(words: Sequence[str] | None) -> list[str]:
    named = [name for word in words or DTYPES for name in word.split(",") if name]
    for name in named:
        if not re.fullmatch(r"(u?int\d+|b?float\d+(_\w+)?|complex\d+|bool)", name):
            raise CannotError(f"{name!r} is no dtype; float32 is one")
    if not named:
        raise CannotError("--dtype names none")
    return list(dict.fromkeys(named))


def _targets(options: argparse.Namespace) -> list[str]:
    if options.no_compile:
        return []
    named = options.target or [pjrt.DEFAULT_TARGETS[0]]
    for target in named:
        if not _TARGET.fullmatch(target):
            raise CannotError(f"{target!r} is not a topology; v6e:2x2 is one")
    return list(dict.fromkeys(named))


def _ways(text: str | None) -> list[str]:
    if text == "none":
        return []
    named = list(table.WAYS) if text is None else [name for name in text.split(",") if name]
    for name in named:
        if name not in table.WAYS:
            raise CannotError(f"{name!r} is no way; {', '.join(table.WAYS)} are, or none")
    return [name for name in table.WAYS if name in named]


def _pattern(text: str | None) -> re.Pattern[str]:
    try:
        return re.compile(text or ".*")
    except re.error as error:
        raise CannotError(f"--only {text} is no regular expression: {error}") from error


def _closed(environ: Mapping[str, str]) -> str | None:
    """Why operators cannot be run here; None if they can."""
    simulator = environ.get("TPUFORGE_SIMULATOR")
    if not simulator:
        return "no simulator is mounted"
    if not (Path(simulator) / "simulator.json").is_file():
        return f"TPUFORGE_SIMULATOR names {simulator}, which holds no simulator"
    if not Path(environ.get("TPU_LIBRARY_PATH", "")).is_relative_to(simulator):
        return "TPU_LIBRARY_PATH does not name the simulator's plugin"
    return None


class _Say:
    """Progress on standard error: a live line on a terminal, a plain one now and then elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._spoke = 0.0
        self._done = 0

    def __call__(self, text: str) -> None:
        end = "" if self._live else "\n"
        start = "\r\x1b[2K" if self._live else "health operators: "
        print(f"{start}{text}", end=end, file=self._stream, flush=True)

    def restart(self) -> None:
        """Count from the beginning."""
        self._done = 0

    def count(self, what: str, name: str, total: int) -> None:
        """One more is done."""
        self._done += 1
        now = time.monotonic()
        if now - self._spoke < (0.2 if self._live else _EVERY_S) and self._done < total:
            return
        self._spoke = now
        self(f"{what} {self._done} of {total} {name}".rstrip())

    def clear(self) -> None:
        """Take the live line away."""
        if self._live:
            print("\r\x1b[2K", end="", file=self._stream, flush=True)


def _deliver(options: argparse.Namespace, found: dict[str, Any]) -> int:
    _Say(sys.stderr).clear()
    show = sys.stderr if options.json == "-" else sys.stdout
    print_table(found, show)
    code = int(found["exit_code"])
    try:
        if options.html:
            from smoke.operators import page

            output.write(Path(options.html), page.render(found))
        output.write_json(options.json, found, indent=1)
    except OSError as error:
        print(f"health operators: a result cannot be written: {error}", file=sys.stderr)
        return code or 2
    return code


def print_table(found: Mapping[str, Any], stream: TextIO) -> None:
    """Show the figures, and one line for everything that nobody knew.

    Args:
        found: A ``tpuforge.operators/1`` document.
        stream: Where to.
    """

    def say(text: str = "") -> None:
        print(text, file=stream)

    taken = found["census"]
    say(
        f"census: {taken['overloads']} ATen overloads: {taken['counts']['direct']} direct "
        f"({taken['direct_operators']} operators), {taken['counts']['composite']} composite, "
        f"{taken['counts']['unsupported']} unsupported; core ATen "
        f"{taken['core']['overloads'] - len(taken['core']['missing'])} of "
        f"{taken['core']['overloads']}"
    )
    if not found["audited"]:
        say(f"audit: not run: {found['why_not']}")
        return
    say()
    say(f"{'':<10}" + "".join(f"{status:>17}" for status in table.STATUSES))
    for dtype, counts in found["counts"].items():
        say(f"{dtype:<10}" + "".join(f"{counts[status]:>17}" for status in table.STATUSES))
    for way, by_dtype in found["counts_of_ways"].items():
        say(way)
        for dtype, counts in by_dtype.items():
            say(f"  {dtype:<8}" + "".join(f"{counts[status]:>17}" for status in table.STATUSES))
    for target, counts in found["compiled"].items():
        words = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
        say(f"programs for {target}: {words or 'none'}")
    reached = found["exercised"]
    say(
        f"operators with a direct kernel that a passing entry calls: "
        f"{reached['direct_operators']} of {taken['direct_operators']}"
    )
    spent = found["seconds"]
    say(
        f"{spent['all']:.0f} s, {found['cpu_seconds']:.0f} s of CPU, "
        f"{found['peak_memory_bytes'] / 1e6:.0f} MB in the largest process, "
        f"{found['restarts']} workers replaced"
    )
    width = shutil.get_terminal_size((120, 24)).columns if stream.isatty() else 120
    for one in found["problems"]:
        line = f"{one['op']} {one['dtype']}: {one['what']}: {' '.join(one['detail'].split())}"
        say(line[: max(width, 60)])
    number = len(found["problems"])
    say(f"\n{number} that nobody knew" if number else "\nall as known")


def _read(path: str) -> dict[str, Any]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CannotError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != table.SCHEMA:
        raise CannotError(f"{path} is not a {table.SCHEMA} document")
    return document


def _compare(options: argparse.Namespace) -> int:
    old, new = (_read(path) for path in options.compare)
    try:
        changes = table.compare(old, new)
    except (KeyError, TypeError, AttributeError) as error:
        raise CannotError(f"one of the tables is damaged: {error!r}") from error
    show = sys.stderr if options.json == "-" else sys.stdout
    print_changes(changes, show)
    try:
        output.write_json(options.json, changes, indent=1)
    except OSError as error:
        raise CannotError(f"the result cannot be written: {error}") from error
    return int(changes["exit_code"])


def print_changes(changes: Mapping[str, Any], stream: TextIO) -> None:
    """Show what changed between two tables.

    Args:
        changes: A ``tpuforge.operators-changes/1`` document.
        stream: Where to.
    """
    for word in ("old", "new"):
        versions = changes[word]["versions"]
        named = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        print(f"{word}: {named}, of {changes[word]['started']}", file=stream)
    for kind in ("lost", "gained", "changed"):
        for one in changes[kind]:
            subject = f"{one['op']} {one['dtype']}".rstrip()
            line = f"{kind:<8} {subject}: {one['what']}: {one['before']} -> {one['now']}"
            print(line + (f" ({one['detail'][:200]})" if one["detail"] else ""), file=stream)
    for text in changes["not_compared"]:
        print(f"not compared: {text}", file=stream)
    words = ", ".join(f"{len(changes[kind])} {kind}" for kind in ("lost", "gained", "changed"))
    print(words, file=stream)
