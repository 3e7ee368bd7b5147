"""The verbs smoke, bench and report on the real image and the real engine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bake_support import Engine, Image, private_out, result
from smoke_host_support import forge_apart, owner

MAY_TAKE_S = 900


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def out(engine: Engine, image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An out folder with the real image, engine, wheels and simulator, by links."""
    simulator = Path(result("tpuforge.smoke.simulator")["folder"])
    folder = tmp_path_factory.mktemp("an out folder, with ümlaut")
    parts = ["engine/engine.json", f"images/{image.slug}", "wheelhouse"]
    private_out(folder, image.out, *parts, simulator.relative_to(image.out).as_posix())
    assert engine.record["docker"] == read(folder / "engine/engine.json")["docker"]
    return folder


def left_over(engine: Engine, out: Path) -> list[str]:
    """Containers and image names that a run with this out folder has left in the engine."""
    mark = owner(out)
    containers = engine.run("ps", "--all", "--quiet", "--filter", f"label=io.tpuforge.run={mark}")
    names = engine.run("images", "--format", "{{.Tag}}", "tpuforge/running")
    assert containers.returncode == names.returncode == 0
    return containers.stdout.split() + [n for n in names.stdout.split() if n.startswith(mark)]


def test_smoke_judges_and_then_has_nothing_to_do(engine: Engine, image: Image, out: Path) -> None:
    # both container runs; the main job runs all checks of them
    words = ("--tier", "static,simulate,device", "-k", "static or simulate.readme")
    done = forge_apart("smoke.health", *words, out=out, timeout=MAY_TAKE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    report = read(out / f"health/{image.slug}/health.json")
    status = {name: tier["status"] for name, tier in report["tiers"].items()}
    assert status == {
        "static": "passed",
        "import": "not run",
        "compile": "not run",
        "simulate": "passed",
        "device": "not run",
    }
    assert report["highest_tier"] == "simulate"
    record = read(out / f"health/{image.slug}/run.json")
    assert record["manifest_digest"] == image.record["manifest_digest"]
    assert "Healthy" in (out / f"health/{image.slug}/health.html").read_text()
    junit = ElementTree.parse(out / f"health/{image.slug}/health.xml")
    names = " ".join(case.get("name") or "" for case in junit.iter("testcase"))
    assert "record" in names  # of the first container run
    assert "readme" in names  # of the second
    started = time.monotonic()
    again = forge_apart("smoke.health", *words, out=out)
    assert time.monotonic() - started < 3
    assert again.returncode == 0
    assert "same image, simulator and options as in the last run" in again.stdout
    assert image.record["manifest_digest"][:19] in again.stdout
    assert left_over(engine, out) == []


def test_bench_measures_each_cost_apart(engine: Engine, image: Image, out: Path) -> None:
    words = ("--samples", "1", "--target", "v6e:2x2")
    done = forge_apart("smoke.bench", *words, out=out, timeout=MAY_TAKE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        item["id"]: item for item in read(out / f"bench/{image.slug}/bench.json")["measurements"]
    }
    for name in (
        "install.wheels",
        "import.warm",
        "import.memory",
        "compile.load",
        "compile.v6e:2x2.matmul_2x2",
        "compile.v6e:2x2.matmul_8192",
        "step.first_step_time_seconds",
        "step.post_warmup_step_time_seconds",
    ):
        assert found[name]["not_run"] is None, found[name]
        assert found[name]["median"] > 0
    steady = found["step.post_warmup_step_time_seconds"]["median"]
    assert steady < found["step.first_step_time_seconds"]["median"]
    # a machine may keep files in its page cache; then the reason stands there instead of a number
    cold = found["import.cold"]
    assert (cold["median"] is None) == bool(cold["not_run"])
    assert "storage" in (cold["not_run"] or "storage")
    assert "nothing to do" in forge_apart("smoke.bench", *words, out=out).stdout
    assert left_over(engine, out) == []


def test_report_joins_them(image: Image, out: Path) -> None:
    # the report counts no part of a run
    judged = forge_apart("smoke.health", "--tier", "static,device", out=out, timeout=MAY_TAKE_S)
    assert judged.returncode == 0, judged.stdout + judged.stderr
    done = forge_apart("release.report", out=out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert image.record["run_line"] in done.stdout
    assert image.record["manifest_digest"] in done.stdout
    data = read(out / "report/runtime-py311/report.json")
    assert (data["health"]["state"], data["bench"]["state"]) == ("fresh", "fresh")
    page = (out / "report/runtime-py311/index.html").read_text()
    for word in ("static.", "install.wheels", "not run"):
        assert word in page
