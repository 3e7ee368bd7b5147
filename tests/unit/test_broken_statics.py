"""What the suite asks of packages, glue, libraries and settings: each able to fail."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from smoke import elf, installed, statics, xla
from smoke.place import Place

from smoke_suite_support import elf as library
from smoke_suite_support import package, torch

TAGS = {"cp311-cp311-linux_x86_64", "cp310-abi3-linux_x86_64", "py3-none-any"}
CALLED = "_ZN3c1011called"
ENTRY = "[torch.backends]\ntorch_tpu = torch_tpu._loader:load\n"


def torch_tpu(
    site: Path, versions: tuple[str, ...] = ("2_12_0", "2_13_0"), entry: str = ENTRY
) -> Path:
    """Install a torch_tpu whose glue calls one function of torch."""
    files = {}
    for version in versions:
        data = library(("libc10.so",), imports=(CALLED, "PyList_New"))
        files[f"torch_tpu/_internal/env_{version}.so"] = data
        common = f"torch_tpu/csrc/common/glue_{version}/libpywrap_{version}_common.so"
        files[common] = library((), exports=("of_the_glue",))
    requires = ("torch>=2.12.0,<=2.13.0", "numpy>=2", "libtpu>=0.0.50")
    info = package(site, "torch-tpu", "0.2.0", files, requires)
    (info / "entry_points.txt").write_text(entry)
    return info


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A healthy set of packages."""
    folder = tmp_path / "site"
    torch(folder)
    torch_tpu(folder)
    package(folder, "numpy", "2.4.6")
    package(folder, "libtpu", "0.0.52", {"libtpu/libtpu.so": library((), exports=("GetPjrtApi",))})
    (folder / "torch/lib").mkdir()
    (folder / "torch/lib/libc10.so").write_bytes(library((), exports=("_ZN3c105other", CALLED)))
    return folder


@pytest.fixture
def place(tmp_path: Path, site: Path) -> Place:
    """A root without any setting."""
    (tmp_path / "root/tmp").mkdir(parents=True)
    return Place(site, tmp_path / "root", tmp_path, {}, os.getuid())


def _version(info: Path, old: str, new: str) -> None:
    metadata = info / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"Version: {old}", f"Version: {new}"))


def test_requirements_that_are_met(site: Path) -> None:
    assert installed.requirement_problems(site) == ([], 3)


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("numpy", "2.4.6", "1.26.4", "torch-tpu 0.2.0 needs numpy>=2, and numpy 1.26.4"),
        ("libtpu", "0.0.52", "0.0.49", "torch-tpu 0.2.0 needs libtpu>=0.0.50, and libtpu 0.0.49"),
        ("torch", "2.13.0+cpu", "2.16.0+cpu", "needs torch<=2.15.0,>=2.11.0, and torch 2.16.0+cpu"),
    ],
)
def test_a_version_that_another_package_cannot_use(
    site: Path, name: str, old: str, new: str, said: str
) -> None:
    _version(site / f"{name}-{old}.dist-info", old, new)
    problems, _ = installed.requirement_problems(site)
    if name == "torch":
        said = said.replace("<=2.15.0,>=2.11.0", "<=2.13.0,>=2.12.0")
    assert len(problems) == 1
    assert said in problems[0]


def test_a_package_that_is_missing_odd_or_asked_for_elsewhere(site: Path) -> None:
    requires = (
        "absent>=1",
        "never; python_version < '3'",
        "extra-one; extra == 'more'",
        "not a requirement at all",
    )
    package(site, "asks", "1.0", requires=requires)
    problems, count = installed.requirement_problems(site)
    assert problems == [
        "asks 1.0 needs absent>=1, which is not installed",
        "asks 1.0 requires 'not a requirement at all', which means nothing",
    ]
    assert count == 4


def _wheel(site: Path, info: str, tag: str) -> None:
    (site / info / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag}\n")


def test_packages_and_libraries_for_this_python_and_machine(site: Path) -> None:
    _wheel(site, "numpy-2.4.6.dist-info", "cp311-cp311-linux_x86_64")
    problems, count = installed.platform_problems(site, TAGS, "311", "x86_64")
    assert problems == []
    assert count == installed.PlatformCount(1, 6)


