"""What a killed build leaves, told by processes that look like Bazel's, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from process_support import wait_for
from tpuforge.build import leftovers

# a server in a session of its own; an action below it in yet another, which does not mind TERM
SERVER = """
import os, subprocess, sys, time
base = sys.argv[1]
action = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", action], cwd=base, start_new_session=True)
os.makedirs(base + "/server", exist_ok=True)
with open(base + "/server/server.pid.txt", "w") as file:
    file.write(str(os.getpid()))
with open(base + "/action", "w") as file:
    file.write(str(child.pid))
time.sleep(60)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    children: list[subprocess.Popen[bytes]] = []
    yield children
    for child in children:
        child.kill()
        child.wait()


def serve(work: Path, started: list[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """The process ids of a server for a folder, and of its action."""
    base = work / "root" / "0123"
    base.mkdir(parents=True)
    words = [sys.executable, "-c", SERVER, str(base)]
    started.append(subprocess.Popen(words, start_new_session=True))
    wait_for(lambda: (base / "action").exists() and (base / "action").read_text() != "")
    return started[-1].pid, int((base / "action").read_text())


def alive(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_server_and_its_action_are_ended(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    server, action = serve(tmp_path, started)
    assert leftovers.servers(tmp_path) == [server]
    leftovers.end_all(tmp_path)
    assert not alive(server)
    assert not alive(action)
    assert leftovers.servers(tmp_path) == []


def test_a_client_is_told_by_the_folder_it_was_given(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    for folder in ("mine", "other"):
        words = ["sh", "-c", "sleep 60; true", f"--output_user_root={tmp_path / folder / 'root'}"]
        started.append(subprocess.Popen(words))
    mine, other = started
    leftovers.end_all(tmp_path / "mine")
    assert mine.wait(5) == -signal.SIGKILL
    assert other.poll() is None


def test_a_process_that_got_the_number_of_a_server_is_left_alone(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    started.append(subprocess.Popen(["sleep", "60"], start_new_session=True, cwd="/"))
    pid_file = tmp_path / "root" / "0123" / "server" / "server.pid.txt"
    pid_file.parent.mkdir(parents=True)
    for text in (str(started[0].pid), "", "no number"):
        pid_file.write_text(text)
        leftovers.end_all(tmp_path)
        assert started[0].poll() is None


GUARDED = """
import sys, time
from pathlib import Path
from tpuforge.build import leftovers
from tpuforge.paths import exclusive
work = Path(sys.argv[1])
with exclusive(str(work / leftovers.LOCK)), leftovers.guarded(
    work, work / "events.json", ["touch", str(work / "last")]
):
    print("in", flush=True)
    if sys.argv[2] == "wait":
        time.sleep(60)
"""


def guarded(work: Path, how: str) -> subprocess.Popen[str]:
    env = os.environ | {
        "PYTHONPATH": str(Path(leftovers.__file__).parents[2]),
        "TPUFORGE_OUT": str(work),
    }
    return subprocess.Popen(
        [sys.executable, "-c", GUARDED, str(work), how], env=env, stdout=subprocess.PIPE, text=True
    )


def guards(work: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"tpuforge.build.leftovers" in words and os.fsencode(work) in words:
            found.append(int(path.parent.name))
    return found


def test_the_guard_of_a_killed_run(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    server, action = serve(tmp_path, started)
    (tmp_path / "events.json").write_text("secret")
    child = guarded(tmp_path, "wait")
    assert child.stdout is not None
    assert child.stdout.readline() == "in\n"
    wait_for(lambda: guards(tmp_path) != [])
    child.kill()
    child.wait()
    wait_for(lambda: not alive(server) and not alive(action))
    wait_for(lambda: guards(tmp_path) == [])
    assert not (tmp_path / "events.json").exists()
    assert (tmp_path / "last").exists()
    child.stdout.close()


def test_the_guard_of_a_run_that_ends_in_order(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    server, _ = serve(tmp_path, started)
    child = guarded(tmp_path, "end")
    began = time.monotonic()
    child.communicate(timeout=20)
    assert child.returncode == 0
    assert time.monotonic() - began < 20
    assert guards(tmp_path) == []
    # the run itself ends what it has started
    assert alive(server)
    assert not (tmp_path / "last").exists()
    leftovers.end_all(tmp_path)


def test_the_guard_gives_way_to_the_next_run(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    server, _ = serve(tmp_path, started)
    child = guarded(tmp_path, "wait")
    assert child.stdout is not None
    assert child.stdout.readline() == "in\n"
    wait_for(lambda: guards(tmp_path) != [])
    # stopped, so that the next run is there first
    (guard,) = guards(tmp_path)
    os.kill(guard, signal.SIGSTOP)
    child.kill()
    child.wait()
    child.stdout.close()
    following = guarded(tmp_path, "wait")
    assert following.stdout is not None
    assert following.stdout.readline() == "in\n"
    wait_for(lambda: len(guards(tmp_path)) == 2)
    os.kill(guard, signal.SIGCONT)
    wait_for(lambda: guard not in guards(tmp_path))
    assert alive(server)
    following.kill()
    following.wait()
    following.stdout.close()
    wait_for(lambda: not alive(server))
