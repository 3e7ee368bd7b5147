"""What is really in an image: read out of its layers, not out of what it was to be made from.

The layers are read in their order, with what a later one replaces or removes (whiteouts), so what
is found is what a container sees.

Formats: OCI image layer (whiteouts); dpkg's status file; Core metadata of installed distributions;
os-release(5).
"""

from __future__ import annotations

import contextlib
import email.parser
import hashlib
import os
import re
import shlex
import tarfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import IO, Any

from packaging.utils import canonicalize_name

from tpuforge import layout as oci
from tpuforge.console import Progress
from tpuforge.paths import parse_json
from tpuforge.release import licences

LOCK = "opt/tpuforge/lock.txt"
FACTS = ("opt/tpuforge/image.json", "simulator.json")
SYSTEM_LABEL = "io.tpuforge.base.suite"
"""The label of an image with a system below; one without it holds nothing but files of its own."""
VENV = "opt/venv"
"""The environment of an image; what else has packages is for its own commands alone."""

ENVIRONMENTS = (f"{VENV}/", "opt/tpuforge/site/")
"""Where wheels are installed by a bake."""

_STATUS = "var/lib/dpkg/status"
_RELEASES = ("etc/os-release", "usr/lib/os-release")
_DIST_INFO = re.compile(
    r"(?P<place>.+/(?:site|site-packages|dist-packages))/[^/]+\.dist-info/(?P<file>.+)"
)
_DOC = re.compile(r"usr/share/doc/(?P<package>[^/]+)(?P<copyright>/copyright)?")
# programs that belong to no package
_PROGRAM = re.compile(r"usr/local/s?bin/[^/]+")
_MOST = 1 << 24
# all texts of a layer; those of ours have 10 MB
_MOST_TEXTS = 1 << 28
_DIRECT = re.compile(r"\s*([a-z0-9][a-z0-9+.-]*)")


@dataclass(frozen=True)
class Wheel:
    """An installed distribution.

    Attributes:
        name: Canonical name.
        version: Its version.
        place: The folder it is in, without the first slash.
        layer: Digest of the layer that brought it.
        licence: SPDX expression of what it states.
        requires: Its requirements, as it states them.
        bills: Bills of materials that it carries itself (PEP 770), as paths.
    """

    name: str
    version: str
    place: str
    layer: str
    licence: str
    requires: tuple[str, ...] = ()
    bills: tuple[str, ...] = ()


@dataclass(frozen=True)
class Deb:
    """An installed Debian package.

    Attributes:
        name: Its name.
        version: Its version, with the epoch.
        arch: Its architecture.
        layer: Digest of the layer that brought it.
        licence: SPDX expression of all licences that its copyright file names.
        source: Name of its source package.
        needs: For each requirement the names that meet it.
    """

    name: str
    version: str
    arch: str
    layer: str
    licence: str
    source: str
    needs: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Program:
    """A file that belongs to no package.

    Attributes:
        path: Where it is, without the first slash.
        sha256: Its digest.
        layer: Digest of the layer that brought it.
    """

    path: str
    sha256: str
    layer: str


@dataclass(frozen=True)
class Inventory:
    """What is in an image.

    Attributes:
        release: The system's os-release; empty without one.
        debs: Debian packages, by name.
        wheels: Python distributions, by place and name.
        programs: Files of no package.
        contents: SHA-256 of every file beside and below the environments' packages, by path; empty
            if they were not read.
        records: What each distribution says that it installed (``RECORD``), by the path of that.
        lock: The text of the lock that the image carries; empty without one.
        facts: What the image says of itself (``/opt/tpuforge/image.json``), or the simulator.
    """

    release: Mapping[str, str]
    debs: tuple[Deb, ...]
    wheels: tuple[Wheel, ...]
    programs: tuple[Program, ...]
    contents: Mapping[str, str] = field(default_factory=dict)
    records: Mapping[str, str] = field(default_factory=dict)
    lock: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Layer:
    """What one layer brings and removes.

    Attributes:
        digest: Its digest.
        texts: Small files that are read, by path.
        links: Where links lead that are followed, by path.
        digests: SHA-256 of files that no package brought, by path.
        removed: Paths that are gone with it.
        emptied: Folders whose older content is gone with it.
        contents: SHA-256 of files beside and below the environments' packages, by path.
        kept: Bytes of the small files.
    """

    digest: str
    texts: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)
    contents: dict[str, str] = field(default_factory=dict)
    kept: int = 0


