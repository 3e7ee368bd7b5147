"""Verifying an image that was baked here, and layouts of attached documents."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smoke_host_support import health
from tpuforge import health_report, host, mirrors
from tpuforge.console import Progress
from tpuforge.errors import ForgeError
from tpuforge.layout import Blob, read_image
from tpuforge.registry import Reference, Registry
from tpuforge.release import attest, bill, cosign, inventory, referrers, verify
from tpuforge.release.cosign import Signer
from trust_support import DIGESTS, SITE, Toy, files, labels, make, record, twin

NAME = "attestations/sbom.cdx.json"
ATTACHED = "documents attached, each of its digest and of this image"


FILES = "every file of a wheel is as its RECORD says, and none is beside"
RECORDS = "every RECORD is that of the locked wheel"


def failed(toy: Toy, *arguments: str) -> dict[str, str]:
    """The checks that fail of an image that has to."""
    found = toy.about("verify", *arguments, code=1)["data"]["checks"]
    assert all(one["mend"] for one in found if one["status"] == "failed")
    return {one["what"]: one["detail"] for one in found if one["status"] == "failed"}


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    made = make(tmp_path)
    made.about("sbom")
    return made


def test_a_whole_image_passes_and_says_what_was_not_checked(toy: Toy) -> None:
    found = toy.about("verify")
    states = {one["what"]: one["status"] for one in found["data"]["checks"]}
    assert states.pop("signature") == "not run"
    assert states.pop(RECORDS) == "not run"
    assert states.pop("health") == "not run"
    assert set(states.values()) == {"passed"}
    assert "sbom.cdx.json names what is in the layers" in states
    assert "the bill's wheels are those of the image's own lock" in states
    assert f"not checked: signature, health, {RECORDS}" in found["summary"]


def _judged(toy: Toy, report: dict[str, Any]) -> None:
    """Leave a health report of the image, as smoke does."""
    folder = toy.out / "health" / "toy-py311"
    folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps(report).encode()
    (folder / "health.json").write_bytes(data)
    run = {"manifest_digest": toy.digest, "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "run.json").write_text(json.dumps(run))


def _health(toy: Toy, *arguments: str, code: int) -> dict[str, str]:
    checks = toy.about("verify", *arguments, code=code)["data"]["checks"]
    (one,) = [one for one in checks if one["what"] == "health"]
    assert isinstance(one, dict)
    return one


def test_an_image_that_nobody_judged(toy: Toy) -> None:
    one = _health(toy, code=0)
    assert (one["status"], one["detail"]) == (
        "not run",
        "not judged: no health report is attached",
    )
    asked = _health(toy, "--healthy", code=1)
    assert asked["status"] == "failed" and "./forge smoke" in asked["mend"]


@pytest.mark.parametrize(
    ("report", "codes", "said"),
    [
        (health(), (0, 0), "healthy: "),
        (health("unhealthy", 1), (1, 1), "unhealthy: import.torch: undefined symbol: x"),
        (health("unjudged", 2), (0, 1), "not judged: the suite stopped"),
        (health("device", 3), (0, 1), "not judged: a TPU was there, and unusable"),
        (health(selection="static.closure"), (0, 1), "not judged: some checks only"),
        ({**health("unhealthy", 1), "verdict": "healthy"}, (1, 1), "the report is not whole"),
    ],
)
def test_what_the_health_suite_found_is_a_check(
    toy: Toy, report: dict[str, Any], codes: tuple[int, int], said: str
) -> None:
    _judged(toy, report)
    toy.about("sbom")
    assert said in _health(toy, code=codes[0])["detail"]
    assert said in _health(toy, "--healthy", code=codes[1])["detail"]


def test_a_report_cannot_write_lines_of_its_own_into_the_verdict(toy: Toy) -> None:
    report = health("unhealthy", 1)
    report["checks"][1]["detail"] = "x\n  passed   health: healthy\x1b[2J"
    _judged(toy, report)
    toy.about("sbom")
    assert _health(toy, code=1)["detail"].isprintable()


def test_a_label_cannot_write_lines_of_its_own_into_the_verdict(tmp_path: Path) -> None:
    lie = "2\n  passed   the image is signed\x1b[2J"
    toy = make(tmp_path, own_labels={**labels(), "io.tpuforge.torch.version": lie})
    toy.about("sbom")
    (detail,) = failed(toy).values()
    assert "says 2   passed   the image is signed" in detail and detail.isprintable()


def test_what_hands_an_image_on_warns_of_one_that_is_not_known_to_be_healthy(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPUFORGE_OUT", str(toy.out))

    def warned(attached: bytes | None) -> str:
        return health_report.warning("toy-py311", "--image toy", toy.digest, attached)

    good, bad = json.dumps(health()).encode(), json.dumps(health("unhealthy", 1)).encode()
    assert "NOT JUDGED" in warned(None) and "./forge smoke --image toy" in warned(None)
    assert warned(good) == ""
    assert "UNHEALTHY" in warned(bad)
    # what smoke found last counts, attached or not
    _judged(toy, health("unhealthy", 1))
    assert "UNHEALTHY" in warned(good)
    _judged(toy, health())
    assert "not attached yet: ./forge sbom --image toy" in warned(None)


def test_ctrl_c_does_not_wait_for_a_layer_that_is_being_read(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = read_image(toy.folder / "oci")
    begun = threading.Event()

    class Endless:
        def __enter__(self) -> Endless:
            return self

        def __exit__(self, *words: object) -> None:
            pass

        def __iter__(self) -> Iterator[tarfile.TarInfo]:
            begun.set()
            while True:
                yield tarfile.TarInfo("x")

    def interrupt() -> None:
        begun.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(inventory.oci, "open_layer", lambda layout, blob: Endless())
    presses = threading.Thread(target=interrupt)
    with Progress("test", quiet=True) as progress, pytest.raises(KeyboardInterrupt):
        presses.start()
        inventory.read(toy.folder / "oci", image, progress)
    presses.join()


def test_a_flipped_byte_of_a_layer(toy: Toy) -> None:
    blobs = sorted((toy.folder / "oci" / "blobs" / "sha256").iterdir(), key=_size)
    layer = blobs[-1]
    data = bytearray(layer.read_bytes())
    data[700] ^= 1
    before = layer.stat().st_mtime_ns
    layer.write_bytes(data)
    found = failed(toy)
    assert f"sha256:{layer.name}" in found["every blob of the layout is of its digest"]
    # where the documents are there, what was written to since the bake is read, and nothing else
    error = toy.about("sbom", code=1)["error"]
    os.utime(layer, ns=(before, before))
    assert toy.about("sbom")["status"] == "unchanged"
    # a bake that looks at times and sizes alone would find nothing to do
    (toy.folder / "attestations.json").unlink()
    assert toy.about("sbom", code=1)["error"] == error
    assert f"sha256:{layer.name}" in error["found"]
    assert error["mend"] == "./forge bake --no-cache --image toy --python 3.11"


def _size(path: Path) -> int:
    return path.stat().st_size


def test_a_changed_file_of_a_wheel_one_too_many_and_one_too_few(tmp_path: Path) -> None:
    system, environment, gone = files()
    environment[f"{SITE}/libtpu/__init__.py"] = "x = 2\n"
    environment[f"{SITE}/usercustomize.py"] = "import os\n"
    environment[f"{SITE}/usercustomize.pyc"] = "byte code\n"
    del environment[f"{SITE}/torch_tpu/__init__.py"]
    toy = make(tmp_path, layers=(system, environment, gone))
    toy.about("sbom")
    found = failed(toy)
    assert set(found) == {FILES}
    assert f"/{SITE}/libtpu/__init__.py of libtpu has other bytes than its RECORD" in found[FILES]
    assert f"/{SITE}/usercustomize.py belongs to no wheel" in found[FILES]
    assert f"/{SITE}/torch_tpu/__init__.py of torch-tpu is missing" in found[FILES]
    assert "usercustomize.pyc" not in found[FILES]


def test_a_file_that_was_changed_with_its_record(tmp_path: Path) -> None:
    """Only the wheel itself, of the locked digest, can tell."""
    made = io.BytesIO()
    folder = "torch-2.13.0+cpu.dist-info"
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in (("torch/__init__.py", "x = 0\n"), ("torch/none.py", "")):
            archive.writestr(name, text)
        own = {f"{SITE}/torch/__init__.py": "x = 0\n"}
        archive.writestr(f"{folder}/RECORD", record(own, f"{SITE}/{folder}/RECORD"))
        archive.writestr("torch/_vendor/six-1.dist-info/RECORD", "a,sha256=aaaa,1\n")
    digests = {**DIGESTS, "torch": hashlib.sha256(made.getvalue()).hexdigest()}
    wheel = tmp_path / "wheelhouse" / digests["torch"] / "torch-2.13.0+cpu-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(made.getvalue())
    toy = make(tmp_path, layers=files(digests), own_labels=labels(digests))
    toy.about("sbom")
    found = failed(toy)
    assert found == {RECORDS: f"torch/__init__.py of torch is not that of {wheel.name}"}
    # a wheel of another digest in its place is no witness
    wheel.write_bytes(b"something else")
    checks = toy.about("verify")["data"]["checks"]
    (one,) = [one for one in checks if one["what"] == RECORDS]
    assert "torch 2.13.0+cpu" in one["detail"]


def test_the_twin_with_gzip_layers_has_documents_of_its_own(toy: Toy) -> None:
    layout, digest = toy.folder / "referrers-gzip", twin(toy)
    found = toy.about("sbom")
    assert "as many for its gzip twin" in found["summary"]
    assert found["data"]["gzip"]["subject"] == digest
    attached, blob = referrers.read_layout(layout, digest)
    assert {one.subject for one in attached} == {digest}
    bills = [one for one in attached if one.kind == referrers.CYCLONEDX]
    said = bill.read_cyclonedx(blob(bills[0].blob.digest))
    assert said.digest == digest
    assert said.parts == bill.read_cyclonedx((toy.folder / NAME).read_bytes()).parts
    layer = read_image(toy.folder / "oci-gzip").layers[0].digest
    assert layer.encode() in blob(bills[0].blob.digest)
    assert toy.about("sbom")["status"] == "unchanged"
    # it is made again if it is damaged, and goes with the twin
    (layout / "blobs/sha256" / attached[0].digest[7:]).write_bytes(b"{}")
    assert toy.about("sbom")["status"] == "done"
    shutil.rmtree(toy.folder / "oci-gzip")
    assert toy.about("sbom")["data"]["gzip"] is None
    assert not layout.exists()


def test_what_mends_names_the_image(toy: Toy) -> None:
    (toy.folder / "referrers" / "index.json").write_text("{}")
    (toy.folder / "referrers").rename(toy.folder / "away")
    checks = toy.about("verify", code=1)["data"]["checks"]
    assert [one["mend"] for one in checks if one["status"] == "failed"] == [
        "./forge sbom --image toy --python 3.11"
    ]
    (toy.folder / "away").rename(toy.folder / "referrers")
    checks = toy.about("verify", code=1)["data"]["checks"]
    mends = [one["mend"] for one in checks if one["status"] == "failed"]
    assert mends and all("./forge sbom --image toy --python 3.11" in mend for mend in mends)
    remote = verify.Verdict("--image toy", "a.example/toy", gzip=True)
    assert "./forge bake --no-cache --image toy --gzip, " in remote.mend("bake --no-cache")
    assert "./forge push --image toy --gzip --to a.example/toy, " in remote.mend()
    assert "no image of this checkout" in verify.Verdict("", "a.example/toy").mend()


def test_nothing_attached(tmp_path: Path) -> None:
    toy = make(tmp_path)
    found = toy.about("verify", code=1)["data"]["checks"]
    (one,) = [one for one in found if one["what"] == ATTACHED]
    assert one["detail"] == "no documents yet"
    assert one["mend"] == "./forge sbom --image toy --python 3.11"
    assert set(failed(toy)) == {ATTACHED}


def test_a_damaged_document(toy: Toy) -> None:
    record = json.loads((toy.folder / "attestations.json").read_text())
    manifest = record["referrers"][0]["digest"].removeprefix("sha256:")
    (toy.folder / "referrers" / "blobs" / "sha256" / manifest).write_bytes(b"{}")
    assert "its digest is sha256:44136fa3" in failed(toy)[ATTACHED]


def test_a_document_that_is_not_the_attached_one(toy: Toy) -> None:
    path = toy.folder / "attestations" / "sbom.spdx.json"
    path.write_text(path.read_text().replace("libtpu", "libfoo"))
    assert "attestations/sbom.spdx.json is not what is attached" in failed(toy)[ATTACHED]


def test_the_documents_of_an_image_that_was_baked_again(toy: Toy) -> None:
    system, environment, gone = files()
    make(toy.out, layers=(system, {**environment, "etc/x": "x"}, gone))
    assert f"it is of {referrers.tag(toy.digest)}, and not of" in failed(toy)[ATTACHED]


def test_a_label_that_is_missing_and_one_that_lies(tmp_path: Path) -> None:
    told = {**labels(), "io.tpuforge.torch.version": "2.12.0+cpu"}
    del told["org.opencontainers.image.title"]
    toy = make(tmp_path, own_labels=told)
    toy.about("sbom")
    found = failed(toy)["labels complete, and as the bill says"]
    assert "there is no label org.opencontainers.image.title" in found
    assert "io.tpuforge.torch.version says 2.12.0+cpu, and the bill 2.13.0+cpu" in found


def test_a_wheel_that_is_not_the_locked_one(toy: Toy) -> None:
    path = toy.folder / "attestations" / "sbom.cdx.json"
    _attach(toy, "sbom.cdx.json", path.read_bytes().replace(_hex("torch"), _hex("libtpu")))
    found = failed(toy)
    assert (
        "torch 2.13.0+cpu is sha256:"
        in found["the bill's wheels are those of the image's own lock"]
    )
    assert "both bills tell the same" in found


def _hex(name: str) -> bytes:
    return DIGESTS[name].encode()


def _attach(toy: Toy, name: str, data: bytes) -> None:
    """Put another document in the place of one, with everything around it in order."""
    folder = toy.folder / "attestations"
    (folder / name).write_bytes(data)
    record = json.loads((toy.folder / "attestations.json").read_text())
    index = json.loads((toy.folder / "oci" / "index.json").read_text())["manifests"][0]
    subject = Blob(index["digest"], index["size"], index["mediaType"])
    documents = [
        referrers.Artifact(one["artifact_type"], path.name, path.read_bytes())
        for one in record["referrers"]
        for path in [toy.folder / one["file"]]
    ]
    referrers.write(toy.folder / "referrers", subject, documents)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s["subject"][0]["digest"].update(sha256="0" * 64), "it is about sha256:000"),
        (
            lambda s: s["predicate"]["runDetails"]["builder"].update(id="https://else.example"),
            "it was made by https://else.example",
        ),
        (lambda s: _material(s, "base").update(digest={"sha256": "1" * 64}), "its base is 1111"),
        (lambda s: _material(s, "torch").update(digest={"sha256": "2" * 64}), "not name torch"),
    ],
)
def test_provenance_that_tells_another_story(toy: Toy, change: Any, said: str) -> None:
    statement = toy.document("provenance.json")
    change(statement)
    _attach(toy, "provenance.json", json.dumps(statement).encode())
    found = failed(toy)
    assert said in found["provenance: this image, this builder, these materials"]


def _material(statement: dict[str, Any], name: str) -> dict[str, Any]:
    materials = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    found: dict[str, Any] = next(one for one in materials if one["name"] == name)
    return found


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"bomFormat": "CycloneDX"}', b'{"spdxVersion": "SPDX-2.3"}']
)
def test_what_is_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        bill.read_cyclonedx(data)
    with pytest.raises(ValueError):
        bill.read_spdx(data)
    with pytest.raises(ForgeError, match="cannot be read"):
        attest.read(data)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"manifests": []}', b'{"mediaType": 3}'])
def test_what_is_no_index_or_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ForgeError, match="no index"):
        referrers.read_index(data, "it")
    with pytest.raises(ForgeError, match="its digest is"):
        referrers.read_manifest(data, "sha256:" + "0" * 64, "it")


def test_a_tag_and_a_key_do_not_go_with_a_local_image(toy: Toy) -> None:
    error = toy.about("verify", "--key", "x.pub", code=2)["error"]
    assert "has no signature" in error["found"]


def test_cosign_gets_no_more_of_the_environment_than_a_key_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_PROFILE", "VAULT_TOKEN", "COSIGN_PASSWORD", "MY_KEY", "COSIGN_REPOSITORY"):
        monkeypatch.setenv(name, "x")
    # one place that puts an environment together, asked without running anything
    environment = cosign.environment
    assert "COSIGN_PASSWORD" in environment(Signer(key="/a/key"), {})
    assert not {"AWS_PROFILE", "VAULT_TOKEN", "MY_KEY", "COSIGN_REPOSITORY"} & set(
        environment(Signer(key="/a/key"), {})
    )
    assert "AWS_PROFILE" in environment(Signer(key="awskms:///alias/x"), {})
    assert "VAULT_TOKEN" not in environment(Signer(key="awskms:///alias/x"), {})
    assert "MY_KEY" in environment(Signer(key="env://MY_KEY"), {})


@pytest.mark.parametrize("debian_12", [True, False])
def test_cosign_is_taken_from_debian_where_it_can_be(
    debian_12: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[str] = []
    taken: list[str] = []
    monkeypatch.setattr(host, "which", lambda name: "/usr/bin/cosign" if installed else "")
    monkeypatch.setattr(host, "can_install", lambda: True)
    monkeypatch.setattr(host, "apt_install", lambda names, progress: installed.extend(names))
    monkeypatch.setattr(host, "take_from_next", lambda name, names, progress: taken.extend(names))
    release = {"ID": "debian", "VERSION_ID": "12" if debian_12 else "13"}
    monkeypatch.setattr(mirrors, "os_release", lambda: release)
    with Progress("test", quiet=True) as progress:
        assert cosign.program(progress) == "/usr/bin/cosign"
    assert installed == ["cosign"]
    assert taken == (["cosign"] if debian_12 else [])


def test_without_cosign_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "which", lambda name: "")
    monkeypatch.setattr(host, "can_install", lambda: False)
    with Progress("test", quiet=True) as progress, pytest.raises(ForgeError) as caught:
        cosign.program(progress)
    assert "apt-get install cosign" in caught.value.mend
    assert caught.value.exit_code == 2


def test_a_run_that_finds_the_disk_full_leaves_nothing_that_is_taken_for_whole(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = referrers.write

    def full(*words: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(referrers, "write", full)
    path = toy.folder / "attestations" / "provenance.json"
    path.write_text("{}")
    assert "No space left" in toy.about("sbom", code=2)["error"]["found"]
    assert not (toy.folder / "attestations.json").exists()
    monkeypatch.setattr(referrers, "write", write)
    assert toy.about("sbom")["status"] == "done"
    assert toy.about("verify")["exit_code"] == 0


@pytest.mark.parametrize(
    ("words", "code", "kind", "said"),
    [
        ("no signatures found", 1, cosign.NotSignedError, "is not signed"),
        (
            "no matching signatures: none of the expected identities matched what was in the "
            "certificate, got subjects [else@example.com]",
            1,
            cosign.NotSignedError,
            "is signed, and not by me@example.com",
        ),
        ("Get: dial tcp: connection refused", 2, ForgeError, "cosign ended with code 1"),
    ],
)
def test_a_keyless_signature_is_asked_for_by_identity_and_issuer(
    tmp_path: Path, words: str, code: int, kind: type[ForgeError], said: str
) -> None:
    """cosign is a stand-in here: the services of keyless signing cannot be reached in tests."""
    program = tmp_path / "cosign"
    asked = tmp_path / "asked"
    program.write_text(f"#!/bin/sh\necho \"$@\" >'{asked}'\necho '{words}'\nexit 1\n")
    program.chmod(0o755)
    ref = Reference.parse("registry.example/toy")
    signer = Signer(identity="me@example.com", issuer="https://issuer.example")
    with Progress("test", quiet=True) as progress:
        tool = cosign.Cosign(Registry(progress), ref, str(program))
        with pytest.raises(kind, match=said) as caught:
            tool.verify("sha256:" + "0" * 64, signer)
        assert caught.value.exit_code == code
        line = asked.read_text()
        assert "--certificate-identity me@example.com" in line
        assert "--certificate-oidc-issuer https://issuer.example" in line
        assert line.rstrip().endswith("registry.example/toy@sha256:" + "0" * 64)
        # the log is what makes a keyless signature count
        assert "ignore-tlog" not in line
        assert "--allow-http" not in line
        with pytest.raises(ForgeError):
            tool.sign(["sha256:" + "0" * 64], Signer())
        assert "--tlog-upload" not in asked.read_text()
