"""Why a package is in a lock, and under which licence, without a network."""

from __future__ import annotations

from typing import Any

import pytest

from tpuforge.errors import Exit, ForgeError
from tpuforge.lock import inputs, provenance
from tpuforge.lockfile import Locked, read_lock
from tpuforge.pins import load

REQUIRES = {
    "libtpu": [],
    "torch": ["filelock", "other; sys_platform == 'win32'"],
    "torch-tpu": ["torch>=2.11", "alpha[fast]", "zeta"],
    "alpha": ["Beta.X; extra == 'fast'", "gamma; extra == 'slow'"],
    "beta-x": ["filelock"],
    "zeta": ["gamma; python_version < '3.12'"],
    "filelock": [],
    "gamma": [],
    "other": [],
}


def test_chain_is_the_shortest_one_that_holds_on_the_target() -> None:
    closure = provenance.walk(load(), "runtime", "3.12", REQUIRES)
    found = closure.why
    assert found["filelock"] == ["torch", "filelock"]
    assert found["beta-x"] == ["torch-tpu", "alpha", "beta-x"]
    assert "gamma" not in found
    assert "other" not in found
    assert closure.by["filelock"] == {"beta-x", "torch"}
    assert "gamma" not in closure.by
    older = provenance.walk(load(), "runtime", "3.11", REQUIRES).why
    assert older["gamma"] == ["torch-tpu", "zeta", "gamma"]


def test_package_that_no_input_leads_to_is_refused() -> None:
    packages = [Locked(name, "1", "0" * 64) for name in REQUIRES if name != "other"]
    metadata = {name: {"requires_dist": needs} for name, needs in REQUIRES.items()}
    with pytest.raises(ForgeError, match="no input of runtime leads to gamma") as caught:
        provenance.document(
            load(), "runtime", "3.12", packages=packages, left_out=[], metadata=metadata, files={}
        )
    assert caught.value.exit_code == Exit.FAULT


def test_what_is_left_out_leads_to_no_package() -> None:
    requires = {"vllm-torchtpu": ["xgrammar"], "xgrammar": ["triton"], "triton": ["zeta"]}
    requires |= {"zeta": []}
    metadata = {name: {"requires_dist": needs} for name, needs in requires.items()}
    locked = {name: Locked(name, "1", f"{n}" * 64) for n, name in enumerate(requires)}

    def made(*left_out: str) -> dict[str, Any]:
        packages = [one for name, one in locked.items() if name not in left_out]
        gone = [locked[name] for name in left_out]
        files = {locked["triton"].sha256: provenance.Listed(7, None)}
        return provenance.document(
            load(),
            "serve",
            "3.12",
            packages=packages,
            left_out=gone,
            metadata=metadata,
            files=files,
        )

    found = made("triton", "zeta")
    assert [entry["name"] for entry in found["packages"]] == ["vllm-torchtpu", "xgrammar"]
    triton, zeta = found["left_out"]
    assert triton["why"] == ["vllm-torchtpu", "xgrammar", "triton"]
    assert triton["bytes"] == 7
    assert "xgrammar" in triton["reason"]
    assert zeta["reason"] == provenance.FOLLOWS
    with pytest.raises(ForgeError, match="no input of serve leads to zeta"):
        made("triton")


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"license_expression": "MIT", "license": "other"}, "MIT"),
        ({"license": "Apache 2.0"}, "Apache 2.0"),
        ({"license": "The whole\ntext", "classifier": ["License :: OSI :: BSD"]}, "BSD"),
        ({"license": "BSD-like (http://host.invalid/LICENSE.txt)"}, "BSD-like"),
        ({"license": "https://host.invalid/a", "classifier": ["License :: MIT"]}, "MIT"),
        ({"license": "UNKNOWN", "classifier": ["Topic :: Any"]}, None),
        ({}, None),
    ],
)
def test_licence_is_one_line_or_nothing(metadata: dict[str, Any], expected: str | None) -> None:
    assert provenance.licence(metadata) == expected


def test_real_provenance_is_about_the_real_locks() -> None:
    pins = load()
    for flavour, python in inputs.existing(pins):
        entries = provenance.read(flavour, python)
        locked = read_lock(inputs.lock_path(flavour, python))
        assert {p.name: p.sha256 for p in locked} == {n: e["sha256"] for n, e in entries.items()}
        # the size of a CPU build is known where its wheel was at hand
        assert {n for n, e in entries.items() if not e["bytes"]} <= pins.cpu_builds.keys()
        assert "://" not in provenance.path_of(flavour, python).read_text(encoding="utf-8")
