"""The key of a bake, its folders, its labels, and what it says when BuildKit fails."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import fnmatch
import hashlib
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from bake_support import RUNTIME, checkout, lock
from tpuforge import pins as pins_module
from tpuforge.console import Progress
from tpuforge.errors import ForgeError
from tpuforge.images import bake, context
from tpuforge.process import Completed

__all__ = ["checkout"]

PINS = pins_module.load()


def target() -> context.Target:
    return context.Target("runtime", "3.11", "runtime", context.image_name("runtime", "3.11", PINS))


def key(base: str = "sha256:1") -> str:
    return context.read_inputs(target(), PINS).key(base)


def test_the_name_tells_the_versions() -> None:
    expected = f"tpuforge/runtime:{PINS.torch_tpu.version}-torch{PINS.torch.version}-py311"
    assert target().name == expected


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("images/Dockerfile", "images/"),
        ("smoke/cli.py", "smoke/"),
        ("smoke/new.py", "smoke/"),
        ("lock/runtime-py311.txt", "the lock"),
    ],
)
def test_every_file_counts(checkout: Path, path: str, part: str) -> None:
    before = context.read_inputs(target(), PINS)
    with (checkout / path).open("a") as file:
        file.write("\n# more\n")
    after = context.read_inputs(target(), PINS)
    assert before.key("b") != after.key("b")
    assert [name for name in before.parts if before.parts[name] != after.parts[name]] == [part]


def test_a_wheel_of_any_group_counts(checkout: Path) -> None:
    seen = {key()}
    lock(checkout, "runtime", {**RUNTIME, "numpy==2.4.6": b"another"})
    seen.add(key())
    lock(checkout, "smoke", {"pytest==9.2.0": b"another"})
    seen.add(key())
    lock(checkout, "tools", {"pip==26.4": b"another", "uv==0.13": b"uv"})
    seen.add(key())
    lock(checkout, "tools", {"pip==26.4": b"another", "uv==0.13": b"another"})
    seen.add(key())
    assert len(seen) == 5


def test_base_pins_and_the_executable_bit_count(checkout: Path) -> None:
    before = key()
    assert key("sha256:2") != before
    later = dataclasses.replace(PINS, epoch=PINS.epoch + 1)
    assert context.read_inputs(target(), later).key("sha256:1") != before
    (checkout / "smoke" / "cli.py").chmod(0o755)
    assert key() != before


@pytest.mark.parametrize("change", [{"ref": "v9"}, {"repository": "https://elsewhere.example/x"}])
def test_the_source_that_a_label_names_counts(checkout: Path, change: dict[str, str]) -> None:
    before = context.read_inputs(target(), PINS)
    moved = dataclasses.replace(PINS, upstream=dataclasses.replace(PINS.upstream, **change))
    after = context.read_inputs(target(), moved)
    assert before.key("b") != after.key("b")
    assert [name for name in before.parts if before.parts[name] != after.parts[name]] == [
        "the pins"
    ]


def test_what_comes_and_goes_with_use_does_not_count(checkout: Path) -> None:
    before = key()
    cache = checkout / "smoke" / "__pycache__"
    cache.mkdir()
    (cache / "cli.cpython-311.pyc").write_bytes(b"x")
    (checkout / "smoke" / ".hidden").write_text("x")
    (checkout / "smoke" / "cli.py").chmod(0o600)
    os.utime(checkout / "smoke" / "cli.py", (1, 1))
    # another lock entry of the tools is not in any image
    lock(checkout, "tools", {"nox==2": b"nox 2", "pip==26.3": b"pip", "uv==0.13": b"uv"})
    assert key() == before


def test_the_key_and_buildkit_leave_out_the_same_names(tmp_path: Path) -> None:
    """What the key ignored would otherwise come into an image all the same."""
    lines = (context.IMAGES / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert all(pattern.startswith("**/") and pattern.count("/") == 1 for pattern in patterns)

    def ignored(path: Path) -> bool:
        # a folder that is left out takes along what is in it
        return any(
            fnmatch.fnmatchcase(part, pattern.removeprefix("**/"))
            for part in path.parts
            for pattern in patterns
        )

    kinds = [".x.swp", ".git/config", "__pycache__/x.cpython-311.pyc", "__pycache__/x.txt", "y.pyc"]
    names = [*kinds, "x.py", "pyc", "pycache/x", "a.pyc.txt", "x~", "x.swp", "e.so", "#x#"]
    for name in names:
        for path in (tmp_path / name, tmp_path / "deep" / "down" / name):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2 * len(names)
    sent = {path for path in files if not ignored(path.relative_to(tmp_path))}
    assert len(sent) == 2 * (len(names) - len(kinds))
    assert set(context.tree(tmp_path)) == sent


def test_the_folders_that_buildkit_reads(checkout: Path) -> None:
    (checkout / "smoke" / "cli.py").chmod(0o640)
    inputs = context.read_inputs(target(), PINS)
    with Progress("bake", quiet=True) as progress:
        context.prepare(target(), inputs, PINS, progress)
        # a second time, as after a lock that dropped a package
        context.prepare(target(), inputs, PINS, progress)
    work = target().work
    rest = work / "wheels" / "rest"
    assert sorted(path.name for path in rest.iterdir()) == [
        "numpy-2.4.6-any.whl",
        "requirements.txt",
    ]
    digest = hashlib.sha256(b"numpy").hexdigest()
    assert (rest / "requirements.txt").read_text() == f"numpy==2.4.6 --hash=sha256:{digest}\n"
    assert (rest / "numpy-2.4.6-any.whl").stat().st_nlink > 1
    assert stat.S_IMODE((work / "suite" / "cli.py").stat().st_mode) == 0o644
    assert (
        work / "facts" / "opt" / "tpuforge" / "lock.txt"
    ).read_bytes() == target().lock.read_bytes()
    assert (
        "torch==2.13.0+cpu\n"
        in (work / "facts" / "opt" / "tpuforge" / "constraints.txt").read_text()
    )


def test_a_wheel_of_another_digest_is_refused(checkout: Path) -> None:
    (wheel,) = checkout.glob("out/wheelhouse/*/numpy-*.whl")
    wheel.write_bytes(b"nUmpy")
    inputs = context.read_inputs(target(), PINS)
    with Progress("bake", quiet=True) as progress, pytest.raises(ForgeError) as caught:
        context.prepare(target(), inputs, PINS, progress)
    assert caught.value.exit_code == 1
    assert wheel.name in caught.value.found
    assert "./forge fetch_wheel" in caught.value.mend


def test_a_lock_without_torch_tpu_is_refused(checkout: Path) -> None:
    lock(checkout, "runtime", {"libtpu==0.0.52": b"libtpu", "torch==2.13.0+cpu": b"torch"})
    with pytest.raises(ForgeError, match="has no package for the group torch-tpu"):
        context.read_inputs(target(), PINS)


def test_the_tree_declares_the_images() -> None:
    names = ["base", "builder", "dev", "pallas", "runtime", "serve", "simulator", "train"]
    assert bake.images() == names


def test_an_output_with_a_comma_in_its_folder_stays_one_field() -> None:
    assert bake._fields("type=oci", "dest=/a,b/c d") == 'type=oci,"dest=/a,b/c d"'


@pytest.mark.parametrize(
    ("output", "found", "code"),
    [
        ("ERROR: write /x/ingest/1/data: no space left on device", "a disk is full", 2),
        (
            "#9 0.3 numpy-2.4.6-py3-none-any.whl holds other bytes than the lock names\n",
            "other bytes than those that were verified: numpy-2.4.6",
            1,
        ),
        (
            "#9 0.3 error: Failed to download `numpy==2.4.6`\n"
            "#9 0.3   cause: failed to open file `numpy-2.4.6.dist-info/RECORD`\n"
            "#9 0.3 uv failed, and every wheel holds the bytes that the lock names",
            "cannot go into an image:\n#9 0.3 error: Failed to download `numpy==2.4.6`\n#9 0.3   c",
            1,
        ),
        (
            "#9 0.3 numpy-2.4.6.dist-info writes over what is there: /opt/venv/pyvenv.cfg",
            "cannot go into an image:\n#9 0.3 numpy-2.4.6.dist-info writes over",
            1,
        ),
        (
            "#9 0.4 tensorboard 2.21.0 requires markdown, which is not installed.",
            "tensorboard 2.21.0 requires markdown",
            1,
        ),
        ("OCI exporter is not supported for the docker driver", "cannot export OCI layouts", 2),
        ("ERROR: error reading from server: EOF", "the engine went away", 2),
        ("ERROR: unexpected commit digest sha256:1, expected sha256:2", "a layer of the base", 1),
        (
            '#9 [installer 1/1] RUN echo "uv holds other bytes than the lock names"; exit 1\n'
            "ERROR: failed to solve: something new",
            "failed with exit code 1",
            2,
        ),
    ],
)
def test_a_failed_bake_says_what_mends_it(
    checkout: Path, output: str, found: str, code: int
) -> None:
    target().work.mkdir(parents=True)
    done = Completed(("docker",), 1, output, 1.0)
    error = bake.explain(done, target(), checkout / "bake.log")
    assert found in error.found
    assert error.exit_code == code
    assert error.mend


WHOLE: dict[str, Any] = {
    "schema": bake.SCHEMA,
    "image": "runtime",
    "name": "tpuforge/runtime:1",
    "manifest_digest": "sha256:1",
    "config_digest": "sha256:2",
    "compressed_bytes": 1,
    "unpacked_bytes": 2,
    "layers": [{"digest": "sha256:3", "compressed_bytes": 1, "unpacked_bytes": 2, "what": "x"}],
    "key": "1",
    "inputs": {},
    "source": {"commit": None, "dirty": False, "why": "no git"},
    "notes": [],
    "run_line": "docker run",
}


def write_record(value: object) -> None:
    target().finished.mkdir(parents=True, exist_ok=True)
    (target().finished / "image.json").write_text(json.dumps(value))


def test_a_whole_record_is_read(checkout: Path) -> None:
    write_record(WHOLE | {"more": 1})
    assert bake.read_finished(target()) == WHOLE | {"more": 1}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"schema": bake.SCHEMA},
        *({name: value for name, value in WHOLE.items() if name != gone} for gone in WHOLE),
        WHOLE | {"schema": "tpuforge.image/0"},
        WHOLE | {"key": None},
        WHOLE | {"inputs": []},
        WHOLE | {"layers": {}},
        WHOLE | {"layers": [{"digest": "sha256:3"}]},
        WHOLE | {"layers": ["sha256:3"]},
        WHOLE | {"compressed_bytes": "1"},
        WHOLE | {"compressed_bytes": True},
        WHOLE | {"notes": [1]},
    ],
)
def test_a_record_that_is_not_whole_counts_as_missing(checkout: Path, value: object) -> None:
    write_record(value)
    record = bake.read_finished(target())
    assert record is None
    inputs = context.read_inputs(target(), PINS)
    assert bake._stale(target(), record, "1", inputs) == "there is none yet"


def test_a_folder_in_the_place_of_the_record_is_refused_before_the_bake(checkout: Path) -> None:
    place = target().finished / "image.json"
    place.mkdir(parents=True)
    with Progress("bake", quiet=True) as progress, pytest.raises(ForgeError) as caught:
        bake.bake(target(), PINS, progress)
    assert f"{place} is a folder" in caught.value.found
    assert f"rm -r {place}" in caught.value.mend


def test_an_output_is_one_record_whatever_the_folder_is_called() -> None:
    for name in ("/a b", "/a,b", '/a"b', "/a\nb", "/a\rb", "/ü→"):
        (fields,) = csv.reader(io.StringIO(bake._fields("type=oci", f"dest={name}"), newline=""))
        assert fields == ["type=oci", f"dest={name}"]


def test_a_base_is_named_without_an_at_sign(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the home folder of user@domain: the checkout's own out folder is reached from there."""
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "plain"))
    assert bake._place("base/x") == f"{tmp_path}/plain/base/x"
    monkeypatch.setattr(bake, "IMAGES", tmp_path / "user@domain" / "images")
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "user@domain" / "out"))
    assert bake._place("base/x") == "../out/base/x"
    for name in ("else@where", os.fsdecode(b"latin-\xe4")):
        monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / name))
        with pytest.raises(ForgeError, match="buildx cannot be told of"):
            bake._place("base/x")


