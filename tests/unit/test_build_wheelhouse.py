"""What the locks want, and which wheels fit the Python they are for."""

from __future__ import annotations

import pytest
from packaging.utils import parse_wheel_filename

from build_support import LOCK
from tpuforge.build.wheelhouse import fitting_tags, wanted_wheels

PLATFORM = "manylinux_2_31_x86_64"


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
    found = parse_wheel_filename(file)[3]
    assert (not found.isdisjoint(fitting_tags("3.11", PLATFORM))) is fits


def test_the_projects_own_locks_name_each_wheel_once() -> None:
    wheels = wanted_wheels(LOCK, "runtime", "3.11")
    assert len({wheel.sha256 for wheel in wheels}) == len(wheels)
    by_name = {wheel.name: wheel for wheel in wheels}
    assert by_name["torch"].file is not None
    assert by_name["pip"].locks == ("tools-py311.txt",)
    assert "nox" not in by_name
