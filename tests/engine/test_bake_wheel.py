"""An image around a wheel of one's own: the published one, packed again under another version."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bake_support import ROOT, Image, private_out, verb
from tpuforge.lockfile import read_lock

VERSION = "0.2.0+local"
DIST_INFO = f"torch_tpu-{VERSION}.dist-info"


def repack(source: Path, folder: Path) -> Path:
    """A torch_tpu wheel under another version, with a RECORD that is right again."""
    old = source.name.split("-")[1]
    target = folder / source.name.replace(f"-{old}-", f"-{VERSION}-")
    rows = []
    with zipfile.ZipFile(source) as read, zipfile.ZipFile(target, "w") as made:
        for entry in read.infolist():
            if entry.filename.endswith(".dist-info/RECORD"):
                continue
            data = read.read(entry)
            entry.filename = entry.filename.replace(f"torch_tpu-{old}.dist-info", DIST_INFO)
            if entry.filename == f"{DIST_INFO}/METADATA":
                before, data = (
                    data,
                    data.replace(b"\nVersion: 0.2.0\n", b"\nVersion: 0.2.0+local\n"),
                )
                assert before != data
            entry.compress_type = zipfile.ZIP_STORED
            made.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
            rows.append((entry.filename, f"sha256={digest.decode()}", len(data)))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (f"{DIST_INFO}/RECORD", "", "")])
        made.writestr(f"{DIST_INFO}/RECORD", text.getvalue())
    return target


@pytest.fixture(scope="module")
def given(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (published,) = image.out.glob("wheelhouse/*/torch_tpu-0.2.0-cp311-*.whl")
    return repack(published, tmp_path_factory.mktemp("given"))


@pytest.fixture(scope="module")
def baked(image: Image, given: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image that holds the wheel, in an out folder of its own."""
    out = private_out(tmp_path_factory.mktemp("wheel") / "out", image.out)
    done = verb(
        *("tpuforge.images.bake", "--wheel", str(given), "--json"),
        **image.engine.env,
        TPUFORGE_OUT=str(out),
    )
    assert done.returncode == 0, done.stderr
    made = Image(image.engine, json.loads(done.stdout)["data"], out)
    yield made
    image.engine.run("rmi", made.name)


@pytest.mark.slow
def test_the_image_tells_that_it_holds_another_wheel(
    image: Image, baked: Image, given: Path
) -> None:
    digest = hashlib.sha256(given.read_bytes()).hexdigest()
    assert baked.name == f"tpuforge/runtime:0.2.0_local-torch2.13.0-py311-wheel.{digest[:8]}"
    overlay: dict[str, Any] = baked.record["overlay"]
    assert overlay["sha256"] == baked.record["labels"]["io.tpuforge.overlay.wheel.sha256"] == digest
    assert "not audited" in overlay["audit"]
    assert any(digest in note and "given" in note for note in baked.record["notes"])
    lock = baked.out / overlay["lock"]
    assert hashlib.sha256(lock.read_bytes()).hexdigest() == baked.record["lock_sha256"]
    locked = {one.name: one for one in read_lock(ROOT / "lock" / "runtime-py311.txt")}
    own = {one.name: one for one in read_lock(lock)}
    assert {name for name in own if own[name] != locked[name]} == {"torch-tpu"}
    assert own["torch-tpu"].version == VERSION
    shown = baked.run("versions", options=("--network=none", "--read-only"))
    assert f"torch_tpu   {VERSION}  sha256:{digest}\n" in shown.stdout
    assert f"given wheel {given.name}, sha256:{digest}\n" in shown.stdout
    # the pinned image is where it was, and shares every layer but this wheel's and those about it
    inspected = image.engine.run("image", "inspect", "--format", "{{.Id}}", image.name)
    assert inspected.stdout.strip() in (
        image.record["manifest_digest"],
        image.record["config_digest"],
    )
    assert baked.inputs["the lock"] == image.inputs["the lock"], "the lock was edited meanwhile"
    layers = {layer["digest"]: layer["what"] for layer in image.record["layers"]}
    new = [one["what"] for one in baked.record["layers"] if one["digest"] not in layers]
    assert f"torch_tpu {VERSION}" in new
    assert not [what for what in new if what.startswith(("libtpu", "torch 2", "pip", "Debian"))]


@pytest.mark.slow
def test_health_runs_on_it_and_judges_by_its_own_lock(baked: Image) -> None:
    done = verb(
        *("tpuforge.smoke.health", "--tier", "static,import"),
        **baked.engine.env,
        TPUFORGE_OUT=str(baked.out),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch_tpu is a wheel that was given to the bake" in done.stdout
    health = json.loads((baked.out / "health" / baked.slug / "health.json").read_text())
    assert health["verdict"] == "healthy"
    assert health["image"]["overlay"].startswith("torch_tpu-0.2.0+local-")
    packages = {one["name"]: one["version"] for one in health["packages"]}
    assert VERSION in (packages.get("torch-tpu"), packages.get("torch_tpu"))
    passed = {check["id"] for check in health["checks"] if check["status"] == "passed"}
    assert {"static.lock", "static.closure", "static.record", "static.torch-tpu"} <= passed
    page = (baked.out / "health" / baked.slug / "health.html").read_text()
    assert health["image"]["overlay"] in page
    assert verb("tpuforge.release.report", TPUFORGE_OUT=str(baked.out)).returncode == 0
    report = (baked.out / "report" / baked.slug / "index.html").read_text()
    assert "wheel that was given to the bake" in report
    assert baked.record["overlay"]["sha256"] in report


@pytest.mark.slow
def test_the_engine_lost_the_image(baked: Image, given: Path) -> None:
    """This one, since other tests run the pinned image at the same time."""
    engine = baked.engine
    assert engine.run("rmi", "--force", baked.name).returncode == 0
    variables = {**engine.env, "TPUFORGE_OUT": str(baked.out)}
    done = verb("tpuforge.images.bake", "--wheel", str(given), **variables)
    assert done.returncode == 0, done.stderr
    assert "is loaded into the engine again" in done.stdout
    found = engine.run("image", "inspect", "--format", "{{.Id}}", baked.name).stdout.strip()
    assert found in (baked.record["manifest_digest"], baked.record["config_digest"])


@pytest.mark.slow
def test_nothing_is_done_twice_and_a_lone_bake_wants_the_locked_wheel_again(
    baked: Image, given: Path
) -> None:
    variables = {**baked.engine.env, "TPUFORGE_OUT": str(baked.out)}
    again = verb("tpuforge.images.bake", "--wheel", str(given), **variables)
    assert again.returncode == 0, again.stderr
    assert "nothing to do" in again.stdout
    assert "given; not the locked one" in again.stdout
    # it says why before it begins; one that cannot begin leaves the image as it is
    (locked,) = baked.out.glob("wheelhouse/*/torch_tpu-*.whl")
    locked.unlink()
    plain = verb("tpuforge.images.bake", **variables)
    assert plain.returncode == 2
    assert "the wheel that was given changed" in plain.stderr
    assert "the wheel of torch-tpu 0.2.0 is not in the wheelhouse" in plain.stderr
    record = json.loads((baked.out / "images" / baked.slug / "image.json").read_text())
    assert record["manifest_digest"] == baked.record["manifest_digest"]
