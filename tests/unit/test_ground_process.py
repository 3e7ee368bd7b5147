"""Subprocesses: scrubbed, bounded, cleaned up, and silent about secrets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from process_support import wait_for
from tpuforge import process
from tpuforge.errors import ForgeError

PYTHON = sys.executable


@pytest.mark.parametrize(
    "name", ["PIP_INDEX_URL", "PIP_CONSTRAINT", "UV_INDEX", "DOCKER_HOST", "BAZEL_SH", "PYTHONPATH"]
)
def test_child_does_not_see_what_could_change_a_result(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "poison")
    done = process.run([PYTHON, "-c", "import os; print(sorted(os.environ.items()))"], timeout=30)
    assert "poison" not in done.output


def test_child_sees_how_to_reach_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/bundle.pem")
    assert process.clean_env()["SSL_CERT_FILE"] == "/bundle.pem"


def test_output_comes_line_by_line_and_whole(tmp_path: Path) -> None:
    seen: list[str] = []
    log = tmp_path / "log"
    code = "import sys; print('a'); print('b', file=sys.stderr); sys.stdout.write('no end')"
    done = process.run([PYTHON, "-uc", code], timeout=30, on_line=seen.append, log=log)
    assert seen == ["a", "b", "no end"]
    assert log.read_text().splitlines() == seen == done.output.splitlines()


def test_failure_names_the_command_and_its_last_words() -> None:
    code = "import sys; print('the cause'); sys.exit(7)"
    with pytest.raises(ForgeError) as caught:
        process.run([PYTHON, "-c", code], timeout=30, doing="trying")
    assert "trying: exit code 7" in caught.value.found
    assert "the cause" in caught.value.found
    assert "try by hand" in caught.value.mend


def test_missing_program_is_named() -> None:
    with pytest.raises(ForgeError, match="no-such-program is not there"):
        process.run(["no-such-program"], timeout=1)


def test_a_missing_folder_is_not_called_a_missing_program(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"the folder .*/gone is not there"):
        process.run([PYTHON, "-V"], timeout=1, cwd=tmp_path / "gone")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def test_time_limit_ends_the_whole_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid_file}; wait"
    with pytest.raises(ForgeError, match="not done after 1 s"):
        process.run(["sh", "-c", script], timeout=1)
    assert not _alive(int(pid_file.read_text()))


def test_a_silent_child_leaves_no_empty_line_in_the_error() -> None:
    with pytest.raises(ForgeError) as caught:
        process.run(["sh", "-c", "exit 3"], timeout=10, doing="asking")
    assert caught.value.found == "asking: exit code 3"
    with pytest.raises(ForgeError) as caught:
        process.run(["sleep", "60"], timeout=1, doing="asking")
    assert caught.value.found == "asking: not done after 1 s; ended"


def test_a_child_that_ignores_term_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    pid_file = tmp_path / "pid"
    script = f"trap '' TERM; echo $$ > {pid_file}; while :; do sleep 0.1; done"
    with pytest.raises(ForgeError):
        process.run(["sh", "-c", script], timeout=1)
    assert not _alive(int(pid_file.read_text()))


def test_a_grandchild_that_keeps_the_pipe_does_not_hold_the_run() -> None:
    started = time.monotonic()
    done = process.run(["sh", "-c", "sleep 30 & echo done"], timeout=20)
    assert done.output == "done"
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_verb_ends_its_children(tmp_path: Path, number: signal.Signals) -> None:
    pid_file = tmp_path / "pid"
    code = f"""
import sys
from tpuforge import process, verb
def act(options, progress):
    process.run(["sh", "-c", "echo $$ > {pid_file}; sleep 60"], timeout=60)
