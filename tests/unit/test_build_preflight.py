"""What a machine lacks is found before the build, with a figure and what mends it."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from build_support import free_port
from tpuforge.build import preflight
from tpuforge.build.preflight import Figure, Needs, hosts_of, measure
from tpuforge.pins import Machine

SMALL = Machine(disk_gb=0, memory_gb=1, cores=1)


@pytest.fixture
def door() -> Iterator[tuple[str, int]]:
    """A port that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


@pytest.fixture
def needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Needs:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return Needs(tmp_path / "not" / "there", SMALL, "2.17")


def figures(needs: Needs) -> dict[str, Figure]:
    return {figure.name: figure for figure in measure(needs)}


def test_a_machine_that_has_it_all(needs: Needs, door: tuple[str, int]) -> None:
    found = figures(replace(needs, git="to fetch", hosts={door: "the source"}))
    assert list(found) == [
        *("disk", "memory", "cores", "glibc", "/dev/shm", "git", "network", "credentials")
    ]
    assert [figure.line for figure in found.values() if not figure.ok] == []
    assert found["glibc"].found == os.confstr("CS_GNU_LIBC_VERSION").split()[1]
    assert "1 host, for the source" in found["network"].wanted


def test_a_machine_that_is_small_is_told_so_and_not_stopped(
    needs: Needs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    found = figures(replace(needs, machine=Machine(10**6, 10**5, 16)))
    for name in ("disk", "memory", "cores"):
        assert not found[name].ok
        assert not found[name].stops
        assert found[name].remedy
    assert "--cache DIR" in found["disk"].line
    assert found["memory"].line.endswith("--jobs 1")
    assert found["cores"].line.startswith("low  cores       2 (wanted: 16")


def test_memory_that_is_shared_by_fewer_cores_is_enough(
    needs: Needs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 5 * 10**9}.get)
    monkeypatch.setattr(preflight, "_CGROUP", Path("/none"))
    for cores, ok in ((2, True), (3, False)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=cores: set(range(count)))
        assert figures(replace(needs, machine=Machine(0, 32, 16)))["memory"].ok is ok


def test_limits_of_a_container_count(
    needs: Needs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("500000000\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    found = figures(replace(needs, machine=Machine(0, 32, 16)))
    assert found["memory"].found == "500.0 MB"
    assert found["cores"].found == "1"
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    found = figures(replace(needs, machine=Machine(0, 32, 16)))
    assert found["memory"].found != "500.0 MB"
    assert found["cores"].found == str(len(os.sched_getaffinity(0)))


def test_a_disk_that_is_full_stops_the_build(needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 9 * 10**8))
    disk = figures(replace(needs, machine=Machine(100, 1, 1)))["disk"]
    assert disk.stops
    assert disk.line.startswith("STOP disk        900.0 MB free in ")


def test_glibc_decides_on_the_host_alone(needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    old = figures(replace(needs, glibc="9.99"))["glibc"]
    assert (old.ok, old.stops) == (False, True)
    assert "--where container" in old.remedy
    assert figures(replace(needs, glibc=None))["glibc"].ok
    # 2.4 is older than 2.31
    monkeypatch.setattr(os, "confstr", lambda _: "glibc 2.4")
    assert not figures(replace(needs, glibc="2.31"))["glibc"].ok

    def none(_: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", none)
    assert figures(replace(needs, glibc="2.31"))["glibc"].found == "another C library"


def test_git_and_dev_shm(needs: Needs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(preflight, "_SHM", tmp_path / "none")
    assert figures(needs)["git"].ok
    found = figures(replace(needs, git="to fetch the source"))
    assert found["git"].line == (
        "STOP git         not on PATH (wanted: to fetch the source); install git"
    )
    assert not found[str(tmp_path / "none")].ok
    assert not found[str(tmp_path / "none")].stops


def test_hosts_that_do_not_answer(needs: Needs, door: tuple[str, int]) -> None:
    dead = ("127.0.0.1", free_port())
    # packets to a network that is kept for documentation go nowhere, and such a name is nobody's
    silent, nobody = ("192.0.2.1", 443), ("nobody.invalid", 443)
    began = time.monotonic()
    found = figures(
        replace(
            needs,
            hosts={door: "the source", dead: "the remote cache"},
            helpful={door: "MODULE.bazel", silent: "MODULE.bazel", nobody: "MODULE.bazel"},
        )
    )
    assert time.monotonic() - began < 2
    assert found["network"].stops
    assert found["network"].found == "no answer from 127.0.0.1 (Connection refused)"
    assert found["network"].wanted == "2 hosts, for the remote cache, the source"
    assert not found["downloads"].ok
    assert not found["downloads"].stops
    assert "192.0.2.1" in found["downloads"].found
    assert "nobody.invalid" in found["downloads"].found


def test_behind_a_proxy_the_proxy_is_asked(
    needs: Needs, door: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = replace(needs, hosts={("nobody.invalid", 443): "the source"})
    assert not figures(wanted)["network"].ok
    monkeypatch.setenv("https_proxy", f"http://me:secret@{door[0]}:{door[1]}")
    assert figures(wanted)["network"].ok
    monkeypatch.setenv("no_proxy", ".invalid")
    assert not figures(wanted)["network"].ok
    assert "secret" not in figures(wanted)["network"].line


def test_credentials_only_if_asked_for(needs: Needs, tmp_path: Path) -> None:
    assert figures(needs)["credentials"].found == "none"
    file = tmp_path / "key.json"
    bad = figures(replace(needs, credentials=file))["credentials"]
    assert (bad.ok, bad.stops) == (False, True)
    file.write_text("{}")
    assert figures(replace(needs, credentials=file))["credentials"].ok


def test_the_hosts_that_a_source_names(tmp_path: Path) -> None:
    (tmp_path / "MODULE.bazel").write_text(
        '# see https://docs.example\nurls = ["https://one.example/a", "https://two.example/b"]\n'
    )
    (tmp_path / "bazel").mkdir()
    (tmp_path / "bazel" / "x.bzl").write_text('url = "https://one.example:443/c"\n')
    (tmp_path / "WORKSPACE").write_bytes(b"\xff")
    assert hosts_of(tmp_path) == {
        ("one.example", 443): "MODULE.bazel",
        ("two.example", 443): "MODULE.bazel",
    }


@pytest.mark.timeout(20)
def test_files_of_a_workspace_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "MODULE.bazel")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "zero.bzl").symlink_to("/dev/zero")
    (tmp_path / "WORKSPACE").write_text("".join(f"https://h{n}.invalid/ " for n in range(5000)))
    assert len(preflight.hosts_of(tmp_path)) == 64


def test_a_host_whose_name_is_none() -> None:
    failed = preflight._unreachable([("a" * 70 + ".invalid", 443), ("a..b", 443)])
    assert len(failed) == 2
    assert "no answer in time" not in failed.values()
