"""``verify``: is this image what it says it is, and from whom it should be?

Of an image in a registry: the signature of it and of every document attached to it, whether those
are of this very image, and whether the labels, the bills of materials and the provenance tell one
and the same story. Of an image that was baked here: every digest of its layout, and its documents
against what is really in its layers. Nothing is believed that is not checked, and what was not
checked is said.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tpuforge import baked, health_report
from tpuforge import layout as oci
from tpuforge.baked import Baked
from tpuforge.console import Progress, visible
from tpuforge.distribution import NotThereError
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import out_dir, parse_json, read_json
from tpuforge.registry import Reference, Registry, add_options, from_options
from tpuforge.release import attest, bill, cosign, installed, inventory, referrers, sbom
from tpuforge.release.cosign import Cosign, Signer
from tpuforge.release.inventory import Inventory
from tpuforge.release.referrers import Referrer
from tpuforge.verb import Outcome, add_image, main_of, parser

VERB = "verify"

# every image says at least this of itself
_LABELS = (
    "org.opencontainers.image.title",
    "org.opencontainers.image.description",
    "org.opencontainers.image.version",
    "org.opencontainers.image.licenses",
    "org.opencontainers.image.created",
    "io.tpuforge.image",
)
# an image with a system below, and one with wheels, say more
_SYSTEM_LABELS = (
    "org.opencontainers.image.base.name",
    "org.opencontainers.image.base.digest",
    "io.tpuforge.lock.sha256",
)
_SUITE_LABEL = "io.tpuforge.suite.sha256"
_WHEEL_LABELS = (
    "org.opencontainers.image.source",
    "org.opencontainers.image.revision",
    "io.tpuforge.python",
    "io.tpuforge.flavour",
    _SUITE_LABEL,
    "io.tpuforge.xla.commit",
)
# wheels that an image's labels name by digest
_NAMED = ("torch", "torch-tpu", "libtpu")
_NEEDED = {
    referrers.CYCLONEDX: "a bill of materials (CycloneDX)",
    referrers.SPDX: "a bill of materials (SPDX)",
    referrers.PROVENANCE: "provenance",
}
_OURS = (*_NEEDED, referrers.HEALTH)
_HEALTH = "health"
_MOST_LINES = 8
_FRESH = "bake --no-cache"


@dataclass
class Check:
    """One thing that was looked at.

    Attributes:
        what: What it is.
        status: How it ended.
        detail: What was found.
        mend: What mends it, if it failed.
    """

    what: str
    status: Literal["passed", "failed", "not run"]
    detail: str = ""
    mend: str = ""

    def __post_init__(self) -> None:
        # it tells of labels of strangers, which must not look like lines of their own
        self.detail = visible(" ".join(self.detail.split("\n")))


@dataclass
class Verdict:
    """All checks of one image.

    Attributes:
        own: The arguments that name it, if it is of this checkout; else empty.
        to: The repository that it is in; empty if it was baked here.
        gzip: Whether it is the twin with gzip layers.
        checks: In the order in which they were made.
    """

    own: str = ""
    to: str = ""
    gzip: bool = False
    checks: list[Check] = field(default_factory=list)

    def mend(self, *before: str) -> str:
        """The lines that make the documents of an image again, and all that comes after.

        Args:
            before: What has to be done first, such as ``smoke``.
        """
        if not self.own:
            return "do not use it: it is no image of this checkout; ask who published it"
        more = " --gzip" if self.gzip else ""
        lines = [f"./forge {verb} {self.own}{more * verb.startswith('bake')}" for verb in before]
        lines.append(f"./forge sbom {self.own}")
        if self.to:
            lines.append(f"./forge push {self.own}{more} --to {self.to}")
            lines.append(f"./forge sign {self.own} --to {self.to}")
        return f"do not use it; it is of this checkout: {', '.join(lines)}"

    @contextmanager
    def check(self, what: str, mend: str = "") -> Iterator[list[str]]:
        """Make one check; it fails with a ``ForgeError`` of exit code 1, or with a line of fault.

        Args:
            what: What is looked at.
            mend: What mends a fault; what the error says, or :meth:`mend`, if it is not given.

        Yields:
            A list for the lines of what is wrong.

        Raises:
            ForgeError: What cannot be judged here.
        """
        faults: list[str] = []
        try:
            yield faults
        except ForgeError as error:
            if error.exit_code != Exit.FAULT:
                raise
            # what does not know the image cannot name it
            said = "" if error.mend == referrers.AGAIN else error.mend
            self.checks.append(Check(what, "failed", error.found, mend or said or self.mend()))
            return
        more = [f"and {len(faults) - _MOST_LINES} more"] if len(faults) > _MOST_LINES else []
        detail = "; ".join([*faults[:_MOST_LINES], *more])
        bad = Check(what, "failed", detail, mend or self.mend())
        self.checks.append(bad if faults else Check(what, "passed"))

    def skip(self, what: str, why: str) -> None:
        """Say that something was not checked.

        Args:
            what: What.
            why: Why.
        """
        self.checks.append(Check(what, "not run", why))

    @property
    def failed(self) -> list[Check]:
        """The checks that failed."""
        return [one for one in self.checks if one.status == "failed"]


@dataclass
class Documents:
    """What is attached to an image, read.

    Attributes:
        cyclonedx: The bill in CycloneDX; None without one that can be read.
        spdx: The same in SPDX.
        provenance: The statement.
        health: The health reports; the image may have been judged more than once.
    """

    cyclonedx: bill.Read | None = None
    spdx: bill.Read | None = None
    provenance: attest.Said | None = None
    health: list[bytes] = field(default_factory=list)


def labels_wrong(labels: Mapping[str, str], said: bill.Read | None) -> list[str]:
    """What is missing among an image's labels, or told otherwise by its bill.

    Args:
        labels: The labels.
        said: Its bill in CycloneDX; None without one.
    """
    kinds = {part[0] for part in said.parts} if said is not None else set()
    wheels = {part[1]: part for part in said.parts if part[0] == "wheel"} if said else {}
    wanted = list(_LABELS)
    wanted += _SYSTEM_LABELS if "deb" in kinds else []
    # the environment's own wheels: an image without torch has none
    has_torch = "torch" in wheels
    wanted += _WHEEL_LABELS if has_torch else []
    named = _NAMED if has_torch else ()
    wanted += [f"io.tpuforge.{name}.{what}" for name in named for what in _OF_A_WHEEL]
    wrong = [f"there is no label {name}" for name in wanted if not labels.get(name)]
    for name in named:
        _, _, version, _, sha256 = wheels.get(name, ("", "", "", "", ""))
        for what, real in zip(_OF_A_WHEEL, (version, sha256), strict=True):
            label = f"io.tpuforge.{name}.{what}"
            if labels.get(label) and labels[label] != real:
                wrong.append(f"{label} says {labels[label]}, and the bill {real or 'nothing'}")
    return wrong


_OF_A_WHEEL = ("version", "wheel.sha256")


def provenance_wrong(
    said: attest.Said, digest: str, labels: Mapping[str, str], cyclonedx: bill.Read | None
) -> list[str]:
    """What a statement tells otherwise than the image.

    Args:
        said: The statement.
        digest: Digest of the image's manifest.
        labels: The image's labels.
        cyclonedx: Its bill; None without one.
    """
    wrong = []
    if said.subjects != (digest,):
        wrong.append(f"it is about {', '.join(said.subjects) or 'nothing'}")
    if said.builder != attest.BUILDER or said.build_type != attest.BUILD_TYPE:
        wrong.append(f"it was made by {said.builder} ({said.build_type}), not by ./forge bake")
    base = labels.get("org.opencontainers.image.base.digest", "").removeprefix("sha256:")
    for what, one, other in (
        ("base", said.base, base),
        ("lock", said.lock, labels.get("io.tpuforge.lock.sha256", "")),
    ):
        if one != other:
            wrong.append(f"its {what} is {one or 'none'}, and that of the labels {other or 'none'}")
    if cyclonedx is not None:
        billed = {part[4] for part in cyclonedx.parts if part[0] != "file" and part[4]}
        told = {sha256 for _, sha256 in said.packages}
        named = {part[4]: part[1] for part in cyclonedx.parts}
        wrong += [f"it does not name {named[one]}, as the bill does" for one in billed - told]
        files = {part[4] for part in cyclonedx.parts if part[0] == "file"}
        wrong += [f"it names sha256:{one}, which no bill names" for one in told - billed - files]
    return wrong


def _read_documents(
    verdict: Verdict, found: Sequence[Referrer], blob: Callable[[Referrer], bytes], digest: str
) -> Documents:
    """Read what is attached; each document of each kind has to be of this image."""
    documents = Documents()
    for one in found:
        if one.kind not in _OURS:
            continue
        if one.kind == referrers.HEALTH:
            with verdict.check(f"{one.name} is of its digest"):
                documents.health.append(referrers.checked(blob(one), one.blob.digest, one.name))
            continue
        with verdict.check(f"{one.name} is of this image") as faults:
            data = referrers.checked(blob(one), one.blob.digest, one.name)
            if one.kind == referrers.PROVENANCE:
                documents.provenance = attest.read(data)
                if documents.provenance.subjects != (digest,):
                    faults.append(f"it is about {', '.join(documents.provenance.subjects)}")
                continue
            reader = bill.read_cyclonedx if one.kind == referrers.CYCLONEDX else bill.read_spdx
            try:
                said = reader(data)
            except ValueError as error:
                faults.append(f"it cannot be read: {error}")
                continue
            if said.digest != digest:
                faults.append(f"it is of {said.digest}")
            if one.kind == referrers.CYCLONEDX:
                documents.cyclonedx = said
            else:
                documents.spdx = said
    return documents


def _judge_documents(
    verdict: Verdict, documents: Documents, digest: str, labels: Mapping[str, str]
) -> None:
    """Whether labels, bills and provenance tell one and the same story."""
    cyclonedx, spdx, said = documents.cyclonedx, documents.spdx, documents.provenance
    with verdict.check("labels complete, and as the bill says") as faults:
        faults.extend(labels_wrong(labels, cyclonedx))
    if cyclonedx is not None and spdx is not None:
        with verdict.check("both bills tell the same") as faults:
            bare = frozenset((*part[:3], "", part[4]) for part in cyclonedx.parts)
            faults.extend(bill.differences(spdx.parts, bare))
    if said is not None:
        with verdict.check("provenance: this image, this builder, these materials") as faults:
            faults.extend(provenance_wrong(said, digest, labels, cyclonedx))


def _judge_health(
    verdict: Verdict, documents: Documents, labels: Mapping[str, str], *, healthy: bool
) -> None:
    """What the health suite found; of several reports the one that was begun last counts."""
    mend = verdict.mend("smoke")
    judged = [(health_report.told(data), data) for data in documents.health]
    damaged = [told for told, _ in judged if told.word == "damaged"]
    if damaged:
        found = f"the report is not whole: {damaged[0].why}"
        verdict.checks.append(Check(_HEALTH, "failed", found, mend))
        return
    if not judged:
        suite = labels.get(_SUITE_LABEL)
        why = "no health report is attached" if suite else "the image has no health suite"
        told = health_report.Told("not judged", why)
    else:
        told, _ = max(judged, key=lambda one: str(parse_json(one[1])["started"]))
    detail = f"{told.word}: {told.why}"
    if told.word == "healthy":
        verdict.checks.append(Check(_HEALTH, "passed", detail))
    elif told.word == "unhealthy":
        mend = f"read the report. {verdict.mend(_FRESH, 'smoke')}"
        verdict.checks.append(Check(_HEALTH, "failed", detail, mend))
    elif healthy:
        verdict.checks.append(Check(_HEALTH, "failed", detail, mend))
    else:
        verdict.skip(_HEALTH, detail)


def _judge_layers(
    verdict: Verdict,
    documents: Documents,
    found: Inventory,
    labels: Mapping[str, str],
) -> None:
    """Whether the bills name what is really in the layers."""
    locked: dict[tuple[str, str], str] = {}
    if found.lock:
        what = "the lock in the image is the one that its labels name"
        with verdict.check(what, verdict.mend(_FRESH)):
            locked = {(one.name, one.version): one.sha256 for one in sbom.own_lock(found, labels)}
    for name, said, places in (
        (sbom.BILL, documents.cyclonedx, True),
        (sbom.SPDX_BILL, documents.spdx, False),
    ):
        if said is None:
            continue
        with verdict.check(f"{name} names what is in the layers") as faults:
            real = bill.told(
                bill.parts(found, locked, {}, torch_index="", labels=labels), places=places
            )
            # digests of packages are not in the layers: they are held against the lock below
            plain = frozenset((*part[:4], part[4] if part[0] == "file" else "") for part in real)
            bare = frozenset(
                (*part[:4], part[4] if part[0] == "file" else "")
                for part in said.parts
                # an archive leaves no trace of itself
                if part[0] != "archive"
            )
            faults.extend(bill.differences(bare, plain))
    if locked:
        _judge_files(verdict, found, locked)
    if documents.cyclonedx is not None and locked:
        with verdict.check("the bill's wheels are those of the image's own lock") as faults:
            for kind, name, version, place, sha256 in sorted(documents.cyclonedx.parts):
                wanted = locked.get((name, version), "")
                inside = kind == "wheel" and place.startswith(inventory.VENV)
                if inside and wanted and sha256 != wanted:
                    faults.append(f"{name} {version} is sha256:{sha256 or 'none'}, not {wanted}")


def _judge_files(verdict: Verdict, found: Inventory, locked: Mapping[tuple[str, str], str]) -> None:
    """Whether the files of the wheels are those that the lock names."""
    with verdict.check(
        "every file of a wheel is as its RECORD says, and none is beside", verdict.mend(_FRESH)
    ) as faults:
        faults.extend(installed.changed(found))
    what = "every RECORD is that of the locked wheel"
    wrong, absent = installed.unlike(found, locked)
    if wrong or len(absent) < len(locked):
        with verdict.check(what, verdict.mend(_FRESH)) as faults:
            faults.extend(wrong)
    if absent:
        names = f"{', '.join(absent[:_MOST_LINES])}{' …' if len(absent) > _MOST_LINES else ''}"
        verdict.skip(what, f"not in the wheelhouse: {names} (./forge fetch_wheel)")


def verify_local(image: Baked, progress: Progress, *, healthy: bool = False) -> Verdict:
    """Verify an image that was baked here.

    Args:
        image: The image.
        progress: Told what happens.
        healthy: Ask of it to be judged, and healthy.

    Returns:
        The checks.
    """
    verdict = Verdict(baked.words(image.record))
    digest = image.image.manifest.digest
    with (
        verdict.check("every blob of the layout is of its digest", verdict.mend(_FRESH)) as faults,
        progress.step("verifying the digests", image.image.compressed),
    ):
        bad = oci.wrong(image.layout, image.image, progress.advance)
        faults.extend([f"{blob.digest} is missing or damaged" for blob in bad])
    verdict.skip("signature", "an image is signed in a registry: ./forge verify HOST/NAME --key …")
    found: list[Referrer] = []
    documents = Documents()
    with verdict.check("documents attached, each of its digest and of this image") as faults:
        if not (image.referrers / "index.json").is_file():
            raise ForgeError(
                "no documents yet",
                expected="bills of materials and provenance",
                mend=f"./forge sbom {verdict.own}",
                exit_code=Exit.FAULT,
            )
        found, blob = referrers.read_layout(image.referrers, digest)
        faults.extend(
            [f"{one.name} is attached to {one.subject}" for one in _astray(found, digest)]
        )
        faults.extend(_absent(found))
        faults.extend(
            [
                f"attestations/{one.name} is not what is attached"
                for one in found
                if not (image.attestations / one.name).is_file()
                or (image.attestations / one.name).read_bytes() != blob(one.blob.digest)
            ]
        )
    if found:
        documents = _read_documents(verdict, found, lambda one: blob(one.blob.digest), digest)
        _judge_documents(verdict, documents, digest, image.image.labels)
    _judge_health(verdict, documents, image.image.labels, healthy=healthy)
    if bad or not found:
        why = "a blob is damaged" if bad else "there is no bill that can be read"
        verdict.skip("the bill against the layers", why)
    else:
        inside = inventory.read(image.layout, image.image, progress, contents=True)
        _judge_layers(verdict, documents, inside, image.image.labels)
    return verdict


def _astray(found: Sequence[Referrer], digest: str) -> list[Referrer]:
    return [one for one in found if one.subject != digest]


def _absent(found: Sequence[Referrer]) -> list[str]:
    kinds = {one.kind for one in found}
    return [f"there is no {what}" for kind, what in _NEEDED.items() if kind not in kinds]


def verify_remote(
    ref: Reference, registry: Registry, signer: Signer, *, layers: bool, healthy: bool = False
) -> tuple[str, Verdict]:
    """Verify an image in a registry.

    Args:
        ref: The image.
        registry: How registries are reached.
        signer: Whose it has to be.
        layers: Take the layers too, and hold the bill against them.
        healthy: Ask of the image to be judged, and healthy.

    Returns:
        The image's digest, and the checks.

    Raises:
        ForgeError: If it is not there (exit code 1), or cannot be judged here (2).
    """
    progress = registry.progress
    with progress.step(f"reading {ref}"):
        try:
            manifest = registry.manifest(ref)
        except NotThereError as error:
            error.exit_code = Exit.FAULT
            raise
    digest = ref.digest or registry.digest(ref)
    referrers.checked(manifest, digest, str(ref))
    exact = ref.at_digest(digest)
    tool = Cosign(registry, exact, cosign.program(progress))
    own, gzip = _own(digest)
    verdict = Verdict(own, exact.repository, gzip)
    mend = _sign_it(own, exact.repository, signer)
    with verdict.check("the image is signed"), progress.step("verifying the signature"):
        tool.verify(digest, signer, mend)
    labels = _labels(registry, exact, manifest)
    found: list[Referrer] = []
    with verdict.check("documents attached, each of its digest and of this image") as faults:
        every = _attached(registry, exact, verdict.mend())
        faults.extend(
            [f"{one.name} is attached to {one.subject}" for one in _astray(every, digest)]
        )
        found = [one for one in every if one.kind in _OURS and one.subject == digest]
        faults.extend(_absent(found))
        strange = [one for one in every if one.kind not in _OURS]
        if strange:
            names = ", ".join(f"{one.name} ({one.kind})" for one in strange)
            verdict.skip("documents of another kind", f"{names}: not this project's")
    for one in found:
        with verdict.check(f"{one.name} is signed"), progress.step(f"verifying {one.name}"):
            tool.verify(one.digest, signer, mend)
    documents = _read_documents(
        verdict, found, lambda one: registry.document(exact, one.blob), digest
    )
    _judge_documents(verdict, documents, digest, labels)
    _judge_health(verdict, documents, labels, healthy=healthy)
    if not layers:
        verdict.skip("the bill against the layers", "only with --layers, which takes all of them")
    elif verdict.failed:
        verdict.skip("the bill against the layers", "something failed before")
    else:
        # what is in the layers is wanted, not the layers: ./forge pull keeps an image
        with tempfile.TemporaryDirectory(prefix=".verify-", dir=out_dir()) as name:
            folder = Path(name)
            registry.copy_out(exact, folder)
            image = oci.read_image(folder)
            inside = inventory.read(folder, image, progress, contents=True)
        _judge_layers(verdict, documents, inside, image.labels)
    return digest, verdict


def _labels(registry: Registry, ref: Reference, manifest: bytes) -> dict[str, str]:
    """The labels in the image's config, which is checked by digest."""
    try:
        config = oci.descriptor(parse_json(manifest)["config"])
        return oci.read_labels(registry.document(ref, config))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForgeError(
            f"{ref} is not the manifest of an image: {error}",
            expected="an OCI image with a config",
            mend="look at the reference: an index has to be named by the digest of one image in it",
            exit_code=Exit.FAULT,
        ) from error


