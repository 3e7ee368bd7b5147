"""Reading, checking and keeping the OCI layout of an image.

A layout is a folder of blobs named by digest plus ``index.json``. Blobs only ever get added, each
by hard link or rename, and the index changes by rename; so whoever reads a layout while another
image is put there finds one of the two, whole.

Format: OCI image layout and image manifest, version 1.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import parse_json, read_regular, sha256_file, write_atomic
from tpuforge.zstd import Reader

_MARK = b'{"imageLayoutVersion":"1.0.0"}'
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
DOCUMENT_BYTES = 1 << 26
"""The most bytes of a manifest, config or attached document: what is read into memory."""
_LARGEST_FILE = 1 << 36
# a layer of an image of ours unpacks to 5 times the bytes of its blob, and to 30,000 files
_MOST_TIMES = 100
_MOST_SMALL = 1 << 28
_MOST_FILES = 1_000_000
_LARGEST_NAME = 1 << 20
_ZSTD = "+zstd"
# how a stream begins, RFC 8878
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_NAMING = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
# a package of its own, not one that another package carries inside
_DIST_INFO = re.compile(
    r"/site(-packages)?/(?P<name>[^/]+)-(?P<version>[^/-]+)\.dist-info/METADATA$"
)


@dataclass(frozen=True)
class Blob:
    """A blob that a manifest names.

    Attributes:
        digest: ``sha256:…``.
        size: Its bytes.
        media_type: What it is.
    """

    digest: str
    size: int
    media_type: str

    def path(self, layout: Path) -> Path:
        """Where it is in a layout."""
        return layout / "blobs" / "sha256" / self.digest.removeprefix("sha256:")


def descriptor(entry: Any) -> Blob:
    """A blob as a manifest or an index names it, which a stranger may have written.

    Args:
        entry: The descriptor.

    Raises:
        ValueError: If its digest, which becomes the name of a file, is no SHA-256, or its size is
            no number of bytes.
        KeyError: If it lacks something.
        TypeError: If it is none.
    """
    digest, size, kind = entry["digest"], entry["size"], entry["mediaType"]
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is not a SHA-256 digest")
    if type(size) is not int or size < 0:
        raise ValueError(f"{size!r} is not a number of bytes")
    return Blob(digest, size, str(kind))


@dataclass(frozen=True)
class Image:
    """An image of a layout.

    Attributes:
        manifest: The manifest's blob.
        config: The config's blob.
        layers: The layers' blobs, lowest first.
        labels: The labels in the config.
        annotations: The manifest's annotations.
    """

    manifest: Blob
    config: Blob
    layers: tuple[Blob, ...]
    labels: dict[str, str]
    annotations: dict[str, str]

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """All blobs: manifest, config, layers."""
        return (self.manifest, self.config, *self.layers)

    @property
    def compressed(self) -> int:
        """Bytes of all blobs: what a pull into an empty engine transfers."""
        return sum(blob.size for blob in self.blobs)


@dataclass(frozen=True)
class Content:
    """What is in a layer.

    Attributes:
        unpacked: Bytes of its regular files.
        what: What it brings, for people.
        newest: Its newest modification time, seconds since 1970, and whose it is.
    """

    unpacked: int
    what: str
    newest: tuple[float, str] = (0, "")


def read_image(layout: Path) -> Image:
    """Read the one image of a layout; the manifest and the config are checked by digest.

    Args:
        layout: The folder with ``index.json``.

    Raises:
        ForgeError: If there is no such image or it is damaged; exit code 1.
    """
    try:
        listed = parse_json(read_regular(layout / "index.json", DOCUMENT_BYTES))["manifests"]
        if len(listed) != 1:
            raise _damaged(layout, f"index.json names {len(listed)} manifests instead of one")
        manifest = descriptor(listed[0])
        body = parse_json(_checked(layout, manifest))
        if "config" not in body and "manifests" in body:
            raise _damaged(layout, "index.json names a list of images instead of one")
        config = descriptor(body["config"])
        data = _checked(layout, config)
        labels = read_labels(data)
        if platform := _foreign(data):
            raise _damaged(layout, f"its image is for {platform} instead of linux/amd64")
        layers = tuple(descriptor(layer) for layer in body["layers"])
        return Image(manifest, config, layers, labels, body.get("annotations") or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(layout, f"{type(error).__name__}: {error}") from error


def read_labels(config: bytes) -> dict[str, str]:
    """The labels in an image's config.

    Args:
        config: The config.

    Raises:
        ValueError: If it is no JSON, or a label is no text.
        KeyError: If it is not that of an image.
        TypeError: If it is not that of an image.
        AttributeError: If it is not that of an image.
    """
    labels = parse_json(config)["config"].get("Labels") or {}
    for name, value in labels.items():
        if not isinstance(value, str):
            raise ValueError(f"the label {name} is not a text")
    return dict(labels)


def _foreign(config: bytes) -> str:
    """The platform of a config, if it is another than the one that every image here is for."""
    told = parse_json(config)
    system, machine = told.get("os", "linux"), told.get("architecture", "amd64")
    return "" if (system, machine) == ("linux", "amd64") else f"{system}/{machine}"


def _checked(layout: Path, blob: Blob) -> bytes:
    data = read_regular(blob.path(layout), DOCUMENT_BYTES)
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != blob.digest:
        raise _damaged(layout, f"the blob {blob.digest} has another digest")
    return data


def _damaged(layout: Path, what: str) -> ForgeError:
    return ForgeError(
        f"the image layout {layout} is not whole: {what}",
        expected="an OCI layout with one image, every blob of its digest",
        mend="./forge bake",
        exit_code=Exit.FAULT,
    )


def missing(layout: Path, image: Image) -> str:
    """Look for what is plainly missing, by size only.

    Args:
        layout: The layout.
        image: Its image.

    Returns:
        Empty, or the first blob that is missing or cut short.
    """
    for blob in image.blobs:
        path = blob.path(layout)
        if not path.is_file():
            return f"{blob.digest} is missing"
        if path.stat().st_size != blob.size:
            return f"{blob.digest} has {path.stat().st_size} bytes instead of {blob.size}"
    return ""


def damaged_since(layout: Path, image: Image, moment: int) -> str:
    """Look for what is missing, cut short, or was written to since a moment and is damaged now.

    Args:
        layout: The layout.
        image: Its image.
        moment: When it was whole, nanoseconds since 1970; older blobs are not read.

    Returns:
        Empty, or the first such blob.
    """
    if why := missing(layout, image):
        return why
    for blob in image.blobs:
        path = blob.path(layout)
        if path.stat().st_mtime_ns > moment and f"sha256:{sha256_file(path)}" != blob.digest:
            return f"{blob.digest} was written to, and has another digest now"
    return ""


def wrong(layout: Path, image: Image, on_bytes: Callable[[int], None] | None = None) -> list[Blob]:
    """Check every blob by digest.

    Args:
        layout: The layout.
        image: Its image.
        on_bytes: Told of progress.

    Returns:
        The blobs that are missing or have another digest.
    """
    bad = []
    for blob in image.blobs:
        path = blob.path(layout)
        if not path.is_file() or f"sha256:{sha256_file(path, on_bytes)}" != blob.digest:
            bad.append(blob)
    return bad


class _Entry(tarfile.TarInfo):
    """An entry of a stranger's tar, whose header says no more than can be."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        made = super().frombuf(buf, encoding, errors)
        # what names an entry is read into memory, and a stream is read as far as a header says
        most = _LARGEST_NAME if made.type in _NAMING else _LARGEST_FILE
        if not 0 <= made.size <= most:
            raise tarfile.ReadError(f"an entry of {made.size:,} bytes")
        return made


