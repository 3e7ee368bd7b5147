"""The suite is honest: a tier that cannot run is never reported as passed, whatever the reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from smoke.verdict import TIERS

from process_support import call
from smoke_suite_support import ROOT, Environment

RUN = """
import json, os, pytest, sys
from smoke import verdict
from smoke.plugin import Suite
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # as the command has it
found = {}
for name, paths, closed, arguments in json.load(open(sys.argv[1])):
    suite = Suite(("v6e:2x2",), False, dict.fromkeys(paths, closed) if closed else {}, None)
    fixed = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--assert=plain"]
    code = pytest.main([*paths.values(), *fixed, *arguments], plugins=[suite])
    trouble = "it failed" if code > 1 and code != 5 else None
    for tier in paths:
        results = [one for one in suite.results if one["tier"] == tier]
        one = verdict.tier(results, why="none of its checks was run")
        tiers = {word: verdict.tier([], required=False) for word in verdict.TIERS} | {tier: one}
        judged = verdict.judge(tiers, results, trouble)
        highest = verdict.highest(tiers)
        found[f"{tier}, {name}"] = {"tier": one, "code": judged, "highest": highest}
print("\\n" + json.dumps(found))
"""
REASONS = {
    "the tier is closed": ("", "no ground here", ()),
    "every check says that it cannot": ('check.cannot("not here")', "", ()),
    "a package is missing": ('pytest.importorskip("no_such_package")', "", ()),
    "its process was killed from outside": (
        "check.value(os.kill, 0, 9, timeout=20)\n    raise SystemExit",
        "",
        (),
    ),
    "a selection leaves nothing": ("", "", ("-k", "nothing_of_this_name")),
    "a mark leaves nothing": ("", "", ("-m", "no_such_mark")),
    "a fixture gives up": ("FIXTURE", "", ()),
    "the file cannot be read": ("SYNTAX", "", ()),
    "a fixture breaks": ("BREAKS", "", ()),
}
NOT_RUN = set(REASONS) - {"a fixture breaks"}


def _text(tier: str, body: str) -> str:
    mark = f'@pytest.mark.check(id="{tier}.x", purpose="p", severity="critical", remedy="r")\n'
    word = {"FIXTURE": 'pytest.skip("not today")', "BREAKS": "raise OSError(5)"}.get(body, "pass")
    fixture = f"@pytest.fixture\ndef ground():\n    {word}\n"
    if body == "SYNTAX":
        return "this is no Python"
    inner = body if body not in ("FIXTURE", "BREAKS") else ""
    head = f"import os\nimport pytest\n{fixture}{mark}"
    return f"{head}def test_x(check, ground):\n    {inner or 'pass'}\n"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the suite says of every tier for every reason, and of one that can run."""
    folder = tmp_path_factory.mktemp("honest")
    cases = {why: (TIERS, *case) for why, case in REASONS.items()}
    cases["sound"] = (("compile",), "", "", ())
    jobs = []
    for number, (why, (tiers, body, closed, arguments)) in enumerate(cases.items()):
        paths = {tier: folder / f"test_{tier}_{number}.py" for tier in tiers}
        for tier, path in paths.items():
            path.write_text(_text(tier, body))
        jobs.append((why, {tier: str(path) for tier, path in paths.items()}, closed, arguments))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = call([sys.executable, "-c", RUN, str(folder / "jobs.json")], cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    reports: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return reports


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_that_cannot_run_did_not_pass(
    found: dict[str, dict[str, Any]], tier: str, reason: str
) -> None:
    report = found[f"{tier}, {reason}"]
    assert report["tier"]["status"] == ("not run" if reason in NOT_RUN else "failed")
    assert report["tier"]["passed"] == 0
    assert report["tier"]["why"]
    assert report["highest"] is None
    assert report["code"] == (2 if reason in NOT_RUN else 1)


def test_a_tier_that_can_run_passes(found: dict[str, dict[str, Any]]) -> None:
    # or the test above would prove nothing
    assert found["compile, sound"]["tier"]["status"] == "passed"
    assert (found["compile, sound"]["code"], found["compile, sound"]["highest"]) == (0, "compile")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An installation with an interpreter of its own."""
    return Environment(tmp_path_factory.mktemp("sound"))


CLOSED = {
    "no simulator": ("simulate", {}, "no simulator is mounted"),
    "an empty simulator": ("simulate", {"TPUFORGE_SIMULATOR": "EMPTY"}, "holds no simulator"),
    "another plugin": (
        "simulate",
        {"TPUFORGE_SIMULATOR": "FULL"},
        "TPU_LIBRARY_PATH does not name",
    ),
    "no simulated chip": (
        "simulate",
        {"TPUFORGE_SIMULATOR": "FULL", "TPU_LIBRARY_PATH": "FULL/wrapper.so"},
        "the simulated chip is not mounted",
    ),
    "no TPU": ("device", {}, "no TPU found"),
    "a simulated TPU": ("device", {"TPUFORGE_SIMULATOR": "FULL"}, "no TPU found"),
}


@pytest.mark.parametrize("reason", CLOSED)
def test_the_command_never_passes_a_tier_that_cannot_run(
    sound: Environment, tmp_path: Path, reason: str
) -> None:
    tier, variables, why = CLOSED[reason]
    for name in ("EMPTY", "FULL"):
        (tmp_path / name).mkdir()
    (tmp_path / "FULL/simulator.json").write_text("{}")
    env = {name: str(tmp_path / value) for name, value in variables.items()}
    out = tmp_path / "health.json"
    done = sound.run("health", "--tier", tier, "--json", str(out), **env)
    report = json.loads(out.read_text())
    assert report["tiers"][tier]["status"] == "not run"
    assert report["tiers"][tier]["passed"] == 0
    assert why in report["tiers"][tier]["why"]
    assert why in " ".join(done.stdout.split())
    assert {one["status"] for one in report["checks"]} == {"not run"}
    assert (done.returncode, report["verdict"], report["highest_tier"]) == (2, "unjudged", None)
