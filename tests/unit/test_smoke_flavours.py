"""What an image of a flavour is for: read from data, and asked of no other image."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from smoke import flavours

from process_support import call
from smoke_suite_support import ROOT
from tpuforge.lockfile import read_lock

RUN = """
import json, os, pytest, sys
from smoke import verdict
from smoke.plugin import Suite
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # as the command has it
for path in sys.argv[1:]:
    suite = Suite(("v6e:2x2",), False, {}, None)
    code = pytest.main([path, "-q", "-p", "no:cacheprovider", "-c", "/dev/null"], plugins=[suite])
    found = [one for one in suite.results if one["tier"] == "import"]
    tiers = {name: verdict.tier([], required=False) for name in verdict.TIERS}
    tiers |= {"import": verdict.tier(found)}
    print("\\njudged", json.dumps([found, tiers["import"], verdict.judge(tiers, found)]))
"""
TEST = """
import pytest
from smoke import flavours
from smoke.place import Place
from pathlib import Path

HERE = Place(Path(), Path(), Path({home!r}))

@pytest.mark.check(id="import.always", purpose="p", severity="critical", remedy="r")
def test_always(check):
    pass

@pytest.mark.check(id="import.tools", purpose="p", severity="critical", remedy="r")
def test_tools(check):
    for command in flavours.own(check, HERE, "tools"):
        flavours.run_tool(command, 20)
"""


OTHER = "this image is of the flavour {}, which has no such thing"
# what is in image.json, and why the check of another flavour is not run there
IMAGES = {
    "runtime": ({"flavour": "runtime"}, OTHER.format("runtime")),
    "pallas": ({"flavour": "pallas"}, OTHER.format("pallas")),
    "none": ({}, OTHER.format(None)),
    "nowhere": (None, "outside an image nothing names a flavour"),
    "dev": ({"flavour": "dev"}, ""),
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Results, tier and exit code of a suite of two checks in images with some facts each."""
    top, paths = tmp_path_factory.mktemp("flavours"), []
    for name, (facts, _) in IMAGES.items():
        home = top / name
        home.mkdir()
        if facts is not None:
            (home / "image.json").write_text(json.dumps(facts))
        paths.append(home / f"test_in_{name}.py")
        paths[-1].write_text(TEST.format(home=str(home)))
    # no tool of any flavour is on this path
    env = {**os.environ, "PATH": str(top)}
    done = call([sys.executable, "-c", RUN, *paths], cwd=ROOT, env=env, timeout=60, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("judged ")]
    return {
        name: json.loads(line.removeprefix("judged "))
        for name, line in zip(IMAGES, lines, strict=True)
    }


@pytest.mark.parametrize("name", [name for name in IMAGES if name != "dev"])
def test_in_another_image_a_check_is_not_run_and_not_missed(
    judged: dict[str, list[Any]], name: str
) -> None:
    results, tier, code = judged[name]
    one = next(result for result in results if result["id"] == "import.tools")
    assert (one["status"], one["severity"], one["detail"]) == (
        "not run",
        "warning",
        IMAGES[name][1],
    )
    assert (tier["status"], tier["not_run"], code) == ("passed", 1, 0)


def test_in_its_own_image_it_is_run_and_its_failure_counts(judged: dict[str, list[Any]]) -> None:
    results, tier, code = judged["dev"]
    one = next(result for result in results if result["id"] == "import.tools")
    assert (one["status"], one["severity"]) == ("failed", "critical")
    assert (tier["status"], code) == ("failed", 1)


def test_every_flavour_with_a_lock_of_its_own_is_listed() -> None:
    listed = flavours.listed()
    for flavour, entry in listed.items():
        assert entry["imports"], flavour
        assert list((ROOT / "lock").glob(f"{flavour}-py3*.txt")), f"{flavour} has no lock"
    locked = {path.name.partition("-py3")[0] for path in (ROOT / "lock").glob("*-py3*.txt")}
    parts = {"runtime", "smoke", "simulator", "tools", "validators"}
    assert locked - parts == set(listed)


def test_what_is_imported_and_run_is_locked() -> None:
    distributions = {"IPython": "ipython"}
    for flavour, entry in flavours.listed().items():
        lock = sorted((ROOT / "lock").glob(f"{flavour}-py3*.txt"))[0]
        names = {pin.name for pin in read_lock(lock)}
        for module in entry["imports"]:
            top = module.partition(".")[0]
            package = distributions.get(top, top).replace("_", "-")
            # vllm is the module of vllm-torchtpu
            assert package in names or f"{package}-torchtpu" in names, f"{flavour}: {module}"


def test_a_key_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "flavours.toml"
    file.write_text('[train]\nimport = ["transformers"]\n')
    with pytest.raises(ValueError, match="train has import"):
        flavours.listed(file)


@pytest.mark.parametrize(
    ("command", "seconds", "said"),
    [
        (["no-such-command-anywhere"], 20, "No such file"),
        (["sh", "-c", "echo broken >&2; exit 1"], 20, "exit code 1: broken"),
        (["true"], 20, "it says nothing"),
        (["sleep", "60"], 0.2, "timed out"),
    ],
)
def test_a_tool_that_does_not_answer(command: list[str], seconds: float, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        flavours.run_tool(command, seconds)


def test_a_tool_does_not_see_the_suites_own_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/opt/tpuforge/site")
    code = "import os; print('PYTHONPATH' in os.environ)"
    assert flavours.run_tool([sys.executable, "-c", code], 20) == "False"
