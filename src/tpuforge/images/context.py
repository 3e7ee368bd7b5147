"""What a bake reads: the key of all its inputs, and the folders that BuildKit is given.

BuildKit decides by size and modification time whether to send a file again. So wheels are hard
links into the wheelhouse, verified by digest before each bake, and the small files are written
anew, with new times, each time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.images import guard
from tpuforge.images.base import PRELOAD, UID, USER
from tpuforge.images.debian import lock_path, read_deb_lock
from tpuforge.images.overlay import NAME, Wheel, check_fit, overlaid, overlay_lock
from tpuforge.lockfile import Locked, read_lock
from tpuforge.paths import ROOT, out_dir, sha256_file, sha256_text, write_json
from tpuforge.pins import Pins, Suite
from tpuforge.tables import read

IMAGES = ROOT / "images"
SUITE = ROOT / "smoke"
FACTS_SCHEMA = "tpuforge.image-facts/1"
# packages with a layer of their own: large, and they change apart from the rest
_OWN_GROUP = ("libtpu", "torch", "torch-tpu")
# what the tools' lock names for the image: its pip, and what puts all wheels into it
_TOOLS = {"pip": "pip", "installer": "uv"}
MORE = "more"
"""The group of what a flavour has beside the packages of the one that it is on."""


@dataclass(frozen=True)
class Target:
    """One image to bake.

    Attributes:
        image: Its name in ``images/docker-bake.hcl``.
        python: ``X.Y``; empty for an image that is the same for every Python.
        flavour: The lock it is made from; empty for an image without wheels.
        name: Name and tag in the engine.
        wheel: The torch_tpu that was given in the place of the locked one.
    """

    image: str
    python: str
    flavour: str
    name: str
    wheel: Wheel | None = None

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
        groups: Wheels by group; each group is a context, a step and a layer, but for the one
            that installs the others and is no part of the image.
        lock_sha256: Digest of the lock; with a given wheel, of the overlay.
        suite_sha256: Digest of the health suite's names and bytes; empty without a suite.
        parts: What the key is made of, by name, to say what has changed.
        overlay: The lock of an image with a given wheel; empty without one.
        left_out: What the lock leaves out on purpose: who requires it, and its name.
    """

    groups: dict[str, list[Locked]]
    lock_sha256: str
    suite_sha256: str
    parts: dict[str, str]
    overlay: str = ""
    left_out: tuple[tuple[str, str], ...] = ()

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


def image_name(image: str, python: str, pins: Pins, wheel: Wheel | None = None) -> str:
    """The name and tag of an image.

    Args:
        image: Its name in the tree.
        python: ``X.Y``.
        pins: The pins.
        wheel: A torch_tpu that was given in the place of the locked one.

    Returns:
        Such as ``tpuforge/runtime:0.2.0-torch2.13.0-py311``; with a given wheel
        ``tpuforge/runtime:0.3.0.dev1-torch2.13.0-py311-wheel.0a1b2c3d``.
    """
    # a local version has a plus, which no tag may have
    own = wheel.version.replace("+", "_") if wheel is not None else pins.torch_tpu.version
    end = f"-{wheel.tag}" if wheel is not None else ""
    return f"tpuforge/{image}:{own}-torch{pins.torch.version}-py{python.replace('.', '')}{end}"


def base_set(target: Target, pins: Pins) -> Suite:
    """The Debian packages that an image stands on: a set of its own name, or the suite's own.

    Args:
        target: The image.
        pins: The pins.
    """
    suite = pins.suites[target.python or pins.default_python]
    return pins.debian.get(f"{suite}-{target.image}", pins.debian[suite])


