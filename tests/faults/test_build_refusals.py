"""``build_wheel`` where it cannot work: message and exit code, as a person sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from build_support import Checkout, make_checkout
from tpuforge import pins as pins_module
from tpuforge.build.checkout import TARGET

MODULE = "tpuforge.build.source"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return make_checkout(tmp_path_factory.mktemp("refusals") / "my forge 家")


def workspace(folder: Path) -> Path:
    """A folder that looks like a checkout of TorchTPU."""
    (folder / "ci" / "wheel").mkdir(parents=True)
    (folder / "ci" / "wheel" / "BUILD").touch()
    (folder / "MODULE.bazel").touch()
    return folder


def test_no_source(checkout: Checkout) -> None:
    done = checkout.run(module=MODULE)
    upstream = pins_module.load().upstream
    assert done.returncode == 2
    assert "build_wheel: no source folder was given" in done.stderr
    assert "expected: --source DIR" in done.stderr
    assert f"git clone --branch {upstream.ref} {upstream.repository} SOURCE" in done.stderr
    record = json.loads((checkout.out / "results" / "build_wheel.json").read_text())
    assert (record["status"], record["exit_code"]) == ("failed", 2)


def test_a_source_that_is_none(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.run("--source", str(tmp_path / "gone"), module=MODULE)
    assert done.returncode == 2
    assert f"{tmp_path / 'gone'}: no such folder" in done.stderr
    done = checkout.run("--source", str(tmp_path), module=MODULE)
    assert done.returncode == 2
    assert f"{tmp_path} is not a checkout of TorchTPU" in done.stderr
    assert f"with the target {TARGET}" in done.stderr


def test_no_bazelisk_and_no_npm(checkout: Checkout, tmp_path: Path) -> None:
    source = workspace(tmp_path / "source")
    done = checkout.run("--source", str(source), module=MODULE, env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "there is no Bazelisk, and no npm to get it with" in done.stderr
    assert "forge build_wheel --bazelisk PATH" in done.stderr


def test_a_bazelisk_that_builds_nothing(checkout: Checkout, tmp_path: Path) -> None:
    source = workspace(tmp_path / "source")
    for program, code, said in (
        ("/bin/true", 1, "its build events name no wheel"),
        ("/bin/false", 2, "Bazel ended with exit code 1"),
    ):
        native = str(Path(program).resolve())
        done = checkout.run("--source", str(source), "--bazelisk", native, module=MODULE)
        assert done.returncode == code
        assert said in done.stderr
    assert not (checkout.out / "wheels").exists()
