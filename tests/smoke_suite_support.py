"""Small installations for the tests of the health suite: packages, images, ELF files."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from elf_support import make_elf
from process_support import call

ROOT = Path(__file__).resolve().parents[1]
CLI = ROOT / "smoke" / "cli.py"
COMMIT = "82e6c3119a9463bfc27add150c8ae8b12c2ca405"
TORCH_VERSION = "__version__ = '2.13.0+cpu'\ncuda: str | None = None\n"


def package(
    site: Path,
    name: str,
    version: str,
    files: dict[str, bytes] | None = None,
    requires: tuple[str, ...] = (),
) -> Path:
    """Install a package: its files, METADATA and a RECORD that holds. Gives its .dist-info."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}\nText\n".encode()
    rows = []
    for path, data in {f"{info.name}/METADATA": metadata, **(files or {})}.items():
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}")
    rows.append(f"{info.name}/RECORD,,")
    (info / "RECORD").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return info


def torch(site: Path, version: str = "2.13.0+cpu", source: str = TORCH_VERSION) -> Path:
    """Install a torch that is nothing but its version."""
    files = {"torch/__init__.py": b"", "torch/version.py": source.encode()}
    return package(site, "torch", version, files)


def torch_tpu(site: Path) -> Path:
    """Install a torch_tpu that is nothing but its XLA commit and an empty XLA."""
    files = {
        "torch_tpu/__init__.py": b"",
        "torch_tpu/include/XLA_COMMIT": f"{COMMIT}\n".encode(),
        "torch_tpu/csrc/common/libxla_base.so": elf(("libc.so.6",)),
    }
    return package(site, "torch-tpu", "0.2.0", files)


def image_home(home: Path, lock: str, **facts: Any) -> dict[str, Any]:
    """Write lock.txt, constraints.txt and image.json; give the facts."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "lock.txt").write_text(lock, encoding="utf-8")
    (home / "constraints.txt").write_text("torch==2.13.0+cpu\n", encoding="utf-8")
    written = {
        "schema": "tpuforge.image-facts/1",
        "image": "runtime",
        "python": "3.11",
        "flavour": "runtime",
        "lock_sha256": hashlib.sha256(lock.encode()).hexdigest(),
        "torch": "2.13.0+cpu",
        "torch_tpu": "0.2.0",
        "libtpu": "0.0.52",
        "xla_commit": COMMIT,
        "user": "tpu",
        "uid": 1000,
        "preload": "/usr/lib/libtcmalloc_minimal.so.4",
        "constraint": "/opt/tpuforge/constraints.txt",
        **facts,
    }
    (home / "image.json").write_text(json.dumps(written), encoding="utf-8")
    return written


def lock_of(**pins: str) -> str:
    """A lock with these pins."""
    return "".join(
        f"{name.replace('_', '-')}=={version} \\\n    --hash=sha256:{'0' * 64}\n"
        for name, version in pins.items()
    )


def elf(
    needed: tuple[str, ...],
    runpath: str = "",
    wants: dict[str, tuple[str, ...]] | None = None,
    **more: Any,
) -> bytes:
    """A shared library without code."""
    return make_elf(needed=needed, runpath=runpath, wants=wants, **more)


class Environment:
    """An installation with an interpreter of its own, on which the commands really run."""

    def __init__(self, folder: Path) -> None:
        """Make a virtual environment with a healthy set of packages and an image's home."""
        self.folder = folder / "venv"
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", "--symlinks", self.folder],
            check=True,
            timeout=60,
        )
        self.site = next((self.folder / "lib").glob("python3*/site-packages"))
        self.home = folder / "home"
        torch(self.site)
        torch_tpu(self.site)
        package(self.site, "libtpu", "0.0.52", {"libtpu/__init__.py": b""})
        self.facts = image_home(
            self.home, lock_of(torch="2.13.0+cpu", torch_tpu="0.2.0", libtpu="0.0.52")
        )

    def run(
        self, *arguments: str, timeout: float = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the suite with this installation's interpreter."""
        tools = sysconfig.get_path("purelib")
        env = {name: value for name, value in os.environ.items() if not name.startswith("TPU")}
        env |= {"TPUFORGE_HOME": str(self.home), "PYTHONPATH": tools, **variables}
        return call([self.folder / "bin" / "python", CLI, *arguments], env=env, timeout=timeout)
