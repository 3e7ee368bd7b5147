"""The verbs smoke and bench over a Docker client made here: calls, exit codes, what is cached."""

from __future__ import annotations

import csv
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import smoke_host_support as support
from process_support import wait_for
from smoke_host_support import CONFIG, DIGEST, calls, fake_engine, fill, forge, health, runs
from tpuforge.smoke import container

PLAIN = ("--tier", "static,import")


def test_a_healthy_image_and_how_it_was_run(tmp_path: Path) -> None:
    out = tmp_path / "out, with a comma and Ümlaut"
    fill(out)
    client = fake_engine(out, tmp_path / "client", report=health())
    done = forge("smoke.health", *PLAIN, "--target", "v6e:2x2", out=out)
    assert done.returncode == 0, done.stderr
    assert "is healthy" in done.stdout
    assert "no TPU found" in done.stdout
    (words,) = runs(client)
    for flag in ("--rm", "--init", "--network=none", "--read-only", "no-new-privileges"):
        assert flag in words
    assert words[words.index("--cap-drop") + 1] == "ALL"
    assert words[words.index("--tmpfs") + 1] == "/tmp"
    assert words[words.index("--memory") + 1] == "6g"
    mount = next(csv.reader([words[words.index("--mount") + 1]]))
    assert mount[0] == "type=bind"
    assert mount[1].startswith(f"source={out}/health/.run-")
    assert mount[2] == "target=/results"
    made = [words[0] for words in calls(client)]
    assert made[-2:] == ["run", "rmi"]
    # what was left is removed first; the name of its own keeps a bake from taking the image away
    assert made.index("ps") < made.index("tag") < made.index("run")
    command = words[words.index(DIGEST) + 1 :]
    assert command[:2] == ["timeout", "--kill-after=10"]
    assert command[3:8] == ["health", "--tier", "static,import", "--target", "v6e:2x2"]
    folder = out / "health/runtime-py311"
    assert sorted(path.name for path in folder.iterdir()) == [
        "health.html",
        "health.json",
        "health.xml",
        "run.json",
    ]
    assert list((out / "health").glob(".run-*")) == []


def test_an_unhealthy_image_shows_what_failed_and_stays_unhealthy(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health("unhealthy", 1), code=1)
    for word in ("done", "nothing to do"):
        done = forge("smoke.health", *PLAIN, out=tmp_path)
        assert done.returncode == 1
        assert "failed: import.torch: undefined symbol: x\n" in done.stdout
        assert "\n  expected: import.torch holds\n  mend: ./forge bake\n" in done.stdout
        assert f"smoke: {word} in" in done.stdout
    assert len(runs(client)) == 1


def test_unchanged_needs_no_engine_and_says_why(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health())
    assert forge("smoke.health", *PLAIN, out=tmp_path).returncode == 0
    (client / "docker").unlink()
    started = time.monotonic()
    done = forge("smoke.health", *PLAIN, out=tmp_path)
    assert time.monotonic() - started < 3
    assert done.returncode == 0
    assert "same image, simulator and options as in the last run, which took " in done.stdout


def test_an_image_that_calls_itself_healthy_against_its_checks_is_not_believed(
    tmp_path: Path,
) -> None:
    fill(tmp_path)
    report = {**health("unhealthy"), "verdict": "healthy"}
    fake_engine(tmp_path, tmp_path / "client", report=report)
    done = forge("smoke.health", *PLAIN, out=tmp_path)
    assert done.returncode == 2
    assert "it says healthy, and its checks say unhealthy" in done.stderr


@pytest.mark.parametrize("change", ["options", "image", "again", "unjudged"])
def test_anything_else_is_run_again(tmp_path: Path, change: str) -> None:
    fill(tmp_path)
    code = 2 if change == "unjudged" else 0
    report = health("unjudged", 2) if code else health()
    client = fake_engine(
        tmp_path, tmp_path / "client", report=report, code=code, holds={DIGEST: DIGEST}
    )
    arguments = list(PLAIN)
    assert forge("smoke.health", *arguments, out=tmp_path).returncode == code
    if change == "options":
        arguments += ["--target", "v5e:2x2"]
    elif change == "again":
        arguments += ["--again"]
    elif change == "image":
        other = "sha256:" + "11" * 32
        support.write(
            tmp_path / "images/runtime-py311/image.json",
            {**support.IMAGE, "manifest_digest": other},
        )
        fake_engine(tmp_path, client, report=report, code=code, holds={other: other})
    done = forge("smoke.health", *arguments, out=tmp_path)
    assert done.returncode == code
    assert len(runs(client)) == 2
    said = {
        "options": "the choice of targets changed since the last run",
        "image": "the image changed since the last run",
    }
    assert said.get(change, "smoke: judging") in done.stderr


