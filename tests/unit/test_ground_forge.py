"""The launcher: what it runs, and what it says when it cannot."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from process_support import call, wait_for
from tpuforge import paths

ROOT = Path(__file__).resolve().parents[2]


def forge(
    root: Path, *argv: str, cwd: str | Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    return call(
        [sys.executable, "-E", str(root / "forge"), *argv],
        env=os.environ | env,
        cwd=cwd,
        timeout=60,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the launcher alone, in a folder with a space and an accent."""
    root = tmp_path / "a künstler's folder"
    (root / "lock").mkdir(parents=True)
    shutil.copy(ROOT / "forge", root)
    shutil.copy(ROOT / "noxfile.py", root)
    return root


def test_no_lock_for_this_python_is_said(checkout: Path) -> None:
    (checkout / "lock" / "tools-py399.txt").touch()
    done = forge(checkout)
    assert done.returncode == 2
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"there are no locked tools for Python {version}" in done.stderr
    assert "tools-py399.txt" in done.stderr


def test_tools_that_cannot_be_had_are_said_and_leave_no_environment(checkout: Path) -> None:
    """With a stand-in for the environment, since one takes seconds, whose pip is a real one."""
    lock = f"tools-py{sys.version_info[0]}{sys.version_info[1]}.txt"
    digest = "0" * 64
    (checkout / "lock" / lock).write_text(f"no-such-tool==1 --hash=sha256:{digest}\n")
    python = checkout / "python"
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    base = checkout / "base"
    base.write_text('#!/bin/sh\nmkdir -p "$3/bin"\ncp "${0%/*}/python" "$3/bin/python"\n')
    base.chmod(0o755)
    code = (
        "import runpy, sys; sys._base_executable, *sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(base), str(checkout / "forge")]
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    done = call(command, env=os.environ | pip, timeout=60)
    assert done.returncode == 2
    assert "the tools could not be installed" in done.stderr
    assert "no-such-tool" in done.stderr
    assert (checkout / ".venv" / "bin" / "python").exists()
    assert not (checkout / ".venv" / "forge.key").exists()


def _stand_in(checkout: Path, script: str) -> None:
    """A stand-in environment, whose Python is a script."""
    lock = checkout / "lock" / f"tools-py{sys.version_info[0]}{sys.version_info[1]}.txt"
    lock.write_text("")
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(script)
    python.chmod(0o755)
    key = (
        "import runpy, sys; m = runpy.run_path(sys.argv[1]);"
        "(m['VENV'] / 'forge.key').write_text(m['key']())"
    )
    subprocess.run([sys.executable, "-c", key, str(checkout / "forge")], check=True)


def test_verbs_and_nox_options_reach_nox(checkout: Path) -> None:
    """A stand-in environment records how the launcher would call nox."""
    _stand_in(checkout, '#!/bin/sh\nprintf "%s|" "$@"\n')
    nox = f"-P|-m|nox|-f|{checkout / 'noxfile.py'}|"
    assert forge(checkout).stdout == nox
    assert forge(checkout, "-l").stdout == f"{nox}-l|"
    assert forge(checkout, "bake", "--no-cache").stdout == f"{nox}-s|bake|--|--no-cache|"
    assert forge(checkout, "tests", "--", "unit").stdout == f"{nox}-s|tests|--|unit|"
    assert forge(checkout, "--python", "3.12").stdout == f"{nox}--|--python|3.12|"
    assert forge(checkout, "--image=x", "--json").stdout == f"{nox}--|--image=x|--json|"
    assert forge(checkout, "--python-module", "x.y", "-z").stdout == "-P|-m|x.y|-z|"


def test_a_verb_speaks_for_itself_and_nox_only_of_its_own_trouble() -> None:
    done = forge(ROOT, "images", "--nonsense", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["exit_code"] == 2
    assert done.stderr.startswith("images: unrecognized arguments: --nonsense\n")
    assert "nox" not in done.stderr
    done = forge(ROOT, "-s", "nonsense")
    assert done.returncode != 0
    assert "nox > Sessions not found: nonsense" in done.stderr


def test_a_misspelt_verb_is_named_with_the_nearest(checkout: Path) -> None:
    done = forge(checkout, "smok")
    assert done.returncode == 2
    assert "there is no verb 'smok'" in done.stderr
    assert "./forge smoke" in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"], ["--image", "x", "--help"]])
def test_help_lists_the_verbs(checkout: Path, words: list[str]) -> None:
    done = forge(checkout, *words)
    assert done.returncode == 0
    assert "    ./forge VERB [ARGUMENT …] " in done.stdout
    assert "    smoke        Run the health suite inside an image." in done.stdout


@pytest.mark.parametrize("words", [["--wheel", "x"], ["--image", "x", "--again"]])
def test_an_option_of_one_verb_alone_is_none_of_the_main_job(
    checkout: Path, words: list[str]
) -> None:
    done = forge(checkout, *words)
    assert done.returncode == 2
    assert f"the main job takes no {words[-1] if words[-1][0] == '-' else words[0]}" in done.stderr
    assert "--image, --python, --flavour, --json" in done.stderr


def test_help_of_a_verb_is_the_verbs_own(checkout: Path) -> None:
    _stand_in(checkout, '#!/bin/sh\nprintf "%s|" "$@"\n')
    for words in (["help", "bake"], ["bake", "--help"]):
        assert forge(checkout, *words).stdout.endswith("|-s|bake|--|--help|")
    assert forge(checkout, "--python-module", "x.y", "--help").stdout == "-P|-m|x.y|--help|"


def test_a_checkout_of_another_user_is_an_error_and_not_a_traceback(checkout: Path) -> None:
    lock = f"tools-py{sys.version_info[0]}{sys.version_info[1]}.txt"
    (checkout / "lock" / lock).touch()
    (checkout / ".forge.lock").mkdir()
    done = forge(checkout)
    assert done.returncode == 2
    assert "cannot be made" in done.stderr
    assert "Traceback" not in done.stderr


_SLOW_VERB = """
import pathlib, signal, sys, time
def stop(number, frame):
    time.sleep(1)
    pathlib.Path("cleaned").touch()
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGHUP, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
pathlib.Path("running").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_signal_to_the_launcher_lets_the_verb_clean_up(
    tmp_path: Path, number: signal.Signals, whole_group: bool
) -> None:
    """Through what noxfile.py starts verbs with, and a verb whose clean-up takes a second."""
    code = f"""
import runpy, sys
module = runpy.run_path({str(ROOT / "noxfile.py")!r})
sys.exit(module["call"]([sys.executable, "-c", {_SLOW_VERB!r}]))
"""
    child = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, start_new_session=True)
    wait_for((tmp_path / "running").exists)
    if whole_group:
        os.killpg(child.pid, number)
    else:
        child.send_signal(number)
    assert child.wait(timeout=20) == 130
    assert (tmp_path / "cleaned").exists()


def _has(mask: str, pid: int, number: int) -> bool:
    """Whether a process blocks (SigBlk) or catches (SigCgt) a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{mask}:"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_a_signal_at_any_early_moment_ends_as_every_verb_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the launcher's first line to a verb at work, which here waits for another run."""
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path))
    moments = (0, 0.06, 0.12, 0.2, 0.3, 0.45, 0.6, 0.9)
    numbers = itertools.cycle((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))

    def end(moment: float, number: signal.Signals) -> tuple[int, str]:
        words = [sys.executable, "-E", str(ROOT / "forge"), "fetch_wheel"]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_for(lambda: _has("SigBlk", child.pid, number))
        time.sleep(moment)
        child.send_signal(number)
        _, said = child.communicate(timeout=30)
        lines = [line for line in said.splitlines() if "waiting for" not in line]
        return child.returncode, "\n".join(lines)

    with paths.exclusive("wheelhouse"), ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(end, moments, numbers))
    one_line = "fetch_wheel: interrupted; what was finished is kept"
    assert ends == [(130, one_line)] * len(moments)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_environment_is_being_made_ends_the_launcher(
    checkout: Path, number: signal.Signals
) -> None:
    lock = f"tools-py{sys.version_info[0]}{sys.version_info[1]}.txt"
    (checkout / "lock" / lock).touch()
    with (checkout / ".forge.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        words = [sys.executable, str(checkout / "forge"), "bake"]
        child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        # Python itself catches INT long before
        wait_for(lambda: _has("SigCgt", child.pid, signal.SIGTERM))
        child.send_signal(number)
        _, said = child.communicate(timeout=30)
    assert (child.returncode, said) == (130, "forge: interrupted; run it again\n")


def test_two_launchers_at_once_make_one_environment(checkout: Path) -> None:
    lock = f"tools-py{sys.version_info[0]}{sys.version_info[1]}.txt"
    (checkout / "lock" / lock).touch()
    command = [sys.executable, str(checkout / "forge"), "--python-module", "this"]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ends = [child.communicate(timeout=60) for child in both]
    assert [child.returncode for child in both] == [0, 0]
    assert all("Beautiful is better than ugly" in out for out, _ in ends)
    assert sum("making .venv" in err for _, err in ends) == 1


def test_variables_and_folders_of_the_caller_do_not_reach_the_environment(
    checkout: Path, tmp_path: Path
) -> None:
    _stand_in(checkout, "#!/bin/sh\nenv\n")
    foreign = dict.fromkeys(("PYTHONPATH", "PYTHONSTARTUP", "NOXPYTHON"), "x")
    foreign |= {"NOX_DEFAULT_VENV_BACKEND": "conda", "NOXSESSION": "x", "PYTHONWARNINGS": "error"}
    for words in ((), ("--python-module", "x.y")):
        done = forge(checkout, *words, **foreign)
        assert "PATH=" in done.stdout, done.stderr
        assert [
            line for line in done.stdout.splitlines() if line.startswith(("PYTHON", "NOX"))
        ] == []
    (checkout / ".venv" / "bin" / "python").unlink()
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "this.py").write_text("print('from the folder of the caller')\n")
    done = forge(checkout, "--python-module", "this", cwd=tmp_path)
    assert "Beautiful is better than ugly" in done.stdout


