"""``health`` and ``bench``: the commands of the suite inside an image.

    python cli.py health [--tier T,…] [--target v6e:2x2] [--json PATH|-] [--junit PATH] …
    python cli.py bench  […]
    python cli.py catalogue

Only the standard library is imported before the command is known, so that usage and errors work
in an image in which nothing else does. Exit codes: 0 healthy, 1 unhealthy, 2 could not judge,
3 a TPU is there and busy or unusable, 130 interrupted. ``docs/health.md`` has the rules.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import re
import resource
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
# as a script, Python has put this folder itself first: its modules belong to the package
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if entry != str(HERE))]

from smoke import chips, installed, output, place, verdict  # noqa: E402

SCHEMA = "tpuforge.health/1"
INTERRUPTED = 130
_TARGET = re.compile(r"[a-z0-9]+:\d+(x\d+){1,2}")
_COLOURS = {
    "passed": "32",
    "failed": "31",
    "incomplete": "33",
    "not run": "33",
    "warning": "33",
}


class UnjudgedError(Exception):
    """The suite cannot do what it was asked to; exit code 2."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="health",
        allow_abbrev=False,
        description="Judge this image: files, imports, compiles for real TPUs, and a TPU if there "
        "is one. Exit codes: 0 healthy, 1 unhealthy, 2 could not judge, 3 TPU busy or unusable.",
        epilog="Arguments after -- go to pytest. Further commands with a --help of their own: "
        "health operators (what runs on a TPU), health model (your model before your TPU).",
    )
    add = parser.add_argument
    add(
        "--tier",
        action="append",
        metavar="T[,T…]",
        help=f"tiers to run, of {', '.join(verdict.TIERS)}; all that can be run if not given",
    )
    add(
        "--target",
        action="append",
        metavar="TOPOLOGY",
        help="compile for this, such as v6e:2x2; all for one of every generation",
    )
    add(
        "--corpus",
        choices=("default", "full"),
        default="default",
        help="programs to compile; full adds the slow ones (the checks marked full)",
    )
    add("--json", metavar="PATH", help="write health.json there; - is standard output")
    add("--junit", metavar="PATH", help="write JUnit XML of this run there")
    add("--html", metavar="PATH", help="write one self-contained page there")
    add("--merge", metavar="EARLIER.json", help="take the tiers that this run leaves out from here")
    add(
        "-k", dest="expression", metavar="EXPR", help="only checks whose name matches, as in pytest"
    )
    add(
        "-m",
        dest="marks",
        metavar="EXPR",
        help="only checks with these marks, as in pytest; each has its tier and its severity",
    )
    return parser


def _tiers(words: Sequence[str] | None) -> tuple[str, ...]:
    if words is None:
        return verdict.TIERS
    named = {name for word in words for name in word.split(",") if name}
    unknown = sorted(named - set(verdict.TIERS))
    if unknown or not named:
        raise UnjudgedError(
            f"there is no tier {', '.join(unknown) or 'named'}; "
            f"the tiers are {', '.join(verdict.TIERS)}"
        )
    return tuple(name for name in verdict.TIERS if name in named)


def _closed(environ: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """Which tiers cannot run here and why; and those that nobody can expect to run here."""
    closed: dict[str, str] = {}
    expected: set[str] = set()
    simulator = environ.get("TPUFORGE_SIMULATOR")
    found = chips.scan()
    if not simulator:
        closed["simulate"] = "no simulator is mounted"
        expected.add("simulate")
    elif not (Path(simulator) / "simulator.json").is_file():
        closed["simulate"] = f"TPUFORGE_SIMULATOR names {simulator}, which holds no simulator"
    elif not Path(environ.get("TPU_LIBRARY_PATH", "")).is_relative_to(simulator):
        # with the real libtpu, every program would wait for a TPU that is not there
        closed["simulate"] = "TPU_LIBRARY_PATH does not name the simulator's plugin"
    elif not found:
        closed["simulate"] = "the simulated chip is not mounted over /sys/bus/pci/devices"
    if simulator:
        closed["device"] = "no TPU found: the chip on the PCI bus is the simulator's"
        expected.add("device")
    elif not found:
        closed["device"] = "no TPU found"
        expected.add("device")
    return closed, expected


def _run_pytest(
    options: argparse.Namespace, tiers: Sequence[str], extra: Sequence[str], closed: dict[str, str]
) -> tuple[Any, str | None, str]:
    """Run the checks: the plugin with the results, trouble of the suite itself, pytest's words."""
    try:
        import pytest
    except ImportError as error:
        raise UnjudgedError(f"pytest cannot be imported: {error}") from error
    from smoke import pjrt, plugin

    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    targets = pjrt.targets(options.target)
    full = options.corpus == "full" or "full" in re.findall(r"\w+", options.marks or "")
    suite = plugin.Suite(targets, bool(options.target), closed, plugin.progress_stream(), full)
    arguments = [
        *(str(HERE / f"test_{tier}.py") for tier in tiers),
        "-c",
        os.devnull,
        f"--rootdir={HERE}",
        f"--confcutdir={HERE}",
        "-p",
        "no:cacheprovider",
        "--assert=plain",
        "--strict-markers",
        "-o",
        "junit_family=xunit2",
    ]
    if options.junit:
        arguments.append(f"--junit-xml={options.junit}")
    for option, value in (("-k", options.expression), ("-m", options.marks)):
        if value:
            arguments += [option, value]
    said, complaints = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complaints):
        code = pytest.main([*arguments, *extra], plugins=[suite])
    if suite.interrupted:
        raise KeyboardInterrupt
    trouble = None
    if code not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        # what is wrong with an expression, say, stands in a complaint, and else at the very end
        last = [line for line in complaints.getvalue().splitlines() if line.startswith("ERROR:")]
        last = last or [line for line in said.getvalue().splitlines() if line.strip(" =")]
        trouble = f"the suite itself failed: {' / '.join(last[-3:]) or code}"
    return suite, trouble, complaints.getvalue() + said.getvalue()


