"""``fetch_wheel`` against a package index on the loopback, run as a person runs it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_support import (
    Checkout,
    Index,
    free_port,
    make_certificate,
    make_checkout,
    make_wheel,
    serve,
    sha256,
    use_torch_index,
)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = make_checkout(tmp_path / "checkout", payload=400_000)
    # torch has an index of its own; here it lies in a directory, as on a machine without one
    use_torch_index(made, f"https://127.0.0.1:{free_port()}/whl/cpu")
    return made


@pytest.fixture
def index(checkout: Checkout) -> Iterator[Index]:
    with serve(Index()) as running:
        running.add(*checkout.all_wheels())
        yield running


@pytest.fixture
def env(checkout: Checkout, index: Index, tmp_path: Path) -> dict[str, str]:
    """Settings of pip: the loopback index, and a directory that holds torch alone."""
    links = tmp_path / "links"
    links.mkdir()
    torch = checkout.locks["runtime"][2]
    os.link(torch, links / torch.name)
    return {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": index.simple, "PIP_FIND_LINKS": str(links)}


def test_fills_then_has_nothing_to_do(
    checkout: Checkout, index: Index, env: dict[str, str]
) -> None:
    first = checkout.run(env=env)
    assert first.returncode == 0, first.stderr
    assert "6 wheels" in first.stdout
    assert "1 from local directories, 5 from package indexes" in first.stdout
    for wheel in checkout.all_wheels():
        assert checkout.place(wheel).read_bytes() == wheel.read_bytes()
        assert checkout.place(wheel).stat().st_ino != wheel.stat().st_ino
    assert list((checkout.house / ".partial").iterdir()) == []
    asked = len(index.seen)
    second = checkout.run("--json", env=env)
    record = json.loads(second.stdout)
    assert (second.returncode, record["status"]) == (0, "unchanged")
    assert record["summary"] == (
        "6 wheels, 2.8 MB, all digests verified: 3 of runtime-py311.txt, 1 of "
        "smoke-py311.txt, 1 of simulator-py311.txt, 1 of tools-py311.txt"
    )
    assert record["data"]["fetched"] == {}
    assert len(index.seen) == asked


def test_torch_never_comes_from_a_general_index(
    checkout: Checkout, index: Index, env: dict[str, str]
) -> None:
    env["PIP_FIND_LINKS"] = ""
    done = checkout.run(env=env)
    torch = checkout.locks["runtime"][2]
    assert done.returncode == 2
    assert "1 of 6 wheels are missing" in done.stderr
    assert torch.name in done.stderr
    assert sha256(torch) in done.stderr
    assert "/whl/cpu: Connection refused" in done.stderr
    assert "./forge fetch_wheel --source DIR" in done.stderr
    assert not any("torch" in path for path, _ in index.seen)
    # what could be fetched stays
    assert checkout.place(checkout.locks["smoke"][0]).exists()


def test_torch_comes_from_its_index_over_tls(
    checkout: Checkout, env: dict[str, str], tmp_path: Path
) -> None:
    certificate, secure = make_certificate(tmp_path)
    env["PIP_FIND_LINKS"] = ""
    with serve(Index(), secure) as torch_index:
        torch_index.add(checkout.locks["runtime"][2])
        use_torch_index(checkout, torch_index.simple)
        untrusted = checkout.run(env=env)
        assert untrusted.returncode == 2
        assert f"{torch_index.simple}: its certificate is not trusted" in untrusted.stderr
        done = checkout.run("--json", env={**env, "PIP_CERT": str(certificate)})
    assert done.returncode == 0, done.stderr
    size = checkout.locks["runtime"][2].stat().st_size
    fetched = json.loads(done.stdout)["data"]["fetched"]
    assert fetched == {"torch index": {"files": 1, "bytes": size}}


def test_broken_connections_are_taken_up(
    checkout: Checkout, index: Index, env: dict[str, str]
) -> None:
    index.cut = {wheel.name: 1 for wheel in checkout.all_wheels()}
    done = checkout.run(env=env)
    assert done.returncode == 0, done.stderr
    assert sum(asked is not None for _, asked in index.seen) == 5


def test_wrong_bytes_are_refused_and_the_next_source_asked(
    checkout: Checkout, index: Index, env: dict[str, str]
) -> None:
    alpha = checkout.locks["runtime"][0]
    right = alpha.read_bytes()
    with serve(Index()) as evil:
        # it claims the digest, and serves something else
        evil.files[alpha.name] = b"x" + right[1:]
        evil.stated[alpha.name] = sha256(alpha)
        poisoned = {**env, "PIP_INDEX_URL": evil.simple}
        done = checkout.run(env=poisoned)
        assert done.returncode == 1
        assert f"{evil.url}/files/{alpha.name}: has SHA-256" in done.stderr
        assert not checkout.place(alpha).exists()
        done = checkout.run("--json", env={**poisoned, "PIP_EXTRA_INDEX_URL": index.simple})
    assert done.returncode == 0, done.stderr
    assert checkout.place(alpha).read_bytes() == right
    (note,) = json.loads(done.stdout)["notes"]
    assert f"{evil.url}/files/{alpha.name}" in note


def test_a_higher_release_on_an_extra_index_wins_nothing(
    checkout: Checkout, index: Index, env: dict[str, str], tmp_path: Path
) -> None:
    with serve(Index()) as evil:
        evil.add(make_wheel(tmp_path / "evil", "alpha", "99.0"))
        other = make_wheel(tmp_path / "evil", "alpha", "1.0", "py2.py3-none-any")
        evil.add(other)
        done = checkout.run(env={**env, "PIP_EXTRA_INDEX_URL": evil.simple})
    assert done.returncode == 0, done.stderr
    assert [path.name for path in checkout.house.rglob("alpha*")] == ["alpha-1.0-py3-none-any.whl"]


def test_poisoned_settings_that_are_not_about_where(
    checkout: Checkout, env: dict[str, str], tmp_path: Path
) -> None:
    constraint = tmp_path / "constraints.txt"
    constraint.write_text("alpha==99.0\n")
    poison = {
        "PIP_CONSTRAINT": str(constraint),
        "PIP_TARGET": "/nonexistent",
        "PIP_REQUIRE_VIRTUALENV": "1",
        "PIP_ONLY_BINARY": ":none:",
        "PIP_NO_BINARY": ":all:",
        "PIP_PYTHON": "/nonexistent",
        "PIP_DEFAULT_TIMEOUT": "0.001",
        "PYTHONSTARTUP": "/nonexistent",
    }
    done = checkout.run(env=env | poison)
    assert done.returncode == 0, done.stderr


def test_not_found_names_file_digest_and_sources(
    checkout: Checkout, index: Index, env: dict[str, str]
) -> None:
    gamma = checkout.locks["smoke"][0]
    del index.files[gamma.name]
    index.files["gamma-3.0-py2-none-any.whl"] = b"another file of this release"
    done = checkout.run(env=env)
    assert done.returncode == 2
    assert f"gamma 3.0  sha256 {sha256(gamma)}" in done.stderr
    assert f"{index.simple}: no file with this digest; it lists 1 others" in done.stderr


def test_nobody_answers(checkout: Checkout, env: dict[str, str]) -> None:
    env["PIP_INDEX_URL"] = f"http://me:hidden@127.0.0.1:{free_port()}/simple"
    started = time.monotonic()
    done = checkout.run(env=env)
    assert done.returncode == 2
    assert time.monotonic() - started < 10
    assert "5 of 6 wheels are missing" in done.stderr
    assert "Connection refused" in done.stderr
    record = (checkout.out / "results" / "fetch_wheel.json").read_text()
    assert "hidden" not in done.stderr + record
    assert json.loads(record)["status"] == "failed"


def test_offline_names_everything_missing(
    checkout: Checkout, index: Index, env: dict[str, str]
) -> None:
    done = checkout.run("--offline", env=env)
    assert done.returncode == 2
    assert "5 of 6 wheels are missing: offline, and no directory has them" in done.stderr
    assert f"that were searched: {env['PIP_FIND_LINKS']}\n" in done.stderr
    for wheel in checkout.all_wheels():
        assert (sha256(wheel) in done.stderr) is not wheel.name.startswith("torch")
    assert index.seen == []


def test_offline_with_a_named_directory(checkout: Checkout, index: Index) -> None:
    done = checkout.run("--offline", "--source", str(checkout.wheels))
    assert done.returncode == 0, done.stderr
    # a wheelhouse is such a directory too
    again = checkout.run(
        "--offline", "--source", str(checkout.house), env={"TPUFORGE_OUT": f"{checkout.root}/out2"}
    )
    assert again.returncode == 0, again.stderr


def test_usage(checkout: Checkout) -> None:
    done = checkout.run("--python", "3.9")
    assert done.returncode == 2
    assert "Python 3.9 is not supported" in done.stderr
    done = checkout.run("--flavour", "sauce")
    assert done.returncode == 2
    assert "sauce-py311.txt" in done.stderr
    assert checkout.run("--help").returncode == 0
    assert checkout.run("--image", "runtime", "--offline", "--bogus").returncode == 2


def test_a_lock_without_a_hash(checkout: Checkout) -> None:
    (checkout.root / "lock" / "smoke-py311.txt").write_text("gamma==3.0\n")
    done = checkout.run("--offline", "--source", str(checkout.wheels))
    assert done.returncode == 1
    assert "smoke-py311.txt, line 1: gamma has no hash" in done.stderr