def test_a_user_without_a_home_gets_one(checkout: Path) -> None:
    _stand_in(checkout, '#!/bin/sh\necho "home $HOME"\n')
    code = (
        "import os, pwd, runpy, sys; del os.environ['HOME']; pwd.getpwuid = {}.__getitem__; "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(checkout / "forge"), "bake"]
    env = {**os.environ, "HOME": "/somewhere"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "home /\n", done.stderr
    assert forge(checkout, "bake", HOME="/somewhere").stdout == "home /somewhere\n"


@pytest.mark.parametrize("closing", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_open_again_for_what_is_run(checkout: Path, closing: str) -> None:
    _stand_in(checkout, '#!/bin/sh\nls -l /proc/$$/fd >"$0.seen"\nexit 7\n')
    command = [sys.executable, str(checkout / "forge"), "bake"]
    done = subprocess.run(["sh", "-c", f'"$@" {closing}', "sh", *command], check=False, timeout=60)
    assert done.returncode == 7
    seen = (checkout / ".venv" / "bin" / "python.seen").read_text()
    assert seen.count("/dev/null") >= len(closing.split())


@pytest.mark.parametrize("line", ['"$@" 2>/dev/full', '"$@" 2>&1 | true', '"$@" 2</dev/null 2>&0'])
@pytest.mark.parametrize("code", [0, 1])
def test_what_nox_cannot_print_is_not_the_exit_code(checkout: Path, line: str, code: int) -> None:
    """With a stand-in for the launcher that nox starts, and the real nox."""
    (checkout / "forge").write_text(f"import sys; sys.exit({code})\n")
    nox = [sys.executable, "-m", "nox", "-f", str(checkout / "noxfile.py"), "-s", "bake"]
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}", "bash", *nox],
        cwd=checkout,
        check=False,
        timeout=60,
    )
    assert done.returncode == code


def test_help_for_a_reader_who_goes_away(checkout: Path) -> None:
    command = [sys.executable, str(checkout / "forge"), "--help"]
    line = 'set -o pipefail; "$@" 2>&1 >&3 3>&- | cat >&2'
    done = call(["bash", "-c", f"exec 3> >(true); sleep 0.2; {line}", "bash", *command], timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
