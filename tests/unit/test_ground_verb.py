"""How every verb ends: exit code, message, result file, JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpuforge import verb
from tpuforge.console import Progress, duration, size
from tpuforge.errors import Exit, ForgeError

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize(
    ("error", "said", "mend"),
    [
        (OSError(28, "No space left on device"), "the out folder is ", "TPUFORGE_OUT"),
        (OSError(28, "No space left on device", "/x/y"), "device: /x/y", "free some space"),
        (OSError(122, "Disk quota exceeded"), " free", "a larger disk"),
        (PermissionError(13, "Permission denied", "/x"), "'/x'", "mend the permissions"),
        (IsADirectoryError(21, "Is a directory", "/x"), "'/x'", "in the way"),
    ],
)
def test_an_error_of_the_file_system_says_where_and_what_mends_it(
    error: OSError, said: str, mend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(options: argparse.Namespace, progress: Progress) -> verb.Outcome:
        raise error

    assert run(act) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert mend in shown.partition("mend:")[2]


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


_PROBE = """
import sys
from tpuforge import verb
from tpuforge.errors import Exit, ForgeError

def act(options, progress):
    progress.note("on the way: " + options.word)
    print("a table", flush=True)
    if options.word == "refused":
        raise ForgeError("refused", exit_code=Exit.FAULT)
    text = options.word + "\\n" + "line\\n" * 40_000
    code = Exit.FAULT if options.word == "bad" else Exit.OK
    return verb.Outcome("done", options.word, {"word": options.word}, text=text, exit_code=code)

parser = verb.parser("probe", "A probe. " * 20_000)
parser.add_argument("word", nargs="?", default="good")
sys.exit(verb.run_verb("probe", parser, act))
"""


def _shell(out: Path, line: str, *words: str | bytes) -> subprocess.CompletedProcess[bytes]:
    """Run the probe as ``"$@"`` within a line of a shell."""
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}", "bash", sys.executable, "-c", _PROBE, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "TPUFORGE_OUT": str(out)},
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        ('"$@" | true', False),
        ('"$@" --json | true', False),
        ('"$@" --json | head -c 10', False),
        ('"$@" 2>&1 | true', False),
        ('"$@" 2>/dev/full', False),
        ('"$@" 2>&-', False),
        ('"$@" >&-', False),
        ('"$@" --json <&- >&- 2>&-', False),
        ('"$@" >/dev/full', True),
        ('"$@" --json >/dev/full', True),
        ('"$@" --json >/dev/full 2>&-', True),
    ],
)
def test_where_output_goes_does_not_change_what_was_judged(
    out: Path, line: str, lost: bool
) -> None:
    words = {"good": 0, "bad": 1, "refused": 1} if line == '"$@" | true' else {"bad": 1}
    for word, judged in words.items():
        done = _shell(out, line.replace('"$@"', f'"$@" {word}'))
        assert done.returncode == (2 if lost else judged)
        assert b"Traceback" not in done.stderr
        assert b"Exception ignored" not in done.stderr
        assert (b"did not arrive: No space left" in done.stderr) == (lost and "2>" not in line)
        record = json.loads((out / "results" / "probe.json").read_text(encoding="utf-8"))
        assert record["exit_code"] == judged


def test_help_is_like_any_other_output(out: Path) -> None:
    assert _shell(out, '"$@" --help | true').returncode == 0
    done = _shell(out, '"$@" --help >/dev/full')
    assert done.returncode == 2
    assert b"did not arrive" in done.stderr


def test_no_file_takes_the_number_of_a_closed_stream(out: Path) -> None:
    code = "from tpuforge.console import guard_streams; guard_streams(); "
    code += "print(open('/dev/zero').fileno() > 2)"
    shown = out / "shown"
    line = f'"$1" -c "{code}" 2>&- <&- >{shown}'
    assert _shell(out, line).returncode == 0
    assert shown.read_text() == "True\n"


@pytest.mark.parametrize("word", [b"na\xefve \xff", "Zoë".encode(), b"\xed\xa0\x80"])
@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_argument_of_any_bytes_is_taken_shown_and_recorded(
    out: Path, word: bytes, locale: str
) -> None:
    line = f'export LC_ALL={locale} PYTHONCOERCECLOCALE=0; "$@"'
    assert _shell(out, f"{line} --no-such-option", word).returncode == 2
    done = _shell(out, line, b"--json", word)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    shown = json.loads(done.stdout.decode().partition("\n")[2])
    record = json.loads((out / "results" / "probe.json").read_bytes().decode())
    assert record["data"] == shown["data"]
    assert record["data"]["word"] == word.decode("utf-8", "backslashreplace")
