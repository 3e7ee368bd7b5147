"""Prove that the groups together are one complete environment, and tell what is in it.

Runs inside the bake. ``/groups`` holds one folder per layer of packages, ``/facts`` what the bake
knows, laid out as in the image. What it gathers under /out is the one small layer that differs
between an image and its siblings.
"""

from __future__ import annotations

import csv
import filecmp
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

OUT = Path("/out")
GROUPS = Path("/groups")
FACTS = Path("/facts")
# one line "PACKAGE NAME" for each NAME that PACKAGE requires and that is left out on purpose
LEFT_OUT = FACTS / "left-out"
MISSING = re.compile(r"(?P<by>\S+) \S+ requires (?P<name>[^\s,]+), which is not installed\.")


def pip(*words: str) -> subprocess.CompletedProcess[str]:
    """Run pip over all groups, put side by side on the path."""
    sites = sorted(str(path) for path in GROUPS.glob("*/opt/venv/lib/python3.*/site-packages"))
    return subprocess.run(
        [sys.executable, "-m", "pip", "--isolated", *words],
        env={**os.environ, "PYTHONPATH": ":".join(sites), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )


def complete() -> None:
    """End the bake unless every requirement is met, or left out by name and on purpose."""
    done = pip("check")
    allowed = {tuple(line.split()) for line in LEFT_OUT.read_text("utf-8").splitlines()}
    bad = []
    for line in done.stdout.splitlines() if done.returncode else []:
        found = MISSING.fullmatch(line.strip())
        if found is not None and (found["by"], found["name"]) in allowed:
            print(f"left out on purpose: {line}")
        else:
            bad.append(line)
    if bad:
        print("\n".join(bad))
        raise SystemExit("the environment is not complete")


def apart() -> None:
    """End the bake if a file of one layer would hide another one of the same name."""
    seen: dict[str, str] = {}
    for group in sorted(GROUPS.iterdir()):
        start = len(f"{group}/")
        for folder, folders, files in os.walk(group):
            links = [name for name in folders if Path(folder, name).is_symlink()]
            for path in (f"{folder}/{name}" for name in (*files, *links)):
                other = seen.setdefault(path[start:], path)
                if other is not path and not filecmp.cmp(other, path, shallow=False):
                    raise SystemExit(f"two layers differ in /{path[start:]}: {other} and {path}")


def owned() -> None:
    """End the bake if two packages bring one file with different bytes: pip keeps the later one."""
    seen: dict[str, tuple[str, str]] = {}
    for record in sorted(GROUPS.glob("*/opt/venv/lib/python3.*/site-packages/*.dist-info/RECORD")):
        who = record.parent.name
        with record.open(encoding="utf-8", newline="") as file:
            for name, digest, *_ in csv.reader(file):
                other, its = seen.setdefault(os.path.normpath(name), (who, digest))
                if other != who and digest and its != digest:
                    raise SystemExit(f"two packages differ in {name}: {other} and {who}")


def gather(listed: subprocess.CompletedProcess[str]) -> None:
    """Gather the layer, with final modes and the one time of the image.

    Args:
        listed: What pip says is there.
    """
    listed.check_returncode()
    shutil.copytree(FACTS, OUT, ignore=shutil.ignore_patterns(LEFT_OUT.name))
    told = OUT / "opt" / "tpuforge"
    (told / "packages.txt").write_text(listed.stdout, encoding="utf-8")
    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    for path in sorted(OUT.rglob("*"), reverse=True):
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (epoch, epoch))
    os.utime(OUT, (epoch, epoch))


def main() -> None:
    """Check, then gather."""
    with ThreadPoolExecutor() as pool:
        # all layers wait for this, and pip is slow to start
        listed = pool.submit(pip, "list", "--format=freeze")
        complete()
        apart()
        owned()
        gather(listed.result())


if __name__ == "__main__":
    main()
