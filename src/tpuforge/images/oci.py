"""A deterministic one-layer OCI layout from a root file system.

The layer is an uncompressed tar, so its digest depends on no compressor. Entries are sorted by
name, carry numeric owners and one time, and hold what an image needs; so the digest does not
depend on the machine, the tar, the clock or the umask that made the root file system.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import sha256_file

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CHUNK = 1 << 20
_KEPT_HEADERS = "SCHILY.xattr.security.capability"

Keep = Callable[[str, bool], bool]
Edit = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Layer:
    """A layer that was written.

    Attributes:
        sha256: Digest of the tar.
        size: Its bytes.
        unpacked: Bytes of the regular files in it.
        names: What is in it, such as ``etc/passwd``.
    """

    sha256: str
    size: int
    unpacked: int
    names: frozenset[str]


@dataclass(frozen=True)
class Folder:
    """A folder to add.

    Attributes:
        name: Such as ``home/tpu``.
        owner: Its user and group number.
    """

    name: str
    owner: int


def write_layer(
    source: Path,
    target: Path,
    *,
    epoch: int,
    keep: Keep,
    edits: Mapping[str, Edit],
    folders: Sequence[Folder] = (),
) -> Layer:
    """Write a root file system's tar again, in one form.

    Args:
        source: A tar of a root file system.
        target: Where the layer goes.
        epoch: Modification time of every entry, seconds since 1970.
        keep: Whether an entry stays, given its name (``etc/passwd``) and whether it is a folder.
        edits: New content of files, by name, from their old content.
        folders: Folders to add.

    Returns:
        The layer.

    Raises:
        ForgeError: If a file to be edited is missing, or a kept hard link lost its file.
    """
    unpacked = 0
    with (
        tarfile.open(source) as old,
        target.open("wb") as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        members = {_name(member.name): member for member in old if _name(member.name)}
        members |= {folder.name: _folder(folder) for folder in folders}
        kept = sorted(name for name, member in members.items() if keep(name, member.isdir()))
        missing = sorted(set(edits) - set(kept))
        if missing:
            raise _incomplete(f"it has no {', '.join(missing)}")
        # a hard link's file must come before it, whatever their names
        links = [name for name in kept if members[name].islnk()]
        for name in [*(name for name in kept if not members[name].islnk()), *links]:
            member = members[name]
            entry = _entry(member, name, epoch)
            if member.islnk():
                if entry.linkname not in kept:
                    raise _incomplete(f"{name} is a hard link to {entry.linkname}, which is gone")
                new.addfile(entry)
                continue
            if not member.isreg():
                new.addfile(entry)
                continue
            body: Any = old.extractfile(member)
            if name in edits:
                data = edits[name](body.read())
                entry.size = len(data)
                body = io.BytesIO(data)
            unpacked += entry.size
            new.addfile(entry, body)
    return Layer(sha256_file(target), target.stat().st_size, unpacked, frozenset(kept))


def _folder(folder: Folder) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(folder.name)
    entry.type = tarfile.DIRTYPE
    entry.mode = 0o755
    entry.uid = entry.gid = folder.owner
    return entry


def _name(name: str) -> str:
    return name.removeprefix("./").strip("/") if name != "." else ""


def _entry(member: tarfile.TarInfo, name: str, epoch: int) -> tarfile.TarInfo:
    entry = copy(member)
    entry.name = name
    entry.mtime = epoch
    entry.uname = entry.gname = ""
    entry.pax_headers = {k: v for k, v in member.pax_headers.items() if k == _KEPT_HEADERS}
    if entry.islnk():
        entry.linkname = _name(member.linkname)
        entry.size = 0
    return entry


def _incomplete(what: str) -> ForgeError:
    return ForgeError(
        f"the root file system is not what a base needs: {what}",
        expected="the suite's essential packages, installed",
        mend="see debian.<suite>.packages in lock/pins.toml",
        exit_code=Exit.FAULT,
    )


def write_layout(folder: Path, tar: Path, layer: Layer, *, epoch: int, title: str) -> str:
    """Make a one-layer OCI layout; the tar is moved into it.

    Args:
        folder: An empty folder.
        tar: The layer.
        layer: What :func:`write_layer` said of it.
        epoch: Creation time, seconds since 1970.
        title: What the layer is, for its history.

    Returns:
        The manifest's digest, ``sha256:…``.
    """
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    shutil.move(tar, blobs / layer.sha256)
    created = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    config = _blob(
        blobs,
        {
            "architecture": "amd64",
            "os": "linux",
            "created": created,
            "config": {"Env": [f"PATH={PATH}"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.sha256}"]},
            "history": [{"created": created, "created_by": title}],
        },
    )
    kind = "application/vnd.oci.image"
    manifest = _blob(
        blobs,
        {
            "schemaVersion": 2,
            "mediaType": f"{kind}.manifest.v1+json",
            "config": {"mediaType": f"{kind}.config.v1+json", **config},
            "layers": [
                {
                    "mediaType": f"{kind}.layer.v1.tar",
                    "digest": f"sha256:{layer.sha256}",
                    "size": layer.size,
                }
            ],
        },
    )
    index = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.index.v1+json",
        "manifests": [
            {
                "mediaType": f"{kind}.manifest.v1+json",
                **manifest,
                "platform": {"architecture": "amd64", "os": "linux"},
            }
        ],
    }
    (folder / "index.json").write_bytes(_json(index))
    (folder / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    return str(manifest["digest"])


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _blob(blobs: Path, value: Any) -> dict[str, str | int]:
    data = _json(value)
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


def check_layout(folder: Path, manifest_digest: str) -> str:
    """Check every blob of a one-layer layout against its digest.

    Args:
        folder: The layout.
        manifest_digest: ``sha256:…``, from a trusted record.

    Returns:
        Empty if all is well, else the first thing that is wrong.
    """
    blobs = folder / "blobs" / "sha256"
    wanted = [manifest_digest]
    try:
        json.loads((folder / "oci-layout").read_bytes())
        listed = json.loads((folder / "index.json").read_bytes())["manifests"]
        if [entry["digest"] for entry in listed] != [manifest_digest]:
            return f"{folder.name}/index.json does not name {manifest_digest}"
        for digest in wanted:
            path = blobs / digest.removeprefix("sha256:")
            found = f"sha256:{sha256_file(path)}"
            if found != digest:
                return f"{folder.name}: the blob {digest} has the digest {found}"
            if digest == manifest_digest:
                manifest = json.loads(path.read_bytes())
                wanted += [manifest["config"]["digest"], manifest["layers"][0]["digest"]]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return f"{folder.name} is not a complete OCI layout: {error}"
    return ""
