"""Bills of materials of an image: CycloneDX 1.6 and SPDX 2.3, both as JSON, and reading them back.

The same image, locks and base give the same bytes: identifiers follow from the image's digest, and
the one time in a document is the epoch of the pins.

Formats: CycloneDX 1.6; SPDX 2.3; package URLs for deb, oci and pypi (PEP 440 versions, the index
of a build that is not on the main one as ``repository_url``).
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from packageurl import PackageURL
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from tpuforge import __version__, bom
from tpuforge.paths import parse_json
from tpuforge.release import licences
from tpuforge.release.inventory import VENV, Deb, Inventory, Program, Wheel

_TYPES = {
    "deb": ComponentType.LIBRARY,
    "wheel": ComponentType.LIBRARY,
    "file": ComponentType.FILE,
    "archive": ComponentType.LIBRARY,
}
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "tpuforge bill of materials")
_CPU_LOCAL = re.compile(r"\+cpu$")


@dataclass(frozen=True)
class Part:
    """One thing in an image.

    Attributes:
        kind: ``deb``, ``wheel``, ``file``, or ``archive``: what files were unpacked from that no
            package manager knows.
        name: Its name; of a file its path.
        version: Its version; empty for a file.
        place: The folder it is in, for wheels; empty otherwise.
        purl: Its package URL; None for a file that no package brought.
        sha256: Digest of the package file that it was installed from, or of the file itself; empty
            if no lock and no record names it.
        licence: SPDX expression of what it states.
        layer: Digest of the layer that brought it.
        needs: References of what it needs.
        properties: More facts, by name.
    """

    kind: str
    name: str
    version: str
    place: str
    purl: PackageURL | None
    sha256: str
    licence: str
    layer: str
    needs: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def ref(self) -> str:
        """Its name within a document."""
        if self.purl is None:
            return f"file:/{self.name}"
        place = f"#{self.place}" if self.place else ""
        return f"{self.purl.to_string()}{place}"


@dataclass(frozen=True)
class Subject:
    """The image that a bill is of.

    Attributes:
        name: Name and tag.
        digest: Digest of its manifest (``sha256:…``).
        labels: Its labels.
        epoch: The time of everything in it, seconds since 1970.
    """

    name: str
    digest: str
    labels: Mapping[str, str]
    epoch: int

    @property
    def hex(self) -> str:
        """The digits of its digest."""
        return self.digest.removeprefix("sha256:")

    @property
    def purl(self) -> PackageURL:
        """Its package URL, which names it by digest."""
        repository, _, tag = self.name.rpartition(":")
        name = repository.rpartition("/")[2]
        return PackageURL("oci", None, name, self.digest, {"arch": "amd64", "tag": tag})


def parts(
    found: Inventory,
    wheels: Mapping[tuple[str, str], str],
    debs: Mapping[tuple[str, str, str], str],
    *,
    torch_index: str,
    labels: Mapping[str, str],
    archives: Sequence[Part] = (),
) -> list[Part]:
    """Everything in an image, with the digests of what it was installed from.

    Args:
        found: What is in the layers.
        wheels: SHA-256 of wheels by name and version.
        debs: SHA-256 of Debian packages by name, version and architecture.
        torch_index: Address of the index that has the CPU builds.
        labels: The image's labels.
        archives: What was unpacked into it beside packages.
    """
    system = found.release.get("ID", "debian")
    distro = f"{system}-{found.release.get('VERSION_ID') or found.release.get('VERSION_CODENAME')}"
    urls = {
        (deb.name, deb.arch): PackageURL(
            "deb", system, deb.name, deb.version, {"arch": deb.arch, "distro": distro}
        )
        for deb in found.debs
    }
    made = [
        Part(
            kind="deb",
            name=deb.name,
            version=deb.version,
            place="",
            purl=urls[deb.name, deb.arch],
            sha256=debs.get((deb.name, deb.version, deb.arch), ""),
            licence=deb.licence,
            layer=deb.layer,
            needs=_deb_needs(deb, found.debs, urls),
            properties={"tpuforge:source-package": deb.source},
        )
        for deb in found.debs
    ]
    index = urlsplit(torch_index)
    place = {"repository_url": index.netloc + index.path}
    bare = [_wheel(wheel, wheels, place) for wheel in found.wheels]
    for part, wheel in zip(bare, found.wheels, strict=True):
        bills = {f"tpuforge:own-bill:{at}": path for at, path in enumerate(wheel.bills)}
        made.append(replace(part, needs=_wheel_needs(wheel, found, bare), properties=bills))
    made += [_program(program, labels) for program in found.programs]
    return _apart([*made, *archives])


def _program(program: Program, labels: Mapping[str, str]) -> Part:
    """A program that no package brought; of Bazelisk the image's labels tell more."""
    part = Part(
        kind="file",
        name=program.path,
        version="",
        place="",
        purl=None,
        sha256=program.sha256,
        licence=licences.NONE,
        layer=program.layer,
    )
    if program.sha256 != labels.get("io.tpuforge.bazelisk.sha256"):
        return part
    version = labels.get("io.tpuforge.bazelisk.version", "")
    return replace(
        part,
        version=version,
        purl=PackageURL("github", "bazelbuild", "bazelisk", f"v{version}"),
        licence="Apache-2.0",
        properties={"tpuforge:path": program.path},
    )


