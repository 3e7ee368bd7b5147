"""Bakes that are given bad input, starved, killed or doubled: what they say and what they leave."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from bake_support import ROOT, Engine, Image, engine, image, private_out, verb
from tpuforge.images.reproduce import differences

__all__ = ["engine", "image"]

BAKE = "tpuforge.images.bake"


def spoil(path: Path) -> None:
    """Flip a byte in the middle of a file that may have other names, keeping size and time."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    stat = path.stat()
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.fixture
def out(image: Image, tmp_path: Path) -> Path:
    """An out folder of its own with the real wheels and the real base, and nothing baked."""
    return private_out(tmp_path / "out", image.out)


@pytest.fixture
def variables(image: Image, out: Path) -> dict[str, str]:
    return {**image.engine.env, "TPUFORGE_OUT": str(out)}


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", BAKE, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_install(out: Path, image: Image) -> None:
    """Wait until a bake has come to its wheels."""
    log = out / "bake" / image.slug / "bake.log"
    deadline = time.monotonic() + 300
    while not (log.exists() and "install_wheels.py" in log.read_text(errors="replace")):
        assert time.monotonic() < deadline, "the bake never began"
        time.sleep(0.2)


def iter_until(lines: IO[str], words: str) -> Iterator[str]:
    """The lines up to the first that has these words; there must be one."""
    for line in lines:
        yield line
        if words in line:
            return
    raise AssertionError(f"nobody said {words!r}")


def record(out: Path, slug: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((out / "images" / slug / "image.json").read_text())
    return found


def agree(out: Path, image: Image) -> None:
    """Prove that an out folder holds the same image as the real one, or say what differs."""
    made = record(out, image.slug)
    assert made["inputs"] == image.inputs, "an input was edited while this test ran"
    found = list(differences(out / "images" / image.slug / "oci", image.layout))
    assert made["manifest_digest"] == image.record["manifest_digest"], found[:10]


def test_a_flipped_wheel_is_refused_by_name(out: Path, variables: dict[str, str]) -> None:
    (wheel,) = out.glob("wheelhouse/*/sympy-*.whl")
    spoil(wheel)
    done = verb(BAKE, "--no-load", **variables)
    assert done.returncode == 1
    assert f"bake: {wheel.name}: its SHA-256 is " in done.stderr
    assert f"expected: {wheel.parent.name}" in done.stderr
    assert "forge fetch_wheel" in done.stderr
    assert not (out / "images").exists()
    assert not list((out / "bake").rglob("bake.log"))


def test_a_missing_wheel_is_named(out: Path, variables: dict[str, str]) -> None:
    (wheel,) = out.glob("wheelhouse/*/numpy-*.whl")
    wheel.unlink()
    done = verb(BAKE, "--no-load", **variables)
    assert done.returncode == 2
    assert "the wheel of numpy" in done.stderr
    assert "forge fetch_wheel" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--image", "nothing"), "there is no image 'nothing'"),
        (("--python", "2.7"), "there is no base with Python 2.7"),
        (("--image", "serve"), "there is no flavour 'serve' for Python 3.11"),
        (("--flavour", "nothing"), "there is no flavour 'nothing' for Python 3.11"),
        (("--flavour", "tools"), "there is no flavour 'tools' for Python 3.11"),
        (("--base", "docker-image://debian:bookworm"), "does not name a base image by digest"),
    ],
)
def test_what_cannot_be_baked_is_said_at_once(
    arguments: tuple[str, ...], said: str, variables: dict[str, str]
) -> None:
    done = verb(BAKE, *arguments, **variables)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "mend:" in done.stderr


def test_an_engine_that_does_not_answer(out: Path, tmp_path: Path) -> None:
    host = f"unix://{tmp_path}/nobody.sock"
    done = verb(BAKE, TPUFORGE_OUT=str(out), DOCKER_HOST=host)
    assert done.returncode == 2
    assert f"no Docker daemon answers at {host}" in done.stderr
    assert not (out / "images").exists()


def test_two_bakes_at_once(image: Image, out: Path, variables: dict[str, str]) -> None:
    both = [start("--no-load", **variables) for _ in range(2)]
    ends = [(*child.communicate(timeout=900), child.returncode) for child in both]
    assert [code for _, _, code in ends] == [0, 0], ends
    assert sum("waiting for process" in err for _, err, _ in ends) == 1
    assert sum("nothing to do" in text for text, _, _ in ends) == 1
    agree(out, image)


def test_a_killed_bake_leaves_nothing_finished_and_the_next_one_ends_it(
    image: Image, out: Path, variables: dict[str, str]
) -> None:
    child = start("--no-cache", "--no-load", **variables)
    wait_for_install(out, image)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert not (out / "images" / image.slug / "image.json").exists()
    # the client may live on for a while, and holds this lock as long as it does: two that write one
    # layout would spoil it
    with (out / "bake" / image.slug / "client.lock").open("w") as client:
        fcntl.flock(client, fcntl.LOCK_EX)
        again = start("--no-load", **variables)
        assert again.stderr is not None
        said = "".join(iter_until(again.stderr, "waiting for the client of a bake that was killed"))
    _, rest = again.communicate(timeout=900)
    assert again.returncode == 0, said + rest
    agree(out, image)


