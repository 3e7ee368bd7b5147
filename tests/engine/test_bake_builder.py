"""The builder image, and builds in it: the same wheel as on this host, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bake_support import ROOT, Engine, private_out, result, verb
from bazel_support import MODULE, WHEEL, arguments, get_bazel, make_workspace, set_command
from build_support import kill
from process_support import call, wait_for
from tpuforge import pins as pins_module

PINS = pins_module.load()
BAKE = "tpuforge.images.bake"


@pytest.fixture(scope="module")
def record(engine: Engine) -> dict[str, object]:
    """The builder in this checkout's own out folder, baked if it is not there."""
    return result(BAKE, "--image", "builder", **engine.env)


@pytest.fixture(scope="module")
def out(record: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An out folder with the builder and what it is made of, and nothing else."""
    real = Path(os.environ.get("TPUFORGE_OUT") or ROOT / "out")
    folder = tmp_path_factory.mktemp("builder") / "out"
    return private_out(folder, real, "base", "debs", "bazel/bazelisk", "images/builder")


@pytest.fixture(scope="module")
def workspace(out: Path) -> Path:
    return make_workspace(out.parent / "work,space")


@pytest.fixture(scope="module")
def bazel(out: Path) -> Path:
    return get_bazel(out.parent)


def left(engine: Engine) -> list[str]:
    """Containers of builds, and the nameless volumes that no container uses.

    Those with a name are of other tests that run at the same time.
    """
    named = engine.run("ps", "--all", "--quiet", "--filter", "label=io.tpuforge.build")
    loose = engine.run("volume", "ls", "--quiet", "--filter", "dangling=true").stdout.split()
    return named.stdout.split() + [one for one in loose if re.fullmatch("[0-9a-f]{64}", one)]


def in_builder(workspace: Path, bazel: Path, cache: Path) -> list[str]:
    return [*arguments(workspace, bazel), "--where", "container", "--cache", str(cache)]


def start(out: Path, engine: Engine, words: Sequence[str]) -> subprocess.Popen[str]:
    env = {**os.environ, **engine.env, "PYTHONPATH": str(ROOT / "src"), "TPUFORGE_OUT": str(out)}
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, *words],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_it_has_the_pinned_bazelisk_and_works_locked_down_as_any_user(
    engine: Engine, record: dict[str, object]
) -> None:
    program = (
        "id -u; sha256sum /usr/local/bin/bazel | cut -d ' ' -f 1; git --version; "
        "for tool in python3 patch unzip xz zip; do command -v $tool; done; "
        "touch /workspace/x /home/tpu/x; command -v cc gcc clang || echo no compiler"
    )
    done = engine.run(
        *("run", "--rm", "--network=none", "--user=4321:4321", "--cap-drop=ALL"),
        *(str(record["name"]), "sh", "-c", program),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "4321"
    assert lines[1] == PINS.bazelisk.sha256
    assert lines[2].startswith("git version ")
    assert lines[3:] == [
        *(f"/usr/bin/{tool}" for tool in ("python3", "patch", "unzip", "xz", "zip")),
        "no compiler",
    ]
    config = engine.run("image", "inspect", "--format", "{{json .Config}}", str(record["name"]))
    told = json.loads(config.stdout)
    assert told["User"] == "1000:1000"
    assert told["Labels"]["io.tpuforge.bazelisk.sha256"] == PINS.bazelisk.sha256
    assert told["Labels"]["io.tpuforge.base.suite"] == "bookworm-builder"


def test_a_second_bake_elsewhere_gives_the_same_digest(
    engine: Engine, record: dict[str, object], out: Path, tmp_path: Path
) -> None:
    elsewhere = private_out(tmp_path / "another é, place", out, "base", "debs", "bazel/bazelisk")
    again = result(
        *(BAKE, "--image", "builder", "--no-cache", "--no-load"),
        **engine.env,
        TPUFORGE_OUT=str(elsewhere),
    )
    assert again["manifest_digest"] == record["manifest_digest"]


def test_what_it_does_not_take_is_refused(engine: Engine, tmp_path: Path) -> None:
    for words in (["--python", "3.11"], ["--flavour", "runtime"]):
        done = verb(BAKE, "--image", "builder", *words, TPUFORGE_OUT=str(tmp_path))
        assert done.returncode == 2
        assert "is the same for every Python" in done.stderr


@pytest.mark.slow
def test_a_build_in_it_gives_the_wheel_of_the_host_by_a_line_that_can_be_pasted(
    engine: Engine, out: Path, workspace: Path, bazel: Path
) -> None:
    found = {}
    for where in ("host", "container"):
        # caches of their own, or the second would be told what the first one made
        words = [*arguments(workspace, bazel), "--where", where]
        done = verb(
            *(MODULE, *words, "--cache", str(out.parent / where)),
            **engine.env,
            TPUFORGE_OUT=str(out),
            NO_PROXY="127.0.0.1",
            HTTP_PROXY="http://user:hush-hush@127.0.0.1:1",
        )
        assert done.returncode == 0, done.stderr
        assert "hush-hush" not in done.stdout + done.stderr
        data = json.loads((out / "results" / "build_wheel.json").read_text())["data"]
        assert data["where"] == where
        assert data["bazelisk"]["sha256"] == PINS.bazelisk.sha256
        found[where] = ((out / "wheels" / WHEEL).read_bytes(), data["wheels"][0]["made_sha256"])
    assert found["host"] == found["container"]
    assert left(engine) == []
    # what a build writes belongs to whoever asked for it
    owners = {path.lstat().st_uid for path in (out.parent / "container").rglob("*")}
    assert owners == {os.getuid()}
    told = [path for path in out.rglob("*") if path.is_file() and path.suffix in (".json", ".log")]
    assert told
    assert not [path for path in told if b"hush-hush" in path.read_bytes()]
    (line,) = [text for text in done.stderr.splitlines() if " run --rm " in text]
    pasted = call(["sh", "-c", line.partition(": ")[2]])
    assert pasted.returncode == 0, pasted.stderr
    assert "Build completed successfully" in pasted.stderr


@pytest.mark.slow
def test_interrupted_then_killed_then_again(
    engine: Engine, out: Path, workspace: Path, bazel: Path
) -> None:
    cache = out.parent / "container"
    mark = cache / "begun"
    set_command(workspace, f"touch {mark}; sleep 97; echo wheel")
    child = start(out, engine, in_builder(workspace, bazel, cache))
    wait_for(mark.exists, 120)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 130
    assert left(engine) == []
    mark.unlink()
    child = start(out, engine, in_builder(workspace, bazel, cache))
    wait_for(mark.exists, 120)
    kill(child)
    # its guard ends the container; without one the next run would
    wait_for(lambda: left(engine) == [], 60)
    set_command(workspace, "cat ci/wheel/NAME")
    done = verb(MODULE, *in_builder(workspace, bazel, cache), **engine.env, TPUFORGE_OUT=str(out))
    assert done.returncode == 0, done.stderr
    assert left(engine) == []