def _apart(made: Iterable[Part]) -> list[Part]:
    """Parts whose references differ: one program may stand under two names."""
    found: list[Part] = []
    seen: set[str] = set()
    for part in made:
        own = replace(part, place=part.name) if part.ref in seen else part
        seen.add(own.ref)
        found.append(own)
    return found


def _wheel(wheel: Wheel, digests: Mapping[tuple[str, str], str], place: Mapping[str, str]) -> Part:
    own = dict(place) if _CPU_LOCAL.search(wheel.version) else None
    return Part(
        kind="wheel",
        name=wheel.name,
        version=wheel.version,
        place=wheel.place,
        purl=PackageURL("pypi", None, wheel.name, wheel.version, own),
        sha256=digests.get((wheel.name, wheel.version), ""),
        licence=wheel.licence,
        layer=wheel.layer,
    )


def _wheel_needs(wheel: Wheel, found: Inventory, all_wheels: Sequence[Part]) -> tuple[str, ...]:
    """What a wheel needs among what is there: beside it first, then in the environment."""
    python = str(found.facts.get("python", ""))
    environment = {
        "extra": "",
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "sys_platform": "linux",
    }
    if python:
        environment |= {"python_version": python, "python_full_version": f"{python}.0"}
    needs = set()
    for text in wheel.requires:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            # old metadata; pip has installed it all the same
            continue
        if wanted.marker is not None and not wanted.marker.evaluate(environment):
            continue
        name = canonicalize_name(wanted.name)
        places = [part for part in all_wheels if part.name == name]
        places.sort(key=lambda part: (part.place != wheel.place, not part.place.startswith(VENV)))
        if places:
            needs.add(places[0].ref)
    return tuple(sorted(needs))


def _deb_needs(
    deb: Deb, debs: Sequence[Deb], urls: Mapping[tuple[str, str], PackageURL]
) -> tuple[str, ...]:
    """What a package needs: of each choice the first that is installed by its own name."""
    there = {one.name: urls[one.name, one.arch].to_string() for one in debs}
    needs = set()
    for group in deb.needs:
        name = next((name for name in group if name in there), "")
        if name and name != deb.name:
            needs.add(there[name])
    return tuple(sorted(needs))


def _licence(expression: str) -> list[DisjunctiveLicense | LicenseExpression]:
    if expression == licences.NONE:
        return []
    if " " in expression or expression.startswith("LicenseRef-"):
        return [LicenseExpression(expression)]
    return [DisjunctiveLicense(id=expression)]


