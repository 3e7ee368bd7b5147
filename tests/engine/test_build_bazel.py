"""``build_wheel`` with the real Bazelisk and a real Bazel, on a small workspace of the same shape.

Both come from npm: Bazelisk is the pinned one. The tests share one checkout and its caches, as the
runs of a person do, and leave them well for the next one.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bazel_support import (
    BAZEL_FILE,
    BAZEL_SHA256,
    MODULE,
    ON_HOST,
    WHEEL,
    add_wheel,
    arguments,
    commit,
    get_bazel,
    left_running,
    make_workspace,
)
from build_support import Checkout, make_checkout, sha256
from process_support import call
from server_support import files_of, serving

SUFFIX = ".dev20261130123456"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    made = make_checkout(tmp_path_factory.mktemp("bazel") / "checkout")
    # the tests that change the network change nothing of this
    assert made.run(module="tpuforge.build.bazelisk", timeout=300).returncode == 0
    return made


@pytest.fixture(scope="module")
def workspace(checkout: Checkout) -> Path:
    return make_workspace(checkout.root / "workspace")


@pytest.fixture(scope="module")
def bazel(checkout: Checkout) -> Path:
    return get_bazel(checkout.root)


def result(checkout: Checkout) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((checkout.out / "results" / "build_wheel.json").read_text())
    return made


def files_with(folder: Path, text: str) -> list[Path]:
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and text.encode() in path.read_bytes()
    ]


def test_a_release_then_the_same_line_by_hand(
    checkout: Checkout, workspace: Path, bazel: Path
) -> None:
    poison = {"USE_BAZEL_VERSION": "99.0.0", "BAZELISK_BASE_URL": "http://127.0.0.1:1"}
    secrets = {
        "MY_TOKEN": "hunter2-token",
        "https_proxy": "http://me:hunter2-proxy@127.0.0.1:1",
        "no_proxy": "*",
    }
    env = poison | secrets
    done = checkout.run(*arguments(workspace, bazel), module=MODULE, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    wheel = checkout.out / "wheels" / WHEEL
    check = ["sha256sum", "-c", f"{WHEEL}.sha256"]
    assert subprocess.run(check, cwd=wheel.parent, check=False).returncode == 0
    data = result(checkout)["data"]
    assert data["where"] == "host"
    (one,) = data["wheels"]
    assert one["sha256"] == sha256(wheel)
    assert one["made_sha256"] == sha256(workspace / "ci" / "wheel" / WHEEL)
    assert data["bazelisk"]["origin"] in ("PATH", "npm")
    assert data["bazel"] == {"version": "2.1.0", "sha256": BAZEL_SHA256, "known": "given"}
    audit = json.loads(wheel.with_name(f"{WHEEL}.audit.json").read_text())
    assert (audit["ok"], audit["wheel"]["sha256"]) == (True, one["sha256"])
    said = json.loads(wheel.with_name(f"{WHEEL}.intoto.json").read_text())
    assert said["subject"][0]["digest"]["sha256"] == one["sha256"]
    assert list((checkout.out / "bazel" / "run").iterdir()) == []
    # nothing was left in the user's folder, and nothing runs on
    assert [path for path in workspace.iterdir() if path.name.startswith("bazel-")] == []
    assert left_running(checkout) == []
    # a secret is in no file and was not said
    assert "hunter2" not in done.stderr + done.stdout
    assert files_with(checkout.out, "hunter2") == []
    # the line that was printed gives the same wheel in a plain shell
    assert one["line"] in done.stderr
    by_hand = call(["/bin/sh", "-c", one["line"]], env=checkout.env(secrets))
    assert by_hand.returncode == 0, by_hand.stderr
    (made,) = (checkout.out / "bazel" / "root").glob(
        f"*/execroot/*/bazel-out/*/bin/ci/wheel/{WHEEL}"
    )
    assert sha256(made) == one["made_sha256"]
    assert (checkout.out / "bazel" / "run" / "events.json").exists()
    # an older wheel beside it is not taken, and what the shell left is ended and removed
    made.with_name(WHEEL.replace("0.2.0", "0.1.9")).write_bytes(b"old")
    assert left_running(checkout) != []
    done = checkout.run(*arguments(workspace, bazel), module=MODULE, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert [path.name for path in (checkout.out / "wheels").glob("*.whl")] == [WHEEL]
    assert not (checkout.out / "bazel" / "run" / "events.json").exists()
    assert left_running(checkout) == []


def test_two_pythons_one_of_which_fails(checkout: Checkout, workspace: Path, bazel: Path) -> None:
    # there is no wheel for 3.12, and the one for 3.13 has not what its name says
    good = workspace / "ci" / "wheel" / WHEEL
    bad = good.with_name(WHEEL.replace("cp311", "cp313"))
    bad.write_bytes(good.read_bytes())
    pythons = ["--python", "3.12", "3.13", "3.11", "--keep-going"]
    done = checkout.run(*arguments(workspace, bazel), *pythons, module=MODULE, timeout=300)
    bad.unlink()
    assert done.returncode == 1
    assert "2 of 3 wheels were not built" in done.stderr
    assert f"3.11  {WHEEL}" in done.stderr
    assert "3.12  Bazel ended with exit code 1" in done.stderr
    assert "No such file" in (checkout.out / "bazel" / "build_wheel-py312.log").read_text()
    assert f"3.13  {bad.name} does not pass its audit" in done.stderr
    refused = checkout.out / "wheels" / "refused"
    assert {path.name for path in refused.iterdir()} == {
        *(f"{bad.name}{end}" for end in ("", ".sha256", ".audit.json", ".intoto.json"))
    }
    assert [path.name for path in (checkout.out / "wheels").glob("*.whl")] == [WHEEL]


def test_a_source_without_the_target(checkout: Checkout, workspace: Path, bazel: Path) -> None:
    build = workspace / "ci" / "wheel" / "BUILD"
    text = build.read_text()
    build.write_text(text.replace("torch_tpu_wheel", "torch_tpu_weel"))
    done = checkout.run(*arguments(workspace, bazel), module=MODULE, timeout=300)
    build.write_text(text)
    assert done.returncode == 1
    assert "torch_tpu_wheel" in done.stderr
    assert "Bazel ended with exit code 1" in done.stderr


@contextlib.contextmanager
def releases(folder: Path) -> Iterator[str]:
    """Where Bazelisk gets Bazel: a folder on the loopback."""
    with serving(files_of(folder)) as port:
        yield f"http://127.0.0.1:{port}"


def test_a_ref_is_fetched_and_its_bazel_proven(
    checkout: Checkout, workspace: Path, bazel: Path
) -> None:
    for python in ("3.11", "3.12"):
        add_wheel(workspace, python, SUFFIX)
    (workspace / ".bazelversion").write_text("2.1.0\n")
    named = commit(workspace, "v0.2.0")
    served = checkout.root / "releases" / "2.1.0" / BAZEL_FILE
    served.parent.mkdir(parents=True)
    served.hardlink_to(bazel)
    cache = checkout.root / "cache"
    pins = checkout.root / "lock" / "pins.toml"
    known = pins.read_text()
    with releases(checkout.root / "releases") as url:
        command = ["--repository", str(workspace), "--bazel-url", url, "--cache", str(cache)]
        command += [*ON_HOST, "--dev", "--python", "3.11", "3.12"]
        # the pins know that Bazel by another digest: nothing of it is run
        pins.write_text(known.replace("[bazel]\n", f'[bazel]\n"2.1.0" = "{"0" * 64}"\n'))
        done = checkout.run(*command, module=MODULE, timeout=300)
        assert done.returncode == 1
        assert "the Bazel 2.1.0 that Bazelisk downloaded is another one" in done.stderr
        assert not (cache / "root").exists()
        # the right one, and the commit of the ref as well
        pins.write_text(
            known.replace("[bazel]\n", f'[bazel]\n"2.1.0" = "{BAZEL_SHA256}"\n').replace(
                'ref = "v0.2.0"\n', f'ref = "v0.2.0"\ncommit = "{named}"\n'
            )
        )
        done = checkout.run(*command, module=MODULE, timeout=300)
        assert done.returncode == 0, done.stderr
        assert f"source: v0.2.0, commit {named}, verified" in done.stderr
        record = result(checkout)
        assert record["notes"] == []
        assert record["data"]["bazel"]["known"] == "pinned"
        assert record["data"]["source"]["commit"] == named
        # one table, a line for each Python
        assert [line[:6] for line in done.stdout.splitlines()[:2]] == ["3.11  ", "3.12  "]
        made = sorted(path.name for path in (checkout.out / "wheels").glob(f"*{SUFFIX}*.whl"))
        assert made == [
            WHEEL.replace("0.2.0", f"0.2.0{SUFFIX}").replace("cp311", tag)
            for tag in ("cp311", "cp312")
        ]
        said = (checkout.out / "wheels" / f"{made[0]}.intoto.json").read_text()
        assert named in said
        assert '"repository": "https://' in said
        assert str(checkout.root) not in said
        # a Bazel that was changed in the cache is noticed before it runs
        (binary,) = (cache / "bazelisk-home").glob("downloads/sha256/*/bin/bazel")
        with binary.open("ab") as file:
            file.write(b"x")
        done = checkout.run(*command, module=MODULE, timeout=300)
        assert done.returncode == 1
        assert "Bazel 2.1.0 in the cache of Bazelisk has SHA-256" in done.stderr
        assert f"expected: {BAZEL_SHA256}, as lock/pins.toml says" in done.stderr
    pins.write_text(known)
    assert left_running(checkout) == []


def test_a_bazel_that_never_comes(checkout: Checkout, workspace: Path, bazel: Path) -> None:
    nowhere = ["--bazel", "7.7.1", "--bazel-url", "http://127.0.0.1:9", "--limit-hours", "0.001"]
    with releases(checkout.root) as url:
        nowhere[3] = f"{url}/nothing"
        done = checkout.run(*arguments(workspace, bazel), *nowhere, module=MODULE, timeout=300)
    assert done.returncode == 2
    assert "7.7.1" in done.stderr
    assert left_running(checkout) == []


def test_a_tampered_bazelisk(checkout: Checkout, workspace: Path, bazel: Path) -> None:
    (fetched,) = (checkout.out / "bazel" / "bazelisk").glob("*/*")
    on_path = shutil.which("bazelisk")
    if on_path is not None and sha256(Path(on_path)) == sha256(fetched):
        pytest.skip("the pinned Bazelisk is on PATH, and goes before the fetched one")
    whole = fetched.read_bytes()
    fetched.write_bytes(whole + b"x")
    try:
        done = checkout.run(*arguments(workspace, bazel), module=MODULE, timeout=60)
        assert done.returncode == 1
        assert f"has SHA-256 {sha256(fetched)}" in done.stderr
    finally:
        fetched.write_bytes(whole)