def layout(out: Path, *layers: bytes) -> dict[str, object]:
    """A tiny OCI layout, and image.json for it."""
    folder = out / "images/runtime-py311/oci/blobs/sha256"
    folder.mkdir(parents=True)

    def blob(data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        (folder / digest).write_bytes(data)
        return f"sha256:{digest}"

    config = blob(b"{}")
    manifest = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"digest": config},
        "layers": [{"digest": blob(data)} for data in layers or (b"layer",)],
    }
    digest = blob(json.dumps(manifest).encode())
    image = {**support.IMAGE, "manifest_digest": digest, "config_digest": config}
    support.write(out / "images/runtime-py311/image.json", image)
    return image


def test_an_image_that_the_engine_lacks_is_loaded(tmp_path: Path) -> None:
    image = layout(tmp_path)
    digest = str(image["config_digest"])  # the classic image store knows this one
    client = fake_engine(
        tmp_path, tmp_path / "client", holds={}, loads={digest: digest}, report=health()
    )
    done = forge("smoke.health", *PLAIN, out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ["load"] in calls(client)
    assert digest in runs(client)[0]


def test_an_engine_that_holds_other_bytes_is_refused(tmp_path: Path) -> None:
    layout(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", holds={}, loads={}, report=health())
    done = forge("smoke.health", *PLAIN, out=tmp_path)
    assert done.returncode == 1
    assert "the engine does not hold tpuforge/runtime:0.2.0-py311 with the digest" in done.stderr
    assert runs(client) == []


def test_a_layout_that_vanishes_while_it_is_loaded_is_told_in_one_sentence(
    tmp_path: Path,
) -> None:
    # the first layer is more than a pipe holds, so the second is opened after the client reads
    image = layout(tmp_path, bytes(1 << 20), b"second")
    blobs = tmp_path / "images/runtime-py311/oci/blobs/sha256"
    second = blobs / hashlib.sha256(b"second").hexdigest()
    digest = str(image["config_digest"])
    client = fake_engine(
        tmp_path,
        tmp_path / "client",
        holds={},
        loads={digest: digest},
        lose=str(second),
        report=health(),
    )
    done = forge("smoke.health", *PLAIN, out=tmp_path)
    assert done.returncode == 2
    assert "was lost while it was read" in done.stderr
    assert second.name in done.stderr
    assert "Traceback" not in done.stderr
    # what the engine took is not to be believed
    assert any(words[0] == "rmi" for words in calls(client))
    assert runs(client) == []


def test_a_layout_that_lost_a_blob_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", holds={}, report=health())
    done = forge("smoke.health", *PLAIN, out=tmp_path)
    assert done.returncode == 1
    assert "is not the OCI layout of" in done.stderr
    assert runs(client) == []


def test_no_image(tmp_path: Path) -> None:
    for module in ("smoke.health", "smoke.bench"):
        done = forge(module, out=tmp_path)
        assert done.returncode == 2
        assert "the image runtime-py311 was not baked" in done.stderr
        assert "mend:     ./forge bake" in done.stderr


def test_a_mistyped_image_is_told_which_ones_there_are(tmp_path: Path) -> None:
    fill(tmp_path)
    done = forge("smoke.health", "--image", "nope", out=tmp_path)
    assert done.returncode == 2
    assert "the image nope-py311 was not baked" in done.stderr
    assert "expected: one of the baked images: runtime-py311" in done.stderr


@pytest.mark.parametrize(
    "change", [{"schema": "x"}, {"name": 7}, {"config_digest": None}, {"flavour": []}]
)
def test_an_image_record_of_odd_types(tmp_path: Path, change: dict[str, object]) -> None:
    fill(tmp_path)
    path = tmp_path / "images/runtime-py311/image.json"
    support.write(path, {**support.IMAGE, **change})
    for module in ("smoke.health", "smoke.bench"):
        done = forge(module, out=tmp_path)
        assert done.returncode == 2
        assert f"image.json is damaged: {next(iter(change))}" in done.stderr


@pytest.mark.parametrize(
    "change", [{"env": [1]}, {"schema": "x"}, {"docker": 7}, {"init": "no"}, None]
)
def test_an_engine_record_of_odd_types_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object] | None
) -> None:
    record = {"schema": "tpuforge.engine/1", "docker": "/x/docker", "env": {"A": "b"}}
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path))
    path = tmp_path / "engine/engine.json"
    support.write(path, record)
    assert container._recorded() == container.Engine("/x/docker", {"A": "b"})
    support.write(path, [record] if change is None else {**record, **change})
    assert container._recorded() is None


