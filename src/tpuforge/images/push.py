"""``push``: put baked images into a registry, with what is attached to them.

An image goes there by digest, then what is attached to it, then the tags; so a tag never names half
of anything. What is there already is not sent, and in the end the registry must have, under every
tag, the very digest that was baked.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tpuforge import baked, health_report
from tpuforge import layout as oci
from tpuforge.baked import Baked
from tpuforge.console import Progress, print_table, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import exclusive, out_dir, read_json, write_json
from tpuforge.registry import (
    Copied,
    Reference,
    Registry,
    add_options,
    fallback_tag,
    from_options,
    read_referrers,
)
from tpuforge.verb import Outcome, add_image, main_of, parser

VERB = "push"
_HEALTH = "application/vnd.tpuforge.health.v1+json"


def push(
    image: Baked,
    ref: Reference,
    registry: Registry,
    progress: Progress,
    *,
    tags: Sequence[str] = (),
    gzip: bool = False,
    move: bool = False,
    read_back: bool = False,
) -> Outcome:
    """Put one image into a repository.

    Args:
        image: The image.
        ref: The repository.
        registry: Access to it.
        progress: Told what happens.
        tags: Tags beside the image's own.
        gzip: Put its twin with gzip layers there too.
        move: Let tags that name another image name this one.
        read_back: Take every byte back from the registry and check it.

    Returns:
        What was done.

    Raises:
        ForgeError: If something here is damaged, a tag names another image, or the registry has
            other bytes in the end (exit code 1); if it does not answer or refuses (2).
    """
    own_tag = image.record["name"].rpartition(":")[2]
    named, digest = baked.words(image.record), image.image.manifest.digest
    names = list(dict.fromkeys([own_tag, *([ref.tag] if ref.tag else []), *tags]))
    ref = ref.at_tag("")
    twins = [("oci", names)]
    if gzip:
        if image.twin is None:
            raise ForgeError(
                f"there is no gzip twin of {image.slug}",
                expected="an image in out/images",
                mend=f"./forge bake {named} --gzip",
            )
        twins.append(("oci-gzip", [f"{name}-gzip" for name in names]))
    attached = {folder: _attached(image, folder) for folder, _ in twins}
    notes = []
    copied: list[Copied] = []
    put: list[str] = []
    referrers: dict[str, list[str]] = {}
    fresh = 0
    moved_index = False
    for folder, own in twins:
        layout = image.folder / folder
        found = oci.read_image(layout).manifest.digest
        absent = registry.absent_tags(ref, own, found, move=move)
        copied.append(registry.copy_in(layout, ref))
        beside = attached[folder]
        if beside is not None:
            _, documents = read_referrers(beside, found)
            index = ref.at_tag(fallback_tag(found))
            before = registry.find(index)
            fresh += sum(not registry.find(ref.at_digest(one.manifest.digest)) for one in documents)
            referrers[folder] = registry.copy_referrers(beside, ref.at_digest(found))
            moved_index = moved_index or registry.find(index) != before
        if read_back:
            _read_back(layout, ref, registry, progress)
        registry.tag(layout, ref, absent)
        for name in own:
            if name not in absent:
                registry.check(ref.at_tag(name), found)
        put += absent
    bare = [folder for folder, beside in attached.items() if beside is None]
    if bare:
        what = image.slug if "oci" in bare else f"the gzip twin of {image.slug}"
        notes.append(f"nothing is attached to {what}: ./forge sbom {named} makes what can be")
    elif fresh and not any(one.moved for one in copied):
        notes.append(
            f"{image.slug} was there, and {_documents(fresh)} newly attached to it: if it was "
            f"signed, sign it again (./forge sign {named}), or ./forge verify fails"
        )
    notes += _warn(image, attached["oci"])
    for note in notes:
        progress.note(note, loud=True)
    facts = {
        "image": image.record["image"],
        "slug": image.slug,
        "registry": ref.host,
        "repository": ref.name,
        "digest": digest,
        "reference": str(ref.at_digest(digest)),
        "tags": names,
        "new_blobs": sum(one.moved for one in copied),
        "new_bytes": sum(one.moved_bytes for one in copied),
        "known_blobs": sum(one.there for one in copied),
        "referrers": referrers.get("oci", []),
        "new_referrers": fresh,
        "referrers_tag": fallback_tag(digest) if "oci" in referrers else "",
        "gzip": {
            "digest": copied[1].digest,
            "tags": twins[1][1],
            "referrers": referrers.get("oci-gzip", []),
        }
        if gzip
        else None,
        "read_back": read_back,
    }
    sent = "; ".join(str(one) for one in copied)
    if fresh:
        sent += f"; {_documents(fresh)} newly attached"
    elif moved_index:
        sent += "; the list of what is attached was renewed"
    summary = f"{ref.at_digest(digest)} ({', '.join(names)}): {sent}"
    changed = bool(put) or fresh or moved_index or any(one.moved for one in copied)
    return Outcome("done" if changed else "unchanged", summary, facts, notes)


def _documents(number: int) -> str:
    return f"{number} document was" if number == 1 else f"{number} documents were"


def _warn(image: Baked, attached: Path | None) -> list[str]:
    """What has to be known of an image that is not known to be healthy."""
    if not image.record.get("suite_sha256"):
        return []
    digest, report = image.image.manifest.digest, None
    if attached is not None:
        _, documents = read_referrers(attached, digest)
        layers = [layer for one in documents for layer in one.layers if layer.media_type == _HEALTH]
        report = layers[0].path(attached).read_bytes() if layers else None
    text = health_report.warning(image.slug, baked.words(image.record), digest, report)
    return [text] if text else []


def _attached(image: Baked, folder: str) -> Path | None:
    """The layout of what is attached to an image or its twin, checked; None if nothing is."""
    layout = image.folder / folder.replace("oci", "referrers")
    record = read_json(image.folder / "attestations.json")
    if record is None or not (layout.exists() or folder == "oci"):
        return None
    subject = record.get("subject") if isinstance(record, dict) else None
    mend = f"./forge sbom {baked.words(image.record)}"
    if subject != image.image.manifest.digest:
        raise ForgeError(
            f"what is attached to {image.slug} belongs to another image: {subject}",
            expected=image.image.manifest.digest,
            mend=mend,
            exit_code=Exit.FAULT,
        )
    try:
        read_referrers(layout, oci.read_image(image.folder / folder).manifest.digest)
    except ForgeError as error:
        error.mend = mend
        raise
    return layout


def _read_back(layout: Path, ref: Reference, registry: Registry, progress: Progress) -> None:
    """Take every blob from the registry again; each is checked by its digest."""
    image = oci.read_image(layout)
    with (
        tempfile.TemporaryDirectory(prefix="read-back-", dir=out_dir()) as folder,
        progress.step("reading back", image.compressed),
    ):
        for blob in dict.fromkeys((image.config, *image.layers)):
            path = registry.take(ref, blob, Path(folder, "blob"))
            if path.stat().st_size != blob.size:
                raise AssertionError("a blob with the right digest has another size")
            path.unlink()


def _push(options: argparse.Namespace, progress: Progress) -> Outcome:
    target = Reference.parse(options.to)
    for tag in options.tag:
        target.checked_tag(tag)
    if target.digest:
        raise ForgeError(
            f"{options.to} has a digest",
            expected="HOST/NAME: the digest is that of the image",
            mend="leave it out",
        )
    slugs = baked.every(options) if options.all else [baked.slug_of(options)]
    registry = from_options(options, progress)
    done: list[Outcome] = []
    for slug in slugs:
        with _alone(slug, progress):
            image = baked.load(slug)
            ref = target.below(image.record["image"]) if options.all else target
            started = datetime.now(UTC)
            outcome = push(
                image,
                ref,
                registry,
                progress,
                tags=options.tag,
                gzip=options.gzip,
                move=options.move,
                read_back=options.read_back,
            )
            if options.all:
                _leave(slug, outcome, started)
        done.append(outcome)
    if not options.all:
        return done[0]
    rows = [(one.data["slug"], one.data["reference"], size(one.data["new_bytes"])) for one in done]
    if not options.json:
        print_table(("image", "where", "new there"), rows)
    new = sum(one.data["new_bytes"] for one in done)
    changed = any(one.status == "done" for one in done)
    return Outcome(
        "done" if changed else "unchanged",
        f"{len(done)} images in {target.repository}, {size(new)} of them new there",
        {"images": [one.data for one in done]},
        [note for one in done for note in one.notes],
    )


@contextlib.contextmanager
def _alone(slug: str, progress: Progress) -> Iterator[None]:
    """Keep a bake from taking away blobs that are being sent."""
    with exclusive(f"bake-{slug}", lambda who: progress.note(f"waiting for {who}: {slug} is used")):
        yield


def _leave(slug: str, outcome: Outcome, started: datetime) -> None:
    """The result of one image out of many, where its own would be."""
    record = {
        "schema": "tpuforge.result/1",
        "verb": VERB,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 3),
        "status": outcome.status,
        "summary": outcome.summary,
        "notes": outcome.notes,
        "data": outcome.data,
        "exit_code": int(outcome.exit_code),
    }
    write_json(out_dir() / "results" / f"{VERB}-{slug}.json", record)


def arguments() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = parser(VERB, "Put baked images into a registry, with what is attached to them.")
    add_image(made, flavour=None)
    made.add_argument(
        "--all", action="store_true", help="every image that is baked here, to HOST/NAME/<image>"
    )
    made.add_argument("--to", metavar="HOST/NAME", required=True, help="the repository")
    made.add_argument(
        "--tag", action="append", default=[], help="a tag beside the image's own; again for more"
    )
    made.add_argument("--gzip", action="store_true", help="push its gzip twin too")
    made.add_argument(
        "--move", action="store_true", help="let tags that name another image name this one"
    )
    made.add_argument("--read-back", action="store_true", help="take every byte back and check it")
    add_options(made)
    return made


def _subject(options: argparse.Namespace) -> str:
    return "" if options.all else baked.slug_of(options)


main = main_of(VERB, arguments, _push, subject=_subject)


if __name__ == "__main__":
    raise SystemExit(main())
