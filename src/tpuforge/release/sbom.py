"""``sbom``: write what an image is made of, and how it was made, to be attached to it.

Three documents per image: bills of materials in the forms of CycloneDX and SPDX, and the provenance
of its bake; with the health report as a fourth, if there is one of this very image. They are read
out of the finished layers and held against the locks and the base's record, so what they name is
what is there. The image itself is not touched.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packageurl import PackageURL
from packaging.utils import parse_wheel_filename

from tpuforge import baked, health_report
from tpuforge import layout as oci
from tpuforge.baked import Baked
from tpuforge.console import Progress, print_table, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.lockfile import Locked, read_lock
from tpuforge.paths import (
    ROOT,
    exclusive,
    out_dir,
    read_json,
    sha256_file,
    sha256_text,
    write_atomic,
    write_json,
)
from tpuforge.pins import Pins, load
from tpuforge.records import read_record
from tpuforge.release import attest, bill, inventory, referrers
from tpuforge.release.bill import Part, Subject
from tpuforge.release.inventory import VENV, Inventory, Layer
from tpuforge.release.licences import NONE
from tpuforge.revision import Revision
from tpuforge.verb import Outcome, add_image, main_of, parser

VERB = "sbom"
SCHEMA = "tpuforge.attestations/1"
BILL = "sbom.cdx.json"
SPDX_BILL = "sbom.spdx.json"
STATEMENT = "provenance.json"
HEALTH = "health.json"

_FORM = {
    "subject": str,
    "key": str,
    "source": dict,
    "figures": dict,
    "referrers": [{"artifact_type": str, "digest": str, "size": int, "file": str}],
}
# locks of what an image has beside its own: the health suite's packages, and pip
_OTHER_LOCKS = ("smoke", "tools")
_MOST = 5
_CODE = ("attest", "bill", "inventory", "licences", "referrers", "sbom")


def own_lock(found: Inventory, labels: Mapping[str, str]) -> list[Locked]:
    """The packages of the lock that an image carries, once it is known to be the one it names.

    Args:
        found: What is in the image.
        labels: Its labels.

    Returns:
        Its packages; none for an image without wheels.

    Raises:
        ForgeError: If the lock is not the one that the labels name, or is no lock; exit code 1.
    """
    if not found.lock:
        return []
    with tempfile.TemporaryDirectory(prefix=".lock-", dir=out_dir()) as folder:
        path = Path(folder) / "lock.txt"
        path.write_text(found.lock, encoding="utf-8", newline="")
        digest = sha256_file(path)
        wanted = labels.get("io.tpuforge.lock.sha256", "")
        if digest != wanted:
            raise ForgeError(
                f"/{inventory.LOCK} in the image has the digest {digest}",
                expected=f"{wanted or 'a digest'}, as the label io.tpuforge.lock.sha256 says",
                mend="./forge bake --no-cache",
                exit_code=Exit.FAULT,
            )
        return read_lock(path)


def _wheel_digests(image: Baked, found: Inventory) -> dict[tuple[str, str], str]:
    """SHA-256 of every wheel of an image by name and version, out of the locks."""
    own = own_lock(found, image.image.labels)
    digests = {(one.name, one.version): one.sha256 for one in own}
    environment = {
        (wheel.name, wheel.version) for wheel in found.wheels if wheel.place.startswith(VENV)
    }
    absent = sorted(set(digests) - environment)
    if absent:
        names = ", ".join(f"{name} {version}" for name, version in absent)
        raise _unfit(image, f"its lock names {names}, which its layers do not hold")
    for flavour in _OTHER_LOCKS:
        path = _other_lock(image, flavour)
        if path.is_file():
            for one in read_lock(path):
                digests.setdefault((one.name, one.version), one.sha256)
    unknown = sorted(
        {
            f"{wheel.name} {wheel.version} in /{wheel.place}"
            for wheel in found.wheels
            if (wheel.name, wheel.version) not in digests and _from_a_wheel(wheel.place)
        }
    )
    if unknown:
        raise _unfit(image, f"its layers hold {', '.join(unknown)}, which no lock names")
    return digests


def _from_a_wheel(place: str) -> bool:
    """Whether a folder is filled by the bake, and not by the base."""
    return place.startswith((VENV, "opt/tpuforge"))


def _other_lock(image: Baked, flavour: str) -> Path:
    return ROOT / "lock" / f"{flavour}-py{image.record['python'].replace('.', '')}.txt"


def _unfit(image: Baked, what: str) -> ForgeError:
    return ForgeError(
        f"{image.slug}: {what}",
        expected="exactly what the locks and the base's record name",
        mend=f"./forge bake --image {image.record['image']}, if a lock has changed since",
        exit_code=Exit.FAULT,
    )


def _base_record(image: Baked) -> tuple[Path, dict[str, Any]] | None:
    """The record of the base that an image stands on, found by its digest."""
    if inventory.SYSTEM_LABEL not in image.image.labels:
        # a base helped to gather its files, and nothing of it stayed
        return None
    wanted = image.record.get("base_digest")
    for path in sorted((out_dir() / "base").glob("*.json")):
        record = read_json(path)
        if isinstance(record, dict) and record.get("manifest_digest") == wanted:
            return path, record
    return None


def _deb_digests(
    image: Baked, found: Inventory, base: Mapping[str, Any] | None
) -> dict[tuple[str, str, str], str]:
    """SHA-256 of every Debian package of an image, out of the base's record."""
    if base is None:
        return {}
    digests = {
        (one["name"], one["version"], one["arch"]): str(one["sha256"]) for one in base["packages"]
    }
    real = {(deb.name, deb.version, deb.arch) for deb in found.debs}
    missing, strange = sorted(set(digests) - real), sorted(real - set(digests))
    if missing or strange:
        raise _unfit(
            image,
            f"its layers lack {_some(missing)} of the base's record, and hold {_some(strange)} "
            "beside it",
        )
    return digests


