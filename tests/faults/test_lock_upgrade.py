"""A package upgraded alone: what moves, what does not, and that it can be repeated."""

from __future__ import annotations

import signal
import tomllib
from pathlib import Path

import pytest

from lock_support import Checkout, Index, checkout, copy_of, good_index
from process_support import wait_for
from tpuforge.lockfile import read_lock

AFTER = "2026-06-01T00:00:00Z"
"""Between the cutoff of these tests, 2026-05-01, and today."""
UV = ("--way", "uv")
"""Where both ways do the same: uv starts sooner."""


def index_with_news() -> Index:
    """The good index, and what was uploaded after the cutoff."""
    index = good_index()
    # alpha 1.2 is from a second after the real cutoff: from the next day on an upgrade takes it
    index.pages["alpha"].pop()
    index.add("alpha", "1.3", uploaded=AFTER)
    index.add("filelock", "3.1", uploaded=AFTER)
    return index


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with an older cutoff, and its runtime and smoke locks from the good index."""
    made = checkout(tmp_path_factory.mktemp("made"), small=True)
    for name in ("tools", *(path.stem for path in made.lock.glob("*.in"))):
        if name != "runtime":
            (made.lock / f"{name}.in").unlink(missing_ok=True)
    (made.lock / "smoke.in").write_text("filelock\n", encoding="utf-8")
    pins = made.lock / "pins.toml"
    text = pins.read_text(encoding="utf-8")
    pins.write_text(text.replace("2026-11-30T00:00:00Z", "2026-05-01T00:00:00Z"), encoding="utf-8")
    with good_index() as index:
        # every flavour that is left, and this Python alone
        done = made.run("resolve", "--flavour", "all", "--python", "3.11", PIP_INDEX_URL=index.url)
        assert done.returncode == 0, done.stderr
    return made


@pytest.fixture
def own(made: Checkout, tmp_path: Path) -> Checkout:
    return copy_of(made, tmp_path)


def held(made: Checkout) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in made.lock.iterdir()}


def versions(made: Checkout) -> dict[str, str]:
    return {package.name: package.version for package in read_lock(made.runtime)}


def test_one_package_moves_alone_by_both_ways_and_again_and_then_joins_the_others(
    own: Checkout,
) -> None:
    before, smoke = versions(own), (own.lock / "smoke-py311.txt").read_bytes()
    with index_with_news() as index:
        done = own.run("resolve", "--upgrade", "Alpha", PIP_INDEX_URL=index.url)
        assert done.returncode == 0, done.stderr
        assert versions(own) == before | {"alpha": "1.3"}
        assert (own.lock / "smoke-py311.txt").read_bytes() == smoke
        assert "# Upgrade alpha" in done.stdout
        assert "| alpha | 1.0 | 1.3 | ? → ? | torch-tpu > alpha | runtime-py311 |" in done.stdout
        assert "1 packages changed in 2 locks" in done.stdout
        pins = tomllib.loads((own.lock / "pins.toml").read_text(encoding="utf-8"))
        assert pins["resolver"]["later"].keys() == {"alpha"}
        assert pins["resolver"]["cutoff"] == "2026-05-01T00:00:00Z"
        # whoever resolves from these pins later comes to the same bytes, whichever way
        locks = held(own)
        index.add("alpha", "1.4", uploaded=AFTER.replace("2026", "2096"))
        for way in ("auto", "uv"):
            again = own.run("resolve", "--way", way, PIP_INDEX_URL=index.url)
            assert again.returncode == 0, again.stderr
            assert "each the same to the byte" in again.stdout
            assert held(own) == locks
        # the cutoff of all passes the one of alpha: its own goes
        done = own.run("resolve", "--upgrade", PIP_INDEX_URL=index.url)
        assert done.returncode == 0, done.stderr
        assert versions(own) == before | {"alpha": "1.3", "filelock": "3.1"}
    assert "later" not in (own.lock / "pins.toml").read_text(encoding="utf-8")


def test_package_that_needs_another_says_which_and_both_move_together(own: Checkout) -> None:
    with index_with_news() as index:
        index.pages["alpha"].pop()
        index.add("alpha", "1.3", uploaded=AFTER, requires=("filelock>=3.1",))
        # nothing but the newer alpha is asked for, and it needs a newer filelock
        text = "alpha>1.0\nlibtpu\ntorch\ntorch-tpu\n"
        (own.lock / "runtime.in").write_text(text, encoding="utf-8")
        before = held(own)
        refused = own.run("resolve", "--upgrade", "alpha", *UV, PIP_INDEX_URL=index.url)
        assert refused.returncode == 1, refused.stderr
        assert "./forge lock --upgrade alpha,filelock" in refused.stderr
        assert held(own) == before
        done = own.run("resolve", "--upgrade", "alpha,filelock", *UV, PIP_INDEX_URL=index.url)
        assert done.returncode == 0, done.stderr
    assert versions(own)["alpha"] == "1.3"
    assert versions(own)["filelock"] == "3.1"


def test_package_without_news_leaves_everything_as_it_was(own: Checkout) -> None:
    before = held(own)
    with index_with_news() as index:
        done = own.run("resolve", "--upgrade", "torch-tpu", *UV, PIP_INDEX_URL=index.url)
        assert done.returncode == 2
        assert "edit torch_tpu.version in lock/pins.toml" in done.stderr
        index.pages["alpha"].pop()
        done = own.run("resolve", "--upgrade", "alpha", *UV, PIP_INDEX_URL=index.url)
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert "alpha had no newer release" in done.stdout
    assert held(own) == before


def test_upgrade_that_fails_beside_another_leaves_what_was_there_before_both(own: Checkout) -> None:
    """The second starts while the first has the pins moved, and both are stopped."""
    (own.lock / "smoke-py311.json").unlink()
    before = held(own)
    pins = own.lock / "pins.toml"
    with index_with_news() as index:
        # new files are downloaded and compared: there the first one waits
        index.hold.set()
        command = ("resolve", "--upgrade", "alpha", *UV)
        first = own.start(*command, PIP_INDEX_URL=index.url)
        second = None
        try:
            wait_for(lambda: pins.read_bytes() != before["pins.toml"])
            second = own.start(*command, PIP_INDEX_URL=index.url)
            assert second.stderr is not None
            assert "which is locking" in second.stderr.readline()
            first.send_signal(signal.SIGINT)
            first.communicate(timeout=60)
            assert first.returncode == 130
            wait_for(lambda: pins.read_bytes() != before["pins.toml"])
            second.send_signal(signal.SIGINT)
            second.communicate(timeout=60)
            assert second.returncode == 130
        finally:
            index.hold.clear()
            for child in (first, second):
                if child is not None and child.poll() is None:
                    child.kill()
                    child.communicate()
    assert held(own) == before


def test_provenance_edited_by_hand_is_not_fresh_and_is_put_right(own: Checkout) -> None:
    smoke = own.lock / "smoke-py311.json"
    right = smoke.read_text(encoding="utf-8")
    edited = right.replace('"licence": null', '"licence": "MIT"')
    edited = edited.replace('"uploaded": "2026-01-01', '"uploaded": "2025-01-01')
    smoke.write_text(edited, encoding="utf-8")
    with good_index() as index:
        done = own.run("check", "--flavour", "smoke", PIP_INDEX_URL=index.url)
        assert done.returncode == 1, done.stdout + done.stderr
        for key in ("licence", "uploaded"):
            assert f"lock/smoke-py311.json: filelock: [fresh] {key} is '" in done.stdout
        done = own.run("resolve", "--flavour", "smoke", *UV, PIP_INDEX_URL=index.url)
    assert done.returncode == 0, done.stderr
    assert smoke.read_text(encoding="utf-8") == right