class _Stream(tarfile.TarFile):
    """A stranger's tar, of which no more is kept in memory than the entry that is read."""

    _left = _MOST_FILES

    def next(self) -> tarfile.TarInfo | None:
        self._left -= 1
        if self._left < 0:
            raise tarfile.ReadError(f"it has more than {_MOST_FILES:,} files")
        entry = super().next()
        self.members.clear()  # type: ignore[attr-defined]  # typeshed leaves it out
        return entry


class _Bounded:
    """What a blob unpacks to, as far as a blob of its size may.

    Args:
        source: The plain bytes.
        blob: The layer.
    """

    def __init__(self, source: BinaryIO, blob: Blob) -> None:
        self._source = source
        self._most = self._left = blob.size * _MOST_TIMES + _MOST_SMALL

    def read(self, count: int) -> bytes:
        data = self._source.read(count)
        self._left -= len(data)
        if self._left < 0:
            raise tarfile.ReadError(f"it unpacks to more than {self._most:,} bytes")
        return data


@contextlib.contextmanager
def open_layer(
    layout: Path, blob: Blob, source: BinaryIO | None = None
) -> Iterator[tarfile.TarFile]:
    """Open a layer as a tar that can be read once, in order.

    Args:
        layout: The layout.
        blob: A layer, compressed with zstd, with gzip, or not at all.
        source: Its bytes; its file if not given.

    Yields:
        The tar.

    Raises:
        ForgeError: If it is compressed otherwise, or damaged; also while the tar is read.
    """
    try:
        with contextlib.ExitStack() as stack:
            if source is None:
                source = stack.enter_context(blob.path(layout).open("rb"))
            yield stack.enter_context(_opened(layout, blob, source))
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(layout, f"the layer {blob.digest} cannot be read: {error}") from error


