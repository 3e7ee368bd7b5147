"""The locks outside these images: pip, uv, PEP 751 and constraints, from an index on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lock_support import Checkout, Index, checkout, good_index, wheel_bytes


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Checkout, Index]]:
    """A checkout with a small lock, exported; and the index it was made from, still serving."""
    own = checkout(tmp_path_factory.mktemp("export"), small=True)
    (own.lock / "smoke.in").write_text("alpha\n", encoding="utf-8")
    index = good_index()
    with index:
        for verb in ("resolve", "export"):
            done = own.run(verb, "--flavour", "smoke", PIP_INDEX_URL=index.url)
            assert done.returncode == 0, done.stderr
        yield own, index


def _run(*words: str | Path, index: Index) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.url, "UV_NO_CACHE": "1"}
    env |= {"UV_DEFAULT_INDEX": index.url, "UV_NO_CONFIG": "1", "PIP_NO_CACHE_DIR": "1"}
    argv = [sys.executable, "-m", *map(str, words)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("way", ["pip", "uv", "uv pylock", "pip constraint"])
def test_each_way_installs_what_is_locked(
    served: tuple[Checkout, Index], tmp_path: Path, way: str
) -> None:
    own, index = served
    lock = own.lock / "smoke-py311.txt"
    made = own.root / "out" / "export" / "smoke-py311"
    index.add("alpha", "1.5")  # newer than the lock
    strict = ("--require-hashes", "--no-deps", "--only-binary", ":all:")
    words = {
        "pip": ("pip", "install", *strict, "-r", lock),
        "uv": ("uv", "pip", "install", *strict, "-r", lock),
        "uv pylock": ("uv", "pip", "install", "--preview", "-r", made / "pylock.toml"),
        "pip constraint": ("pip", "install", "-c", made / "constraints.txt", "alpha"),
    }[way]
    done = _run(*words, "--target", tmp_path / "site", index=index)
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path / "site").glob("*.dist-info")] == ["alpha-1.0.dist-info"]


def test_other_bytes_are_refused_by_each_way(
    served: tuple[Checkout, Index], tmp_path: Path
) -> None:
    own, index = served
    lock = own.lock / "smoke-py311.txt"
    pylock = own.root / "out" / "export" / "smoke-py311" / "pylock.toml"
    file = tomllib.loads(pylock.read_text(encoding="utf-8"))["packages"][0]["wheels"][0]["name"]
    right = index.files[file]
    tag = "cp311-cp311-manylinux_2_28_x86_64"
    index.files[file] = wheel_bytes("alpha", "1.0", tag, ("filelock",))
    try:
        for words in (
            ("pip", "install", "--require-hashes", "--no-deps", "-r", lock),
            ("uv", "pip", "install", "--require-hashes", "--no-deps", "-r", lock),
            ("uv", "pip", "install", "--preview", "-r", pylock),
        ):
            done = _run(*words, "--target", tmp_path / "site", index=index)
            assert done.returncode != 0
            assert "hash" in done.stderr.lower()
    finally:
        index.files[file] = right


def test_file_that_the_index_no_longer_lists_is_refused(served: tuple[Checkout, Index]) -> None:
    own, _ = served
    with good_index() as other:
        other.pages["alpha"].clear()
        done = own.run("export", "--flavour", "smoke", PIP_INDEX_URL=other.url)
    assert done.returncode == 1, done.stderr
    assert "does not list the locked file of alpha" in done.stderr
