"""What tests of ``images/tpu-vm`` share: the programs as modules, and made-up hosts and clients."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from process_support import call

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "images" / "tpu-vm"
DIGEST = "sha256:" + "0123456789abcdef" * 4
IMAGE = f"registry.invalid:5000/tpuforge/runtime@{DIGEST}"
BUS = "sys/bus/pci/devices"


def program(name: str) -> ModuleType:
    """A program of the folder, imported; the folder gets no byte code."""
    loader = importlib.machinery.SourceFileLoader(name.replace("-", "_"), str(FOLDER / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


NUMBERS = {"v4": "0x005e", "v5p": "0x0062", "v5e": "0x0063", "v6e": "0x006f", "v7": "0x0076"}


def put(root: Path, path: str, text: str) -> None:
    """A file of a made-up host."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def chip(root: Path, index: int, generation: str, *, group: str | None = None) -> str:
    """A chip on the bus; gives its address."""
    address = f"0000:{index:02x}:04.0"
    put(root, f"{BUS}/{address}/vendor", "0x1ae0\n")
    put(root, f"{BUS}/{address}/device", f"{NUMBERS[generation]}\n")
    if group is not None:
        (root / BUS / address / "iommu_group").symlink_to(f"../../../kernel/iommu_groups/{group}")
    return address


def host(root: Path, generation: str = "v6e", count: int = 1, *, driver: str = "vfio") -> Path:
    """A host on which nothing is wrong, with so many chips.

    Args:
        root: Its root folder.
        generation: Of the chips.
        count: How many devices.
        driver: ``vfio``; ``accel``, the older one; ``accel-bare``, the same without the kernel's
            class; or ``none``.
    """
    (root / BUS).mkdir(parents=True)
    # a network card of Google's, and a bridge
    put(root, f"{BUS}/0000:00:03.0/vendor", "0x1ae0\n")
    put(root, f"{BUS}/0000:00:03.0/device", "0x0042\n")
    put(root, f"{BUS}/0000:00:01.0/vendor", "0x8086\n")
    put(root, f"{BUS}/0000:00:01.0/device", "0x7110\n")
    for index in range(count):
        group = str(index) if driver == "vfio" else None
        address = chip(root, index + 1, generation, group=group)
        if driver == "vfio":
            node(root, f"dev/vfio/{index}")
        elif driver.startswith("accel"):
            node(root, f"dev/accel{index}")
        if driver == "accel":
            (root / f"sys/class/accel/accel{index}").mkdir(parents=True)
            link = root / f"sys/class/accel/accel{index}/device"
            link.symlink_to(f"../../../{address}")
    if driver == "vfio":
        node(root, "dev/vfio/vfio")
    put(root, "proc/self/limits", "Max locked memory         67108864      67108864      bytes\n")
    put(root, "proc/1/status", "Name:\tpython\nCapBnd:\t000001ffffffffff\n")
    put(root, "proc/meminfo", f"MemTotal:       {180 << 20} kB\nMemFree: 1 kB\n")
    put(root, "proc/net/if_inet6", f"{'0' * 31}1 01 80 10 80       lo\n")
    put(root, "sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n")
    return root


def node(root: Path, path: str, mode: int = 0o666) -> None:
    """A device file of a made-up host: an ordinary file."""
    put(root, path, "")
    (root / path).chmod(mode)


def process(root: Path, number: int, path: str, command: str, container: str = "") -> None:
    """A process that has a file open."""
    folder = root / f"proc/{number}/fd"
    folder.mkdir(parents=True)
    (folder / "0").symlink_to("/dev/null")
    (folder / "7").symlink_to(path)
    put(root, f"proc/{number}/cmdline", command.replace(" ", "\0") + "\0")
    group = f"0::/system.slice/docker-{container}.scope\n" if container else "0::/user.slice\n"
    put(root, f"proc/{number}/cgroup", group)


_DOCKER = """#!/bin/sh
# Stands in for the client: notes what it is asked, and answers from files.
cd "$(dirname "$0")" || exit 99
printf '%s\\n' "$*" >>asked
case "$1 $2" in
"info "*) cat info; exit 0 ;;
"image inspect")
    [ -e pulled ] && cat inspect && exit 0
    echo "Error: No such image: $3" >&2; exit 1 ;;
"pull "*)
    if [ -s pull-fails ]; then
        head -n 1 pull-fails >&2
        sed -i 1d pull-fails
        exit 1
    fi
    : >pulled; exit 0 ;;
"run "*) echo "in the container"; exit "$(cat code)" ;;
esac
exit 98
"""

_COSIGN = """#!/bin/sh
cd "$(dirname "$0")" || exit 99
printf 'cosign %s\\n' "$*" >>asked
[ -e signed ] && exit 0
cat refuses >&2
exit 1
"""


class Clients:
    """Stand-ins for ``docker`` and ``cosign`` in a folder for PATH.

    Args:
        folder: The folder.
        here: Whether the engine has the image.
        signed: Whether the image is signed; None for no cosign.
        refuses: What cosign says if it is not.
        digest: Of the image that the engine has.
        code: Exit code of the container.
        entrypoint: Of the image.
        pull_fails: What the registry says before it gives the image.
    """

    def __init__(
        self,
        folder: Path,
        *,
        here: bool = False,
        signed: bool | None = None,
        refuses: str = "Error: no matching signatures",
        digest: str = DIGEST,
        code: int = 0,
        entrypoint: tuple[str, ...] = ("/usr/bin/tini", "--"),
        pull_fails: tuple[str, ...] = (),
        rootless: bool = False,
    ) -> None:
        self.folder = folder
        folder.mkdir()
        security = ["name=seccomp,profile=builtin", *(["name=rootless"] if rootless else [])]
        facts = {
            "ServerVersion": "27.3.1",
            "DockerRootDir": str(folder),
            "SecurityOptions": security,
        }
        image = {
            "Id": digest,
            "RepoDigests": [f"registry.invalid:5000/tpuforge/runtime@{digest}"],
            "Config": {"Entrypoint": list(entrypoint), "Cmd": ["python"]},
        }
        (folder / "info").write_text(json.dumps(facts))
        (folder / "inspect").write_text(json.dumps([image]))
        (folder / "code").write_text(str(code))
        (folder / "refuses").write_text(f"{refuses}\n")
        (folder / "pull-fails").write_text("".join(f"{line}\n" for line in pull_fails))
        if here:
            (folder / "pulled").touch()
        self._script("docker", _DOCKER)
        if signed is not None:
            self._script("cosign", _COSIGN)
        if signed:
            (folder / "signed").touch()

    def _script(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)

    @property
    def asked(self) -> list[str]:
        """What they were asked, without looking at the engine and the images."""
        path = self.folder / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if not line.startswith(("info ", "image inspect "))]

    @property
    def path(self) -> str:
        """A PATH on which they come first."""
        return f"{self.folder}:/usr/bin:/bin"


def run(
    *words: str, root: Path, clients: Clients | None = None, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Run ``tpu-run`` as a user would, on a made-up host."""
    env = {**os.environ, "PATH": clients.path if clients else str(root), "HOME": str(root / "home")}
    return call(
        [python, "-B", str(FOLDER / "tpu-run"), "--root", str(root), *words],
        env=env,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def found(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The checks of a run with ``--json -``, by id."""
    return {check["id"]: check for check in json.loads(done.stdout)["checks"]}
