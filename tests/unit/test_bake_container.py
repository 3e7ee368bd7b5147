"""The line that runs a build in the builder image, and what it says when there is no such image."""

from __future__ import annotations

import csv
import json
import os
import shlex
from pathlib import Path

import pytest

from engine_support import client
from tpuforge.build import container
from tpuforge.build.line import Container, Plan
from tpuforge.console import Progress
from tpuforge.errors import ForgeError

DIGEST = "sha256:" + "a" * 64


def builder(**changes: object) -> container.Builder:
    values: dict[str, object] = {
        "docker": "/usr/bin/docker",
        "env": {"DOCKER_HOST": "unix:///my engine.sock"},
        "init": True,
        "name": "tpuforge/builder:1",
        "digest": DIGEST,
        "user": "1234:1234",
    }
    return container.Builder(**(values | changes))  # type: ignore[arg-type]


def line(tmp_path: Path, made: container.Builder | None = None, **env: str) -> list[str]:
    for name in ("source", "work"):
        (tmp_path / name).mkdir(exist_ok=True)
    return container.command(
        made or builder(),
        ["/home/me/bazelisk", "--output_user_root=/x", "build", "//ci/wheel:torch_tpu_wheel"],
        name="one",
        source=tmp_path / "source",
        work=tmp_path / "work",
        env=env,
        limit_s=100,
    )


def mounts(words: list[str]) -> dict[str, bool]:
    """Target to whether it can be written to, of every bind mount."""
    found = {}
    for word in words:
        if word.startswith("type=bind,"):
            (fields,) = csv.reader([word])
            target = next(field for field in fields if field.startswith("target="))
            found[target.removeprefix("target=")] = "readonly" not in fields
    return found


def test_the_line_is_that_of_the_host_with_the_images_own_bazelisk(tmp_path: Path) -> None:
    words = line(tmp_path)
    inside = ["--output_user_root=/x", "build", "//ci/wheel:torch_tpu_wheel"]
    assert words[-7:] == ["timeout", "--kill-after=30", "160", "bazelisk", *inside]
    assert words[words.index("timeout") - 1] == DIGEST
    assert words[:3] == ["/usr/bin/docker", "-H", "unix:///my engine.sock"]
    for right in ("--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only", "--init"):
        assert right in words
    assert "--user=1234:1234" in words
    assert "--privileged" not in words
    assert shlex.split(shlex.join(words)) == words


def test_source_and_caches_are_at_their_own_paths_and_all_else_is_read_only(tmp_path: Path) -> None:
    bazel, inside = tmp_path / "a bazel, mine", tmp_path / "work" / "bazel"
    bazel.touch()
    found = mounts(line(tmp_path, USE_BAZEL_VERSION=str(bazel)))
    writable = {path for path, can in found.items() if can}
    assert writable == {str(tmp_path / "source"), str(tmp_path / "work")}
    assert str(bazel) in found
    inside.touch()
    found = mounts(line(tmp_path, USE_BAZEL_VERSION=str(inside)))
    assert str(inside) not in found, "it lies in a folder that is mounted already"
    assert "7.7.1" not in mounts(line(tmp_path, USE_BAZEL_VERSION="7.7.1"))


def test_the_machines_certificates_come_along_once(tmp_path: Path) -> None:
    bundle = tmp_path / "certificates" / "mine.pem"
    bundle.parent.mkdir()
    bundle.touch()
    words = line(tmp_path, SSL_CERT_FILE=str(bundle), CURL_CA_BUNDLE=str(bundle))
    targets = [word for word in words if word.startswith("type=bind,") and "mine.pem" in word]
    assert len(targets) == 1
    # a folder that holds it needs no second mount below it, which Docker would refuse
    words = line(tmp_path, SSL_CERT_FILE=str(bundle), SSL_CERT_DIR=str(bundle.parent))
    listed = list(mounts(words))
    assert len(listed) == len(set(listed))


