"""What a damaged cache, and a run that was stopped, may and may not do to a lock."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

import pytest

from lock_support import Checkout, checkout, copy_of, good_index
from process_support import call, wait_for

RUNTIME = ("--flavour", "runtime", "--way", "uv")
"""Both resolvers see the cache through the one view; uv starts sooner."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout whose runtime lock was written from the good index, with its cache."""
    made = checkout(tmp_path_factory.mktemp("made"), small=True)
    with good_index() as index:
        done = made.run("resolve", *RUNTIME, PIP_INDEX_URL=index.url)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture
def own(made: Checkout, tmp_path: Path) -> Checkout:
    return copy_of(made, tmp_path)


def entries(made: Checkout) -> list[Path]:
    return [
        p for p in (made.root / "out" / "lock" / "cache" / "metadata").rglob("*") if p.is_file()
    ]


def signed(data: bytes) -> bytes:
    """A cache entry whose first line fits: the work of somebody who knows the form."""
    return hashlib.sha256(data).hexdigest().encode() + b"\n" + data


def test_metadata_is_read_once_and_a_damaged_entry_is_read_again(own: Checkout) -> None:
    before = own.runtime.read_bytes()
    with good_index() as index:
        done = own.run("resolve", *RUNTIME, PIP_INDEX_URL=index.url)
        assert done.returncode == 0, done.stderr
        assert not [path for path in index.asked if path.startswith("/files/")]
        good = {path: path.read_bytes() for path in entries(own)}
        assert len(good) == 4
        for number, (path, data) in enumerate(good.items()):
            path.write_bytes(
                (b"", data[:-1], b"\xff\xfe\x00", data.replace(b"Name", b"Nane"))[number]
            )
        done = own.run("resolve", *RUNTIME, PIP_INDEX_URL=index.url)
        assert done.returncode == 0, done.stderr
        assert len({path for path in index.asked if path.startswith("/files/")}) == 4
    assert own.runtime.read_bytes() == before
    assert {path: path.read_bytes() for path in good} == good


def test_forged_metadata_cannot_change_a_lock_nor_bring_a_digest_into_one(own: Checkout) -> None:
    before = own.runtime.read_bytes()
    with good_index() as index:
        index.add("beta", "1.0")
        (alpha,) = [path for path in entries(own) if b"Name: alpha" in path.read_bytes()]
        lie = b"Metadata-Version: 2.1\nName: alpha\nVersion: 1.0\nRequires-Dist: beta\n"
        alpha.write_bytes(signed(lie))
        # the inputs are the same and the result is not
        done = own.run("resolve", *RUNTIME, PIP_INDEX_URL=index.url)
        assert done.returncode == 1, done.stderr
        assert "beta 1.0 is missing from the lock" in done.stderr
        assert own.runtime.read_bytes() == before
        # another package's metadata: the page says which file it is
        alpha.write_bytes(signed(lie.replace(b"Name: alpha", b"Name: gamma")))
        done = own.run("resolve", *RUNTIME, PIP_INDEX_URL=index.url)
        assert done.returncode == 1, done.stderr
        assert "the metadata of a file is of another one" in done.stderr
        assert "gamma" in done.stderr
        # pip-compile does not see it
        done = own.run("resolve", "--flavour", "runtime", PIP_INDEX_URL=index.url)
        assert done.returncode == 1, done.stderr
        assert "is of gamma 1.0" in done.stderr
        assert own.runtime.read_bytes() == before
        # an index that says what its metadata is leaves no room for the lie
        wheel = next(e for e in index.pages["alpha"] if e["hashes"]["sha256"] == alpha.name)
        told = b"Metadata-Version: 2.1\nName: alpha\nVersion: 1.0\n"
        wheel["core-metadata"] = {"sha256": hashlib.sha256(told).hexdigest()}
        index.files[f"{wheel['filename']}.metadata"] = told
        done = own.run("resolve", *RUNTIME, PIP_INDEX_URL=index.url)
        assert done.returncode == 0, done.stderr
        assert own.runtime.read_bytes() == before
        # and metadata other than it says is refused
        alpha.unlink()
        index.files[f"{wheel['filename']}.metadata"] = lie
        done = own.run("resolve", *RUNTIME, PIP_INDEX_URL=index.url)
        assert done.returncode == 1, done.stderr
        assert "serves other bytes than it lists" in done.stderr
    assert own.runtime.read_bytes() == before


@pytest.mark.parametrize(
    ("verb", "number"),
    [("resolve", signal.SIGINT), ("resolve", signal.SIGTERM), ("check", signal.SIGINT)],
)
def test_stopped_run_ends_its_children_and_writes_nothing(
    own: Checkout, verb: str, number: int
) -> None:
    before = {path: path.read_bytes() for path in own.lock.iterdir()}
    for path in entries(own):
        path.unlink()
    with good_index() as index:
        index.hold.set()
        # tests in the background of a shell ignore it, and what they start would too
        before_tests = signal.signal(signal.SIGINT, signal.default_int_handler)
        words: tuple[str, ...] = ("--again",)
        if verb == "resolve":
            (own.lock / "smoke.in").write_text("alpha\n", encoding="utf-8")
            before[own.lock / "smoke.in"] = b"alpha\n"
            words = ("--flavour", "smoke", "--python", "all")
        running = own.start(verb, *words, PIP_INDEX_URL=index.url)
        signal.signal(signal.SIGINT, before_tests)
        wait_for(lambda: any(path.startswith("/files/") for path in index.asked))
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)
        index.hold.clear()
    assert running.returncode == 130, errors
    assert "interrupted" in errors
    assert {path: path.read_bytes() for path in own.lock.iterdir()} == before
    place = str(own.root)
    shown = call(["ps", "-eo", "args"], check=True)
    assert not [line for line in shown.stdout.splitlines() if place in line]
    assert not list((own.root / "out" / "lock").glob("work-*"))
    assert not (own.root / "out" / "lock" / "proofs.json").exists()
