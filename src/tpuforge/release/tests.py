"""The ``tests`` verb: this project's own tests, in three rings, and one that has to be named.

``unit`` takes seconds and needs neither network nor engine, ``engine`` bakes and judges a real
image, ``faults`` kills, corrupts and starves. ``remote`` sets up real remote caches and executors;
it needs root and takes long, so it runs only where it is named.

The files of the rings run side by side, the tests of a file one after the other.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence

from tpuforge.console import print_error
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import ROOT
from tpuforge.process import heed_signals

RINGS = ("unit", "engine", "faults")
NAMED_ONLY = ("remote",)
_MOST_WORKERS = 4  # each may hold an image's files or a compiler's memory
_ONE_AT_A_TIME = ("-n", "--numprocesses", "-p", "-s", "--capture=no", "--pdb", "--trace", "--co")
_USAGE = f"""usage: ./forge tests [RING|PATH …] [PYTEST_OPTION …]

Rings: {", ".join(RINGS)}; all of them if none is named. Only if named: {", ".join(NAMED_ONLY)}.
Files run side by side, as many as there are cores, up to {_MOST_WORKERS}; -n 0 is one at a time.
Exit codes are pytest's: 0 all passed, 1 some failed, 2 to 5 the run itself failed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run pytest on the rings that are named.

    Args:
        argv: Rings or paths, then options of pytest; the three rings if none is named.

    Returns:
        0 for ``--help``, 2 for a ring or a path that is not there, 130 if Ctrl-C came before pytest
        could begin. Otherwise pytest takes the process over, so that its output, its signals and
        its exit code are its own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        print(_USAGE)
        return 0
    places = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    options = words[len(places) :]
    rings = RINGS + NAMED_ONLY
    tests = [f"tests/{place}" if place in rings else place for place in places or RINGS]
    absent = [place for place in tests if not (ROOT / place.partition("::")[0]).exists()]
    if absent:
        failure = ForgeError(
            f"there is no ring and no file {absent[0].removeprefix('tests/')}",
            expected=f"{', '.join(rings)}, or a path in this checkout",
            mend="./forge tests --help",
        )
        print_error("tests", failure)
        return failure.exit_code
    # the remote ring has one set of services for all its tests
    alone = any(word.startswith(_ONE_AT_A_TIME) for word in options) or "tests/remote" in tests
    workers = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
    spread = [] if alone or workers == 1 else ["-n", str(workers), "--dist", "loadfile"]
    os.chdir(ROOT)
    try:
        heed_signals()
    except KeyboardInterrupt:
        print("tests: interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *spread, *tests, *options])  # noqa: S606


if __name__ == "__main__":
    raise SystemExit(main())
