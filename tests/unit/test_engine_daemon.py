"""The private daemon's own paths: what is taken for ours, and what is written for Debian 12."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from process_support import call, own_mounts
from tpuforge import host, mirrors
from tpuforge.console import Progress
from tpuforge.errors import ForgeError
from tpuforge.images import daemon
from tpuforge.paths import ROOT


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path))
    return tmp_path


def test_a_deep_out_folder_gets_a_short_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / ("d" * 90)))
    assert daemon.run_folder().parent == Path("/run")
    assert len(os.fsencode(daemon.run_folder() / "exec/containerd/containerd.sock.ttrpc")) <= 107
    monkeypatch.setattr(daemon, "folder", lambda: Path("/srv/out/engine"))
    assert daemon.run_folder() == Path("/srv/out/engine/run")


def test_only_this_daemons_processes_are_ours(out: Path) -> None:
    engine, runs = out / "engine", daemon.run_folder()
    ours = daemon._is_ours
    assert ours(["/usr/sbin/dockerd", f"--config-file={engine}/daemon.json"])
    assert ours(["containerd", "--config", f"{runs}/exec/containerd/containerd.toml"])
    assert not ours(["/usr/sbin/dockerd", "--config-file=/etc/docker/daemon.json"])
    assert not ours(["dockerd"])
    assert not ours(["containerd", "--config", "/etc/containerd/config.toml"])
    assert not ours(["vim", f"--config-file={engine}/daemon.json"])
    assert not ours([])


def test_a_stale_process_id_is_not_taken_for_a_daemon(out: Path) -> None:
    (out / "engine").mkdir()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (out / "engine" / "dockerd.pid").write_text(str(child.pid))
        assert daemon.running_pid() is None
        with Progress("test", quiet=True) as progress:
            assert daemon.end_all(progress) is False
        assert child.poll() is None, "a stranger's process was ended"
    finally:
        child.kill()
        child.wait()
    assert not (out / "engine" / "dockerd.pid").exists()


def test_debian_12_takes_docker_and_nothing_else_from_13(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[list[str]] = []
    monkeypatch.setattr(daemon, "usable_dockerd", lambda: "/usr/sbin/dockerd")
    monkeypatch.setattr(host, "_APT", out / "apt")
    monkeypatch.setattr(host, "apt_install", lambda names, progress: installed.append([*names]))
    monkeypatch.setattr(daemon, "which", lambda name: "")
    monkeypatch.setattr(daemon, "can_install", lambda: True)
    monkeypatch.setattr(mirrors, "os_release", lambda: {"ID": "debian", "VERSION_ID": "12"})
    monkeypatch.setattr(
        mirrors, "find_mirror", lambda: mirrors.Mirror("http://m.example/d", "", "")
    )
    monkeypatch.setattr(mirrors, "keyring", lambda: Path("/k.gpg"))
    monkeypatch.setattr(daemon, "apt_install", lambda names, progress: installed.append([*names]))
    with Progress("test", quiet=True) as progress:
        daemon.ensure_packages(progress)
    assert "runc" not in installed[-1]
    assert {"docker.io", "docker-cli", "docker-buildx", "containerd"} <= set(installed[-1])
    sources = (out / "apt" / "sources.list.d" / "tpuforge-docker.sources").read_text()
    assert "URIs: http://m.example/d\nSuites: trixie\n" in sources
    pins = (out / "apt" / "preferences.d" / "tpuforge-docker").read_text().split("\n\n")
    assert "Package: *\nPin: release n=trixie\nPin-Priority: 100" in pins[0]
    assert pins[1].startswith("Package: docker.io docker-cli docker-buildx containerd\n")
    assert pins[1].endswith("Pin-Priority: 990\n")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "is left off; by hand: systemctl enable --now docker.service docker.socket"),
        (1, "could not be turned off (no bus); by hand: systemctl disable docker.service"),
        # Docker was there before
        (0, ""),
    ],
)
def test_the_service_is_left_off_only_where_docker_was_installed_here(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    code: int,
    said: str,
) -> None:
    """A Docker that was there before keeps its service, also when the client had to be added."""
    asked = out / "asked"
    systemctl = out / "systemctl"
    words = f"[ {code} = 0 ] || echo no bus\nexit {code}\n"
    systemctl.write_text(f'#!/bin/sh\necho "$@" >{asked}\n{words}')
    systemctl.chmod(0o755)
    programs = {"systemctl": str(systemctl), "dockerd": "" if said else "/usr/sbin/dockerd"}
    monkeypatch.setattr(daemon, "which", lambda name: programs.get(name, ""))
    monkeypatch.setattr(daemon, "usable_dockerd", lambda: "/usr/sbin/dockerd")
    monkeypatch.setattr(daemon, "can_install", lambda: True)
    monkeypatch.setattr(mirrors, "os_release", lambda: {"ID": "debian", "VERSION_ID": "13"})
    monkeypatch.setattr(daemon, "apt_install", lambda names, progress: None)
    with Progress("test") as progress:
        daemon.ensure_packages(progress)
    printed = " ".join(capfd.readouterr().err.split())
    if said:
        assert asked.read_text() == "disable docker.service docker.socket\n"
        assert said in printed
    else:
        assert not asked.exists()
        assert "service" not in printed


def test_an_old_dockerd_is_not_replaced_without_asking(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = out / "dockerd"
    old.write_text("#!/bin/sh\necho Docker version 20.10.24+dfsg1, build 297e128\n")
    old.chmod(0o755)
    monkeypatch.setattr(daemon, "which", lambda name: str(old))
    with Progress("test", quiet=True) as progress, pytest.raises(ForgeError) as caught:
        daemon.ensure_packages(progress)
    assert "is older than 26" in caught.value.found
    assert caught.value.exit_code == 2


def test_mounts_are_found_below_a_folder_only() -> None:
    assert Path("/proc") in host.mounts_below(Path("/proc"))
    assert host.mounts_below(Path("/proc/sy")) == []
    deepest_first = [len(str(path)) for path in host.mounts_below(Path("/"))]
    assert deepest_first == sorted(deepest_first, reverse=True)


def test_a_mount_whose_name_is_of_another_encoding_is_seen() -> None:
    """Such as a stick with a Latin-1 name, mounted by a desktop: it is in every list of mounts."""
    code = (
        "import os, subprocess, tempfile; from pathlib import Path; from tpuforge import host\n"
        "top = Path(tempfile.mkdtemp()); point = top / os.fsdecode(b'a\\xe4 \\xc3\\xa4\\nb')\n"
        "point.mkdir(); subprocess.run(['mount', '-t', 'tmpfs', 'none', point], check=True)\n"
        "assert host.mounts_below(top) == [point], host.mounts_below(top)\n"
        "assert host.unmount_below(top) == 1\n"
        "host.remove_tree(top); assert not top.exists()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = call([*own_mounts(), sys.executable, "-c", code], env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["folder", "file", "link", "dangling link", "nothing"])
def test_whatever_is_in_the_place_of_a_tree_is_removed_and_nothing_else(
    kind: str, tmp_path: Path
) -> None:
    other, place = tmp_path / "other", tmp_path / "place"
    (other / "inner").mkdir(parents=True)
    if kind == "folder":
        (place / "inner").mkdir(parents=True)
    elif kind == "file":
        place.write_bytes(b"")
    elif kind != "nothing":
        place.symlink_to(other if kind == "link" else tmp_path / "nowhere")
    host.remove_tree(place)
    assert not os.path.lexists(place)
    assert (other / "inner").is_dir()


def test_what_a_killed_probe_of_the_file_system_left_is_removed(out: Path) -> None:
    (out / "engine" / ".overlay-old" / "merged").mkdir(parents=True)
    with Progress("test", quiet=True) as progress:
        daemon.end_all(progress)
    assert list((out / "engine").iterdir()) == []
