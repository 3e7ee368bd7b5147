"""Why a package is in a lock, and under which licence, without a network."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
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


_REAL = json.loads(provenance.path_of("serve", "3.12").read_text(encoding="utf-8"))
_REAL["packages"] = _REAL["packages"][:3]
_WRONG: dict[str, list[Any]] = {
    "name": [None, 5, "", "Alpha", "-r", ["alpha"]],
    "version": [None, 5, "", "one", "1 "],
    "sha256": [None, 5, "0" * 63, "A" * 64],
    "index": [None, 5, "", "another index", ["main index"]],
    "bytes": ["5", -1, 1.5, True, {}],
    "uploaded": [5, "", "yesterday", "2026-13-01T00:00:00Z", "2026-1-1T00:00:00Z", "2026-01-01"],
    "licence": [5, "", " ", "a\nb", ["MIT"], {}, "https://host.invalid/"],
    "why": [None, 5, [], [1, 2], "alpha", [None], {}, ["Alpha"]],
    "reason": [None, 5, ""],
}


def _spoiled() -> Iterator[tuple[str, Any]]:
    """The real document with one fault each."""
    documents: list[Any] = [None, [], 5, "text", {}]
    for document in documents:
        yield f"all {document!r}", document
    for key in _REAL:
        yield f"without {key}", {k: v for k, v in _REAL.items() if k != key}
        others: list[Any] = [None, 5, {}, "other", [5], [None], [{}]]
        for value in others:
            yield f"{key} {value!r}", _REAL | {key: value}
    yield "more", _REAL | {"more": 1}
    for kind in ("packages", "left_out"):
        first = _REAL[kind][0]
        yield f"{kind} twice", _REAL | {kind: [*_REAL[kind], first]}
        yield f"{kind} more", _REAL | {kind: [first | {"more": 1}]}
        for key in first:
            yield (
                f"{kind} without {key}",
                _REAL | {kind: [{k: first[k] for k in first if k != key}]},
            )
            for value in _WRONG[key]:
                yield f"{kind} {key} {value!r}", _REAL | {kind: [first | {key: value}]}


def test_each_fault_in_the_form_is_seen_and_nothing_of_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "serve-py312.json"
    monkeypatch.setattr(provenance, "path_of", lambda flavour, python: path)
    path.write_text(json.dumps(_REAL), encoding="utf-8")
    good = provenance.read("serve", "3.12")
    assert good.wrong == ""
    assert good.packages and good.left_out
    assert provenance.read("serve", "3.13").wrong
    for what, document in _spoiled():
        path.write_text(json.dumps(document), encoding="utf-8")
        held = provenance.read("serve", "3.12")
        assert held.wrong.startswith("it is not of the form"), what
        assert held.packages == held.left_out == {}, what
    path.write_bytes(b"\xff{")
    assert provenance.read("serve", "3.12").wrong
    path.unlink()
    assert provenance.read("serve", "3.12").wrong == "it is not there"


def test_each_difference_to_a_new_resolution_is_told() -> None:
    assert provenance.differences(_REAL, _REAL) == []
    for kind in ("packages", "left_out"):
        for key in _REAL[kind][0]:
            other = copy.deepcopy(_REAL)
            other[kind][0][key] = "other"
            told = provenance.differences(_REAL, other)
            assert any(what.startswith(f"{key} is ") for _, what in told)
    turned = _REAL | {"packages": _REAL["packages"][::-1]}
    assert [name for name, _ in provenance.differences(turned, _REAL)] == [""]


def test_real_provenance_is_about_the_real_locks() -> None:
    pins = load()
    real = inputs.existing(pins)
    assert ("runtime", "3.11") in real
    for flavour, python in real:
        entries = provenance.read(flavour, python).packages
        locked = read_lock(inputs.lock_path(flavour, python))
        assert {p.name: p.sha256 for p in locked} == {n: e["sha256"] for n, e in entries.items()}
        # the size of a CPU build is known where its wheel was at hand
        assert {n for n, e in entries.items() if not e["bytes"]} <= pins.cpu_builds.keys()
        assert "://" not in provenance.path_of(flavour, python).read_text(encoding="utf-8")
