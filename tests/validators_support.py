"""The validators of formats that are not ours, apart from the tools: hash-locked, installed once.

``lock/validators-py311.txt`` names them; they are installed by the tools' pip into
``out/validators/``, and used in processes of their own.
"""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from pathlib import Path

from process_support import call
from tpuforge.paths import exclusive, out_dir, sha256_file

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "lock" / "validators-py311.txt"


@functools.lru_cache(maxsize=1)
def folder() -> Path:
    """Where they are; installed if they are not."""
    made = out_dir() / "validators" / sha256_file(LOCK)[:16]
    with exclusive("validators"):
        if made.is_dir():
            return made
        made.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=made.parent))
        words = ["install", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
        words += ["--no-compile", "--target", str(scratch / "site"), "--requirement", str(LOCK)]
        done = call([sys.executable, "-m", "pip", *words], timeout=600)
        assert done.returncode == 0, done.stderr
        (scratch / "site").rename(made)
        shutil.rmtree(scratch)
    return made


def run(code: str, data: str, *, timeout: float = 300) -> str:
    """Run a Python program that may import them.

    Args:
        code: The program.
        data: Its standard input.
        timeout: Its limit, in seconds.

    Returns:
        Its standard output.
    """
    start = f"import sys; sys.path.insert(0, {str(folder())!r})\n"
    done = call([sys.executable, "-I", "-c", start + code], input=data, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout
