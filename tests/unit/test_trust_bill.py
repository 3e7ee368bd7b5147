"""Bills of materials and provenance: what is read out of layers, and what is refused."""

from __future__ import annotations

import email.parser
import json
import shutil
from pathlib import Path

import pytest

from tpuforge.release import licences
from trust_support import DIGESTS, SITE, Toy, files, labels, lock_text, make


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("License-Expression: Apache-2.0 OR BSD-2-Clause", "Apache-2.0 OR BSD-2-Clause"),
        ("License: apache 2.0", "LicenseRef-apache-2.0"),
        ("License: BSD\nClassifier: License :: OSI Approved :: MIT License", "MIT"),
        ("Classifier: License :: OSI Approved :: BSD License", "LicenseRef-BSD-License"),
        ("License: " + "All rights, and a whole text of them. " * 9, "NOASSERTION"),
        ("Summary: says nothing", "NOASSERTION"),
    ],
)
def test_licence_of_a_wheel(stated: str, expected: str) -> None:
    metadata = email.parser.HeaderParser().parsestr(f"Name: x\nVersion: 1\n{stated}\n\n")
    assert licences.of_wheel(metadata) == expected


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("GPL-2+", "GPL-2.0-or-later"),
        ("LGPL-2.1", "LGPL-2.1-only"),
        ("GPL-2+ or Expat", "(GPL-2.0-or-later OR MIT)"),
        ("GPL-3+ and ISC", "GPL-3.0-or-later AND ISC"),
        ("GPL-3+ with Bison exception", "LicenseRef-GPL-3-plus-with-Bison-exception"),
        ("public-domain", "LicenseRef-public-domain"),
    ],
)
def test_licences_of_a_debian_package(named: str, expected: str) -> None:
    assert licences.of_deb(f"Format: 1.0\nFiles: *\nLicense: {named}\n") == expected


def test_a_copyright_file_for_people_names_the_common_licences() -> None:
    text = "On Debian see /usr/share/common-licenses/GPL-2, or /usr/share/common-licenses/LGPL."
    assert licences.of_deb(text) == "GPL-2.0-only AND LGPL-2.0-or-later"
    assert licences.of_deb("") == licences.NONE