@pytest.mark.parametrize(
    ("code", "message", "exit_code"),
    [
        (124, "was not done after 1200 s and was ended", 2),
        (125, "the engine could not run the container", 2),
        (127, "the image has no command health", 1),
        (137, "most likely for want of memory", 2),
        (0, "left no report of that", 2),
    ],
)
def test_a_container_that_did_not_do_its_work(
    tmp_path: Path, code: int, message: str, exit_code: int
) -> None:
    fill(tmp_path)
    fake_engine(tmp_path, tmp_path / "client", code=code)
    done = forge("smoke.health", *PLAIN, out=tmp_path)
    assert done.returncode == exit_code
    assert message in done.stderr
    assert "some output" in done.stderr
    assert not (tmp_path / "health/runtime-py311").exists()


def test_a_report_that_contradicts_the_exit_code_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    fake_engine(tmp_path, tmp_path / "client", report=health(), code=1)
    done = forge("smoke.health", *PLAIN, out=tmp_path)
    assert done.returncode == 2
    assert "it says exit code 0" in done.stderr


@pytest.mark.parametrize(
    "damage",
    [{"tiers": {}}, {"checks": [{}]}, {"exit_code": 7}, {"schema": "tpuforge.health/9"}],
)
def test_a_report_of_another_shape_is_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    fill(tmp_path)
    report = {**health(), **damage}
    fake_engine(tmp_path, tmp_path / "client", report=report, code=report["exit_code"])
    done = forge("smoke.health", *PLAIN, out=tmp_path)
    assert done.returncode == 2
    assert "left no report of that" in done.stderr
    assert not (tmp_path / "health/runtime-py311").exists()


@pytest.mark.parametrize("tiers", ["static,nonsense", ","])
def test_tiers_that_do_not_exist(tmp_path: Path, tiers: str) -> None:
    fill(tmp_path)
    done = forge("smoke.health", "--tier", tiers, out=tmp_path)
    assert done.returncode == 2
    assert "tier" in done.stderr


def test_without_a_simulator_the_rest_is_judged_and_the_run_is_repeated(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health("unjudged", 2), code=2)
    for _ in range(2):
        done = forge("smoke.health", out=tmp_path)
        assert done.returncode == 2
        assert "the simulator could not be made: xla-cpu-pjrt" in done.stderr
        assert "./forge fetch_wheel" in done.stderr
    assert len(runs(client)) == 2
    words = runs(client)[0]
    assert words[words.index("--tier") + 1] == "static,import,compile,simulate,device"
    result = json.loads((tmp_path / "results/smoke-runtime-py311.json").read_text())
    assert result["notes"][0].startswith("the simulator could not be made")


