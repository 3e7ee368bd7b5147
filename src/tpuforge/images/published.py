"""A published image, held against what this checkout bakes.

Little is fetched: the manifest and the config first, whose labels tell what the image was made
from; layers only where their digests differ from one's own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tpuforge import layout as oci
from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.images.bake import SCHEMA
from tpuforge.images.base import ensure_base
from tpuforge.images.choice import choose, recipe
from tpuforge.images.context import Target, base_set
from tpuforge.paths import parse_json, write_atomic
from tpuforge.pins import Pins
from tpuforge.records import read_record
from tpuforge.registry import Reference, Registry

BASE = "org.opencontainers.image.base.digest"
_VERSION = "org.opencontainers.image.version"
_INDEX = "application/vnd.oci.image.index.v1+json"
_NAMES = {
    "io.tpuforge.lock.sha256": "the lock",
    "io.tpuforge.suite.sha256": "the health suite",
    "io.tpuforge.base.suite": "the Debian suite",
    BASE: "the base",
    "org.opencontainers.image.revision": "the revision of torch_tpu",
    _VERSION: "the version",
}


@dataclass(frozen=True)
class Published:
    """An image in a registry, without its layers.

    Attributes:
        reference: Where it is, with its digest.
        manifest: The bytes of its manifest.
        media_type: What kind of manifest that is.
        config: Its config.
    """

    reference: Reference
    manifest: bytes
    media_type: str
    config: Mapping[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return dict((self.config.get("config") or {}).get("Labels") or {})


def look(text: str, registry: Registry) -> Published:
    """Fetch the manifest and the config of an image.

    Args:
        text: ``HOST/NAME@sha256:…``.
        registry: Access to it.

    Returns:
        The image.

    Raises:
        ForgeError: If it is not named by digest (exit code 2), is no image, or the registry sends
            other bytes (1), or cannot be reached (2).
    """
    reference = Reference.parse(text)
    if not reference.digest:
        raise ForgeError(
            f"{text} is not named by its digest, and a tag may name another image tomorrow",
            expected="HOST/NAME@sha256:<64 hex digits>",
            mend="take the digest from whoever published it, or from a push's own output",
        )
    data = registry.manifest(reference)
    try:
        body = parse_json(data)
        config = parse_json(registry.document(reference, oci.descriptor(body["config"])))
        if not isinstance(config.get("config"), dict):
            raise TypeError("its config has no labels")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForgeError(
            f"{text} is not one image: {type(error).__name__}: {error}",
            expected="the manifest of an image, not an index of several",
            mend="name the image itself by its digest",
            exit_code=Exit.FAULT,
        ) from error
    kind = body.get("mediaType", "application/vnd.oci.image.manifest.v1+json")
    return Published(reference, data, kind, config)


def target_of(published: Published, pins: Pins) -> Target:
    """The image of this checkout that a published one should be.

    Args:
        published: The image.
        pins: The pins.

    Raises:
        ForgeError: If its labels name none (exit code 1), or it holds a wheel that was given to its
            bake (2).
    """
    labels = published.labels
    name = labels.get("io.tpuforge.image")
    if not name:
        raise ForgeError(
            f"{published.reference} does not say which image of tpuforge it is",
            expected="the label io.tpuforge.image",
            mend="it was built by something else: nothing here can make it again",
            exit_code=Exit.FAULT,
        )
    if "io.tpuforge.overlay" in labels:
        raise ForgeError(
            f"{published.reference} holds a wheel that was given to its bake "
            f"(sha256:{labels.get('io.tpuforge.overlay.wheel.sha256')})",
            expected="an image of the locks alone",
            mend="bake it with that wheel (./forge bake --wheel), and compare the digests",
        )
    options = argparse.Namespace(
        image=name,
        python=labels.get("io.tpuforge.python") or None,
        flavour=labels.get("io.tpuforge.flavour") or None,
    )
    return choose(options, pins)


def other_inputs(published: Published, target: Target, pins: Pins, progress: Progress) -> list[str]:
    """Which inputs of a published image are not those of this checkout.

    Args:
        published: The image.
        target: What it should be here.
        pins: The pins.
        progress: Told what happens.

    Returns:
        One line per input: what it is there, and here.

    Raises:
        ForgeError: If the inputs here cannot be read, or there is no base.
    """
    # labels that the tree alone gives are compared with the rest of the config, after the bake
    how = recipe(target)
    here = {
        _VERSION: target.name.rpartition(":")[2],
        **how.labels(target, how.read_inputs(target, pins), pins),
    }
    there = published.labels
    if BASE in there:
        base = ensure_base(base_set(target, pins), pins, progress, release=False)
        here = {**here, BASE: str(base["manifest_digest"])}
    found = [
        f"{_NAMES.get(label, label)}: {there.get(label, 'not told')} there, {value} here"
        for label, value in sorted(here.items())
        if there.get(label) != value
    ]
    created = str(published.config.get("created", ""))
    epoch = datetime.fromtimestamp(pins.epoch, UTC)
    if _moment(created) != epoch:
        found.append(f"the epoch: {created or 'not told'} there, {epoch.isoformat()} here")
    return found


def finished(target: Target, pins: Pins) -> Path:
    """The layout of the finished image, if it was baked from the inputs of this checkout.

    Args:
        target: The image.
        pins: The pins.

    Raises:
        ForgeError: If there is none, or one of other inputs.
    """
    record = read_record(target.finished / "image.json", SCHEMA, {"key": str, "base_digest": str})
    inputs = recipe(target).read_inputs(target, pins)
    if record is None or record["key"] != inputs.key(record["base_digest"]):
        raise ForgeError(
            f"{target.slug} has not been baked here from the inputs of this checkout",
            expected=f"an image in {target.finished} that is up to date",
            mend="./forge bake; or leave out --finished, for a bake from nothing",
        )
    return target.finished / "oci"


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def stage(published: Published, mine: Path, layout: Path, registry: Registry) -> Path:
    """Put a published image into a layout, with those layers that one's own image does not have.

    Args:
        published: The image.
        mine: The layout of one's own.
        layout: A new folder.
        registry: Access to the registry.

    Returns:
        The layout; the layers that both have are not in it.

    Raises:
        ForgeError: If a layer cannot be had, or the registry sends other bytes.
    """
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    reference = published.reference
    manifest = oci.Blob(reference.digest, len(published.manifest), published.media_type)
    manifest.path(layout).write_bytes(published.manifest)
    body = json.loads(published.manifest)
    known = {layer.digest for layer in oci.read_image(mine).layers}
    for entry in (body["config"], *body["layers"]):
        blob = oci.descriptor(entry)
        if blob.digest not in known and not blob.path(layout).exists():
            blob.path(layout).hardlink_to(registry.blob(reference, blob))
    index = {
        "schemaVersion": 2,
        "mediaType": _INDEX,
        "manifests": [
            {"mediaType": manifest.media_type, "digest": manifest.digest, "size": manifest.size}
        ],
    }
    write_atomic(layout / "oci-layout", '{"imageLayoutVersion":"1.0.0"}')
    write_atomic(layout / "index.json", json.dumps(index))
    return layout
