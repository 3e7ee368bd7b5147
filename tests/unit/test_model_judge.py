"""What is made of the compilers' answers on a user's model, and how bad input is met."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from smoke import model

from process_support import call
from smoke_host_support import DIGEST, calls, fake_engine, fill, forge
from tpuforge.paths import sha256_file
from tpuforge.smoke import simulator

CLI = Path(__file__).resolve().parents[2] / "smoke" / "cli.py"
GIB = 2**30


def program(**more: Any) -> dict[str, Any]:
    """What libtpu says of a program of 2 GiB on a chip of 16 GiB."""
    return {
        "stage": "done",
        "chip": "TPU v5 lite",
        "memory_of_chip_bytes": 16 * GIB,
        "peak_device_bytes": 2 * GIB,
        "argument_bytes": GIB,
        "code_bytes": 1000,
        "flops": 500.0,
        "compile_seconds": 1.5,
        **more,
    }


def lowered(**more: Any) -> dict[str, Any]:
    """A module of 1 GiB that was lowered to one program."""
    return {
        "stopped": None,
        "unsupported": [],
        "parameter_bytes": GIB,
        "buffer_bytes": 0,
        "input_bytes": 0,
        "programs": [{"kind": "forward"}],
        **more,
    }


def test_two_programs_that_fit() -> None:
    answers = {"v5e:2x2": [program(), program(peak_device_bytes=3 * GIB)]}
    targets, code, wrong = model.judge(lowered(), answers)
    assert (code, wrong) == (model.FITS, [])
    assert targets["v5e:2x2"] == {
        "verdict": "fits",
        "chip": "TPU v5 lite",
        "usable_hbm_bytes": 16 * GIB,
        "needed_hbm_bytes": 3 * GIB,
        "code_bytes": 2000,
        "flops": 1000.0,
        "compile_seconds": 3.0,
        "errors": [],
    }


def test_weights_that_a_program_does_not_take_stay_in_memory_beside_it() -> None:
    held = lowered(parameter_bytes=16 * GIB)
    targets, code, wrong = model.judge(held, {"v5e:2x2": [program()]})
    assert code == model.DOES_NOT
    assert targets["v5e:2x2"]["verdict"] == "does not fit"
    assert wrong == ["v5e:2x2: does not fit: needs 17.00 GiB of 16.00 GiB"]


def test_a_refusal_for_want_of_memory_is_no_figure() -> None:
    refused = program(stage="compile", kind="ResourceExhausted", error="needs 48G, has 16G")
    targets, code, wrong = model.judge(lowered(), {"v5e:2x2": [program(), refused]})
    assert code == model.DOES_NOT
    assert wrong == ["v5e:2x2: does not fit: needs 48G, has 16G"]
    found = targets["v5e:2x2"]
    assert (found["needed_hbm_bytes"], found["code_bytes"], found["flops"]) == (None, None, None)


def test_one_target_of_two_is_not_enough() -> None:
    refused = program(stage="compile", kind="Internal", error="no such kernel")
    answers = {"v6e:2x2": [program()], "v5e:2x2": [refused]}
    targets, code, wrong = model.judge(lowered(), answers)
    assert [one["verdict"] for one in targets.values()] == ["fits", "refused"]
    assert (code, wrong) == (model.DOES_NOT, ["v5e:2x2: refused: no such kernel"])


def test_a_compiler_that_was_killed_or_a_target_it_does_not_know_is_no_judgement() -> None:
    killed = {"stage": "process", "kind": "killed", "error": "killed from outside"}
    unknown = {"stage": "topology", "kind": "InvalidArgument", "error": "no such topology"}
    for answer in (killed, unknown):
        targets, code, wrong = model.judge(lowered(), {"v9:2x2": [answer]})
        assert code == model.UNJUDGED
        assert targets["v9:2x2"]["verdict"] == "unjudged"
        assert wrong == [f"v9:2x2: {answer['error']}"]


def test_operations_that_libtpu_does_not_count_are_not_told() -> None:
    targets, code, _ = model.judge(lowered(), {"v5e:2x2": [program(), program(flops=-3.0)]})
    assert code == model.FITS
    assert targets["v5e:2x2"]["flops"] is None


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("operator", model.DOES_NOT),
        ("refused", model.DOES_NOT),
        ("data", model.UNJUDGED),
        ("input", model.UNJUDGED),
        ("timeout", model.UNJUDGED),
        ("memory", model.UNJUDGED),
        ("model", model.UNJUDGED),
    ],
)
def test_what_stopped_the_lowering_decides(kind: str, code: int) -> None:
    stopped = lowered(stopped={"kind": kind, "error": "so it was"})
    targets, found, wrong = model.judge(stopped, {"v5e:2x2": [program()]})
    assert found == code
    assert wrong[0].endswith(": so it was")
    # what was lowered before compiles; that says nothing of the rest
    assert targets["v5e:2x2"]["verdict"] == "unjudged"


def test_an_operator_without_a_kernel_is_bad_even_if_it_was_never_reached() -> None:
    found = lowered(unsupported=["aten::eig"], stopped={"kind": "data", "error": "nonzero"})
    _, code, wrong = model.judge(found, {})
    assert code == model.DOES_NOT
    assert wrong[0] == "no kernel for aten::eig on a TPU"


def test_a_model_that_never_reaches_the_tpu_is_not_judged() -> None:
    _, code, wrong = model.judge(lowered(programs=[]), {"v5e:2x2": []})
    assert code == model.UNJUDGED
    assert "none of its tensors is on device tpu" in wrong[0]


def test_the_table_shows_what_was_refused() -> None:
    refused = program(stage="compile", kind="ResourceExhausted", error="needs 48G, has 16G")
    targets, code, wrong = model.judge(lowered(), {"v5e:2x2": [refused]})
    result = {
        "source": "net.py:huge",
        "model": {"training": False, "parameters": 7, "parameter_bytes": GIB, "buffer_bytes": 0}
        | {"input_bytes": 0},
        "graphs": {"graphs": 1, "breaks": 0, "reasons": [], "why": None},
        "programs": [{"kind": "forward", "operators": 3, "refused": None}],
        "unsupported_operators": [],
        "targets": targets,
        "notes": ["so it is"],
        "findings": wrong,
        "exit_code": code,
        "seconds": 1.0,
    }
    shown = io.StringIO()
    model.print_table(result, shown)
    text = shown.getvalue()
    assert "does not fit" in text
    assert "needs 48G, has 16G" in text
    assert "note: so it is" in text


def health_model(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return call(
        [sys.executable, CLI, "health", "model", *words],
        timeout=60,
        env={"PATH": "/usr/bin:/bin", **env},
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give FILE.py:FUNCTION, or --config"),
        (("a.py:f", "--config", "c.json"), "not both"),
        (("a.py",), "is not FILE.py:FUNCTION"),
        (("a.py:1f",), "is not FILE.py:FUNCTION"),
        (("nowhere.py:f",), "there is no file nowhere.py"),
        ((f"{__file__}:build",), "no simulator is mounted: ./forge model"),
    ],
)
def test_the_suite_meets_bad_words_with_2(words: tuple[str, ...], said: str) -> None:
    done = health_model(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name either FILE.py:FUNCTION or --config"),
        (("net.py",), "names no function"),
        (("nowhere.py:build",), "there is no file nowhere.py"),
        (("--config", "nowhere.json"), "there is no file nowhere.json"),
    ],
)
def test_the_verb_meets_bad_words_with_2(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = forge("smoke.model", *words, out=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


RESULT: dict[str, Any] = {
    "schema": "tpuforge.model/1",
    "verdict": "does not",
    "exit_code": 1,
    "findings": ["v5e:2x2: does not fit: needs 17.00 GiB of 16.00 GiB"],
    "notes": [],
    "programs": [{"kind": "forward"}],
    "graphs": {"breaks": 0, "reasons": []},
    "model": {"training": False, "parameters": 7, "parameter_bytes": GIB},
    "targets": {
        "v5e:2x2": {
            "verdict": "does not fit",
            "needed_hbm_bytes": 17 * GIB,
            "usable_hbm_bytes": 16 * GIB,
            "code_bytes": 1000,
            "flops": None,
            "compile_seconds": 1.0,
        }
    },
}


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An out folder with an image and a simulator, and a file of a user's."""
    out = tmp_path / "out"
    fill(out)
    monkeypatch.setenv("TPUFORGE_OUT", str(out))
    folder = out / "simulator" / simulator.key()
    for tree in ("pci", *(f"generations/{name}" for name in simulator.GENERATIONS)):
        chip = folder / tree / "0000:00:05.0"
        chip.mkdir(parents=True)
        (chip / "iommu_group").symlink_to("../../../../kernel/iommu_groups/7")
    files = {}
    for name in ("wrapper.so", "plugin.so", "bus.so"):
        (folder / name).write_bytes(b"")
        files[name] = sha256_file(folder / name)
    record = {"key": simulator.key(), "plugin": {"wheel": "w"}, "files": files}
    (folder / "simulator.json").write_text(json.dumps(record))
    (tmp_path / "net.py").write_text("def build():\n    pass\n")
    return tmp_path


