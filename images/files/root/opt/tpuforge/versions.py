"""Print what this image is made of: the command ``versions``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

HOME = Path("/opt/tpuforge")
SCHEMA = "tpuforge.versions/1"
NAMED = ("torch", "torch-tpu", "libtpu", "numpy")
# both load a plugin, and a plugin that is unhappy ends its process
PJRT_LIMIT_S = 60


def packages() -> list[dict[str, str | None]]:
    """Every installed package, with the digest of the wheel that the lock names for it."""
    text = (HOME / "lock.txt").read_text(encoding="utf-8")
    locked = {
        (found[1], found[2]): found[3]
        for found in re.finditer(r"^(\S+?)==(\S+)[\s\\]+--hash=sha256:(\S+)", text, re.MULTILINE)
    }
    rows: list[dict[str, str | None]] = []
    for one in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        rows.append(
            {"name": name, "version": one.version, "sha256": locked.get((name, one.version))}
        )
    return sorted(rows, key=lambda row: str(row["name"]))


def measured(function: str) -> str | None:
    """What a function of the suite measures, in a process of its own.

    Args:
        function: Its name in ``smoke.pjrt``.

    Returns:
        A version, or None if that process failed.
    """
    lines = "import os; from smoke import pjrt; os.environ.update(pjrt.QUIET); "
    lines += f"print(pjrt.{function}()['version'])"
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-c", lines],
            env={**os.environ, "PYTHONPATH": str(HOME)},
            capture_output=True,
            text=True,
            timeout=PJRT_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    words = done.stdout.split()
    return words[-1] if done.returncode == 0 and words else None


def pjrt() -> dict[str, str | None]:
    """The PJRT API that libtpu offers, and the one that torch_tpu was built with.

    Returns:
        Two versions, such as ``0.112``; None for one that cannot be told.
    """
    # each loads hundreds of megabytes, so both at a time
    with ThreadPoolExecutor() as pool:
        plugin = pool.submit(measured, "measure_plugin")
        framework = pool.submit(measured, "measure_framework")
    return {"libtpu": plugin.result(), "torch_tpu": framework.result()}


def everything() -> dict[str, Any]:
    """What the image is made of, as a document."""
    return {
        "schema": SCHEMA,
        "image": json.loads((HOME / "image.json").read_text(encoding="utf-8")),
        "system": platform.freedesktop_os_release()["PRETTY_NAME"],
        "python": platform.python_version(),
        "pjrt_api": pjrt(),
        "packages": packages(),
    }


def table(told: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows for people: what matters, facts of the bake first.

    Args:
        told: What :func:`everything` found.
    """
    facts, pjrt_api = told["image"], told["pjrt_api"]
    installed = {row["name"]: row for row in told["packages"]}
    rows: list[tuple[str, ...]] = [
        ("image", f"{facts['image']} ({facts['flavour']})"),
        ("system", told["system"]),
        ("python", told["python"]),
    ]
    for name in NAMED:
        row = installed.get(name)
        if row is None:
            rows.append((name.replace("-", "_"), "not installed"))
        else:
            digest = f"sha256:{row['sha256']}" if row["sha256"] else "not of the lock"
            rows.append((name.replace("-", "_"), f"{row['version']:<11}", digest))
    words = [f"{name} {version or 'unknown'}" for name, version in pjrt_api.items()]
    rows.append(("PJRT API", ", ".join(words)))
    if "overlay" in facts:
        rows.append(("given wheel", facts["overlay"]))
    rows += [("XLA commit", facts["xla_commit"]), ("lock", f"sha256:{facts['lock_sha256']}")]
    return rows


def main() -> int:
    """Print the table, the whole list of packages, or everything as JSON."""
    arguments = argparse.ArgumentParser(
        prog="versions", description="What this image is made of.", allow_abbrev=False
    )
    form = arguments.add_mutually_exclusive_group()
    form.add_argument("--all", action="store_true", help="every package, as NAME==VERSION")
    form.add_argument("--json", action="store_true", help=f"everything, schema {SCHEMA}")
    options = arguments.parse_args()
    if options.all:
        print((HOME / "packages.txt").read_text(encoding="utf-8"), end="")
    elif options.json:
        print(json.dumps(everything(), indent=2, sort_keys=True))
    else:
        for name, *rest in table(everything()):
            print(f"{name:<11} {'  '.join(rest)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
