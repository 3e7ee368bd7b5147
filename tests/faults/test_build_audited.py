"""What ``fetch_wheel`` does with what the audit says, run as a person runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from build_support import Checkout, make_checkout
from elf_support import libtpu_wheel


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return make_checkout(tmp_path / "checkout")


def add(checkout: Checkout, wheel: Path) -> None:
    checkout.lock("runtime", *checkout.locks["runtime"], wheel)


def test_a_wheel_is_audited_once(checkout: Checkout) -> None:
    wheel = libtpu_wheel().write(checkout.wheels)
    add(checkout, wheel)
    source = ["--source", str(checkout.wheels)]
    done = checkout.run(*source)
    assert done.returncode == 0, done.stderr
    assert "audited: libtpu 0.0.7: no error" in done.stdout
    assert f"auditing {wheel.name}" in done.stderr
    record = json.loads((checkout.out / "results" / "fetch_wheel.json").read_text())
    (audit,) = record["data"]["audits"]
    assert audit["ok"] is True
    document = json.loads((checkout.out / audit["report"]).read_text())
    assert document["schema"] == "tpuforge.audit/1"
    assert document["wheel"]["file"] == wheel.name

    done = checkout.run(*source)
    assert "nothing to do" in done.stdout
    assert "audited: libtpu 0.0.7: no error" in done.stdout
    assert "auditing" not in done.stderr

    # a lost memory is made again, and says so
    (checkout.out / audit["report"]).write_text("{}")
    done = checkout.run(*source)
    assert done.returncode == 0
    assert f"auditing {wheel.name}" in done.stderr


def test_a_locked_wheel_that_is_not_what_it_says_is_refused(checkout: Checkout) -> None:
    made = libtpu_wheel()
    del made.files["libtpu/libtpu.so"]
    add(checkout, made.write(checkout.wheels))
    for _ in range(2):
        done = checkout.run("--source", str(checkout.wheels))
        assert done.returncode == 1
        assert "libtpu-0.0.7-cp311-cp311-manylinux_2_31_x86_64.whl: 1 error" in done.stderr
        assert "error libtpu: libtpu/libtpu.so is missing" in done.stderr
        assert "Traceback" not in done.stderr


def test_what_came_is_audited_and_kept_when_another_wheel_cannot_be_had(
    checkout: Checkout,
) -> None:
    wheel = libtpu_wheel().write(checkout.wheels)
    add(checkout, wheel)
    torch = checkout.locks["runtime"][2]
    away = torch.rename(checkout.root / torch.name)
    done = checkout.run("--offline", "--source", str(checkout.wheels))
    assert done.returncode == 2
    assert "1 of 7 wheels are missing" in done.stderr
    assert torch.name in done.stderr
    assert "what came is kept; audited: libtpu 0.0.7: no error" in done.stderr
    assert checkout.place(wheel).exists()

    done = checkout.run("--offline", "--source", str(checkout.wheels), "--only", "libtpu")
    assert done.returncode == 0
    assert "1 wheel, " in done.stdout
    assert "nothing to do" in done.stdout
    away.rename(torch)
    assert checkout.run("--offline", "--source", str(checkout.wheels)).returncode == 0


def test_only_wants_names_of_the_locks(checkout: Checkout) -> None:
    done = checkout.run("--only", "alpha,torch_tpu")
    assert done.returncode == 2
    assert "no lock names torch-tpu" in done.stderr
    assert "alpha, beta" in done.stderr
    assert checkout.run("--only", ",").returncode == 2
