"""``build_wheel`` without Bazel: the line, and clear refusals."""

from __future__ import annotations

import shlex
import shutil
import stat
from pathlib import Path

import pytest

from tpuforge import pins as pins_module
from tpuforge.build.bazelisk import environment, find_bazelisk
from tpuforge.build.source import main
from tpuforge.errors import Exit, ForgeError

PINS = pins_module.load()


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "out"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "out"


def test_the_documented_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--python", "3.12", "--suffix", ".dev20261130"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[0])
    assert words[0] == "bazelisk"
    assert words[2] == "build"
    assert words.index("--config=wheel_common") < words.index("--config=no_rbe")
    assert "--repo_env=HERMETIC_PYTHON_VERSION=3.12" in words
    assert words[words.index("--define") + 1] == "PYTHON_VERSION=3.12"
    assert "--repo_env=WHEEL_VERSION_EXTRAS=.dev20261130" in words
    assert words[-1] == "//ci/wheel:torch_tpu_wheel"


def test_a_release_has_no_suffix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run"]) == 0
    line = capsys.readouterr().out
    assert "WHEEL_VERSION_EXTRAS" not in line
    assert f"HERMETIC_PYTHON_VERSION={PINS.default_python}" in line


def test_a_script_is_not_bazelisk(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "bazelisk"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    with pytest.raises(ForgeError, match="not a native program"):
        find_bazelisk(str(script), PINS.bazelisk, tmp_path)
    # and the one on PATH is passed over, which leaves npm, which is not there
    with pytest.raises(ForgeError, match="no npm"):
        find_bazelisk(None, PINS.bazelisk, tmp_path)


def test_a_native_one_on_path_is_taken(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "bazelisk"
    program.parent.mkdir()
    shutil.copy(Path("/bin/true").resolve(), program)
    tool = find_bazelisk(None, PINS.bazelisk, tmp_path)
    assert (tool.path, tool.origin) == (program, "PATH")


def test_a_tampered_fetched_one_is_refused_every_time(tmp_path: Path) -> None:
    pin = PINS.bazelisk
    path = tmp_path / "bazelisk" / pin.sha256 / pin.file
    path.parent.mkdir(parents=True)
    shutil.copy(Path("/bin/true").resolve(), path)
    for _ in range(2):
        with pytest.raises(ForgeError, match="has SHA-256") as caught:
            find_bazelisk(None, pin, tmp_path)
        assert caught.value.exit_code == Exit.FAULT
        assert pin.sha256 in caught.value.expected


def test_an_npm_package_with_another_binary_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an npm that packs whatever it likes
    real = shutil.which("tar", path="/usr/bin:/bin")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / PINS.bazelisk.file).write_bytes(b"\x7fELF of somebody else")
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f"#!/bin/sh\nexec {real} -C '{tmp_path}' -czf ./x.tgz package\n")
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(ForgeError, match="has SHA-256") as caught:
        find_bazelisk(None, PINS.bazelisk, tmp_path / "work")
    assert caught.value.exit_code == Exit.FAULT
    assert [path for path in (tmp_path / "work").rglob("*") if path.is_file()] == []


def test_the_environment_of_bazel_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BAZELISK_BASE_URL", "USE_BAZEL_VERSION", "BAZELISK_HOME", "JAVA_TOOL_OPTIONS"):
        monkeypatch.setenv(name, "/poison")
    assert "/poison" not in environment(tmp_path).values()
    env = environment(tmp_path, "7.7.1", "http://127.0.0.1:1")
    assert env["USE_BAZEL_VERSION"] == "7.7.1"
    assert env["BAZELISK_BASE_URL"] == "http://127.0.0.1:1"