def recipe_digest(dockerfile: str) -> str:
    """One digest of what ``images/`` has for an image: the tree, its Dockerfile, files to copy.

    The rest of that folder is no part of any image.

    Args:
        dockerfile: The name of its Dockerfile.
    """
    parts = [tree_digest(IMAGES / "files")] if (IMAGES / "files").is_dir() else []
    for name in ("docker-bake.hcl", dockerfile):
        path = IMAGES / name
        parts += [name, sha256_file(path)] if path.is_file() else []
    return sha256_text(*parts)


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
    lock_sha256, overlay = sha256_file(target.lock), ""
    wheel = target.wheel
    if wheel is not None:
        if NAME in (package.name for package in packages):
            check_fit(wheel, target.python, _glibc(target, pins), packages, target.lock.name)
            overlay = overlay_lock(wheel, packages, target.lock.name, lock_sha256)
            lock_sha256 = hashlib.sha256(overlay.encode()).hexdigest()
        packages = overlaid(wheel, packages)
    smoke = read_lock(_lock("smoke", target.python))
    tools = _lock("tools", target.python)
    below = _below(target, pins, packages)
    groups: dict[str, list[Locked]] = {name: [] for name in (*_OWN_GROUP, "rest")}
    more = []
    for package in packages:
        if package.name in _OWN_GROUP:
            groups[package.name].append(package)
        elif below is None or package.name in below:
            groups["rest"].append(package)
        else:
            more.append(package)
    if more:
        groups[MORE] = more
    for name, tool in _TOOLS.items():
        groups[name] = [package for package in read_lock(tools) if package.name == tool]
    groups["smoke"] = smoke
    for name, group in groups.items():
        if not group:
            where = tools if name in _TOOLS else target.lock
            raise ForgeError(
                f"{where.name} has no package for the group {name}",
                expected="libtpu, torch, torch-tpu and what they need; pip and uv among the tools",
                mend="./forge lock",
                exit_code=Exit.FAULT,
            )
    here = Path(__file__).parent
    suite_sha256 = tree_digest(SUITE)
    left_out = _left_out(target.flavour)
    code = ("bake.py", "context.py", "guard.py", "overlay.py")
    parts = {
        "the image's name": f"{target.name} {target.flavour}",
        "the lock": sha256_file(target.lock),
        "the lock below it": _pinned([one for one in packages if below and one.name in below]),
        "the names left out": " ".join(f"{by}:{name}" for by, name in left_out),
        "the wheel that was given": " ".join((wheel.file, wheel.sha256, wheel.audit))
        if wheel is not None
        else "",
        "the suite's lock": _pinned(groups["smoke"]),
        **{tool: _pinned(groups[name]) for name, tool in _TOOLS.items()},
        "the pins": " ".join(
            [
                *(str(pins.epoch), pins.torch_tpu.xla_commit, pins.suites[target.python]),
                *(pins.upstream.repository, pins.upstream.ref),
            ]
        ),
        "images/": recipe_digest("Dockerfile"),
        "smoke/": suite_sha256,
        "the bake itself": sha256_text(*(sha256_file(here / name) for name in code)),
    }
    return Inputs(groups, lock_sha256, suite_sha256, parts, overlay, left_out)


def _below(target: Target, pins: Pins, packages: Sequence[Locked]) -> set[str] | None:
    """The names of the flavour that this one is on, which it holds unchanged; None without one.

    Raises:
        ForgeError: If it holds one of them in another version or build; exit code 1.
    """
    flavour = pins.flavours.get(target.flavour)
    if flavour is None or not flavour.on:
        return None
    path = _lock(flavour.on, target.python)
    own = {one.name: one for one in packages}
    lower = read_lock(path)
    wrong = [
        one.name
        for one in lower
        # a given wheel takes the place of the locked one in any flavour
        if own.get(one.name) != one and not (target.wheel is not None and one.name == NAME)
    ]
    if wrong:
        raise ForgeError(
            f"{target.lock.name} does not hold {path.name} unchanged: {', '.join(wrong)}",
            expected=f"every package of {flavour.on}, in the same version and build",
            mend="./forge lock",
            exit_code=Exit.FAULT,
        )
    return {one.name for one in lower}


def _left_out(flavour: str) -> tuple[tuple[str, str], ...]:
    """What a flavour's lock leaves out on purpose, and until when: ``lock/names.toml``.

    Raises:
        ForgeError: If the last day of an entry is over, or the file is not of its form; exit
            code 1.
    """
    path = ROOT / "lock" / "names.toml"
    if not path.is_file():
        return ()
    found = []
    for entry in read(path, "docs/lock.md").tables("left_out"):
        if entry.text("flavour") != flavour:
            continue
        name, until = entry.text("name"), entry.day("until")
        if until < datetime.now(UTC).date():
            raise ForgeError(
                f"{name} was left out of {flavour} until {until}, and that is over",
                expected="a day to come, after somebody has looked again",
                mend=f"edit [[left_out]] in lock/{path.name}",
                exit_code=Exit.FAULT,
            )
        found.append((entry.text("by"), name))
    return tuple(found)