def test_what_is_the_users_own_is_named_and_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hush@proxy:1")
    words = line(
        tmp_path,
        HTTPS_PROXY="http://me:hush@proxy:1",
        BAZELISK_HOME="/w/home",
        HOME="/home/me",
        PATH="/home/me/bin",
        USER="me",
    )
    assert "hush" not in shlex.join(words)
    told = [words[at + 1] for at, word in enumerate(words) if word == "--env"]
    assert told == ["BAZELISK_HOME=/w/home", f"HOME={tmp_path / 'work' / 'home'}", "HTTPS_PROXY"]
    proxied = {"HTTPS_PROXY": "http://me:hush@proxy:1"}
    env = Container(Plan(tmp_path), tmp_path, proxied, builder(), "").process_env()
    assert env == {"HTTPS_PROXY": "http://me:hush@proxy:1", "DOCKER_HOST": "unix:///my engine.sock"}


def test_an_engine_of_another_kind(tmp_path: Path) -> None:
    words = line(tmp_path, builder(env={"DOCKER_CONTEXT": "mine"}, init=False))
    assert words[:3] == ["/usr/bin/docker", "--context", "mine"]
    assert "--init" not in words
    assert line(tmp_path, builder(env={}))[:2] == ["/usr/bin/docker", "run"]


def records(
    out: Path, docker: Path, *, host: str = "unix:///x.sock", manifest: str = DIGEST
) -> None:
    """The records of an engine and of a builder image in it."""
    engine = {"docker": str(docker), "docker_host": host, "env": {"DOCKER_HOST": host}}
    image = {"name": "tpuforge/builder:1", "manifest_digest": manifest, "config_digest": "sha256:c"}
    for path, value in (
        (out / "engine" / "engine.json", engine | {"init": True}),
        (out / "images" / "builder" / "image.json", image),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("security", "user"),
    [
        ('["name=seccomp,profile=builtin"]', f"{os.getuid()}:{os.getgid()}"),
        # there root is the caller, and every other number is somebody else
        ('["name=seccomp,profile=builtin","name=rootless"]', "0:0"),
    ],
)
def test_the_builder_is_what_the_records_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, security: str, user: str
) -> None:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "out"))
    answers = {"image inspect": (0, DIGEST), "info": (0, security)}
    docker = client(tmp_path / "bin", answers) / "docker"
    records(tmp_path / "out", docker)
    found = container._builder()
    assert (found.name, found.digest, found.user) == ("tpuforge/builder:1", DIGEST, user)


@pytest.mark.parametrize(
    ("changes", "said", "code"),
    [
        ({"host": "tcp://far:2375"}, "the engine at tcp://far:2375 cannot see this machine's", 2),
        ({"host": "ssh://me@far"}, "cannot see this machine's folders", 2),
        ({"manifest": "sha256:other"}, "does not hold tpuforge/builder:1 with the digest", 1),
    ],
)
def test_an_engine_that_cannot_build_here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    said: str,
    code: int,
) -> None:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "out"))
    docker = client(tmp_path / "bin", {"image inspect": (0, DIGEST), "info": (0, "[]")}) / "docker"
    records(tmp_path / "out", docker, **changes)
    with pytest.raises(ForgeError) as caught:
        container._builder()
    assert said in caught.value.found
    assert caught.value.exit_code == code


@pytest.mark.parametrize("content", ["", "[]", '{"docker": 1}', "null"])
def test_a_record_that_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "out"))
    records(tmp_path / "out", tmp_path / "docker")
    (tmp_path / "out" / "images" / "builder" / "image.json").write_text(content)
    with pytest.raises(ForgeError, match="is damaged") as caught:
        container._builder()
    assert "./forge bake --image builder" in caught.value.mend


def test_without_an_engine_it_says_how_to_build_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "out"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    with Progress("build_wheel", quiet=True) as progress, pytest.raises(ForgeError) as caught:
        container.find_builder(progress)
    assert "there is no builder image to build in: no Docker daemon answers" in caught.value.found
    assert "--where host" in caught.value.mend
    assert caught.value.exit_code == 2