def cyclonedx(subject: Subject, found: Sequence[Part], release: Mapping[str, str]) -> str:
    """A bill in the form of CycloneDX 1.6, valid by its official schema.

    Args:
        subject: The image.
        found: What is in it.
        release: Its os-release; empty without a system.

    Raises:
        ForgeError: If the schema refuses it; exit code 1.
    """
    of = Component(
        type=ComponentType.CONTAINER,
        name=subject.name.rpartition(":")[0],
        version=subject.name.rpartition(":")[2],
        bom_ref=subject.purl.to_string(),
        purl=subject.purl,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=subject.hex)],
        properties=[Property(name=name, value=value) for name, value in subject.labels.items()],
    )
    components = {part.ref: _component(part) for part in found}
    everything = list(components.values())
    if release:
        everything.append(
            Component(
                type=ComponentType.OPERATING_SYSTEM,
                name=release.get("ID", "linux"),
                version=release.get("VERSION_ID") or release.get("VERSION_CODENAME"),
                description=release.get("PRETTY_NAME"),
                bom_ref="operating-system",
            )
        )
    told = "\n".join(sorted(f"{part.ref} {part.sha256} {part.layer}" for part in found))
    made = Bom(
        serial_number=uuid.uuid5(_NAMESPACE, f"{subject.digest}\n{told}"),
        components=everything,
        metadata=BomMetaData(component=of),
    )
    needed = {ref for part in found for ref in part.needs}
    made.register_dependency(
        of, [one for ref, one in sorted(components.items()) if ref not in needed]
    )
    for part in found:
        made.register_dependency(
            components[part.ref], [components[ref] for ref in part.needs if ref in components]
        )
    mend = "look at what that package states of itself: the schema refuses it"
    what = f"the bill of {subject.name}"
    return bom.written(made, what, epoch=subject.epoch, version=__version__, mend=mend)


def _component(part: Part) -> Component:
    facts = {
        "tpuforge:kind": part.kind,
        "tpuforge:layer": part.layer,
        **({"tpuforge:place": f"/{part.place}"} if part.place else {}),
        **part.properties,
    }
    return Component(
        type=_TYPES[part.kind],
        bom_ref=part.ref,
        name=part.name,
        version=part.version or None,
        purl=part.purl,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=part.sha256)] if part.sha256 else None,
        licenses=_licence(part.licence),
        properties=[Property(name=name, value=value) for name, value in facts.items()],
    )


def spdx(subject: Subject, found: Sequence[Part]) -> str:
    """A bill in the form of SPDX 2.3.

    Args:
        subject: The image.
        found: What is in it.
    """
    created = datetime.fromtimestamp(subject.epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    told = "\n".join(sorted(f"{part.ref} {part.sha256} {part.layer}" for part in found))
    ids = {part.ref: f"SPDXRef-{part.kind}-{_short(part.ref)}" for part in found}
    image = {
        **_package("SPDXRef-image", subject.name, subject.digest, licences.NONE),
        "primaryPackagePurpose": "CONTAINER",
        "checksums": [{"algorithm": "SHA256", "checksumValue": subject.hex}],
        "externalRefs": [_purl(subject.purl)],
    }
    packages = [image]
    relationships = [_related("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-image")]
    unknown: dict[str, str] = {}
    for part in sorted(found, key=lambda part: part.ref):
        name = ids[part.ref]
        one = _package(name, part.name, part.version, part.licence)
        one["primaryPackagePurpose"] = "FILE" if part.kind == "file" else "LIBRARY"
        one["comment"] = f"layer {part.layer}" + (f", in /{part.place}" if part.place else "")
        if part.sha256:
            one["checksums"] = [{"algorithm": "SHA256", "checksumValue": part.sha256}]
        if part.purl is not None:
            one["externalRefs"] = [_purl(part.purl)]
        packages.append(one)
        relationships.append(_related("SPDXRef-image", "CONTAINS", name))
        relationships += [
            _related(name, "DEPENDS_ON", ids[ref]) for ref in part.needs if ref in ids
        ]
        for reference in licences.references(part.licence):
            unknown.setdefault(reference, part.name)
    document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": subject.name,
        "documentNamespace": f"urn:uuid:{uuid.uuid5(_NAMESPACE, f'spdx {subject.digest} {told}')}",
        "creationInfo": {"created": created, "creators": [f"Tool: tpuforge-{__version__}"]},
        "packages": packages,
        "relationships": relationships,
        "hasExtractedLicensingInfos": [
            {
                "licenseId": reference,
                "name": reference.removeprefix("LicenseRef-"),
                "extractedText": f"The licence of this name, as {name} states it.",
            }
            for reference, name in sorted(unknown.items())
        ],
    }
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _package(name: str, title: str, version: str, licence: str) -> dict[str, Any]:
    return {
        "SPDXID": name,
        "name": title,
        **({"versionInfo": version} if version else {}),
        "downloadLocation": licences.NONE,
        "filesAnalyzed": False,
        "licenseDeclared": licence,
        "licenseConcluded": licences.NONE,
        "copyrightText": licences.NONE,
    }


