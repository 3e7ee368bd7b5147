"""Every static check of installed packages must be able to fail."""

from __future__ import annotations

import importlib.util
import os
import py_compile
from pathlib import Path

import pytest
from smoke import installed

from smoke_suite_support import TORCH_VERSION, elf, lock_of, package, torch


def test_a_set_that_is_the_lock_has_no_problem(tmp_path: Path) -> None:
    torch(tmp_path)
    package(tmp_path, "Typing_Extensions", "4.16.0")
    package(tmp_path, "pip", "26.3")
    lock = tmp_path / "lock.txt"
    lock.write_text("# a comment\n" + lock_of(torch="2.13.0+cpu", typing_extensions="4.16.0"))
    assert installed.closure_problems(tmp_path, lock) == []


def test_every_difference_from_the_lock_is_named(tmp_path: Path) -> None:
    torch(tmp_path)
    package(tmp_path, "numpy", "2.4.5")
    package(tmp_path, "stranger", "1.0")
    package(tmp_path, "twice", "1.0")
    package(tmp_path, "twice", "1.1")
    lock = tmp_path / "lock.txt"
    lock.write_text(lock_of(torch="2.13.0+cpu", numpy="2.4.6", twice="1.0", absl_py="2.5.1"))
    assert installed.closure_problems(tmp_path, lock) == [
        "numpy is 2.4.5, the lock says 2.4.6",
        "stranger 1.0 is installed and not in the lock",
        "twice is installed twice, as 1.0 and 1.1: remove one .dist-info",
        "absl-py 2.5.1 is missing",
    ]


@pytest.mark.parametrize("text", ["", "# nothing\n", "torch>=2\n"])
def test_a_lock_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock.txt").write_text(text)
    with pytest.raises(AssertionError, match=r"no package|not a pin"):
        installed.read_lock(tmp_path / "lock.txt")


def test_records_that_hold(tmp_path: Path) -> None:
    package(tmp_path, "one", "1.0", {"one/a.py": b"a = 1\n", "one/b.bin": bytes(3_000_000)})
    problems, figures = installed.record_problems(tmp_path)
    assert problems == []
    assert figures.files == 3
    assert figures.size > 3_000_000


def test_a_flipped_byte_a_missing_file_and_another_size_are_named(tmp_path: Path) -> None:
    files = {f"one/{name}": b"0123456789" * 10 for name in ("flipped", "gone", "longer", "fine")}
    package(tmp_path, "one", "1.0", files)
    flipped = bytearray((tmp_path / "one/flipped").read_bytes())
    flipped[50] ^= 1
    (tmp_path / "one/flipped").write_bytes(flipped)
    (tmp_path / "one/gone").unlink()
    with (tmp_path / "one/longer").open("ab") as file:
        file.write(b"!")
    problems, _ = installed.record_problems(tmp_path)
    assert problems == [
        "one: one/flipped has another digest than RECORD says",
        "one: one/gone cannot be read: No such file or directory",
        "one: one/longer has 101 bytes, RECORD says 100",
    ]


def test_a_package_without_a_record_is_named(tmp_path: Path) -> None:
    (package(tmp_path, "one", "1.0") / "RECORD").unlink()
    (package(tmp_path, "two", "1.0") / "RECORD").write_text("")
    problems, _ = installed.record_problems(tmp_path)
    assert problems == ["one has no RECORD", "two has an empty RECORD"]


def test_a_digest_of_an_unknown_kind_is_named(tmp_path: Path) -> None:
    info = package(tmp_path, "one", "1.0", {"one.py": b""})
    (info / "RECORD").write_text("one.py,md6=abc,0\n")
    problems, _ = installed.record_problems(tmp_path)
    assert problems == ["one: one.py has a digest of the unknown kind 'md6'"]


def test_files_of_nobody_are_named_and_byte_code_is_not(tmp_path: Path) -> None:
    package(tmp_path, "one", "1.0", {"one/a.py": b""})
    (tmp_path / "one/__pycache__").mkdir()
    (tmp_path / "one/__pycache__/a.cpython-311.pyc").write_bytes(b"")
    assert installed.unrecorded(tmp_path) == []
    (tmp_path / "sitecustomize.py").write_text("")
    assert installed.unrecorded(tmp_path) == ["sitecustomize.py"]


def _compiled(source: Path, mode: py_compile.PycInvalidationMode) -> Path:
    target = importlib.util.cache_from_source(str(source))
    py_compile.compile(str(source), target, doraise=True, invalidation_mode=mode)
    return Path(target)