def _glibc(target: Target, pins: Pins) -> str:
    """The release of glibc in the base, such as ``2.36``, as its lock tells."""
    path = lock_path(base_set(target, pins).label)
    version = next((deb.version for deb in read_deb_lock(path).debs if deb.name == "libc6"), "")
    found = re.match(r"\d+\.\d+", version)
    if found is None:
        raise ForgeError(
            f"{path.name} does not tell which glibc the base has",
            expected="a package libc6, such as 2.36-9",
            mend=f"git checkout -- lock/debian/{path.name}",
            exit_code=Exit.FAULT,
        )
    return found[0]


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
    wheel = target.wheel
    given = {"overlay": f"{wheel.file}, sha256:{wheel.sha256}"} if wheel is not None else {}
    return {
        "schema": FACTS_SCHEMA,
        **given,
        "image": target.image,
        "python": target.python,
        "flavour": target.flavour,
        "lock_sha256": inputs.lock_sha256,
        "torch": versions["torch"],
        "torch_tpu": versions["torch-tpu"],
        "libtpu": versions["libtpu"],
        "xla_commit": _xla_commit(target, pins),
        "user": USER,
        "uid": UID,
        "preload": PRELOAD,
        "constraint": guard.CONSTRAINTS,
    }


def _xla_commit(target: Target, pins: Pins) -> str:
    return target.wheel.xla_commit if target.wheel is not None else pins.torch_tpu.xla_commit