def _purl(purl: PackageURL) -> dict[str, str]:
    return {
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": purl.to_string(),
    }


def _related(one: str, how: str, other: str) -> dict[str, str]:
    return {"spdxElementId": one, "relationshipType": how, "relatedSpdxElement": other}


@dataclass(frozen=True)
class Read:
    """What a bill says, in the form that can be compared.

    Attributes:
        digest: Digest of the image that it is of.
        parts: Kind, name, version, place and SHA-256 of each thing; a document of SPDX tells the
            place in words only, so it is empty there.
    """

    digest: str
    parts: frozenset[tuple[str, str, str, str, str]]


def read_cyclonedx(data: bytes) -> Read:
    """Read a bill that this module wrote in the form of CycloneDX.

    Args:
        data: The document.

    Raises:
        ValueError: If it is none.
    """
    try:
        document = parse_json(data)
        if document["bomFormat"] != "CycloneDX":
            raise ValueError("it is no CycloneDX")
        found = set()
        for one in document["components"]:
            facts = {item["name"]: item["value"] for item in one.get("properties", [])}
            if one["type"] == "operating-system":
                continue
            place = facts.get("tpuforge:place", "").removeprefix("/")
            version = one.get("version", "")
            said = (facts["tpuforge:kind"], one["name"], version, place, _digest(one))
            found.add(_texts(said))
        return Read("sha256:" + _digest(document["metadata"]["component"]), frozenset(found))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it lacks {error}") from error


def _texts(said: tuple[Any, Any, Any, Any, Any]) -> tuple[str, str, str, str, str]:
    if not all(isinstance(one, str) for one in said):
        raise ValueError(f"a component is told by {said!r}")
    return said


def _digest(component: Mapping[str, Any]) -> str:
    found = [one["content"] for one in component.get("hashes", []) if one["alg"] == "SHA-256"]
    return str(found[0]) if found else ""


def read_spdx(data: bytes) -> Read:
    """Read a bill that this module wrote in the form of SPDX.

    Args:
        data: The document.

    Raises:
        ValueError: If it is none.
    """
    try:
        document = parse_json(data)
        if document["spdxVersion"] != "SPDX-2.3":
            raise ValueError("it is no SPDX 2.3")
        found, digest = set(), ""
        for one in document["packages"]:
            sums = {item["algorithm"]: item["checksumValue"] for item in one.get("checksums", [])}
            sha256 = sums.get("SHA256", "")
            if one["SPDXID"] == "SPDXRef-image":
                digest = f"sha256:{sha256}"
                continue
            kind = one["SPDXID"].split("-")[1]
            found.add(_texts((kind, one["name"], one.get("versionInfo", ""), "", sha256)))
        return Read(digest, frozenset(found))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"it lacks {error}") from error


def told(found: Sequence[Part], *, places: bool) -> frozenset[tuple[str, str, str, str, str]]:
    """Parts in the form of :class:`Read`.

    Args:
        found: What is in an image.
        places: Whether to tell places.
    """
    return frozenset(
        (part.kind, part.name, part.version, part.place if places else "", part.sha256)
        for part in found
    )


def differences(
    said: frozenset[tuple[str, str, str, str, str]], real: frozenset[tuple[str, str, str, str, str]]
) -> list[str]:
    """How a bill differs from what is really there, a line each.

    Args:
        said: What the bill says.
        real: What is there.
    """
    lines = [f"it names {_line(one)}, which is not there" for one in sorted(said - real)]
    return lines + [f"it does not name {_line(one)}" for one in sorted(real - said)]


def _line(one: tuple[str, str, str, str, str]) -> str:
    kind, name, version, place, sha256 = one
    where = f" in /{place}" if place else ""
    digest = f" (sha256:{sha256[:12]}…)" if sha256 else ""
    return f"the {kind} {name} {version}".rstrip() + where + digest
