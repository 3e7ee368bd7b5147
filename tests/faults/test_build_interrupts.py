"""``build_wheel`` broken off at every kind of moment, starved of disk, and let down by its remote.

The real verb runs the real Bazelisk and a real Bazel on the small workspace of the tests. After
every end, in order or not: no process of the build is left, no half wheel, no build events, which
hold the environment; and the next run goes on from the caches.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bazel_support import GOOD, MODULE, arguments, get_bazel, make_workspace, set_command
from build_support import Checkout, kill, make_checkout
from process_support import disk_of, wait_for
from remote_support import FOR_OLD_BAZEL, serve_cache

SECRET = "sesame-8d1f"
# a proxy with a password is the one secret that a build has to be given; the rest stays outside
SECRETS = {
    "GITHUB_TOKEN": SECRET,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "HTTPS_PROXY": f"http://me:{SECRET}@127.0.0.1:9",
    "NO_PROXY": "127.0.0.1",
}
# an action that does not mind TERM, as a linker in the middle of its output may not
STUBBORN = "trap : TERM INT; touch {mark}; sleep 97 & wait; wait; cat ci/wheel/NAME"


# how patient the verb is with a slow machine; here nothing comes of a longer wait
PATIENCE = {
    "events.py": ("_FULL_S = 20.0", "_FULL_S = 5.0"),
    "bazelisk.py": ("_SHUTDOWN_TIMEOUT_S = 20.0", "_SHUTDOWN_TIMEOUT_S = 5.0"),
}
# most of these tests' time is the start of Bazel's server; one that optimises less starts sooner
STARTUP = "startup --host_jvm_args=-XX:TieredStopAtLevel=1 --host_jvm_args=-XX:+UseSerialGC\n"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    made = make_checkout(tmp_path_factory.mktemp("interrupts") / "checkout")
    for name, (ours, here) in PATIENCE.items():
        path = made.root / "src" / "tpuforge" / "build" / name
        text = path.read_text()
        assert text.count(ours) == 1
        path.write_text(text.replace(ours, here))
    return made


@pytest.fixture(scope="module")
def bazel(checkout: Checkout) -> Path:
    return get_bazel(checkout.root)


@pytest.fixture
def workspace(checkout: Checkout) -> Iterator[Path]:
    folder = make_workspace(checkout.root / "workspace")
    rc = folder / ".bazelrc"
    # as in TorchTPU's own source, which runs its actions without a sandbox
    rc.write_text(f"{rc.read_text()}build:no_rbe --spawn_strategy=standalone\n{STARTUP}")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def mark(checkout: Checkout) -> Iterator[Path]:
    """A file that a build makes when it has come to the moment of the test."""
    path = checkout.root / "begun"
    yield path
    path.unlink(missing_ok=True)


def at_work(folder: Path) -> list[str]:
    """Every process that is started in, or works in, a folder."""
    out = os.fsencode(folder)
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (process / "cmdline").read_bytes()
            if out in line or os.fsencode((process / "cwd").readlink()).startswith(out):
                found.append(line.replace(b"\0", b" ").decode())
    return found


def nothing_runs(checkout: Checkout) -> None:
    """Wait until the guard of a killed run has done its work."""
    wait_for(lambda: not at_work(checkout.out))


def nothing_is_left(checkout: Checkout, *, wheels: int = 0) -> None:
    assert at_work(checkout.out) == []
    assert list((checkout.out / "bazel").glob("run/*")) == []
    kept = checkout.out / "wheels"
    assert len(list(kept.glob("*.whl"))) == wheels
    assert list(kept.glob(".kept-*")) == []


def places_of(text: str, folder: Path) -> list[Path]:
    """The files below a folder that hold a text, also inside gzip."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            if data[:2] == b"\x1f\x8b":
                with contextlib.suppress(OSError, EOFError):
                    data = gzip.decompress(data)
            if text.encode() in data:
                found.append(path)
    return found


def start(checkout: Checkout, workspace: Path, bazel: Path, **env: str) -> subprocess.Popen[str]:
    return checkout.start(*arguments(workspace, bazel), module=MODULE, env=env)


def good_run(checkout: Checkout, workspace: Path, bazel: Path) -> str:
    """A run that has to end well; what it said."""
    done = checkout.run(*arguments(workspace, bazel), module=MODULE, timeout=120)
    assert done.returncode == 0, done.stderr
    nothing_is_left(checkout, wheels=1)
    return done.stdout


def interrupted(child: subprocess.Popen[str], *signals: signal.Signals) -> None:
    for number in signals:
        child.send_signal(number)
        time.sleep(0.2)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "interrupted; what was finished is kept" in err


def test_before_bazel_runs(checkout: Checkout, workspace: Path, bazel: Path) -> None:
    child = start(checkout, workspace, bazel)
    wait_for((checkout.out / "bazel" / ".lock").exists)
    interrupted(child, signal.SIGTERM)
    nothing_is_left(checkout)


def test_while_the_source_is_read(
    checkout: Checkout, workspace: Path, bazel: Path, mark: Path
) -> None:
    rule = workspace / "version.bzl"
    slow = f"ctx.execute(['sh', '-c', 'touch {mark}; sleep 97'])"
    text = rule.read_text()
    rule.write_text(text.replace("(ctx):\n", f"(ctx):\n    {slow}\n", 1))
    child = start(checkout, workspace, bazel)
    wait_for(mark.exists, 60)
    interrupted(child, signal.SIGTERM)
    nothing_is_left(checkout)


