"""Small images that a registry and an engine take, for tests of what compares and measures them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
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


def put(layout: Path, data: bytes, media_type: str) -> dict[str, Any]:
    """Put a blob into a layout; its descriptor."""
    digest = hashlib.sha256(data).hexdigest()
    path = layout / "blobs" / "sha256" / digest
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        # it may be a hard link to a blob of another layout
        path.write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data), "mediaType": media_type}


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
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{KIND}.manifest.v1+json",
        "config": put(layout, json.dumps(config).encode(), f"{KIND}.config.v1+json"),
        "layers": [put(layout, one, f"{KIND}.layer.v1.tar+gzip") for one in layers],
        **({"annotations": dict(annotations)} if annotations else {}),
    }
    entry = put(layout, json.dumps(manifest).encode(), f"{KIND}.manifest.v1+json")
    index = {"schemaVersion": 2, "manifests": [entry]}
    (layout / "index.json").write_text(json.dumps(index))
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return layout
