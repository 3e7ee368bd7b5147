"""Every kind of Docker that cannot bake is named, with its remedy and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_support import Answers, builder, client, engine, environment, info, record, silent
from tpuforge.images.engine import parse_builder, version_of

NAMED = "tcp://docker.example:2375"
LIST = "NAME/NODE DRIVER/ENDPOINT STATUS BUILDKIT PLATFORMS\n"


def run(tmp_path: Path, answers: Answers, *arguments: str, **extra: str) -> tuple[int, str]:
    env = environment(tmp_path / "out", client(tmp_path / "bin", answers), **extra)
    return engine({"DOCKER_HOST": NAMED} | env, *arguments)


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
    assert engine(env)[0] == 0
    code, output = engine(env)
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
    assert engine(env)[0] == 0
    assert record(tmp_path / "out")["docker_host"] == "unix:///run/mine.sock"


def test_a_context_that_is_not_there(tmp_path: Path) -> None:
    path = client(tmp_path / "bin", {"context inspect": (1, "context not found")})
    code, output = engine(environment(tmp_path / "out", path, DOCKER_CONTEXT="gone"))
    assert code == 2
    assert "the Docker context 'gone', named by DOCKER_CONTEXT, is not there" in output


@pytest.mark.parametrize("as_user", [True, False])
def test_no_docker_at_all(tmp_path: Path, as_user: bool) -> None:
    (tmp_path / "empty").mkdir()
    env = environment(tmp_path / "out", tmp_path / "empty")
    code, output = engine(env, "--no-install", as_user=as_user)
    assert code == 2
    assert "there is no Docker client on PATH" in output
    if as_user:
        assert "sudo apt-get install docker.io docker-buildx" in output
        assert "rootless" in output
    assert not (tmp_path / "out" / "engine").exists()


def test_a_user_whose_docker_is_silent_gets_commands(tmp_path: Path) -> None:
    path = client(tmp_path / "bin", silent("Cannot connect to the Docker daemon"))
    code, output = engine(environment(tmp_path / "out", path), as_user=True)
    assert code == 2
    assert "no Docker daemon answers at unix:///var/run/docker.sock" in output
    assert "sudo apt-get install docker.io docker-buildx" in output


def test_stop_without_a_private_engine_does_nothing(tmp_path: Path) -> None:
    code, output = engine(environment(tmp_path / "out"), "--stop")
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
    code, output = engine(environment(tmp_path / "out", tmp_path / "empty", DOCKER_HOST=NAMED))
    assert code == 2
    assert f"no Docker client on PATH to reach {NAMED}" in output
    assert "apt-get install docker-cli" in output
