"""Install one group of wheels, the same bytes every time. Runs inside the bake, as one layer.

``/mnt/wheels`` holds the group's wheels and ``requirements.txt`` (pins with hashes, a part of the
lock); ``/mnt/uv`` installs them. /mnt is gone afterwards; what is written elsewhere is the layer.

Byte code is hash-based and unchecked: byte code with times is stale as soon as a layer's times
are set, and stale byte code makes every import compile again.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import cache_from_source
from pathlib import Path

WHEELS, UV = Path("/mnt/wheels"), Path("/mnt/uv")
TOP = Path("/opt")
# beside what is installed, since uv links the files from there
CACHE = TOP / ".uv"
# uv notes the time of the wheel's file here, which no two machines share
NOTE = "uv_cache.json"
# nothing imports the tests that packages ship; their byte code would be a quarter of it all
WITHOUT = re.compile(r"/tests?/")
# processes that compile a large group, and modules that are worth one; not the number of cores,
# which must not show in the bytes
PARTS, SMALL = 4, 200


def install(site: Path, target: str | None) -> list[Path]:
    """Let uv install what the requirements name, checked against their hashes.

    Args:
        site: The folder that the packages go to.
        target: The same, if it is not that of the environment that runs this script.

    Returns:
        Every file that was installed.
    """
    before = set(site.glob("*.dist-info"))
    top = Path(target or sys.prefix)
    # the frame, and the commands of the layers below
    held = {path for folder in (top, top / "bin") if folder.is_dir() for path in folder.iterdir()}
    asked = (WHEELS / "requirements.txt").read_text("utf-8").splitlines()
    command = [str(UV), "pip", "install", "--python", sys.executable, "--cache-dir", str(CACHE)]
    command += ["--target", target] if target else []
    command += ["--no-config", "--offline", "--no-index", "--find-links", str(WHEELS)]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--link-mode", "hardlink", "--requirement", str(WHEELS / "requirements.txt")]
    if subprocess.run(command, check=False).returncode:
        digests = {line.rpartition(":")[2] for line in asked}
        for wheel in sorted(WHEELS.glob("*.whl")):
            with wheel.open("rb") as data:
                digest = hashlib.file_digest(data, "sha256").hexdigest()
            if digest not in digests:
                raise SystemExit(f"{wheel.name} holds other bytes than the lock names")
        raise SystemExit("uv failed, and every wheel holds the bytes that the lock names")
    shutil.rmtree(CACHE)
    (top / ".lock").unlink(missing_ok=True)
    new = sorted(set(site.glob("*.dist-info")) - before)
    if len(new) != len(asked):
        raise SystemExit(f"{len(new)} of {len(asked)} packages came: a lower layer has the others")
    files: list[Path] = []
    for info in new:
        (info / NOTE).unlink(missing_ok=True)
        record = info / "RECORD"
        # a name may hold what str.splitlines takes for the end of a line
        with record.open(encoding="utf-8", newline="") as file:
            lines = sorted(line for line in file if not line.startswith(f"{info.name}/{NOTE},"))
        record.write_text("".join(lines), "utf-8", newline="")
        own = [Path(os.path.normpath(site / row[0])) for row in csv.reader(lines)]
        if taken := sorted(held.intersection(own)):
            raise SystemExit(f"{info.name} writes over what is there: {taken[0]}")
        files += own
    return files


def compile_all(sources: list[Path]) -> list[Path]:
    """Write byte code; name modules that are not of this Python's syntax.

    What a process has compiled before, and has imported, shows in the bytes: marshal writes a
    string that is held elsewhere in another way. So each process gets a part of the modules that
    depends on their names alone, and nothing else; and it does without ``site``, which would
    import what a ``.pth`` file of a layer below asks for.

    Args:
        sources: The modules.

    Returns:
        The files that were written.
    """
    count = min(PARTS, 1 + len(sources) // SMALL)
    command = [sys.executable, "-I", "-S", "-B", "-m", "compileall", "-qq", "-i", "-"]
    command += ["--invalidation-mode", "unchecked-hash"]

    def one(part: list[Path]) -> None:
        # its exit code tells of any module that is not of this syntax; they are looked at below
        subprocess.run(command, input="\n".join(map(str, part)), text=True, check=False)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(one, (sources[start::count] for start in range(count))))
    made = []
    for source in sources:
        path = Path(cache_from_source(str(source)))
        if path.exists():
            made.append(path)
            continue
        try:
            compile(source.read_bytes(), str(source), "exec")
        except (SyntaxError, ValueError) as error:
            print(f"no byte code for {source}: {error}")
            continue
        except Exception as error:
            # such as a lack of memory, which another machine need not have
            raise SystemExit(f"{source} cannot be compiled: {error!r}") from error
        raise SystemExit(f"{source}: the byte code could not be written")
    return made


def set_times(files: list[Path]) -> None:
    """Give files, and the folders that they are in, the one time of the image.

    Args:
        files: The files.
    """
    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    folders = {folder for path in files for folder in path.parents if folder.is_relative_to(TOP)}
    for path in (*files, *folders):
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def main() -> None:
    """Install, compile, set times."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--target")
    target = arguments.parse_args().target
    site = Path(target or sysconfig.get_path("purelib"))
    files = install(site, target)
    # not commands, which no process imports
    code = [path for path in files if path.suffix == ".py" and path.is_relative_to(site)]
    modules = [path for path in code if not WITHOUT.search(str(path))]
    set_times(files + compile_all(sorted(modules)))


if __name__ == "__main__":
    main()
