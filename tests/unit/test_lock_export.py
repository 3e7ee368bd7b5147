"""A lock in the forms that other tools read, without a network."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.pylock import Pylock

from tpuforge.errors import Exit, ForgeError
from tpuforge.lock import export, provenance
from tpuforge.lock.inputs import existing, lock_path
from tpuforge.lock.provenance import Listed
from tpuforge.lockfile import Locked, read_lock
from tpuforge.pins import load

SHA = "0123456789abcdef" * 4
PLACE = "https://index.invalid/"
ALPHA = Listed(7, "2026-01-01T00:00:00Z", "alpha-1.0-py3-none-any.whl", f"{PLACE}a")
WHY: dict[str, Any] = {"alpha": {"why": ["alpha"], "licence": "MIT"}}


def test_pylock_is_valid_and_names_each_file() -> None:
    packages = [Locked("torch", "2.13.0+cpu", SHA), Locked("alpha", "1.0", SHA[::-1])]
    torch = "torch-2.13.0+cpu-cp312-cp312-linux_x86_64.whl"
    files = {SHA: Listed(None, None, torch, f"{PLACE}{torch.replace('+', '%2B')}")}
    files[SHA[::-1]] = ALPHA
    text = export.pylock_text("3.12", packages, files)
    assert text == export.pylock_text("3.12", packages[::-1], files)
    parsed = tomllib.loads(text)
    Pylock.from_dict(parsed).validate()
    assert [p["name"] for p in parsed["packages"]] == ["alpha", "torch"]
    alpha, torch_wheel = (p["wheels"][0] for p in parsed["packages"])
    assert torch_wheel == {"name": torch, "url": files[SHA].url, "hashes": {"sha256": SHA}}
    assert alpha["upload-time"] == datetime(2026, 1, 1, tzinfo=UTC)
    assert alpha["size"] == 7
    assert parsed["requires-python"] == "==3.12.*"
    assert "python_version" in parsed["environments"][0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"file": "alpha-1.1-py3-none-any.whl"}, "version '1.0'"),
        ({"file": "beta-1.0-py3-none-any.whl"}, "name 'alpha'"),
        ({"file": "a"}, "Invalid wheel filename 'a'"),
        ({"uploaded": "yesterday"}, "yesterday"),
        ({"size": "7"}, "size"),
    ],
)
def test_what_an_index_says_and_the_format_does_not_take_is_refused(
    wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(ForgeError, match="no lock of PEP 751") as caught:
        export.pylock_text("3.12", [Locked("alpha", "1.0", SHA)], {SHA: replace(ALPHA, **wrong)})
    assert says in caught.value.found
    assert caught.value.exit_code == Exit.FAULT


def test_same_lock_gives_the_same_sbom_in_any_order() -> None:
    packages, why = read_lock(lock_path("smoke", "3.11")), provenance.read("smoke", "3.11").packages
    text = export.sbom_text(load(), "smoke-py311", packages, why)
    assert text == export.sbom_text(load(), "smoke-py311", packages[::-1], why)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None


def test_sbom_of_every_lock_is_whole() -> None:
    pins = load()
    host = pins.torch.index.removeprefix("https://")
    for flavour, python in existing(pins):
        packages = read_lock(lock_path(flavour, python))
        name = lock_path(flavour, python).stem
        why = provenance.read(flavour, python).packages
        # what the schema does not take is not given out
        bill = json.loads(export.sbom_text(pins, name, packages, why))
        assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
        held = {
            Locked(one["name"], one["version"], one["hashes"][0]["content"])
            for one in bill["components"]
        }
        assert held == set(packages)
        assert len(bill["components"]) == len(packages)
        for one in bill["components"]:
            cpu = one["version"].endswith("+cpu")
            assert one["purl"].endswith(f"%2Bcpu?repository_url={host}") == cpu
        # every package hangs on the root
        below = {one["ref"]: one.get("dependsOn", []) for one in bill["dependencies"]}
        reached, ahead = set(), [name]
        while ahead:
            ref = ahead.pop()
            if ref not in reached:
                reached.add(ref)
                ahead += below[ref]
        assert reached == {name, *(one["bom-ref"] for one in bill["components"])}


def test_sbom_keeps_what_is_no_licence_of_spdx_as_a_name() -> None:
    said = {
        "MIT": {"license": {"id": "MIT"}},
        "mit": {"license": {"id": "MIT"}},
        "MIT OR Apache-2.0": {"expression": "MIT OR Apache-2.0"},
        "3-Clause BSD License": {"license": {"name": "3-Clause BSD License"}},
        "(": {"license": {"name": "("}},
    }
    for words, shown in said.items():
        why = {"alpha": {"why": ["alpha"], "licence": words}}
        text = export.sbom_text(load(), "x", [Locked("alpha", "1.0", SHA)], why)
        assert json.loads(text)["components"][0]["licenses"] == [shown]
    text = export.sbom_text(load(), "x", [Locked("alpha", "1", SHA)], {"alpha": {"why": ["alpha"]}})
    assert "licenses" not in json.loads(text)["components"][0]


def test_sbom_that_the_schema_refuses_is_not_written() -> None:
    with pytest.raises(ForgeError, match=r"no CycloneDX 1\.6: components/0/hashes") as caught:
        export.sbom_text(load(), "x", [Locked("alpha", "1.0", "no digest")], WHY)
    assert caught.value.exit_code == Exit.FAULT


def test_constraints_are_versions_alone() -> None:
    packages = [Locked("beta", "2", SHA), Locked("alpha", "1+cpu", SHA)]
    assert export.constraints_text(packages) == "alpha==1+cpu\nbeta==2\n"