def test_a_run_that_is_told_to_stop_removes_its_container(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health(), until="never")
    running = subprocess.Popen(
        [sys.executable, "-m", "tpuforge.smoke.health", *PLAIN],
        env=support.verb_env(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for((client / "running").exists)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=30) == 130
    finally:
        running.kill()
    (words,) = runs(client)
    name = words[words.index("--name") + 1]
    assert ["rm", "--force", name] in calls(client)
    assert list((tmp_path / "health").glob(".run-*")) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((client / "running").read_text()), 0)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_of_two_at_once_the_second_says_for_whom_it_waits_and_has_nothing_to_do(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health(), until="go")
    words = (*PLAIN, *options)
    both: list[subprocess.Popen[str]] = []
    told = [tmp_path / "first", tmp_path / "second"]
    try:
        for path in told:
            with path.open("w") as file:
                one = subprocess.Popen(
                    [sys.executable, "-m", "tpuforge.smoke.health", *words],
                    env=support.verb_env(tmp_path),
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                )
            both.append(one)
            wait_for((client / "running").exists)
        wait_for(lambda: "waiting" in told[1].read_text())
        (client / "go").touch()
        said = [one.communicate(timeout=60)[0] for one in both]
    finally:
        for one in both:
            one.kill()
    assert [one.returncode for one in both] == [0, 0]
    assert len(runs(client)) == 1
    assert "waiting" not in told[0].read_text()
    whom = f"waiting for process {both[0].pid} (smoke {' '.join(words)})"
    assert whom in told[1].read_text()
    if options:
        assert [json.loads(text)["status"] for text in said] == ["done", "unchanged"]
    else:
        assert ["nothing to do" in text for text in said] == [False, True]


def test_what_is_kept_waits_for_nobody_and_what_is_not_says_for_whom(tmp_path: Path) -> None:
    fill(tmp_path)
    fake_engine(tmp_path, tmp_path / "client", report=health())
    assert forge("smoke.health", *PLAIN, out=tmp_path).returncode == 0
    with (tmp_path / ".locks/smoke").open("r+", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.truncate()
        held.write(f"process {os.getpid()}")
        held.flush()
        done = forge("smoke.health", *PLAIN, out=tmp_path)
        assert "smoke: nothing to do" in done.stdout
        assert "waiting" not in done.stderr
        waits = subprocess.Popen(
            [sys.executable, "-m", "tpuforge.smoke.health", *PLAIN, "--again"],
            env=support.verb_env(tmp_path),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert waits.stderr is not None
            said = [waits.stderr.readline(), waits.stderr.readline()]
            time.sleep(2.5)
            assert waits.poll() is None
            fcntl.flock(held, fcntl.LOCK_UN)
            said += waits.communicate(timeout=60)[1].splitlines()
        finally:
            waits.kill()
    assert waits.returncode == 0
    whom = f"waiting for process {os.getpid()}"
    assert said[0].startswith(f"smoke: {whom}, and only one at a time")
    assert said[1] == f"smoke: {whom} …\n"
    assert re.fullmatch(rf"smoke: {whom}: \d\.\d s", said[2])


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    fill(tmp_path)
    old = tmp_path / "health/.run-old/results"
    old.mkdir(parents=True)
    client = fake_engine(tmp_path, tmp_path / "client", report=health(), left=["c0ffee"])
    assert forge("smoke.health", *PLAIN, out=tmp_path).returncode == 0
    assert ["rm", "--force", "c0ffee"] in calls(client)
    assert not old.exists()


def test_an_image_by_reference_gets_its_own_folder(tmp_path: Path) -> None:
    other = "sha256:" + "77" * 32
    client = fake_engine(
        tmp_path, tmp_path / "client", holds={"some/image:1": other, other: other}, report=health()
    )
    done = forge("smoke.health", *PLAIN, "--image-ref", "some/image:1", out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert other in runs(client)[0]
    assert (tmp_path / "health/ref-777777777777/health.json").is_file()
    done = forge("smoke.health", *PLAIN, "--image-ref", "none", out=tmp_path)
    assert done.returncode == 2
    assert "the engine holds no image none" in done.stderr


def test_the_users_docker_settings_change_nothing(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", report=health())
    done = forge("smoke.health", *PLAIN, out=tmp_path, DOCKER_HOST="tcp://poison:1")
    assert done.returncode == 0
    assert set(calls(client, "host")) == {"unix:///nowhere.sock"}


def test_the_config_digest_will_do(tmp_path: Path) -> None:
    fill(tmp_path)
    client = fake_engine(tmp_path, tmp_path / "client", holds={CONFIG: CONFIG}, report=health())
    assert forge("smoke.health", *PLAIN, out=tmp_path).returncode == 0
    assert CONFIG in runs(client)[0]
