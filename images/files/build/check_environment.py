"""Prove that the packages together are one complete environment, and tell what is in it.

Runs inside the bake, above all wheels. ``/mnt/facts`` holds what the bake knows, laid out as in the
image. What it gathers under /out is the one small layer that differs between an image and its
siblings.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

OUT = Path("/out")
SITE = Path(sysconfig.get_path("purelib"))
# what only the health suite imports
APART = Path("/opt/tpuforge/site")
FACTS = Path("/mnt/facts")
# one line "PACKAGE NAME" for each NAME that PACKAGE requires and that is left out on purpose
LEFT_OUT = FACTS / "left-out"
MISSING = re.compile(r"(?P<by>\S+) \S+ requires (?P<name>[^\s,]+), which is not installed\.")


def pip(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the environment's own pip."""
    return subprocess.run(
        [sys.executable, "-I", "-B", "-m", "pip", "--isolated", *words],
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


def owned() -> None:
    """End the bake if two packages bring one file with different bytes: the later one stays."""
    seen: dict[str, tuple[str, str]] = {}
    for record in sorted(r for site in (SITE, APART) for r in site.glob("*.dist-info/RECORD")):
        who, site = record.parent.name, record.parents[1]
        with record.open(encoding="utf-8", newline="") as file:
            for name, digest, *_ in csv.reader(file):
                other, its = seen.setdefault(os.path.normpath(site / name), (who, digest))
                if other != who and (its != digest or not digest):
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
        owned()
        gather(listed.result())


if __name__ == "__main__":
    main()
