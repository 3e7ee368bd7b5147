"""The bill of the real image, held against what the running image says of itself."""

from __future__ import annotations

import json

from test_trust_registry import VALIDATE

import validators_support
from bake_support import ROOT, Image, result

_WHEELS = """
import importlib.metadata as m, re
for one in m.distributions():
    print(re.sub("[-_.]+", "-", one.metadata["Name"]).lower(), one.version)
"""


def test_the_bill_is_what_the_running_image_says(image: Image) -> None:
    before = image.layout.joinpath("index.json").read_bytes()
    result("tpuforge.release.sbom")
    assert image.layout.joinpath("index.json").read_bytes() == before
    folder = image.layout.parent / "attestations"
    bill = json.loads((folder / "sbom.cdx.json").read_text())
    told: dict[str, set[str]] = {"deb": set(), "wheel": set()}
    for one in bill["components"]:
        facts = {item["name"]: item["value"] for item in one.get("properties", [])}
        place = facts.get("tpuforge:place", "/opt/venv")
        if facts.get("tpuforge:kind") in told and place.startswith("/opt/venv"):
            told[facts["tpuforge:kind"]].add(f"{one['name']} {one['version']}")
            assert one["hashes"], one["name"]

    wheels = image.run("python", "-c", _WHEELS)
    assert wheels.returncode == 0, wheels.stderr
    assert told["wheel"] == set(wheels.stdout.splitlines())
    debs = image.run("dpkg-query", "--show", "--showformat", "${Package} ${Version}\\n")
    assert debs.returncode == 0, debs.stderr
    assert told["deb"] == set(debs.stdout.splitlines())

    spdx = (folder / "sbom.spdx.json").read_text()
    assert json.loads(validators_support.run(VALIDATE, spdx)) == []


def test_the_image_is_verified_where_it_was_baked(image: Image) -> None:
    found = result("tpuforge.release.verify", image.slug)
    states = {one["what"]: one["status"] for one in found["checks"]}
    assert states.pop("signature") == "not run"
    # whether smoke has run before is another test's business; an image that it found bad fails
    assert states.pop("health") in ("passed", "not run")
    assert set(states.values()) == {"passed"}
    # what is published names no folder of this machine
    for path in (image.layout.parent / "attestations").glob("*.json"):
        assert str(ROOT) not in path.read_text()