@contextlib.contextmanager
def _opened(layout: Path, blob: Blob, file: BinaryIO) -> Iterator[tarfile.TarFile]:
    with contextlib.ExitStack() as stack:
        if blob.media_type.endswith(_ZSTD):
            source = cast(BinaryIO, stack.enter_context(Reader(file)))
        elif blob.media_type.endswith(("+gzip", ".gzip")):
            source = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file)))
        elif blob.media_type.endswith(".tar"):
            source = file
        else:
            raise _damaged(layout, f"a layer of the unknown type {blob.media_type}")
        plain = cast(BinaryIO, _Bounded(source, blob))
        with _Stream.open(fileobj=plain, mode="r|", bufsize=1 << 20, tarinfo=_Entry) as tar:
            yield tar


def content(layout: Path, blob: Blob, source: BinaryIO | None = None) -> Content:
    """Read what is in a layer, without unpacking it to disk.

    Args:
        layout: The layout.
        blob: A layer.
        source: Its bytes; its file if not given.

    Raises:
        ForgeError: If the layer is damaged.
    """
    unpacked = 0
    packages: dict[str, str] = {}
    folders: set[str] = set()
    debian = False
    newest: tuple[float, str] = (0, "")
    with open_layer(layout, blob, source) as tar:
        for entry in tar:
            if entry.isreg():
                unpacked += entry.size
            name = entry.name.removeprefix("./")
            newest = max(newest, (entry.mtime, name))
            debian = debian or name == "var/lib/dpkg/status"
            found = _DIST_INFO.search(name)
            if found is not None:
                packages[found["name"]] = found["version"]
            if not entry.isdir():
                folders.add(name.rpartition("/")[0])
    what = _what(packages, folders, debian=debian) if newest[1] else "an empty layer"
    return Content(unpacked, what, newest)


