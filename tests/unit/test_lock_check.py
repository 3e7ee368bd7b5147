"""What ``lock_check`` and ``lock`` say, and with which exit code, about bad files.

No package index is asked: pip is told to use none, which also shows what is judged without one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lock_support import ROOT, Checkout, checkout
from tpuforge.lockfile import read_lock

OFFLINE = {"PIP_NO_INDEX": "1"}
Edit = Callable[[str], str]
_EXCEPTION = """[[allowed]]
name = "triton"
flavour = "runtime"
until = 2999-01-01
why = "tried"
"""
_LEFT_OUT = '[[left_out]]\nname = "triton"\nflavour = "serve"'


@pytest.fixture
def own(tmp_path: Path) -> Checkout:
    return checkout(tmp_path, small=False)


def _without_first_hash(text: str) -> str:
    first = text.index(" \\\n    --hash")
    return text[:first] + text[text.index("\n", first + 3) :]


def test_sound_locks_without_an_index_are_not_called_fresh(own: Checkout) -> None:
    done = own.run("check", **OFFLINE)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "freshness not judged: pip is configured to use no index" in done.stdout
    assert "complete, clean and in step with the pins" in done.stdout


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        (
            [
                ("runtime-py311.txt", lambda t: t + "nvidia-nccl==1 --hash=sha256:" + "a" * 64),
                ("runtime-py311.txt", lambda t: t.replace("+cpu", "")),
                ("runtime-py311.txt", lambda t: t.replace("libtpu==0.0.52", "libtpu==0.0.51")),
                ("runtime-py311.txt", lambda t: t.replace(":6746dbcb", ":6746dbcc")),
                ("tools-py313.txt", lambda t: t.replace("nox==", "nix==")),
                ("train-py312.txt", lambda t: t.replace("numpy==", "numpy==1!")),
                ("dev-py312.txt", lambda t: t.replace("pytest==9", "pytest==8")),
                ("runtime-py313.json", lambda t: t.replace('"torch-tpu",', '"tpu-torch",')),
                ("runtime-py314.json", lambda t: t.replace("main index", "PyTorch index")),
                ("names.toml", lambda t: t + _EXCEPTION),
                ("names.toml", lambda t: t.replace("[refused]\n", '[refused]\npip = "tried"\n')),
                ("names.toml", lambda t: t.replace("until = 2027", "until = 2020")),
                ("train-py314.json", lambda t: t.replace("provenance/1", "provenance/0")),
                ("serve-py312.txt", lambda t: t + "triton==3.9.0 --hash=sha256:" + "a" * 64),
                ("serve-py312.json", lambda t: t.replace('"reason": "xgrammar', '"reason": "new')),
            ],
            [
                "lock/runtime-py311.txt: [edited] its content is not what",
                "lock/runtime-py311.txt: nvidia-nccl: [cuda] 1 may not be there: it is a",
                "lock/runtime-py311.txt: torch: [cuda] 2.13.0 without +cpu is a CUDA build",
                "lock/runtime-py311.txt: libtpu: [pins] 0.0.51 is locked, the pins say 0.0.52",
                "lock/runtime-py311.txt: torch: [table] its digest is not the one of",
                "lock/runtime-py311.json: nvidia-nccl: [why] nothing says why it is in the lock",
                "lock/runtime-py311.json: libtpu: [why] it is about 0.0.52",
                "lock/tools-py313.txt: [edited] its content is not what",
                "lock/train-py312.txt: numpy: [layer]",
                "lock/dev-py312.txt: [edited]",
                "lock/runtime-py313.json: absl-py: [why] the chain tpu-torch > absl-py does not",
                "lock/runtime-py314.json: libtpu: [why] it comes from the PyTorch index",
                "lock/train-py314.json: [why] it is not of the form: schema is",
                "lock/names.toml: triton: [name] runtime has none of it",
                "lock/names.toml: triton: [name] left out of serve: its exception ended on 2020",
                "lock/tools-py314.txt: pip: [name]",
                "lock/serve-py312.txt: triton: [cuda] 3.9.0 may not be there: it is a CUDA package",
                "lock/serve-py312.json: triton: [why] it is left out of vllm-torchtpu > xgrammar",
            ],
        ),
        (
            [
                ("runtime-py311.txt", _without_first_hash),
                ("smoke.in", lambda t: t + "rich\n"),
                ("torch-cpu.sha256", lambda t: t.replace("cp314-cp314", "cp315-cp315")),
                ("torchvision-cpu.metadata", lambda t: t.replace("Dist: numpy", "Dist: rich")),
                ("serve-py312.txt", lambda t: t.replace("0.28.0+cpu", "0.28.0")),
                ("serve-py312.txt", lambda t: t.replace(":b545d46f", ":b545d46e")),
                ("serve-py312.json", lambda t: t.replace('"PyTorch index"', '"main index"')),
            ],
            [
                "lock/runtime-py311.txt: [format] line 4: absl-py has no hash",
                "lock/smoke-py311.txt: [stale] lock/smoke.in, the pins or",
                "lock/torch-cpu.sha256: torch: [table] torch-cpu.sha256 has no digest of torch",
                "lock/serve-py312.txt: [stale]",
                "lock/serve-py312.txt: torchvision: [cuda] 0.28.0 without +cpu is a CUDA build",
                "lock/serve-py312.txt: torchvision: [pins] 0.28.0 is locked, the pins say 0.28.0+",
                "lock/serve-py312.txt: torchvision: [table] its digest is not the one of lock/",
                "lock/serve-py312.json: torchvision: [why] it comes from the main index; from the",
            ],
        ),
        (
            [
                ("runtime.in", lambda t: t.replace("torch\n", "torch==2.13.0\n")),
                # a lock that lock/conflicts.toml names, and that is none
                ("runtime-py312.txt", _without_first_hash),
            ],
            ["lock/runtime.in: [input] line 5: 'torch==2.13.0' states a version; an index's"],
        ),
        (
            [
                ("pins.toml", lambda t: t.replace('version = "0.0.52"', 'version = "0.0.51"')),
                # a rule for another flavour, and none for the lock that leaves it out
                ("names.toml", lambda t: t.replace(_LEFT_OUT, _LEFT_OUT.replace("serve", "train"))),
            ],
            [
                "lock/runtime-py311.txt: [stale] lock/runtime.in, the pins or",
                "lock/runtime-py311.txt: libtpu: [pins] 0.0.52 is locked, the pins say 0.0.51",
                "lock/train-py312.txt: [stale]",
                "lock/serve-py312.txt: [stale]",
                "lock/serve-py312.json: triton: [why] it is left out, and lock/names.toml does not",
            ],
        ),
        (
            [
                ("torch-cpu.metadata", lambda t: t.replace("Dist: jinja2", "Dist: rich")),
                ("torch-cpu.sha256", lambda t: t.replace("torchvision-0.28.0", "torchvision-0.27")),
                ("names.toml", lambda t: t.replace('by = "xgrammar"', 'by = "numba"')),
            ],
            [
                "lock/runtime-py311.txt: [stale] lock/runtime.in, the pins or the table of torch",
                "lock/torch-cpu.sha256: torchvision: [table] torch-cpu.sha256 has no digest of",
                "lock/serve-py312.txt: [stale]",
                "lock/serve-py312.json: triton: [why] it is left out of vllm-torchtpu > xgrammar",
            ],
        ),
    ],
)
def test_each_fault_is_one_line_with_its_mending(
    own: Checkout, edits: list[tuple[str, Edit]], expected: list[str]
) -> None:
    for file, edit in edits:
        path = own.lock / file
        before = path.read_text(encoding="utf-8")
        after = edit(before)
        assert after != before
        path.write_text(after, encoding="utf-8")
    done = own.run("check", **OFFLINE)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "; mend: " in line]
    for words in expected:
        assert [line for line in lines if line.startswith(words)], done.stdout
    result = json.loads((own.root / "out/results/lock_check.json").read_text(encoding="utf-8"))
    assert len(result["data"]["faults"]) == len(lines)
    assert result["exit_code"] == 1


def test_lock_without_an_input_is_a_fault(own: Checkout) -> None:
    (own.lock / "smoke.in").unlink()
    done = own.run("check", **OFFLINE)
    assert done.returncode == 1
    assert "lock/smoke-py311.txt: [input] no .in file has its name, or" in done.stdout
    assert "mend: rm lock/smoke-py311.txt" in done.stdout


def test_flavours_of_one_python_agree(own: Checkout) -> None:
    # a lock that is sound in itself: the head is the right one for what it holds
    from tpuforge.lock.inputs import read_head, render

    path = own.lock / "smoke-py311.txt"
    found = [
        replace(package, version="8.0") if package.name == "pytest" else package
        for package in read_lock(path)
    ]
    key = read_head(path.read_text(encoding="utf-8")).inputs
    path.write_text(render(found, key, "3.11"), encoding="utf-8")
    why = path.with_suffix(".json")
    number = next(p.version for p in read_lock(ROOT / "lock" / path.name) if p.name == "pytest")
    why.write_text(why.read_text(encoding="utf-8").replace(number, "8.0"), encoding="utf-8")
    done = own.run("check", **OFFLINE)
    assert done.returncode == 1
    assert "lock/smoke-py311.txt: pytest: [consistent] 8.0, and lock/dev-py311.txt" in done.stdout


def test_unknown_flavour_python_and_lock_are_usage(own: Checkout) -> None:
    (own.lock / "runtime-py313.txt").unlink()
    cases = {
        ("--flavour", "ghost"): "there is no flavour 'ghost'",
        ("--flavour", "ghost", "--python", "all"): "there is no flavour 'ghost'",
        ("--python", "3.9"): "Python 3.9 is not supported",
        ("--python", "3.13"): "runtime-py313.txt: there is no such lock",
    }
    for (code, _, errors), words in zip(
        own.run_each("check", *cases, **OFFLINE), cases.values(), strict=True
    ):
        assert code == 2
        assert words in errors
        assert "mend:" in errors


def test_lock_reads_its_inputs_before_it_asks_an_index(own: Checkout) -> None:
    (own.lock / "runtime.in").write_text("libtpu\ntriton\n", encoding="utf-8")
    bad, unknown = own.run_each("resolve", (), ("--flavour", "ghost"), **OFFLINE)
    assert bad[0] == 1, bad
    assert "runtime.in, line 2: triton is a CUDA package" in bad[2]
    assert unknown[0] == 2


UPGRADES = {
    ("--upgrade", "nunpy"): "no lock holds nunpy; did you mean numpy",
    ("--upgrade", "torch_tpu"): "the version of torch-tpu stands in the pins",
    ("--upgrade", "numpy,torch"): "edit torch.version in lock/pins.toml",
    ("--upgrade", "numpy", "--upgrade", "2026-01-01"): "cutoff of numpy 2026-11-30",
    ("--upgrade", "2026-01-02,2026-01-01"): "are two days",
    ("--upgrade", "2026-13-01"): "'2026-13-01' is no day",
    ("--upgrade", "numpy", "--python", "3.11"): "an upgrade is of every lock",
    ("--upgrade", "2999-01-01"): "2999-01-01 has not begun",
    ("--upgrade", ""): "a package or a day to upgrade is empty",
    ("--upgrade", " , "): "a package or a day to upgrade is empty",
    ("--upgrade", "numpy", "--upgrade", ""): "a package or a day to upgrade is empty",
    ("--upgrade", "\u0662\u0660\u0662\u0666-\u0660\u0661-\u0660\u0661"): "no lock holds",
    ("--upgrade", "2026-01-01"): "is not before 2026-01-01T00:00:00Z",
}


def test_upgrade_to_an_impossible_day_is_usage(own: Checkout) -> None:
    before = (own.lock / "pins.toml").read_bytes()
    for (code, _, errors), words in zip(
        own.run_each("resolve", *UPGRADES, **OFFLINE), UPGRADES.values(), strict=True
    ):
        assert code == 2
        assert words in errors
    assert (own.lock / "pins.toml").read_bytes() == before


def test_lock_without_an_index_says_so(own: Checkout) -> None:
    done = own.run("resolve", **OFFLINE)
    assert done.returncode == 2
    assert "no-index" in done.stderr


def test_torch_metadata_is_compared_with_the_real_wheel(own: Checkout) -> None:
    from tpuforge.lock import inputs
    from tpuforge.pins import load

    pins = load()
    torch = inputs.cpu_wheel(pins, "torch", "3.11")
    held = own.root / "out" / "wheelhouse" / torch.sha256
    inputs.write_standin(torch, held)
    assert own.run("check", **OFFLINE).returncode == 2
    other = replace(torch, metadata=torch.metadata + "Requires-Dist: alpha\n")
    inputs.write_standin(other, held)
    done = own.run("check", **OFFLINE)
    assert done.returncode == 1
    assert "Requires-Dist is not what torch-2.13.0+cpu-cp311" in done.stdout