def _host() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }


def _image(here: place.Place) -> dict[str, Any] | None:
    try:
        return here.facts
    except (OSError, ValueError) as error:
        raise UnjudgedError(f"the image's own facts cannot be read: {error}") from error


def _need_temporary_folder() -> None:
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UnjudgedError(
            "no temporary folder can be written; give the container --tmpfs /tmp"
        ) from error


def _packages(here: place.Place) -> list[dict[str, str]]:
    with contextlib.suppress(AssertionError):
        return [
            {"name": one.name, "version": one.version} for one in installed.distributions(here.site)
        ]
    return []


def _why_not(name: str, suite: Any, options: argparse.Namespace) -> str:
    if name in suite.deselected:
        chosen = " and ".join(filter(None, (options.expression, options.marks)))
        return f"none of its checks matches {chosen or 'the selection'}"
    return "none of its checks was run"


def health(argv: Sequence[str]) -> int:
    """Run the health suite.

    Args:
        argv: Arguments of ``health``.

    Returns:
        The exit code.
    """
    words = list(argv)
    own = words.index("--") if "--" in words else len(words)
    options, extra = _parser().parse_args(words[:own]), words[own + 1 :]
    started, clock = datetime.now(UTC), time.monotonic()
    here = place.here()
    try:
        tiers = _tiers(options.tier)
        for target in options.target or ():
            if target != "all" and not _TARGET.fullmatch(target):
                raise UnjudgedError(f"{target!r} is not a topology; v6e:2x2 is one")
        earlier = _read_earlier(options.merge)
        image = _image(here)
        _need_temporary_folder()
        closed, expected = _closed(os.environ)
        suite, trouble, said = _run_pytest(options, tiers, extra, closed)
    except UnjudgedError as error:
        print(f"health: {error}", file=sys.stderr)
        return verdict.UNJUDGED
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    summed: dict[str, Any] = {}
    for name in verdict.TIERS:
        checks = [one for one in suite.results if one["tier"] == name]
        asked = name in tiers
        excused = (
            not asked
            or (name in expected and not (name == "simulate" and options.tier))
            or (not checks and name in suite.deselected)
        )
        why = closed.get(name) or _why_not(name, suite, options)
        summed[name] = verdict.tier(
            checks,
            why=why if asked else "it was not asked for",
            required=not excused,
            seconds=suite.seconds[name],
            peak_memory_bytes=peak,
        ) | {"asked": asked}
    code = verdict.judge(summed, suite.results, trouble)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "image": image,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - clock, 3),
        "host": _host(),
        "selection": " ".join(filter(None, (options.expression, options.marks, *extra))) or None,
        "trouble": trouble,
        "verdict": verdict.VERDICTS[code],
        "exit_code": code,
        "highest_tier": verdict.highest(summed),
        "tiers": summed,
        "checks": suite.results,
        "packages": _packages(here),
    }
    try:
        if earlier is not None:
            result = verdict.merge(earlier, result)
    except (ValueError, KeyError, TypeError) as error:
        print(f"health: {options.merge} cannot be merged: {error}", file=sys.stderr)
        result |= {"verdict": "unjudged", "exit_code": verdict.UNJUDGED}
    if extra or trouble:
        print(said, file=sys.stderr)
    return _deliver(options, result)


