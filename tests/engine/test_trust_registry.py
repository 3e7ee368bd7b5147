"""Signing and verifying with the real cosign, against a real registry on the loopback."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import validators_support
from registry_support import RealRegistry, registry
from smoke_host_support import health
from tpuforge import distribution
from tpuforge import layout as oci
from tpuforge.console import Progress
from tpuforge.release import cosign, referrers
from trust_support import Toy, files, make, twin, verb

PASSWORD = "open sesame"


@dataclass(frozen=True)
class Keys:
    """A key pair of cosign."""

    private: str
    public: str


def key_pair(folder: Path) -> Keys:
    folder.mkdir()
    with Progress("tests", quiet=True) as progress:
        program = cosign.program(progress)
    env = {**os.environ, "COSIGN_PASSWORD": PASSWORD}
    subprocess.run([program, "generate-key-pair"], cwd=folder, env=env, check=True)
    return Keys(str(folder / "cosign.key"), str(folder / "cosign.pub"))


@dataclass(frozen=True)
class Signed:
    """A signed image in a registry."""

    toy: Toy
    where: RealRegistry
    keys: Keys
    other: Keys

    @property
    def name(self) -> str:
        return f"{self.where.address}/toy"

    def verify(
        self, *arguments: str, name: str = "", key: str = "", code: int = 0
    ) -> dict[str, Any]:
        """Verify it as another machine would: with an out folder that knows nothing."""
        out = self.toy.out.parent / "elsewhere"
        shutil.rmtree(out, ignore_errors=True)
        text = name or f"{self.name}@{self.toy.digest}"
        done = verb(
            out,
            "verify",
            text,
            "--json",
            "--key",
            key or self.keys.public,
            *arguments,
            *self.where.options(),
        )
        assert done.returncode == code, done.stdout + done.stderr
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found

    def failed(self, *arguments: str, **more: Any) -> dict[str, str]:
        """The checks that fail: what was found, and what mends it, by name."""
        found = self.verify(*arguments, code=1, **more)["data"]["checks"]
        return {one["what"]: one["detail"] for one in found if one["status"] == "failed"}

    def put(self, repository: str, data: bytes, reference: str, kind: str) -> None:
        """Put a manifest into the registry behind everybody's back."""
        client = distribution.Client(self.where.address, repository, distribution.Access())
        client.put_manifest(reference, data, kind)


def publish(
    toy: Toy,
    where: RealRegistry,
    keys: Keys,
    repository: str = "toy",
    push: tuple[str, ...] = (),
) -> None:
    """Attach, push and sign."""
    to = f"{where.address}/{repository}"
    for name, words in (
        ("sbom", []),
        ("push", ["--to", to, *push, *where.options()]),
        ("sign", ["--to", to, "--key", keys.private, *where.options()]),
    ):
        done = toy.verb(name, "--image", "toy", *words, COSIGN_PASSWORD=PASSWORD)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Keys, Keys]:
    folder = tmp_path_factory.mktemp("keys")
    return key_pair(folder / "own"), key_pair(folder / "other")


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Keys, Keys]) -> Iterator[Signed]:
    folder = tmp_path_factory.mktemp("signed")
    with registry(folder) as where:
        toy = make(folder / "out")
        twin(toy)
        publish(toy, where, keys[0], push=("--gzip",))
        yield Signed(toy, where, *keys)


def test_a_signed_image_is_verified_down_to_its_layers(signed: Signed) -> None:
    found = signed.verify("--layers")
    assert found["data"]["verified"]
    # on a machine without the wheels
    others = {one["what"] for one in found["data"]["checks"] if one["status"] != "passed"}
    assert others == {"health", "every RECORD is that of the locked wheel"}
    whats = {one["what"] for one in found["data"]["checks"]}
    assert {"the image is signed", "provenance.json is signed"} <= whats
    assert "sbom.cdx.json names what is in the layers" in whats
    # without the layers it says what it has not looked at
    assert "not checked: health, the bill against the layers" in signed.verify()["summary"]


