"""The peak memory of a program, apart from that of who starts it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

# Linux counts the memory of who starts a program among that program's own, and a long run of tests
# has grown large: so a small process starts it.
_MEASURED = """
import os, sys
pid = os.spawnv(os.P_NOWAIT, sys.argv[2], sys.argv[2:])
_, status, usage = os.wait4(pid, 0)
open(sys.argv[1], "w").write(str(usage.ru_maxrss))
sys.exit(os.waitstatus_to_exitcode(status))
"""


def run_measured(
    command: Sequence[str],
    folder: Path,
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdout: IO[str] | None = None,
) -> tuple[int, int]:
    """Run a program; its exit code, and its peak memory in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    peak = folder / "peak"
    words = [sys.executable, "-c", _MEASURED, str(peak), *command]
    done = subprocess.run(words, env=env, cwd=cwd, stdout=stdout, check=False)
    return done.returncode, int(peak.read_text()) * 1024
