"""How an image came to be: an in-toto statement with SLSA provenance of its bake.

The statement names the image by the digest of its manifest, and as materials everything that it was
made of: each wheel, each Debian package, the base, the lock, and the commit of the checkout if that
is what was baked. It holds no time and no place, so the same image, baked by the same engine from
the same checkout, has the same statement; and no credential (:mod:`tpuforge.disclosure`).

Facts: in-toto Attestation Framework, Statement v1 and ResourceDescriptor v1; SLSA, build provenance
v1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpuforge import __version__
from tpuforge.disclosure import blot, given, secrets
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import parse_json
from tpuforge.release.bill import Part, Subject
from tpuforge.release.licences import NONE
from tpuforge.release.referrers import AGAIN
from tpuforge.revision import Revision

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "pkg:generic/tpuforge?format=bake-1#docs/sbom.md"
"""What the fields of the build definition mean: a package URL of this project's own page."""
BUILDER = "pkg:generic/tpuforge#bake"
"""Who made an image: this project's bake."""


def statement(
    subject: Subject,
    record: Mapping[str, Any],
    found: Sequence[Part],
    source: Revision,
) -> dict[str, Any]:
    """The statement of an image.

    Args:
        subject: The image.
        record: Its ``image.json``.
        found: What is in it.
        source: The state of the checkout at its bake.

    Returns:
        A JSON object.
    """
    given_wheel = record.get("overlay") or {}
    external = given(
        {
            "image": record["image"],
            "python": record["python"] or None,
            "flavour": record["flavour"] or None,
            "name": record["name"],
            "wheel": given_wheel.get("file"),
        }
    )
    internal = {
        "inputs": dict(record["inputs"]),
        "sourceDateEpoch": subject.epoch,
        "engine": dict(record["engine"]),
    }
    predicate = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": external,
            "internalParameters": internal,
            "resolvedDependencies": _materials(record, found, source),
        },
        "runDetails": {"builder": {"id": BUILDER, "version": {"tpuforge": __version__}}},
    }
    hidden = sorted(secrets(os.environ), key=len, reverse=True)
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": subject.name.rpartition(":")[0], "digest": {"sha256": subject.hex}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": blot(predicate, hidden),
    }


def _materials(
    record: Mapping[str, Any], found: Sequence[Part], source: Revision
) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    if source.commit:
        made.append(
            given(
                {
                    "name": "source",
                    "uri": "pkg:generic/tpuforge",
                    "digest": {"gitCommit": source.commit},
                    "annotations": {"dirty": True} if source.dirty else None,
                }
            )
        )
    base = str(record.get("base_digest") or "")
    if base:
        # files of an image without a system were only gathered on one
        stands = "org.opencontainers.image.base.digest" in record["labels"]
        name = "base" if stands else "build base"
        made.append({"name": name, "digest": {"sha256": base.rpartition(":")[2]}})
    for name in ("lock", "suite"):
        digest = str(record.get(f"{name}_sha256") or "")
        if digest:
            made.append({"name": name, "digest": {"sha256": digest}})
    seen = set()
    for part in sorted(found, key=lambda part: (part.kind, part.name, part.version)):
        # the packaging of two places is one wheel, and a file without a package is ours
        if not part.sha256 or part.purl is None or (part.purl, part.sha256) in seen:
            continue
        seen.add((part.purl, part.sha256))
        annotations = {"licence": part.licence} if part.licence != NONE else None
        made.append(
            given(
                {
                    "name": part.name,
                    "uri": part.purl.to_string(),
                    "digest": {"sha256": part.sha256},
                    "annotations": annotations,
                }
            )
        )
    return made


@dataclass(frozen=True)
class Said:
    """What a statement says, as far as it is verified.

    Attributes:
        subjects: Digests of what it is about (``sha256:…``).
        builder: Who made it.
        build_type: How to read it.
        base: Digest of the base; empty if it names none.
        lock: Digest of the lock; empty if it names none.
        commit: The commit of the source; empty if it names none.
        dirty: Whether files differed from that commit.
        packages: SHA-256 of each package by its URL.
    """

    subjects: tuple[str, ...]
    builder: str
    build_type: str
    base: str
    lock: str
    commit: str
    dirty: bool
    packages: frozenset[tuple[str, str]]


def read(data: bytes) -> Said:
    """Read a statement.

    Args:
        data: Its JSON.

    Raises:
        ForgeError: If it is no statement with SLSA provenance; exit code 1.
    """
    try:
        body = parse_json(data)
        if body["_type"] != STATEMENT_TYPE or body["predicateType"] != PREDICATE_TYPE:
            raise ValueError(f"it is of the type {body['predicateType']}")
        definition = body["predicate"]["buildDefinition"]
        materials = definition["resolvedDependencies"]
        named = {one["name"]: one for one in materials if "uri" not in one}
        source: dict[str, Any] = next(
            (one for one in materials if "gitCommit" in one["digest"]), {}
        )
        return Said(
            subjects=tuple(f"sha256:{one['digest']['sha256']}" for one in body["subject"]),
            builder=str(body["predicate"]["runDetails"]["builder"]["id"]),
            build_type=str(definition["buildType"]),
            base=str(named.get("base", {"digest": {"sha256": ""}})["digest"]["sha256"]),
            lock=str(named.get("lock", {"digest": {"sha256": ""}})["digest"]["sha256"]),
            commit=str(source.get("digest", {}).get("gitCommit", "")),
            dirty=bool(source.get("annotations", {}).get("dirty")),
            packages=frozenset(
                (str(one["uri"]), str(one["digest"]["sha256"]))
                for one in materials
                if "uri" in one and "sha256" in one["digest"]
            ),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForgeError(
            f"the provenance cannot be read: {type(error).__name__}: {error}",
            expected="an in-toto statement with SLSA build provenance v1",
            mend=AGAIN,
            exit_code=Exit.FAULT,
        ) from error
