"""Images go to a registry and come back as they were, with and without skopeo."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bake_support import verb
from registry_support import RealRegistry, attach, proxy, registry, small_image, without_credentials

PUSH, PULL = "tpuforge.images.push", "tpuforge.images.pull"


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An out folder of its own, and a user without credentials."""
    return without_credentials(tmp_path, monkeypatch)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RealRegistry]:
    """A registry with TLS and a password."""
    with registry(tmp_path, auth=True, tls=True) as made:
        yield made


@pytest.fixture(params=["skopeo", "no skopeo"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """PATH of a machine with skopeo, and of one without it and without apt."""
    if request.param == "skopeo":
        return os.environ["PATH"]
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "git"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    return str(folder)


def result(module: str, *words: str, **variables: str) -> dict[str, object]:
    done = verb(module, *words, "--json", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    data: dict[str, object] = json.loads(done.stdout)["data"]
    return data


def blobs(layout: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (layout / "blobs" / "sha256").iterdir()}


def test_an_image_comes_back_as_it_was_with_what_is_attached(
    tmp_path: Path, out: Path, guarded: RealRegistry, path: str
) -> None:
    digest = small_image(out)
    twin = small_image(out, twin="oci-gzip")
    attached = attach(out, digest)
    to, reach = f"{guarded.address}/team/runtime", guarded.options()
    first = result(PUSH, "--to", to, "--tag", "latest", "--gzip", *reach, PATH=path)
    assert first["digest"] == digest and first["tags"] == ["1-py311", "latest"]
    tags = ["1-py311-gzip", "latest-gzip"]
    assert first["gzip"] == {"digest": twin, "tags": tags, "referrers": []}
    assert first["referrers"] == attached
    written = json.loads((out / "results" / "push-runtime-py311.json").read_text())["data"]
    assert written == first
    for reference in ("1-py311", "latest", digest, f"sha256-{digest[7:]}", *attached):
        assert f"manifests/{reference} HTTP" in guarded.log
    again = verb(PUSH, "--to", to, *reach, PATH=path)
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert ("there is no skopeo here" in again.stderr) == (path != os.environ["PATH"])

    elsewhere = str(tmp_path / "elsewhere")
    taken = result(PULL, f"{to}:latest@{digest}", *reach, PATH=path, TPUFORGE_OUT=elsewhere)
    assert taken["digest"] == digest and taken["taken_blobs"] == 3
    pulled = Path(elsewhere, "pulled", digest[7:])
    mine = out / "images" / "runtime-py311"
    assert blobs(pulled / "oci") == blobs(mine / "oci")
    assert blobs(pulled / "referrers") == blobs(mine / "referrers")
    kinds = ["application/vnd.cyclonedx+json", "application/spdx+json"]
    wanted = [{"digest": d, "artifact_type": k} for d, k in zip(attached, kinds, strict=True)]
    assert taken["referrers"] == wanted
    listed = json.loads((mine / "referrers" / "index.json").read_text())["manifests"]
    index = verb(PULL, f"{to}@{listed[0]['digest']}", *reach, PATH=path)
    assert index.returncode == 2 and "is an index of several images" in index.stderr
    old = result(PULL, f"{to}@{twin}", *reach, PATH=path, TPUFORGE_OUT=elsewhere)
    assert old["digest"] == twin and old["known_blobs"] == 1


def test_a_killed_pull_goes_on_and_bad_remains_are_taken_again(
    tmp_path: Path, out: Path, path: str
) -> None:
    digest = small_image(out, layers=[os.urandom(300_000) for _ in range(3)])
    with registry(tmp_path) as real, proxy(real.address) as way:
        result(PUSH, "--to", f"{real.address}/x/y")
        shutil.copytree(out / "images/runtime-py311/oci", out / "pulled" / digest[7:] / "oci")
        shutil.rmtree(out / "images")
        kept = sorted((out / "pulled").rglob("blobs/sha256/*"), key=lambda p: p.stat().st_size)
        # one is missing, one is cut off, one has a flipped byte
        kept[-1].unlink()
        kept[-2].write_bytes(kept[-2].read_bytes()[:1000])
        kept[0].write_bytes(kept[0].read_bytes()[:-1] + b"!")
        data = result(PULL, f"{way.address}/x/y@{digest}", PATH=path)
        asked = {path for method, path in way.asked if method == "GET" and "/blobs/" in path}
    assert (data["taken_blobs"], data["known_blobs"]) == (3, 1)
    assert len(asked) == 3


def test_what_others_attached_stays(out: Path, guarded: RealRegistry) -> None:
    to, reach = f"{guarded.address}/x/y", guarded.options()
    digest = small_image(out)
    theirs = attach(out, digest)
    result(PUSH, "--to", to, *reach)
    shutil.rmtree(out / "images" / "runtime-py311" / "referrers")
    ours = attach(out, digest, kinds=("application/vnd.in-toto+json",))
    done = verb(PUSH, "--to", to, *reach)
    assert done.returncode == 0, done.stderr
    assert "2 attached by somebody else stay" in done.stderr
    taken = result(PULL, f"{to}@{digest}", *reach)
    listed = taken["referrers"]
    assert isinstance(listed, list)
    assert {one["digest"] for one in listed} == {*theirs, *ours}


def test_all_images_go_below_one_name(out: Path, guarded: RealRegistry) -> None:
    digests = {slug: small_image(out, slug) for slug in ("pallas-py311", "runtime-py311")}
    to, reach = f"{guarded.address}/team", guarded.options()
    data = result(PUSH, "--all", "--to", to, *reach)
    images = data["images"]
    assert isinstance(images, list)
    assert {one["reference"] for one in images} == {
        f"{to}/pallas@{digests['pallas-py311']}",
        f"{to}/runtime@{digests['runtime-py311']}",
    }
    for slug, digest in digests.items():
        one = json.loads((out / "results" / f"push-{slug}.json").read_text())
        assert one["data"]["digest"] == digest and one["exit_code"] == 0


def test_a_tag_alone_is_not_pulled_but_told(out: Path, guarded: RealRegistry) -> None:
    to, reach = f"{guarded.address}/x/y", guarded.options()
    digest = small_image(out)
    result(PUSH, "--to", to, *reach)
    done = verb(PULL, f"{to}:1-py311", *reach)
    assert done.returncode == 2
    assert f"./forge pull {to}:1-py311@{digest}" in done.stderr
    absent = verb(PULL, f"{to}@sha256:{'1' * 64}", *reach)
    assert absent.returncode == 2
    assert "is not in the registry" in absent.stderr


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--to", "runtime"], "does not begin with a registry"),
        (["--to", "localhost:5000/x", "--tag", "a b"], "cannot be a tag"),
        (["--to", "localhost:5000/x", "--image", "../x"], "there is no finished image"),
        (["--to", "localhost:5000/x", "--image", "builder"], "or ./forge bake --image builder\n"),
        (["--to", "localhost:5000/x", "--gzip"], "no gzip twin"),
        (["--to", "localhost:5000/x", "--ca", "/nowhere"], "there is no such file"),
        (["--to", "localhost:5000/x", "--all", "--image", "runtime"], "--all was given with"),
    ],
)
def test_what_a_person_gets_wrong(out: Path, words: list[str], found: str) -> None:
    small_image(out)
    done = verb(PUSH, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert found in done.stderr
