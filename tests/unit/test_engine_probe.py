"""Every kind of Docker that cannot bake is named, with its remedy and exit code 2."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_support import Answers, builder, client, environment, info, probe, record, silent
from tpuforge.console import Progress
from tpuforge.errors import ForgeError
from tpuforge.images import daemon
from tpuforge.images import engine as engine_module
from tpuforge.images.engine import ensure_engine, parse_builder, version_of

NAMED = "tcp://docker.example:2375"
LIST = "NAME/NODE DRIVER/ENDPOINT STATUS BUILDKIT PLATFORMS\n"


def run(tmp_path: Path, answers: Answers, *arguments: str, **extra: str) -> tuple[int, str]:
    env = environment(tmp_path / "out", client(tmp_path / "bin", answers), **extra)
    return probe({"DOCKER_HOST": NAMED} | env, *arguments)


def test_a_docker_that_can_bake_is_recorded(tmp_path: Path) -> None:
    code, output = run(tmp_path, info() | builder())
    assert code == 0
    assert "Docker 27.3.1" in output
    found = record(tmp_path / "out")
    assert found["schema"] == "tpuforge.engine/1"
    assert found["docker"] == str(tmp_path / "bin" / "docker")
    assert (found["docker_host"], found["builder"]) == (NAMED, "default")
    assert (found["private"], found["pid"], found["store"]) == (False, None, "containerd")
    assert found["judged"] == "by BuildKit's own version"


def test_a_second_look_changes_nothing(tmp_path: Path) -> None:
    path = client(tmp_path / "bin", info() | builder())
    env = environment(tmp_path / "out", path, DOCKER_HOST=NAMED)
    assert probe(env)[0] == 0
    code, output = probe(env)
    assert code == 0
    assert "nothing to do" in output


def test_debians_unknown_buildkit_is_judged_by_the_engine(tmp_path: Path) -> None:
    code, output = run(tmp_path, info("26.1.5+dfsg1") | builder(buildkit="v0.0.0+unknown"))
    assert code == 0
    assert "BuildKit says v0.0.0+unknown" in output


@pytest.mark.parametrize(
    ("answers", "said", "remedy"),
    [
        (
            silent("Cannot connect to the Docker daemon at @HOST. Is the docker daemon running?"),
            f"no Docker daemon answers at {NAMED} (named by DOCKER_HOST)",
            "change DOCKER_HOST",
        ),
        (
            silent("permission denied while trying to connect to the Docker daemon socket"),
            "permission denied",
            "usermod -aG docker",
        ),
        (info(buildx=None), "the Docker client has no buildx", "apt-get install docker-buildx"),
        (info(buildx="v0.11.2"), "buildx is v0.11.2, older than 0.13", "upgrade docker-buildx"),
        (info(machine="aarch64"), "runs on linux/aarch64", "linux/amd64"),
        (
            info("24.0.7") | builder(buildkit="v0.11.7"),
            "BuildKit of the builder default is v0.11.7, older than 0.13",
            "docker buildx create",
        ),
        (
            info("25.0.3") | builder(buildkit="v0.0.0+unknown"),
            "the engine is 25.0.3, older than 26",
            "upgrade Docker to 26",
        ),
        (
            info(driver=[["Backing Filesystem", "extfs"]])
            | {"buildx ls": (0, LIST + "default* docker\n  default default running v0.16.0 linux")},
            "has the classic image store, which cannot export OCI layouts",
            "docker buildx create --name tpuforge --driver docker-container",
        ),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(
    tmp_path: Path, answers: Answers, said: str, remedy: str
) -> None:
    code, output = run(tmp_path, answers)
    assert code == 2
    assert said in output
    mend = output[output.index("mend:") :]
    assert remedy in mend
    assert not (tmp_path / "out" / "engine" / "engine.json").exists()
    result = json.loads((tmp_path / "out" / "results" / "engine.json").read_text())
    assert (result["status"], result["exit_code"]) == ("failed", 2)


def test_a_running_container_builder_serves_a_classic_store(tmp_path: Path) -> None:
    listed = (
        f"{LIST}old docker-container\n \\_ old0 unix:///x inactive\nmine* docker-container\n"
        " \\_ mine0 unix:///x running v0.17.0 linux/amd64\ndefault docker\n"
    )
    answers = (
        info(driver=[["Backing Filesystem", "extfs"]])
        | {"buildx ls": (0, listed)}
        | builder("old", "", "docker-container", "inactive")
        | builder("mine", "v0.17.0", "docker-container")
    )
    code, output = run(tmp_path, answers)
    assert code == 0, output
    found = record(tmp_path / "out")
    assert (found["builder"], found["driver"]) == ("mine", "docker-container")
    assert found["store"] == "classic"


def test_the_builder_that_the_user_wants(tmp_path: Path) -> None:
    answers = info() | builder() | builder("mine", "v0.15.0", "docker-container")
    code, _ = run(tmp_path, answers, "--builder", "mine")
    assert code == 0
    assert record(tmp_path / "out")["builder"] == "mine"


def test_a_builder_that_is_not_there(tmp_path: Path) -> None:
    answers = info() | {"buildx inspect": (1, "ERROR: no builder found")}
    code, output = run(tmp_path, answers, "--builder", "nemo")
    assert code == 2
    assert "there is no builder 'nemo'" in output
    assert "docker buildx create --name nemo" in output


def test_a_context_names_a_docker_too(tmp_path: Path) -> None:
    answers = {"context inspect mine": (0, "unix:///run/mine.sock")} | info() | builder()
    path = client(tmp_path / "bin", answers)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text('{"currentContext": "mine"}')
    env = environment(tmp_path / "out", path, DOCKER_CONFIG=str(tmp_path / "config"))
    assert probe(env)[0] == 0
    assert record(tmp_path / "out")["docker_host"] == "unix:///run/mine.sock"


def test_a_home_that_cannot_be_written_keeps_buildx_from_nothing(tmp_path: Path) -> None:
    """As in a container with another user, or for a service without a home."""
    path, out = client(tmp_path / "bin", info() | builder()), tmp_path / "out"
    assert probe(environment(out, path, HOME=str(tmp_path), DOCKER_HOST="unix:///x"))[0] == 0
    assert record(out)["env"] == {"DOCKER_HOST": "unix:///x"}
    env = environment(out, path, HOME="/dev/null/none", DOCKER_HOST="unix:///x")
    own = str(out / "engine" / "buildx")
    for more, folder in (({}, own), ({"BUILDX_CONFIG": "/mine"}, "/mine")):
        assert probe(env | more)[0] == 0
        assert record(out)["env"] == {"DOCKER_HOST": "unix:///x", "BUILDX_CONFIG": folder}
    assert sorted(tmp_path.iterdir()) == [tmp_path / "bin", out]


def test_a_context_that_is_not_there(tmp_path: Path) -> None:
    path = client(tmp_path / "bin", {"context inspect": (1, "context not found")})
    code, output = probe(environment(tmp_path / "out", path, DOCKER_CONTEXT="gone"))
    assert code == 2
    assert "the Docker context 'gone', named by DOCKER_CONTEXT, is not there" in output


@pytest.mark.parametrize("as_user", [True, False])
def test_no_docker_at_all(tmp_path: Path, as_user: bool) -> None:
    (tmp_path / "empty").mkdir()
    env = environment(tmp_path / "out", tmp_path / "empty")
    code, output = probe(env, "--no-install", as_user=as_user)
    assert code == 2
    assert "there is no Docker client on PATH" in output
    if as_user:
        assert "sudo apt-get install docker.io docker-buildx" in output
        assert "rootless" in output
    assert not (tmp_path / "out" / "engine").exists()


def test_a_user_whose_docker_is_silent_gets_commands(tmp_path: Path) -> None:
    path = client(tmp_path / "bin", silent("Cannot connect to the Docker daemon"))
    code, output = probe(environment(tmp_path / "out", path), as_user=True)
    assert code == 2
    assert "no Docker daemon answers at unix:///var/run/docker.sock" in output
    assert "sudo apt-get install docker.io docker-buildx" in output


def test_stop_without_a_private_engine_does_nothing(tmp_path: Path) -> None:
    code, output = probe(environment(tmp_path / "out"), "--stop")
    assert code == 0
    assert "no private engine runs" in output


def test_versions_and_builders_are_read_in_all_their_spellings() -> None:
    assert version_of("v0.13.1+ds1") == (0, 13, 1)
    assert version_of("26.1.5+dfsg1") == (26, 1, 5)
    assert version_of("unknown") == ()
    old = parse_builder("Name: x\nDriver: docker-container\nStatus: running\nBuildkit: v0.12.5\n")
    assert (old.name, old.driver, old.running, old.buildkit) == (
        "x",
        "docker-container",
        True,
        "v0.12.5",
    )


def test_a_docker_that_is_named_and_no_client(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, output = probe(environment(tmp_path / "out", tmp_path / "empty", DOCKER_HOST=NAMED))
    assert code == 2
    assert f"no Docker client on PATH to reach {NAMED}" in output
    assert "apt-get install docker-cli" in output


CLASSIC: Answers = info(driver=[["Backing Filesystem", "extfs"]]) | {
    "buildx ls": (0, LIST + "default* docker\n  default default running v0.16.0 linux")
}


@pytest.fixture
def restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], Path]:
    """A machine after a restart: its own Docker is classic, and the private one does not run.

    Starting the private one gives the stand-in other answers, as another socket would.
    """
    folder = client(tmp_path / "bin", CLASSIC)
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-config"))
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "out"))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def start(_: Progress) -> int:
        (folder / "answers.json").write_text(json.dumps(info() | builder()))
        return 77

    monkeypatch.setattr(daemon, "usable_dockerd", lambda: "/usr/sbin/dockerd")
    monkeypatch.setattr(daemon, "ensure_packages", lambda _: None)
    monkeypatch.setattr(daemon, "start", start)

    def before(value: object) -> Path:
        path = tmp_path / "out" / "engine" / "engine.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(value))
        return path

    return before


BEFORE: dict[str, Any] = {
    "schema": "tpuforge.engine/1",
    "docker_host": "unix:///gone.sock",
    "env": {},
    "private": True,
    "versions": {},
}


def test_the_private_engine_of_before_is_started_again(
    restarted: Callable[[object], Path],
) -> None:
    restarted(BEFORE)
    with Progress("engine", quiet=True) as progress:
        found = ensure_engine(progress)
    assert (found["private"], found["pid"], found["store"]) == (True, 77, "containerd")
    assert found["docker_host"].endswith("docker.sock")


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"schema": "tpuforge.engine/1"},
        BEFORE | {"private": False},
        BEFORE | {"private": "yes"},
        BEFORE | {"env": []},
        BEFORE | {"schema": "tpuforge.engine/0"},
    ],
)
def test_without_a_private_engine_of_before_the_classic_store_is_an_error(
    restarted: Callable[[object], Path], value: object
) -> None:
    path = restarted(value)
    with (
        Progress("engine", quiet=True) as progress,
        pytest.raises(ForgeError, match="has the classic image store"),
    ):
        ensure_engine(progress)
    assert json.loads(path.read_text()) == value


def test_a_docker_that_is_named_is_never_replaced(
    restarted: Callable[[object], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    restarted(BEFORE)
    monkeypatch.setenv("DOCKER_HOST", NAMED)
    with (
        Progress("engine", quiet=True) as progress,
        pytest.raises(ForgeError, match="has the classic image store"),
    ):
        ensure_engine(progress)


def test_only_looking_starts_nothing(restarted: Callable[[object], Path]) -> None:
    restarted(BEFORE)
    with (
        Progress("engine", quiet=True) as progress,
        pytest.raises(ForgeError, match="has the classic image store"),
    ):
        ensure_engine(progress, install=False)


def test_a_client_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(engine_module, "_ASK_S", 1.0)
    started = time.monotonic()
    with pytest.raises(ForgeError) as caught:
        engine_module.probe(str(program), engine_module.Target({}, NAMED))
    assert time.monotonic() - started < 20
    assert caught.value.found == "the Docker client does not answer within 1 s"
    assert caught.value.mend == "docker version"
    assert caught.value.exit_code == 2
