"""What is attached to an image: OCI artifacts that name its manifest as their subject.

They stand in a layout of their own, ``out/images/<slug>/referrers``, with one image index of all of
them under the name ``sha256-<hex>``. A registry that has the referrers API finds each by its
subject; one that has not is asked for that index as a tag. The image's manifest names none of them,
so attaching changes nothing of it.

Format: OCI distribution specification 1.1 (referrers, and their tag schema as the fallback); OCI
image specification 1.1 (artifacts with the empty config).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpuforge.errors import Exit, ForgeError
from tpuforge.layout import DOCUMENT_BYTES, Blob
from tpuforge.layout import descriptor as read_descriptor
from tpuforge.paths import parse_json, read_regular, write_atomic
from tpuforge.registry import attached

CYCLONEDX = "application/vnd.cyclonedx+json"
SPDX = "application/spdx+json"
PROVENANCE = "application/vnd.in-toto+json"
HEALTH = "application/vnd.tpuforge.health.v1+json"

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
AGAIN = "./forge sbom, and for a registry: ./forge push"
"""What mends a document, as far as can be said without knowing whose it is."""
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_EMPTY = b"{}"
_MARK = b'{"imageLayoutVersion":"1.0.0"}'
_REF = "org.opencontainers.image.ref.name"
_TITLE = "org.opencontainers.image.title"


@dataclass(frozen=True)
class Artifact:
    """A document to attach.

    Attributes:
        kind: Its artifact type.
        name: Its file name.
        data: Its bytes.
        annotations: What its manifest says of it.
    """

    kind: str
    name: str
    data: bytes
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Referrer:
    """An attached document.

    Attributes:
        kind: Its artifact type.
        digest: Digest of its manifest.
        size: Bytes of its manifest.
        subject: Digest of the manifest that it is attached to.
        blob: The document's blob.
        name: The document's file name.
    """

    kind: str
    digest: str
    size: int
    subject: str
    blob: Blob
    name: str


def tag(subject: str) -> str:
    """The tag under which a registry without the referrers API keeps the index.

    Args:
        subject: Digest of an image's manifest.
    """
    return subject.replace(":", "-")


def write(layout: Path, subject: Blob, artifacts: Sequence[Artifact]) -> list[Referrer]:
    """Write the layout of what is attached to an image: blobs first, its index last.

    Args:
        layout: Where it goes; what an earlier one left there is replaced.
        subject: The image's manifest.
        artifacts: The documents.

    Returns:
        One referrer each, in their order.
    """
    kept: set[str] = set()

    def keep(data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        kept.add(digest)
        path = layout / "blobs" / "sha256" / digest
        if not path.is_file() or path.read_bytes() != data:
            write_atomic(path, data)
        return f"sha256:{digest}"

    def descriptor(kind: str, data: bytes, **more: Any) -> dict[str, Any]:
        return {"mediaType": kind, "digest": keep(data), "size": len(data), **more}

    of = {"mediaType": subject.media_type, "digest": subject.digest, "size": subject.size}
    found, listed = [], []
    for artifact in artifacts:
        layer = descriptor(artifact.kind, artifact.data, annotations={_TITLE: artifact.name})
        annotations = {_TITLE: artifact.name, **artifact.annotations}
        body = _json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "artifactType": artifact.kind,
                "config": descriptor(_EMPTY_TYPE, _EMPTY),
                "layers": [layer],
                "subject": of,
                "annotations": annotations,
            }
        )
        entry = descriptor(MANIFEST, body, artifactType=artifact.kind, annotations=annotations)
        listed.append(entry)
        blob = Blob(layer["digest"], layer["size"], artifact.kind)
        found.append(
            Referrer(
                artifact.kind, entry["digest"], entry["size"], subject.digest, blob, artifact.name
            )
        )
    index = _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed})
    top = descriptor(INDEX, index, annotations={_REF: tag(subject.digest)})
    write_atomic(layout / "oci-layout", _MARK)
    write_atomic(
        layout / "index.json", _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": [top]})
    )
    for path in (layout / "blobs" / "sha256").iterdir():
        if path.name not in kept:
            path.unlink()
    return found


def remove(layout: Path) -> None:
    """Remove a layout, its index first, so that nobody takes half of it for whole.

    Args:
        layout: The folder; it may be missing.
    """
    (layout / "index.json").unlink(missing_ok=True)
    shutil.rmtree(layout, ignore_errors=True)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def read_index(data: bytes, where: str) -> list[tuple[str, int]]:
    """The manifests that an index of referrers lists.

    Args:
        data: The index.
        where: What it is, for an error.

    Returns:
        Digest and size of each.

    Raises:
        ForgeError: If it is no such index; exit code 1.
    """
    try:
        body = parse_json(data)
        if body["mediaType"] != INDEX:
            raise ValueError(f"it is of the type {body['mediaType']}")
        listed = [read_descriptor(one) for one in attached(data)]
        return [(one.digest, one.size) for one in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise _bad(where, f"it is no index: {type(error).__name__}: {error}") from error


def read_manifest(data: bytes, digest: str, where: str) -> Referrer:
    """What the manifest of an attached document says.

    Args:
        data: The manifest.
        digest: The digest under which it was had.
        where: What it is, for an error.

    Raises:
        ForgeError: If its bytes have another digest, or it is no artifact; exit code 1.
    """
    real = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if real != digest:
        raise _bad(where, f"its digest is {real}, and not {digest}")
    try:
        body = parse_json(data)
        (layer,) = body["layers"]
        blob = read_descriptor(layer)
        name = str((layer.get("annotations") or {}).get(_TITLE, blob.digest))
        kind, of = str(body["artifactType"]), str(body["subject"]["digest"])
        if not (name.isprintable() and kind.isprintable() and of.isprintable()):
            # it is shown beside verdicts, and could look like one
            raise ValueError("it has control characters in its name, type or subject")
        return Referrer(
            kind=kind,
            digest=digest,
            size=len(data),
            subject=of,
            blob=blob,
            name=name,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad(where, f"it is no artifact with a subject: {error}") from error


def checked(data: bytes, digest: str, where: str) -> bytes:
    """Bytes, once they are known to have their digest.

    Args:
        data: The bytes.
        digest: ``sha256:…``.
        where: What they are, for an error.

    Raises:
        ForgeError: If they have another one; exit code 1.
    """
    real = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if real != digest:
        raise _bad(where, f"its digest is {real}, and not {digest}")
    return data


def read_layout(layout: Path, subject: str) -> tuple[list[Referrer], Callable[[str], bytes]]:
    """What is attached to an image, out of its layout of referrers.

    Args:
        layout: The folder.
        subject: Digest of the image's manifest.

    Returns:
        The referrers, and what reads a blob by its digest and checks it.

    Raises:
        ForgeError: If the layout is not whole, or is of another image; exit code 1.
    """

    def blob(digest: str) -> bytes:
        path = layout / "blobs" / "sha256" / digest.removeprefix("sha256:")
        try:
            data = read_regular(path, DOCUMENT_BYTES)
        except OSError as error:
            raise _bad(str(layout), f"{digest} cannot be read: {error.strerror}") from error
        return checked(data, digest, str(path))

    try:
        listed = parse_json(read_regular(layout / "index.json", DOCUMENT_BYTES))["manifests"]
        tops = {one["annotations"][_REF]: read_descriptor(one).digest for one in listed}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _bad(str(layout), f"its index cannot be read: {error}") from error
    if tag(subject) not in tops:
        raise _bad(str(layout), f"it is of {', '.join(sorted(tops))}, and not of {subject}")
    found = []
    for digest, _ in read_index(blob(tops[tag(subject)]), str(layout)):
        found.append(read_manifest(blob(digest), digest, f"{layout}: {digest}"))
    return found, blob


def _bad(where: str, what: str) -> ForgeError:
    return ForgeError(
        f"{where}: {what}",
        expected="documents that are attached to this very image, each of its digest",
        mend=AGAIN,
        exit_code=Exit.FAULT,
    )
