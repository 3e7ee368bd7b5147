"""The real image goes to a real registry and comes back, byte for byte, and into the engine."""

from __future__ import annotations

import json
from pathlib import Path

from bake_support import Engine, Image, link, verb
from registry_support import registry, small_image
from tpuforge.layout import read_image


def test_the_real_image_there_and_back(image: Image, tmp_path: Path) -> None:
    # only the image: what may be attached to it is of the run that made it
    folder = tmp_path / "out" / "images" / image.slug
    for path in image.layout.rglob("*"):
        if path.is_file():
            link(path, folder / "oci" / path.relative_to(image.layout))
    (folder / "image.json").write_text(json.dumps({"schema": "tpuforge.image/1", **image.record}))
    digest = image.record["manifest_digest"]
    with registry(tmp_path, auth=True, tls=True) as real:
        to, reach = f"{real.address}/tpuforge/runtime", real.options()
        env = {"TPUFORGE_OUT": str(tmp_path / "out")}
        done = verb("tpuforge.images.push", "--to", to, "--json", *reach, **env)
        assert done.returncode == 0, done.stderr
        data = json.loads(done.stdout)["data"]
        assert data["digest"] == digest
        assert data["new_bytes"] > image.record["compressed_bytes"] * 0.99
        env = {"TPUFORGE_OUT": str(tmp_path / "elsewhere")}
        done = verb("tpuforge.images.pull", data["reference"], "--json", *reach, **env)
        assert done.returncode == 0, done.stderr
        pulled = json.loads(done.stdout)["data"]
        # the layers are compressed with zstd, and stay so
        assert pulled["digest"] == digest
        assert pulled["taken_bytes"] == data["new_bytes"]


def test_a_pulled_image_stands_in_the_engine_by_its_digest(engine: Engine, tmp_path: Path) -> None:
    digest = small_image(tmp_path / "out")
    env = {"TPUFORGE_OUT": str(tmp_path / "out"), **engine.env}
    with registry(tmp_path) as real:
        to = f"{real.address}/tpuforge/small"
        words = [f"{to}:back@{digest}", "--into", "engine", "--json"]
        done = verb("tpuforge.images.push", "--to", to, "--tag", "back", **env)
        assert done.returncode == 0, done.stderr
        pulled = verb("tpuforge.images.pull", *words, **env)
        again = verb("tpuforge.images.pull", *words, **env)
    name = f"{to}:back"
    try:
        assert pulled.returncode == again.returncode == 0, pulled.stderr + again.stderr
        first = json.loads(pulled.stdout)
        assert first["data"]["name"] == name
        # all its blobs are on this machine, and yet it was made anew
        assert (first["status"], first["data"]["taken_blobs"]) == ("done", 0)
        assert first["data"]["run_line"].startswith("docker ")
        assert f" {name}" in first["data"]["run_line"]
        assert json.loads(again.stdout)["status"] == "unchanged"
        found = engine.run("image", "inspect", "--format", "{{.Id}}", name).stdout.strip()
        config = read_image(tmp_path / "out" / "images" / "runtime-py311" / "oci").config
        # the containerd store names an image by its manifest, the classic one by its config
        assert found in {digest, config.digest}
    finally:
        engine.run("image", "rm", name)
