"""The release gate on the real engine: the baked image and a broken one that is made from it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bake_support import Engine, Image, private_out
from smoke_host_support import forge_apart, owner

CHOSEN = ("--tier", "static,import", "-k", "static.needed or import.pjrt-pair or static.guard")
MAY_TAKE_S = 600
LIBTPU = "/opt/venv/lib/python3.11/site-packages/libtpu/libtpu.so"


@pytest.fixture(scope="module")
def out(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An out folder with the real image and engine, by links."""
    parts = ("engine/engine.json", f"images/{image.slug}")
    return private_out(tmp_path_factory.mktemp("gate"), image.out, *parts)


@pytest.fixture(scope="module")
def broken(engine: Engine, image: Image) -> Iterator[str]:
    """The baked image without its libtpu.so, as a user's own Dockerfile might leave it."""
    name = f"tpuforge-gate-{secrets.token_hex(4)}"
    spoil = ("--user", "0", image.name, "rm", LIBTPU)
    made = engine.run("run", "--name", name, "--network", "none", *spoil)
    try:
        assert made.returncode == 0, made.stderr
        kept = engine.run("commit", "--change", "USER 1000", name, f"{name}:broken")
        assert kept.returncode == 0, kept.stderr
        yield f"{name}:broken"
    finally:
        engine.run("rm", "--force", name)
        engine.run("rmi", f"{name}:broken")


def verdict(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "health/verdict.json").read_text())
    return found


def test_a_broken_image_closes_the_gate_and_is_not_run_twice(
    engine: Engine, image: Image, broken: str, out: Path
) -> None:
    words = (*CHOSEN, "--image", image.record["image"], "--image-ref", broken)
    done = forge_apart("smoke.health", *words, out=out, timeout=MAY_TAKE_S)
    assert done.returncode == 1, done.stdout + done.stderr
    good, bad = verdict(out)["images"]
    assert (good["verdict"], good["failed"], good["cached"]) == ("healthy", [], False)
    assert bad["verdict"] == "unhealthy"
    assert "import.pjrt-pair" in [check["id"] for check in bad["failed"]]
    # the suite is the same one, and the image is not
    assert bad["suite_sha256"] == good["suite_sha256"] == image.record["suite_sha256"]
    assert bad["key"] != good["key"]
    started = time.monotonic()
    again = forge_apart("smoke.health", *words, out=out)
    assert time.monotonic() - started < 5
    assert again.returncode == 1
    assert "2 unchanged since an earlier run, and not run again" in again.stdout
    assert [one["cached"] for one in verdict(out)["images"]] == [True, True]
    mark = owner(out)
    containers = engine.run("ps", "--all", "--quiet", "--filter", f"label=io.tpuforge.run={mark}")
    names = engine.run("images", "--format", "{{.Tag}}", "tpuforge/running")
    assert containers.stdout.split() == []
    assert not [name for name in names.stdout.split() if name.startswith(mark)]
