"""Files appear whole or not at all, and two runs wait for each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpuforge import paths


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file"
    paths.write_atomic(target, "old")
    with pytest.raises(RuntimeError), paths.atomic_file(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_damaged_json_file_counts_as_missing(tmp_path: Path) -> None:
    target = tmp_path / "file.json"
    assert paths.read_json(target) is None
    for damaged in ('{"half":', "[" * 200_000):
        target.write_text(damaged)
        assert paths.read_json(target) is None
    paths.write_json(target, {"b": 1, "a": "ü"})
    assert paths.read_json(target) == {"a": "ü", "b": 1}


def test_tree_digest_depends_on_names_bytes_and_executability_only(tmp_path: Path) -> None:
    def tree(name: str) -> Path:
        root = tmp_path / name / "suite"
        (root / "sub").mkdir(parents=True)
        (root / "sub" / "a.py").write_text("a")
        (root / "b.sh").write_text("b")
        return root

    one, two = tree("one"), tree("two")
    os.utime(two / "b.sh", (1, 1))
    (two / "sub" / "a.py").chmod(0o600)
    (two / "__pycache__").mkdir()
    (two / "__pycache__" / "a.pyc").write_text("x")
    assert paths.sha256_tree(one) == paths.sha256_tree(two)
    (two / "b.sh").chmod(0o755)
    assert paths.sha256_tree(one) != paths.sha256_tree(two)
    (two / "b.sh").chmod(0o644)
    (two / "sub" / "a.py").rename(two / "a.py")
    assert paths.sha256_tree(one) != paths.sha256_tree(two)


def test_text_digest_knows_the_borders() -> None:
    assert paths.sha256_text("ab", "c") != paths.sha256_text("a", "bc")


_HOLDER = """
import sys, time
from tpuforge.paths import exclusive
with exclusive("thing"):
    print("held", flush=True)
    time.sleep(float(sys.argv[1]))
"""


def _hold(seconds: float) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_second_run_waits_and_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path))
    waited: list[str] = []
    with _hold(0.5) as child:
        with paths.exclusive("thing", waited.append):
            assert child.wait(timeout=5) == 0
        assert waited == [f"process {child.pid}"]


def test_a_killed_run_leaves_no_stale_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path))
    with _hold(60) as child:
        child.kill()
    started = time.monotonic()
    with paths.exclusive("thing"):
        assert time.monotonic() - started < 2


def test_text_that_is_not_utf8_is_counted_and_written_as_escapes(tmp_path: Path) -> None:
    odd = [os.fsdecode(b"\xff"), os.fsdecode(b"\xfe"), "\ud800", "\\xff", "ÿ"]
    assert len({paths.sha256_text(text) for text in odd}) == len(odd)
    path = tmp_path / "x.json"
    paths.write_json(path, {text: text for text in odd[:3]})
    said = json.loads(path.read_bytes().decode())
    assert said == {text: text for text in ("\\xff", "\\xfe", "\\ud800")}
    paths.write_atomic(path, f"a {odd[0]}")
    assert path.read_bytes() == b"a \\udcff"


def test_a_module_in_a_process_of_its_own_has_the_packages_of_this_one() -> None:
    # -S: a Python that has none of its own, as that of another user's rebuild
    words = [sys.executable, "-S", "-c", "import tpuforge.console"]
    env = {"PYTHONPATH": paths.python_path()}
    assert subprocess.run(words, env=env, capture_output=True, check=False).returncode == 0


_HOLD_SCRATCH = """
import time
from tpuforge.paths import scratch_dir
with scratch_dir() as folder:
    (folder / "secret").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


def test_a_scratch_folder_of_a_killed_run_goes_with_the_next_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "tpuforge-of-somebody").mkdir()
    (tmp_path / f"{paths._SCRATCH}link").symlink_to("tpuforge-of-somebody")
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", _HOLD_SCRATCH]
    runs = [subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    killed, alive = [Path((run.stdout or sys.stdin).readline().strip()) for run in runs]
    try:
        assert killed.stat().st_mode & 0o777 == 0o700
        runs[0].kill()
        runs[0].wait()
        assert killed.is_dir()
        with paths.scratch_dir() as own, paths.scratch_dir() as second:
            assert not killed.exists()
            assert (alive / "secret").exists()
            assert own.is_dir()
            assert second.is_dir()
    finally:
        runs[1].terminate()
        runs[1].wait()
    with paths.scratch_dir():
        pass
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"tpuforge-of-somebody", f"{paths._SCRATCH}link"}
