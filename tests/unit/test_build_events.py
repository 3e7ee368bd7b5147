"""Bazel's build events: what is read from them, the likely cause of a failure, the live line.

The records in ``build_events/`` are what real Bazels said on the small workspace of the tests; see
``tests/record_build_events.py``.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from process_support import wait_for
from tpuforge.build import events as events_module
from tpuforge.build.checkout import TARGET
from tpuforge.build.events import (
    TAIL_LINES,
    Actions,
    Built,
    Cause,
    Follower,
    Standstill,
    cache_trouble,
    describe,
    explain,
    read_events,
)

RECORDS = Path(__file__).resolve().parent / "build_events"
VERSIONS = sorted(folder.name for folder in RECORDS.iterdir())
ABOUT_SOURCE = ("action", "flag", "config", "source")
# every recorded case, and the likely cause that is to be told
CAUSES = {
    "failed": "action",
    "killed": "memory",
    "compiler_killed": "memory",
    "full": "disk",
    "no_flag": "flag",
    "no_config": "config",
    "no_option": "line",
    "unreachable": "remote",
    "no_credentials": "credentials",
    "no_fetch": "fetch",
    "no_target": "source",
    "three_failed": "action",
    "interrupted": "interrupted",
    "server_killed": "server",
}


@dataclass
class Recorded:
    """One recorded build, read as the verb reads a real one."""

    built: Built
    output: str
    code: int

    @property
    def cause(self) -> Cause:
        return explain(self.built, self.output, self.code)

    @property
    def text(self) -> str:
        return describe(self.built, self.cause, self.output)


def recorded(version: str, case: str, folder: Path) -> Recorded:
    record: dict[str, Any] = json.loads((RECORDS / version / f"{case}.json").read_text())
    events = "\n".join(json.dumps(event) for event in record["events"]) + "\n"
    for number, (uri, text) in enumerate(record["files"].items()):
        file = folder / f"file-{number}"
        file.write_text(text)
        events = events.replace(f'"{uri}"', f'"{file.as_uri()}"')
    path = folder / "events.json"
    path.write_text(events)
    return Recorded(read_events(path), "\n".join(record["output"]), record["code"])


def pairs() -> list[tuple[str, str]]:
    return [(version, path.stem) for version in VERSIONS for path in (RECORDS / version).iterdir()]


def test_both_kinds_of_bazel_are_recorded() -> None:
    assert {version.partition(".")[0] for version in VERSIONS} == {"2", "7"}
    for version in VERSIONS:
        cases = {path.stem for path in (RECORDS / version).iterdir()}
        # a Bazel built without Google's library crashes where credentials are asked for
        assert cases | {"no_credentials"} == {*CAUSES, "good", "cached"}


@pytest.mark.parametrize(("version", "case"), sorted(pairs()))
def test_the_likely_cause(version: str, case: str, tmp_path: Path) -> None:
    one = recorded(version, case, tmp_path)
    if case in ("good", "cached"):
        assert (one.code, one.built.finished, one.built.exit_name) == (0, True, "SUCCESS")
        assert len(one.built.wheels) == 1
        return
    assert one.code != 0
    cause = one.cause
    assert cause.kind == CAUSES[case]
    assert cause.about_source == (cause.kind in ABOUT_SOURCE)
    assert cause.found
    assert cause.remedy
    assert len(one.text.splitlines()) <= TAIL_LINES + 4


@pytest.mark.parametrize("version", VERSIONS)
def test_the_failing_action(version: str, tmp_path: Path) -> None:
    one = recorded(version, "failed", tmp_path)
    lines = one.text.splitlines()
    # its own exit code, and not Bazel's for the kind of failure
    assert lines[0] == f"{TARGET} failed (Action, exit code 7)"
    assert lines[1] == "line 21 of 60"
    assert lines[TAIL_LINES] == "line 60 of 60"
    assert lines[TAIL_LINES + 1].startswith("likely cause: ")
    killed = recorded(version, "killed", tmp_path)
    assert killed.text.splitlines()[:2] == [
        f"{TARGET} failed (Action, ended by signal 9)",
        "(it wrote nothing)",
    ]
    assert "--jobs" in killed.cause.remedy
    three = recorded(version, "three_failed", tmp_path)
    assert three.built.failed == 3
    assert "(Genrule, exit code 3; 2 more failed)" in three.text


def test_an_action_that_never_ran(tmp_path: Path) -> None:
    one = recorded("7.7.1", "unreachable", tmp_path)
    assert one.text.splitlines()[:2] == [
        f"{TARGET} failed (Action)",
        "remote spawn failed: UNAVAILABLE: io exception",
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_name_of_what_is_wrong(version: str, tmp_path: Path) -> None:
    assert "wheel_commom" in recorded(version, "no_config", tmp_path).cause.found
    assert "--no_such_option" in recorded(version, "no_option", tmp_path).cause.found
    fetch = recorded(version, "no_fetch", tmp_path).cause.found
    assert "the external repository dep could not be fetched" in fetch
    assert "Connection refused" in fetch
    assert TARGET in recorded(version, "no_target", tmp_path).cause.found


@pytest.mark.parametrize("version", VERSIONS)
def test_cache_hits_are_counted(version: str, tmp_path: Path) -> None:
    assert recorded(version, "good", tmp_path).built.actions == Actions(11, 0, 0)
    cached = recorded(version, "cached", tmp_path).built.actions
    assert cached == Actions(11, 10, 0)
    assert cached.text == "11 actions: 10 from caches"
    assert Actions(5310, 3206, 12).text == "5,310 actions: 3,206 from caches, 12 on the remote"


def test_a_build_that_never_began() -> None:
    output = "2026/01/01 could not download Bazel: HTTP GET http://127.0.0.1:1/x failed"
    cause = explain(Built(False), output, 1)
    assert (cause.kind, cause.about_source) == ("bazel", False)
    assert "could not download Bazel" in cause.found
    assert explain(Built(False), "", 1).kind == "bazel"


def test_causes_without_an_action() -> None:
    begun = Built(finished=True, begun=True)
    for code, words, kind in (
        (33, "FATAL: bazel ran out of memory and crashed.", "memory"),
        (9, "Another command (pid=1) is running. Exiting immediately.", "lock"),
        (36, "ERROR: cannot write", "machine"),
        (39, "ERROR: lost inputs no longer available remotely", "remote"),
        (1, "WARNING: java.io.IOException: No space left on device", "disk"),
        (34, "ERROR: PERMISSION_DENIED: no", "credentials"),
        (1, "ERROR: something new", "unknown"),
    ):
        assert explain(begun, words, code).kind == kind
    assert "something new" in explain(begun, "ERROR: something new", 1).found


def test_credentials_in_what_an_action_says_are_not_shown(tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    said.write_text("GET https://me:sesame@example.org/x?sig=sesame\ntoken=sesame\n")
    path = events(
        tmp_path / "events.json",
        {
            "id": {"actionCompleted": {"label": "//a:b"}},
            "action": {"stderr": {"uri": said.as_uri()}, "type": "Genrule"},
        },
    )
    built = read_events(path)
    assert built.failure is not None
    assert "example.org" in built.failure.stderr
    assert "sesame" not in repr(built)


def test_a_huge_output_is_read_from_its_end(tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    said.write_text("x" * 3_000_000 + "\nthe end\n")
    action = {"stderr": {"uri": said.as_uri()}}
    path = events(
        tmp_path / "events.json",
        {"id": {"actionCompleted": {"primaryOutput": "bazel-out/x.o"}}, "action": action},
    )
    failure = read_events(path).failure
    assert failure is not None
    assert failure.label == "bazel-out/x.o"
    assert failure.stderr.endswith("\nthe end")
    assert len(failure.stderr) < 1000


def events(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(json.dumps(line, separators=(",", ":")) for line in lines) + "\n")
    return path


WHEEL = {"name": "ci/wheel/a.whl", "uri": "file:///out/a.whl", "digest": "d" * 64, "length": "6"}


def test_the_wheel_in_the_build_events(tmp_path: Path) -> None:
    path = events(
        tmp_path / "events.json",
        {"id": {"namedSet": {"id": "0"}}, "namedSetOfFiles": {"files": [WHEEL]}},
        {
            "id": {"namedSet": {"id": "1"}},
            "namedSetOfFiles": {
                "files": [{"name": "x.txt", "uri": "file:///x.txt"}],
                "fileSets": [{"id": "0"}, {"id": "1"}],
            },
        },
        {
            "id": {"namedSet": {"id": "2"}},
            "namedSetOfFiles": {"files": [{"name": "other.whl", "uri": "file:///other.whl"}]},
        },
        {
            "id": {"targetCompleted": {"label": TARGET}},
            "completed": {
                "success": True,
                "outputGroup": [
                    {"name": "default", "fileSets": [{"id": "1"}]},
                    {"name": "debug", "fileSets": [{"id": "2"}]},
                ],
            },
        },
        {
            "id": {"targetCompleted": {"label": "//other"}},
            "completed": {"outputGroup": [{"name": "default", "fileSets": [{"id": "2"}]}]},
        },
        {"id": {"buildFinished": {}}, "finished": {"exitCode": {"name": "SUCCESS"}}},
    )
    built = read_events(path)
    assert (built.finished, built.exit_name) == (True, "SUCCESS")
    assert built.wheels == (("file:///out/a.whl", "d" * 64),)
    whole = path.read_text()
    path.write_text(whole[:-30])
    built = read_events(path)
    assert (built.begun, built.finished) == (True, False)
    assert built.wheels == (("file:///out/a.whl", "d" * 64),)


def test_no_build_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "none.json") == Built(False, ())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Loading: 12 packages loaded", "loading the source: 12 packages loaded"),
        (
            "Analyzing: target //a:b (85 packages loaded, 10 targets configured)",
            "analysing the source: 85 packages loaded, 10 targets configured",
        ),
        ("[0 / 2] [Prepa] Writing x.txt", "0 of 2 actions, 1 running: Writing x.txt"),
        (
            "[1,204 / 5,310] Compiling x.cc; 3s linux-sandbox ... (4 actions, 3 running)",
            "1,204 of 5,310 actions, 3 running: Compiling x.cc",
        ),
        (
            "[5 / 14] Executing genrule //a:g; 0s disk-cache, processwrapper-sandbox ... "
            "(2 actions running)",
            "5 of 14 actions, 2 running: Executing genrule //a:g",
        ),
        ("[1 / 1] no actions running", "1 of 1 actions"),
        ("[0 / 13] checking cached actions", "0 of 13 actions"),
        ("    Fetching @llvm; 12s", "starting Bazel; fetching @llvm; 12s"),
    ],
)
def test_the_live_line(line: str, said: str, tmp_path: Path) -> None:
    shown: list[str] = []
    follower = Follower(tmp_path / "none.json", shown.append)
    follower.line("INFO: something else")
    assert shown == []
    follower.line(line)
    assert shown == [said]
    follower.line(line)
    assert shown == [said], "nothing new, so nothing is said"


def test_a_failure_is_told_while_the_build_goes_on(tmp_path: Path) -> None:
    shown: list[str] = []
    path = tmp_path / "events.json"
    follower = Follower(path, shown.append)
    follower.start()
    try:
        assert shown == ["starting Bazel"]
        follower.line("[3 / 9] Compiling x.cc; 1s local")
        bad = {"id": {"actionCompleted": {"label": "//a:b"}}, "action": {"type": "CppCompile"}}
        good = {"id": {"actionCompleted": {"label": "//a:c"}}, "action": {"success": True}}
        whole = events(tmp_path / "whole", {"id": {"started": {}}}, good, bad).read_text()
        path.write_text(whole[:-20])
        wait_for(lambda: path.stat().st_size > 0)
        with path.open("a") as file:
            file.write(whole[-20:])
        expected = "3 of 9 actions, 1 running: Compiling x.cc; 1 failed: //a:b"
        wait_for(lambda: shown[-1] == expected)
    finally:
        follower.stop()
    assert len(shown) == 3


def test_the_end_of_the_file_is_not_missed(tmp_path: Path) -> None:
    shown: list[str] = []
    follower = Follower(tmp_path / "events.json", shown.append)
    follower.start()
    bad = {"id": {"actionCompleted": {"label": "//a:b"}}, "action": {}}
    events(tmp_path / "events.json", bad)
    follower.stop()
    assert shown[-1] == "starting Bazel; 1 failed: //a:b"


@pytest.mark.parametrize(
    ("output", "trouble"),
    [
        # Bazel 2.1.0
        ("WARNING: Reading from Remote Cache:\n401 Unauthorized\nINFO: x", "401 Unauthorized"),
        ("WARNING: Writing to Remote Cache:\n403 Forbidden\n", "403 Forbidden"),
        # Bazel 7.7.1
        ("INFO: y\nWARNING: Remote Cache: 401 Unauthorized\n", "401 Unauthorized"),
        (
            "WARNING: Remote Cache: 3 errors during bulk transfer:\n"
            "com.google.devtools.build.lib.remote.http.HttpException: 503 Service Unavailable\n",
            "503 Service Unavailable",
        ),
        (
            "WARNING: Remote Cache: Connection refused (connect failed): /127.0.0.1:41675",
            "Connection refused (connect failed): /127.0.0.1:41675",
        ),
        ("INFO: 12 processes: 11 remote cache hit, 1 internal.\n", ""),
        ("", ""),
    ],
)
def test_a_cache_that_is_of_no_use(output: str, trouble: str) -> None:
    assert cache_trouble(output) == trouble


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes and inodes that every file system has left, for everybody."""
    left = {"bytes": 10**12, "inodes": 1000, "all_inodes": 1000}

    def statvfs(folder: Path) -> SimpleNamespace:
        if folder.name == "missing":
            raise FileNotFoundError(folder)
        blocks = left["bytes"] // 4096 if folder.name == "disk" else 10**9
        inodes = {"f_files": left["all_inodes"], "f_ffree": left["inodes"]}
        return SimpleNamespace(f_frsize=4096, f_bavail=blocks, f_bfree=blocks, **inodes)

    monkeypatch.setattr(os, "statvfs", statvfs)
    return left


