"""TPU chips on the PCI bus, found as TorchTPU finds them.

TorchTPU scans ``/sys/bus/pci/devices`` for Google's vendor number and opens the VFIO group that
``iommu_group`` names. Numbers: its ``hardware.py``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VENDOR = "0x1ae0"
GENERATIONS = {
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7",
}
"""PCI device number to TPU generation."""

_NO_METADATA = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclass(frozen=True)
class Chip:
    """One chip.

    Attributes:
        address: PCI address.
        generation: Such as ``v6e``, or the raw device number if unknown.
        node: The device file that is opened to use it, or None if nothing names one.
    """

    address: str
    generation: str
    node: Path | None


def scan(root: Path = Path("/")) -> list[Chip]:
    """All TPU chips of this machine, by PCI address.

    Args:
        root: The root of the file system.
    """
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            if (device / "vendor").read_text(encoding="ascii").strip() != VENDOR:
                continue
            number = (device / "device").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if number not in GENERATIONS:
            # Google makes other PCI devices too, such as network and disk controllers of its VMs
            continue
        node = None
        group = device / "iommu_group"
        if group.is_symlink():
            node = root / "dev/vfio" / group.readlink().name
        found.append(Chip(device.name, GENERATIONS[number], node))
    return found


@dataclass(frozen=True)
class State:
    """Whether chips can be used.

    Attributes:
        usable: Every device file could be opened.
        what: ``free``, ``busy`` or ``unusable``.
        why: One sentence.
    """

    usable: bool
    what: str
    why: str


def state(chips: list[Chip]) -> State:
    """Try to open every chip's device file, and close it again.

    Args:
        chips: What :func:`scan` found.
    """
    for chip in chips:
        where = f"chip {chip.address} (TPU {chip.generation})"
        if chip.node is None:
            # older drivers use /dev/accel*; the runtime itself will tell
            continue
        try:
            os.close(os.open(chip.node, os.O_RDWR))
        except FileNotFoundError:
            return State(
                False,
                "unusable",
                f"{where}: {chip.node} is not there; give the container --device {chip.node}",
            )
        except OSError as error:
            if error.errno == errno.EBUSY:
                return State(False, "busy", f"{where}: another process holds {chip.node}")
            return State(False, "unusable", f"{where}: {chip.node}: {error.strerror}")
    return State(True, "free", f"{len(chips)} chips can be opened")


def runtime_env(chips: list[Chip], environ: Mapping[str, str], metadata: bool) -> dict[str, str]:
    """Variables that keep libtpu from waiting for a metadata server that is not there.

    On a TPU VM the server answers and names the slice; libtpu must then ask it. In a container
    without a network it would ask for minutes, so the chips on the bus have to do.

    Args:
        chips: What :func:`scan` found, at least one.
        environ: The user's environment; what it sets stays.
        metadata: Whether the metadata server answers.
    """
    if metadata or "TPU_SKIP_MDS_QUERY" in environ:
        return {}
    generation = chips[0].generation
    kind = {"v5e": "v5litepod", "v7": "tpu7x"}.get(generation, generation)
    wanted = {**_NO_METADATA, "TPU_ACCELERATOR_TYPE": f"{kind}-{len(chips)}"}
    return {name: value for name, value in wanted.items() if name not in environ}
