"""The release gate over a Docker client made here: several images, one verdict, what is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import smoke_host_support as support
from process_support import wait_for
from smoke_host_support import DIGEST, calls, fake_engine, fill, forge, health, runs

PLAIN = ("--tier", "static,import")
OTHER = "sha256:" + "77" * 32
THIRD = "sha256:" + "99" * 32


def verdict(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "health/verdict.json").read_text())
    return found


def second_image(out: Path, digest: str = OTHER, name: str = "train") -> None:
    """Another baked image beside the usual one."""
    record = {**support.IMAGE, "image": name, "name": f"tpuforge/{name}:1"}
    support.write(out / f"images/{name}-py311/image.json", {**record, "manifest_digest": digest})


def two_images(out: Path, **play: Any) -> Path:
    """Two baked images, and an engine that holds both; the folder of its client."""
    fill(out)
    second_image(out)
    return fake_engine(out, out / "client", holds={DIGEST: DIGEST, OTHER: OTHER}, **play)


def cached(out: Path) -> Path:
    """The one result that is kept."""
    (folder,) = (out / "cache/health").iterdir()
    return folder


def test_two_images_one_verdict_the_worst_counts(tmp_path: Path) -> None:
    client = two_images(
        tmp_path, reports={DIGEST: [health(), 0], OTHER: [health("unhealthy", 1), 1]}
    )
    done = forge("smoke.health", *PLAIN, "--image", "runtime,train", out=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "train-py311: failed: import.torch" in done.stdout
    assert "2 images: 1 healthy, 1 unhealthy" in done.stdout
    found = verdict(tmp_path)
    assert (found["schema"], found["verdict"], found["exit_code"]) == (
        "tpuforge.verdict/1",
        "unhealthy",
        1,
    )
    first, second = found["images"]
    assert (first["image"], first["verdict"], first["failed"]) == ("runtime-py311", "healthy", [])
    assert first["manifest_digest"] == DIGEST
    assert first["tiers"]["device"] == {"status": "not run", "why": "no TPU found"}
    assert (second["image"], second["exit_code"]) == ("train-py311", 1)
    assert second["failed"][0]["id"] == "import.torch"
    assert second["failed"][0]["remedy"] == "./forge bake"
    for image in found["images"]:
        assert Path(image["report"]).is_file()
    assert len(runs(client)) == 2
    # neither is run again, and the worst still counts
    again = forge("smoke.health", *PLAIN, "--image", "runtime", "--image", "train", out=tmp_path)
    assert again.returncode == 1
    assert "nothing to do" in again.stdout
    assert "2 unchanged since an earlier run, and not run again" in again.stdout
    assert [image["cached"] for image in verdict(tmp_path)["images"]] == [True, True]
    assert len(runs(client)) == 2


def test_the_file_has_exactly_what_its_page_describes(tmp_path: Path) -> None:
    fill(tmp_path)
    fake_engine(tmp_path, tmp_path / "client", report=health("unhealthy", 1), code=1)
    assert forge("smoke.health", *PLAIN, out=tmp_path).returncode == 1
    found = verdict(tmp_path)
    page = (support.SRC.parent / "docs/smoke.md").read_text()
    described = page[page.index("## The verdict file") :]
    names = [*found, *(f"images[].{name}" for name in found["images"][0])]
    names += [f"images[].failed[].{name}" for name in found["images"][0]["failed"][0]]
    names += [f"chosen.{name}" for name in found["chosen"]]
    for name in names:
        assert f"`{name}`" in described, name


def test_images_of_the_engine_and_baked_ones_together(tmp_path: Path) -> None:
    fill(tmp_path)
    fake_engine(
        tmp_path,
        tmp_path / "client",
        holds={DIGEST: DIGEST, "some/image:1": OTHER, OTHER: OTHER},
        report=health(),
    )
    words = ("--image", "runtime", "--image-ref", "some/image:1")
    done = forge("smoke.health", *PLAIN, *words, out=tmp_path)
    assert done.returncode == 0, done.stderr
    names = [image["image"] for image in verdict(tmp_path)["images"]]
    assert names == ["runtime-py311", "ref-777777777777"]


def test_all_takes_every_image_that_has_a_suite(tmp_path: Path) -> None:
    two_images(tmp_path, report=health())
    support.write(tmp_path / "images/tools-py311/image.json", {**support.IMAGE, "suite_sha256": ""})
    done = forge("smoke.health", *PLAIN, "--all", out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [one["image"] for one in verdict(tmp_path)["images"]] == ["runtime-py311", "train-py311"]
    done = forge("smoke.health", *PLAIN, "--all", "--python", "3.12", out=tmp_path)
    assert done.returncode == 2
    assert "no image stands in" in done.stderr


def test_they_run_side_by_side(tmp_path: Path) -> None:
    client = two_images(tmp_path, report=health(), meet=2)
    # each container waits for the other one: one after the other would never end
    words = (*PLAIN, "--image", "runtime,train", "--jobs", "2")
    done = forge("smoke.health", *words, out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(runs(client)) == 2


def test_one_that_cannot_be_judged_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    two_images(tmp_path, reports={DIGEST: [health(), 0], OTHER: [None, 125]})
    second_image(tmp_path, THIRD, "serve")
    done = forge("smoke.health", *PLAIN, "--image", "runtime,train,serve", out=tmp_path)
    assert done.returncode == 1  # serve's layout is not there: its bytes are at fault
    runtime, train, serve = verdict(tmp_path)["images"]
    assert runtime["verdict"] == "healthy"
    assert (train["verdict"], train["exit_code"]) == ("unjudged", 2)
    assert "the engine could not run the container" in train["error"]["found"]
    assert train["report"] is None
    assert "is not the OCI layout of" in serve["error"]["found"]
    assert "the engine could not run the container" in done.stdout


def test_the_same_bytes_under_two_names_are_run_once(tmp_path: Path) -> None:
    fill(tmp_path)
    second_image(tmp_path, DIGEST)
    client = fake_engine(tmp_path, tmp_path / "client", report=health())
    done = forge("smoke.health", *PLAIN, "--image", "runtime,train", out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(runs(client)) == 1
    assert (tmp_path / "health/train-py311/health.json").is_file()


def test_an_unknown_image_is_refused_before_anything_runs(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health())
    (tmp_path / "health").mkdir()
    (tmp_path / "health/verdict.json").write_text("{}")
    done = forge("smoke.health", *PLAIN, "--image", "runtime,nope", out=tmp_path)
    assert done.returncode == 2
    assert "the image nope-py311 was not baked" in done.stderr
    assert runs(client) == []
    # an earlier verdict is not left to be taken for this one's
    assert not (tmp_path / "health/verdict.json").exists()


@pytest.mark.parametrize("words", [("--image", "runtime,"), ("--jobs", "0"), ("--image-ref", "")])
def test_arguments_that_make_no_sense(tmp_path: Path, words: tuple[str, ...]) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health())
    done = forge("smoke.health", *words, out=tmp_path)
    assert done.returncode == 2
    assert "expected:" in done.stderr
    assert runs(client) == []


def test_what_was_had_before_is_had_again_whatever_ran_between(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health())
    for tiers in ("static", "static,import", "static"):
        done = forge("smoke.health", "--tier", tiers, out=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert len(runs(client)) == 2
    record = json.loads((tmp_path / "health/runtime-py311/run.json").read_text())
    assert record["inputs"]["the choice of tiers"] == "static"


def test_a_choice_of_checks_reaches_the_image_and_is_a_key_of_its_own(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health())
    for words in (("-k", "static.cuda"), ("-m", "critical"), ("-k", "static.cuda")):
        assert forge("smoke.health", *PLAIN, *words, out=tmp_path).returncode == 0
    first, second = runs(client)
    assert first[first.index("-k") + 1] == "static.cuda"
    assert second[second.index("-m") + 1] == "critical"
    assert verdict(tmp_path)["chosen"]["keywords"] == "static.cuda"


def edit(path: Path, change: Any) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def damage(folder: Path, how: str) -> None:
    if how == "edited report":
        path = folder / "health.json"
        path.write_text(path.read_text().replace("unhealthy", "healthy"))
    elif how == "edited page":
        (folder / "health.html").write_text("<p>healthy</p>")
    elif how == "half a report":
        path = folder / "health.json"
        path.write_bytes(path.read_bytes()[:100])
    elif how == "lost file":
        (folder / "health.xml").unlink()
    elif how == "lost record":
        (folder / "entry.json").unlink()
    elif how == "another verdict":
        edit(folder / "entry.json", lambda value: value["run"].update(exit_code=0))
    elif how == "another suite":
        edit(folder / "entry.json", lambda value: value["run"]["inputs"].update({"the suite": "x"}))
    elif how == "odd record":
        (folder / "entry.json").write_text("[]")


@pytest.mark.parametrize(
    "how",
    [
        "edited report",
        "edited page",
        "half a report",
        "lost file",
        "lost record",
        "another verdict",
        "another suite",
        "odd record",
    ],
)
def test_a_damaged_result_is_never_taken_for_a_verdict(tmp_path: Path, how: str) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health("unhealthy", 1), code=1)
    assert forge("smoke.health", *PLAIN, out=tmp_path).returncode == 1
    damage(cached(tmp_path), how)
    done = forge("smoke.health", *PLAIN, out=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "an earlier result is not believed" in done.stderr
    assert len(runs(client)) == 2


def test_a_result_of_another_image_is_not_this_ones(tmp_path: Path) -> None:
    client = two_images(
        tmp_path, reports={DIGEST: [health(), 0], OTHER: [health("unhealthy", 1), 1]}
    )
    assert forge("smoke.health", *PLAIN, out=tmp_path).returncode == 0
    good = cached(tmp_path)
    assert forge("smoke.health", *PLAIN, "--image", "train", out=tmp_path).returncode == 1
    (bad,) = set((tmp_path / "cache/health").iterdir()) - {good}
    for path in good.iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    done = forge("smoke.health", *PLAIN, "--image", "train", out=tmp_path)
    assert done.returncode == 1
    assert "its record is of another run" in done.stderr
    assert len(runs(client)) == 3


def test_another_suite_in_the_image_is_another_result(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health())
    assert forge("smoke.health", *PLAIN, out=tmp_path).returncode == 0
    path = tmp_path / "images/runtime-py311/image.json"
    support.write(path, {**support.IMAGE, "suite_sha256": "ee" * 32})
    done = forge("smoke.health", *PLAIN, out=tmp_path)
    assert "the suite changed since the last run" in done.stderr
    assert len(runs(client)) == 2


@pytest.mark.parametrize(("word", "code"), [("unjudged", 2), ("device", 3)])
def test_what_is_no_verdict_on_the_image_is_not_kept(tmp_path: Path, word: str, code: int) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health(word, code), code=code)
    for _ in range(2):
        assert forge("smoke.health", *PLAIN, out=tmp_path).returncode == code
    assert len(runs(client)) == 2
    assert not (tmp_path / "cache/health").exists()


def test_again_runs_it_again(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health())
    for _ in range(2):
        assert forge("smoke.health", *PLAIN, "--again", out=tmp_path).returncode == 0
    assert len(runs(client)) == 2


def test_told_to_stop_it_ends_every_container_and_leaves_no_verdict(tmp_path: Path) -> None:
    client = two_images(tmp_path, report=health(), until="never")
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "tpuforge.smoke.health", *PLAIN),
            *("--image", "runtime,train", "--jobs", "2"),
        ],
        env=support.verb_env(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: len(runs(client)) >= 2)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=60) == 130
    finally:
        running.kill()
    for words in runs(client):
        assert ["rm", "--force", words[words.index("--name") + 1]] in calls(client)
    assert list((tmp_path / "health").iterdir()) == []
    assert not (tmp_path / "cache/health").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((client / "running").read_text()), 0)


def test_github_gets_annotations_and_a_summary_and_obeys_no_image(tmp_path: Path) -> None:
    fill(tmp_path)
    report = health("unhealthy", 1)
    report["checks"][1]["detail"] = "100% wrong\n::error::obey me"
    report["tiers"]["import"]["why"] = "wrong"
    fake_engine(tmp_path, tmp_path / "client", report=report, code=1)
    page = tmp_path / "summary.md"
    github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(page)}
    done = forge("smoke.health", *PLAIN, out=tmp_path, **github)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    token = lines[0].removeprefix("::stop-commands::")
    assert lines[0] != token
    resumed = lines.index(f"::{token}::")
    (obeyed,) = lines[resumed + 1 :]
    # what is so comes first, then what should be
    assert obeyed == (
        "::error title=runtime-py311%3A import.torch::100%25 wrong%0A::error::obey me%0A"
        "expected: import.torch holds%0Amend: ./forge bake"
    )
    assert "| runtime-py311 | unhealthy | ✅ | ❌ | not run |" in page.read_text()
    assert "failed: `import.torch`" in page.read_text()
    # a machine that reads the result gets nothing but the result
    done = forge("smoke.health", *PLAIN, "--json", out=tmp_path, **github)
    assert json.loads(done.stdout)["exit_code"] == 1
    assert "::error title=" in done.stderr


def test_a_choice_of_checks_is_named_beside_the_verdict(tmp_path: Path) -> None:
    fill(tmp_path)
    fake_engine(tmp_path, tmp_path / "client", report=health(selection="static.cuda"))
    done = forge("smoke.health", *PLAIN, "-k", "static.cuda", out=tmp_path)
    assert "by some checks only: static.cuda" in done.stdout


def test_github_is_told_of_a_run_without_a_verdict(tmp_path: Path) -> None:
    done = forge("smoke.health", "--image", "nope", out=tmp_path, GITHUB_ACTIONS="true")
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == (
        "::error title=smoke::nothing was judged (exit code 2); the lines above say why"
    )


def test_a_page_that_was_changed_is_put_back(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health())
    assert forge("smoke.health", *PLAIN, out=tmp_path).returncode == 0
    folder = tmp_path / "health/runtime-py311"
    (folder / "health.html").write_text("<p>other</p>")
    (folder / "health.xml").unlink()
    done = forge("smoke.health", *PLAIN, out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(runs(client)) == 1
    for name in ("health.json", "health.xml", "health.html"):
        assert (folder / name).read_bytes() == (cached(tmp_path) / name).read_bytes()


def test_elsewhere_there_are_no_annotations(tmp_path: Path) -> None:
    fill(tmp_path)
    fake_engine(tmp_path, tmp_path / "client", report=health("unhealthy", 1), code=1)
    done = forge("smoke.health", *PLAIN, out=tmp_path, GITHUB_ACTIONS="")
    assert "::" not in done.stdout