def test_the_verb_mounts_the_folder_read_only_and_hands_the_verdict_on(ready: Path) -> None:
    out, client = ready / "out", ready / "docker"
    fake_engine(out, client, report=RESULT, code=1)
    done = forge("smoke.model", f"{ready / 'net.py'}:build", "--target", "v5e:2x2", out=out)
    assert done.returncode == 1, done.stderr
    assert "needs 17.00 GiB of 16.00 GiB" in done.stdout
    (run,) = [words for words in calls(client) if words[0] == "run"]
    mount = next(word for word in run if "target=/model" in word)
    assert mount == f"type=bind,source={ready},target=/model,readonly"
    assert run[run.index(DIGEST) + 4 :][:4] == ["health", "model", "/model/net.py:build", "--mode"]
    kept = json.loads((out / "model/runtime-py311/model.json").read_text())
    assert kept == RESULT


@pytest.mark.parametrize("report", [None, RESULT | {"exit_code": 0}, {"schema": "other"}])
def test_no_result_is_no_verdict(ready: Path, report: Any) -> None:
    out = ready / "out"
    fake_engine(out, ready / "docker", report=report, code=1)
    done = forge("smoke.model", f"{ready / 'net.py'}:build", out=out)
    assert done.returncode == 2
    assert "left no result" in done.stderr
    assert not (out / "model/runtime-py311/model.json").exists()
