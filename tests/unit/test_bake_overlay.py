"""A torch_tpu wheel that is given to the bake: what is taken, what is refused, and what it says."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from bake_support import RUNTIME, checkout, lock, verb
from bazel_support import add_wheel
from tpuforge import pins as pins_module
from tpuforge.build.audit import audit as audit_wheel
from tpuforge.console import Progress
from tpuforge.errors import ForgeError
from tpuforge.images import bake, context, overlay
from tpuforge.lockfile import Locked, read_lock
from tpuforge.smoke import bench, container

__all__ = ["checkout"]

PINS = pins_module.load()
COMMIT = "a" * 40
TAGS = "cp311-cp311-manylinux_2_31_x86_64"
REQUIRES = ("numpy>=2", "libtpu>=0.0.50", "torch>=2.11.0,<=2.15.0")


def wheel(
    folder: Path,
    *,
    project: str = "torch_tpu",
    version: str = "0.3.0.dev1",
    tags: str = TAGS,
    requires: tuple[str, ...] = REQUIRES,
    python: str = ">=3.11",
    inside: str = "",
    commit: str = COMMIT,
) -> Path:
    """A small wheel; ``inside`` is another name that its metadata state."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{project}-{version}-{tags}.whl"
    lines = [f"Name: {inside or project}", f"Version: {version}", f"Requires-Python: {python}"]
    lines += [f"Requires-Dist: {one}" for one in requires]
    with zipfile.ZipFile(path, "w") as archive:
        text = "\n".join(["Metadata-Version: 2.1", *lines]) + "\n\nRequires-Dist: not-this\n"
        archive.writestr(f"{project}-{version}.dist-info/METADATA", text)
        archive.writestr("torch_tpu/include/XLA_COMMIT", f"{commit}\n")
    return path


def read(path: Path, *, unaudited: bool = False) -> overlay.Wheel:
    with Progress("bake", quiet=True) as progress:
        return overlay.read_wheel(path, progress, unaudited=unaudited)


def audit(path: Path, **changes: object) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    record = {
        "schema": "tpuforge.audit/1",
        "wheel": {"sha256": digest},
        "ok": True,
        "findings": [{"rule": "glue", "severity": "error", "what": "there is no glue"}],
    }
    path.with_name(f"{path.name}.audit.json").write_text(json.dumps(record | changes))


def given(path: Path) -> context.Target:
    one = read(path)
    name = context.image_name("runtime", "3.11", PINS, one)
    return context.Target("runtime", "3.11", "runtime", name, one)