def test_the_flavours_are_the_locks_with_torch_tpu(checkout: Path) -> None:
    lock(checkout, "vision", {**RUNTIME, "pillow==12.0": b"pillow"})
    assert context.flavours("3.11") == ["runtime", "vision"]
    assert context.flavours("3.12") == []


SUITES = ", ".join(sorted(PINS.suites))


@pytest.mark.parametrize(
    ("changes", "found", "expected"),
    [
        ({"flavour": "nope"}, "there is no flavour 'nope' for Python 3.11", "one of runtime"),
        ({"flavour": "tools"}, "there is no flavour 'tools' for Python 3.11", "one of runtime"),
        ({"python": "3.9"}, "there is no base with Python 3.9", f"one of {SUITES}: "),
    ],
)
def test_what_there_is_not_comes_with_what_there_is(
    checkout: Path, changes: dict[str, str], found: str, expected: str
) -> None:
    options = argparse.Namespace(**{"image": None, "python": None, "flavour": None} | changes)
    with pytest.raises(ForgeError) as caught:
        bake.choose(options, PINS)
    assert caught.value.found == found
    assert caught.value.expected.startswith(expected)
    assert caught.value.mend.startswith(f"use --{next(iter(changes))} ")
    assert caught.value.exit_code == 2


def test_the_lines_to_a_private_engine_quote_its_address() -> None:
    engine = {"private": True, "docker_host": "unix:///my out/docker.sock"}
    image = context.Target("runtime", "3.11", "runtime", "a:1")
    assert bake.local_lines(engine, image) == {
        "local_run_line": "docker -H 'unix:///my out/docker.sock' run --rm a:1 versions",
        "save_line": "docker -H 'unix:///my out/docker.sock' save a:1 | docker load",
    }
    own = bake.local_lines({**engine, "private": False}, image)
    assert own == {"local_run_line": "", "save_line": ""}


