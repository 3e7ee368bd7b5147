"""The base under fire: damaged packages, a mirror that moved on or lies, a kill in the middle.

Only mmdebstrap is a stand-in here (``tests/base_support.py``); apt and the mirror are real.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from base_support import DEAD, LOCK, base, borrow_debs, checkout, environment, stand_in
from process_support import call, own_mounts, wait_for
from server_support import Handler, serving
from tpuforge import mirrors
from tpuforge.console import Progress
from tpuforge.errors import ForgeError
from tpuforge.images import debian
from tpuforge.paths import ROOT, out_dir, sha256_file
from tpuforge.pins import load


@pytest.fixture(scope="module")
def fetched() -> Path:
    """The project's own out folder, with every locked package in it."""
    real = Path(os.environ.get("TPUFORGE_OUT") or out_dir())
    have = {path.parent.name for path in real.glob("debs/*/*.deb")}
    wanted = set(re.findall(r"^([0-9a-f]{64})  ", LOCK.read_text(encoding="utf-8"), re.MULTILINE))
    if not wanted <= have:
        code, output = base(environment(ROOT, real), timeout=600)
        assert code == 0, output
    return real


def record(out: Path) -> dict[str, object]:
    found = json.loads((out / "base" / "bookworm.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def test_a_base_is_made_once_and_repaired_when_damaged(fetched: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    borrow_debs(fetched, out)
    env = environment(ROOT, out, stand_in(tmp_path / "bin"), TPUFORGE_DEBIAN_MIRROR=DEAD)
    code, output = base(env)
    assert code == 0, output
    first = record(out)
    code, output = base(env)
    assert code == 0
    assert "nothing to do" in output
    layer = out / str(first["layout"]) / "blobs" / "sha256" / str(first["tar_sha256"])
    data = bytearray(layer.read_bytes())
    data[600] ^= 1
    layer.write_bytes(data)
    code, output = base(env)
    assert code == 0
    assert "the base is damaged, making it again" in output
    assert "base: done in" in output
    assert record(out) == first
    assert layer.read_bytes() != bytes(data)


def test_two_sets_of_one_suite_live_side_by_side(fetched: Path, tmp_path: Path) -> None:
    code, output = base(environment(ROOT, fetched), "--suite", "bookworm-builder", timeout=600)
    assert code == 0, output
    out = tmp_path / "out"
    borrow_debs(fetched, out)
    env = environment(ROOT, out, stand_in(tmp_path / "bin"), TPUFORGE_DEBIAN_MIRROR=DEAD)
    for words in ((), ("--suite", "bookworm-builder")):
        code, output = base(env, *words)
        assert code == 0, output
    # made again, the one whose name begins the other's leaves the other alone
    (out / "base" / "bookworm.json").unlink()
    code, output = base(env)
    assert code == 0, output
    code, output = base(env, "--suite", "bookworm-builder")
    assert code == 0
    assert "nothing to do" in output
    folders = sorted(path.name[:-13] for path in (out / "base").iterdir() if path.is_dir())
    assert folders == ["bookworm", "bookworm-builder"]


def test_a_flipped_byte_in_a_package_is_never_used(fetched: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    borrow_debs(fetched, out)
    # other suites have a package of that name too
    (locked,) = (one for one in debian.read_deb_lock(LOCK).debs if one.name == "hostname")
    deb = out / "debs" / locked.sha256 / locked.file
    data = bytearray(deb.read_bytes())
    data[-1] ^= 1
    deb.unlink()
    deb.write_bytes(data)
    env = environment(ROOT, out, stand_in(tmp_path / "bin"), TPUFORGE_DEBIAN_MIRROR=DEAD)
    started = time.monotonic()
    code, output = base(env)
    assert time.monotonic() - started < 60
    assert code == 2
    assert re.search(r"hostname_\S+ in out/debs is damaged", output)
    assert "does not answer" in output
    assert "set TPUFORGE_DEBIAN_MIRROR" in output
    assert not (out / "base" / "bookworm.json").exists()
    # with a mirror that answers, the good file comes back; what a killed fetch left goes
    (out / "debs" / ".partial-old" / "half").mkdir(parents=True)
    del env["TPUFORGE_DEBIAN_MIRROR"]
    code, output = base(env)
    assert code == 0, output
    assert deb.read_bytes() != bytes(data)
    assert not list((out / "debs").glob(".partial-*"))


def test_a_mirror_that_sends_other_bytes_than_locked_is_refused(
    fetched: Path, tmp_path: Path
) -> None:
    text = re.sub(r"[0-9a-f]{64}(?=  hostname_)", "0" * 64, LOCK.read_text(encoding="utf-8"))
    root = checkout(tmp_path / "tree", lock=text)
    out = tmp_path / "out"
    borrow_debs(fetched, out)
    code, output = base(environment(root, out, stand_in(tmp_path / "bin")))
    assert code == 1
    assert re.search(r"hostname_\S+ from the mirror has the digest [0-9a-f]{64}", output)
    assert f"{'0' * 64}, as locked" in output
    assert not list(out.glob("debs/*/hostname_3.23+nmu1_amd64.deb.*"))
    assert not (out / "debs" / ("0" * 64)).exists()


def test_a_version_that_left_the_mirror(fetched: Path, tmp_path: Path) -> None:
    """A release refuses; the main job takes today's packages and says so, outside the tree."""
    text = re.sub(
        r"[0-9a-f]{64}  hostname_[^_]+_", f"{'1' * 64}  hostname_0.1_", LOCK.read_text("utf-8")
    )
    root = checkout(tmp_path / "tree", lock=text)
    out = tmp_path / "out"
    borrow_debs(fetched, out)
    env = environment(
        root, out, stand_in(tmp_path / "bin"), TPUFORGE_DEBIAN_SNAPSHOT="http://127.0.0.1:9"
    )
    code, output = base(env, "--release")
    assert code == 1
    assert "locked packages can no longer be had: hostname 0.1" in output
    assert "the snapshot archive does not answer" in output
    assert not (out / "base" / "bookworm.json").exists()

    code, output = base(env)
    assert code == 0, output
    assert "THE BASE IS NOT THE LOCKED ONE" in output
    drift = record(out)["drift"]
    assert isinstance(drift, list)
    assert any(line.startswith("hostname: 0.1 -> ") for line in drift)
    assert "hostname_0.1_" not in (out / "base" / "bookworm.lock").read_text(encoding="utf-8")
    assert (root / "lock" / "debian" / "bookworm.lock").read_text(encoding="utf-8") == text
    result = json.loads((out / "results" / "base.json").read_text(encoding="utf-8"))
    assert "hostname: 0.1" in result["notes"][0]

    code, output = base(env, "--release")
    assert code == 1, "a drifted base that is there must not pass for a release"


def test_a_base_with_another_package_than_locked_is_refused(fetched: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    borrow_debs(fetched, out)
    more = 'status += "\\n\\nPackage: stowaway\\nStatus: install ok installed\\nVersion: 1\\n"'
    env = environment(ROOT, out, stand_in(tmp_path / "bin", more), TPUFORGE_DEBIAN_MIRROR=DEAD)
    code, output = base(env)
    assert code == 1
    assert "+stowaway=1" in output
    assert not (out / "base" / "bookworm.json").exists()


def test_mmdebstrap_that_fails_leaves_nothing_behind(fetched: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    borrow_debs(fetched, out)
    died = 'print("I: begun\\nE: first\\nE: second", file=sys.stderr); sys.exit(25)'
    code, output = base(environment(ROOT, out, stand_in(tmp_path / "bin", died)))
    assert code == 2
    # of many bases only this line is shown
    assert "base: mmdebstrap failed with exit code 25: E: first\n" in output
    assert f"read {out}/base/bookworm.log" in output
    assert [path.name for path in (out / "base").iterdir()] == ["bookworm.log"]


def test_a_killed_build_is_made_again_from_nothing(fetched: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    borrow_debs(fetched, out)
    slow = stand_in(tmp_path / "slow", "open(target, 'wb').write(b'half'); time.sleep(60)")
    child = subprocess.Popen(
        [sys.executable, "-m", "tpuforge.images.base"],
        env=environment(ROOT, out, slow),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: list(out.glob("base/.work-*/raw.tar")))
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=10)
    assert list(out.glob("base/.work-*/raw.tar"))
    assert not (out / "base" / "bookworm.json").exists()
    code, output = base(environment(ROOT, out, stand_in(tmp_path / "bin")))
    assert code == 0, output
    assert not list(out.glob("base/.work-*"))
    assert (out / str(record(out)["layout"]) / "index.json").is_file()


def test_a_full_disk_is_said_before_and_while_the_base_is_made(
    fetched: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    # once its tar is whole it fills the disk, and the layer finds no room
    filler = """
with open(target + ".fill", "wb") as file:
    try:
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    except OSError:
        pass
"""
    script = (
        'mount -t tmpfs -o size=1m none "$1" || exit 99\n'
        'shift; "$@"; echo "code $?" >&2\n'
        'mount -o remount,size=560m none "$TPUFORGE_OUT"\n'
        'cp -R "$DEBS" "$TPUFORGE_OUT/"; "$@"; echo "code $?" >&2\n'
        'find "$TPUFORGE_OUT/base" -mindepth 1 ! -name bookworm.log >&2'
    )
    for deb in debian.read_deb_lock(LOCK).debs:
        copy = tmp_path / "debs" / deb.sha256 / deb.file
        copy.parent.mkdir(parents=True)
        copy.hardlink_to(fetched / "debs" / deb.sha256 / deb.file)
    env = environment(ROOT, out, stand_in(tmp_path / "bin", after=filler))
    verb = (sys.executable, "-m", "tpuforge.images.base")
    done = call(
        [*own_mounts(), "sh", "-c", script, "sh", str(out), *verb],
        env=env | {"DEBS": str(tmp_path / "debs"), "TPUFORGE_DEBIAN_MIRROR": DEAD},
        timeout=120,
    )
    early, late, left = done.stderr.split("code 2")
    assert f"no space left in {out}: 1" in early
    assert "set TPUFORGE_OUT to a larger disk" in early
    assert "No space left on device" in late
    assert "free some space" in late
    # what was begun is gone, and the room that it took is free again
    assert left.split() == []


def test_a_keyring_older_than_the_suite_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Debian 11 that was never updated: it does not know who signs Debian 13."""
    old = Path("/usr/share/keyrings/debian-archive-bullseye-stable.gpg")
    if not old.is_file():
        pytest.skip(f"the keyring of this machine has no {old.name}")
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path))
    monkeypatch.setattr(mirrors, "keyring", lambda: old)
    with Progress("base", quiet=True) as progress, pytest.raises(ForgeError) as caught:
        debian.resolve(load().debian["trixie"], progress)
    assert "keyring here is too old" in caught.value.found
    assert "--only-upgrade debian-archive-keyring" in caught.value.mend


def test_no_mmdebstrap_and_no_root_names_both_ways(tmp_path: Path) -> None:
    """Without the right to install it, the message names the package and the other provider."""
    code = (
        "import os, sys; os.geteuid = lambda: 1000;"
        "from tpuforge.images import base;"
        "base.which = lambda name: '';"
        "sys.exit(base.main([]))"
    )
    done = call([sys.executable, "-c", code], env=environment(ROOT, tmp_path / "out"), timeout=60)
    assert done.returncode == 2
    assert "not installed: mmdebstrap" in done.stderr
    assert "sudo apt-get install mmdebstrap" in done.stderr
    assert "docker-image://" in done.stderr


class _Archive(Handler):
    """A snapshot archive that sends every question on to the mirror of this machine."""

    mirror: mirrors.Mirror

    def do_GET(self) -> None:
        kind, _, rest = self.path.removeprefix("/archive/").partition("/")
        home = {"debian": self.mirror.main, "debian-security": self.mirror.security}[kind]
        self.answer(302, Location=f"{home}/{rest.partition('/')[2]}")


def test_packages_that_left_the_mirror_come_from_the_snapshot_archive(
    fetched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive is a loopback server here; signatures and digests are Debian's own."""
    _Archive.mirror = mirrors.find_mirror()
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path))
    borrow_debs(fetched, tmp_path)
    lock = debian.read_deb_lock(LOCK)
    wanted = [deb for deb in lock.debs if deb.name in ("hostname", "libc6")]
    for deb in wanted:
        deb.stored.unlink()
    offers = debian.Apt.has

    def has(self: debian.Apt, debs: list[debian.Deb]) -> set[debian.Deb]:
        archive = "/archive/" in self._sources.read_text(encoding="utf-8")
        return offers(self, debs) if archive else set()

    monkeypatch.setattr(debian.Apt, "has", has)
    with serving(_Archive) as port, Progress("test", quiet=True) as progress:
        monkeypatch.setenv("TPUFORGE_DEBIAN_SNAPSHOT", f"http://127.0.0.1:{port}")
        assert debian.fetch(lock, progress) == []
    assert all(sha256_file(deb.stored) == deb.sha256 for deb in wanted)