def _read_earlier(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        earlier = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnjudgedError(f"{path} cannot be read: {error}") from error
    if not isinstance(earlier, dict) or earlier.get("schema") != SCHEMA:
        raise UnjudgedError(f"{path} is not a {SCHEMA} document")
    return earlier


def _deliver(options: argparse.Namespace, result: dict[str, Any]) -> int:
    """Write the files that were asked for, and show the table."""
    code = int(result["exit_code"])
    show = sys.stderr if options.json == "-" else sys.stdout
    print_table(result, show)
    try:
        if options.html:
            from smoke import page

            output.write(Path(options.html), page.render(result))
        output.write_json(options.json, result)
    except OSError as error:
        print(f"health: a result cannot be written: {error}", file=sys.stderr)
        return verdict.UNJUDGED if code == verdict.HEALTHY else code
    return code


def print_table(result: Mapping[str, Any], stream: TextIO) -> None:
    """Show the checks and one verdict line per tier.

    Args:
        result: A ``health.json`` document.
        stream: Where to; colour only if it is a terminal and NO_COLOR is not set.
    """
    colour = stream.isatty() and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size((120, 24)).columns if stream.isatty() else 120

    def paint(text: str, status: str) -> str:
        return f"\x1b[{_COLOURS[status]}m{text}\x1b[0m" if colour else text

    names = max((len(one["id"]) for one in result["checks"]), default=10)
    for one in result["checks"]:
        warned = one["status"] == "failed" and one["severity"] == "warning"
        word = "warning" if warned else one["status"]
        memory = one["peak_memory_bytes"]
        head = f"{one['id']:<{names}}  {word:<7}  {one['seconds']:6.1f} s  "
        head += f"{memory / 1e6:5.0f} MB  " if memory else " " * 10
        indent = " " * len(head)
        detail = one["detail"]
        if one["status"] == "failed":
            detail += f"\nremedy: {one['remedy']}"
        lines = [
            part
            for line in detail.splitlines()
            for part in textwrap.wrap(line, max(30, width - len(head))) or [""]
        ]
        shown = paint(head, word) + ("\n" + indent).join(lines or [""])
        print(shown.rstrip(), file=stream)
    print(file=stream)
    for name in verdict.TIERS:
        one = result["tiers"][name]
        count = f"{one['passed']} passed"
        count += f", {one['failed']} failed" if one["failed"] else ""
        count += f", {one['not_run']} not run" if one["not_run"] else ""
        figures = f"{count}, {one['seconds']:.1f} s"
        if one["peak_memory_bytes"]:
            figures += f", {one['peak_memory_bytes'] / 1e6:.0f} MB"
        why = one["why"].splitlines()[0] if one["why"] else ""
        if one["status"] == "not run":
            line = f"{name:<9} {paint('not run', 'not run')}: {why}"
        else:
            line = f"{name:<9} {paint(one['status'], one['status'])}: {figures}"
            line += f"; {why}" if why else ""
        print(line, file=stream)
    if result["trouble"]:
        print(f"\n{result['trouble']}", file=stream)
    status = "passed" if result["exit_code"] == 0 else "failed"
    reached = result["highest_tier"] or "none"
    words = {
        verdict.HEALTHY: "healthy",
        verdict.UNHEALTHY: "unhealthy",
        verdict.UNJUDGED: "could not judge",
        verdict.DEVICE: "the TPU is busy or unusable",
    }[result["exit_code"]]
    print(f"\n{paint(words, status)} (highest tier passed: {reached})", file=stream, flush=True)


def catalogue() -> str:
    """All checks as a Markdown table, for ``docs/health.md``."""
    import pytest

    from smoke import plugin

    suite = plugin.Suite(("TARGET",), False, {}, None, full=True)
    found: list[Any] = []

    class Collector:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            found.extend(plugin.check_of(item) for item in session.items)

    files = [str(HERE / f"test_{tier}.py") for tier in verdict.TIERS]
    arguments = [*files, "-c", os.devnull, f"--rootdir={HERE}", f"--confcutdir={HERE}"]
    arguments += ["--collect-only", "-q", "-p", "no:cacheprovider"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(arguments, plugins=[suite, Collector()])
    if code != pytest.ExitCode.OK:
        raise UnjudgedError(f"the checks cannot be collected: {said.getvalue()}")
    lines = ["| check | what it proves | severity | when it fails |", "|---|---|---|---|"]
    lines += [
        f"| `{one.id}` | {one.purpose} | {one.severity} | {one.remedy} |".replace("@TARGET", "@…")
        for one in found
    ]
    return "\n".join(lines) + "\n"


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands.

    Args:
        argv: The command and its arguments; the process's own if not given.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # process 1 of a container gets no default action for TERM
    signal.signal(signal.SIGTERM, _interrupt)
    command, rest = (words[0], words[1:]) if words else ("", [])
    try:
        if command == "health" and rest[:1] == ["operators"]:
            from smoke.operators import run as operators

            return operators.main(rest[1:])
        if command == "health" and rest[:1] == ["model"]:
            from smoke import model

            return model.main(rest[1:])
        if command == "health":
            return health(rest)
        if command == "bench":
            from smoke.bench import run

            return int(run.main(rest))
        if command == "catalogue" and not rest:
            sys.stdout.write(catalogue())
            return 0
    except UnjudgedError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return verdict.UNJUDGED
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    print("usage: cli.py health|bench|catalogue [arguments]", file=sys.stderr)
    return verdict.UNJUDGED


if __name__ == "__main__":
    sys.exit(main())