def test_a_stopped_bake_says_so(image: Image, out: Path, variables: dict[str, str]) -> None:
    child = start("--no-cache", "--no-load", **variables)
    wait_for_install(out, image)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted" in said
    assert not (out / "images").exists()


def test_a_damaged_base_is_made_again(image: Image, out: Path, variables: dict[str, str]) -> None:
    base = json.loads((out / "base" / "bookworm.json").read_text())
    spoil(out / base["layout"] / "blobs" / "sha256" / base["tar_sha256"])
    done = verb(BAKE, "--no-load", **variables)
    assert done.returncode == 0, done.stderr
    assert "the base is damaged, making it again" in done.stderr
    agree(out, image)


def test_a_damaged_layout_is_written_again(
    image: Image, out: Path, variables: dict[str, str]
) -> None:
    assert verb(BAKE, "--no-load", **variables).returncode == 0
    layout = out / "images" / image.slug / "oci"
    (largest, *_) = sorted((layout / "blobs" / "sha256").iterdir(), key=lambda p: -p.stat().st_size)
    with largest.open("r+b") as file:
        # the name of a hard link: what BuildKit wrote is cut short as well
        file.truncate(1000)
    done = verb(BAKE, "--no-load", **variables)
    assert done.returncode == 0, done.stderr
    assert "has 1000 bytes instead of" in done.stderr
    assert "damaged blobs" in done.stderr
    agree(out, image)
    assert largest.stat().st_size > 1000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 300 MB: enough for a base and no image."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300m", "tpuforge-test", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_said_and_the_next_bake_recovers(
    image: Image, out: Path, small_disk: Path, variables: dict[str, str]
) -> None:
    work = out / "bake"
    work.mkdir()
    work_real = out / "bake-on-a-larger-disk"
    (work / image.slug).symlink_to(small_disk, target_is_directory=True)
    done = verb(BAKE, "--no-load", **variables)
    assert done.returncode == 2, done.stderr
    assert "no space left on device" in done.stderr.lower()
    assert "free some space" in done.stderr
    assert not (out / "images" / image.slug / "image.json").exists()
    (work / image.slug).unlink()
    work_real.mkdir()
    done = verb(BAKE, "--no-load", **variables)
    assert done.returncode == 0, done.stderr
    agree(out, image)


def test_the_engine_lost_the_image(image: Image, engine: Engine) -> None:
    assert engine.run("rmi", "--force", image.name).returncode == 0
    done = verb(BAKE)
    assert done.returncode == 0, done.stderr
    assert "is loaded into the engine again" in done.stdout
    found = engine.run("image", "inspect", "--format", "{{.Id}}", image.name).stdout.strip()
    assert found in (image.record["manifest_digest"], image.record["config_digest"])


@contextlib.contextmanager
def private_engine(out: Path) -> Iterator[None]:
    """The private engine of an out folder; one that runs goes before Docker's default one."""
    begin = (
        "from tpuforge.console import Progress; from tpuforge.images import daemon; "
        "progress = Progress('test', quiet=True); daemon.ensure_packages(progress); "
        "print(daemon.start(progress))"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("DOCKER_")}
    env |= {"PYTHONPATH": str(ROOT / "src"), "TPUFORGE_OUT": str(out)}
    try:
        subprocess.run([sys.executable, "-c", begin], env=env, check=True, timeout=300)
        yield
    finally:
        stop = [sys.executable, "-m", "tpuforge.images.engine", "--stop"]
        subprocess.run(stop, env=env, check=True, timeout=300)


@pytest.fixture
def no_docker_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("a private engine needs root")
    for name in [name for name in os.environ if name.startswith("DOCKER_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def small_engine(out: Path, no_docker_settings: None) -> Iterator[Path]:
    """An out folder whose private engine has 1 GB for its data."""
    folder = out / "engine"
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1g", "tpuforge-test", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        with private_engine(out):
            yield out
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_of_the_engine_is_said(image: Image, small_engine: Path) -> None:
    done = verb(BAKE, TPUFORGE_OUT=str(small_engine))
    assert done.returncode == 2, done.stderr
    assert "a disk is full" in done.stderr
    assert "docker builder prune -f" in done.stderr
    assert not (small_engine / "images" / image.slug / "image.json").exists()
    # the engine lives on, and says so
    assert verb("tpuforge.images.engine", TPUFORGE_OUT=str(small_engine)).returncode == 0


@pytest.mark.slow
@pytest.mark.usefixtures("no_docker_settings")
def test_an_engine_killed_while_baking_and_a_new_engine_gives_the_same_digest(
    image: Image, out: Path
) -> None:
    with private_engine(out):
        child = start("--no-load", TPUFORGE_OUT=str(out))
        wait_for_install(out, image)
        daemon = json.loads((out / "engine" / "engine.json").read_text())["pid"]
        os.kill(daemon, signal.SIGKILL)
        _, said = child.communicate(timeout=120)
        assert child.returncode == 2, said
        assert "the engine went away while it was baking" in said
        assert "forge engine" in said
        assert not (out / "images").exists()
        # it is started again, with the data that the killed one left
        done = verb(BAKE, "--no-load", TPUFORGE_OUT=str(out))
        assert done.returncode == 0, done.stderr
        agree(out, image)
