"""Install one group of wheels under /out, the same bytes every time. Runs inside the bake.

``/wheels`` holds the group's wheels and ``requirements.txt`` (pins with hashes, a part of the
lock); ``/opt/installer`` holds the pip that installs them, outside of what becomes a layer.

Byte code is hash-based and unchecked: byte code with times is stale as soon as a layer's times
are set, and stale byte code makes every import compile again.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import subprocess
import sys
from pathlib import Path
from py_compile import PycInvalidationMode

OUT = Path("/out")
# nothing imports the tests that packages ship; their byte code would be a quarter of it all
WITHOUT = re.compile(r"/tests?/")


def install(target: str | None) -> None:
    """Let pip install what the requirements name, checked against their hashes.

    Args:
        target: A folder of the image instead of the environment that runs this script.
    """
    where = ["--target", f"{OUT}{target}"] if target else ["--root", str(OUT)]
    command = [sys.executable, "-I", "-B", "/opt/installer/pip", "install", *where]
    command += ["--isolated", "--no-index", "--find-links", "/wheels", "--no-deps"]
    command += ["--require-hashes", "--only-binary", ":all:", "--no-compile", "--no-cache-dir"]
    command += ["--ignore-installed", "--no-warn-script-location", "--root-user-action", "ignore"]
    command += ["--disable-pip-version-check", "--requirement", "/wheels/requirements.txt"]
    subprocess.run(command, check=True)


def compile_all() -> None:
    """Write byte code, except for tests; name modules that are not of this Python's syntax."""
    whole = compileall.compile_dir(
        OUT,
        quiet=2,
        workers=0,
        rx=WITHOUT,
        stripdir=str(OUT),
        prependdir="/",
        invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
    )
    if whole:
        return
    for source in sorted(OUT.rglob("*.py")):
        made = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
        if made.exists() or WITHOUT.search(str(source)):
            continue
        try:
            compile(source.read_bytes(), str(source), "exec")
        except (SyntaxError, ValueError) as error:
            print(f"no byte code for {source.relative_to(OUT)}: {error}")
        else:
            raise SystemExit(f"{source}: the byte code could not be written")


def set_times() -> None:
    """Give everything the one time of the image."""
    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    for folder, folders, files in os.walk(OUT, topdown=False):
        for name in [*folders, *files]:
            os.utime(Path(folder) / name, (epoch, epoch), follow_symlinks=False)
    os.utime(OUT, (epoch, epoch))


def main() -> None:
    """Install, compile, set times."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--target")
    install(arguments.parse_args().target)
    compile_all()
    set_times()


if __name__ == "__main__":
    main()
