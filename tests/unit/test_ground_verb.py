"""How every verb ends: exit code, message, result file, JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tpuforge import verb
from tpuforge.console import Progress, duration, size
from tpuforge.errors import Exit, ForgeError


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path))
    return tmp_path


def run(action: verb.Action, *argv: str) -> int:
    return verb.run_verb("probe", verb.parser("probe", "A probe."), action, argv)


def test_a_good_end(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def act(options: argparse.Namespace, progress: Progress) -> verb.Outcome:
        with progress.step("working", total=10):
            progress.advance(10)
        return verb.Outcome("unchanged", "same as before", {"n": 1}, ["mind the gap"])

    assert run(act) == 0
    shown = capsys.readouterr()
    assert "nothing to do" in shown.out
    assert "same as before" in shown.out
    assert "working" in shown.err
    record = json.loads((out / "results" / "probe.json").read_text())
    assert record["schema"] == "tpuforge.result/1"
    assert record["status"] == "unchanged"
    assert record["data"] == {"n": 1}
    assert record["notes"] == ["mind the gap"]


def test_json_is_the_only_thing_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda o, p: verb.Outcome("done", "x", text="for people"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["summary"] == "x"


def test_an_error_tells_found_expected_and_mend(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(options: argparse.Namespace, progress: Progress) -> verb.Outcome:
        raise ForgeError("[odd] thing", expected="even", mend="add 1", exit_code=Exit.FAULT)

    assert run(act) == 1
    shown = capsys.readouterr().err
    assert "probe: [odd] thing" in shown
    assert "expected: even" in shown
    assert "mend:     add 1" in shown
    record = json.loads((out / "results" / "probe.json").read_text())
    assert record["error"] == {
        "found": "[odd] thing",
        "expected": "even",
        "mend": "add 1",
        "exit_code": 1,
    }


def test_a_full_disk_is_an_error_and_not_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def act(options: argparse.Namespace, progress: Progress) -> verb.Outcome:
        Path("/dev/full").write_text("x" * 100_000)
        raise AssertionError

    assert run(act) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_a_mistake_in_our_own_code_is_shown_and_is_no_verdict(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(options: argparse.Namespace, progress: Progress) -> verb.Outcome:
        raise ZeroDivisionError("oops")

    assert run(act) == Exit.CANNOT
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "a mistake in tpuforge: ZeroDivisionError: oops" in shown
    assert json.loads((out / "results" / "probe.json").read_text())["status"] == "failed"


def test_unknown_arguments_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(lambda o, p: verb.Outcome("done", ""), "--no-such-option")
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (517_300_000, "517.3 MB"), (2e12, "2000.0 GB")],
)
def test_sizes_read_well(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59.9, "59.9 s"), (185, "3 min 05 s")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
