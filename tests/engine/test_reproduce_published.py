"""A published image held against this checkout: the very image, another one, a changed one."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bake_support import ROOT, Image, private_out, verb
from registry_support import RealRegistry, registry
from reproduce_support import Layout, layer
from reproduce_support import image as small_image
from tpuforge import layout as oci
from tpuforge.console import Progress
from tpuforge.images import published, reproduce
from tpuforge.images.choice import choose, recipe
from tpuforge.pins import load
from tpuforge.registry import Reference, Registry

REPRODUCE = "tpuforge.images.reproduce"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with registry(tmp_path_factory.mktemp("shelf")) as made:
        yield made


def publish(shelf: RealRegistry, layout: Path, name: str) -> str:
    """Push an image; its reference."""
    with Progress("tests", quiet=True) as progress:
        reference = Reference.parse(f"{shelf.address}/{name}")
        digest = Registry(progress).copy_in(layout, reference).digest
    return str(reference.at_digest(digest))


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An out folder of the test's own."""
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "out"))
    return tmp_path / "out"


def judge(image: Image, reference: str, *words: str) -> tuple[int, dict[str, Any]]:
    """Hold a published image against the finished one: exit code and result."""
    done = verb(REPRODUCE, "--against", reference, *words, "--json", **image.engine.env)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def copy(image: Image, folder: Path) -> Path:
    """A copy of the real layout, of hard links: no blob replaces one of them."""
    shutil.copytree(image.layout, folder, copy_function=os.link)
    (folder / "index.json").unlink()
    return folder


def spoiled(image: Image, path: str) -> bytes:
    """The last layer of the real image, with one more line in one file."""
    last = oci.read_image(image.layout).layers[-1]
    buffer = io.BytesIO()
    with (
        oci.open_layer(image.layout, last) as tar,
        tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as made,
    ):
        for entry in tar:
            body = tar.extractfile(entry) if entry.isreg() else None
            data = body.read() if body is not None else b""
            data += b"# mine\n" if entry.name == path else b""
            entry.size = len(data)
            made.addfile(entry, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), 1, mtime=0)


def remake(layout: Path, original: Image, change: dict[str, Any]) -> Path:
    """Write the real image's manifest anew, with another config or another last layer."""
    made = Layout(layout)
    manifest = json.loads(oci.read_image(original.layout).manifest.path(layout).read_bytes())
    config_path = layout / "blobs" / "sha256" / manifest["config"]["digest"].removeprefix("sha256:")
    config = json.loads(config_path.read_bytes())
    config["config"]["Labels"] |= change.get("labels", {})
    if "layer" in change:
        kind = "application/vnd.oci.image.layer.v1.tar+gzip"
        manifest["layers"][-1] = made.blob(change["layer"], kind)
        plain = made.blob(gzip.decompress(change["layer"]), "")
        config["rootfs"]["diff_ids"][-1] = plain["digest"]
    manifest["config"] = made.json(config, manifest["config"]["mediaType"])
    made.finish(made.json(manifest, manifest["mediaType"]))
    return layout


def test_a_published_image_is_told_from_another(
    image: Image, out: Path, shelf: RealRegistry, tmp_path: Path
) -> None:
    """The very image; one layer of it changed by somebody; and one of other inputs."""
    private_out(out, image.out, "base", "debs", f"images/{image.slug}")
    reference = publish(shelf, image.layout, "good")
    code, result = judge(image, reference, "--finished")
    assert code == 0, result
    assert result["data"]["own"] == result["data"]["published"]

    # all that its labels tell is right, and one file is not: no label can hide that
    path = "opt/tpuforge/smoke/cli.py"
    changed = {"layer": spoiled(image, path)}
    tampered = remake(copy(image, tmp_path / "tampered"), image, changed)
    code, result = judge(image, publish(shelf, tampered, "tampered"), "--finished")
    assert code == 1, result
    data = result["data"]
    size, content = (line for line in data["differences"] if path in line)
    assert f"{path}: size " in size and f"{path}: content " in content
    assert data["differences_in_all"] == 2
    assert data["looked_into"][0].startswith(f"{path}: one is the beginning of the other")
    kept = Path(data["kept"])
    # config, manifest and the one layer that is another: no more was fetched
    assert len(list((kept / "published" / "blobs" / "sha256").iterdir())) == 3
    assert kept.is_relative_to(out)

    older = remake(
        copy(image, tmp_path / "older"),
        image,
        {"labels": {"io.tpuforge.lock.sha256": "0" * 64, "org.opencontainers.image.version": "1"}},
    )
    code, result = judge(image, publish(shelf, older, "older"))
    assert code == 1, result
    others = result["data"]["other_inputs"]
    assert [line.partition(":")[0] for line in others] == ["the lock", "the version"], others
    assert "nothing was baked" in result["summary"]


