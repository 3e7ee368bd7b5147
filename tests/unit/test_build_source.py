"""``build_wheel`` without Bazel: the line for every option, and clear refusals."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from process_support import call
from tpuforge import paths
from tpuforge import pins as pins_module
from tpuforge.build import container
from tpuforge.build import source as source_module
from tpuforge.build.bazelisk import Tool
from tpuforge.build.checkout import TARGET
from tpuforge.build.leftovers import end_all
from tpuforge.build.line import Host, Plan, Remote, command, parse_remote
from tpuforge.build.source import main
from tpuforge.errors import ForgeError

PINS = pins_module.load()
RC = """
build:wheel_common --//:wheel_build=True
build:wheel_common --remote_executor=grpcs://remote.example
build:wheel_common --remote_cache=grpcs://remote.example
build:no_rbe --remote_executor=
build:no_rbe --remote_cache=
build:public_caching_readonly --remote_cache=https://public.invalid/cache
build:wheel_release --config=wheel_common
"""


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "out"))
    # nothing is asked outside this machine
    monkeypatch.setattr(source_module.preflight, "_unreachable", lambda hosts: {})
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(source_module, "_DOCKER_SOCKET", tmp_path / "docker.sock")
    return tmp_path / "out"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder that looks like a checkout of TorchTPU."""
    folder = tmp_path / "my-source"
    (folder / "ci" / "wheel").mkdir(parents=True)
    (folder / "ci" / "wheel" / "BUILD").touch()
    (folder / "MODULE.bazel").touch()
    (folder / ".bazelrc").write_text(RC)
    (folder / ".bazelversion").write_text("7.7.1\n")
    return folder


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["--dry-run", "--json", *arguments]) == 0
    made: dict[str, object] = json.loads(capsys.readouterr().out)["data"]
    return made


def words_of(made: dict[str, object], number: int = 0) -> list[str]:
    lines = made["lines"]
    assert isinstance(lines, list)
    words = shlex.split(lines[number])
    return words[words.index("bazelisk") :]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_documented_line(capsys: pytest.CaptureFixture[str], out: Path) -> None:
    words = words_of(dry_run(capsys, "--python", "3.12", "--suffix", ".dev20261130"))
    assert words[:5] == [
        "bazelisk",
        "--nosystem_rc",
        "--nohome_rc",
        f"--output_user_root={out}/bazel/root",
        "--max_idle_secs=300",
    ]
    assert words[5:8] == ["build", "--config=wheel_common", "--config=no_rbe"]
    assert words.index(f"--disk_cache={out}/bazel/disk") > words.index("--config=no_rbe")
    assert words.index(f"--repository_cache={out}/bazel/repository") > words.index(
        "--config=no_rbe"
    )
    assert "--repo_env=HERMETIC_PYTHON_VERSION=3.12" in words
    assert words[words.index("--define") + 1] == "PYTHON_VERSION=3.12"
    assert "--repo_env=WHEEL_VERSION_EXTRAS=.dev20261130" in words
    assert words[-1] == "//ci/wheel:torch_tpu_wheel"


