"""The room and what is built in it, made once for all tests of this ring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import room

from bazel_support import get_bazel
from build_support import Checkout, free_port, make_checkout
from remote_support import FOR_NEW_BAZEL, FOR_OLD_BAZEL, Build, build, make_workspace
from tpuforge.errors import ForgeError


@dataclass
class Place:
    """A checkout with a workspace, a Bazel, and the wheel that they make without any remote.

    Attributes:
        checkout: The checkout.
        bazel: The Bazel.
        actions: How many actions the wheel takes.
        local: The wheel made here.
        new: Whether it is a Bazel of today. An old one does not look into ``.netrc`` for a cache's
            password, and refuses a disk cache beside an executor.
    """

    checkout: Checkout
    bazel: Path
    actions: int
    local: Build
    new: bool


@pytest.fixture(scope="session")
def made_room() -> Path:
    """The room; no test of this ring means anything without it."""
    why = room.hindrance()
    if why:
        pytest.exit(f"not run: {why}", returncode=2)
    try:
        return room.make_room()
    except ForgeError as error:
        pytest.exit(f"not run: {error.found}", returncode=2)


@pytest.fixture(scope="session")
def services(made_room: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[room.Services]:
    """The services of the room, running."""
    ports = [free_port() for _ in range(5)]
    log = tmp_path_factory.mktemp("services") / "services.log"
    with room.services(made_room, ports, log) as running:
        yield running


@pytest.fixture(scope="session", params=["bazel-2.1.0", "bazel-7.7.1"])
def place(
    request: pytest.FixtureRequest, made_room: Path, tmp_path_factory: pytest.TempPathFactory
) -> Place:
    """npm's Bazel on this machine, and Debian's in the room."""
    folder = tmp_path_factory.mktemp("remote")
    checkout = make_checkout(folder / "checkout")
    old = request.param == "bazel-2.1.0"
    actions = make_workspace(checkout.root / "workspace", FOR_OLD_BAZEL if old else FOR_NEW_BAZEL)
    bazel = get_bazel(folder) if old else room.make_bazel(made_room, folder / "bazel", [folder])
    return Place(checkout, bazel, actions, build(checkout, bazel), new=not old)