def _some(packages: Sequence[tuple[str, str, str]]) -> str:
    """Packages for an error: a few of them, and how many more."""
    more = f" and {len(packages) - _MOST} more" if len(packages) > _MOST else ""
    return ", ".join(" ".join(one) for one in packages[:_MOST]) + more or "nothing"


def subject_of(image: Baked, pins: Pins) -> Subject:
    """The image as its documents name it.

    Args:
        image: The image.
        pins: The pins.
    """
    return Subject(
        str(image.record["name"]), image.image.manifest.digest, image.image.labels, pins.epoch
    )


def _source(image: Baked) -> Revision:
    """The commit that the image was baked from, as its bake noted it."""
    noted = image.record.get("source")
    if not isinstance(noted, dict):
        return Revision(None, why="its bake did not note the commit")
    commit = noted.get("commit")
    return Revision(
        commit if isinstance(commit, str) else None,
        bool(noted.get("dirty")),
        str(noted.get("why") or ""),
    )


def _health(image: Baked) -> bytes | None:
    """The health report of this very image, whole as the suite left it; None without one."""
    return health_report.of_image(image.slug, image.image.manifest.digest)


def _key(
    image: Baked, pins: Pins, base: tuple[Path, dict[str, Any]] | None, source: Revision
) -> str:
    """The hash of all that the documents depend on."""
    here = Path(__file__).parent
    health, twin = _health(image), image.twin
    locks = [_other_lock(image, flavour) for flavour in _OTHER_LOCKS]
    return sha256_text(
        twin.manifest.digest if twin is not None else "",
        json.dumps(image.record, sort_keys=True),
        str(pins.epoch),
        pins.torch.index,
        sha256_file(base[0]) if base else "",
        repr(source),
        health.decode("utf-8", "replace") if health is not None else "",
        *(sha256_file(path) if path.is_file() else "" for path in locks),
        *(sha256_file(here / f"{name}.py") for name in _CODE),
        sha256_file(ROOT / "src/tpuforge/bom.py"),
    )


def record_of(image: Baked) -> dict[str, Any] | None:
    """The record of an image's documents; None if there is none, or it is of another image.

    Args:
        image: The image.
    """
    record = read_record(image.folder / "attestations.json", SCHEMA, _FORM)
    if record is None or record["subject"] != image.image.manifest.digest:
        return None
    return record


def _whole(image: Baked, record: Mapping[str, Any]) -> bool:
    """Whether every document and every referrer is there, of its digest."""
    digest, twin = image.image.manifest.digest, image.twin
    try:
        there = _there(image.referrers, digest)
        if [one for one, _, _ in there] != [one["digest"] for one in record["referrers"]]:
            return False
        if any(data != (image.attestations / name).read_bytes() for _, name, data in there):
            return False
        if twin is None:
            return record["gzip"] is None
        beside = _there(image.twin_referrers, twin.manifest.digest)
        return [one for one, _, _ in beside] == list(record["gzip"]["referrers"])
    except (ForgeError, OSError, KeyError, TypeError):
        return False


def _there(layout: Path, subject: str) -> list[tuple[str, str, bytes]]:
    """What is attached in a layout: digest of the manifest, name and bytes of the document."""
    found, blob = referrers.read_layout(layout, subject)
    ours = [one for one in found if one.subject == subject]
    return [(one.digest, one.name, blob(one.blob.digest)) for one in ours]