def test_the_line_for_a_tpu_says_what_it_takes_and_what_does_with_less() -> None:
    record = WHOLE | {"local_run_line": "", "save_line": ""}
    text = bake._outcome(record | {"flavour": "runtime"}).text
    assert "once the image is there: ./forge push" in text
    assert f"tpu-run HOST/NAME@{WHOLE['manifest_digest']} python" in text
    # one without wheels has nothing to do there
    assert "tpu-run" not in bake._outcome(record | {"flavour": ""}).text


def test_an_unchanged_run_refreshes_the_lines_to_the_engine(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that baked may be another than the one that is there now."""
    ours = {"private": True, "docker_host": "unix:///x"}
    monkeypatch.setattr(bake, "ensure_engine", lambda _: ours)
    monkeypatch.setattr(bake, "_base", lambda *_, **__: bake.Base("", "sha256:1", "", ()))
    monkeypatch.setattr(bake, "_stale", lambda *_: "")
    monkeypatch.setattr(bake, "_in_engine", lambda *_: True)
    monkeypatch.setattr(bake, "revision", lambda: bake.Revision(None, why="no git"))
    write_record(WHOLE | {"local_run_line": "", "save_line": ""})
    path = target().finished / "image.json"
    os.utime(path, (1000, 1000))
    with Progress("bake", quiet=True) as progress:
        outcome = bake.bake(target(), PINS, progress)
    assert outcome.status == "unchanged"
    lines = bake.local_lines(ours, target())
    assert json.loads(path.read_text()) == WHOLE | lines
    assert path.stat().st_mtime == 1000, "its time is that of the bake"
    assert lines["local_run_line"] in outcome.text
    assert outcome.data == WHOLE | lines

    # and what was baked from edited files may be what a commit holds by now
    commit = bake.Revision("c" * 40)
    for found, wanted in ((bake.Revision("c" * 40, dirty=True), None), (commit, commit.commit)):
        monkeypatch.setattr(bake, "revision", lambda found=found: found)
        with Progress("bake", quiet=True) as progress:
            outcome = bake.bake(target(), PINS, progress)
        assert outcome.status == "unchanged"
        assert json.loads(path.read_text())["source"]["commit"] == wanted