def test_a_release_has_an_empty_suffix(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--release"]):
        words = words_of(dry_run(capsys, *arguments))
        assert "--repo_env=WHEEL_VERSION_EXTRAS=" in words
        assert f"--repo_env=HERMETIC_PYTHON_VERSION={PINS.default_python}" in words
        # upstream's configuration means 200 jobs and --keep_going for its own executor
        assert "--jobs=auto" in words
        assert "--nokeep_going" in words


def test_a_bazel_of_ones_own_reads_the_settings_of_the_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bazel").touch()
    words = words_of(dry_run(capsys, "--bazel", str(tmp_path / "bazel")))
    assert "--nosystem_rc" not in words
    assert "--nohome_rc" in words


def test_a_cache_folder_that_bazel_cannot_work_in(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--cache", "/my cache", "--dry-run")
    assert "Bazel cannot work in /my cache: there is a space in it" in said


def test_every_python_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    made = dry_run(capsys, "--python", "all")
    assert len(made["lines"]) == len(PINS.pythons)  # type: ignore[arg-type]
    made = dry_run(capsys, "--python", "3.13", "3.11", "3.13", "--jobs", "3", "--keep-going")
    assert len(made["lines"]) == 2  # type: ignore[arg-type]
    assert "PYTHON_VERSION=3.11" in words_of(made, 1)
    assert "--jobs=3" in words_of(made, 1)
    assert "--keep_going" in words_of(made, 1)


def test_a_python_that_is_not_supported(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--python", "3.9")
    assert "Python 3.9 is not supported" in said
    assert f"expected: one of {', '.join(PINS.pythons)}" in said


def test_a_cache_comes_after_both_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(dry_run(capsys, "--remote", "cache=http://127.0.0.1:1/x"))
    last = words.index("--config=no_rbe")
    assert words[last + 1] == "--remote_cache=http://127.0.0.1:1/x"
    # what wheel_common says about its own remote does not hold for this one
    assert "--remote_upload_local_results=true" in words[last:]
    assert "--remote_instance_name=" in words[last:]
    assert "--google_default_credentials=false" in words[last:]
    assert "--remote_download_outputs=toplevel" in words[last:]
    assert not any(word.startswith("--remote_executor") for word in words)


def test_an_executor_is_used_without_no_rbe(capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(
        dry_run(capsys, "--remote", "executor=grpc://127.0.0.1:1", "--instance", "mine")
    )
    assert "--config=no_rbe" not in words
    first = words.index("--config=wheel_common")
    assert words[first + 1 : first + 3] == [
        "--remote_executor=grpc://127.0.0.1:1",
        "--remote_cache=",
    ]
    assert "--remote_instance_name=mine" in words
    assert not any(word.startswith("--jobs") for word in words)


def test_the_public_cache_is_read_and_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(dry_run(capsys, "--remote", "public-cache"))
    configs = [word for word in words if word.startswith("--config=")]
    assert configs == [
        *("--config=wheel_common", "--config=no_rbe", "--config=public_caching_readonly")
    ]
    assert "--remote_download_outputs=toplevel" in words
    assert not any("upload" in word for word in words)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--remote", "everywhere"], "--remote everywhere is not understood"),
        (["--remote", "cache"], "--remote cache is not understood"),
        (["--remote", "none=http://x"], "--remote none=http://x is not understood"),
        (["--remote", "executor=http://x:1"], "--remote executor=http://x:1 is not understood"),
        (["--remote", "cache=http://x:port"], "--remote cache=http://x:port is not understood"),
        (["--remote", "cache=http://[::1"], "--remote cache=http://[::1 is not understood"),
        (["--remote", "cache=http://me:hunter2@x"], "holds credentials"),
        (["--instance", "x"], "--remote none takes neither --instance nor --credentials"),
        (["--suffix", "+cuda"], "--suffix '+cuda'"),
        (["--suffix", ".dev007"], "--suffix '.dev007'"),
        (["--bazel", "latest"], "--bazel names Bazel 'latest'"),
    ],
)
def test_options_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], workspace: Path, arguments: list[str], said: str
) -> None:
    shown = refused(capsys, "--dry-run", "--source", str(workspace), *arguments)
    assert said in shown
    assert "hunter2" not in shown


def test_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    file = tmp_path / ".config" / "gcloud" / "application_default_credentials.json"
    assert parse_remote("executor=grpcs://x", "", "google").credentials == file
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/keys/mine.json")
    remote = parse_remote("cache=https://x", "", "google")
    assert remote.credentials == Path("/keys/mine.json")
    assert "--google_credentials=/keys/mine.json" in remote.flags
    assert parse_remote("cache=https://x", "", "~/k").credentials == tmp_path / "k"


def test_further_configurations_come_before_what_takes_back() -> None:
    plan = Plan(Path("/w"), configs=("wheel_release",))
    assert plan.all_configs == ["wheel_common", "wheel_release", "no_rbe"]
    executor = Plan(Path("/w"), Remote("executor", "grpc://x"), configs=("wheel_release",))
    assert executor.all_configs == ["wheel_common", "wheel_release"]