def test_during_an_action_twice_over(
    checkout: Checkout, workspace: Path, bazel: Path, mark: Path
) -> None:
    # the second Ctrl-C comes while the first one is being obeyed
    set_command(workspace, STUBBORN.format(mark=mark))
    child = start(checkout, workspace, bazel)
    wait_for(mark.exists, 60)
    interrupted(child, signal.SIGINT, signal.SIGINT)
    nothing_is_left(checkout)


def test_killed_during_an_action_then_again_from_the_caches(
    checkout: Checkout, workspace: Path, bazel: Path, mark: Path
) -> None:
    done_once = checkout.root / "first-step"
    package = workspace / "ci" / "wheel" / "BUILD"
    first = f"echo x >> {done_once}; echo > $@"
    step = f'genrule(name = "first", outs = ["first.txt"], cmd = "{first}")\n'
    needs = 'glob(["*.whl"]) + [":first"]'

    def wheel_by(command: str) -> None:
        set_command(workspace, command)
        package.write_text(package.read_text().replace('glob(["*.whl"])', needs) + step)

    wheel_by(STUBBORN.format(mark=mark))
    child = start(checkout, workspace, bazel, **SECRETS)
    wait_for(mark.exists, 60)
    assert any("server" in line for line in at_work(checkout.out))
    kill(child)
    # no next run was needed for that
    nothing_runs(checkout)
    nothing_is_left(checkout)
    assert places_of(SECRET, checkout.out) == []

    # the very next run, with nothing but the disk cache: what was done is not done again
    wheel_by(GOOD)
    for base in (checkout.out / "bazel" / "root").iterdir():
        if base.name != "install":
            subprocess.run(["chmod", "-R", "u+w", str(base)], check=True)
            shutil.rmtree(base)
    good_run(checkout, workspace, bazel)
    assert done_once.read_text() == "x\n"


def test_killed_while_the_wheel_is_copied(checkout: Checkout, workspace: Path, bazel: Path) -> None:
    kept = checkout.out / "wheels"
    shutil.rmtree(kept, ignore_errors=True)
    # large enough to be caught in the middle
    set_command(workspace, f"{GOOD}; head -c 150000000 /dev/zero")
    child = start(checkout, workspace, bazel)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in kept.glob(".kept-*/raw/*.whl")):
        assert time.monotonic() < deadline, child.communicate()
        time.sleep(0.002)
    kill(child)
    assert list(kept.glob("*.whl*")) == []
    assert len(list(kept.glob(".kept-*"))) == 1
    # a run that starts at once, beside the guard of the killed one
    set_command(workspace, GOOD)
    good_run(checkout, workspace, bazel)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, large enough for the preflight."""
    with disk_of(tmp_path / "disk", "100000m", lazy=True) as place:
        yield place


def resize(disk: Path, megabytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={megabytes}m", disk], check=True)


def test_a_disk_that_fills_up(
    checkout: Checkout, workspace: Path, bazel: Path, mark: Path, disk: Path
) -> None:
    go = checkout.root / "go-on"
    wait = f"touch {mark}; while ! test -e {go}; do sleep 0.1; done"
    set_command(workspace, f"{wait}; {GOOD}; head -c 40000000 /dev/zero")
    words = [*arguments(workspace, bazel), "--cache", str(disk / "cache")]
    out = disk / "out"
    # room for a part of the wheel; for the wheel and Bazel's own copy, but not for ours
    for room in (20, 100):
        child = checkout.start(*words, module=MODULE, env={"TPUFORGE_OUT": str(out)})
        wait_for(mark.exists, 60)
        resize(disk, shutil.disk_usage(disk).used // 1_048_576 + room)
        go.touch()
        _, err = child.communicate(timeout=120)
        assert child.returncode == 2, err
        # an action's output, or Bazel's log of it: whatever is written first finds no room; and
        # where what Bazel has to say about it does not either, it waits for ever, and we do not
        assert re.search(r"No space left on device|writing action log|\d k?B free in", err), err
        # Bazel's own end, or ours when it does not come to one; or what the system told us
        assert ("a disk is full" if room < 40 else "space for what is made") in err, err
        assert "free some space" in err
        assert len(err.splitlines()) < 60
        assert list(out.glob("wheels/*.whl")) == []
        assert list(out.glob("wheels/.kept-*")) == []
        assert at_work(disk) == []
        assert list((disk / "cache" / "run").iterdir()) == []
        resize(disk, 100_000)
        mark.unlink()
        go.unlink()


class Wire:
    """A connection to a port that can be cut."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.ends: list[socket.socket] = []
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.server.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self.server.accept()[0]
                far = socket.create_connection(("127.0.0.1", self.target))
                self.ends += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self.copy, args=(one, other), daemon=True).start()

    @staticmethod
    def copy(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)

    def cut(self) -> None:
        for end in [self.server, *self.ends]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_a_remote_cache_that_dies_in_the_middle(
    checkout: Checkout, workspace: Path, bazel: Path, mark: Path
) -> None:
    rc = workspace / ".bazelrc"
    rc.write_text(rc.read_text() + FOR_OLD_BAZEL)
    go = checkout.root / "go-on"
    set_command(
        workspace,
        f"touch {mark}; while ! test -e {go}; do sleep 0.1; done; {GOOD}",
    )
    with serve_cache() as cache:
        wire = Wire(cache.port)
        remote = ["--remote", f"cache=http://127.0.0.1:{wire.port}"]
        child = checkout.start(*arguments(workspace, bazel), *remote, module=MODULE)
        wait_for(mark.exists, 60)
        assert cache.misses, "the cache was asked before it died"
        wire.cut()
        go.touch()
        _, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert cache.puts == []
    nothing_is_left(checkout, wheels=1)