FOLDERS = [Path("/c/missing"), Path("/c"), Path("/c/disk")]


def test_a_silent_build_on_a_full_disk(room: dict[str, int]) -> None:
    watch = Standstill(FOLDERS, lambda: 7.0)
    assert watch.look(0, 3, "") == ""
    assert watch.look(3600, 3, "") == "", "with room it may be silent for hours"
    room["bytes"] = 20480
    assert watch.look(3601, 3, "") == ""
    assert watch.look(3620, 3, "") == "", "it may end by itself"
    assert watch.look(3622, 3, "") == "20.5 kB free in /c/disk"


def test_a_disk_without_inodes(room: dict[str, int]) -> None:
    watch = Standstill(FOLDERS)
    room["inodes"] = 0
    watch.look(0, 0, "")
    assert watch.look(21, 0, "") == "no inode free in /c"
    # as btrfs has it: none are counted
    room["all_inodes"] = 0
    assert watch.look(22, 0, "") == ""


def test_words_count_without_a_full_disk(room: dict[str, int]) -> None:
    watch = Standstill(FOLDERS)
    assert watch.look(0, 0, "Disk quota exceeded") == ""
    assert watch.look(21, 0, "Disk quota exceeded") == "Disk quota exceeded"
    assert room["bytes"] > 0


