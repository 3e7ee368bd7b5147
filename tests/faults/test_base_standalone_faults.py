"""A standalone Python that cannot be had, or is another one: over loopback, with the real verb."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from base_support import DEAD, LOCK, base, checkout, environment
from server_support import files_of, serving
from standalone_support import FILE, SHORT, VERSION, pins_with

SET = ("--suite", "trixie-py312")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A server of the folder ``web``."""
    (tmp_path / "web").mkdir()
    with serving(files_of(tmp_path / "web")) as port:
        yield f"http://127.0.0.1:{port}/builds/"


def verb(tmp_path: Path, sha256: str, place: str) -> dict[str, str]:
    """The environment of the verb, in a checkout whose pins name a build by this digest."""
    pins = (LOCK.parents[1] / "pins.toml").read_text(encoding="utf-8")
    root = checkout(tmp_path / "tree", pins=pins_with(pins, sha256))
    # no package is asked for before the build is there
    setting = {"TPUFORGE_PYTHON_STANDALONE": place, "TPUFORGE_DEBIAN_MIRROR": DEAD}
    return environment(root, tmp_path / "out", **setting)


def test_a_build_comes_over_http_and_a_lying_server_is_caught(tmp_path: Path, address: str) -> None:
    (tmp_path / "web" / "builds").mkdir()
    file = tmp_path / "web" / "builds" / FILE
    file.write_bytes(b"some bytes that are long enough")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    env = verb(tmp_path, digest, address)
    kept = tmp_path / "out" / "python" / digest / FILE

    file.write_bytes(b"other bytes")
    code, output = base(env, *SET)
    assert code == 1
    assert "has the SHA-256" in output
    assert f"{digest}, as lock/pins.toml says" in output
    assert not list((tmp_path / "out" / "python").rglob("*.tar.gz"))

    # the right one is kept, and so is what a killed run had of it; what stops the base then is the
    # mirror that does not answer
    file.write_bytes(b"some bytes that are long enough")
    kept.with_name(f".{FILE}.partial").write_bytes(b"some bytes")
    code, output = base(env, *SET)
    assert code == 2
    assert "the Debian mirror" in output
    assert kept.read_bytes() == file.read_bytes()
    assert [path.name for path in kept.parent.iterdir()] == [FILE]
    file.unlink()
    kept.write_bytes(b"damaged")
    code, output = base(env, *SET)
    assert code == 2
    assert f"{FILE} in out/python is damaged: fetching it again" in output
    assert "HTTP 404" in output
    assert not kept.exists()


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("http://127.0.0.1:9/builds", f"CPython {VERSION} cannot be had from http://127.0.0.1:9/"),
        ("http://user:secret@127.0.0.1:9/", f"CPython {VERSION} cannot be had"),
        ("/nowhere/at/all", f"names /nowhere/at/all, and {FILE} is not there"),
    ],
)
def test_a_build_that_cannot_be_had_says_where_it_was_sought(
    tmp_path: Path, place: str, said: str
) -> None:
    code, output = base(verb(tmp_path, "0" * 64, place), *SET)
    assert code == 2
    assert said in output
    assert "TPUFORGE_PYTHON_STANDALONE" in output
    assert "secret" not in output
    assert not list((tmp_path / "out").rglob(f"python{SHORT}*"))
    assert not (tmp_path / "out" / "debs").exists()
