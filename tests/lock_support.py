"""What the tests of the lock stage share: a checkout of their own and a package index on loopback.

A verb reads ``lock/`` beside its own ``src/``, so a test gives it a checkout whose ``lock/`` holds
the real pins and the real locked tools, and inputs that the loopback index can answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from server_support import Handler, serving

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "lock"
PAST = "2026-01-01T00:00:00Z"
FUTURE = "2026-11-30T00:00:01Z"
"""Just after the cutoff in the pins."""


def wheel_bytes(name: str, version: str, tag: str, requires: tuple[str, ...] = ()) -> bytes:
    """A real, tiny wheel: the same bytes for the same arguments."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    for extra in re.findall(r"extra == '(\w+)'", metadata):
        metadata += f"Provides-Extra: {extra}\n"
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for file, text in {
            "METADATA": metadata,
            "WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n",
            "RECORD": "",
        }.items():
            archive.writestr(zipfile.ZipInfo(f"{info}/{file}"), text)
    return out.getvalue()


@dataclass
class Index:
    """A package index on loopback, in the JSON form of the simple repository API."""

    upload_times: bool = True
    digests: bool = True
    pages: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)
    """While set, files are not answered."""
    url: str = ""

    def add(
        self,
        name: str,
        version: str,
        tag: str = "py3-none-any",
        *,
        requires: tuple[str, ...] = (),
        uploaded: str = PAST,
        yanked: bool = False,
        mark: str = "",
    ) -> str:
        """Offer a file; its SHA-256. ``mark`` makes another file of the same name."""
        data = wheel_bytes(name, version, tag, (*requires, *([mark] if mark else [])))
        file = f"{name.replace('-', '_')}-{version}-{tag}.whl"
        digest = hashlib.sha256(data).hexdigest()
        entry: dict[str, Any] = {"filename": file, "url": f"/files/{file}", "yanked": yanked}
        entry["hashes"] = {"sha256": digest} if self.digests else {}
        if self.upload_times:
            entry["upload-time"] = uploaded
        self.pages.setdefault(name, []).append(entry)
        self.files[file] = data
        return digest

    def __enter__(self) -> Index:
        index = self

        class Serves(Handler):
            def do_GET(self) -> None:
                index.asked.append(self.path)
                parts = unquote(self.path).strip("/").split("/")
                if parts[0] == "simple" and parts[1] in index.pages:
                    page = {
                        "meta": {"api-version": "1.1"},
                        "name": parts[1],
                        "versions": [],
                        "files": index.pages[parts[1]],
                    }
                    kind = "application/vnd.pypi.simple.v1+json"
                    self.answer(200, json.dumps(page).encode(), kind)
                    return
                while parts[0] == "files" and index.hold.is_set():
                    time.sleep(0.05)
                if parts[0] == "files" and parts[1] in index.files:
                    self.answer(200, index.files[parts[1]], "application/octet-stream")
                else:
                    self.answer(404, b"<html>no such page</html>", "text/html")

            def do_HEAD(self) -> None:
                self.do_GET()  # uv asks for a file's head before it reads its metadata

        self._serving = serving(Serves)
        self.url = f"http://127.0.0.1:{self._serving.__enter__()}/simple"
        return self

    def __exit__(self, *_: object) -> None:
        self._serving.__exit__(None, None, None)


def good_index(**how: Any) -> Index:
    """An index that holds a small closure of the pinned releases, and what must not be taken."""
    index = Index(**how)
    for platform in ("manylinux_2_31_x86_64", "manylinux_2_31_aarch64"):
        index.add("libtpu", "0.0.52", f"cp311-cp311-{platform}")
        needs = ("torch>=2.11.0", "libtpu>=0.0.50", "alpha", "winonly; sys_platform == 'win32'")
        index.add("torch-tpu", "0.2.0", f"cp311-cp311-{platform}", requires=needs)
    index.add("libtpu", "0.0.53", "cp311-cp311-manylinux_2_31_x86_64")
    for tag in (
        "cp311-cp311-win_amd64",
        "cp311-cp311-manylinux_2_17_x86_64",
        "cp311-cp311-manylinux_2_28_x86_64",
        "cp311-cp311-manylinux_2_34_x86_64",
        "cp312-cp312-manylinux_2_28_x86_64",
        "py3-none-any",
    ):
        index.add("alpha", "1.0", tag)
    index.add("alpha", "1.1", yanked=True)
    index.add("alpha", "1.2", uploaded=FUTURE)
    index.add("filelock", "3.0")
    index.add("winonly", "1.0")
    # what an index carries under torch's number is a CUDA build
    index.add("torch", "2.13.0", "cp311-cp311-manylinux_2_28_x86_64", requires=("nvidia-nccl",))
    return index


@dataclass
class Checkout:
    """A checkout of a test's own."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def runtime(self) -> Path:
        return self.lock / "runtime-py311.txt"

    def start(self, verb: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """Start a verb as a user would."""
        return self._started([sys.executable, "-m", f"tpuforge.lock.{verb}", *arguments], env)

    def run(self, verb: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a verb to its end."""
        return self._ended([sys.executable, "-m", f"tpuforge.lock.{verb}", *arguments], env)

    def _started(self, words: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """A program, with nothing of this machine's pip configuration."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
        clean |= {
            "PYTHONPATH": str(self.root / "src"),
            "TPUFORGE_OUT": str(self.root / "out"),
            "PIP_CONFIG_FILE": os.devnull,
            "COLUMNS": "500",
        }
        return subprocess.Popen(
            words,
            env={**clean, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _ended(
        self, words: Sequence[str], env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        child = self._started(words, env)
        try:
            out, errors = child.communicate(timeout=180)
        finally:
            child.kill()
        return subprocess.CompletedProcess(child.args, child.returncode, out, errors)

    def run_each(self, verb: str, *lines: Sequence[str], **env: str) -> list[tuple[int, str, str]]:
        """Run a verb once for each line, all in one process; exit code, output and errors."""
        done = self._ended([sys.executable, "-c", _EACH, verb, json.dumps(lines)], env)
        assert done.returncode == 0, done.stderr
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


# most of a start is imports
_EACH = """
import contextlib, importlib, io, json, sys
verb = importlib.import_module("tpuforge.lock." + sys.argv[1])
for words in json.loads(sys.argv[2]):
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = int(verb.main(words))
    print(json.dumps([code, out.getvalue(), errors.getvalue()]))
"""


def checkout(folder: Path, *, small: bool) -> Checkout:
    """Make a checkout: with the real locks, or with inputs that :func:`good_index` answers."""
    made = Checkout(folder / "Zoë's check out")
    shutil.copytree(ROOT / "src", made.root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    made.lock.mkdir()
    for path in LOCK.iterdir():
        # the tools that resolve stay the real, locked ones of the environment that runs the tests
        kept = path.suffix not in (".txt", ".in", ".json") or path.name.startswith("tools")
        if path.is_file() and (kept or not small):
            shutil.copy(path, made.lock)
    if small:
        (made.lock / "runtime.in").write_text("libtpu\ntorch\ntorch-tpu\n", encoding="utf-8")
        (made.lock / "torch-cpu.metadata").write_text(
            "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\nRequires-Dist: filelock\n",
            encoding="utf-8",
        )
    return made


def copy_of(made: Checkout, folder: Path) -> Checkout:
    """A copy of a checkout, with its locks and what its runs left in ``out/``."""
    copy = Checkout(folder / made.root.name)
    shutil.copytree(made.root, copy.root)
    return copy