def read(
    layout: Path,
    image: oci.Image,
    progress: Progress,
    *,
    known: dict[str, Layer] | None = None,
    contents: bool = False,
) -> Inventory:
    """Read what is in an image.

    Args:
        layout: The image's layout; its blobs are taken to be checked by digest.
        image: The image.
        progress: Told what happens.
        known: Layers that were read before, by digest; those of this image are added.
        contents: Read the files of the environments too, which takes about twice as long.

    Raises:
        ForgeError: If a layer is damaged.
    """
    bare = SYSTEM_LABEL not in image.labels
    known = {} if known is None else known
    order = sorted(
        {blob for blob in image.layers if blob.digest not in known}, key=lambda blob: -blob.size
    )
    stop = threading.Event()
    with (
        progress.step("reading the layers"),
        ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool,
    ):
        try:
            # the largest first, so that none is left for the end
            read_all = pool.map(
                lambda blob: _read(layout, blob, stop, bare=bare, contents=contents), order
            )
            known |= {layer.digest: layer for layer in read_all}
        except BaseException:
            # the pool waits for its threads: whoever pressed Ctrl-C should not
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return _joined([known[blob.digest] for blob in image.layers])


class _StoppedError(Exception):
    """Nobody waits any more for what a thread reads."""


def _read(
    layout: Path, blob: oci.Blob, stop: threading.Event, *, bare: bool, contents: bool
) -> Layer:
    found = Layer(blob.digest)
    with oci.open_layer(layout, blob) as tar:
        for entry in tar:
            if stop.is_set():
                raise _StoppedError
            name = entry.name.removeprefix("./").strip("/")
            folder, _, last = name.rpartition("/")
            if last == ".wh..wh..opq":
                found.emptied.append(folder)
            elif last.startswith(".wh."):
                found.removed.append(f"{folder}/{last.removeprefix('.wh.')}".lstrip("/"))
            elif entry.issym():
                if name in _RELEASES or _DOC.fullmatch(name):
                    found.links[name] = entry.linkname
            elif entry.isreg():
                _take(found, tar, entry, name, stop, bare=bare, contents=contents)
    return found


def _take(
    found: Layer,
    tar: tarfile.TarFile,
    entry: tarfile.TarInfo,
    name: str,
    stop: threading.Event,
    *,
    bare: bool,
    contents: bool,
) -> None:
    info = _DIST_INFO.fullmatch(name)
    doc = _DOC.fullmatch(name)
    start = b""
    inside = contents and name.startswith(ENVIRONMENTS)
    hashed = bare or inside or _PROGRAM.fullmatch(name)
    wanted = name in (_STATUS, LOCK, *FACTS, *_RELEASES) or (doc is not None and doc["copyright"])
    wanted = wanted or (info is not None and info["file"] in ("METADATA", "RECORD"))
    file = tar.extractfile(entry) if wanted or hashed else None
    if wanted:
        # the tar is a stream: what was read is not read again
        start = file.read(_MOST) if file is not None else b""
        found.texts[name] = start
        found.kept += len(start)
        if found.kept > _MOST_TEXTS:
            raise tarfile.ReadError(f"its metadata has more than {_MOST_TEXTS:,} bytes")
    elif info is not None and info["file"].startswith("sboms/"):
        found.texts[name] = b""
    if hashed:
        digest = _sha256(file, start, stop)
        if inside:
            found.contents[name] = digest
        else:
            found.digests[name] = digest


def _sha256(file: IO[bytes] | None, start: bytes, stop: threading.Event) -> str:
    digest = hashlib.sha256(start)
    while file is not None and (chunk := file.read(1 << 20)):
        if stop.is_set():
            raise _StoppedError
        digest.update(chunk)
    return digest.hexdigest()


