"""``sign``: sign an image in a registry, and every document that is attached to it.

Only what was baked here is signed: the digests are those of ``out/images``, never what a registry
says that a tag stands for. What is signed by the same key already stays as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from tpuforge import baked, health_report
from tpuforge.baked import Baked
from tpuforge.console import Progress, print_table
from tpuforge.distribution import NotThereError
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import read_json, scratch_dir
from tpuforge.registry import Reference, Registry, add_options, from_options
from tpuforge.release import cosign, referrers, sbom
from tpuforge.release.cosign import Cosign, NotSignedError, Signer
from tpuforge.verb import Outcome, add_image, main_of, parser

VERB = "sign"


def to_sign(image: Baked) -> list[tuple[str, str]]:
    """What is signed of an image: itself, and what is attached to it.

    Args:
        image: The image, with its documents beside it.

    Returns:
        What it is, and its digest; the image first.

    Raises:
        ForgeError: If its documents are missing, damaged, or of another image; exit code 1.
    """
    digest = image.image.manifest.digest
    if sbom.record_of(image) is None:
        raise _bare(image, image.slug, digest)
    found, _ = referrers.read_layout(image.referrers, digest)
    return [("image", digest), *((one.name, one.digest) for one in found)]


def _bare(image: Baked, name: str, digest: str, more: str = "") -> ForgeError:
    words = baked.words(image.record)
    return ForgeError(
        f"{name} has no bill of materials and no provenance of its own yet",
        expected=f"documents of {digest}",
        mend=f"./forge sbom {words}, ./forge push {words} --to HOST/NAME{more}, "
        f"./forge sign {words}",
        exit_code=Exit.FAULT,
    )


def target_of(image: Baked, text: str | None) -> Reference:
    """Where an image is to be signed.

    Args:
        image: The image.
        text: The reference that was given; None for where it was pushed last.

    Raises:
        ForgeError: If it was pushed nowhere, or the reference names another image.
    """
    digest, words = image.image.manifest.digest, baked.words(image.record)
    if text is None:
        pushed: Any = read_json(image.folder.parents[1] / "results" / f"push-{image.slug}.json")
        data = pushed.get("data") if isinstance(pushed, dict) else None
        if not isinstance(data, dict) or not data.get("registry") or not data.get("repository"):
            raise ForgeError(
                f"{image.slug} was pushed nowhere from here",
                expected="--to HOST/NAME",
                mend=f"./forge push {words} --to HOST/NAME, then ./forge sign {words}",
            )
        repository = str(data["repository"])
        whole = repository.startswith(f"{data['registry']}/")
        text = repository if whole else f"{data['registry']}/{repository}"
    ref = Reference.parse(text)
    if ref.digest and ref.digest != digest:
        raise ForgeError(
            f"{ref} is not {image.slug}, which is {digest}",
            expected="an image that was baked here: nothing else is signed",
            mend=f"leave the digest out, or bake it: ./forge bake --image {image.record['image']}",
            exit_code=Exit.FAULT,
        )
    return ref.at_digest(digest)


def sign(image: Baked, ref: Reference, registry: Registry, signer: Signer) -> Outcome:
    """Sign an image and its documents.

    Args:
        image: The image.
        ref: Where it is, by digest.
        registry: How registries are reached.
        signer: By whom.

    Raises:
        ForgeError: If the registry does not hold them (exit code 1), or they cannot be signed.
    """
    progress = registry.progress
    wanted = [*to_sign(image), *_twin(image, registry, ref)]
    notes = _warn(image, progress)
    with progress.step(f"looking for them in {ref.repository}"):
        absent = [what for what, digest in wanted if not _is_there(registry, ref, digest)]
    if absent:
        raise ForgeError(
            f"{ref.repository} does not hold {', '.join(absent)} of {image.slug}",
            expected="the image, with all that is attached to it",
            mend=f"./forge push {baked.words(image.record)} --to {ref.repository}"
            + (" --gzip" if image.twin else ""),
            exit_code=Exit.FAULT,
        )
    tool = Cosign(registry, ref, cosign.program(progress))
    open_ones = wanted
    if signer.key:
        with progress.step("looking for signatures"):
            open_ones = _unsigned(tool, wanted, signer)
    if open_ones:
        with progress.step(f"signing {_count(len(open_ones))}"):
            tool.sign([digest for _, digest in open_ones], signer)
    signed = {digest for _, digest in open_ones}
    data = {
        "slug": image.slug,
        "registry": ref.host,
        "repository": ref.repository,
        "digest": ref.digest,
        "signed": [
            {"what": what, "digest": digest, "new": digest in signed} for what, digest in wanted
        ],
        "by": "key" if signer.key else "identity",
        "log": signer.log or not signer.key,
    }
    if not open_ones:
        summary = f"{ref} and {_count(len(wanted) - 1)} beside it: signed with this key already"
        return Outcome("unchanged", summary, data, notes)
    summary = f"signed {len(open_ones)} of {_count(len(wanted))} of {ref}"
    return Outcome("done", summary, data, notes)


def _count(number: int) -> str:
    return f"{number} manifest{'' if number == 1 else 's'}"


def _warn(image: Baked, progress: Progress) -> list[str]:
    """Say that an image is about to be signed that is not known to be healthy."""
    if not image.record.get("suite_sha256"):
        return []
    found, blob = referrers.read_layout(image.referrers, image.image.manifest.digest)
    attached = [blob(one.blob.digest) for one in found if one.kind == referrers.HEALTH]
    text = health_report.warning(
        image.slug,
        baked.words(image.record),
        image.image.manifest.digest,
        attached[0] if attached else None,
    )
    if text:
        progress.note(text, loud=True)
    return [text] if text else []


def _twin(image: Baked, registry: Registry, ref: Reference) -> list[tuple[str, str]]:
    """The same image with gzip layers and its documents, if it is here and in the registry."""
    twin = image.twin
    if twin is None or not _is_there(registry, ref, twin.manifest.digest):
        return []
    digest = twin.manifest.digest
    about = (sbom.record_of(image) or {}).get("gzip") or {}
    if about.get("subject") != digest:
        raise _bare(image, f"the gzip twin of {image.slug}", digest, " --gzip")
    found, _ = referrers.read_layout(image.twin_referrers, digest)
    return [("gzip twin", digest), *((f"{one.name} of the twin", one.digest) for one in found)]


def _is_there(registry: Registry, ref: Reference, digest: str) -> bool:
    try:
        registry.manifest(ref.at_digest(digest))
    except NotThereError:
        return False
    return True


def _unsigned(
    tool: Cosign, wanted: Sequence[tuple[str, str]], signer: Signer
) -> list[tuple[str, str]]:
    """What this key has not signed yet."""
    found = []
    with scratch_dir() as folder:
        public = tool.public_key(signer, folder)
        for what, digest in wanted:
            try:
                tool.verify(digest, public)
            except NotSignedError:
                found.append((what, digest))
    return found


def _act(options: argparse.Namespace, progress: Progress) -> Outcome:
    (image,) = baked.choose(options)
    registry = from_options(options, progress)
    ref = target_of(image, options.to)
    # an empty one is a variable that is not set, and no wish to sign by an identity
    key = cosign.key_of(options.key) if options.key is not None else ""
    signer = Signer(key=key, log=options.log)
    outcome = sign(image, ref, registry, signer)
    if not options.json:
        rows = [
            (one["what"], one["digest"], "signed" if one["new"] else "was signed")
            for one in outcome.data["signed"]
        ]
        print_table(("what", "digest", ""), rows)
    return outcome


def arguments() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = parser(VERB, "Sign an image in a registry, and what is attached to it, with cosign.")
    add_image(made)
    made.add_argument(
        "--to", metavar="HOST/NAME", help="where it is; where it was pushed last if not given"
    )
    made.add_argument(
        "--key", help="a private key of cosign, or one of a key service; without one: keyless"
    )
    made.add_argument(
        "--log",
        action="store_true",
        help="put a signature by key into the public transparency log too",
    )
    add_options(made)
    return made


main = main_of(VERB, arguments, _act, subject=baked.slug_of)


if __name__ == "__main__":
    raise SystemExit(main())
