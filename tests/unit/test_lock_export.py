"""A lock in the forms that other tools read, without a network."""

from __future__ import annotations

import json
import tomllib

from packaging.pylock import Pylock

from tpuforge.lock import export
from tpuforge.lock.inputs import existing, lock_path
from tpuforge.lock.provenance import Listed
from tpuforge.lockfile import Locked, read_lock
from tpuforge.pins import load

SHA = "0123456789abcdef" * 4


def test_pylock_is_valid_and_names_each_file() -> None:
    packages = [Locked("torch", "2.13.0+cpu", SHA), Locked("alpha", "1.0", SHA[::-1])]
    place = "https://index.invalid/"
    files = {
        SHA: Listed(None, None, "torch.whl", f"{place}torch-2.13.0%2Bcpu-cp312-cp312-any.whl"),
        SHA[::-1]: Listed(7, "2026-01-01T00:00:00Z", "alpha-1.0-py3-none-any.whl", f"{place}a"),
    }
    files[SHA] = Listed(None, None, "torch-2.13.0+cpu-cp312-cp312-linux_x86_64.whl", files[SHA].url)
    parsed = tomllib.loads(export.pylock_text("3.12", packages, files))
    Pylock.from_dict(parsed).validate()
    assert [p["name"] for p in parsed["packages"]] == ["alpha", "torch"]
    assert parsed["packages"][1]["wheels"][0]["hashes"] == {"sha256": SHA}
    assert parsed["packages"][0]["wheels"][0]["size"] == 7
    assert parsed["requires-python"] == "==3.12.*"


def test_sbom_has_every_package_once_and_the_same_bytes_each_time() -> None:
    pins = load()
    for flavour, python in existing(pins):
        packages = read_lock(lock_path(flavour, python))
        made = export.sbom(pins, flavour, python, packages)
        again = export.sbom(pins, flavour, python, packages[::-1])
        assert json.dumps(made, sort_keys=True) == json.dumps(again, sort_keys=True)
        assert (made["bomFormat"], made["specVersion"], made["version"]) == ("CycloneDX", "1.6", 1)
        components = made["components"]
        assert len({one["bom-ref"] for one in components}) == len(packages)
        for one in components:
            assert len(one["hashes"][0]["content"]) == 64
            for licence in one.get("licenses", []):
                assert licence.keys() in ({"expression"}, {"license"})
        torch = [one["purl"] for one in components if one["name"] == "torch"]
        assert not torch or torch[0].startswith("pkg:pypi/torch@2.13.0%2Bcpu?repository_url=")


def test_constraints_are_versions_alone() -> None:
    packages = [Locked("beta", "2", SHA), Locked("alpha", "1+cpu", SHA)]
    assert export.constraints_text(packages) == "alpha==1+cpu\nbeta==2\n"
