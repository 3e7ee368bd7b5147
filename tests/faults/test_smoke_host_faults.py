"""Container runs that are killed, starved of an engine or given another image than they expect."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import smoke_host_support as support
from bake_support import Engine, Image, engine, image, link
from smoke_host_support import forge_apart, owner, verb_env

__all__ = ["engine", "image"]

SMOKE = "tpuforge.smoke.health"
STATIC = ("--tier", "static")


@pytest.fixture
def out(image: Image, tmp_path: Path) -> Path:
    """An out folder with the real image and engine, by links."""
    folder = tmp_path / "out"
    link(image.out / "engine/engine.json", folder / "engine/engine.json")
    for path in (image.out / "images" / image.slug).rglob("*"):
        if path.is_file():
            link(path, folder / path.relative_to(image.out))
    return folder


@pytest.fixture
def running(engine: Engine, out: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A verb whose container is at work, and the container's name."""
    child = subprocess.Popen(
        [sys.executable, "-m", SMOKE, *STATIC],
        env=verb_env(out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not (names := ours(engine, out)) and time.monotonic() < deadline:
            assert child.poll() is None
            time.sleep(0.1)
        yield child, names[0]
    finally:
        child.kill()
        child.wait()
        for name in ours(engine, out):
            engine.run("rm", "--force", name)


def ours(engine: Engine, out: Path) -> list[str]:
    """Names of the containers that runs with this out folder made and left."""
    label = f"label=io.tpuforge.run={owner(out)}"
    done = engine.run("ps", "--all", "--filter", label, "--format", "{{.Names}}")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_told_to_stop_it_leaves_no_container_and_no_result(
    engine: Engine, out: Path, running: tuple[subprocess.Popen[bytes], str]
) -> None:
    child, name = running
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=60) == 130
    assert name not in ours(engine, out)
    assert [path.name for path in (out / "health").iterdir()] == []


def test_killed_beyond_repair_the_next_run_cleans_up(
    engine: Engine, image: Image, out: Path, running: tuple[subprocess.Popen[bytes], str]
) -> None:
    child, name = running
    child.kill()
    child.wait()
    assert not (out / "health" / image.slug).exists()
    done = forge_apart("smoke.health", *STATIC, out=out, timeout=300)
    assert done.returncode == 0, done.stderr
    assert name not in ours(engine, out)
    left = sorted(path.name for path in (out / "health").iterdir())
    assert left == [image.slug, "verdict.json"]


def test_an_engine_that_is_gone(out: Path) -> None:
    record = json.loads((out / "engine/engine.json").read_text())
    gone = "unix:///nowhere/docker.sock"
    (out / "engine/engine.json").unlink()
    support.write(out / "engine/engine.json", {**record, "env": {"DOCKER_HOST": gone}})
    done = forge_apart("smoke.health", *STATIC, out=out, DOCKER_HOST=gone)
    assert done.returncode == 2
    assert gone in done.stderr
    assert "expected:" in done.stderr
    assert not (out / "health").exists() or list((out / "health").iterdir()) == []


def tiny_image(out: Path) -> Path:
    """A real image of a few bytes, baked by nobody; the path of its one layer."""
    blobs = out / "images/runtime-py311/oci/blobs/sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes) -> tuple[str, int]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return f"sha256:{digest}", len(data)

    archive = io.BytesIO()
    with tarfile.open(mode="w", fileobj=archive) as tar:
        # never the same bytes: an engine keeps a blob that it has seen, whatever it is sent later
        entry = tarfile.TarInfo("hello")
        entry.size = 16
        tar.addfile(entry, io.BytesIO(os.urandom(16)))
    layer, layer_size = blob(archive.getvalue())
    config, config_size = blob(
        json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {},
                "rootfs": {"type": "layers", "diff_ids": [layer]},
            }
        ).encode()
    )
    oci = "application/vnd.oci.image"
    manifest, _ = blob(
        json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": f"{oci}.manifest.v1+json",
                "config": {
                    "mediaType": f"{oci}.config.v1+json",
                    "digest": config,
                    "size": config_size,
                },
                "layers": [
                    {"mediaType": f"{oci}.layer.v1.tar", "digest": layer, "size": layer_size}
                ],
            }
        ).encode()
    )
    record = {
        **support.IMAGE,
        "name": "tpuforge/tests-tiny:1",
        "manifest_digest": manifest,
        "config_digest": config,
    }
    support.write(out / "images/runtime-py311/image.json", record)
    return blobs / layer.removeprefix("sha256:")


@pytest.fixture
def tiny(engine: Engine, image: Image, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """An out folder with an image that is no forge image, and its layer."""
    folder = tmp_path / "out"
    link(image.out / "engine/engine.json", folder / "engine/engine.json")
    engine.run("rmi", "tpuforge/tests-tiny:1")
    yield folder, tiny_image(folder)
    engine.run("rmi", "tpuforge/tests-tiny:1")


def test_an_image_without_the_suite(tiny: tuple[Path, Path]) -> None:
    out, _ = tiny
    done = forge_apart("smoke.health", *STATIC, out=out)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the image has no command health" in done.stderr
    assert "./forge bake" in done.stderr


def test_a_layer_with_a_flipped_byte_is_never_run(engine: Engine, tiny: tuple[Path, Path]) -> None:
    out, layer = tiny
    data = bytearray(layer.read_bytes())
    data[-1] ^= 1
    layer.write_bytes(data)
    done = forge_apart("smoke.health", *STATIC, out=out)
    assert done.returncode == 1
    assert "is not the OCI layout of tpuforge/tests-tiny:1" in done.stderr
    assert f"{layer.name} has another digest than its name" in done.stderr
    assert "./forge bake --no-cache --image runtime" in done.stderr
    assert engine.run("image", "inspect", "tpuforge/tests-tiny:1").returncode != 0


def test_an_image_whose_record_names_another_digest(tiny: tuple[Path, Path]) -> None:
    out, _ = tiny
    path = out / "images/runtime-py311/image.json"
    record = json.loads(path.read_text())
    support.write(path, {**record, "manifest_digest": "sha256:" + "0" * 64})
    done = forge_apart("smoke.health", *STATIC, out=out)
    assert done.returncode == 1
    assert "is not the OCI layout of tpuforge/tests-tiny:1" in done.stderr


def test_a_folder_for_results_that_cannot_be_made(out: Path) -> None:
    (out / "health").write_text("in the way")
    done = forge_apart("smoke.health", *STATIC, out=out)
    assert done.returncode == 2
    assert "expected: files and folders that can be read and written" in done.stderr
    assert (out / "health").read_text() == "in the way"


def test_an_out_folder_that_cannot_be_made() -> None:
    for module in ("smoke.health", "smoke.bench", "release.report"):
        done = forge_apart(module, out=Path("/proc/none/out"))
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
