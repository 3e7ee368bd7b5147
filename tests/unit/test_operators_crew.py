"""A crew of workers over tasks that crash, hang, raise and print."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import pytest
from smoke.operators.crew import Crew, CrewError, Ended

from process_support import wait_for

WORK = """
import ctypes, os, signal, sys, time
from pathlib import Path

def worker(folder):
    folder = Path(folder)
    def handle(task):
        what = task["do"]
        if what == "abort":
            print("E0000 something is wrong", file=sys.stderr)
            os.abort()
        if what == "abort once" and not (folder / "once").exists():
            (folder / "once").touch()
            os.abort()
        if what == "fault":
            ctypes.string_at(0)
        if what == "leave":
            os._exit(7)
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(600)
        if what == "raise":
            raise LookupError("no such thing")
        if what == "print":
            print('{"value": "printed"}', flush=True)
            return sys.stdin.read()
        if what == "odd":
            return object()
        return [task["number"], os.getpid()]
    return handle

def broken():
    raise ImportError("no module of that name")

def absent():
    os._exit(3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fakework.py").write_text(WORK)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


def crew(folder: Path, work: str = "worker", count: int = 2, limit: float = 20) -> Crew:
    arguments = [str(folder)] if work == "worker" else []
    env = {"PYTHONPATH": str(folder)}
    return Crew(f"fakework:{work}", arguments, count=count, limit=limit, env=env)


def test_tasks_are_shared_and_come_back_in_order(folder: Path) -> None:
    seen: list[int] = []
    tasks = [{"do": "count", "number": number} for number in range(40)]
    made = crew(folder)
    ends = made.do(tasks, lambda number, end: seen.append(number))
    assert [end.value[0] for end in ends] == list(range(40))
    assert {end.kind for end in ends} == {"done"}
    assert len({end.value[1] for end in ends}) <= 2
    assert sorted(seen) == list(range(40))
    assert made.restarts == 0
    assert 5_000_000 < made.peak_memory_bytes < 500_000_000
    assert list((folder / "tmp").iterdir()) == []


def test_a_crew_works_more_than_once(folder: Path) -> None:
    made = crew(folder)
    for _ in range(2):
        ends = made.do([{"do": "tell", "number": number} for number in range(3)])
        assert [end.value[0] for end in ends] == [0, 1, 2]


def test_only_the_task_that_ends_its_process_is_blamed(folder: Path) -> None:
    words = ["count", "abort", "count", "leave", "count", "killed", "raise", "fault"]
    made = crew(folder, count=1)
    ends = made.do([{"do": word, "number": number} for number, word in enumerate(words)])
    kinds = ["done", "signal", "done", "exit", "done", "killed", "raised", "signal"]
    assert [end.kind for end in ends] == kinds
    assert ends[1].message == "the process was ended by SIGABRT: E0000 something is wrong"
    assert ends[1].again
    assert "exit code 7" in ends[3].message
    assert "memory limit" in ends[5].message
    assert ends[6].message == "LookupError: no such thing"
    assert "SIGSEGV" in ends[7].message
    assert ends[0].value[0] == 0 and ends[4].value[0] == 4
    # every one that dies gets a second try
    assert made.restarts == 4


def test_a_task_that_dies_once_and_works_in_a_fresh_process_is_not_blamed(folder: Path) -> None:
    (end,) = crew(folder).do([{"do": "abort once", "number": 5}])
    assert (end.kind, end.value[0], end.again) == ("done", 5, True)


def test_a_task_that_hangs_is_ended_and_the_rest_goes_on(folder: Path) -> None:
    started = time.monotonic()
    tasks = [{"do": "hang", "number": 0}, {"do": "count", "number": 1}]
    ends = crew(folder, count=1, limit=1.5).do(tasks)
    assert [end.kind for end in ends] == ["timeout", "done"]
    assert ends[0].message == "not done after 2 s; ended"
    assert time.monotonic() - started < 20


def test_what_a_task_prints_or_reads_is_not_the_crews(folder: Path) -> None:
    tasks = [{"do": "print", "number": 0}, {"do": "count", "number": 1}, {"do": "odd"}]
    ends = crew(folder, count=1).do(tasks)
    assert ends[0] == Ended("", "done", "", ends[0].seconds)
    assert ends[1].value[0] == 1
    assert ends[2].kind == "raised"
    assert "not JSON serializable" in ends[2].message


@pytest.mark.parametrize(
    ("work", "words"),
    [("broken", "ImportError: no module of that name"), ("absent", "exit code 3"), ("nix", "nix")],
)
def test_a_crew_that_cannot_start_says_why(folder: Path, work: str, words: str) -> None:
    with pytest.raises(CrewError, match=words):
        crew(folder, work).do([{"do": "count", "number": 0}])
    assert list((folder / "tmp").iterdir()) == []


def test_an_interruption_leaves_no_process(folder: Path) -> None:
    made = crew(folder, limit=60)
    pids: list[int] = []
    # a server of another file's may still be ending
    before = set(threading.enumerate())

    def stop(number: int, end: Ended) -> None:
        pids.append(end.value[1])
        raise KeyboardInterrupt

    tasks = [{"do": "count", "number": 0}, {"do": "hang", "number": 1}]
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        made.do(tasks, stop)
    assert time.monotonic() - began < 30
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    wait_for(lambda: set(threading.enumerate()) <= before)
    assert list((folder / "tmp").iterdir()) == []
