"""Small images that a registry and an engine take, laid out as the OCI's specification wants it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KIND = "application/vnd.oci.image"


def layer(files: Mapping[str, bytes], *, mode: int = 0o644, headers: Any = None) -> bytes:
    """A layer, compressed with gzip."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), mode, 1
            entry.pax_headers = dict(headers or {})
            archive.addfile(entry, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), 6, mtime=0)


class Layout:
    """Writes an OCI layout, blob by blob."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)

    def blob(self, data: bytes, kind: str, **more: object) -> dict[str, Any]:
        """Add a blob; its descriptor."""
        digest = hashlib.sha256(data).hexdigest()
        path = self.folder / "blobs" / "sha256" / digest
        if not path.exists():
            # it may be a hard link to a blob of another layout
            path.write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data), **more}

    def json(self, value: object, kind: str, **more: object) -> dict[str, Any]:
        """Add a document; its descriptor."""
        return self.blob(json.dumps(value, sort_keys=True).encode(), kind, **more)

    def manifest(self, config: object, layers: Sequence[object], **more: object) -> dict[str, Any]:
        """Add the manifest of an image, and its configuration; its descriptor."""
        body = {
            "schemaVersion": 2,
            "mediaType": f"{KIND}.manifest.v1+json",
            "config": self.json(config, f"{KIND}.config.v1+json"),
            "layers": list(layers),
            **more,
        }
        return self.json(body, f"{KIND}.manifest.v1+json")

    def finish(self, entry: dict[str, Any]) -> None:
        """Write what names the one manifest or index."""
        index = {"schemaVersion": 2, "mediaType": f"{KIND}.index.v1+json", "manifests": [entry]}
        (self.folder / "index.json").write_text(json.dumps(index))
        mark = self.folder / "oci-layout"
        if not mark.exists():
            mark.write_text('{"imageLayoutVersion":"1.0.0"}')


def image(
    layout: Path,
    *layers: bytes,
    labels: Mapping[str, str] | None = None,
    created: str = "2026-11-30T00:00:00Z",
    annotations: Mapping[str, str] | None = None,
) -> Path:
    """A layout with one image, as complete as the OCI's specification wants it."""
    config = {
        "architecture": "amd64",
        "os": "linux",
        "created": created,
        "config": {"Labels": dict(labels or {})},
        "rootfs": {
            "type": "layers",
            "diff_ids": [
                f"sha256:{hashlib.sha256(gzip.decompress(one)).hexdigest()}" for one in layers
            ],
        },
    }
    made = Layout(layout)
    blobs = [made.blob(one, f"{KIND}.layer.v1.tar+gzip") for one in layers]
    made.finish(
        made.manifest(config, blobs, **({"annotations": dict(annotations)} if annotations else {}))
    )
    return layout
