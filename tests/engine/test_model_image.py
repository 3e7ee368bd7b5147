"""Models of all kinds in the real image: those that fit, and those that cannot be judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bake_support import ROOT, Image, result

NETS = """
import time

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, size=128):
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x):
        y = self.first(x).view(*x.shape[:2], 2, 64).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)
        return x + self.second(y.transpose(1, 2).flatten(2))


def trained():
    return Block().to(torch.bfloat16), torch.randn(2, 128, 128, dtype=torch.bfloat16)


def step():
    model, x = Block().to("tpu"), torch.randn(2, 128, 128, device="tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()

    return train


def huge():
    layers = [nn.Linear(32768, 32768) for _ in range(12)]
    return nn.Sequential(*layers).eval(), torch.randn(1, 32768)


class Eig(nn.Module):
    def forward(self, x):
        return torch.linalg.eigh(x @ x.mT).eigenvalues


def unsupported():
    return Eig(), torch.randn(8, 8)


class Select(nn.Module):
    def forward(self, x):
        return (x * 2)[x > 0].sum()


def selects():
    return Select().eval(), torch.randn(64)


def endless():
    time.sleep(3600)


def greedy():
    return nn.Linear(2, 2), torch.frombuffer(bytearray(20 << 30), dtype=torch.int8)


def raises():
    raise ValueError("no such layer")


def number():
    return 42
"""
CASES = {
    "trained": 0,
    "step": 0,
    "huge": 1,
    "unsupported": 1,
    "selects": 2,
    "endless": 2,
    "greedy": 2,
}
BAD = ("raises", "number", "nothing")
LOWERED = """
import json, sys
sys.path.insert(0, "/opt/tpuforge")
from smoke import model
for name in sys.argv[1:]:
    source = {"file": "/model/nets.py", "function": name, "mode": "auto", "memory_bytes": 4 << 30}
    lowered = model.lower(source, "/tmp")
    _, code, findings = model.judge(lowered, {})
    print(json.dumps([name, code, findings]))
"""
"""What needs no compiler, in one process: what :func:`smoke.model.lower` is stopped by."""


def mount(source: Path, target: str) -> tuple[str, str]:
    """A read-only mount."""
    return ("--mount", f"type=bind,source={source},target={target},readonly")


@pytest.fixture(scope="module")
def options(image: Image, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The options of a hardened container with a simulated chip and the models."""
    assert image.record
    folder = Path(result("tpuforge.smoke.simulator")["folder"])
    nets = tmp_path_factory.mktemp("nets")
    nets.chmod(0o755)
    (nets / "nets.py").write_text(NETS)
    return (
        *("--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--memory=6g"),
        *mount(folder, "/opt/simulator"),
        *mount(folder / "pci", "/sys/bus/pci/devices"),
        *mount(folder / "vfio", "/dev/vfio/7"),
        *mount(nets, "/model"),
        "--env=TPU_LIBRARY_PATH=/opt/simulator/wrapper.so",
        "--env=TPUFORGE_SIMULATOR=/opt/simulator",
    )


@pytest.fixture(scope="module")
def found(image: Image, options: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The result of every case; all are run at once, each in its own container."""

    def run(name: str) -> dict[str, Any]:
        limit = ("--limit", "20" if name == "endless" else "300")
        words = ("health", "model", f"/model/nets.py:{name}", "--target", "v6e:2x2", *limit)
        done = image.run(*words, "--json", "-", options=options, timeout=600)
        assert done.stdout.startswith("{"), done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        assert document["exit_code"] == done.returncode
        return document

    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


def test_every_case_ends_with_its_own_exit_code(found: dict[str, dict[str, Any]]) -> None:
    assert {name: one["exit_code"] for name, one in found.items()} == CASES


def test_a_module_that_is_trained(found: dict[str, dict[str, Any]]) -> None:
    one = found["trained"]
    assert one["model"]["training"] is True
    assert one["model"]["parameters"] == 2 * (128 * 128 + 128)
    assert one["model"]["parameter_bytes"] == 2 * one["model"]["parameters"]
    assert [program["kind"] for program in one["programs"]] == ["forward", "backward"]
    assert (one["graphs"]["graphs"], one["graphs"]["breaks"]) == (1, 0)
    # torch_tpu's own attention, which no CPU runs
    assert any("attention" in name and "backward" in name for name in one["operators"])
    target = one["targets"]["v6e:2x2"]
    assert target["verdict"] == "fits"
    assert 0 < target["needed_hbm_bytes"] < target["usable_hbm_bytes"]
    assert target["code_bytes"] > 0
    assert target["flops"] > 0


def test_a_whole_training_step(found: dict[str, dict[str, Any]]) -> None:
    one = found["step"]
    # the model's gradients, and the optimizer
    assert len(one["programs"]) >= 2
    assert any(name.endswith("_attention_backward") for name in one["operators"])
    assert one["graphs"]["breaks"] > 0
    # PyTorch's tables know no kernel for some of what was lowered all the same
    assert one["unsupported_operators"] == []


def test_too_large_for_the_chip(found: dict[str, dict[str, Any]]) -> None:
    one = found["huge"]
    assert one["model"]["parameters"] > 12e9
    assert one["model"]["built"] == "without weights"
    assert one["peak_memory_bytes"] < 2e9
    assert one["targets"]["v6e:2x2"]["verdict"] == "does not fit"
    assert "exceeds available HBM" in one["findings"][0]


def test_an_operator_that_no_tpu_has(found: dict[str, dict[str, Any]]) -> None:
    one = found["unsupported"]
    assert one["unsupported_operators"] == ["aten::_linalg_eigh"]
    assert one["stopped"]["kind"] == "operator"
    assert "_linalg_eigh" in one["findings"][-1]


def test_what_cannot_be_judged_says_why(found: dict[str, dict[str, Any]]) -> None:
    told = {name: " ".join(found[name]["findings"]) for name, code in CASES.items() if code == 2}
    assert "aten.nonzero" in told["selects"]
    assert "values of tensors" in told["selects"]
    assert "not done after 20 s" in told["endless"]
    assert "building the model (endless)" in told["endless"]
    assert "MemoryError" in told["greedy"]
    assert found["selects"]["targets"]["v6e:2x2"]["verdict"] == "unjudged"


def test_what_is_no_model_says_what_it_is(image: Image, options: tuple[str, ...]) -> None:
    done = image.run("python", "-c", LOWERED, *BAD, options=options)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [(name, code) for name, code, _ in said] == [(name, 2) for name in BAD], done.stderr
    told = {name: " ".join(findings) for name, _, findings in said}
    assert "raises raised ValueError: no such layer (nets.py, line" in told["raises"]
    assert "it returned int; it must return (module, example inputs)" in told["number"]
    assert "nets.py has no function nothing; it has" in told["nothing"]


def test_a_configuration_needs_transformers(image: Image) -> None:
    options = ("--network=none", "--env=TPUFORGE_SIMULATOR=/opt/simulator")
    done = image.run("health", "model", "--config", "c.json", "--json", "-", options=options)
    assert done.returncode == 2
    assert "transformers is not installed" in json.loads(done.stdout)["findings"][0]


@pytest.mark.usefixtures("image")
def test_the_verb_judges_a_file_of_the_host(tmp_path: Path) -> None:
    folder = tmp_path / "mit Lücke, und Komma"
    folder.mkdir()
    folder.chmod(0o755)
    tmp_path.chmod(0o755)
    (folder / "nets.py").write_text("from neighbour import trained\n")
    (folder / "neighbour.py").write_text(NETS)
    words = ["-m", "tpuforge.smoke.model", f"{folder / 'nets.py'}:trained", "--json"]
    done = subprocess.run(
        [sys.executable, *words, "--target", "v5e:2x2", "--mode", "inference"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(done.stdout)["data"]
    assert data["targets"]["v5e:2x2"]["verdict"] == "fits"
    kept = json.loads(Path(data["model"]).read_text())
    assert [program["kind"] for program in kept["programs"]] == ["forward"]