def _archives(image: Baked, found: Inventory, base: Mapping[str, Any] | None) -> list[Part]:
    """What was unpacked into an image beside packages: a standalone Python, the CPU plugin."""
    made = []
    python = (base or {}).get("standalone")
    if isinstance(python, dict):
        purl = PackageURL(
            "generic", None, python["name"], python["version"], {"download_url": python["url"]}
        )
        layer = image.image.layers[0].digest
        made.append(
            Part(
                "archive",
                python["name"],
                python["version"],
                "",
                purl,
                python["sha256"],
                "PSF-2.0",
                layer,
            )
        )
    plugin = found.facts.get("plugin")
    if isinstance(plugin, dict):
        name, version, _, _ = parse_wheel_filename(str(plugin["wheel"]))
        purl = PackageURL("pypi", None, name, str(version))
        layer = image.image.layers[-1].digest
        made.append(Part("archive", name, str(version), "", purl, plugin["sha256"], NONE, layer))
    return made


def parts_of(image: Baked, found: Inventory, pins: Pins) -> list[Part]:
    """Everything in an image, held against its locks and its base's record.

    Args:
        image: The image.
        found: What is in its layers.
        pins: The pins.

    Raises:
        ForgeError: If they do not agree; exit code 1.
    """
    base = _base_record(image)
    return bill.parts(
        found,
        _wheel_digests(image, found),
        _deb_digests(image, found, base[1] if base else None),
        torch_index=pins.torch.index,
        labels=image.image.labels,
        archives=_archives(image, found, base[1] if base else None),
    )


def write(
    image: Baked,
    pins: Pins,
    progress: Progress,
    *,
    release: bool = False,
    known: dict[str, Layer] | None = None,
) -> Outcome:
    """Have the documents of an image, and their layout.

    Args:
        image: The image.
        pins: The pins.
        progress: Told what happens.
        release: Refuse an image whose commit is not known, or was not clean.
        known: Layers that were read before, for images that share them.

    Raises:
        ForgeError: If the image is not what its locks and its base say; exit code 1.
    """
    source = _source(image)
    if release and (source.commit is None or source.dirty):
        raise ForgeError(
            f"{image.slug}: the commit that it was baked from is not known: "
            + (source.why or "files differ from the commit"),
            expected="an image that was baked from a clean checkout, which is as it was then",
            mend="git status; then ./forge bake, and ./forge sbom --release",
            exit_code=Exit.FAULT,
        )
    base = _base_record(image)
    key = _key(image, pins, base, source)
    before = record_of(image)
    # a moment's look, as a bake takes it: only what was written to since the bake is read
    finished = (image.folder / "image.json").stat().st_mtime_ns
    sound = not oci.damaged_since(image.layout, image.image, finished)
    if before is not None and before["key"] == key and sound and _whole(image, before):
        return _outcome(image, before, source, unchanged=True)
    bad = _damaged(image, progress)
    if bad:
        raise ForgeError(
            f"{image.slug} has damaged blobs: {', '.join(blob.digest for blob in bad)}",
            expected="every blob of the digest that names it",
            # without it a bake looks at times and sizes alone
            mend=f"./forge bake --no-cache {baked.words(image.record)}",
            exit_code=Exit.FAULT,
        )
    found = inventory.read(image.layout, image.image, progress, known=known)
    made = parts_of(image, found, pins)
    subject = subject_of(image, pins)
    health = _health(image)

    def about(of: Subject, parts: Sequence[Part]) -> list[referrers.Artifact]:
        statement = attest.statement(of, image.record, parts, source)
        return _documents(of, parts, found.release, statement, health)

    documents = about(subject, made)
    record_path = image.folder / "attestations.json"
    record_path.unlink(missing_ok=True)
    for document in documents:
        write_atomic(image.attestations / document.name, document.data)
    if health is None:
        (image.attestations / HEALTH).unlink(missing_ok=True)
    attached = referrers.write(image.referrers, image.image.manifest, documents)
    beside = None
    twin = image.twin
    if twin is None:
        referrers.remove(image.twin_referrers)
    else:
        layers = zip(image.image.layers, twin.layers, strict=True)
        names = {one.digest: other.digest for one, other in layers}
        own = [replace(part, layer=names.get(part.layer, part.layer)) for part in made]
        other = replace(subject, name=f"{subject.name}-gzip", digest=twin.manifest.digest)
        put = referrers.write(image.twin_referrers, twin.manifest, about(other, own))
        beside = {"subject": other.digest, "referrers": [one.digest for one in put]}
    kinds = [part.kind for part in made]
    record = {
        "schema": SCHEMA,
        "subject": subject.digest,
        "key": key,
        "source": {"commit": source.commit, "dirty": source.dirty},
        "referrers": [
            {
                "artifact_type": one.kind,
                "digest": one.digest,
                "size": one.size,
                "file": f"attestations/{one.name}",
            }
            for one in attached
        ],
        "gzip": beside,
        "figures": {
            "debs": kinds.count("deb"),
            "wheels": kinds.count("wheel"),
            "files": kinds.count("file"),
            "archives": kinds.count("archive"),
            "without_digest": sum(not part.sha256 for part in made),
            "bytes": {document.name: len(document.data) for document in documents},
        },
    }
    write_json(record_path, record)
    return _outcome(image, record, source, unchanged=False)