def _joined(layers: Sequence[Layer]) -> Inventory:
    texts: dict[str, tuple[bytes, str]] = {}
    links: dict[str, tuple[str, str]] = {}
    digests: dict[str, tuple[str, str]] = {}
    contents: dict[str, tuple[str, str]] = {}
    for layer in layers:
        kept: dict[str, Any]
        for kept in (texts, links, digests, contents):
            for name in [name for name in kept if _gone(name, layer)]:
                del kept[name]
        texts |= {name: (data, layer.digest) for name, data in layer.texts.items()}
        links |= {name: (target, layer.digest) for name, target in layer.links.items()}
        digests |= {name: (sha256, layer.digest) for name, sha256 in layer.digests.items()}
        contents |= {name: (sha256, layer.digest) for name, sha256 in layer.contents.items()}
    return Inventory(
        release=_release(texts),
        debs=_debs(texts, {name: target for name, (target, _) in links.items()}),
        wheels=_wheels(texts),
        programs=tuple(
            Program(path, sha256, layer) for path, (sha256, layer) in sorted(digests.items())
        ),
        contents={name: sha256 for name, (sha256, _) in contents.items()},
        records={
            name: data.decode("utf-8", "replace")
            for name, (data, _) in texts.items()
            if name.endswith(".dist-info/RECORD")
        },
        lock=texts.get(LOCK, (b"", ""))[0].decode("utf-8", "replace"),
        facts=_facts(texts),
    )


def _gone(name: str, layer: Layer) -> bool:
    """Whether a layer removes what a lower one brought."""
    if not layer.removed and not layer.emptied:
        return False
    return any(name == path or name.startswith(f"{path}/") for path in layer.removed) or any(
        name.startswith(f"{folder}/") for folder in layer.emptied
    )


def _facts(texts: Mapping[str, tuple[bytes, str]]) -> dict[str, Any]:
    data = next((texts[name][0] for name in FACTS if name in texts), b"{}")
    try:
        found = parse_json(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _release(texts: Mapping[str, tuple[bytes, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in reversed(_RELEASES):
        for line in texts.get(path, (b"", ""))[0].decode("utf-8", "replace").splitlines():
            name, equals, value = line.partition("=")
            if equals and not name.startswith("#"):
                # a line that no shell would take stands for nothing
                with contextlib.suppress(ValueError):
                    found[name.strip()] = "".join(shlex.split(value))
    return found


def _debs(texts: Mapping[str, tuple[bytes, str]], links: Mapping[str, str]) -> tuple[Deb, ...]:
    if _STATUS not in texts:
        return ()
    data, layer = texts[_STATUS]
    found = []
    for stanza in re.split(r"\n\n+", data.decode("utf-8", "replace").strip()):
        package = email.parser.HeaderParser().parsestr(stanza)
        if str(package["Status"]).split()[2:] != ["installed"]:
            continue
        name = str(package["Package"])
        doc = links.get(f"usr/share/doc/{name}", name)
        text = texts.get(f"usr/share/doc/{doc.rpartition('/')[2]}/copyright", (b"", ""))[0]
        found.append(
            Deb(
                name=name,
                version=str(package["Version"]),
                arch=str(package["Architecture"]),
                layer=layer,
                licence=licences.of_deb(text.decode("utf-8", "replace")),
                source=str(package.get("Source", name)).split()[0],
                needs=_needs(package),
            )
        )
    return tuple(sorted(found, key=lambda deb: (deb.name, deb.arch)))


def _needs(package: Message) -> tuple[tuple[str, ...], ...]:
    wanted = ", ".join(str(package.get(name, "")) for name in ("Pre-Depends", "Depends"))
    groups = []
    for group in wanted.split(","):
        names = [found[1] for one in group.split("|") if (found := _DIRECT.match(one)) is not None]
        if names:
            groups.append(tuple(names))
    return tuple(groups)


def _wheels(texts: Mapping[str, tuple[bytes, str]]) -> tuple[Wheel, ...]:
    found = []
    for path, (data, layer) in texts.items():
        info = _DIST_INFO.fullmatch(path)
        if info is None or info["file"] != "METADATA":
            continue
        metadata = email.parser.HeaderParser().parsestr(data.decode("utf-8", "replace"))
        bills = f"{path.removesuffix('METADATA')}sboms/"
        found.append(
            Wheel(
                name=canonicalize_name(str(metadata["Name"])),
                version=str(metadata["Version"]),
                place=info["place"],
                layer=layer,
                licence=licences.of_wheel(metadata),
                requires=tuple(str(one) for one in metadata.get_all("Requires-Dist", [])),
                bills=tuple(sorted(one for one in texts if one.startswith(bills))),
            )
        )
    return tuple(sorted(found, key=lambda wheel: (wheel.place, wheel.name, wheel.version)))