@pytest.mark.parametrize("tag", ["cp312-cp312-linux_x86_64", "cp311-cp311-linux_aarch64"])
def test_a_package_for_another_python_or_machine(site: Path, tag: str) -> None:
    _wheel(site, "numpy-2.4.6.dist-info", tag)
    problems, _ = installed.platform_problems(site, TAGS, "311", "x86_64")
    assert problems == [f"numpy 2.4.6 was made for {tag}, and this is Python 3.11 on x86_64"]


def test_a_library_for_another_python_or_machine(site: Path) -> None:
    (site / "numpy").mkdir()
    (site / "numpy/core.cpython-312-x86_64-linux-gnu.so").write_bytes(library(()))
    (site / "numpy/other.so").write_bytes(library((), machine=183))
    (site / "numpy/strange.so").write_bytes(library((), machine=243))
    (site / "numpy/damaged.so").write_bytes(b"")
    problems, _ = installed.platform_problems(site, TAGS, "311", "x86_64")
    assert problems == [
        "numpy/core.cpython-312-x86_64-linux-gnu.so was made for Python 3.12",
        "numpy/other.so was made for aarch64, and this machine is x86_64",
        "numpy/strange.so was made for machine number 243, and this machine is x86_64",
    ]


def test_only_torch_tpu_is_torchs_extra_backend(site: Path) -> None:
    assert installed.backend_problems(site) == []
    other = package(site, "torch-other", "1.0")
    (other / "entry_points.txt").write_text("[torch.backends]\nother = other:load\n")
    assert installed.backend_problems(site) == [
        "torch-other registers other as torch's backend as well"
    ]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("[console_scripts]\nx = y:z\n", "does not register itself"),
        ("[torch.backends]\nelse = torch_tpu:x\n", "does not register itself"),
        ("no section\n", "cannot be read"),
    ],
)
def test_a_torch_tpu_that_is_not_registered(tmp_path: Path, entry: str, said: str) -> None:
    torch_tpu(tmp_path / "other", entry=entry)
    (problem,) = installed.backend_problems(tmp_path / "other")
    assert said in problem


def test_every_torch_of_the_range_has_its_glue(site: Path) -> None:
    problems, served = installed.glue_problems(installed.glues(site))
    assert problems == []
    assert served == {"2.12.0": "2.12.0", "2.13.0": "2.13.0"}


def test_a_glue_serves_torch_until_the_next(site: Path) -> None:
    found = replace(installed.glues(site), wanted=">=2.12.0,<=2.15.0", torch="2.14.1+cpu")
    problems, served = installed.glue_problems(found)
    assert problems == []
    assert served["2.15.0"] == served["2.14.1"] == "2.13.0"


def test_a_torch_of_the_range_that_no_glue_serves(site: Path) -> None:
    found = replace(installed.glues(site), wanted=">=2.10.0,<=2.13.0")
    problems, _ = installed.glue_problems(found)
    assert problems == [
        "torch_tpu has no glue for torch 2.10.0, which it claims to serve",
        "torch_tpu has no glue for torch 2.11.0, which it claims to serve",
    ]


def test_glue_of_a_neighbour_that_is_not_whole(site: Path) -> None:
    (site / "torch_tpu/_internal/env_2_12_0.so").unlink()
    problems, _ = installed.glue_problems(installed.glues(site))
    assert problems == ["the glue for torch 2.12.0 has no _internal/env"]


def test_no_glue_at_all(tmp_path: Path) -> None:
    torch(tmp_path)
    torch_tpu(tmp_path, versions=())
    problems, _ = installed.glue_problems(installed.glues(tmp_path))
    assert problems == ["torch_tpu has no glue at all"]


def test_a_torch_that_defines_what_the_glue_calls(site: Path, tmp_path: Path) -> None:
    assert installed.abi_problems(site, tmp_path, "2_13_0") == ([], 1)


