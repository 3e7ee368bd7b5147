"""The set on a real engine: what images share, what is refused, and what all of it gives."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bake_support import ROOT, Engine, Image, link, private_out, result
from process_support import call
from tpuforge import tree

BAKE = "tpuforge.images.bake"
TINY = ("--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL")


@pytest.fixture(scope="module")
def dev(image: Image) -> Image:
    """The smallest child, baked if it is not there."""
    result("tpuforge.build.wheelhouse", "--flavour", "dev")
    return Image(image.engine, result(BAKE, "--image", "dev"), image.out)


@pytest.fixture(scope="module")
def base(image: Image) -> Image:
    """The base, with its fallback for old pullers."""
    return Image(image.engine, result(BAKE, "--image", "base", "--gzip"), image.out)


def digests(made: Image) -> list[str]:
    return [layer["digest"] for layer in made.record["layers"]]


def test_the_tree_is_read_as_buildx_reads_it(engine: Engine) -> None:
    words = ["buildx", "bake", "--print", "--file", str(ROOT / "images" / tree.FILE), "all"]
    printed = json.loads(engine.run(*words).stdout)["target"]
    read = tree.targets(ROOT / "images")
    assert set(printed) == set(read)
    for name, target in read.items():
        for kind in ("args", "contexts", "labels"):
            assert set(printed[name].get(kind, {})) == set(target.get(kind, {})), (name, kind)
        assert printed[name].get("dockerfile", "Dockerfile") == target.get(
            "dockerfile", "Dockerfile"
        )
        labels = {key: value for key, value in target["labels"].items() if not value.isupper()}
        assert labels.items() <= printed[name]["labels"].items()


def test_a_child_is_the_runtime_with_one_more_layer(image: Image, dev: Image, base: Image) -> None:
    above = [one for one in digests(dev) if one not in digests(image)]
    assert len(above) == 2, dev.record["layers"]
    # the runtime's own layer that tells of it is the one that is not shared
    assert len([one for one in digests(image) if one not in digests(dev)]) == 1
    assert digests(dev)[0] == digests(image)[0] == digests(base)[0]
    assert len(digests(base)) == 1
    for made in (image, dev, base):
        assert len(set(digests(made))) == len(digests(made))


def test_a_child_is_judged_by_its_own_lock(dev: Image) -> None:
    done = dev.run("health", "--tier", "static", "-k", "closure", "--json", "-", options=TINY)
    said = json.loads(done.stdout[done.stdout.index("{") :])
    (check,) = (one for one in said["checks"] if one["id"] == "static.closure")
    assert check["status"] == "passed", check
    assert (said["image"]["image"], said["image"]["flavour"]) == ("dev", "dev")
    assert dev.run("ninja", "--version", options=TINY).returncode == 0


def test_the_fallback_is_the_same_image_in_gzip(base: Image) -> None:
    told = base.record["gzip"]
    layout = base.layout.with_name("oci-gzip")
    index = json.loads((layout / "index.json").read_bytes())["manifests"][0]
    assert index["digest"] == told["manifest_digest"] != base.record["manifest_digest"]
    assert told["name"] == f"{base.name}-gzip"
    assert index["annotations"]["org.opencontainers.image.ref.name"].endswith("-gzip")
    blobs = layout / "blobs" / "sha256"
    manifest = json.loads((blobs / index["digest"][7:]).read_bytes())
    assert manifest["config"]["digest"] == base.record["config_digest"]
    config = json.loads((blobs / manifest["config"]["digest"][7:]).read_bytes())
    content = []
    for layer in manifest["layers"]:
        assert layer["mediaType"].endswith("tar+gzip")
        data = (blobs / layer["digest"][7:]).read_bytes()
        assert f"sha256:{hashlib.sha256(data).hexdigest()}" == layer["digest"]
        content.append(f"sha256:{hashlib.sha256(gzip.decompress(data)).hexdigest()}")
    assert content == config["rootfs"]["diff_ids"]


def test_the_simulator_comes_out_of_its_image_as_it_went_in(engine: Engine, tmp_path: Path) -> None:
    record = result(BAKE, "--image", "simulator")
    assert not any("base.digest" in name for name in record["labels"])
    made = engine.run("create", record["name"], "none")
    assert made.returncode == 0, made.stderr
    container = made.stdout.strip()
    try:
        taken = tmp_path / "simulator"
        taken.mkdir()
        line = '"$1" cp "$2":/. - | tar -x -C "$3"'
        words = ["sh", "-c", line, "sh", engine.docker, container, str(taken)]
        subprocess.run(words, env={**os.environ, **engine.env}, check=True, timeout=300)
    finally:
        engine.run("rm", container)
    told = json.loads((tmp_path / "simulator" / "simulator.json").read_text())
    for name, digest in told["files"].items():
        data = (tmp_path / "simulator" / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest, name
    assert (tmp_path / "simulator" / "pci" / "0000:00:05.0" / "iommu_group").is_symlink()


class Checkout:
    """A copy of this project that a test may edit, with an out folder of its own."""

    def __init__(self, folder: Path, image: Image) -> None:
        """Copy what a bake reads."""
        self.folder, self.engine = folder, image.engine
        skip = shutil.ignore_patterns("__pycache__")
        for name in ("images", "lock", "smoke", "src"):
            shutil.copytree(ROOT / name, folder / name, ignore=skip, symlinks=True)
        self.out = folder / "out"

    def bake(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Bake as its user would."""
        env = {
            **os.environ,
            **self.engine.env,
            "PYTHONPATH": str(self.folder / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TPUFORGE_OUT": str(self.out),
        }
        command = [sys.executable, "-m", BAKE, *words]
        return call(command, env=env, timeout=900)


@pytest.fixture
def copy(image: Image, base: Image, tmp_path: Path) -> Iterator[Checkout]:
    """A copy with the base of the real one, and the base's image finished."""
    made = Checkout(tmp_path, image)
    private_out(made.out, image.out)
    # without its wheels, all but the base cannot be had
    shutil.rmtree(made.out / "wheelhouse")
    finished = base.layout.parent
    for path in finished.rglob("*"):
        if path.is_file():
            link(path, made.out / "images" / finished.name / path.relative_to(finished))
    yield made
    # the tag is that of the real one again, whatever a test did to it
    result(BAKE, "--image", "base")


def test_an_image_over_its_budget_is_refused_and_the_one_of_before_stays(
    copy: Checkout, base: Image
) -> None:
    file = copy.folder / "images" / tree.FILE
    before = file.read_text()
    file.write_text(before.replace('"50MB"', '"20MB"'))
    assert file.read_text() != before
    done = copy.bake("--image", "base")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{base.name} is over its budget: " in done.stderr
    assert "compressed, the budget is 20.0 MB" in done.stderr
    assert "/usr/lib" in done.stderr
    record = json.loads((copy.out / "images" / "base-py311" / "image.json").read_text())
    assert record["manifest_digest"] == base.record["manifest_digest"]
    held = copy.engine.run("image", "inspect", "--format", "{{.Id}}", base.name).stdout.strip()
    assert held in (base.record["manifest_digest"], base.record["config_digest"])


def test_all_that_can_be_had_is_baked_and_the_rest_says_why_not(copy: Checkout) -> None:
    done = copy.bake("--all", "--python", "3.11", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["data"]["images"]
    states = {row["image"]: row["status"] for row in rows}
    assert states.pop("base") == "unchanged"
    assert set(states) == {"runtime", "pallas", "train", "dev"}
    assert set(states.values()) == {"cannot be had"}
    for row in rows:
        if row["image"] != "base":
            assert row["why"].startswith("no wheel of torch 2.13.0+cpu and ")
            assert f"--flavour {row['image']}" in row["why"]
    done = copy.bake("--all", "--python", "3.11", "--release", "--json")
    assert done.returncode == 2, done.stdout + done.stderr