def _own(digest: str) -> tuple[str, bool]:
    """The arguments that name an image of this checkout, and whether it is a twin with gzip layers.

    The arguments are empty for somebody else's.
    """
    for path in sorted((out_dir() / "images").glob("*/image.json")):
        # an unreadable neighbour is no reason to judge nothing
        with contextlib.suppress(ForgeError, KeyError, TypeError, AttributeError):
            record = read_json(path)
            if digest == record["manifest_digest"]:
                return baked.words(record), False
            if digest == (record.get("gzip") or {}).get("manifest_digest"):
                return baked.words(record), True
    return "", False


def _sign_it(own: str, repository: str, signer: Signer) -> str:
    """What to do with something that nobody signed."""
    if not own:
        return (
            "do not use it: it is no image of this checkout, so nothing here can sign it; ask who "
            "published it, or sign it where it was baked"
        )
    key = signer.key
    if key.endswith(".pub"):
        private = Path(key).with_suffix(".key")
        key = str(private) if private.is_file() else f"<the private key of {key}>"
    words = f" --key {key}" if key else ""
    return f"it is of this checkout: ./forge sign {own} --to {repository}{words}"


def _attached(registry: Registry, ref: Reference, mend: str) -> list[Referrer]:
    """What a registry has attached to an image, each manifest checked by digest."""
    where = ref.at_tag(referrers.tag(ref.digest))
    try:
        listed = referrers.read_index(registry.manifest(where), str(where))
    except NotThereError as error:
        raise ForgeError(
            f"nothing is attached to {ref}",
            expected="bills of materials and provenance, with the index that names them",
            mend=mend,
            exit_code=Exit.FAULT,
        ) from error
    found = []
    for digest, _ in listed:
        try:
            data = registry.manifest(ref.at_digest(digest))
        except NotThereError as error:
            error.exit_code = Exit.FAULT
            raise
        found.append(referrers.read_manifest(data, digest, f"{ref.repository}@{digest}"))
    return found


