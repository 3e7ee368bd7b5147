"""What the tests of the base share: a checkout of their own, and a stand-in for mmdebstrap.

The verb reads ``lock/`` beside its own ``src/``, so a test that changes a lock gets a copy of both.
The stand-in installs nothing: it writes the tar that mmdebstrap would write, of a tiny root file
system, with dpkg's status of the packages that it was told to include.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

from process_support import call

SRC = Path(__file__).resolve().parents[1] / "src"
LOCK = SRC.parent / "lock" / "debian" / "bookworm.lock"
DEAD = "http://127.0.0.1:9/debian"

STAND_IN = """#!{python}
import io, shlex, sys, tarfile, time
options = [a for a in sys.argv[1:] if a.startswith("--")]
target = sys.argv[-2]
names = next(a for a in options if a.startswith("--include="))[10:].split(",")
hook = next(a for a in options if "=copy-in " in a)
index = open(shlex.split(hook)[1] + "/Packages").read()
versions = {{}}
for block in index.split("\\n\\n"):
    fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
    if fields:
        versions[fields["Package"]] = fields["Version"]
status = "\\n".join(
    f"Package: {{n}}\\nStatus: install ok installed\\nVersion: {{versions[n]}}\\n" for n in names
)
{extra}
files = {{
    "./etc/passwd": "root:*:0:0:root:/root:/bin/bash\\n",
    "./etc/group": "root:*:0:\\n",
    "./etc/hostname": "this-machine\\n",
    "./var/log/dpkg.log": str(time.time()),
    "./var/lib/dpkg/status": status,
    "./usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4": "ELF",
}}
with tarfile.open(target, "w") as tar:
    for name, text in files.items():
        entry = tarfile.TarInfo(name)
        entry.size = len(text.encode())
        entry.mtime = time.time()
        tar.addfile(entry, io.BytesIO(text.encode()))
{after}
"""


def checkout(folder: Path, *, lock: str | None = None, pins: str | None = None) -> Path:
    """A copy of the sources and of the locks, with another Debian lock or other pins if given."""
    shutil.copytree(SRC, folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "lock" / "debian").mkdir(parents=True)
    original = (SRC.parent / "lock" / "pins.toml").read_text(encoding="utf-8")
    (folder / "lock" / "pins.toml").write_text(pins or original, encoding="utf-8")
    for other in LOCK.parent.glob("*.lock"):
        shutil.copy(other, folder / "lock" / "debian")
    target = folder / "lock" / "debian" / LOCK.name
    target.write_text(lock or LOCK.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def stand_in(folder: Path, extra: str = "", after: str = "") -> Path:
    """A folder for PATH in which mmdebstrap is the stand-in.

    ``extra`` is Python inside it, before it writes its tar, and ``after`` is what follows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "mmdebstrap"
    program.write_text(
        STAND_IN.format(python=sys.executable, extra=extra, after=after), encoding="utf-8"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def environment(root: Path, out: Path, path: Path | None = None, **extra: str) -> dict[str, str]:
    """The environment of a verb from another checkout, with its own out folder."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TPUFORGE_", "DOCKER_"))}
    env |= {"PYTHONPATH": str(root / "src"), "TPUFORGE_OUT": str(out), "NO_COLOR": "1"}
    if path is not None:
        env["PATH"] = f"{path}:{env['PATH']}"
    return env | extra


def base(env: dict[str, str], *arguments: str, timeout: float = 300) -> tuple[int, str]:
    """Run the verb; its exit code and all it said."""
    done = call(
        [sys.executable, "-m", "tpuforge.images.base", *arguments], env=env, timeout=timeout
    )
    return done.returncode, done.stdout + done.stderr


def borrow_debs(real: Path, out: Path) -> None:
    """Hard-link the packages that the project has already fetched into another out folder."""
    for source in real.glob("debs/*/*.deb"):
        target = out / source.relative_to(real)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(source, target)
