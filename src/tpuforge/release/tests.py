"""The ``tests`` verb: this project's own tests, in three rings.

``unit`` takes seconds and needs neither network nor engine, ``engine`` bakes and judges a real
image, ``faults`` kills, corrupts and starves.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence

from tpuforge.paths import ROOT

RINGS = ("unit", "engine", "faults")
_USAGE = f"""usage: forge tests [RING|PATH …] [PYTEST_OPTION …]

Rings: {", ".join(RINGS)}; all of them if none is named.
Exit codes are pytest's: 0 all passed, 1 some failed, 2 to 5 the run itself failed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run pytest on the rings that are named.

    Args:
        argv: Rings or paths, then options of pytest; all rings if none is named.

    Returns:
        0 for ``--help``. Otherwise pytest takes the process over, so that its output, its signals
        and its exit code are its own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        print(_USAGE)
        return 0
    places = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    options = words[len(places) :]
    tests = [f"tests/{place}" if place in RINGS else place for place in places or RINGS]
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *tests, *options])  # noqa: S606


if __name__ == "__main__":
    raise SystemExit(main())