def _signer(options: argparse.Namespace) -> Signer:
    keyless = bool(options.identity or options.issuer)
    if bool(options.key) == keyless or bool(options.identity) != bool(options.issuer):
        raise ForgeError(
            "it is not said whose the image has to be",
            expected="--key FILE, or both --identity and --issuer",
            mend="name the public key of who publishes it: a signature by anybody proves nothing",
        )
    key = cosign.key_of(options.key) if options.key else ""
    return Signer(key, options.identity or "", options.issuer or "", options.log)


def _act(options: argparse.Namespace, progress: Progress) -> Outcome:
    text = options.what or ""
    if "/" in text:
        ref = Reference.parse(text)
        signer = _signer(options)
        registry = from_options(options, progress)
        digest, verdict = verify_remote(
            ref, registry, signer, layers=options.layers, healthy=options.healthy
        )
        name = str(ref.at_digest(digest))
        notes = []
        if not ref.digest:
            notes.append(f"a tag can move: what was verified is {name}")
    else:
        if options.key or options.identity or options.issuer:
            raise ForgeError(
                "an image that was baked here has no signature",
                expected="--key and --identity with an image in a registry",
                mend="./forge verify HOST/NAME@sha256:… --key FILE, or leave them out",
            )
        if text:
            image = baked.load(text)
        else:
            (image,) = baked.choose(options)
        verdict = verify_local(image, progress, healthy=options.healthy)
        name, digest, notes = image.slug, image.image.manifest.digest, []
    return _outcome(name, digest, verdict, notes)