@pytest.mark.parametrize("words", ["", "No space left on device"])
def test_a_build_that_goes_on_though_a_disk_is_full(words: str, room: dict[str, int]) -> None:
    spent = 0.0
    watch = Standstill(FOLDERS, lambda: spent)
    room["bytes"] = 0
    # a line or an event now and then
    for now in range(0, 300, 15):
        assert watch.look(now, now, words) == ""
    # one long action, without a word
    for now in range(300, 600):
        spent += 0.2
        assert watch.look(now, 300, words) == ""
    # an idle server is not quite idle
    found = []
    for now in range(600, 630):
        spent += 0.01
        found.append(watch.look(now, 300, words))
    assert found[0] == ""
    assert found[-1] == (words or "0 B free in /c/disk")


def test_room_that_is_made_begins_the_wait_anew(room: dict[str, int]) -> None:
    watch = Standstill(FOLDERS)
    room["bytes"] = 0
    watch.look(0, 0, "")
    room["bytes"] = 10**9
    assert watch.look(19, 0, "") == ""
    room["bytes"] = 0
    assert watch.look(22, 0, "") == ""
    assert watch.look(41, 0, "") == ""
    assert watch.look(43, 0, "") != ""


@pytest.mark.parametrize("words", ["", "java.io.IOException: No space left on device"])
def test_the_follower_gives_up_on_a_full_disk(
    words: str, room: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = 0.0, 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return now

    monkeypatch.setattr(events_module, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(events_module, "_POLL_S", 0.01)
    path = tmp_path / "events.json"
    follower = Follower(path, lambda _: None, Standstill(FOLDERS))

    def hopeless_after(seconds: float) -> bool:
        """Whether it gives up, having looked before and after so many seconds."""
        nonlocal now
        for passed in (0, seconds):
            now += passed
            # one look may be under way, and one is whole once the next has begun
            enough = looks + 3
            wait_for(lambda: looks >= enough)  # noqa: B023
        return follower.hopeless.is_set()

    follower.start()
    try:
        follower.line("[1 / 2] Compiling x.cc; 1s local")
        assert not hopeless_after(30), "it waits, and there is room"
        if words:
            follower.line(words)
        else:
            room["bytes"] = 0
        # each of them anew is a sign that it goes on
        for number in range(3):
            follower.line(f"INFO: {number}")
            assert not hopeless_after(15)
        with path.open("w") as file:
            for number in range(3):
                print(f'{{"id":{{"namedSet":{{"id":"{number}"}}}}}}', file=file, flush=True)
                assert not hopeless_after(15)
        assert follower.why is None
        # that it still waits is none, be it said in a line or in an event
        with path.open("a") as file:
            for seconds in (4, 17):
                follower.line(f"[1 / 2] Compiling x.cc; {now:.0f}s local")
                print('{"id":{"progress":{}}}', file=file, flush=True)
                assert hopeless_after(seconds) == (seconds == 17)
    finally:
        follower.stop()
    assert follower.why is not None
    assert follower.why.kind == "disk"
    assert (words[-23:] or "0 B free in /c/disk") in follower.why.found