def test_a_torch_of_another_abi(site: Path, tmp_path: Path) -> None:
    (site / "torch/lib/libc10.so").write_bytes(library((), exports=("_ZN3c105other",)))
    problems, _ = installed.abi_problems(site, tmp_path, "2_13_0")
    assert problems == [
        "the glue for torch 2.13.0 needs 1 symbols that the installed torch does not define, "
        f"such as {CALLED}"
    ]


def test_symbols_of_a_library(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    names = tuple(f"function_{number}" for number in range(100))
    path.write_bytes(library((), imports=("wanted",), exports=names))
    assert elf.undefined(path) == {b"wanted"}
    assert elf.missing(path, [b"function_0", b"function_99", b"function_100", b"wanted"]) == {
        b"function_100",
        b"wanted",
    }
    path.write_bytes(library(("libc.so.6",)))
    assert elf.undefined(path) == set()
    assert elf.missing(path, [b"malloc"]) == {b"malloc"}
    assert elf.read(path).machine == "x86_64"


def test_libtpus_own_library(site: Path) -> None:
    assert statics.libtpu_problems(site) == []
    path = site / "libtpu/libtpu.so"
    path.write_bytes(library((), exports=("SomethingElse",)))
    assert "no PJRT plugin" in statics.libtpu_problems(site)[0]
    path.write_bytes(b"")
    assert "cannot be read" in statics.libtpu_problems(site)[0]
    path.unlink()
    assert statics.libtpu_problems(site) == ["libtpu is installed without libtpu.so"]


@pytest.mark.parametrize("name", statics.CACHES)
def test_a_cache_that_cannot_be_written(place: Place, name: str) -> None:
    assert statics.cache_problems(place) == ([], [])
    fine = replace(place, environ={name: "/tmp/new/cache"})
    assert statics.cache_problems(fine) == ([], [name])
    assert list((place.root / "tmp").iterdir()) == []
    (place.root / "file").touch()
    problems, _ = statics.cache_problems(replace(place, environ={name: "/file"}))
    assert f"{name} names /file, which cannot be written" in problems[0]


def test_settings_that_lead_astray(place: Place) -> None:
    assert statics.setting_problems(place) == []
    (place.root / "mine/torch").mkdir(parents=True)
    (place.root / "mine/torch/__init__.py").touch()
    environ = {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TPU_LIBRARY_PATH": "/nowhere.so",
        "PYTHONPATH": "/empty:/mine",
    }
    assert statics.setting_problems(replace(place, environ=environ)) == [
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0: import torch does not load torch_tpu",
        "TPU_LIBRARY_PATH names /nowhere.so, which is not there",
        "PYTHONPATH puts the torch in /mine before the image's",
    ]


def test_a_lock_file_of_libtpu(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert statics.lock_file_problems(place) == ([], "/tmp/libtpu_lockfile is not there")
    path = place.under(statics.LOCK_FILE)
    path.touch()
    assert "nobody holds it" in statics.lock_file_problems(place)[1]
    (place.root / "proc").mkdir()
    row = f"1: POSIX  ADVISORY  WRITE 4711 fe:00:{path.stat().st_ino} 0 EOF\n"
    (place.root / "proc/locks").write_text(row)
    assert "process 4711 holds" in statics.lock_file_problems(place)[1]
    # root may open everything, so the kernel's answer is given here
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "this user cannot open it" in statics.lock_file_problems(place)[0][0]


def test_stablehlo_versions_meet_or_do_not() -> None:
    framework = {"writes": "1.16.3", "oldest": "0.9.0", "newest": "1.21.0"}
    assert xla.meet(framework, {"oldest": "0.9.0", "newest": "1.24.0"}).version == "1.16.3"
    assert xla.meet(framework, {"oldest": "0.9.0", "newest": "1.13.3"}).version == "1.13.3"
    assert xla.meet(framework, {"oldest": "0.9.0", "newest": "0.8.9"}).version is None
    late = xla.meet(framework, {"oldest": "1.17.0", "newest": "1.24.0"})
    assert late.version is None
    assert "no version in common" in late.why