class _Hashed:
    """A file whose bytes are hashed as they are read, in order."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def read(self, count: int) -> bytes:
        data = self._file.read(count)
        self._digest.update(data)
        return data

    def to_the_end(self) -> str:
        while self.read(1 << 20):
            pass
        return f"sha256:{self._digest.hexdigest()}"


def digests(layout: Path) -> list[str]:
    """The blobs that are in a layout, by name; none of them is read.

    Args:
        layout: The layout; it need not be there.
    """
    folder = layout / "blobs" / "sha256"
    names = [f"sha256:{path.name}" for path in folder.iterdir()] if folder.is_dir() else []
    found = (name for name in names if _DIGEST.fullmatch(name))
    return sorted(name for name in found if Blob(name, 0, "").path(layout).is_file())


def examine(layout: Path, digest: str, *, inside: bool = True) -> tuple[bool, Content | None]:
    """Read a blob once, of which no more is known than its name.

    Args:
        layout: The layout.
        digest: The digest that names it.
        inside: Look into it as well, if it is compressed with zstd.

    Returns:
        Whether it has that digest; and what is in it, or None if nobody looked, or it is no layer
        that can be read.

    Raises:
        OSError: If the file cannot be read.
    """
    path = Blob(digest, 0, "").path(layout)
    found = None
    with path.open("rb", buffering=0) as file:
        layer = inside and file.read(len(_ZSTD_MAGIC)) == _ZSTD_MAGIC
        file.seek(0)
        source = _Hashed(cast(BinaryIO, file))
        if layer:
            blob = Blob(digest, path.stat().st_size, _ZSTD)
            with contextlib.suppress(ForgeError):
                found = content(layout, blob, cast(BinaryIO, source))
        return source.to_the_end() == digest, found


def _what(packages: dict[str, str], folders: set[str], *, debian: bool) -> str:
    if debian:
        return "Debian base"
    if len(packages) == 1:
        ((name, version),) = packages.items()
        return f"{name} {version}"
    if packages:
        return f"{len(packages)} packages: {', '.join(sorted(packages)[:3])}, …"
    tops = sorted(folder for folder in folders if not any(_above(top, folder) for top in folders))
    return "files in " + ", ".join(top or "/" for top in tops[:3]) if tops else "folders only"


def _above(top: str, folder: str) -> bool:
    return folder.startswith(f"{top}/")


def publish(source: Path, target: Path, image: Image, name: str) -> None:
    """Put an image into the layout that others read: blobs first, then the index.

    Args:
        source: The layout it was written to, checked; on the same file system.
        target: The layout that others read; what is there stays whole until the index changes.
        image: The image.
        name: Its name and tag.
    """
    for blob in image.blobs:
        _link(blob.path(source), blob.path(target))
    write_atomic(target / "oci-layout", _MARK)
    write_atomic(target / "index.json", _index(image, name))


def _index(image: Image, name: str) -> bytes:
    entry = {
        "mediaType": image.manifest.media_type,
        "digest": image.manifest.digest,
        "size": image.manifest.size,
        "platform": {"architecture": "amd64", "os": "linux"},
        "annotations": {
            # the first is read by skopeo and oras, the second by containerd and Docker
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
            "io.containerd.image.name": name if _names_registry(name) else f"docker.io/{name}",
        },
    }
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [entry],
    }
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def _names_registry(name: str) -> bool:
    """Whether a name begins with its registry, told as Docker tells it."""
    first, slash, _ = name.partition("/")
    return bool(slash) and (first == "localhost" or "." in first or ":" in first)


def _link(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.parent / f".{target.name}.{os.getpid()}"
    beside.unlink(missing_ok=True)
    try:
        beside.hardlink_to(source)
    except OSError:
        # some file systems have no hard links
        shutil.copyfile(source, beside)
    if target.is_dir():
        _away(target)
    beside.replace(target)


def _away(path: Path) -> None:
    """Remove what is in the way among blobs: mostly a file, and a folder if somebody put one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def seed(source: Path, target: Path, digests: Iterable[str]) -> None:
    """Link blobs of one layout into another that is about to be written.

    Args:
        source: A layout that others read.
        target: The layout; nobody reads it yet. What it has stays as it is.
        digests: The blobs; those that are not in the source are left out.
    """
    for digest in digests:
        blob = Blob(digest, 0, "")
        if blob.path(source).is_file() and not blob.path(target).exists():
            # the bake of the other image may be taking it away
            with contextlib.suppress(FileNotFoundError):
                _link(blob.path(source), blob.path(target))


def prune(layout: Path, image: Image) -> None:
    """Remove what an image does not need: older blobs and what a killed bake left.

    Args:
        layout: The layout.
        image: What stays.
    """
    kept = {blob.path(layout) for blob in image.blobs}
    for path in (layout / "blobs" / "sha256").iterdir():
        if path not in kept:
            _away(path)
    shutil.rmtree(layout / "ingest", ignore_errors=True)


def write_archive(layout: Path, image: Image, name: str, file: BinaryIO) -> None:
    """Write the tar that ``docker load`` takes, with either image store.

    Args:
        layout: The layout.
        image: Its image.
        name: Its name and tag.
        file: Where the tar goes, such as a pipe.
    """
    config, *layers = (f"blobs/sha256/{blob.path(layout).name}" for blob in image.blobs[1:])
    legacy = [{"Config": config, "RepoTags": [name], "Layers": layers}]
    small = {
        "oci-layout": _MARK,
        "index.json": _index(image, name),
        "manifest.json": json.dumps(legacy).encode(),
    }
    with tarfile.open(fileobj=file, mode="w|", bufsize=1 << 20) as tar:
        for inside, data in small.items():
            entry = tarfile.TarInfo(inside)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        for blob in image.blobs:
            tar.add(blob.path(layout), f"blobs/sha256/{blob.path(layout).name}")