def test_a_wheel_tells_what_it_is(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    one = read(path)
    assert (one.version, one.xla_commit, one.requires) == ("0.3.0.dev1", COMMIT, REQUIRES)
    assert one.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert "was not audited" in one.audit


def test_the_tag_is_never_that_of_the_pinned_image(tmp_path: Path) -> None:
    # the same version as the pinned one, and one with a local part
    for version, shown in ((PINS.torch_tpu.version, PINS.torch_tpu.version), ("1+a.b", "1_a.b")):
        one = read(wheel(tmp_path, version=version))
        name = context.image_name("runtime", "3.11", PINS, one)
        assert name.startswith(f"tpuforge/runtime:{shown}-torch{PINS.torch.version}-py311-wheel.")
        assert name.endswith(one.sha256[:8])
        assert name != context.image_name("runtime", "3.11", PINS)


def test_the_overlay_is_the_lock_but_for_one_package(checkout: Path, tmp_path: Path) -> None:
    target = given(wheel(tmp_path / "w"))
    assert target.wheel is not None
    inputs = context.read_inputs(target, PINS)
    path = tmp_path / "lock.txt"
    path.write_text(inputs.overlay)
    before, after = read_lock(target.lock), read_lock(path)
    assert [one for one in after if one not in before] == [
        Locked("torch-tpu", "0.3.0.dev1", target.wheel.sha256)
    ]
    assert [one.name for one in before] == [one.name for one in after]
    assert inputs.lock_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert hashlib.sha256(target.lock.read_bytes()).hexdigest() in inputs.overlay
    path.write_text(inputs.overlay.replace("0.3.0.dev1", "0.3.0.dev2"))
    with pytest.raises(ForgeError, match="edited by hand"):
        read_lock(path)


def test_everything_that_tells_of_the_image_tells_of_the_wheel(
    checkout: Path, tmp_path: Path
) -> None:
    target = given(wheel(tmp_path / "w"))
    one = target.wheel
    assert one is not None
    inputs = context.read_inputs(target, PINS)
    plain = dataclasses.replace(target, wheel=None)
    pinned = context.read_inputs(plain, PINS)
    changed = [name for name, value in inputs.parts.items() if pinned.parts[name] != value]
    assert changed == ["the wheel that was given"]
    facts, labels = context.facts(target, inputs, PINS), context.labels(target, inputs, PINS)
    assert facts["overlay"] == f"{one.file}, sha256:{one.sha256}"
    assert facts["torch_tpu"] == labels["io.tpuforge.torch-tpu.version"] == "0.3.0.dev1"
    assert facts["xla_commit"] == labels["io.tpuforge.xla.commit"] == COMMIT
    assert labels["io.tpuforge.torch-tpu.wheel.sha256"] == one.sha256
    assert labels["io.tpuforge.overlay.wheel.sha256"] == one.sha256
    assert PINS.upstream.ref not in labels["io.tpuforge.torch-tpu.source"]
    first, second = bake._wheel_notes(target, PINS)
    assert one.sha256 in first
    assert PINS.torch_tpu.version in first
    assert "not audited" in second
    # and nothing of an image without one does
    assert "overlay" not in context.facts(plain, pinned, PINS)
    assert not [name for name in context.labels(plain, pinned, PINS) if "overlay" in name]
    assert bake._wheel_notes(plain, PINS) == []


def test_the_folders_that_buildkit_reads_hold_a_copy(checkout: Path, tmp_path: Path) -> None:
    path = wheel(tmp_path / "w")
    target = given(path)
    inputs = context.read_inputs(target, PINS)
    with Progress("bake", quiet=True) as progress:
        context.prepare(target, inputs, PINS, progress)
    folder = target.work / "wheels" / "torch-tpu"
    assert [one.name for one in sorted(folder.iterdir())] == ["requirements.txt", path.name]
    assert (folder / path.name).read_bytes() == path.read_bytes()
    # whoever writes to the file now does not write into the bake
    assert not (folder / path.name).samefile(path)
    assert (target.work / "facts" / "opt" / "tpuforge" / "lock.txt").read_text() == inputs.overlay
    # the next bake without it takes the locked one again, and its lock
    plain = dataclasses.replace(target, wheel=None)
    with Progress("bake", quiet=True) as progress:
        context.prepare(plain, context.read_inputs(plain, PINS), PINS, progress)
    assert not (folder / path.name).exists()
    assert not (target.work / "given").exists()
    assert (
        target.work / "facts" / "opt" / "tpuforge" / "lock.txt"
    ).read_bytes() == target.lock.read_bytes()


def test_a_file_that_changes_as_the_bake_begins(checkout: Path, tmp_path: Path) -> None:
    path = wheel(tmp_path / "w")
    target = given(path)
    inputs = context.read_inputs(target, PINS)
    with path.open("ab") as file:
        file.write(b"more")
    with Progress("bake", quiet=True) as progress, pytest.raises(ForgeError) as caught:
        context.prepare(target, inputs, PINS, progress)
    assert "was changed while the bake began" in caught.value.found
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tags": TAGS.replace("311", "312")}, "it is for cp312-cp312-manylinux_2_31_x86_64"),
        ({"tags": "cp311-cp311-manylinux_2_39_x86_64"}, "the image has Python 3.11 and glibc 2.36"),
        ({"tags": "cp311-cp311-win_amd64"}, "it is for cp311-cp311-win_amd64"),
        ({"python": ">=3.12"}, "it wants Python >=3.12, the image has 3.11"),
        ({"python": "newest"}, "its Requires-Python is 'newest'"),
        ({"requires": ("torch>=2.14",)}, "it requires torch>=2.14, the lock has 2.13.0+cpu"),
        ({"requires": ("libtpu<0.0.52",)}, "it requires libtpu<0.0.52, the lock has 0.0.52"),
        ({"requires": ("scipy>=1",)}, "it requires scipy>=1, which the lock does not hold"),
        ({"requires": ("two words",)}, "it requires 'two words', which cannot be read"),
    ],
)
def test_a_wheel_that_does_not_fit_is_refused_with_the_line(
    checkout: Path, tmp_path: Path, changes: dict[str, object], line: str
) -> None:
    target = given(wheel(tmp_path / "w", **changes))  # type: ignore[arg-type]
    with pytest.raises(ForgeError) as caught:
        context.read_inputs(target, PINS)
    assert line in caught.value.found
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    "changes",
    [
        # a CPU build is in the range of its release; a marker for another place does not count
        {"requires": ("torch<=2.13.0", "pywin32; sys_platform == 'win32'", "x; extra == 'dev'")},
        {"tags": "cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64"},
        {"tags": "cp38-abi3-linux_x86_64"},
        {"version": "0.2.0+local.1"},
    ],
)
def test_a_wheel_that_fits(checkout: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    target = given(wheel(tmp_path / "w", **changes))  # type: ignore[arg-type]
    assert context.read_inputs(target, PINS).overlay


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"project": "libtpu"}, "it is a wheel of libtpu"),
        ({"inside": "torch"}, "it is a wheel of torch, and named one of torch-tpu"),
        ({"commit": "unknown"}, "holds 'unknown' instead of an XLA commit"),
    ],
)
def test_another_projects_wheel(tmp_path: Path, changes: dict[str, str], why: str) -> None:
    path = wheel(tmp_path, **changes)  # type: ignore[arg-type]
    with pytest.raises(ForgeError) as caught:
        read(path)
    assert why in caught.value.found
    assert caught.value.exit_code == 1


