"""What differs between two images, named by layer, path and attribute."""

from __future__ import annotations

import hashlib
import json
import tarfile
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpuforge import layout as oci
from tpuforge.console import visible
from tpuforge.errors import ForgeError
from tpuforge.host import which
from tpuforge.paths import scratch_dir
from tpuforge.process import run

_KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "symbolic link",
    tarfile.LNKTYPE: "hard link",
    tarfile.CHRTYPE: "character device",
    tarfile.BLKTYPE: "block device",
    tarfile.FIFOTYPE: "pipe",
}
# other headers hold what the entry itself tells, such as a long path
_XATTR = "SCHILY.xattr."
_SMALL = 1 << 20
_LOOKED_INTO = 3
_DIFFOSCOPE = 20
_DIFFOSCOPE_S = 60.0
_LONGEST = 200


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        text: It in a sentence: the layer, the path, the attribute and both values.
        layers: Digests of the two layers, for a file whose content differs.
        path: That file.
    """

    text: str
    layers: tuple[str, str] | None = None
    path: str = ""


def compare(first: Path, second: Path) -> Iterator[Difference]:
    """Name what differs between the images of two layouts.

    Layers of one digest are not read; so a layout may lack those that the other has.

    Args:
        first: A layout.
        second: Another.

    Yields:
        The differences: of the config, of the layers from the lowest up, of the annotations.

    Raises:
        ForgeError: If a layout is damaged.
    """
    one, two = oci.read_image(first), oci.read_image(second)
    if one.manifest.digest == two.manifest.digest:
        return
    found = False
    for item in _images((first, one), (second, two)):
        found = True
        yield replace(item, text=_one_line(item.text))
    if not found:
        yield Difference("manifest: the same content, written in another way")


def _images(one: tuple[Path, oci.Image], two: tuple[Path, oci.Image]) -> Iterator[Difference]:
    configs = [json.loads(image.config.path(at).read_bytes()) for at, image in (one, two)]
    for line in _values("config", configs[0], configs[1], skipped=("rootfs",)):
        yield Difference(line)
    layers = one[1].layers, two[1].layers
    if len(layers[0]) != len(layers[1]):
        yield Difference(f"{len(layers[0])} layers and {len(layers[1])} layers")
    for number, (left, right) in enumerate(zip(*layers, strict=False), 1):
        if left.digest != right.digest:
            title = f"layer {number} ({oci.content(one[0], left).what})"
            yield from _layers(title, (one[0], left), (two[0], right))
    for line in _values("annotations", one[1].annotations, two[1].annotations):
        yield Difference(line)


def _values(where: str, one: Any, two: Any, skipped: Collection[str] = ()) -> Iterator[str]:
    """What differs between two JSON values, down to the entries of objects and lists."""
    if isinstance(one, dict) and isinstance(two, dict):
        for key in sorted({*one, *two} - {*skipped}):
            yield from _values(f"{where}: {key}", one.get(key), two.get(key))
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for number, (left, right) in enumerate(zip(one, two, strict=True), 1):
            yield from _values(f"{where} {number}", left, right)
    elif one != two:
        left, right = (textwrap.shorten(repr(value), _LONGEST) for value in (one, two))
        yield f"{where}: {left} and {right}"


def _layers(
    title: str, one: tuple[Path, oci.Blob], two: tuple[Path, oci.Blob]
) -> Iterator[Difference]:
    entries = [_entries(*one), _entries(*two)]
    found = False
    for path in sorted({*entries[0], *entries[1]}):
        a, b = (side.get(path) for side in entries)
        if a is None or b is None:
            found = True
            yield Difference(f"{title}: {path}: only in the {'second' if a is None else 'first'}")
            continue
        for attribute in a:
            if a[attribute] != b[attribute]:
                found = True
                text = f"{title}: {path}: {attribute} {a[attribute]} and {b[attribute]}"
                if attribute == "content":
                    yield Difference(text, (one[1].digest, two[1].digest), path)
                else:
                    yield Difference(text)
    if not found and list(entries[0]) != list(entries[1]):
        yield Difference(f"{title}: the same files in another order")
    elif not found:
        yield Difference(f"{title}: the same files, compressed or archived in another way")


def _entries(layout: Path, layer: oci.Blob) -> dict[str, dict[str, str]]:
    """Every path of a layer with its attributes, in the layer's order."""
    found: dict[str, dict[str, str]] = {}
    with oci.open_layer(layout, layer) as tar:
        for entry in tar:
            body = tar.extractfile(entry) if entry.isreg() else None
            content = hashlib.sha256()
            while body is not None and (chunk := body.read(1 << 20)):
                content.update(chunk)
            extended = {k: v for k, v in entry.pax_headers.items() if k.startswith(_XATTR)}
            found[entry.name] = {
                "type": _KINDS.get(entry.type, "other"),
                "mode": f"{entry.mode:04o}",
                "owner": f"{entry.uid}:{entry.gid}",
                "owner's name": f"{entry.uname}:{entry.gname}",
                "time": str(entry.mtime),
                "link": entry.linkname,
                "device": f"{entry.devmajor}:{entry.devminor}",
                "extended attributes": json.dumps(extended, sort_keys=True),
                "size": str(entry.size),
                "content": content.hexdigest()[:12] if body is not None else "",
            }
    return found