def _outcome(name: str, digest: str, verdict: Verdict, notes: list[str]) -> Outcome:
    failed = verdict.failed
    skipped = [one for one in verdict.checks if one.status == "not run"]
    lines = []
    for one in verdict.checks:
        lines.append(f"  {one.status:<8} {one.what}{': ' if one.detail else ''}{one.detail}")
        if one.status == "failed":
            lines.append(f"           mend: {one.mend}")
    passed = sum(one.status == "passed" for one in verdict.checks)
    summary = f"{name}: {passed} checks passed, {len(failed)} failed"
    if skipped:
        summary += "; not checked: " + ", ".join(one.what for one in skipped)
    data: dict[str, Any] = {
        "image": name,
        "digest": digest,
        "verified": not failed,
        "checks": [one.__dict__ for one in verdict.checks],
    }
    return Outcome(
        "done",
        summary,
        data=data,
        notes=notes,
        exit_code=Exit.FAULT if failed else Exit.OK,
        text="\n".join(lines),
    )


def arguments() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = parser(VERB, "Verify an image: its signature, bills of materials and provenance.")
    made.add_argument(
        "what",
        nargs="?",
        metavar="IMAGE",
        help="HOST/NAME@sha256:… in a registry, or a folder of out/images such as runtime-py311",
    )
    add_image(made)
    made.add_argument("--key", metavar="KEY", help="the public key that has to have signed it")
    made.add_argument("--identity", help="the identity of a keyless signature")
    made.add_argument("--issuer", help="who has to vouch for that identity")
    made.add_argument(
        "--log", action="store_true", help="ask of a signature by key to be in the public log too"
    )
    made.add_argument(
        "--layers", action="store_true", help="take the layers too, and look into them"
    )
    made.add_argument(
        "--healthy", action="store_true", help="fail too for an image that was not judged healthy"
    )
    add_options(made)
    return made


def _subject(options: argparse.Namespace) -> str:
    return "" if options.what else baked.slug_of(options)


main = main_of(VERB, arguments, _act, subject=_subject)


if __name__ == "__main__":
    raise SystemExit(main())
