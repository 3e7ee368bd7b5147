"""``build_wheel --remote`` with real services: nginx as a cache, BuildGrid as an executor."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from room import PASSWORD, USER, Services
from room import services as services_of

from bazel_support import MODULE, arguments, left_running
from build_support import free_port, kill
from conftest import Place
from process_support import wait_for
from remote_support import Build, build, clean


def remote_of(made: Build) -> dict[str, str]:
    """What the statement tells of the remote service."""
    parameters = made.statement["predicate"]["buildDefinition"]["externalParameters"]
    told: dict[str, str] = parameters["remote"]
    return told


def test_without_a_remote(place: Place) -> None:
    assert (place.local.cached, place.local.remote) == (0, 0)
    assert remote_of(place.local) == {"kind": "none"}


def test_nginx_as_a_cache(place: Place, services: Services) -> None:
    ask = ("--remote", f"cache={services.cache}/{place.bazel.name}")
    first = build(place.checkout, place.bazel, *ask)
    assert (first.cached, first.remote) == (0, 0)
    # packed at another moment: Bazel's own wheel differs, ours does not
    assert first.made_sha256 != place.local.made_sha256
    assert first.sha256 == place.local.sha256
    again = build(place.checkout, place.bazel, *ask)
    assert (again.cached, again.remote) == (place.actions, 0)
    assert again.made_sha256 == first.made_sha256
    assert again.sha256 == place.local.sha256
    # the path at the service is not told
    assert remote_of(again) == {"kind": "cache", "service": services.cache}


def test_nginx_with_a_password(place: Place, services: Services, tmp_path: Path) -> None:
    ask = ("--remote", f"cache={services.guarded}/{place.bazel.name}")
    refused = build(place.checkout, place.bazel, *ask, env={"HOME": str(tmp_path)})
    assert (refused.cached, refused.sha256) == (0, place.local.sha256)
    assert "401 Unauthorized" in refused.said
    # where the Bazel in the room sees it too
    netrc = place.checkout.root / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login {USER} password {PASSWORD}\n")
    netrc.chmod(0o600)
    made = [build(place.checkout, place.bazel, *ask, env={"NETRC": str(netrc)}) for _ in range(2)]
    assert {one.sha256 for one in made} == {place.local.sha256}
    assert made[1].cached == (place.actions if place.new else 0)
    assert ("401 Unauthorized" in made[1].said) is not place.new
    out = place.checkout.out
    files = [path for path in out.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    word = os.fsencode(PASSWORD)
    assert [path for path in files if word in path.read_bytes()] == []


def test_buildgrid_as_an_executor(place: Place, services: Services) -> None:
    ask = ("--remote", f"executor={services.executor}")
    if not place.new:
        pytest.skip("Bazel 2.1.0 refuses a disk cache beside an executor")
    first = build(place.checkout, place.bazel, *ask)
    assert (first.cached, first.remote) == (0, place.actions)
    assert first.sha256 == place.local.sha256
    again = build(place.checkout, place.bazel, *ask)
    assert (again.cached, again.remote) == (place.actions, 0)
    assert again.sha256 == place.local.sha256
    assert remote_of(again) == {"kind": "executor", "service": services.executor}


def running_in_the_room(script: str) -> bool:
    """Whether the worker runs a script."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[0] == b"python3" and words[1].endswith(script.encode()):
                return True
    return False


def test_an_executor_that_dies(place: Place, made_room: Path, tmp_path: Path) -> None:
    if not place.new:
        pytest.skip("Bazel 2.1.0 refuses a disk cache beside an executor")
    checkout = place.checkout
    packer = checkout.root / "workspace" / "ci" / "wheel" / "pack.py"
    before = packer.read_text()
    packer.write_text(before.replace("out, *paths", "time.sleep(300)\nout, *paths"))
    words = arguments(checkout.root / "workspace", place.bazel)
    with contextlib.ExitStack() as stack:
        stack.callback(packer.write_text, before)
        with services_of(made_room, [free_port() for _ in range(5)], tmp_path / "log") as running:
            clean(checkout)
            ask = ("--remote", f"executor={running.executor}")
            child = checkout.start(*words, *ask, module=MODULE)
            stack.callback(kill, child)
            wait_for(lambda: running_in_the_room("wheel/pack.py"), 120)
        _, said = child.communicate(timeout=200)
    assert child.returncode == 2, said
    assert "the remote cache or executor cannot be reached" in said
    assert left_running(checkout) == []
