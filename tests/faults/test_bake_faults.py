"""Bakes that are given bad input, starved, killed or doubled: what they say and what they leave."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from bake_support import (
    ROOT,
    Image,
    agree,
    engine,
    image,
    link,
    private_out,
    start_bake,
    verb,
    wait_for_install,
)
from process_support import disk_of, own_mounts

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


def finished(out: Path, image: Image) -> None:
    """The real image, and the layout that BuildKit wrote for it, as if baked into this folder."""
    real = image.layout.parent
    for path in (real / "image.json", *real.glob("oci/**/*")):
        if path.is_file():
            for name in ("images", "bake"):
                target = out / name / image.slug / path.relative_to(real)
                if "blobs" in path.parts:
                    link(path, target)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, target)
    (out / "bake" / image.slug / "image.json").unlink()


def iter_until(lines: IO[str], words: str) -> Iterator[str]:
    """The lines up to the first that has these words; there must be one."""
    for line in lines:
        yield line
        if words in line:
            return
    raise AssertionError(f"nobody said {words!r}")


def test_a_flipped_wheel_is_refused_by_name(out: Path, variables: dict[str, str]) -> None:
    (wheel,) = out.glob("wheelhouse/*/sympy-*.whl")
    spoil(wheel)
    done = verb(BAKE, "--no-load", **variables)
    assert done.returncode == 1
    assert f"bake: {wheel.name}: its SHA-256 is " in done.stderr
    assert f"expected: {wheel.parent.name}" in done.stderr
    assert "./forge fetch_wheel" in done.stderr
    assert not (out / "images").exists()
    assert not list((out / "bake").rglob("bake.log"))


def test_a_missing_wheel_is_named(out: Path, variables: dict[str, str]) -> None:
    (wheel,) = out.glob("wheelhouse/*/numpy-*.whl")
    wheel.unlink()
    done = verb(BAKE, "--no-load", **variables)
    assert done.returncode == 2
    assert "the wheel of numpy" in done.stderr
    assert "./forge fetch_wheel" in done.stderr


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
    both = [start_bake("--no-load", **variables) for _ in range(2)]
    ends = [(*child.communicate(timeout=900), child.returncode) for child in both]
    assert [code for _, _, code in ends] == [0, 0], ends
    assert sum("waiting for process" in err for _, err, _ in ends) == 1
    assert sum("nothing to do" in text for text, _, _ in ends) == 1
    agree(out, image)


def test_a_killed_bake_leaves_nothing_finished_and_the_next_one_ends_it(
    image: Image, out: Path, variables: dict[str, str]
) -> None:
    child = start_bake("--no-cache", "--no-load", **variables)
    wait_for_install(out, image)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert not (out / "images" / image.slug / "image.json").exists()
    # the client may live on for a while, and holds this lock as long as it does: two that write one
    # layout would spoil it
    with (out / "bake" / image.slug / "client.lock").open("w") as client:
        fcntl.flock(client, fcntl.LOCK_EX)
        again = start_bake("--no-load", **variables)
        assert again.stderr is not None
        said = "".join(iter_until(again.stderr, "waiting for the client of a bake that was killed"))
    _, rest = again.communicate(timeout=900)
    assert again.returncode == 0, said + rest
    agree(out, image)


def test_a_stopped_bake_says_so(image: Image, out: Path, variables: dict[str, str]) -> None:
    child = start_bake("--no-cache", "--no-load", **variables)
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
    finished(out, image)
    layout = out / "images" / image.slug / "oci"
    (largest, *_) = sorted((layout / "blobs" / "sha256").iterdir(), key=lambda p: -p.stat().st_size)
    # what BuildKit wrote is another name of the same file, so it is cut short as well
    written = out / "bake" / image.slug / largest.relative_to(layout.parent)
    for path in (largest, written):
        path.unlink()
    largest.write_bytes(bytes(1000))
    written.hardlink_to(largest)
    done = verb(BAKE, "--no-load", **variables)
    assert done.returncode == 0, done.stderr
    assert "has 1000 bytes instead of" in done.stderr
    assert "damaged blobs" in done.stderr
    agree(out, image)
    assert largest.stat().st_size > 1000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 300 MB: enough for a base and no image."""
    with disk_of(tmp_path / "small", "300m") as folder:
        yield folder


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


def test_every_stage_says_that_the_disk_is_full(image: Image, tmp_path: Path) -> None:
    """From its first write on; what fills up on the way is tested with each stage."""
    script = (
        'mount -t tmpfs -o size=512k none "$TPUFORGE_OUT" || exit 99\n'
        'mkdir -p "$TPUFORGE_OUT/images/$SLUG"\n'
        'cp "$REAL/image.json" "$TPUFORGE_OUT/images/$SLUG/"\n'
        'ln -s "$REAL/oci" "$TPUFORGE_OUT/images/$SLUG/oci"\n'
        'ln -s "$REAL/../../wheelhouse" "$TPUFORGE_OUT/wheelhouse"\n'
        'cat /dev/zero >"$TPUFORGE_OUT/filler" 2>/dev/null\n'
        'for module; do "$PYTHON" -m "tpuforge.$module" 2>&1; echo "code $?"; done\n'
        'find "$TPUFORGE_OUT" -type f ! -name filler ! -name image.json -size +0\n'
    )
    modules = ["build.wheelhouse", "images.base", "images.bake", "release.sbom", "smoke.health"]
    modules += ["smoke.bench", "release.report"]
    env = {**os.environ, **image.engine.env, "PYTHONPATH": str(ROOT / "src")}
    env |= {"TPUFORGE_OUT": str(tmp_path), "PYTHON": sys.executable, "SLUG": image.slug}
    done = subprocess.run(
        [*own_mounts(), "sh", "-c", script, "sh", *modules],
        env=env | {"REAL": str(image.layout.parent.resolve())},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    *said, left = done.stdout.split("code 2\n")
    assert (len(said), left) == (len(modules), ""), done.stdout + done.stderr
    for words in said:
        assert "Traceback" not in words, words
        mend = words.partition("mend:")[2]
        assert "free some space, or set TPUFORGE_OUT to a larger disk" in mend, words
        assert re.search(r"no space left", words.partition("expected:")[0], re.IGNORECASE), words
