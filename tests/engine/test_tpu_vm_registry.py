"""``tpu-run`` with a real registry, a real signature and a real engine: pull by digest, and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bake_support import Engine, Image
from process_support import call
from registry_support import RealRegistry, registry
from tpu_vm_support import FOLDER, host, put
from tpuforge.console import Progress
from tpuforge.registry import Reference, Registry
from tpuforge.release import cosign

PASSWORD = "open sesame"


@dataclass(frozen=True)
class Published:
    """A signed image in a registry, and who wants to run it.

    Attributes:
        where: The registry.
        exact: The image's name and digest.
        keys: The folder of the key that has signed it.
        root: A made-up host.
        engine: The engine there.
    """

    where: RealRegistry
    exact: str
    keys: Path
    root: Path
    engine: Engine

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run ``tpu-run`` with these words."""
        own = ["--root", str(self.root), "--docker", self.engine.docker, "--shm-size", "64m"]
        own += ["--no-cache", "--ignore", "memlock", "--ignore", "chips"]
        return call(
            [sys.executable, "-B", str(FOLDER / "tpu-run"), *own, *words],
            env={**os.environ, **self.engine.env},
            stdin=subprocess.DEVNULL,
            timeout=120,
        )

    @property
    def here(self) -> bool:
        """Whether the engine has it."""
        return self.engine.run("image", "inspect", self.exact).returncode == 0


@pytest.fixture
def published(tmp_path: Path, image: Image) -> Iterator[Published]:
    """The base of the images, by which a container starts at once, signed in a registry."""
    root = host(tmp_path / "host", count=0, driver="none")
    # what this machine lets its engine do
    for name in ("self/limits", "1/status"):
        put(root, f"proc/{name}", Path("/proc", name).read_text())
    base = json.loads((image.out / "base" / "bookworm.json").read_text())
    keys = tmp_path / "keys"
    keys.mkdir()
    env = {**os.environ, "COSIGN_PASSWORD": PASSWORD}
    with registry(tmp_path) as where, Progress("tests", quiet=True) as progress:
        name = f"{where.address}/base"
        exact = f"{name}@{base['manifest_digest']}"
        Registry(progress).copy_in(image.out / base["layout"], Reference.parse(f"{name}:0.2"))
        program = cosign.program(progress)
        subprocess.run([program, "generate-key-pair"], cwd=keys, env=env, check=True)
        words = ["sign", "--yes", "--tlog-upload=false", "--key", str(keys / "cosign.key"), exact]
        subprocess.run([program, *words], env=env, check=True, capture_output=True)
        made = Published(where, exact, keys, root, image.engine)
        try:
            yield made
        finally:
            image.engine.run("image", "rm", "--force", exact, f"{name}:0.2")


def test_what_is_signed_is_pulled_and_run_and_nothing_else(published: Published) -> None:
    key = ("--key", str(published.keys / "cosign.pub"))
    # somebody else's key
    other = published.keys / "other"
    other.mkdir()
    with Progress("tests", quiet=True) as progress:
        program = cosign.program(progress)
    env = {**os.environ, "COSIGN_PASSWORD": PASSWORD}
    subprocess.run([program, "generate-key-pair"], cwd=other, env=env, check=True)
    refused = published.run("--key", str(other / "cosign.pub"), published.exact, "/bin/true")
    assert refused.returncode == 1, refused.stderr
    assert "is not signed by" in refused.stderr
    # by key, and in no public log
    unlogged = published.run(*key, "--log", published.exact, "/bin/true")
    assert unlogged.returncode != 0
    assert not published.here

    done = published.run(*key, published.exact, "sh", "-c", "echo here; exit 5")
    assert (done.returncode, done.stdout) == (5, "here\n"), done.stderr
    assert f"signed by key {key[1]}" in done.stderr
    assert published.here

    # the digest of a tag is told, and judged by the same key
    tag = published.exact.partition("@")[0] + ":0.2"
    done = published.run(*key, "--allow-tag", tag, "/bin/true")
    assert done.returncode == 0, done.stderr
    assert f"{tag} is {published.exact}" in done.stderr

    # what is here runs without its registry, unless its signature has to be looked up
    published.where.kill()
    assert published.run(published.exact, "/bin/true").returncode == 0
    silent = published.run(*key, published.exact, "/bin/true")
    assert silent.returncode == 2, silent.stderr
    assert "cannot be found out" in silent.stderr
