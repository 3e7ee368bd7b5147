"""What the builder image is made of: its key, its folder, and another Bazelisk than the pinned."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from pathlib import Path

import pytest

from tpuforge import pins as pins_module
from tpuforge.console import Progress
from tpuforge.errors import ForgeError
from tpuforge.images import bake, builder, context
from tpuforge.pins import Pins

REAL = pins_module.load()
CONTENT = b"\x7fELF a small Bazelisk"


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pins:
    """Pins whose Bazelisk is a small file, in an out folder of its own."""
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "out"))
    digest = hashlib.sha256(CONTENT).hexdigest()
    path = tmp_path / "out" / "bazel" / "bazelisk" / digest / REAL.bazelisk.file
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    return dataclasses.replace(REAL, bazelisk=dataclasses.replace(REAL.bazelisk, sha256=digest))


def prepare(pins: Pins) -> Path:
    """The folder that BuildKit reads, filled."""
    target = builder.target(pins)
    with Progress("bake", quiet=True) as progress:
        builder.prepare(target, builder.read_inputs(target, pins), pins, progress)
    return target.work / "tools"


def test_it_is_one_image_for_every_python() -> None:
    options = argparse.Namespace(image="builder", python=None, flavour=None)
    target = bake.choose(options, REAL)
    assert target.slug == "builder"
    assert target.name == f"tpuforge/builder:bazelisk{REAL.bazelisk.version}-bookworm"
    assert bake.recipe(target) is builder
    assert context.base_set(target, REAL).label == "bookworm-builder"
    runtime = context.Target("runtime", "3.11", "runtime", "a:1")
    assert context.base_set(runtime, REAL).label == "bookworm"


def test_bazelisk_and_the_epoch_count(pins: Pins) -> None:
    target = builder.target(pins)
    before = builder.read_inputs(target, pins)
    other = builder.read_inputs(target, REAL)
    assert [name for name in before.parts if before.parts[name] != other.parts[name]] == [
        "Bazelisk"
    ]
    later = dataclasses.replace(pins, epoch=pins.epoch + 1)
    assert builder.read_inputs(target, later).key("b") != before.key("b")
    assert before.key("b") != before.key("another base")


def test_the_folder_holds_bazelisk_and_a_digest_that_sha256sum_checks(pins: Pins) -> None:
    folder = prepare(pins)
    assert (folder / "bazelisk").read_bytes() == CONTENT
    assert (folder / "SHA256SUMS").read_text() == f"{pins.bazelisk.sha256}  bazelisk\n"
    assert (
        builder.labels(builder.target(pins), builder.read_inputs(builder.target(pins), pins), pins)[
            "io.tpuforge.bazelisk.sha256"
        ]
        == pins.bazelisk.sha256
    )


def test_a_tampered_bazelisk_is_refused(pins: Pins, tmp_path: Path) -> None:
    (path,) = tmp_path.glob("out/bazel/bazelisk/*/*")
    path.write_bytes(CONTENT + b"!")
    with pytest.raises(ForgeError) as caught:
        prepare(pins)
    assert "has SHA-256" in caught.value.found
    assert str(path) in caught.value.mend
    assert caught.value.exit_code == 1


def test_without_bazelisk_and_without_a_way_to_it_it_says_where_it_belongs(
    pins: Pins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = tmp_path.glob("out/bazel/bazelisk/*/*")
    path.unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    with pytest.raises(ForgeError) as caught:
        prepare(pins)
    assert "the pinned Bazelisk cannot be had" in caught.value.found
    assert str(path.parent) in caught.value.expected
    assert caught.value.exit_code == 2


def test_pins_without_its_packages(pins: Pins) -> None:
    debian = {label: one for label, one in pins.debian.items() if not one.extra}
    with pytest.raises(ForgeError) as caught:
        builder.target(dataclasses.replace(pins, debian=debian))
    assert caught.value.expected == "a table [debian.bookworm.builder]"
    assert caught.value.exit_code == 1