def test_a_tag_is_verified_as_the_digest_that_it_names(signed: Signed) -> None:
    found = signed.verify(name=f"{signed.name}:1")
    assert found["data"]["digest"] == signed.toy.digest
    assert signed.toy.digest in found["notes"][0]


def test_attesting_and_signing_leave_the_manifest_as_it_was(signed: Signed) -> None:
    image = oci.read_image(signed.toy.folder / "oci")
    assert image.manifest.digest == signed.toy.digest
    client = distribution.Client(signed.where.address, "toy", distribution.Access())
    data, _ = client.manifest("1")
    assert data == image.manifest.path(signed.toy.folder / "oci").read_bytes()


def test_signing_again_changes_nothing(signed: Signed) -> None:
    words = ["--image", "toy", "--to", signed.name, "--key", signed.keys.private]
    done = signed.toy.verb("sign", *words, COSIGN_PASSWORD=PASSWORD)
    assert done.returncode == 0
    assert "nothing to do" in done.stdout
    wrong = signed.toy.verb("sign", *words, COSIGN_PASSWORD="wrong")
    assert wrong.returncode == 2
    assert "set COSIGN_PASSWORD" in wrong.stderr


def test_a_signature_by_another_key_is_none(signed: Signed) -> None:
    failed = signed.failed(key=signed.other.public)
    assert "is signed, and not by" in failed["the image is signed"]
    assert "is signed, and not by" in failed["sbom.cdx.json is signed"]


def test_an_image_that_nobody_signed(signed: Signed) -> None:
    toy = make(signed.toy.out.parent / "unsigned")
    toy.about("sbom")
    to = f"{signed.where.address}/unsigned"
    assert toy.verb("push", "--image", "toy", "--to", to).returncode == 0
    failed = signed.failed(name=f"{to}@{toy.digest}")
    assert "is not signed" in failed["the image is signed"]
    assert "is not signed" in failed["provenance.json is signed"]
    # who has the image here is told the line that signs it, and anybody else that none does
    mends = {}
    for out in (toy.out, signed.toy.out.parent / "elsewhere"):
        key = ["--key", signed.keys.public, *signed.where.options()]
        done = verb(out, "verify", f"{to}@{toy.digest}", "--json", *key)
        checks = json.loads(done.stdout)["data"]["checks"]
        mends[out.name] = next(one["mend"] for one in checks if one["what"].endswith("is signed"))
    words = f"./forge sign --image toy --python 3.11 --to {to} --key {signed.keys.private}"
    assert mends["unsigned"].endswith(words)
    assert "no image of this checkout" in mends["elsewhere"]


