"""Locks, inputs and the numbers in a lock's head, without a network."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tpuforge import lockfile
from tpuforge.errors import Exit, ForgeError
from tpuforge.lock import inputs
from tpuforge.lock.names import is_cuda
from tpuforge.lockfile import Locked, content_digest, parse_lock, read_digests, read_lock, read_text
from tpuforge.pins import load
from tpuforge.target import platforms

SHA = "0123456789abcdef" * 4
GOOD = f"alpha==1.0 \\\n    --hash=sha256:{SHA}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("alpha==1.0\n", "line 1: alpha has no hash"),
        (f"alpha>=1.0 --hash=sha256:{SHA}\n", "'alpha>=1.0' is not a pin"),
        (f"alpha==1.0 --hash=sha256:{SHA[:-1]}\n", "instead of --hash=sha256"),
        (f"alpha==1.0 --hash=md5:{SHA}\n", "instead of --hash=sha256"),
        (f"alpha==1.0 sha256:{SHA}\n", "instead of --hash=sha256"),
        (f"alpha==1.0 --hash=sha256:{SHA} --hash=sha256:{SHA}\n", "2 hashes instead of one"),
        (GOOD + GOOD, "line 3: alpha stands there twice"),
        ("alpha==1.0 \\\n", "ends in the middle"),
        (f"alpha==one --hash=sha256:{SHA}\n", "'one' is not a version"),
        ("# nothing\n", "holds no package"),
        (f"--index-url=elsewhere\n{GOOD}", "is not a pin"),
        (f"{GOOD}\\\n\n", "line 3: a backslash with nothing after it"),
        ("\\\n \n", "line 1: a backslash with nothing after it"),
        (GOOD.replace("\n", "\r\n"), "line 1: it has '\\r' where lines end with"),
        (f"{GOOD}# a\u2028beta==1", "line 3: it has '\\u2028'"),
        (f"{GOOD}# a\fbeta==1", "line 3: it has '\\x0c'"),
    ],
)
def test_bad_lock_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "some-py311.txt"
    path.write_bytes(text.encode())
    with pytest.raises(ForgeError) as caught:
        read_lock(path)
    assert words in caught.value.found
    assert caught.value.exit_code == Exit.FAULT


@pytest.mark.parametrize(
    "line", ["abc  file.whl", f"{SHA} file.whl", f"{SHA}  ", f"{SHA}  a/b.whl", f"{SHA.upper()}  f"]
)
def test_bad_digest_table_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "table.sha256"
    path.write_text(f"# comment\n{SHA}  good.whl\n{line}\n", encoding="utf-8")
    with pytest.raises(ForgeError, match=r"line 3") as caught:
        read_digests(path)
    assert caught.value.exit_code == Exit.FAULT


def test_second_digest_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.sha256"
    path.write_text(f"{SHA}  a.whl\n{SHA[::-1]}  a.whl\n", encoding="utf-8")
    with pytest.raises(ForgeError, match=r"a second digest for a\.whl"):
        read_digests(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("torch==2.13.0", "an index's torch without +cpu is a CUDA build"),
        ("torch==2.13.0+cpu", "'torch==2.13.0+cpu' states a version"),
        ("Torch_TPU>=0.2", "states a version"),
        ("-e ./here", "is an option of pip"),
        ("--extra-index-url=elsewhere", "is an option of pip"),
        ("-r other.in", "is an option of pip"),
        ("alpha @ file:///alpha.whl", "by its address"),
        ("./alpha.whl", "is no requirement"),
        ("nvidia-nccl-cu12", "is a CUDA package"),
        ("torchvision==0.28.0", "an index's torchvision without +cpu is a CUDA build"),
        ("alpha; sys_platform == 'linux'", "alpha has the marker sys_platform"),
        ("alpha; python_version < '3.13' and os_name == 'nt'", "alpha has the marker"),
        ("alpha\nAlpha", "line 2: alpha stands there twice"),
        ("# only words", "names no package"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "some.in"
    path.write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(ForgeError) as caught:
        inputs.read_input(path, inputs.constraints(load(), "3.11"))
    assert words in caught.value.found
    assert caught.value.exit_code == Exit.FAULT


def test_input_may_give_other_packages_a_range(tmp_path: Path) -> None:
    path = tmp_path / "some.in"
    path.write_text("jax>=0.10  # unbounded, a resolver goes back years\ntorch\n", encoding="utf-8")
    found = inputs.read_input(path, inputs.constraints(load(), "3.11"))
    assert [str(requirement) for requirement in found] == ["jax>=0.10", "torch"]


def test_line_for_one_python_counts_for_that_target_alone() -> None:
    pins = load()
    on = {
        python: {one.name: str(one.specifier) for one in inputs.requirements(pins, flavour, python)}
        for flavour, python in (("runtime", "3.11"), ("serve", "3.12"), ("dev", "3.13"))
    }
    assert on["3.12"]["numpy"] == "<2.4"
    assert on["3.12"]["setuptools"] == "<81"
    assert "vllm-torchtpu" in on["3.12"]
    assert "numpy" not in on["3.11"] | on["3.13"]
    assert {"torch", "fsspec"} < on["3.11"].keys()
    found = inputs.requirements(pins, "runtime", "3.12")
    assert [one for one in found if one.marker is not None] == []


def test_cuda_is_known_by_name() -> None:
    bad = ["nvidia-cublas-cu12", "nvidia_nccl_cu13", "cuda-bindings", "CUDA.Python", "cupy"]
    bad += ["cupy-cuda12x", "triton", "pytorch-triton", "jax-cuda13-plugin", "cudf-cu12"]
    assert [name for name in bad if not is_cuda(name)] == []
    good = ["torch", "torch-tpu", "jax", "barracuda", "numpy", "tritonclient", "libtpu"]
    assert [name for name in good if is_cuda(name)] == []


def test_platforms_are_best_first_and_no_newer_than_the_pins() -> None:
    tags = platforms(load().glibc)
    assert tags[:2] == ["manylinux_2_31_x86_64", "manylinux_2_30_x86_64"]
    assert tags[tags.index("manylinux_2_17_x86_64") + 1] == "manylinux2014_x86_64"
    assert tags[-2:] == ["manylinux_2_5_x86_64", "manylinux1_x86_64"]


def test_markers_are_read_for_the_target() -> None:
    assert (
        inputs.needs("A.b>=1; sys_platform == 'linux' and python_version < '3.12'", "3.11") == "a-b"
    )
    assert inputs.needs("a; python_version < '3.12'", "3.12") is None
    assert inputs.needs("a; platform_machine == 'aarch64'", "3.11") is None
    assert inputs.needs("a; extra == 'cuda'", "3.11") is None


def test_head_of_a_lock_shows_edits() -> None:
    text = inputs.render([Locked("beta", "2", SHA), Locked("alpha", "1", SHA)], SHA, "3.11")
    assert text.index("alpha") < text.index("beta")
    assert inputs.read_head(text) == inputs.Head(SHA, True)
    assert not inputs.read_head(text.replace("alpha==1", "alpha==2")).intact
    assert not inputs.read_head(GOOD).intact


def test_standin_is_a_wheel_that_says_what_the_real_one_says(tmp_path: Path) -> None:
    pins = load()
    for python in pins.pythons:
        wheels = inputs.cpu_wheels(pins, python)
        assert wheels.keys() == ({"torch", "torchvision"} if python == "3.12" else {"torch"})
        for name, wheel in wheels.items():
            inputs.write_standin(wheel, tmp_path)
            made = tmp_path / wheel.file
            assert inputs.wheel_metadata(made) == wheel.metadata
            with zipfile.ZipFile(made) as archive:
                assert {name.split("/")[0] for name in archive.namelist()} == {
                    f"{name}-{pins.cpu_builds[name].full}.dist-info"
                }
            needed = [inputs.needs(n, python) for n in _requires(wheel.metadata)]
            assert not [name for name in needed if name is not None and is_cuda(name)]
    with pytest.raises(ForgeError, match="has no digest of torchvision") as caught:
        inputs.cpu_wheel(pins, "torchvision", "3.14")
    assert caught.value.exit_code == Exit.FAULT


def _requires(metadata: str) -> list[str]:
    return inputs.metadata_fields(metadata)["Requires-Dist"]


def test_a_lock_that_was_edited_by_hand_is_refused_wherever_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "runtime-py311.txt"
    body = f"one==1 \\\n    --hash=sha256:{'0' * 64}\n"
    path.write_text(f"# content sha256:{content_digest(body)}\n{body}", encoding="utf-8")
    assert [package.name for package in read_lock(path)] == ["one"]
    path.write_text(path.read_text().replace("one==1", "one==2"), encoding="utf-8")
    with pytest.raises(ForgeError, match="edited by hand") as caught:
        read_lock(path)
    assert caught.value.exit_code == Exit.FAULT
    assert parse_lock(path, read_text(path))[0].version == "2"


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "bytes"])
def test_what_is_no_text_file_is_a_fault_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(lockfile, "ROOT", tmp_path)
    path = tmp_path / "lock" / "some-py311.txt"
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(GOOD.encode() + b"# \xff\n")
    readers: list[Callable[[], object]] = [
        lambda: read_lock(path),
        lambda: read_digests(path),
        lambda: inputs.read_input(path, {}),
    ]
    for reader in readers:
        with pytest.raises(ForgeError, match=r"no regular file|not UTF-8") as caught:
            reader()
        assert caught.value.exit_code == Exit.FAULT
        # a command for the root of the checkout
        assert caught.value.mend.startswith("git checkout -- lock/some-py311.txt, or ")


def test_an_input_that_is_not_there_is_a_fault_with_its_mending(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"gone\.in, line 1: it is not there") as caught:
        inputs.read_input(tmp_path / "gone.in", {})
    assert caught.value.mend.startswith("git checkout -- lock/gone.in")
