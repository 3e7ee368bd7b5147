"""The verb report: what it counts, what it refuses to count, and its exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import smoke_host_support as support
from smoke_host_support import fill, forge, health

OTHER = "sha256:" + "00" * 32


def report_json(out: Path) -> dict[str, object]:
    data: dict[str, object] = json.loads((out / "report/runtime-py311/report.json").read_text())
    return data


def test_a_healthy_image(tmp_path: Path) -> None:
    image = fill(tmp_path, health_data=health(), bench_data=support.bench())
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in (
        image["name"],
        image["manifest_digest"],
        "517.3 MB compressed",
        "2.1 GB unpacked",
        str(tmp_path / "report/runtime-py311/index.html"),
        image["run_line"],
        f"tpu-run HOST/NAME@{image['manifest_digest']} python",
        "no TPU found",
    ):
        assert word in done.stdout
    assert "import.warm" in (tmp_path / "report/runtime-py311/index.html").read_text()
    assert report_json(tmp_path)["exit_code"] == 0


def filled(out: Path, name: str, **more: Any) -> None:
    """Another image beside the default one."""
    aside = out.with_name(f"{out.name}-{name}")
    image = {**fill(aside, **more), "image": name, "name": f"tpuforge/{name}:1"}
    for path in aside.rglob("*.json"):
        place = out / path.relative_to(aside).parent.with_name(f"{name}-py311")
        place.mkdir(parents=True, exist_ok=True)
        path.rename(place / path.name)
    support.write(out / f"images/{name}-py311/image.json", image)


def test_a_page_for_each_image_that_was_judged_and_one_that_leads_to_them(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, health_data=health(), bench_data=support.bench())
    alone = forge("release.report", out=out).stdout
    assert str(out / "report/index.html") not in alone
    filled(out, "pallas", health_data=health("unhealthy", 1))
    filled(out, "train", health_data=health(), digest=OTHER)
    filled(out, "serve", health_data=health())
    (out / "images/serve-py311/image.json").write_text("{}")
    # baked, and never judged
    filled(out, "dev")
    for words, code in ([], 0), (["--image", "pallas"], 1):
        done = forge("release.report", *words, out=out)
        assert done.returncode == code, done.stderr
        assert f"all:     {out}/report/index.html" in done.stdout
        pages = sorted(path.name for path in (out / "report").iterdir())
        assert pages == ["index.html", "pallas-py311", "runtime-py311", "train-py311"]
        front = (out / "report/index.html").read_text()
        links = re.findall(r'href="([^"]+)"', front)
        # the worst first
        assert links == [f"{name}-py311/index.html" for name in ("pallas", "train", "runtime")]
        assert all((out / "report" / link).is_file() for link in links)
        assert "1 of 3 images healthy" in front
        assert "serve-py311/image.json is damaged" in front
        assert str(tmp_path) not in front
    assert "Unhealthy: tpuforge/pallas:1" in (out / "report/pallas-py311/index.html").read_text()
    assert "import.warm" in (out / "report/runtime-py311/index.html").read_text()


@pytest.mark.parametrize(
    ("verdict", "code", "word"),
    [
        ("unhealthy", 1, "Unhealthy"),
        ("unjudged", 2, "Not judged"),
        ("device", 3, "Device unusable"),
    ],
)
def test_the_exit_code_is_the_verdict(tmp_path: Path, verdict: str, code: int, word: str) -> None:
    fill(tmp_path, health_data=health(verdict, code))
    done = forge("release.report", out=tmp_path)
    assert done.returncode == code
    assert f"health:  {word}. " in done.stdout


def test_an_unhealthy_image_is_not_offered(tmp_path: Path) -> None:
    image = fill(tmp_path, health_data=health("unhealthy", 1))
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 1
    assert "note:    health: Failed: import.torch: undefined symbol: x." in done.stdout
    assert "not for a TPU VM" in done.stdout
    assert image["run_line"] not in done.stdout and "tpu-run" not in done.stdout
    page = (tmp_path / "report/runtime-py311/index.html").read_text()
    assert image["run_line"] not in page
    assert "Failed: import.torch: undefined symbol: x." in page
    notes: Any = report_json(tmp_path)["notes"]
    assert notes[0]["from"] == "health"


def test_no_health_yet(tmp_path: Path) -> None:
    fill(tmp_path)
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 2
    assert "The verb smoke has not run for this image." in done.stdout
    assert "The verb bench has not run for this image." in done.stdout
    page = (tmp_path / "report/runtime-py311/index.html").read_text()
    assert "Not judged" in page
    assert "passed" not in page.partition("<main>")[2].partition("<footer>")[0]


def test_health_of_another_image_does_not_count(tmp_path: Path) -> None:
    fill(tmp_path, health_data=health(), bench_data=support.bench(), digest=OTHER)
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 2
    assert "was of another image, sha256:000000000000, and does not count" in done.stdout
    found = report_json(tmp_path)
    assert found["health"] == {
        "state": "stale",
        "why": "the last run of smoke was of another image, sha256:000000000000, and does not "
        "count",
        "data": None,
    }
    assert "import.warm" not in (tmp_path / "report/runtime-py311/index.html").read_text()


def test_health_that_was_edited_does_not_count(tmp_path: Path) -> None:
    fill(tmp_path, health_data=health("unhealthy", 1))
    path = tmp_path / "health/runtime-py311/health.json"
    path.write_text(path.read_text().replace("unhealthy", "healthy"))
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 2
    assert "health.json was changed after the run that made it" in done.stdout


def test_health_without_its_record_does_not_count(tmp_path: Path) -> None:
    fill(tmp_path, health_data=health())
    (tmp_path / "health/runtime-py311/run.json").unlink()
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 2
    assert "is not whole" in done.stdout


BARE = {"schema": "tpuforge.health/1", "verdict": "healthy", "exit_code": 0}


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (BARE, "it has no image"),
        ({**health(), "tiers": {}}, "its tiers are not static"),
        ({**health(), "verdict": ["healthy"]}, "its verdict has another type"),
        ({**health(), "exit_code": True}, "its exit_code has another type"),
        ({**health(), "exit_code": 3}, "its verdict healthy has the exit code 3"),
        ({**health(), "checks": [7]}, "a check: it is no object"),
        ({**health(), "checks": []}, "tier static says status passed"),
        ({**health("unhealthy"), "verdict": "healthy"}, "and its checks say unhealthy"),
    ],
)
def test_a_report_that_its_own_checks_do_not_bear_out(
    tmp_path: Path, report: dict[str, object], why: str
) -> None:
    fill(tmp_path, health_data={**report})
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "is not whole: " in done.stdout
    assert why in done.stdout
    assert "Healthy" not in (tmp_path / "report/runtime-py311/index.html").read_text()


def test_a_run_without_the_static_tier_does_not_speak_for_the_image(tmp_path: Path) -> None:
    report = health()
    report["checks"] = report["checks"][1:]
    report["tiers"]["static"] |= {"status": "not run", "passed": 0, "required": False}
    fill(tmp_path, health_data=report)
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 2
    assert "left out the tier static" in done.stdout


def test_a_run_of_some_checks_does_not_speak_for_the_image(tmp_path: Path) -> None:
    fill(tmp_path, health_data=health(selection="static.closure"))
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 2
    assert "was of some checks only (static.closure)" in done.stdout


@pytest.mark.parametrize("items", [7, [7], [{"id": "a"}], [{**support.bench(), "id": "a"}]])
def test_a_benchmark_that_is_not_whole(tmp_path: Path, items: object) -> None:
    fill(tmp_path, health_data=health(), bench_data={**support.bench(), "measurements": items})
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "what the last run of bench left is not whole" in done.stdout.lower()


def test_no_image(tmp_path: Path) -> None:
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 2
    assert "the image runtime-py311 was not baked" in done.stderr
    assert "./forge bake" in done.stderr
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "tpuforge.image/1"}', '{"schema": "x"}'])
def test_a_damaged_image_record(tmp_path: Path, text: str) -> None:
    fill(tmp_path)
    (tmp_path / "images/runtime-py311/image.json").write_text(text)
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 2
    assert "image.json is damaged" in done.stderr


def test_another_flavour_was_asked_for(tmp_path: Path) -> None:
    fill(tmp_path, health_data=health())
    done = forge("release.report", "--flavour", "dev", out=tmp_path)
    assert done.returncode == 2
    assert "runtime-py311 was baked from the flavour runtime" in done.stderr


def test_notes_and_stages_are_carried_over(tmp_path: Path) -> None:
    fill(tmp_path, health_data=health())
    result = {
        "schema": "tpuforge.result/1",
        "verb": "bake",
        "status": "done",
        "seconds": 44.0,
        "summary": f"baked it; {tmp_path}/images/x",
        "notes": ["the base has drifted"],
        "exit_code": 0,
    }
    support.write(tmp_path / "results/bake-runtime-py311.json", result)
    failed = {
        "schema": "tpuforge.result/1",
        "verb": "bench",
        "status": "failed",
        "started": "2999-01-01T00:00:00+00:00",
        "seconds": 1.0,
        "error": {"found": "the engine is gone", "exit_code": 2},
        "exit_code": 2,
    }
    support.write(tmp_path / "results/bench-runtime-py311.json", failed)
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 0
    assert "bake: The base has drifted." in done.stdout
    assert "bench: The engine is gone." in done.stdout
    page = (tmp_path / "report/runtime-py311/index.html").read_text()
    assert "baked it; out/images/x" in page
    assert str(tmp_path) not in page
    assert "44.0 s" in page


FAILED = {
    "schema": "tpuforge.result/1",
    "status": "failed",
    "started": "2999-01-01T00:00:00+00:00",
    "seconds": 1.0,
    "exit_code": 1,
    "error": {"found": "lock.txt is of another make"},
}


@pytest.mark.parametrize(
    ("name", "change", "counts"),
    [
        ("lock_check", {}, True),
        ("bake-runtime-py311", {"verb": "bake"}, True),
        # mistyped, and nothing of the image
        ("bake-runtime-py311", {"verb": "bake", "exit_code": 2}, False),
        ("smoke-runtime-py311", {"verb": "smoke", "exit_code": 2}, False),
        ("bake", {}, False),
        ("smoke-other-py311", {"verb": "smoke"}, False),
        # by hand, and no part of the main job
        ("base", {}, False),
        ("engine", {}, False),
        ("reproduce", {"data": support.DIGEST}, False),
        # older than the image
        ("lock_check", {"started": "2001-01-01T00:00:00+00:00"}, False),
        ("lock_check", {"started": "yesterday"}, False),
    ],
)
def test_whose_failure_is_a_note(
    tmp_path: Path, name: str, change: dict[str, object], counts: bool
) -> None:
    fill(tmp_path, health_data=health(), bench_data=support.bench())
    support.write(tmp_path / f"results/{name}.json", {**FAILED, "verb": name, **change})
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("note:    " in done.stdout) == counts
    assert (": lock.txt is of another make." in done.stdout) == counts


@pytest.mark.parametrize(
    "change",
    [
        {"notes": 7},
        {"error": "x"},
        {"summary": []},
        {"seconds": "1"},
        {"status": None},
        {"exit_code": "0"},
        {"started": 7},
        {"verb": "bench"},
    ],
)
def test_a_result_of_odd_types_counts_as_none(tmp_path: Path, change: dict[str, object]) -> None:
    fill(tmp_path, health_data=health(), bench_data=support.bench())
    support.write(tmp_path / "results/lock_check.json", {**FAILED, "verb": "lock_check", **change})
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 0, done.stderr
    stages = report_json(tmp_path)["stages"]
    assert isinstance(stages, list)
    assert stages[0] == {"verb": "lock_check", "status": "not run", "why": "it left no result"}


@pytest.mark.parametrize(
    "change",
    [
        {"name": None},
        {"manifest_digest": 7},
        {"compressed_bytes": "1"},
        {"unpacked_bytes": None},
        {"run_line": []},
        {"notes": 7},
        {"layers": {}},
        {"labels": [1]},
        {"save_line": 1},
    ],
)
def test_an_image_record_of_odd_types(tmp_path: Path, change: dict[str, object]) -> None:
    fill(tmp_path, health_data=health())
    path = tmp_path / "images/runtime-py311/image.json"
    support.write(path, {**support.IMAGE, **change})
    done = forge("release.report", out=tmp_path)
    assert done.returncode == 2
    assert f"image.json is damaged: {next(iter(change))}" in done.stderr


def test_with_a_private_engine_it_says_how_to_run_it_here(tmp_path: Path) -> None:
    fill(tmp_path, health_data=health())
    assert "here (private" not in forge("release.report", out=tmp_path).stdout
    lines = {"local_run_line": "docker -H unix:///x run", "save_line": "docker -H unix:///x save"}
    path = tmp_path / "images/runtime-py311/image.json"
    support.write(path, {**support.IMAGE, **lines})
    done = forge("release.report", out=tmp_path)
    assert "here (private engine):\n  docker -H unix:///x run\n" in done.stdout
    assert f"  {lines['save_line']}\n" in done.stdout
    page = (tmp_path / "report/runtime-py311/index.html").read_text()
    assert lines["local_run_line"] in page
    assert lines["save_line"] in page


def test_a_mistyped_image_is_told_which_ones_there_are(tmp_path: Path) -> None:
    fill(tmp_path)
    done = forge("release.report", "--image", "nope", out=tmp_path)
    assert done.returncode == 2
    assert "one of the baked images: runtime-py311" in done.stderr


def test_a_proof_of_another_image_is_left_out(tmp_path: Path) -> None:
    image = fill(tmp_path, health_data=health())
    result = {
        "schema": "tpuforge.result/1",
        "verb": "reproduce",
        "status": "done",
        "seconds": 9.0,
        "exit_code": 0,
    }
    page = tmp_path / "report/runtime-py311/index.html"
    for digest, shown in ((OTHER, False), (image["manifest_digest"], True)):
        record = {**result, "summary": "two bakes agree", "data": {"manifest_digest": digest}}
        support.write(tmp_path / "results/reproduce.json", record)
        assert forge("release.report", out=tmp_path).returncode == 0
        assert ("two bakes agree" in page.read_text()) == shown


def test_the_packages_of_the_base_count_only_if_it_is_that_base(tmp_path: Path) -> None:
    image = fill(tmp_path, health_data=health())
    packages = [{"name": "libc6", "version": "2.36-9", "arch": "amd64", "sha256": "0" * 64}]
    base = {"schema": "tpuforge.base/1", "manifest_digest": OTHER, "packages": packages}
    support.write(tmp_path / "base/bookworm.json", base)
    page = tmp_path / "report/runtime-py311/index.html"
    for digest, shown in (("sha256:" + "99" * 32, False), (OTHER, True)):
        record = {**image, "base_digest": digest}
        support.write(tmp_path / "images/runtime-py311/image.json", record)
        assert forge("release.report", out=tmp_path).returncode == 0
        assert ("2.36-9" in page.read_text()) == shown


def test_json_for_machines(tmp_path: Path) -> None:
    fill(tmp_path, health_data=health())
    done = forge("release.report", "--json", out=tmp_path)
    data = json.loads(done.stdout)["data"]
    assert data["tiers"]["static"] == "passed"
    assert data["tiers"]["device"] == "not run"
    assert data["run_line"] == support.IMAGE["run_line"]


def test_a_folder_with_spaces_and_other_letters(tmp_path: Path) -> None:
    out = tmp_path / "Übung mit Leerzeichen"
    fill(out, health_data=health())
    assert forge("release.report", out=out).returncode == 0
    assert (out / "report/index.html").is_file()
