"""The locks outside these images: pip, uv, PEP 751 and constraints, from an index on loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lock_support import Checkout, Index, checkout, good_index, wheel_bytes
from process_support import call


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
    return call(argv, env=env, timeout=120)


WAYS = ("pip", "uv", "uv sync", "uv pylock", "uv sync pylock", "pip pylock")
BY_CONSTRAINTS = ("pip constraint", "uv constraint")


@pytest.mark.parametrize("way", WAYS + BY_CONSTRAINTS)
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
        "uv sync": ("uv", "pip", "sync", "--require-hashes", "--only-binary", ":all:", lock),
        "uv pylock": ("uv", "pip", "install", "-r", made / "pylock.toml"),
        "uv sync pylock": ("uv", "pip", "sync", made / "pylock.toml"),
        "pip pylock": ("pip", "install", "-r", made / "pylock.toml"),
        "pip constraint": ("pip", "install", "-c", made / "constraints.txt", "alpha"),
        "uv constraint": ("uv", "pip", "install", "-c", made / "constraints.txt", "alpha"),
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
            ("uv", "pip", "sync", "--require-hashes", lock),
            ("uv", "pip", "sync", pylock),
            ("pip", "install", "-r", pylock),
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


def test_credentials_of_an_index_reach_no_export(served: tuple[Checkout, Index]) -> None:
    own, index = served
    url = index.url.replace("://", "://someone:secret@")
    pylock = own.root / "out" / "export" / "smoke-py311" / "pylock.toml"
    before = pylock.read_bytes()
    done = own.run("export", "--flavour", "smoke", PIP_INDEX_URL=url)
    assert done.returncode == 0, done.stderr
    assert "secret" not in done.stdout + done.stderr
    assert pylock.read_bytes() == before


def test_page_that_is_no_index_and_none_at_all_are_told_apart(
    served: tuple[Checkout, Index],
) -> None:
    own, _ = served
    words = ("--flavour", "smoke", "--form", "pylock")
    done = own.run("export", *words, PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert done.returncode == 2, done.stderr
    assert "cannot be reached" in done.stderr
    for page, code, says in (
        ([{"filename": "alpha-1.0.tar.gz"}], 1, "does not list the locked file of alpha"),
        (["alpha"], 2, "cannot be asked about its files"),
    ):
        with good_index() as other:
            other.pages["alpha"] = page
            done = own.run("export", *words, PIP_INDEX_URL=other.url)
        assert done.returncode == code, done.stderr
        assert says in done.stderr
    # a form that needs no index asks none
    assert own.run("export", "--flavour", "smoke", "--form", "sbom").returncode == 0


def test_same_lock_gives_the_same_bytes_in_another_process(
    served: tuple[Checkout, Index],
) -> None:
    own, index = served
    made = own.root / "out" / "export" / "smoke-py311"
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    assert before.keys() == {"constraints.txt", "pylock.toml", "sbom.cdx.json"}
    env = {"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo", "LANG": "de_DE.UTF-8"}
    done = own.run("export", "--flavour", "smoke", PIP_INDEX_URL=index.url, **env)
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in made.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (("--flavour", "smokes"), "there is no flavour 'smokes'", 2),
        (("--python", "3.9"), "Python 3.9 is not supported", 2),
        (("--flavour", "smoke", "--python", "3.13"), "smoke-py313.txt: there is no such lock", 2),
        (("--form", "spdx"), "invalid choice", 2),
    ],
)
def test_what_is_not_there_is_named(
    served: tuple[Checkout, Index], arguments: tuple[str, ...], words: str, code: int
) -> None:
    own, _ = served
    done = own.run("export", *arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def _edit(text: str) -> str:
    return text.replace("alpha==1.0", "alpha==1.1")


def _behead(text: str) -> str:
    return _edit("".join(line for line in text.splitlines(keepends=True) if line[0] != "#"))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("smoke-py311.txt", _edit, "it was edited by hand"),
        ("smoke-py311.txt", _behead, "its head does not tell of its lines"),
        ("smoke-py311.json", lambda text: text.replace('"1.0"', '"1.1"'), "does not tell of alpha"),
        ("smoke-py311.json", lambda text: text.replace('"sha256"', '"sha"'), "is not of the form"),
        ("smoke-py311.json", lambda text: text.replace('"why"', '"because"'), "not of the form"),
        ("smoke-py311.json", lambda _: "{", "is not of the form"),
        ("smoke-py311.json", lambda _: '{"schema": "tpuforge.provenance/1"}', "not of the form"),
        ("smoke-py311.json", lambda _: "", "is not of the form"),
        (
            "smoke-py311.json",
            lambda text: text.replace("main index", "my index"),
            "index of 'alpha'",
        ),
        ("smoke-py311.json", lambda t: t.replace('"uploaded": "', '"uploaded": "x'), "uploaded of"),
        ("smoke-py311.json", lambda t: t.replace('"licence": null', '"licence": 5'), "licence of"),
        ("smoke-py311.json", lambda t: t.replace('"bytes": null', '"bytes": -5'), "bytes of"),
    ],
)
def test_lock_that_is_not_as_written_is_not_exported(
    served: tuple[Checkout, Index],
    tmp_path: Path,
    file: str,
    change: Callable[[str], str],
    words: str,
) -> None:
    own = Checkout(tmp_path / served[0].root.name)
    shutil.copytree(served[0].root, own.root, ignore=shutil.ignore_patterns("out"))
    path = own.lock / file
    before = path.read_text(encoding="utf-8")
    path.write_text(change(before), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != before
    done = own.run("export", "--flavour", "smoke", "--form", "sbom")
    assert done.returncode == 1, done.stderr
    assert words in done.stderr
    assert not (own.root / "out" / "export").exists()


def test_folder_that_cannot_be_written_is_named(
    served: tuple[Checkout, Index], tmp_path: Path
) -> None:
    own, _ = served
    (tmp_path / "export").write_text("a file where the folder should be", encoding="utf-8")
    words = ("--flavour", "smoke", "--form", "constraints")
    done = own.run("export", *words, TPUFORGE_OUT=str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert str(tmp_path / "export") in done.stderr
    assert "Traceback" not in done.stderr
