"""What a bake reads: the key of all its inputs, and the folders that BuildKit is given.

BuildKit decides by size and modification time whether to send a file again. So wheels are hard
links into the wheelhouse, verified by digest before each bake, and the small files are written
anew, with new times, each time.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.images.base import PRELOAD, UID, USER
from tpuforge.lockfile import Locked, read_lock
from tpuforge.paths import ROOT, out_dir, sha256_file, sha256_text, write_json
from tpuforge.pins import Pins, Suite

IMAGES = ROOT / "images"
SUITE = ROOT / "smoke"
FACTS_SCHEMA = "tpuforge.image-facts/1"
_CONSTRAINTS = "/opt/tpuforge/constraints.txt"
# packages with a layer of their own: large, and they change apart from the rest
_OWN_GROUP = ("libtpu", "torch", "torch-tpu")


@dataclass(frozen=True)
class Target:
    """One image to bake.

    Attributes:
        image: Its name in ``images/docker-bake.hcl``.
        python: ``X.Y``; empty for an image that is the same for every Python.
        flavour: The lock it is made from; empty for an image without wheels.
        name: Name and tag in the engine.
    """

    image: str
    python: str
    flavour: str
    name: str

    @property
    def slug(self) -> str:
        """Its folder name, such as ``runtime-py311`` or ``builder``."""
        return f"{self.image}-py{self.python.replace('.', '')}" if self.python else self.image

    @property
    def work(self) -> Path:
        """Where its bake works; safe to delete."""
        return out_dir() / "bake" / self.slug

    @property
    def finished(self) -> Path:
        """Where the finished image stands."""
        return out_dir() / "images" / self.slug

    @property
    def lock(self) -> Path:
        """The lock it is made from."""
        return _lock(self.flavour, self.python)


@dataclass(frozen=True)
class Inputs:
    """Everything that decides what an image is, apart from its base.

    Attributes:
        groups: Wheels by group; each group is a context, a stage and a layer.
        lock_sha256: Digest of the lock.
        suite_sha256: Digest of the health suite's names and bytes; empty without a suite.
        parts: What the key is made of, by name, to say what has changed.
    """

    groups: dict[str, list[Locked]]
    lock_sha256: str
    suite_sha256: str
    parts: dict[str, str]

    def key(self, base: str) -> str:
        """The hash of all inputs.

        Args:
            base: The base's manifest digest or reference.
        """
        return sha256_text(json.dumps(self.parts, sort_keys=True), base)

    def wheel(self, name: str) -> str:
        """The SHA-256 of a package's wheel.

        Args:
            name: Canonical name of a package of the lock.
        """
        return next(p.sha256 for group in self.groups.values() for p in group if p.name == name)


def image_name(image: str, python: str, pins: Pins) -> str:
    """The name and tag of an image.

    Args:
        image: Its name in the tree.
        python: ``X.Y``.
        pins: The pins.

    Returns:
        Such as ``tpuforge/runtime:0.2.0-torch2.13.0-py311``.
    """
    version = python.replace(".", "")
    return f"tpuforge/{image}:{pins.torch_tpu.version}-torch{pins.torch.version}-py{version}"


def base_set(target: Target, pins: Pins) -> Suite:
    """The Debian packages that an image stands on: a set of its own name, or the suite's own.

    Args:
        target: The image.
        pins: The pins.
    """
    suite = pins.suites[target.python or pins.default_python]
    return pins.debian.get(f"{suite}-{target.image}", pins.debian[suite])


def tree(root: Path) -> Iterator[Path]:
    """The files below a folder that belong to it, in order.

    Byte code, editor files and other hidden things come and go with use: they do not count.

    Args:
        root: The folder.

    Yields:
        Paths of files.
    """
    for path in sorted(root.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__" or path.suffix == ".pyc":
            continue
        if path.is_dir():
            yield from tree(path)
        else:
            yield path


def tree_digest(root: Path) -> str:
    """One digest of the names, executable bits and bytes of what belongs to a folder.

    Args:
        root: The folder.
    """
    parts: list[str] = []
    for path in tree(root):
        executable = "x" if path.stat().st_mode & 0o100 else "-"
        parts += [path.relative_to(root).as_posix(), executable, sha256_file(path)]
    return sha256_text(*parts)


def read_inputs(target: Target, pins: Pins) -> Inputs:
    """Read and hash everything that the image is made of.

    Args:
        target: The image.
        pins: The pins.

    Returns:
        The inputs; the wheels are named here and verified by :func:`prepare`.

    Raises:
        ForgeError: If a lock is missing or bad, or lacks what an image needs.
    """
    packages = read_lock(target.lock)
    smoke = read_lock(_lock("smoke", target.python))
    tools = _lock("tools", target.python)
    groups: dict[str, list[Locked]] = {name: [] for name in (*_OWN_GROUP, "rest")}
    for package in packages:
        groups[package.name if package.name in _OWN_GROUP else "rest"].append(package)
    groups["pip"] = [package for package in read_lock(tools) if package.name == "pip"]
    groups["smoke"] = smoke
    for name, group in groups.items():
        if not group:
            where = tools if name == "pip" else target.lock
            raise ForgeError(
                f"{where.name} has no package for the group {name}",
                expected="libtpu, torch, torch-tpu and what they need; pip in the tools' lock",
                mend="forge lock",
                exit_code=Exit.FAULT,
            )
    here = Path(__file__).parent
    lock_sha256, suite_sha256 = sha256_file(target.lock), tree_digest(SUITE)
    parts = {
        "the image's name": f"{target.name} {target.flavour}",
        "the lock": lock_sha256,
        "the suite's lock": _pinned(groups["smoke"]),
        "pip": _pinned(groups["pip"]),
        "the pins": " ".join(
            [
                *(str(pins.epoch), pins.torch_tpu.xla_commit, pins.suites[target.python]),
                *(pins.upstream.repository, pins.upstream.ref),
            ]
        ),
        "images/": tree_digest(IMAGES),
        "smoke/": suite_sha256,
        "the bake itself": sha256_text(*(sha256_file(here / f) for f in ("bake.py", "context.py"))),
    }
    return Inputs(groups, lock_sha256, suite_sha256, parts)


def flavours(python: str) -> list[str]:
    """The flavours that can be baked: those with a lock that holds torch_tpu.

    Args:
        python: ``X.Y``.
    """
    end = f"-py{python.replace('.', '')}.txt"
    return sorted(
        path.name.removesuffix(end)
        for path in (ROOT / "lock").glob(f"*{end}")
        if re.search(r"^torch-tpu==", path.read_text(encoding="utf-8"), re.MULTILINE)
    )


def _lock(flavour: str, python: str) -> Path:
    return ROOT / "lock" / f"{flavour}-py{python.replace('.', '')}.txt"


def _pinned(packages: Sequence[Locked]) -> str:
    return sha256_text(*(f"{p.name}=={p.version} {p.sha256}" for p in packages))


def facts(target: Target, inputs: Inputs, pins: Pins) -> dict[str, Any]:
    """What the suite in the image is told of it (``/opt/tpuforge/image.json``).

    Args:
        target: The image.
        inputs: What it is made of.
        pins: The pins.
    """
    versions = {p.name: p.version for group in inputs.groups.values() for p in group}
    return {
        "schema": FACTS_SCHEMA,
        "image": target.image,
        "python": target.python,
        "flavour": target.flavour,
        "lock_sha256": inputs.lock_sha256,
        "torch": versions["torch"],
        "torch_tpu": versions["torch-tpu"],
        "libtpu": versions["libtpu"],
        "xla_commit": pins.torch_tpu.xla_commit,
        "user": USER,
        "uid": UID,
        "preload": PRELOAD,
        "constraint": _CONSTRAINTS,
    }


def labels(target: Target, inputs: Inputs, pins: Pins) -> dict[str, str]:
    """What an image with wheels says of itself, beside what the tree says.

    Args:
        target: The image.
        inputs: What it is made of.
        pins: The pins.
    """
    versions = {p.name: p.version for group in inputs.groups.values() for p in group}
    return {
        "io.tpuforge.lock.sha256": inputs.lock_sha256,
        "io.tpuforge.suite.sha256": inputs.suite_sha256,
        "io.tpuforge.base.suite": pins.suites[target.python],
        "io.tpuforge.torch.version": versions["torch"],
        "io.tpuforge.torch.wheel.sha256": inputs.wheel("torch"),
        "io.tpuforge.torch-tpu.version": versions["torch-tpu"],
        "io.tpuforge.torch-tpu.wheel.sha256": inputs.wheel("torch-tpu"),
        "io.tpuforge.torch-tpu.source": f"{pins.upstream.repository}@{pins.upstream.ref}",
        "io.tpuforge.libtpu.version": versions["libtpu"],
        "io.tpuforge.libtpu.wheel.sha256": inputs.wheel("libtpu"),
        "io.tpuforge.xla.commit": pins.torch_tpu.xla_commit,
    }


def prepare(target: Target, inputs: Inputs, pins: Pins, progress: Progress) -> None:
    """Fill the folders that BuildKit reads; every wheel is verified by digest here.

    Args:
        target: The image.
        inputs: What it is made of.
        pins: The pins.
        progress: Told what happens.

    Raises:
        ForgeError: If a wheel is missing (exit code 2) or has another digest (exit code 1).
    """
    found = {
        package: _wheel(package) for group in inputs.groups.values() for package in sorted(group)
    }
    total = sum(path.stat().st_size for path in found.values())
    with progress.step(f"verifying {len(found)} wheels", total):
        for package, path in found.items():
            digest = sha256_file(path, progress.advance)
            if digest != package.sha256:
                raise ForgeError(
                    f"{path.name}: its SHA-256 is {digest}",
                    expected=f"{package.sha256}, as the lock says",
                    mend="forge fetch_wheel replaces it; then forge bake",
                    exit_code=Exit.FAULT,
                )
    for name, group in inputs.groups.items():
        _fill_group(target.work / "wheels" / name, {p: found[p] for p in group})
    _fill_facts(target, inputs, pins)
    suite = target.work / "suite"
    shutil.rmtree(suite, ignore_errors=True)
    for path in tree(SUITE):
        copy = suite / path.relative_to(SUITE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        copy.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    if tree_digest(suite) != inputs.suite_sha256:
        raise ForgeError(
            "smoke/ was edited while the bake began",
            expected="one state of the suite",
            mend="forge bake, once more",
        )


def _wheel(package: Locked) -> Path:
    folder = out_dir() / "wheelhouse" / package.sha256
    files = list(folder.glob("*.whl"))
    if len(files) != 1:
        raise ForgeError(
            f"the wheel of {package.name} {package.version} is not in the wheelhouse",
            expected=f"one wheel in {folder}",
            mend="forge fetch_wheel",
        )
    return files[0]


def _fill_group(folder: Path, wheels: dict[Locked, Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{p.name}=={p.version} --hash=sha256:{p.sha256}\n" for p in sorted(wheels)]
    wanted = {path.name: path for path in wheels.values()}
    for old in folder.iterdir():
        if old.name not in wanted or not old.samefile(wanted[old.name]):
            old.unlink()
    for name, path in wanted.items():
        if not (folder / name).exists():
            _link(path, folder / name)
    (folder / "requirements.txt").write_text("".join(lines), encoding="utf-8")


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:
        # some file systems have no hard links
        shutil.copy2(source, target)


def _fill_facts(target: Target, inputs: Inputs, pins: Pins) -> None:
    folder = target.work / "facts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "image.json", facts(target, inputs, pins))
    shutil.copyfile(target.lock, folder / "lock.txt")
    torch = next(p for p in inputs.groups["torch"] if p.name == "torch")
    (folder / "constraints.txt").write_text(
        "# The CPU build of torch, for ever: the main index serves a CUDA build of this number.\n"
        f"torch=={torch.version}\n",
        encoding="utf-8",
    )


def run_line(name: str) -> str:
    """The line that runs an image on a TPU VM.

    ``--privileged`` lets the container at the chips (``/dev/accel*``, ``/dev/vfio``) and the
    metadata of the PCI bus; libtpu locks host memory for transfers, asks the metadata server and
    its peers over the host's network; workers of a DataLoader share tensors in ``/dev/shm``;
    ``--init`` because libtpu can wait for minutes and PID 1 ignores TERM.

    Args:
        name: Name and tag.
    """
    words = ["docker", "run", "--rm", "-it", "--init", "--privileged", "--net=host"]
    return shlex.join([*words, "--ulimit", "memlock=-1", "--shm-size=16g", name, "python"])


def touch_wheels(target: Target) -> None:
    """Give every wheel a new time, so that BuildKit sends it again.

    Args:
        target: The image.
    """
    for path in (target.work / "wheels").rglob("*.whl"):
        os.utime(path)
