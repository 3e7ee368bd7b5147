"""What the locks want, and which wheels fit the Python they are for."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from build_support import LOCK
from smoke_host_support import forge
from tpuforge import pins as pins_module
from tpuforge.build.wheelhouse import flavour_of, wanted_wheels
from tpuforge.errors import ForgeError
from tpuforge.target import fitting


@pytest.mark.parametrize(
    ("file", "fits"),
    [
        ("numpy-1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", True),
        ("a-1-py3-none-manylinux2014_x86_64.whl", True),
        ("a-1-cp38-abi3-manylinux_2_17_x86_64.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-cp312-cp312-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp312-abi3-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp311-cp311-manylinux_2_35_x86_64.whl", False),
        ("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp311-cp311-manylinux_2_28_aarch64.whl", False),
        ("a-1-cp311-cp311-win_amd64.whl", False),
    ],
)
def test_tags_that_fit(file: str, fits: bool) -> None:
    assert (not parse_wheel_filename(file)[3].isdisjoint(fitting("3.11", "2.31"))) is fits


def test_the_projects_own_locks_name_each_wheel_once() -> None:
    wheels = wanted_wheels(LOCK, "runtime", "3.11")
    assert len({wheel.sha256 for wheel in wheels}) == len(wheels)
    by_name = {wheel.name: wheel for wheel in wheels}
    assert by_name["torch"].file is not None
    assert by_name["pip"].locks == ("tools-py311.txt",)
    assert "nox" not in by_name


@pytest.mark.parametrize(
    ("image", "flavour", "python", "wanted"),
    [
        (None, None, "3.11", "runtime"),
        (None, "pallas", "3.11", "pallas"),
        ("runtime", None, "3.11", "runtime"),
        ("runtime", "dev", "3.11", "dev"),
        ("pallas", None, "3.13", "pallas"),
        ("pallas", "pallas", "3.11", "pallas"),
        ("serve", None, "3.12", "serve"),
        ("simulator", None, "3.11", ""),
    ],
)
def test_an_image_names_its_flavour(
    image: str | None, flavour: str | None, python: str, wanted: str
) -> None:
    assert flavour_of(image, flavour, python, pins_module.load()) == wanted


@pytest.mark.parametrize(
    ("image", "flavour", "python", "found"),
    [
        ("nope", None, "3.11", "there is no image 'nope'"),
        ("pallas", "train", "3.11", "is made from the flavour pallas, not from train"),
        ("base", "runtime", "3.11", "the image base holds no wheels"),
        ("serve", None, "3.11", "there is no flavour 'serve' for Python 3.11"),
    ],
)
def test_an_image_that_cannot_be_meant_is_refused(
    image: str, flavour: str | None, python: str, found: str
) -> None:
    with pytest.raises(ForgeError) as caught:
        flavour_of(image, flavour, python, pins_module.load())
    assert found in caught.value.found
    assert caught.value.exit_code == 2


def test_an_image_without_wheels_needs_those_beside_it_alone() -> None:
    names = {wheel.name for wheel in wanted_wheels(LOCK, "", "3.11")}
    assert {"pip", "pytest", "xla-cpu-pjrt"} <= names
    assert not {"torch", "torch-tpu", "libtpu"} & names


def test_the_verb_refuses_an_unknown_image(tmp_path: Path) -> None:
    done = forge("build.wheelhouse", "--image", "nope", "--offline", out=tmp_path)
    assert done.returncode == 2
    assert "there is no image 'nope'" in done.stderr
    assert "pallas" in done.stderr
