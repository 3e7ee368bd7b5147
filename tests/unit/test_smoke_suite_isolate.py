"""A process of its own: results, crashes, time limits, memory, and nothing left behind."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from smoke import isolate


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_value_comes_back(scratch: Path) -> None:
    ended = isolate.run(math.sqrt, 2.25, timeout=30)
    assert (ended.value, ended.error, ended.kind) == (1.5, None, None)
    assert 0 < ended.seconds < 30
    assert 5_000_000 < ended.peak_memory_bytes < 500_000_000
    assert list(scratch.iterdir()) == []


def test_an_exception_is_told_by_its_name() -> None:
    ended = isolate.run(math.sqrt, -1, timeout=30)
    assert ended.value is None
    assert (ended.kind, ended.error) == ("ValueError", "ValueError: math domain error")
    assert ended.story == ended.error
    assert "Traceback" in ended.output


def test_a_value_that_is_not_json_is_an_error() -> None:
    assert isolate.run(os.urandom, 4, timeout=30).kind == "TypeError"


def test_an_aborted_process_is_told_by_its_signal(scratch: Path) -> None:
    ended = isolate.run(os.abort, timeout=30)
    # nothing of the stack that Python then writes is taken for the process's last words
    assert (ended.kind, ended.error) == ("signal", "the process was ended by SIGABRT")
    assert "Fatal Python error" in ended.output
    assert "SIGABRT" in ended.story
    assert list(scratch.iterdir()) == []


def test_a_kill_from_outside_is_told_apart() -> None:
    ended = isolate.run(signal.raise_signal, int(signal.SIGKILL), timeout=30)
    assert ended.kind == "killed"
    assert ended.error is not None
    assert "memory limit" in ended.error


def test_a_process_that_leaves_early_has_no_result() -> None:
    ended = isolate.run(os._exit, 0, timeout=30)
    assert (ended.kind, ended.error) == ("exit", "the process ended with exit code 0 and no result")


def test_a_time_limit_ends_the_whole_session(scratch: Path) -> None:
    started = time.monotonic()
    ended = isolate.run(os.system, "sleep 321 & sleep 321", timeout=1)
    assert time.monotonic() - started < 10
    assert (ended.kind, ended.error) == ("timeout", "not done after 1 s; ended")
    assert not _running("sleep 321")
    assert list(scratch.iterdir()) == []


def test_what_a_finished_child_started_is_ended_too() -> None:
    ended = isolate.run(os.system, "sleep 322 &", timeout=30)
    assert ended.value == 0
    assert not _running("sleep 322")


def test_variables_are_set_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPUFORGE_TEST_A", "outer")
    monkeypatch.setenv("TPUFORGE_TEST_B", "outer")
    env = {"TPUFORGE_TEST_A": "inner", "TPUFORGE_TEST_B": None}
    assert isolate.run(os.getenv, "TPUFORGE_TEST_A", timeout=30, env=env).value == "inner"
    assert isolate.run(os.getenv, "TPUFORGE_TEST_B", timeout=30, env=env).value is None


def test_a_result_larger_than_a_pipe_comes_back() -> None:
    ended = isolate.run(os.path.join, "/", "x" * 100_000, timeout=30)
    assert ended.value == "/" + "x" * 100_000


def test_the_peak_is_that_of_the_largest_process() -> None:
    # the child itself stays small: the process that it waits for is the large one
    command = "python3 -c 'x = bytearray(300_000_000)'"
    ended = isolate.run(os.system, command, timeout=60)
    assert ended.value == 0
    assert ended.peak_memory_bytes > 300_000_000


def _running(words: str) -> bool:
    """Whether a process with these words lives; it may take the kernel a moment."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _there(path)]
        if not any(words.encode().replace(b" ", b"\0") in line for line in lines):
            return False
        time.sleep(0.05)
    return True


def _there(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True