def test_the_line_names_what_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://me:hunter2@proxy:1")
    monkeypatch.setenv("LANG", "C.UTF-8")
    env = {"https_proxy": "http://me:hunter2@proxy:1", "LANG": "C.UTF-8", "HOME": "/a b"}
    place = Host(Plan(tmp_path), tmp_path / "x y", env, Tool(Path("/b"), "given", ""))
    (tmp_path / "x y").mkdir()
    shown = place.shown(["/bin/sh", "-c", 'echo "$https_proxy|$LANG|$HOME|$PWD|$USER"'])
    assert "hunter2" not in shown
    said = call(["/bin/sh", "-c", shown], check=True).stdout
    assert said == f"http://me:hunter2@proxy:1|C.UTF-8|/a b|{tmp_path / 'x y'}|\n"


def test_a_line_has_every_option_once() -> None:
    for remote in (
        Remote(),
        Remote("public-cache"),
        Remote("cache", "http://x", "", Path("/k")),
        Remote("executor", "grpc://x"),
    ):
        words = command(Plan(Path("/w"), remote, 2), "bazelisk", "3.11", "")
        names = [word.partition("=")[0] for word in words if word.startswith("--")]
        repeated = {name for name in names if names.count(name) > 1}
        assert repeated <= {"--config", "--repo_env"}


def test_what_is_wrong_with_the_source_is_said_before_anything_runs(
    capsys: pytest.CaptureFixture[str], workspace: Path, out: Path
) -> None:
    rc = workspace / ".bazelrc"
    rc.write_text(RC.replace("wheel_common", "wheel_comon"))
    assert main(["--source", str(workspace)]) == 1
    said = capsys.readouterr().err
    assert ".bazelrc defines no configuration wheel_common; the nearest name there is" in said
    rc.write_text(RC)
    assert main(["--source", str(workspace), "--config", "wheel_relase"]) == 1
    said = capsys.readouterr().err
    assert "no configuration wheel_relase; the nearest name there is wheel_release" in said
    (workspace / ".bazelversion").unlink()
    said = refused(capsys, "--source", str(workspace))
    assert "does not say which Bazel it is built with" in said
    assert not (out / "bazel" / "root").exists()


