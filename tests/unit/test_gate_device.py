"""Made-up trees of every TPU generation: what stands on the bus, who holds it, what is expected.

No TPU was near: these are files in the shape of ``/sys`` and ``/dev``.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from smoke import chips, isolate, launch, test_device
from smoke.plugin import Check

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
        # one that refuses names no slice, and libtpu would ask it again and again
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 5\r\n\r\nv6e-8", None),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nv6e-8", None),
        (b"HTTP/1.1 302 Found\r\nLocation: http://localhost/\r\nContent-Length: 0\r\n\r\n", None),
        (b"nonsense\r\n\r\n", None),
        (b"", None),
    ],
)
def test_the_metadata_server_is_asked_for_the_type_and_no_more(
    tmp_path: Path, answer: bytes, expected: str | None
) -> None:
    found = chips.accelerator_type("localhost", metadata(answer))
    assert found == expected
    tree(tmp_path, "v6e", 8)
    env = chips.runtime_env(chips.scan(tmp_path), {}, found is not None)
    assert ("TPU_SKIP_MDS_QUERY" in env) == (expected is None)


def test_a_metadata_server_that_is_slow_or_absent_costs_a_moment() -> None:
    started = time.monotonic()
    assert chips.accelerator_type("localhost", metadata(b"", wait=3)) is None
    with socket.create_server(("localhost", 0)) as closed:
        port = closed.getsockname()[1]
    assert chips.accelerator_type("localhost", port) is None
    assert time.monotonic() - started < 3


def test_hosts_are_counted_by_their_names() -> None:
    assert launch.hosts({}) == 1
    assert launch.hosts({"TPU_WORKER_HOSTNAMES": "localhost"}) == 1
    assert launch.hosts({"TPU_WORKER_HOSTNAMES": "a,b,,c"}) == 3


README = {"device": "tpu", "finite": True, "difference": 0.001, "scale": 1.0}
TRAINED = {
    "largest_weight_difference": 0.001,
    "first_step_seconds": 1.0,
    "steady_step_seconds": 0.1,
}
FORWARD = {"difference": 0.001}


def gibibytes(number: float) -> dict[str, Any]:
    """What a chip of so much memory says."""
    return {"total_bytes": int(number * 2**30), "free_bytes": 0, "why": ""}


def numeric(name: str, check: Check) -> None:
    """Run one of the checks that compare numbers, on a host with one TPU v6e."""
    chip = chips.Chip("0000:00:05.0", "v6e", None)
    calls: dict[str, Callable[[], None]] = {
        "readme": lambda: test_device.test_readme(check, {}),
        "train": lambda: test_device.test_train(check, {}),
        "compile-forward": lambda: test_device.test_compile_forward(check, {}),
        "compile-train": lambda: test_device.test_compile_train(check, {}),
        "memory": lambda: test_device.test_memory(check, [chip], {}),
    }
    calls[name]()


def answered(
    monkeypatch: pytest.MonkeyPatch, value: dict[str, Any] | None, error: str | None
) -> Check:
    """A check whose process ends like that, on no device at all."""
    kind = "AssertionError" if error else None
    ended = isolate.Ended(value, error, kind, 1.0, 1, "")
    monkeypatch.setattr(isolate, "run", lambda *_, **__: ended)
    return Check("device.some", "device", "purpose", "critical", "remedy")


@pytest.mark.parametrize(
    ("name", "right", "wrong", "words"),
    [
        ("readme", README, {"difference": 0.03}, "differs from the CPU's by 0.03"),
        ("readme", README, {"finite": False}, "differs from the CPU's"),
        ("readme", README, {"device": "cpu"}, "the product is on cpu"),
        ("memory", gibibytes(31.24), gibibytes(15.75), "15.75 GiB, where a TPU v6e has 31.24"),
    ],
)
def test_a_device_whose_numbers_are_wrong_fails_and_one_whose_are_right_passes(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    right: dict[str, Any],
    wrong: dict[str, Any],
    words: str,
) -> None:
    numeric(name, answered(monkeypatch, right, None))
    with pytest.raises(AssertionError, match=words):
        numeric(name, answered(monkeypatch, right | wrong, None))


@pytest.mark.parametrize("name", ["readme", "train", "compile-forward", "compile-train", "memory"])
def test_what_the_comparison_on_the_device_says_is_the_failure(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "compile-forward":
        numeric(name, answered(monkeypatch, FORWARD, None))
    check = answered(monkeypatch, None, "AssertionError: Tensor-likes are not close!")
    with pytest.raises(AssertionError, match="are not close"):
        numeric(name, check)