def labels(target: Target, inputs: Inputs, pins: Pins) -> dict[str, str]:
    """What an image with wheels says of itself, beside what the tree says.

    Args:
        target: The image.
        inputs: What it is made of.
        pins: The pins.
    """
    versions = {p.name: p.version for group in inputs.groups.values() for p in group}
    source = f"{pins.upstream.repository}@{pins.upstream.ref}"
    given = {
        # of the software that the image packages, not of this checkout
        "org.opencontainers.image.source": pins.upstream.repository,
        "org.opencontainers.image.revision": pins.upstream.commit or pins.upstream.ref,
    }
    if target.wheel is not None:
        source = "a wheel that was given to the bake"
        given = {
            "io.tpuforge.overlay": f"{NAME}=={target.wheel.version}",
            "io.tpuforge.overlay.wheel": target.wheel.file,
            "io.tpuforge.overlay.wheel.sha256": target.wheel.sha256,
            "io.tpuforge.overlay.audit": target.wheel.audit or "no error",
        }
    return {
        **given,
        "io.tpuforge.lock.sha256": inputs.lock_sha256,
        "io.tpuforge.suite.sha256": inputs.suite_sha256,
        "io.tpuforge.base.suite": pins.suites[target.python],
        "io.tpuforge.torch.version": versions["torch"],
        "io.tpuforge.torch.wheel.sha256": inputs.wheel("torch"),
        "io.tpuforge.torch-tpu.version": versions["torch-tpu"],
        "io.tpuforge.torch-tpu.wheel.sha256": inputs.wheel("torch-tpu"),
        "io.tpuforge.torch-tpu.source": source,
        "io.tpuforge.libtpu.version": versions["libtpu"],
        "io.tpuforge.libtpu.wheel.sha256": inputs.wheel("libtpu"),
        "io.tpuforge.xla.commit": _xla_commit(target, pins),
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
    found = wheels(target, inputs) | _copy_given(target, progress)
    total = sum(path.stat().st_size for path in found.values())
    lock = {name: group for name, group in inputs.groups.items() if name not in (*_TOOLS, "smoke")}
    own = sum(len(group) for group in lock.values())
    more = len(found) - own - len(_TOOLS)
    what = f"{own} of the lock, {' and '.join(_TOOLS.values())}, {more} more of the health suite"
    with (
        progress.step(f"verifying {len(found)} wheels: {what}", total),
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        digests = pool.map(lambda path: sha256_file(path, progress.advance), found.values())
        for (package, path), digest in zip(found.items(), digests, strict=True):
            if digest != package.sha256:
                raise ForgeError(
                    f"{path.name}: its SHA-256 is {digest}",
                    expected=f"{package.sha256}, as the lock says",
                    mend="./forge fetch_wheel replaces it; then ./forge bake",
                    exit_code=Exit.FAULT,
                )
    for old in _folders(target.work / "wheels"):
        if old.name not in inputs.groups:
            shutil.rmtree(old)
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
            mend="./forge bake, once more",
        )


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _copy_given(target: Target, progress: Progress) -> dict[Locked, Path]:
    """A copy of the given wheel: its owner may write to the file while this goes on."""
    folder = target.work / "given"
    shutil.rmtree(folder, ignore_errors=True)
    wheel = target.wheel
    if wheel is None:
        return {}
    folder.mkdir(parents=True)
    copy = folder / wheel.file
    with progress.step(f"copying {wheel.file}"):
        shutil.copyfile(wheel.path, copy)
        digest = sha256_file(copy)
    if digest != wheel.sha256:
        raise ForgeError(
            f"{wheel.path} was changed while the bake began: its SHA-256 is {digest} now",
            expected=f"{wheel.sha256}, as a moment before",
            mend="wait until it is finished, then run the same command again",
        )
    return {wheel.locked: copy}


def wheels(target: Target, inputs: Inputs) -> dict[Locked, Path]:
    """Where the wheels of an image are; none of them is read.

    Args:
        target: The image.
        inputs: What it is made of.

    Returns:
        The path of each wheel in the wheelhouse; a given one is not there.

    Raises:
        ForgeError: If one is missing.
    """
    given = target.wheel.locked if target.wheel is not None else None
    found = {}
    for package in (one for group in inputs.groups.values() for one in sorted(group)):
        if package == given:
            continue
        folder = out_dir() / "wheelhouse" / package.sha256
        files = list(folder.glob("*.whl"))
        if len(files) != 1:
            words = f"--python {target.python} --flavour {target.flavour}"
            raise ForgeError(
                f"the wheel of {package.name} {package.version} is not in the wheelhouse",
                expected=f"one wheel in {folder}",
                mend=f"./forge fetch_wheel {words}",
            )
        found[package] = files[0]
    return found


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
    root = target.work / "facts"
    shutil.rmtree(root, ignore_errors=True)
    # laid out as in the image
    folder = root / "opt" / "tpuforge"
    folder.mkdir(parents=True)
    write_json(folder / "image.json", facts(target, inputs, pins))
    if inputs.overlay:
        (folder / "lock.txt").write_text(inputs.overlay, encoding="utf-8")
    else:
        shutil.copyfile(target.lock, folder / "lock.txt")
    torch = next(p for p in inputs.groups["torch"] if p.name == "torch")
    for name, text in guard.files(torch.version, pins).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    # read by the bake alone: what pip may miss
    lines = [f"{by} {name}\n" for by, name in inputs.left_out]
    (root / "left-out").write_text("".join(lines), encoding="utf-8")


def run_line(name: str) -> str:
    """The line that runs an image on a TPU VM.

    ``--privileged`` lets the container at the chips (``/dev/accel*``, ``/dev/vfio``) and the
    metadata of the PCI bus; libtpu locks host memory for transfers, asks the metadata server and
    its peers over the host's network; workers of a DataLoader share tensors in ``/dev/shm``. An
    init process of the engine is not asked for: the image has its own.

    Args:
        name: Name and tag.
    """
    words = ["docker", "run", "--rm", "-it", "--privileged", "--net=host"]
    return shlex.join([*words, "--ulimit", "memlock=-1", "--shm-size=16g", name, "python"])


def touch_wheels(target: Target) -> None:
    """Give every wheel a new time, so that BuildKit sends it again.

    Args:
        target: The image.
    """
    for path in (target.work / "wheels").rglob("*.whl"):
        os.utime(path)