def test_a_development_build_needs_a_commit(
    capsys: pytest.CaptureFixture[str], workspace: Path
) -> None:
    said = refused(capsys, "--source", str(workspace), "--dev", "--dry-run")
    assert "has no commit whose time it could take" in said
    # and with one the same commit gives the same suffix
    git = ["git", "-C", str(workspace), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        env = {"GIT_COMMITTER_DATE": "2026-11-30T12:34:56Z", "PATH": "/usr/bin:/bin"}
        subprocess.run([*git, *words], check=True, env=env)
    made = dry_run(capsys, "--source", str(workspace), "--dev")
    assert "--repo_env=WHEEL_VERSION_EXTRAS=.dev20261130123456" in words_of(made)


def test_the_figures_are_part_of_a_dry_run(
    capsys: pytest.CaptureFixture[str], workspace: Path
) -> None:
    made = dry_run(capsys, "--source", str(workspace), "--where", "host")
    names = [figure["name"] for figure in made["preflight"]]  # type: ignore[attr-defined]
    assert names[:4] == ["disk", "memory", "cores", "glibc"]
    assert made["where"] == "host"
    assert "no git checkout" in str(made["source"])


def test_the_image_where_there_is_an_engine(
    capsys: pytest.CaptureFixture[str],
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = os.environ["PATH"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{bare}")
    assert dry_run(capsys)["where"] == "host"
    (tmp_path / "docker.sock").touch()
    assert dry_run(capsys)["where"] == "container"
    (tmp_path / "docker.sock").unlink()
    monkeypatch.setenv("DOCKER_HOST", "unix:///x")
    assert dry_run(capsys)["where"] == "container"
    monkeypatch.delenv("DOCKER_HOST")
    # a private one that tpuforge set up
    (out / "engine").mkdir(parents=True)
    (out / "engine" / "engine.json").write_text("{}")
    assert dry_run(capsys)["where"] == "container"
    assert dry_run(capsys, "--where", "host")["where"] == "host"


def test_a_wheel_that_was_not_asked_for() -> None:
    good = "file:///o/torch_tpu-0.2.0.dev1-cp311-cp311-manylinux_2_31_x86_64.whl"
    assert source_module._path_of(good, "3.11", ".dev1").name == good.rpartition("/")[2]
    for uri, python, suffix, said in (
        (good, "3.12", ".dev1", "it is torch-tpu for cp311"),
        (good, "3.11", ".dev2", "has not the suffix .dev2"),
        (good.replace("torch_tpu", "torch"), "3.11", ".dev1", "it is torch for"),
        (good.replace("file://", "bytestream://x"), "3.11", ".dev1", "not on this machine"),
        ("file:///o/x.whl", "3.11", "", "Invalid wheel filename"),
    ):
        with pytest.raises(ForgeError, match="is not the wheel that was asked for") as caught:
            source_module._path_of(uri, python, suffix)
        assert said in caught.value.found


@pytest.mark.parametrize("option", ["--bazel-url", "--remote", "--repository"])
def test_no_address_may_hold_a_password(
    capsys: pytest.CaptureFixture[str], out: Path, option: str
) -> None:
    address = "http://me:hunter2@127.0.0.1:9/a"
    given = f"cache={address}" if option == "--remote" else address
    said = refused(capsys, option, given, "--dry-run")
    assert "holds credentials" in said
    assert "hunter2" not in said
    assert "hunter2" not in (out / "results" / "build_wheel.json").read_text()


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1 :9/a b", "http://h/\n", "http://", "http://h:port/", "ftp://h/", "me:pw@h/"],
)
@pytest.mark.parametrize("option", ["--bazel-url", "--remote"])
def test_what_is_no_address(capsys: pytest.CaptureFixture[str], option: str, address: str) -> None:
    given = f"cache={address}" if option == "--remote" else address
    said = refused(capsys, option, given, "--dry-run")
    assert "is not understood" in said
    assert "pw@" not in said


@pytest.mark.parametrize("option", ["--source", "--cache", "--bazel", "--bazelisk"])
def test_the_home_of_nobody(capsys: pytest.CaptureFixture[str], option: str) -> None:
    said = refused(capsys, option, "~nobody-of-that-name/x", "--where", "host", "--dry-run")
    assert "there is no home folder of that name" in said
    remote = ("--remote", "cache=http://h", "--credentials", "~nobody-of-that-name/x")
    assert "there is no home folder" in refused(capsys, *remote, "--dry-run")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    for name in ("NETRC", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--remote", "cache=http://127.0.0.1:9", "--dry-run", "--json"]) == 0
    assert main(["--remote", "cache=http://h", "--credentials", "google", "--dry-run"]) == 2


@pytest.mark.parametrize("hours", ["nan", "inf", "-1", "0", "1e99", "x"])
def test_a_limit_that_is_none(capsys: pytest.CaptureFixture[str], hours: str) -> None:
    assert main([f"--limit-hours={hours}", "--dry-run"]) == 2
    assert "is no number above 0" in capsys.readouterr().err


def test_a_folder_that_is_no_cache(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "link").symlink_to("/")
    for folder in ("/", str(tmp_path / "home"), str(paths.ROOT), str(tmp_path / "link")):
        assert "holds more than caches" in refused(capsys, "--cache", folder)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").touch()
    said = refused(capsys, "--cache", str(tmp_path / "used"))
    assert "holds thesis.tex, and no build has used it before" in said
    (tmp_path / "source").mkdir()
    inside = tmp_path / "source" / "cache"
    said = refused(capsys, "--source", str(tmp_path / "source"), "--cache", str(inside))
    assert "is in the source" in said
    assert not inside.exists()


def test_a_dry_run_prints_what_would_be_run_in_the_image(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # without an image there is but the line in it, and that is said
    assert main(["--where", "container", "--dry-run"]) == 0
    assert "with this line in an image still to bake" in capsys.readouterr().out
    builder = container.Builder("/bin/docker", {}, False, "builder", "sha256:0", "1:1")
    monkeypatch.setattr(container, "known", lambda: builder)
    line = dry_run(capsys, "--where", "container")["lines"]
    assert isinstance(line, list)
    assert line[0].startswith("/bin/docker run --rm ")
    assert " sha256:0 timeout " in line[0]
    assert line[0].endswith(TARGET)


def test_only_what_a_server_of_bazel_left_is_removed(tmp_path: Path) -> None:
    for name in ("base", "project"):
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / "java.log.1").touch()
    (tmp_path / "root" / "base" / "server").mkdir()
    end_all(tmp_path)
    assert not (tmp_path / "root" / "base" / "java.log.1").exists()
    assert (tmp_path / "root" / "project" / "java.log.1").exists()