def _documents(
    subject: Subject,
    made: Sequence[Part],
    release: Mapping[str, str],
    statement: Mapping[str, Any],
    health: bytes | None,
) -> list[referrers.Artifact]:
    """The documents of an image, or of its twin with other layers of the same content."""
    text = json.dumps(statement, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    kind = {"in-toto.io/predicate-type": attest.PREDICATE_TYPE}
    documents = [
        referrers.Artifact(
            referrers.CYCLONEDX, BILL, bill.cyclonedx(subject, made, release).encode()
        ),
        referrers.Artifact(referrers.SPDX, SPDX_BILL, bill.spdx(subject, made).encode()),
        referrers.Artifact(referrers.PROVENANCE, STATEMENT, text.encode(), kind),
    ]
    if health is not None:
        documents.append(referrers.Artifact(referrers.HEALTH, HEALTH, health))
    return documents


def _damaged(image: Baked, progress: Progress) -> list[oci.Blob]:
    with progress.step(f"verifying the digests of {image.slug}", image.image.compressed):
        return oci.wrong(image.layout, image.image, progress.advance)


def _outcome(
    image: Baked, record: Mapping[str, Any], source: Revision, *, unchanged: bool
) -> Outcome:
    figures = record["figures"]
    what = ", ".join(
        f"{figures[name]} {word}"
        for name, word in (
            ("debs", "Debian packages"),
            ("wheels", "wheels (those of the health suite too)"),
            ("files", "files of no package"),
            ("archives", "unpacked archives"),
        )
        if figures[name]
    )
    notes = []
    if source.commit is None:
        notes.append(f"the provenance of {image.slug} names no commit: {source.why}")
    elif source.dirty:
        notes.append(f"{image.slug} was baked from a checkout with changes beside its commit")
    if figures["without_digest"]:
        notes.append(
            f"of {figures['without_digest']} things in {image.slug} no digest is known: "
            "the record of its base is not here"
        )
    # an image without the suite has no health to report
    if HEALTH not in figures["bytes"] and image.record.get("suite_sha256"):
        words = baked.words(image.record)
        notes.append(
            f"there is no health report of this very {image.slug}: ./forge smoke {words}, then "
            f"./forge sbom {words}"
        )
    twin = " and as many for its gzip twin" if record.get("gzip") else ""
    number = len(record["referrers"])
    return Outcome(
        "unchanged" if unchanged else "done",
        f"{image.slug}: {what}; {number} documents for {record['subject'][:19]}…{twin}",
        data={"slug": image.slug, "folder": str(image.folder), **record},
        notes=notes,
    )


def _act(options: argparse.Namespace, progress: Progress) -> Outcome:
    pins = load()
    images = baked.choose(options)
    made = []
    known: dict[str, Layer] = {}
    for image in images:
        # the lock of the bake, which changes what is read here
        with exclusive(
            f"bake-{image.slug}", lambda who: progress.note(f"waiting for {who}: it uses the image")
        ):
            made.append(
                write(baked.load(image.slug), pins, progress, release=options.release, known=known)
            )
    if not options.json:
        _print(made)
    for note in [note for one in made for note in one.notes]:
        progress.note(note)
    if len(made) == 1:
        return made[0]
    return Outcome(
        "unchanged" if all(one.status == "unchanged" for one in made) else "done",
        "; ".join(one.summary for one in made),
        data={"images": [one.data for one in made]},
        notes=[note for one in made for note in one.notes],
    )


def _print(made: Sequence[Outcome]) -> None:
    rows = []
    for one in made:
        for entry in one.data["referrers"]:
            path = Path(one.data["folder"]) / entry["file"]
            name = f"{one.data['slug']}/{entry['file']}"
            rows.append((name, size(path.stat().st_size), entry["digest"][:19] + "…"))
    print_table(("document", "size", "referrer"), rows, title=str(out_dir() / "images"))


def arguments() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = parser(
        VERB, "Write an image's bills of materials and its provenance, to be attached to it."
    )
    add_image(made)
    made.add_argument("--all", action="store_true", help="every image that is baked here")
    made.add_argument(
        "--release",
        action="store_true",
        help="refuse an image that was not baked from a clean commit of this checkout",
    )
    return made


def _subject(options: argparse.Namespace) -> str:
    return "" if options.all else baked.slug_of(options)


main = main_of(VERB, arguments, _act, subject=_subject)


if __name__ == "__main__":
    raise SystemExit(main())