def test_what_is_no_wheel(tmp_path: Path) -> None:
    path = tmp_path / f"torch_tpu-1-{TAGS}.whl"
    path.write_bytes(b"PK\x03\x04 half a zip")
    with pytest.raises(ForgeError, match="it is not a zip archive"):
        read(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("torch_tpu/__init__.py", "")
    with pytest.raises(ForgeError, match="it has 0 METADATA files instead of one"):
        read(path)
    moved = wheel(tmp_path, version="2").rename(tmp_path / f"torch_tpu-3-{TAGS}.whl")
    with pytest.raises(ForgeError, match="its name says version 3, its metadata 2"):
        read(moved)
    text = tmp_path / "notes.txt"
    text.write_text("x")
    with pytest.raises(ForgeError, match="its name is not that of a wheel"):
        read(text)


@pytest.mark.parametrize("kind", ["missing", "folder", "unreadable"])
def test_a_path_that_cannot_be_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"torch_tpu-1-{TAGS}.whl"
    if kind == "folder":
        path.mkdir()
    elif kind == "unreadable":
        # as root may read everything, a link that leads to itself
        path.symlink_to(path)
    with pytest.raises(ForgeError) as caught:
        read(path)
    assert "cannot be read" in caught.value.found
    assert caught.value.exit_code == 2


def test_an_audit_beside_it_decides(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    audit(path)
    assert read(path).audit == ""
    audit(path, ok=False)
    with pytest.raises(ForgeError) as caught:
        read(path)
    assert "its audit found errors: glue: there is no glue" in caught.value.found
    assert "--unaudited" in caught.value.mend
    assert caught.value.exit_code == 1
    assert "there is no glue (taken with --unaudited)" in read(path, unaudited=True).audit


def test_what_build_wheel_leaves_is_taken(checkout: Path, tmp_path: Path) -> None:
    """A wheel as the build makes it, with the audit's own report beside it."""
    path = add_wheel(tmp_path, suffix=".dev20261130")
    report = audit_wheel(path, torch=PINS.torch.full)
    path.with_name(f"{path.name}.audit.json").write_text(json.dumps(report.as_dict()))
    target = given(path)
    assert target.wheel is not None
    assert target.wheel.audit == ""
    assert "0.2.0.dev20261130-torch" in target.name
    assert context.read_inputs(target, PINS).overlay


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"wheel": {"sha256": "0" * 64}}, "is the audit of a file with SHA-256 000"),
        ({"ok": "yes"}, "audit.json is damaged"),
        ({"schema": "tpuforge.audit/0"}, "audit.json is damaged"),
        ({"wheel": []}, "audit.json is damaged"),
    ],
)
def test_an_audit_of_something_else_is_none(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    path = wheel(tmp_path)
    audit(path, **changes)
    with pytest.raises(ForgeError) as caught:
        read(path)
    assert why in caught.value.found


def test_its_install_is_not_timed_by_the_lock(tmp_path: Path) -> None:
    """The benchmark installs the wheels of a lock, and this one stands in none."""
    (tmp_path / "image.json").write_text(json.dumps({"overlay": {"file": "torch_tpu-9.whl"}}))
    subject = container.Subject("runtime-py311", "a:1", ("sha256:1",), tmp_path / "oci")
    assert bench._lock_of(subject) == (
        "only for the wheels of a lock: torch_tpu-9.whl was given to the bake"
    )


def test_the_builder_takes_no_wheel(tmp_path: Path) -> None:
    options = argparse.Namespace(image="builder", python=None, flavour=None)
    with pytest.raises(ForgeError, match="holds no wheels"):
        bake.choose(options, PINS, read(wheel(tmp_path)))


def test_the_verb_refuses_before_it_looks_for_an_engine(tmp_path: Path) -> None:
    """The message and the exit code, as a user sees them."""
    path = wheel(tmp_path, tags=TAGS.replace("311", "312"))
    there = {"TPUFORGE_OUT": str(tmp_path / "out"), "DOCKER_HOST": "unix:///nowhere.sock"}
    done = verb("tpuforge.images.bake", "--wheel", str(path), **there)
    assert done.returncode == 1, done.stderr
    assert f"{path.name} does not go with runtime-py311.txt" in done.stderr
    (tmp_path / "torch_tpu.whl").touch()
    done = verb("tpuforge.images.bake", "--wheel", str(tmp_path / "torch_tpu.whl"), **there)
    assert done.returncode == 1
    assert "its name is not that of a wheel" in done.stderr
    done = verb("tpuforge.images.bake", "--unaudited", **there)
    assert done.returncode == 2
    assert "--unaudited says nothing without --wheel" in done.stderr
    for missing in (tmp_path / f"torch_tpu-9-{TAGS}.whl", tmp_path / "none.whl"):
        done = verb("tpuforge.images.bake", "--wheel", str(missing), **there)
        assert done.returncode == 2
        assert "No such file" in done.stderr
    assert not (tmp_path / "out" / "images").exists()


def test_a_lock_of_a_flavour_without_torch_tpu(checkout: Path, tmp_path: Path) -> None:
    lock(checkout, "runtime", {k: v for k, v in RUNTIME.items() if not k.startswith("torch-tpu")})
    with pytest.raises(ForgeError, match="has no package for the group torch-tpu"):
        context.read_inputs(given(wheel(tmp_path / "w")), PINS)


def test_the_key_follows_the_bytes(checkout: Path, tmp_path: Path) -> None:
    first = wheel(tmp_path / "1")
    keys = [context.read_inputs(given(first), PINS).key("b")]
    shutil.copy(first, tmp_path / first.name)
    os.utime(tmp_path / first.name, (1, 1))
    keys.append(context.read_inputs(given(tmp_path / first.name), PINS).key("b"))
    assert keys[0] == keys[1]
    # what the image says of its audit is a part of it
    audit(first)
    assert context.read_inputs(given(first), PINS).key("b") != keys[0]
    other = wheel(tmp_path / "2", commit="b" * 40)
    assert context.read_inputs(given(other), PINS).key("b") != keys[0]


def _spoil(path: Path, how: str) -> None:
    """Damage the metadata of a wheel."""
    methods = {"bzip2": zipfile.ZIP_BZIP2, "lzma": zipfile.ZIP_LZMA}
    with zipfile.ZipFile(path) as archive:
        entries = [(one.filename, archive.read(one)) for one in archive.infolist()]
    with zipfile.ZipFile(path, "w", methods.get(how, zipfile.ZIP_DEFLATED)) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    data = bytearray(path.read_bytes())
    directory = data.index(b"PK\1\2")
    if how == "encrypted":
        data[6] |= 1
        data[directory + 8] |= 1
    elif how == "method":
        data[8] = data[directory + 10] = 97
    else:
        start = 30 + len(entries[0][0])
        data[start : start + 60] = b"\xff" * 60
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["deflate", "bzip2", "lzma", "encrypted", "method"])
def test_a_wheel_whose_metadata_cannot_be_unpacked(tmp_path: Path, how: str) -> None:
    path = wheel(tmp_path)
    _spoil(path, how)
    with pytest.raises(ForgeError, match="not a zip archive that can be read") as caught:
        read(path)
    assert caught.value.exit_code == 1


@pytest.mark.timeout(20)
def test_a_wheel_that_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"torch_tpu-0.3.0-{TAGS}.whl"
    os.mkfifo(tmp_path / name)
    with pytest.raises(ForgeError, match="cannot be read: not a regular file"):
        read(tmp_path / name)
    (tmp_path / "folder" / name).mkdir(parents=True)
    with pytest.raises(ForgeError, match="cannot be read: not a regular file"):
        read(tmp_path / "folder" / name)
    with pytest.raises(ForgeError, match="no home folder of that name"):
        read(Path("~nobody-of-that-name") / name)
    monkeypatch.setattr(overlay, "_TEXT_MOST", 10)
    with pytest.raises(ForgeError, match="METADATA has more than 10 bytes"):
        read(wheel(tmp_path / "large"))
