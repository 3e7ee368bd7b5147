"""Print what this image is made of: the command ``versions``."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from pathlib import Path

FACTS = Path("/opt/tpuforge/image.json")


def rows() -> list[tuple[str, str]]:
    """Name and version of what matters, facts of the bake first."""
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    release = platform.freedesktop_os_release()
    return [
        ("image", f"{facts['image']} ({facts['flavour']})"),
        ("system", f"{release['PRETTY_NAME']}"),
        ("python", platform.python_version()),
        *((name, metadata.version(name)) for name in ("torch", "torch_tpu", "libtpu", "numpy")),
        *([("given wheel", facts["overlay"])] if "overlay" in facts else []),
        ("XLA commit", facts["xla_commit"]),
        ("lock", f"sha256:{facts['lock_sha256']}"),
    ]


def main() -> int:
    """Print the table, or the whole package list with ``--all``."""
    if sys.argv[1:] == ["--all"]:
        print(Path("/opt/tpuforge/packages.txt").read_text(encoding="utf-8"), end="")
        return 0
    if sys.argv[1:]:
        print("usage: versions [--all]", file=sys.stderr)
        return 2
    for name, version in rows():
        print(f"{name:<11} {version}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