sys.exit(verb.run_verb("probe", verb.parser("probe", ""), act, []))
"""
    env = os.environ | {"TPUFORGE_OUT": str(tmp_path / "out")}
    child = subprocess.Popen(
        [PYTHON, "-c", code], env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: pid_file.exists() and pid_file.read_text().strip())
    child.send_signal(number)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 130
    assert "interrupted; what was finished is kept" in errors
    assert not _alive(int(pid_file.read_text()))


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hunter2@index.example/simple",
        "https://hunter2@index.example/simple",
        "https://user:p@hunter2@127.0.0.1:1/simple",
        "https://user:hu/hunter2@127.0.0.1:1/simple",
        "https://127.0.0.1:1/simple?sig=hunter2",
        "'https://index.example/a.whl?x=1&token=hunter2#sha256=0'",
        "Authorization: Bearer hunter2",
        "password=hunter2",
        "API_KEY: hunter2",
    ],
)
def test_secrets_are_redacted(text: str) -> None:
    assert "hunter2" not in process.redact(f"before {text} after")
    done = process.run([PYTHON, "-c", f"print({text!r})"], timeout=30)
    assert "hunter2" not in done.output


def test_harmless_text_is_left_alone() -> None:
    for text in (
        "https://index.example/simple/torch/ 3 tokens, see me@example.org",
        "https://example.org/torch_tpu@v0.2.0",
        "https://example.org:8080/torch_tpu@v0.2.0",
        "oci-layout:///out/base@sha256:00",
        "docker-image://debian:bookworm@sha256:00 docker-image://NAME@sha256:…",
    ):
        assert process.redact(text) == text


@pytest.mark.parametrize("text", ["x" * 200_000, "token" * 20_000, "a=1&" * 50_000])
def test_a_long_line_is_redacted_in_no_time(text: str) -> None:
    started = time.monotonic()
    assert process.redact(text) == text
    assert time.monotonic() - started < 5


def test_a_log_that_a_full_disk_does_not_take_stops_nothing() -> None:
    code = "for _ in range(20000): print('x' * 40)"
    done = process.run([PYTHON, "-c", code], timeout=30, log=Path("/dev/full"))
    assert done.code == 0
    assert len(done.output.splitlines()) == 20000


def test_a_signal_in_the_moment_a_child_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen
    children: list[subprocess.Popen[bytes]] = []

    def start(*words: Any, **settings: Any) -> subprocess.Popen[bytes]:
        children.append(real(*words, **settings))
        signal.raise_signal(signal.SIGINT)
        return children[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        process.run(["sleep", "60"], timeout=60)
    assert children[0].poll() == -signal.SIGTERM


def test_a_second_signal_does_not_break_off_the_cleaning_up() -> None:
    steps: list[str] = []

    def cleaned_up() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            with process.undisturbed():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
                steps.append("whole")

    with pytest.raises(KeyboardInterrupt):
        cleaned_up()
    assert steps == ["whole"]
    # where nothing was ending, the signal counts, a little later
    with pytest.raises(KeyboardInterrupt), process.undisturbed():
        signal.raise_signal(signal.SIGINT)
        steps.append("again")
    assert steps == ["whole", "again"]


def test_one_endless_line_costs_little_and_its_log_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    # characters of two bytes, so that chunks and pieces end within one
    code = "import sys\nfor n in range(60): sys.stdout.write('x' + 'é, ' * 33333)"
    pieces: list[str] = []
    began = time.process_time()
    done = process.run([PYTHON, "-Xutf8", "-c", code], timeout=60, on_line=pieces.append, log=log)
    spent = time.process_time() - began
    whole = ("x" + "é, " * 33333) * 60
    assert done.output == whole
    assert log.read_text(encoding="utf-8") == whole + "\n"
    assert max(map(len, pieces)) <= 1 << 16
    # 6 million characters, each looked at a few times
    assert spent < 10


def test_a_secret_at_a_cut_of_a_long_line_is_not_shown() -> None:
    secret = "https://me:hunter2@host/x token=hunter2 password: hunter2 "
    for before in (64 * 1024 - 40, 63 * 1024 - 30, 63 * 1024 - 8, 2 * 63 * 1024 - 20):
        text = "-" * (before - len(secret) // 2) + " " + secret * 3
        code = f"import sys; sys.stdout.write({text!r} + '-' * 200_000)"
        done = process.run([PYTHON, "-c", code], timeout=30)
        assert "hunter2" not in done.output
        assert done.output.count("***") == 9
        assert done.output.endswith("-" * 200_000)


def test_of_endless_output_the_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_MOST_OUTPUT", 1000)
    code = "print('first'); print('x' * 990); print('last')"
    done = process.run([PYTHON, "-c", code], timeout=30)
    assert done.output.splitlines()[0] == "(6 characters before this are not kept)"
    assert done.output.splitlines()[-1] == "last"


def test_the_password_of_a_proxy_is_blotted_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("https_proxy", "http://me:hun'ter%202 \u00fc@127.0.0.1:9")
    assert process.redact("cannot parse hun'ter%202 \u00fc, that is hun'ter 2 \u00fc") == (
        "cannot parse ***, that is ***"
    )
    assert process.redact(f"proxy {os.environ['https_proxy']}") == "proxy http://***@127.0.0.1:9"
    # too short to be told from other words
    monkeypatch.setenv("https_proxy", "http://me:a@127.0.0.1:9")
    assert process.redact("banana") == "banana"