def test_a_document_that_is_attached_later_is_pushed_and_asks_to_sign_again(
    signed: Signed,
) -> None:
    toy = make(signed.toy.out.parent / "judged")
    publish(toy, signed.where, signed.keys, "judged")
    to = f"{signed.where.address}/judged"
    data = json.dumps(health("unhealthy", 1)).encode()
    folder = toy.out / "health" / "toy-py311"
    folder.mkdir(parents=True)
    (folder / "health.json").write_bytes(data)
    run = {"manifest_digest": toy.digest, "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "run.json").write_text(json.dumps(run))
    assert toy.verb("sbom", "--image", "toy").returncode == 0
    words = ["--image", "toy", "--to", to, *signed.where.options()]
    done = toy.verb("push", *words)
    assert done.returncode == 0, done.stderr
    assert "1 document was newly attached" in done.stdout and "nothing to do" not in done.stdout
    assert "sign it again (./forge sign --image toy" in done.stderr and "UNHEALTHY" in done.stderr
    assert "health.json is signed" in signed.failed(name=f"{to}@{toy.digest}")
    key = ["--key", signed.keys.private]
    done = toy.verb("sign", *words, *key, COSIGN_PASSWORD=PASSWORD)
    assert done.returncode == 0, done.stderr
    assert "UNHEALTHY" in done.stderr
    failed = signed.failed(name=f"{to}@{toy.digest}")
    assert list(failed) == ["health"] and "undefined symbol: x" in failed["health"]
    assert "nothing to do" in toy.verb("push", *words).stdout
    # a report that was made again takes the place of the one before
    data = json.dumps(health()).encode()
    (folder / "health.json").write_bytes(data)
    run["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "run.json").write_text(json.dumps(run))
    assert toy.verb("sbom", "--image", "toy").returncode == 0
    done = toy.verb("push", *words)
    assert "1 document was newly attached" in done.stdout and "UNHEALTHY" not in done.stderr
    assert toy.verb("sign", *words, *key, COSIGN_PASSWORD=PASSWORD).returncode == 0
    found = signed.verify("--healthy", name=f"{to}@{toy.digest}")
    names = [one["what"] for one in found["data"]["checks"]]
    assert names.count("health.json is signed") == 1


def test_the_twin_with_gzip_layers_is_verified_like_the_image(signed: Signed) -> None:
    layout = oci.read_image(signed.toy.folder / "oci-gzip")
    digest = layout.manifest.digest
    assert digest != signed.toy.digest
    found = signed.verify("--layers", name=f"{signed.name}@{digest}")
    assert found["data"]["digest"] == digest
    passed = {one["what"] for one in found["data"]["checks"] if one["status"] == "passed"}
    assert {"provenance.json is signed", "sbom.cdx.json names what is in the layers"} <= passed


def test_an_image_that_somebody_else_built(signed: Signed) -> None:
    """Nothing is attached, nobody known signed it, and it says little of itself."""
    toy = make(signed.toy.out.parent / "stranger", own_labels={"maintainer": "somebody"})
    to = f"{signed.where.address}/stranger"
    assert toy.verb("push", "--image", "toy", "--to", to).returncode == 0
    failed = signed.failed(name=f"{to}@{toy.digest}")
    assert set(failed) == {
        "the image is signed",
        "documents attached, each of its digest and of this image",
        "labels complete, and as the bill says",
    }
    assert "nothing is attached" in list(failed.values())[1]


def test_documents_of_another_image_do_not_count(signed: Signed) -> None:
    """The documents of one image, signed by the right key, put beside another one."""
    system, environment, gone = files()
    toy = make(
        signed.toy.out.parent / "swapped",
        layers=(system, {**environment, "etc/x": "x"}, gone),
        tag="2",
    )
    publish(toy, signed.where, signed.keys, "toy")
    tag = referrers.tag(signed.toy.digest)
    client = distribution.Client(signed.where.address, "toy", distribution.Access())
    index, _ = client.manifest(tag)
    own, _ = client.manifest(referrers.tag(toy.digest))
    try:
        signed.put("toy", index, referrers.tag(toy.digest), referrers.INDEX)
        failed = signed.failed(name=f"{signed.name}@{toy.digest}")
        what = "documents attached, each of its digest and of this image"
        assert f"is attached to {signed.toy.digest}" in failed[what]
        assert "there is no provenance" in failed[what]
    finally:
        signed.put("toy", own, referrers.tag(toy.digest), referrers.INDEX)


def test_a_tampered_bill_is_found_whatever_is_signed(signed: Signed) -> None:
    """Somebody with the right key attaches a bill that hides a wheel."""
    toy = make(signed.toy.out.parent / "tampered")
    toy.about("sbom")
    path = toy.folder / "attestations"
    bill = json.loads((path / "sbom.cdx.json").read_text())
    bill["components"] = [one for one in bill["components"] if one["name"] != "libtpu"]
    documents = [
        referrers.Artifact(referrers.CYCLONEDX, "sbom.cdx.json", json.dumps(bill).encode()),
        referrers.Artifact(
            referrers.SPDX, "sbom.spdx.json", (path / "sbom.spdx.json").read_bytes()
        ),
        referrers.Artifact(
            referrers.PROVENANCE, "provenance.json", (path / "provenance.json").read_bytes()
        ),
    ]
    (path / "sbom.cdx.json").write_bytes(documents[0].data)
    image = oci.read_image(toy.folder / "oci")
    referrers.write(toy.folder / "referrers", image.manifest, documents)

    found = toy.about("verify", code=1)["data"]["checks"]
    failed = {one["what"]: one["detail"] for one in found if one["status"] == "failed"}
    assert "does not name the wheel libtpu" in failed["sbom.cdx.json names what is in the layers"]
    assert "sbom.spdx.json names what is in the layers" not in failed

    to = f"{signed.where.address}/tampered"
    words = ["--to", to]
    assert toy.verb("push", "--image", "toy", *words).returncode == 0
    words += ["--key", signed.keys.private]
    assert toy.verb("sign", "--image", "toy", *words, COSIGN_PASSWORD=PASSWORD).returncode == 0
    failed = signed.failed(name=f"{to}@{toy.digest}")
    assert set(failed) == {
        "labels complete, and as the bill says",
        "both bills tell the same",
        "provenance: this image, this builder, these materials",
    }


def test_only_what_was_baked_here_is_signed(signed: Signed) -> None:
    words = ["--image", "toy", "--key", signed.keys.private]
    other = f"{signed.name}@sha256:{'0' * 64}"
    done = signed.toy.verb("sign", *words, "--to", other, COSIGN_PASSWORD=PASSWORD)
    assert done.returncode == 1
    assert "nothing else is signed" in done.stderr
    done = signed.toy.verb("sign", *words, "--to", f"{signed.where.address}/nowhere")
    assert done.returncode == 1
    assert "does not hold image, sbom.cdx.json" in done.stderr
    assert "./forge push" in done.stderr


def test_a_signature_of_another_image_is_none(signed: Signed) -> None:
    client = distribution.Client(signed.where.address, "toy", distribution.Access())
    data, kind = client.manifest(f"{referrers.tag(signed.toy.digest)}.sig")
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    # its own manifest is an image like any other
    signed.put("toy", data, f"{referrers.tag(digest)}.sig", kind)
    failed = signed.failed(name=f"{signed.name}@{digest}")
    assert "has a signature that is of another image" in failed["the image is signed"]


def test_an_image_that_is_not_there_and_a_key_that_is_not_named(signed: Signed) -> None:
    name = f"{signed.name}@sha256:{'0' * 64}"
    assert signed.verify(name=name, code=1)["error"]["found"]
    done = verb(signed.toy.out, "verify", f"{signed.name}:1")
    assert done.returncode == 2
    assert "whose the image has to be" in done.stderr


def test_a_registry_with_a_password_and_a_certificate_of_its_own(
    tmp_path: Path, keys: tuple[Keys, Keys]
) -> None:
    with registry(tmp_path, auth=True, tls=True) as where:
        toy = make(tmp_path / "out")
        publish(toy, where, keys[0])
        both = Signed(toy, where, *keys)
        assert both.verify()["data"]["verified"]
        done = verb(
            tmp_path / "out",
            "verify",
            f"{both.name}@{toy.digest}",
            "--key",
            both.keys.public,
            "--ca",
            str(where.ca),
            DOCKER_CONFIG=str(tmp_path),
            REGISTRY_AUTH_FILE=str(tmp_path / "none"),
        )
        assert done.returncode == 2, done.stdout + done.stderr
        assert "sesame" not in where.log
        where.kill()
        assert "given up after 1 attempts" in both.verify("--tries", "1", code=2)["error"]["found"]


VALIDATE = """
import json, sys
from spdx_tools.spdx.parser.json.json_parser import JsonLikeDictParser
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document
document = JsonLikeDictParser().parse(json.load(sys.stdin))
print(json.dumps([one.validation_message for one in validate_full_spdx_document(document)]))
"""


def test_the_bill_is_spdx_by_the_library_that_keeps_the_format(signed: Signed) -> None:
    text = (signed.toy.folder / "attestations" / "sbom.spdx.json").read_text()
    assert json.loads(validators_support.run(VALIDATE, text)) == []
    # it does find fault with what is none
    broken = json.loads(text)
    broken["packages"][1]["licenseDeclared"] = "No Such Licence"
    assert json.loads(validators_support.run(VALIDATE, json.dumps(broken)))
