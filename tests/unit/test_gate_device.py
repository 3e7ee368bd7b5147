"""Made-up trees of every TPU generation: what stands on the bus, who holds it, what is expected.

No TPU was near: these are files in the shape of ``/sys`` and ``/dev``.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from smoke import chips, launch

NUMBERS = {generation: number for number, generation in chips.GENERATIONS.items()}
GENERATIONS = sorted(NUMBERS)


def tree(root: Path, generation: str, count: int, *, missing: tuple[int, ...] = ()) -> None:
    """A host with so many chips; some of their device files may be missing."""
    (root / "dev/vfio").mkdir(parents=True, exist_ok=True)
    first = len(list((root / "dev/vfio").iterdir())) + len(missing)
    for index in range(first, first + count):
        folder = root / f"sys/bus/pci/devices/0000:00:{index:02x}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{chips.VENDOR}\n")
        (folder / "device").write_text(f"{NUMBERS[generation]}\n")
        (folder / "iommu_group").symlink_to(f"../../../kernel/iommu_groups/{index}")
        if index not in missing:
            (root / f"dev/vfio/{index}").touch()


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_number_of_chips_that_torch_tpu_knows_is_right(
    tmp_path: Path, generation: str
) -> None:
    for count in range(1, 9):
        root = tmp_path / str(count)
        tree(root, generation, count)
        found = chips.scan(root)
        assert [chip.generation for chip in found] == [generation] * count
        assert chips.state(found).what == "free"
        odd = chips.miscounted(found, None)
        assert (odd == "") == (count in chips.PER_HOST[generation]), odd
        if odd:
            assert f"{count} chips of TPU {generation}" in odd
    assert generation in chips.MEMORY_GIB


@pytest.mark.parametrize(
    ("generation", "kind", "right", "wrong"),
    [
        ("v4", "v4-8", {4}, {1, 2, 8}),
        ("v4", "v4-32", {4}, {8}),
        ("v5p", "v5p-8", {4}, {8, 1}),
        ("v5p", "v5p-2", {1}, {4}),
        ("v5e", "v5litepod-1", {1}, {4, 8}),
        ("v5e", "v5litepod-8", {4, 8}, {1}),
        ("v5e", "v5litepod-16", {4, 8}, {1}),
        ("v6e", "v6e-4", {4}, {1, 8}),
        ("v6e", "v6e-256", {4, 8}, {1}),
        # no page says what a number after tpu7x means, so none is expected
        ("v7", "tpu7x-8", {2, 4, 8}, set()),
        ("v6e", "", {1, 4, 8}, set()),
        ("v6e", "something new-8", {1, 4, 8}, set()),
    ],
)
def test_an_accelerator_type_says_how_many_chips_its_hosts_have(
    tmp_path: Path, generation: str, kind: str, right: set[int], wrong: set[int]
) -> None:
    for count in right | wrong:
        tree(tmp_path / str(count), generation, count)
        odd = chips.miscounted(chips.scan(tmp_path / str(count)), kind)
        assert (odd == "") == (count in right), odd


def test_chips_of_another_generation_than_the_slice_says(tmp_path: Path) -> None:
    tree(tmp_path, "v5e", 4)
    assert chips.miscounted(chips.scan(tmp_path), "v6e-4") == (
        "the slice is called v6e-4, and its chips are TPU v5e"
    )
    tree(tmp_path, "v6e", 4)
    assert "different generations" in chips.miscounted(chips.scan(tmp_path), None)


def test_a_container_that_was_given_some_chips_uses_those(tmp_path: Path) -> None:
    tree(tmp_path, "v6e", 8, missing=())
    for index in range(4, 8):
        (tmp_path / f"dev/vfio/{index}").unlink()
    found = chips.scan(tmp_path)
    assert len(chips.given(found)) == 4
    assert chips.state(found) == chips.State(True, "free", "4 of 8 chips can be opened")
    env = chips.runtime_env(chips.given(found), {}, metadata=False)
    assert env["TPU_ACCELERATOR_TYPE"] == "v6e-4"


@pytest.mark.parametrize(
    ("generation", "count", "kind"),
    [
        ("v4", 4, "v4-8"),
        ("v5p", 4, "v5p-8"),
        ("v5e", 8, "v5litepod-8"),
        ("v6e", 1, "v6e-1"),
        ("v7", 8, "tpu7x-8"),
    ],
)
def test_without_a_metadata_server_the_type_is_that_of_this_host(
    tmp_path: Path, generation: str, count: int, kind: str
) -> None:
    tree(tmp_path, generation, count)
    env = chips.runtime_env(chips.scan(tmp_path), {}, metadata=False)
    assert env["TPU_ACCELERATOR_TYPE"] == kind


@pytest.mark.parametrize("order", [("busy", "broken"), ("broken", "busy")])
def test_of_a_busy_and_a_broken_chip_the_busy_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    tree(tmp_path, "v6e", 4)
    numbers = {"busy": errno.EBUSY, "broken": errno.EIO}
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        index = Path(path).name
        if index in ("1", "2"):
            number = numbers[order[int(index) - 1]]
            raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    state = chips.state(chips.scan(tmp_path))
    assert (state.usable, state.what) == (False, "busy")
    assert "2 of 4 chips cannot be opened" in state.why
    assert "fuser" in state.why


def metadata(answer: bytes, wait: float = 0.0) -> int:
    """A server that gives one answer; its port."""
    server = socket.create_server(("localhost", 0))
    server.settimeout(10)

    def serve() -> None:
        with server, server.accept()[0] as client:
            client.recv(4096)
            time.sleep(wait)
            client.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    port: int = server.getsockname()[1]
    return port


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nv6e-8", "v6e-8"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret", ""),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nv6e-8", ""),
        (b"nonsense\r\n\r\n", ""),
        (b"", ""),
    ],
)
def test_the_metadata_server_is_asked_for_the_type_and_no_more(
    answer: bytes, expected: str
) -> None:
    assert chips.accelerator_type("localhost", metadata(answer)) == expected


def test_a_metadata_server_that_is_slow_or_absent_costs_a_moment() -> None:
    started = time.monotonic()
    assert chips.accelerator_type("localhost", metadata(b"", wait=3)) == ""
    with socket.create_server(("localhost", 0)) as closed:
        port = closed.getsockname()[1]
    assert chips.accelerator_type("localhost", port) is None
    assert time.monotonic() - started < 3


def test_hosts_are_counted_by_their_names() -> None:
    assert launch.hosts({}) == 1
    assert launch.hosts({"TPU_WORKER_HOSTNAMES": "localhost"}) == 1
    assert launch.hosts({"TPU_WORKER_HOSTNAMES": "a,b,,c"}) == 3