def look_into(first: Path, second: Path, found: Sequence[Difference]) -> list[str]:
    """Tell more of the first small files whose content differs.

    Args:
        first: The layout of the first image.
        second: That of the second.
        found: What :func:`compare` found.

    Returns:
        Lines: where each of the first three files begins to differ, and what diffoscope says of it
        if it is on PATH.
    """
    lines: list[str] = []
    for item in [one for one in found if one.layers is not None][:_LOOKED_INTO]:
        assert item.layers is not None  # noqa: S101 - chosen just above
        bodies = [
            _body(layout, digest, item.path)
            for layout, digest in zip((first, second), item.layers, strict=True)
        ]
        if bodies[0] is None or bodies[1] is None:
            lines.append(f"{item.path}: too large to be looked into")
            continue
        lines.append(f"{item.path}: {_first_byte(bodies[0], bodies[1])}")
        lines += _diffoscope(Path(item.path).name, bodies[0], bodies[1])
    return [_one_line(line) for line in lines]


def _one_line(text: str) -> str:
    """A text about a stranger's layer, whose paths may look like lines of their own."""
    return visible(" ".join(text.split("\n")))


def _body(layout: Path, digest: str, path: str) -> bytes | None:
    """A file of a layer; None if it is large."""
    layer = next(one for one in oci.read_image(layout).layers if one.digest == digest)
    with oci.open_layer(layout, layer) as tar:
        for entry in tar:
            if entry.name == path:
                body = tar.extractfile(entry)
                return body.read() if body is not None and entry.size <= _SMALL else None
    return None


def _first_byte(one: bytes, two: bytes) -> str:
    """Where two contents begin to differ: a line of a text, else a byte."""
    at = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
    if at is None:
        return f"one is the beginning of the other; {len(one)} and {len(two)} bytes"
    try:
        lines = [text.decode("utf-8").splitlines() for text in (one, two)]
    except UnicodeDecodeError:
        return f"differs from byte {at} on: {one[at : at + 8].hex()} and {two[at : at + 8].hex()}"
    number = one[:at].count(b"\n")
    left, right = (text[number] if number < len(text) else "" for text in lines)
    return f"differs from line {number + 1} on: {left[:80]!r} and {right[:80]!r}"


def _diffoscope(name: str, one: bytes, two: bytes) -> list[str]:
    program = which("diffoscope")
    if not program:
        return []
    with scratch_dir() as folder:
        paths = [folder / side / name for side in ("first", "second")]
        for path, body in zip(paths, (one, two), strict=True):
            path.parent.mkdir()
            path.write_bytes(body)
        try:
            done = run(
                [program, "--text", "-", "--no-progress", *(p.relative_to(folder) for p in paths)],
                timeout=_DIFFOSCOPE_S,
                cwd=folder,
                check=False,
                doing="diffoscope",
            )
        except ForgeError as error:
            return [f"  {error.found.splitlines()[0]}"]
    lines = done.output.splitlines()
    more = [f"  … {len(lines) - _DIFFOSCOPE} more lines"] if len(lines) > _DIFFOSCOPE else []
    return [*(f"  {line}" for line in lines[:_DIFFOSCOPE]), *more]