def test_byte_code_of_its_source(tmp_path: Path) -> None:
    for name, mode in (
        ("a", py_compile.PycInvalidationMode.UNCHECKED_HASH),
        ("b", py_compile.PycInvalidationMode.TIMESTAMP),
    ):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
        _compiled(tmp_path / f"{name}.py", mode)
    assert installed.bytecode_problems(tmp_path) == ([], 2)


def test_byte_code_of_another_source_is_named(tmp_path: Path) -> None:
    for name in ("edited", "gone", "short", "stale"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    _compiled(tmp_path / "edited.py", unchecked)
    (tmp_path / "edited.py").write_text("x = 2\n")
    _compiled(tmp_path / "gone.py", unchecked)
    (tmp_path / "gone.py").unlink()
    _compiled(tmp_path / "short.py", unchecked).write_bytes(b"123")
    _compiled(tmp_path / "stale.py", py_compile.PycInvalidationMode.TIMESTAMP)
    os.utime(tmp_path / "stale.py", (1, 1))
    problems, count = installed.bytecode_problems(tmp_path)
    assert count == 4
    assert [problem.split("/")[1] for problem in problems] == [
        f"edited.{_tag()}.pyc was compiled from another source",
        f"gone.{_tag()}.pyc has no source",
        f"short.{_tag()}.pyc is cut short",
        f"stale.{_tag()}.pyc is stale: its source has another time or size",
    ]


def _tag() -> str:
    return Path(importlib.util.cache_from_source("x.py")).name.split(".")[1]


def test_a_cpu_torch_without_cuda_is_fine(tmp_path: Path) -> None:
    torch(tmp_path)
    # an extra that nobody asked for brings nothing
    package(tmp_path, "one", "1.0", requires=('cupy-cuda12x; extra == "gpu"', "triton-model>=1"))
    package(tmp_path, "cudatext", "1.0", {"cudatext/libcuda_like.py": b""})
    problems = installed.cuda_problems(tmp_path)
    assert problems == ["one requires triton-model>=1"]


@pytest.mark.parametrize(
    "name",
    ["nvidia-cublas-cu12", "nvidia_nccl_cu13", "cuda-bindings", "cupy-cuda12x", "triton",
     "pytorch-triton", "nvidia-cudnn"],
)  # fmt: skip
def test_a_cuda_package_is_named(tmp_path: Path, name: str) -> None:
    torch(tmp_path)
    package(tmp_path, name, "1.0")
    assert len(installed.cuda_problems(tmp_path)) == 1


@pytest.mark.parametrize(
    "path",
    ["nvidia/lib/libcudart.so.12", "torch/lib/libcublas.so.12", "x/libcudnn_ops.so.9",
     "torch/lib/libtorch_cuda.so", "torch/lib/libc10_cuda.so", "a/libnvrtc-builtins.so.12.6",
     "libcudart-1234.so.12", "a/libnccl.so.2"],
)  # fmt: skip
def test_a_cuda_library_is_named(tmp_path: Path, path: str) -> None:
    torch(tmp_path)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_bytes(b"")
    assert installed.cuda_problems(tmp_path) == [f"the library {path} is there"]


@pytest.mark.parametrize(
    ("version", "source", "said"),
    [
        ("2.13.0", TORCH_VERSION, "not a +cpu build"),
        ("2.13.0+cu126", TORCH_VERSION, "not a +cpu build"),
        ("2.13.0+cpu", "__version__ = '2.13.0+cu126'\ncuda = None\n", "does not say +cpu"),
        ("2.13.0+cpu", "__version__ = '2.13.0+cpu'\ncuda = '12.6'\n", "without CUDA"),
        ("2.13.0+cpu", "", "without CUDA"),
    ],
)
def test_a_torch_that_is_not_the_cpu_build(
    tmp_path: Path, version: str, source: str, said: str
) -> None:
    torch(tmp_path, version, source)
    assert any(said in problem for problem in installed.cuda_problems(tmp_path))


def test_no_torch_at_all(tmp_path: Path) -> None:
    assert installed.cuda_problems(tmp_path) == ["torch is not installed"]


def test_a_torch_that_asks_for_cuda(tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = torch(site)
    text = (info / "METADATA").read_text()
    (info / "METADATA").write_text(text.replace("\n\n", "\nRequires-Dist: nvidia-nccl-cu12\n\n"))
    assert installed.cuda_problems(site) == ["torch requires nvidia-nccl-cu12"]


def _system(root: Path) -> Path:
    folder = root / "lib" / "x86_64-linux-gnu"
    folder.mkdir(parents=True)
    return folder


def test_libraries_that_find_what_they_need(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (_system(tmp_path) / "libc.so.6").write_bytes(elf(()))
    files = {
        "torch/lib/libc10.so": elf(("libc.so.6",)),
        "torch_tpu/sub/glue.so": elf(("libbase.so",), runpath="$ORIGIN/../common"),
        "torch_tpu/common/libbase.so": elf(("libc10.so",)),
    }
    package(site, "one", "1.0", files)
    needs, versions, figures = installed.link_problems(site, tmp_path)
    assert (needs, versions, figures.files) == ([], [], 3)


_TOP, _MIDDLE, _DEEP = (
    "wheel/top.so needs libmiddle.so, which is nowhere",
    "wheel.libs/libmiddle.so needs libdeep.so, which is nowhere",
    "wheel.libs/libdeep.so needs libdeeper.so, which is nowhere",
)
_LIBS = "$ORIGIN/../wheel.libs"


@pytest.mark.parametrize(
    ("top", "middle", "lacks"),
    [
        # the old tag is handed down, through a library without a path of its own as well
        ({"rpath": _LIBS}, {}, set()),
        # the new one is for the direct needs of its own file
        ({"runpath": _LIBS}, {}, {_MIDDLE, _DEEP}),
        # and puts the old one beside it out of force
        ({"runpath": _LIBS, "rpath": _LIBS}, {}, {_MIDDLE, _DEEP}),
        # who has a new one does not look where it was told to from above, and still passes it on
        ({"rpath": _LIBS}, {"runpath": "/elsewhere"}, {_MIDDLE, _DEEP}),
        ({"rpath": _LIBS}, {"runpath": "$ORIGIN"}, set()),
        # a folder that holds nothing finds nothing
        ({"rpath": "$ORIGIN/../empty"}, {}, {_TOP, _MIDDLE, _DEEP}),
    ],
)
def test_the_paths_that_a_library_is_handed_down(
    tmp_path: Path, top: dict[str, str], middle: dict[str, str], lacks: set[str]
) -> None:
    site = tmp_path / "site"
    _system(tmp_path)
    files = {
        "wheel/top.so": elf(("libmiddle.so",), **top),
        "wheel.libs/libmiddle.so": elf(("libdeep.so",), **middle),
        "wheel.libs/libdeep.so": elf(("libdeeper.so",)),
        # two that need each other are no endless way
        "wheel.libs/libdeeper.so": elf(("libmiddle.so",), runpath="$ORIGIN"),
    }
    package(site, "one", "1.0", files)
    needs, _, _ = installed.link_problems(site, tmp_path)
    assert set(needs) == lacks


def test_a_library_that_is_nowhere_and_one_that_is_damaged(tmp_path: Path) -> None:
    site = tmp_path / "site"
    _system(tmp_path)
    files = {"a.so": elf(("libgone.so.1",)), "b.so": elf(())[:100], "c.so": b"no library"}
    package(site, "one", "1.0", files)
    needs, _, _ = installed.link_problems(site, tmp_path)
    assert needs[0] == "a.so needs libgone.so.1, which is nowhere"
    assert needs[1].startswith("b.so cannot be read")
    assert needs[2].startswith("c.so cannot be read")


def test_a_symbol_version_that_the_system_does_not_define(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (_system(tmp_path) / "libc.so.6").write_bytes(elf(()))
    wants = {"libc.so.6": ("GLIBC_2.2.5", "GLIBC_9.99")}
    package(site, "one", "1.0", {"a.so": elf(("libc.so.6",), wants=wants)})
    needs, versions, figures = installed.link_problems(site, tmp_path)
    assert needs == []
    assert versions[1] == "a.so needs GLIBC_9.99, which the system's libc.so.6 does not define"
    assert figures.floors == {"GLIBC": "9.99"}


def test_the_running_interpreter_needs_nothing_that_is_missing() -> None:
    from smoke import elf as reader

    library = reader.read(Path(os.path.realpath("/proc/self/exe")))
    assert "libc.so.6" in library.needed
    assert any(version.startswith("GLIBC_") for version in library.wants["libc.so.6"])
