"""What tests of the bake share: the engine and the image, had through the real verbs; a small lock.

The first use this checkout's own ``out`` folder, so what is already there is not made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from process_support import call, wait_for
from tpuforge.images import context
from tpuforge.images.reproduce import differences
from tpuforge.lockfile import read_lock
from tpuforge.paths import out_dir

ROOT = Path(__file__).resolve().parents[1]
HARDENED = (
    "--network=none",
    "--read-only",
    "--tmpfs=/tmp",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
)
"""With what options a container may do the least, and an image has to work all the same."""


def verb(
    module: str, *arguments: str, timeout: float = 1800, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a verb as a user would, as a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
    return call([sys.executable, "-m", module, *arguments], env=env, timeout=timeout)


def result(module: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """Run a verb that must succeed; its data."""
    done = verb(module, *arguments, "--json", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    data: dict[str, Any] = json.loads(done.stdout)["data"]
    return data


@dataclass(frozen=True)
class Engine:
    """An engine, and how to call its client."""

    docker: str
    env: dict[str, str]
    record: dict[str, Any]

    def run(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a docker command."""
        return call([self.docker, *words], env={**os.environ, **self.env}, timeout=timeout)


@dataclass(frozen=True)
class Image:
    """A finished image in an engine."""

    engine: Engine
    record: dict[str, Any]
    out: Path

    @property
    def slug(self) -> str:
        """The name of its folder."""
        return f"{self.record['image']}-py{self.record['python'].replace('.', '')}"

    @property
    def inputs(self) -> dict[str, str]:
        """What its key was made of when the session began to use it."""
        return dict(self.record["inputs"])

    @property
    def layout(self) -> Path:
        """Its OCI layout."""
        return self.out / "images" / self.slug / "oci"

    @property
    def name(self) -> str:
        """Its name and tag."""
        return str(self.record["name"])

    def run(
        self, *command: str, options: Sequence[str] = ("--network=none",), timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container of its own."""
        words = ["run", "--rm", "--init", *options, self.name, *command]
        return self.engine.run(*words, timeout=timeout)


def link(source: Path, target: Path) -> None:
    """A hard link, or a copy where there can be none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)


def private_out(folder: Path, out: Path, *parts: str) -> Path:
    """An out folder with parts of another one, by links: what a bake needs, if none are named."""
    for part in parts or ("wheelhouse", "debs", "base"):
        for path in [out / part, *(out / part).rglob("*")]:
            target = folder / path.relative_to(out)
            if path.is_symlink():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(path.readlink())
            # a log is written in place: its other name would change with it
            elif path.is_file() and ".partial" not in path.parts and path.suffix != ".log":
                link(path, target)
    return folder


def simulator_wheels(out: Path) -> Path:
    """An out folder with the simulator's two wheels from the real wheelhouse, and nothing else."""
    for pin in read_lock(ROOT / "lock" / "simulator-py311.txt"):
        for wheel in (out_dir() / "wheelhouse" / pin.sha256).glob("*.whl"):
            target = out / "wheelhouse" / pin.sha256 / wheel.name
            target.parent.mkdir(parents=True)
            target.symlink_to(wheel)
    return out


def start_bake(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Begin a bake as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tpuforge.images.bake", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_install(out: Path, image: Image) -> None:
    """Wait until a bake has come to its wheels."""
    log = out / "bake" / image.slug / "bake.log"
    wait_for(lambda: log.exists() and "install_wheels.py" in log.read_text(errors="replace"), 300)


def agree(out: Path, image: Image) -> None:
    """Prove that an out folder holds the same image as the real one, or say what differs."""
    made = json.loads((out / "images" / image.slug / "image.json").read_text())
    assert made["inputs"] == image.inputs, "an input was edited while this test ran"
    found = list(differences(out / "images" / image.slug / "oci", image.layout))
    assert made["manifest_digest"] == image.record["manifest_digest"], found[:10]


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The engine that the verbs use; set up if there is none."""
    record = result("tpuforge.images.engine")
    return Engine(record["docker"], record["env"], record)


@pytest.fixture(scope="session")
def image(engine: Engine) -> Image:
    """The default image, baked if it is not there."""
    result("tpuforge.build.wheelhouse")
    record = result("tpuforge.images.bake")
    return Image(engine, record, Path(os.environ.get("TPUFORGE_OUT") or ROOT / "out"))


def lock(folder: Path, name: str, packages: dict[str, bytes]) -> None:
    lines = []
    for package, data in packages.items():
        digest = hashlib.sha256(data).hexdigest()
        lines.append(f"{package} --hash=sha256:{digest}\n")
        wheel = folder / "out" / "wheelhouse" / digest / f"{package.replace('==', '-')}-any.whl"
        wheel.parent.mkdir(parents=True, exist_ok=True)
        wheel.write_bytes(data)
    path = folder / "lock" / f"{name}-py311.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines))


RUNTIME = {
    "libtpu==0.0.52": b"libtpu",
    "numpy==2.4.6": b"numpy",
    "torch==2.13.0+cpu": b"torch",
    "torch-tpu==0.2.0": b"torch-tpu",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkout of its own, and an out folder with its wheels."""
    lock(tmp_path, "runtime", RUNTIME)
    lock(tmp_path, "smoke", {"pytest==9.2.0": b"pytest"})
    lock(tmp_path, "tools", {"nox==1": b"nox", "pip==26.3": b"pip", "uv==0.13": b"uv"})
    for name in ("images/Dockerfile", "smoke/cli.py", "smoke/programs/add.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    shutil.copyfile(ROOT / "images" / "docker-bake.hcl", tmp_path / "images" / "docker-bake.hcl")
    monkeypatch.setattr(context, "ROOT", tmp_path)
    monkeypatch.setattr(context, "IMAGES", tmp_path / "images")
    monkeypatch.setattr(context, "SUITE", tmp_path / "smoke")
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "out"))
    return tmp_path
