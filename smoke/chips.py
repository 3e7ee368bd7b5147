"""TPU chips on the PCI bus, found as TorchTPU finds them.

TorchTPU scans ``/sys/bus/pci/devices`` for Google's vendor number and opens the VFIO group that
``iommu_group`` names. Numbers: its ``hardware.py``.
"""

from __future__ import annotations

import errno
import http
import http.client
import os
import re
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

PER_HOST = {
    "v4": (1, 2, 4, 8),
    "v5p": (1, 2, 4, 8),
    "v5e": (1, 4, 8),
    "v6e": (1, 4, 8),
    "v7": (2, 4, 8),
}
"""Chips that a host can have: the numbers for which TorchTPU's ``hardware.py`` knows a topology.

A v7 chip has two devices on the bus, one for each of its cores, and they are counted here.
"""

MEMORY_GIB = {"v4": 32.0, "v5e": 15.75, "v5p": 95.73, "v6e": 31.24, "v7": 96.0}
"""Memory of one device. v5e, v5p and v6e: what libtpu 0.0.52 says a program may use when it refuses
one that is too large. v4 and v7: the capacity in TorchTPU's ``hardware.py`` (v7's is 192 for two).
"""

_KINDS = {"v4": "v4", "v5litepod": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7x": "v7"}
"""The name in an accelerator type, such as ``v5litepod-8``, to the generation."""

_CORES = {"v4": 2, "v5p": 2}
"""Cores of a chip, where accelerator types count cores: a v5p-8 has four chips."""

_METADATA_HOST = "169.254.169.254"
"""The metadata server of a cloud VM, by its address: a name could take long to resolve."""

_TYPE_PATH = "/computeMetadata/v1/instance/attributes/accelerator-type"

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


def given(chips: list[Chip]) -> list[Chip]:
    """The chips that may be used here: a container can be given some of a host's chips only.

    Args:
        chips: What :func:`scan` found.
    """
    # older drivers use /dev/accel*; the runtime itself will tell
    return [chip for chip in chips if chip.node is None or os.path.lexists(chip.node)]


def state(chips: list[Chip]) -> State:
    """Try to open the device file of every chip that was given, and close it again.

    A chip that somebody else holds (``EBUSY``) is *busy*; anything else that keeps it from being
    opened makes it *unusable*. Of both, busy is said: ending a process mends it.

    Args:
        chips: What :func:`scan` found, at least one.
    """
    usable = given(chips)
    if not usable:
        node = chips[0].node
        return State(
            False,
            "unusable",
            f"{_name(chips[0])}: {node} is not there; give the container --device {node}",
        )
    found: list[State] = []
    for chip in usable:
        if chip.node is None:
            continue
        try:
            os.close(os.open(chip.node, os.O_RDWR))
        except OSError as error:
            if error.errno == errno.EBUSY:
                why = f"another process holds {chip.node}; on the host, fuser {chip.node} names it"
                found.append(State(False, "busy", f"{_name(chip)}: {why}"))
            else:
                why = f"{chip.node}: {error.strerror}"
                found.append(State(False, "unusable", f"{_name(chip)}: {why}"))
    for one in sorted(found, key=lambda state: state.what != "busy"):
        more = f" ({len(found)} of {len(usable)} chips cannot be opened)" if len(found) > 1 else ""
        return State(False, one.what, one.why + more)
    return State(True, "free", f"{len(usable)} of {len(chips)} chips can be opened")


def _name(chip: Chip) -> str:
    return f"chip {chip.address} (TPU {chip.generation})"


def accelerator_type(host: str = _METADATA_HOST, port: int = 80) -> str | None:
    """What the metadata server of a TPU VM calls its slice, such as ``v6e-8``; nothing else of it.

    To be called through :mod:`smoke.isolate`: a server may answer as slowly as it likes. One that
    refuses is no server for libtpu either, which asks again 30 times for each of its variables,
    whatever the refusal was (403, 404 and 500 were tried with 0.0.52).

    Args:
        host: The server.
        port: Its port.

    Returns:
        The type; empty if the server names one that is not known; None if no server tells any.
    """
    connection = http.client.HTTPConnection(host, port, timeout=1.0)
    try:
        connection.request("GET", _TYPE_PATH, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        text = answer.read(64).decode("ascii", "replace").strip()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        return None
    return text if _type(text) else ""


def _type(text: str) -> tuple[str, int] | None:
    """Generation and number of an accelerator type."""
    match = re.fullmatch(r"([a-z0-9]+)-([1-9]\d{0,5})", text)
    if match is None or match[1] not in _KINDS:
        return None
    return _KINDS[match[1]], int(match[2])


def miscounted(chips: list[Chip], kind: str | None) -> str:
    """What is odd about the chips of this host.

    Args:
        chips: Those that were given, at least one.
        kind: The slice's accelerator type, if anybody says it.

    Returns:
        One sentence; empty if nothing is.
    """
    generations = sorted({chip.generation for chip in chips})
    if len(generations) > 1:
        return f"chips of different generations on one host: {', '.join(generations)}"
    generation, count = generations[0], len(chips)
    if count not in PER_HOST[generation]:
        known = ", ".join(map(str, PER_HOST[generation]))
        return f"{count} chips of TPU {generation}; TorchTPU knows hosts with {known}"
    asked = _type(kind or "")
    if asked is None:
        return ""
    if asked[0] != generation:
        return f"the slice is called {kind}, and its chips are TPU {generation}"
    wanted = of_type(*asked)
    if wanted and count not in wanted:
        known = " or ".join(map(str, wanted))
        return f"{count} chips; a host of {kind} has {known}"
    return ""


def of_type(generation: str, number: int) -> tuple[int, ...]:
    """How many chips a host of an accelerator type has.

    Up to four chips stand in one host. Larger slices have hosts of four, and v5e and v6e have hosts
    of eight as well. Source: the pages of the generations in Google's Cloud TPU documentation.
    tpu7x has no accelerator type there, so nothing is expected of it.

    Args:
        generation: The generation.
        number: The number in the type.

    Returns:
        The possible numbers; none if nothing is known.
    """
    if generation == "v7":
        return ()
    chips = max(1, number // _CORES.get(generation, 1))
    if chips <= 4:
        return (chips,)
    return (4, 8) if generation in ("v5e", "v6e") else (4,)


def runtime_env(chips: list[Chip], environ: Mapping[str, str], metadata: bool) -> dict[str, str]:
    """Variables that keep libtpu from waiting for a metadata server that tells nothing.

    On a TPU VM the server answers and names the slice; libtpu must then ask it. In a container
    without a network, or where the server refuses, it would ask for minutes, so the chips on the
    bus have to do.

    Args:
        chips: Those that were given, at least one.
        environ: The user's environment; what it sets stays.
        metadata: Whether the metadata server names the slice.
    """
    if metadata or "TPU_SKIP_MDS_QUERY" in environ:
        return {}
    generation = chips[0].generation
    kind = {"v5e": "v5litepod", "v7": "tpu7x"}.get(generation, generation)
    number = len(chips) * _CORES.get(generation, 1)
    wanted = {**_NO_METADATA, "TPU_ACCELERATOR_TYPE": f"{kind}-{number}"}
    return {name: value for name, value in wanted.items() if name not in environ}