@pytest.mark.parametrize(
    ("labels", "code", "said"),
    [
        ({}, 1, "does not say which image of tpuforge it is"),
        ({"io.tpuforge.image": "runtime", "io.tpuforge.overlay": "torch-tpu==1"}, 2, "was given"),
        ({"io.tpuforge.image": "nonsense"}, 2, "there is no image 'nonsense'"),
    ],
)
def test_an_image_that_nothing_here_can_make_is_refused(
    shelf: RealRegistry, tmp_path: Path, labels: dict[str, str], code: int, said: str
) -> None:
    layout = small_image(tmp_path / "small", layer({"a": b"1"}), labels=labels)
    reference = publish(shelf, layout, f"other{len(str(labels))}")
    done = verb(REPRODUCE, "--against", reference)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    assert "mend:" in done.stderr


def test_without_a_finished_image_it_is_baked_from_nothing(
    shelf: RealRegistry, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All inputs agree, so a bake decides; here it is one that gives a small image."""
    base = f"sha256:{'0' * 64}"
    monkeypatch.setattr(published, "ensure_base", lambda *_, **__: {"manifest_digest": base})
    monkeypatch.setattr(reproduce, "ensure_engine", lambda progress: {})
    pins = load()
    target = choose(argparse.Namespace(image=None, python=None, flavour=None), pins)
    labels = {
        "io.tpuforge.image": target.image,
        "io.tpuforge.python": target.python,
        "io.tpuforge.flavour": target.flavour,
        "org.opencontainers.image.base.digest": base,
        "org.opencontainers.image.version": target.name.rpartition(":")[2],
        **recipe(target).labels(target, recipe(target).read_inputs(target, pins), pins),
    }
    epoch = datetime.fromtimestamp(pins.epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def make(folder: Path, content: bytes) -> Path:
        return small_image(folder, layer({"opt/x": content}), labels=labels, created=epoch)

    def rebuild(
        target: object, top: Path, *_: object
    ) -> tuple[reproduce.Way, dict[str, str], float]:
        make(top / "again" / "images" / "runtime-py311" / "oci", b"1")
        return reproduce.Way("again", "077", ROOT, {}, (), ()), {}, 1.0

    monkeypatch.setattr(reproduce, "rebuild", rebuild)
    said = out / "results" / "reproduce.json"
    for name, content, code in (("same", b"1", 0), ("another", b"2", 1)):
        reference = publish(shelf, make(tmp_path / name, content), f"rebuilt/{name}")
        assert reproduce.main(["--against", reference]) == code, said.read_text()
        data = json.loads(said.read_text())["data"]
        assert data["other_inputs"] == []
        assert (data["own"] == data["published"]) == (code == 0)
    assert "opt/x: content" in data["differences"][0]
    assert data["looked_into"][0] == "opt/x: differs from line 1 on: '2' and '1'"

    # the epoch is in no label: the time of the config tells it
    when = "2020-01-01T00:00:00Z"
    older = small_image(tmp_path / "older", layer({"opt/x": b"1"}), labels=labels, created=when)
    assert reproduce.main(["--against", publish(shelf, older, "rebuilt/older")]) == 1
    (line,) = json.loads(said.read_text())["data"]["other_inputs"]
    assert line.startswith(f"the epoch: {when} there, ")
