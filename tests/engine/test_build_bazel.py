"""``build_wheel`` with the real Bazelisk and a real Bazel, on a small workspace of the same shape.

Both come from npm: Bazelisk is the pinned one.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
from pathlib import Path

import pytest

from bazel_support import (
    MODULE,
    WHEEL,
    arguments,
    get_bazel,
    left_running,
    make_workspace,
    set_command,
)
from build_support import Checkout, kill, make_checkout, wait_for


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return make_checkout(tmp_path_factory.mktemp("bazel") / "checkout")


@pytest.fixture(scope="module")
def workspace(checkout: Checkout) -> Path:
    return make_workspace(checkout.root / "workspace")


@pytest.fixture(scope="module")
def bazel(checkout: Checkout) -> Path:
    return get_bazel(checkout.root)


def test_a_wheel_from_source(checkout: Checkout, workspace: Path, bazel: Path) -> None:
    poison = {"USE_BAZEL_VERSION": "99.0.0", "BAZELISK_BASE_URL": "http://127.0.0.1:1"}
    done = checkout.run(*arguments(workspace, bazel), module=MODULE, env=poison, timeout=300)
    assert done.returncode == 0, done.stderr
    wheel = checkout.out / "wheels" / WHEEL
    assert wheel.read_bytes() == b"wheel\n"
    check = ["sha256sum", "-c", f"{WHEEL}.sha256"]
    assert subprocess.run(check, cwd=wheel.parent, check=False).returncode == 0
    record = json.loads((checkout.out / "results" / "build_wheel.json").read_text())
    assert record["data"]["sha256"] == hashlib.sha256(b"wheel\n").hexdigest()
    assert record["data"]["bazelisk"]["origin"] in ("PATH", "npm")
    assert list((checkout.out / "bazel").glob("run-*")) == []
    assert left_running(checkout) == []


def test_an_older_wheel_in_bazel_bin_is_not_taken(
    checkout: Checkout, workspace: Path, bazel: Path
) -> None:
    folder = workspace / "bazel-bin" / "ci" / "wheel"
    (folder / "torch_tpu-9.9.9-cp311-cp311-manylinux_2_31_x86_64.whl").write_bytes(b"old")
    done = checkout.run(*arguments(workspace, bazel), module=MODULE, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert [p.name for p in (checkout.out / "wheels").glob("*.whl")] == [WHEEL]


def test_a_build_that_fails(checkout: Checkout, workspace: Path, bazel: Path) -> None:
    set_command(workspace, "false")
    done = checkout.run(*arguments(workspace, bazel), module=MODULE, timeout=300)
    set_command(workspace, "echo wheel")
    assert done.returncode == 1
    assert "Bazel ended with exit code 1" in done.stderr
    assert "build_wheel.log" in done.stderr
    assert left_running(checkout) == []


def test_a_bazel_that_never_comes(checkout: Checkout, workspace: Path, bazel: Path) -> None:
    nowhere = ["--bazel", "7.7.1", "--bazel-url", "http://127.0.0.1:1"]
    done = checkout.run(
        *arguments(workspace, bazel), *nowhere, "--limit-hours", "0.002", module=MODULE, timeout=300
    )
    assert done.returncode == 2
    assert "building the wheel: not done after 7 s; ended" in done.stderr
    assert left_running(checkout) == []


def test_interrupted_then_killed_then_again(
    checkout: Checkout, workspace: Path, bazel: Path
) -> None:
    mark = checkout.root / "begun"
    set_command(workspace, f"touch {mark}; sleep 97; echo wheel")
    command = [*arguments(workspace, bazel)]
    child = checkout.start(*command, module=MODULE)
    wait_for(mark.exists, 120)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted" in err
    assert left_running(checkout) == []
    mark.unlink()
    child = checkout.start(*command, module=MODULE)
    wait_for(mark.exists, 120)
    kill(child)
    assert left_running(checkout) != []
    set_command(workspace, "echo wheel")
    done = checkout.run(*command, module=MODULE, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (checkout.out / "wheels" / WHEEL).read_bytes() == b"wheel\n"
    assert left_running(checkout) == []


def test_a_tampered_bazelisk(checkout: Checkout, workspace: Path, bazel: Path) -> None:
    fetched = list((checkout.out / "bazel" / "bazelisk").glob("*/*"))
    if not fetched:
        pytest.skip("a Bazelisk of the user's own is on PATH, so none was fetched")
    with fetched[0].open("ab") as file:
        file.write(b"x")
    done = checkout.run(*arguments(workspace, bazel), module=MODULE, timeout=60)
    assert done.returncode == 1
    assert "has SHA-256" in done.stderr