def test_the_documents_name_what_is_in_the_layers(tmp_path: Path) -> None:
    toy = make(tmp_path)
    before = {path: path.read_bytes() for path in (toy.folder / "oci").rglob("*") if path.is_file()}
    data = toy.about("sbom")["data"]
    assert data["subject"] == toy.digest
    assert data["figures"]["debs"] == 2
    assert data["figures"]["wheels"] == 3
    # a later layer removed the other program
    assert data["figures"]["files"] == 1
    assert data["figures"]["without_digest"] == 0
    # the image itself is as it was
    after = {path: path.read_bytes() for path in (toy.folder / "oci").rglob("*") if path.is_file()}
    assert before == after

    cyclonedx = toy.document("sbom.cdx.json")
    by_name = {one["name"]: one for one in cyclonedx["components"]}
    assert set(by_name) == {
        *("zlib1g", "mawk", "debian", "torch", "torch-tpu", "libtpu"),
        "usr/local/bin/health",
    }
    torch = by_name["torch"]
    assert torch["purl"].startswith("pkg:pypi/torch@2.13.0%2Bcpu?repository_url=")
    assert torch["hashes"] == [{"alg": "SHA-256", "content": DIGESTS["torch"]}]
    assert torch["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    facts = {one["name"]: one["value"] for one in torch["properties"]}
    assert facts["tpuforge:place"] == f"/{SITE}"
    assert facts["tpuforge:own-bill:0"].endswith("sboms/own.cdx.json")
    zlib = by_name["zlib1g"]
    assert zlib["hashes"][0]["content"] == DIGESTS["zlib1g"]
    assert zlib["licenses"] == [{"expression": "(GPL-2.0-or-later OR MIT)"}]
    needs = {one["ref"]: one.get("dependsOn", []) for one in cyclonedx["dependencies"]}
    assert needs[zlib["bom-ref"]] == [by_name["mawk"]["bom-ref"]]
    tpu = by_name["torch-tpu"]["bom-ref"]
    assert needs[tpu] == sorted([torch["bom-ref"], by_name["libtpu"]["bom-ref"]])

    spdx = toy.document("sbom.spdx.json")
    assert len(spdx["packages"]) == 1 + 6
    assert {one["licenseId"] for one in spdx["hasExtractedLicensingInfos"]} == {
        "LicenseRef-Apache-2.0",
        "LicenseRef-Some-Terms-of-Service",
    } - ({"LicenseRef-Apache-2.0"} if licences.known("Apache 2.0") else set())

    statement = toy.document("provenance.json")
    assert statement["subject"][0]["digest"]["sha256"] == toy.digest.removeprefix("sha256:")
    materials = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    named = {one["name"]: one["digest"].get("sha256") for one in materials}
    assert {name: named[name] for name in DIGESTS} == DIGESTS
    assert named["lock"] == labels()["io.tpuforge.lock.sha256"]


def test_the_same_image_gives_the_same_bytes(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        toy = make(tmp_path / name)
        toy.about("sbom")
        folder = toy.folder / "referrers"
        made.append(
            {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}
            | {path.name: path.read_bytes() for path in (folder / "blobs" / "sha256").iterdir()}
        )
    assert made[0] == made[1]
    assert len(made[0]) > 6


def test_nothing_to_do_the_second_time_and_again_when_a_document_was_changed(
    tmp_path: Path,
) -> None:
    toy = make(tmp_path)
    assert toy.about("sbom")["status"] == "done"
    assert toy.about("sbom")["status"] == "unchanged"
    path = toy.folder / "attestations" / "provenance.json"
    path.write_bytes(path.read_bytes() + b" ")
    assert toy.about("sbom")["status"] == "done"
    assert toy.about("verify")["exit_code"] == 0


def test_a_secret_of_the_environment_is_in_no_document(tmp_path: Path) -> None:
    toy = make(tmp_path)
    record = json.loads((toy.folder / "image.json").read_text())
    record["engine"]["versions"]["engine"] = "27 at https://me:hunter2hunter2@build.example"
    (toy.folder / "image.json").write_text(json.dumps(record))
    toy.about("sbom", ENGINE_TOKEN="hunter2hunter2")
    for path in (toy.folder / "attestations").iterdir():
        assert "hunter2hunter2" not in path.read_text()


def test_a_wheel_that_no_lock_names_is_refused(tmp_path: Path) -> None:
    system, environment, gone = files()
    environment[f"{SITE}/extra-1.0.dist-info/METADATA"] = "Name: extra\nVersion: 1.0\n"
    toy = make(tmp_path, layers=(system, environment, gone))
    error = toy.about("sbom", code=1)["error"]
    assert f"extra 1.0 in /{SITE}, which no lock names" in error["found"]
    assert not (toy.folder / "attestations.json").exists()


def test_a_wheel_that_only_the_lock_names_is_refused(tmp_path: Path) -> None:
    system, environment, gone = files()
    del environment[f"{SITE}/libtpu-0.0.52.dist-info/METADATA"]
    toy = make(tmp_path, layers=(system, environment, gone))
    error = toy.about("sbom", code=1)["error"]
    assert "its lock names libtpu 0.0.52, which its layers do not hold" in error["found"]


def test_another_lock_in_the_image_than_its_label_names_is_refused(tmp_path: Path) -> None:
    system, environment, gone = files()
    environment["opt/tpuforge/lock.txt"] = lock_text({**DIGESTS, "torch": "0" * 64})
    toy = make(tmp_path, layers=(system, environment, gone))
    error = toy.about("sbom", code=1)["error"]
    assert "/opt/tpuforge/lock.txt in the image has the digest" in error["found"]


def test_another_package_than_the_base_is_refused(tmp_path: Path) -> None:
    system, environment, gone = files()
    system["var/lib/dpkg/status"] = system["var/lib/dpkg/status"].replace("1.3.4-3", "1.3.4-4")
    toy = make(tmp_path, layers=(system, environment, gone))
    error = toy.about("sbom", code=1)["error"]
    assert "its layers lack mawk 1.3.4-3 amd64 of the base's record" in error["found"]
    assert "and hold mawk 1.3.4-4 amd64 beside it" in error["found"]


def test_without_the_record_of_the_base_its_packages_have_no_digest(tmp_path: Path) -> None:
    toy = make(tmp_path, base=False)
    found = toy.about("sbom")
    assert found["data"]["figures"]["without_digest"] == 2
    assert any("no digest is known" in note for note in found["notes"])
    assert toy.about("verify")["exit_code"] == 0


def test_an_image_without_a_system_is_told_file_by_file(tmp_path: Path) -> None:
    simulator = {"plugin": {"wheel": "xla_cpu_pjrt-0.0.1-py3-none-any.whl", "sha256": "5" * 64}}
    told = {name: text for name, text in labels().items() if name.startswith("org.open")}
    del told["org.opencontainers.image.base.digest"]
    inside = {"simulator.json": json.dumps(simulator), "lib/wrapper.so": "so"}
    toy = make(tmp_path, layers=(inside,), own_labels={**told, "io.tpuforge.image": "toy"})
    record = json.loads((toy.folder / "image.json").read_text())
    (toy.folder / "image.json").write_text(json.dumps({**record, "base_digest": "sha256:77"}))
    assert toy.about("sbom")["data"]["figures"]["archives"] == 1
    named = {one["name"]: one for one in toy.document("sbom.cdx.json")["components"]}
    assert set(named) == {"lib/wrapper.so", "simulator.json", "xla-cpu-pjrt"}
    assert named["xla-cpu-pjrt"]["hashes"][0]["content"] == "5" * 64
    materials = toy.document("provenance.json")["predicate"]["buildDefinition"]
    assert "xla-cpu-pjrt" in {one["name"] for one in materials["resolvedDependencies"]}
    assert toy.about("verify")["exit_code"] == 0


def test_a_standalone_python_is_told_with_its_archive(tmp_path: Path) -> None:
    toy = make(tmp_path)
    path = tmp_path / "base" / "bookworm.json"
    record = json.loads(path.read_text())
    record["standalone"] = {
        "name": "cpython",
        "version": "3.12.14",
        "file": "cpython.tar.gz",
        "url": "https://a.example/cpython.tar.gz",
        "sha256": "6" * 64,
    }
    path.write_text(json.dumps(record))
    toy.about("sbom")
    named = {one["name"]: one for one in toy.document("sbom.cdx.json")["components"]}
    assert named["cpython"]["version"] == "3.12.14"
    assert named["cpython"]["purl"].startswith("pkg:generic/cpython@3.12.14?download_url=https")
    assert toy.about("verify")["exit_code"] == 0


def note_source(toy: Toy, **source: object) -> None:
    """Have the bake's record tell of the commit, as the bake does."""
    record = json.loads((toy.folder / "image.json").read_text())
    record["source"] = {"commit": None, "dirty": False, "why": "", **source}
    (toy.folder / "image.json").write_text(json.dumps(record))


def test_the_commit_is_the_one_that_the_bake_noted(tmp_path: Path) -> None:
    toy = make(tmp_path)
    note_source(toy, commit="a" * 40)
    assert toy.about("sbom", "--release")["status"] == "done"
    source = toy.document("provenance.json")["predicate"]["buildDefinition"][
        "resolvedDependencies"
    ][0]
    assert source["digest"] == {"gitCommit": "a" * 40}
    assert "annotations" not in source
    assert toy.about("sbom", "--release")["status"] == "unchanged"
    # another bake of the same bytes is another story
    note_source(toy, commit="b" * 40)
    assert toy.about("sbom")["status"] == "done"
    assert "b" * 40 in json.dumps(toy.document("provenance.json"))


def test_a_checkout_with_changes_is_told(tmp_path: Path) -> None:
    toy = make(tmp_path)
    note_source(toy, commit="b" * 40, dirty=True)
    assert any("with changes beside its commit" in one for one in toy.about("sbom")["notes"])
    materials = toy.document("provenance.json")["predicate"]["buildDefinition"]
    source = materials["resolvedDependencies"][0]
    assert source["digest"] == {"gitCommit": "b" * 40}
    assert source["annotations"] == {"dirty": True}
    assert "files differ" in toy.about("sbom", "--release", code=1)["error"]["found"]


def test_release_wants_the_commit(tmp_path: Path) -> None:
    toy = make(tmp_path)
    error = toy.about("sbom", "--release", code=1)["error"]
    assert "the commit that it was baked from is not known" in error["found"]


def test_the_health_report_of_this_very_image_is_attached(tmp_path: Path) -> None:
    toy = make(tmp_path)
    folder = tmp_path / "health" / "toy-py311"
    folder.mkdir(parents=True)
    (folder / "health.json").write_text('{"verdict": "healthy"}')
    digest = "f09ca6ba46eea8e45bfcb6d1e2fbc4ab0e6b5e2b4ad6a6d6a1bcb4a3d7f7f4a1"
    run = {"manifest_digest": toy.digest, "sha256": digest}
    (folder / "run.json").write_text(json.dumps(run))
    # its digest is another: somebody edited it
    assert len(toy.about("sbom")["data"]["referrers"]) == 3
    from tpuforge.paths import sha256_file

    run["sha256"] = sha256_file(folder / "health.json")
    (folder / "run.json").write_text(json.dumps(run))
    found = toy.about("sbom")["data"]["referrers"]
    assert [one["file"] for one in found][-1] == "attestations/health.json"
    # and one of another image is not
    run["manifest_digest"] = "sha256:" + "0" * 64
    (folder / "run.json").write_text(json.dumps(run))
    assert len(toy.about("sbom")["data"]["referrers"]) == 3
    assert not (toy.folder / "attestations" / "health.json").exists()


def test_an_image_that_is_not_here(tmp_path: Path) -> None:
    toy = make(tmp_path)
    shutil.rmtree(toy.folder)
    error = toy.about("sbom", code=2)["error"]
    assert "the image toy-py311 was not baked here" in error["found"]
