"""The suite inside the real image: healthy as baked, and every kind of damage noticed.

Damage is done by mounts and settings, on the image that everybody gets.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bake_support import HARDENED, ROOT, Image, result

SITE = "/opt/venv/lib/python3.11/site-packages"
MEMORY_LIMIT = 2_000_000_000
SUITE_LIMIT = 5_000_000


def health(
    image: Image, *arguments: str, options: tuple[str, ...] = ()
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the suite in a hardened container; its report comes over standard output."""
    words = ("health", "--json", "-", *arguments)
    done = image.run(*words, options=(*HARDENED, *options), timeout=900)
    assert done.stdout.startswith("{"), done.stderr
    return done, json.loads(done.stdout)


def failed(report: dict[str, Any]) -> dict[str, str]:
    """The failed checks: name to detail."""
    return {one["id"]: one["detail"] for one in report["checks"] if one["status"] == "failed"}


def mount(source: Path, target: str) -> tuple[str, str]:
    """A read-only mount."""
    return ("--mount", f"type=bind,source={source},target={target},readonly")


def test_as_baked_it_is_healthy_for_any_user(image: Image) -> None:
    done, report = health(image, options=("--user=4242:4242",))
    assert done.returncode == 0, done.stderr
    assert failed(report) == {}
    status = {name: tier["status"] for name, tier in report["tiers"].items()}
    assert status == {
        "static": "passed",
        "import": "passed",
        "compile": "passed",
        "simulate": "not run",
        "device": "not run",
    }
    assert report["tiers"]["device"]["why"] == "no TPU found"
    assert report["tiers"]["simulate"]["why"] == "no simulator is mounted"
    assert report["image"]["lock_sha256"] == image.record["lock_sha256"]
    assert report["highest_tier"] == "compile"
    peaks = [tier["peak_memory_bytes"] for tier in report["tiers"].values()]
    assert max(peak for peak in peaks if peak) < MEMORY_LIMIT
    figures = {one["id"]: one["figures"] for one in report["checks"]}
    for target in ("v6e:2x2", "v5e:2x2"):
        assert figures[f"compile.large@{target}"]["flops"] == 2 * 8192**3
        assert figures[f"compile.large@{target}"]["code_bytes"] > 0


def test_the_suite_adds_less_than_5_mb(image: Image) -> None:
    own = [
        layer
        for layer in image.record["layers"]
        if layer["what"] == "files in opt/tpuforge/smoke" or "iniconfig" in layer["what"]
    ]
    # what only the suite imports, and the suite itself
    assert len(own) == 2, [layer["what"] for layer in image.record["layers"]]
    assert sum(layer["compressed_bytes"] for layer in own) < SUITE_LIMIT


def test_every_damage_of_the_files_is_noticed(image: Image, tmp_path: Path) -> None:
    texts = {
        f"{SITE}/torch/version.py": "__version__ = '2.13.0+cu126'\ncuda = '12.6'\n",
        f"{SITE}/torch_tpu/include/XLA_COMMIT": "0" * 40,
        f"{SITE}/libtpu/libtpu.so": "",
        f"{SITE}/nvidia_cublas_cu12-12.6.dist-info/METADATA": "Name: nvidia-cublas-cu12\n"
        "Version: 12.6\n",
        f"{SITE}/nvidia/libcublas.so.12": "",
        "/opt/tpuforge/lock.txt": f"torch==2.12.0+cpu --hash=sha256:{'0' * 64}\n",
        "/etc/pip.conf": "",
        "/etc/passwd": "root:x:0:0::/root:/bin/sh\n",
        "/etc/machine-id": "0123456789abcdef0123456789abcdef\n",
        "/old/libstdc++.so.6": "",
    }
    options: list[str] = []
    for index, (target, text) in enumerate(texts.items()):
        source = tmp_path / str(index)
        source.write_text(text)
        options += mount(source, target)
    old = tmp_path / "libstdc++.so.6"
    old.write_bytes(_empty_library())
    options[options.index("--mount", -2) :] = mount(old, "/old/libstdc++.so.6")
    options += ["--user=0", "--env=LD_PRELOAD=/nowhere.so", "--env=PIP_CONSTRAINT=/etc/hostname"]
    options += ["--env=LD_LIBRARY_PATH=/old"]
    done, report = health(image, "--tier", "static", options=tuple(options))
    assert done.returncode == 1
    assert report["verdict"] == "unhealthy"
    found = failed(report)
    assert set(found) == {
        "static.lock", "static.closure", "static.record", "static.unrecorded", "static.bytecode",
        "static.cuda", "static.needed", "static.versions", "static.torch-tpu", "static.account",
        "static.user", "static.preload", "static.allocator", "static.guard", "static.guard-env",
        "static.leftovers", "static.libtpu",
    }  # fmt: skip
    assert "torch/version.py has" in found["static.record"]
    assert "libcublas" in found["static.cuda"]
    assert "libtpu.so cannot be read" in found["static.needed"]
    assert "GLIBCXX" in found["static.versions"]
    assert "/nowhere.so, which is not there" in found["static.preload"]


def _empty_library() -> bytes:
    from smoke_suite_support import elf

    return elf(())


def test_what_does_not_load_is_noticed(image: Image, tmp_path: Path) -> None:
    (tmp_path / "libtpu.so").write_bytes(b"\x7fELF")
    (tmp_path / "entry_points.txt").touch()
    options = (
        *mount(tmp_path / "libtpu.so", f"{SITE}/libtpu/libtpu.so"),
        *mount(tmp_path / "entry_points.txt", f"{SITE}/torch_tpu-0.2.0.dist-info/entry_points.txt"),
        "--env=LD_PRELOAD=",
    )
    arguments = ("--tier", "import,compile", "--target", "v6e:2x2")
    done, report = health(image, *arguments, options=options)
    assert done.returncode == 1
    status = {one["id"]: one["status"] for one in report["checks"] if one["tier"] == "compile"}
    # no flag of a user's is there to be judged, and this image has no JAX
    assert status.pop("compile.flags@v6e:2x2") == "passed"
    assert status.pop("compile.pallas@v6e:2x2") == "not run"
    compiles = set(status)
    assert len(compiles) > 4
    assert set(failed(report)) == {
        "import.autoload",
        "import.private-use",
        # torch_tpu loads libtpu when it is imported
        "import.torch-tpu",
        "import.tcmalloc",
        "import.pjrt-pair",
        "import.stablehlo-pair",
        *compiles,
    }
    assert "libtpu.so" in failed(report)["import.pjrt-pair"]
    assert failed(report)["import.autoload"] == "import torch did not load torch_tpu"
    assert "tcmalloc is not loaded" in failed(report)["import.tcmalloc"]


def test_a_target_that_libtpu_does_not_know_leaves_it_unjudged(image: Image) -> None:
    arguments = ("--tier", "compile", "--target", "v6e:3x3", "-k", "compile.small")
    done, report = health(image, *arguments)
    assert done.returncode == 2
    assert "libtpu knows no target v6e:3x3" in report["tiers"]["compile"]["why"]


def test_bad_arguments_for_libtpu_are_blamed_and_not_the_image(image: Image) -> None:
    options = ("--env=LIBTPU_INIT_ARGS=--xla_tpu_no_such_flag=1",)
    arguments = ("--tier", "compile", "--target", "v6e:2x2", "-k", "flags or small")
    done, report = health(image, *arguments, options=options)
    assert done.returncode == 1
    found = failed(report)
    assert set(found) == {"compile.flags@v6e:2x2"}
    for word in ("LIBTPU_INIT_ARGS=--xla_tpu_no_such_flag=1", "Unknown command line flag"):
        assert word in found["compile.flags@v6e:2x2"]
    assert report["tiers"]["compile"]["passed"] == 1


def test_too_little_memory_leaves_it_unjudged(image: Image) -> None:
    options = ("--memory=100m", "--memory-swap=100m")
    done, report = health(image, "--tier", "import", "-k", "import.autoload", options=options)
    assert done.returncode == 2
    assert "a memory limit does that" in report["tiers"]["import"]["why"]


@pytest.fixture(scope="module")
def simulator(image: Image) -> Path:
    """The simulator's folder; it needs the wheels that the image fixture has fetched."""
    assert image.record
    return Path(result("tpuforge.smoke.simulator")["folder"])


def _simulated(folder: Path) -> tuple[str, ...]:
    return (
        *mount(folder, "/opt/simulator"),
        *mount(folder / "pci", "/sys/bus/pci/devices"),
        *mount(folder / "vfio", "/dev/vfio/7"),
        "--env=TPU_LIBRARY_PATH=/opt/simulator/wrapper.so",
        "--env=TPUFORGE_SIMULATOR=/opt/simulator",
    )


def test_on_the_simulator_it_is_healthy(image: Image, simulator: Path, tmp_path: Path) -> None:
    # eager, compiled and the cache; the main job runs the whole tier
    chosen = "simulate.readme or simulate.compile-train or simulate.cache"
    arguments = ("--tier", "simulate", "-k", chosen)
    tmp_path.chmod(0o777)
    keep = ("--mount", f"type=bind,source={tmp_path},target=/programs")
    options = (*_simulated(simulator), *keep, "--env=TPUFORGE_PROGRAMS_DIR=/programs")
    done, report = health(image, *arguments, options=options)
    assert done.returncode == 0, done.stderr
    assert report["tiers"]["simulate"]["passed"] == 3
    assert report["tiers"]["device"]["status"] == "not run"
    assert report["highest_tier"] == "simulate"
    assert report["tiers"]["simulate"]["peak_memory_bytes"] < MEMORY_LIMIT
    programs = sorted(tmp_path.glob("*.mlir"))
    assert programs
    assert [path.with_suffix(".options").is_file() for path in programs] == [True] * len(programs)
    assert {path.suffix for path in tmp_path.iterdir()} == {".mlir", ".options"}
    # MLIR byte code begins with these four bytes
    assert {path.read_bytes()[:4] for path in programs} == {b"ML\xefR"}


WRONG = """
import sys
sys.path.insert(0, "/opt/tpuforge")
from unittest import mock
import torch
from smoke import workloads

bounds = workloads.BFLOAT16_PASSES
kept, step, product = torch.Tensor.cpu, torch.optim.SGD.step, torch.Tensor.__matmul__
to = torch.nn.Module.to


def off(value):
    found = kept(value)
    if value.device.type == "tpu" and found.is_floating_point():
        found.view(-1)[0] += 0.25
    return found


def more(first, other):
    found = product(first, other)
    return found + 0.25 if first.device.type == "tpu" else found


def bare(self, device):
    # as if it left out the norm's own parameters
    moved = to(self, device)
    if device == "tpu":
        moved[2].reset_parameters()
    return moved


def still(self, *given):
    # only the norm, whose whole training is less than the tolerance of a weight
    scale, shift = self.param_groups[0]["params"][2:4]
    if scale.device.type == "tpu":
        scale.grad = shift.grad = None
    return step(self, *given)


def told(what, function, *arguments):
    try:
        function(*arguments, *bounds)
    except AssertionError as error:
        print(what, "not close" in str(error))


found = workloads.matmul_2x2()
print("right", found["difference"] < bounds[0] * found["scale"])
with mock.patch.object(torch.Tensor, "__matmul__", more):
    found = workloads.matmul_2x2()
    print("readme", found["difference"] > bounds[0] * found["scale"])
with mock.patch.object(torch.Tensor, "cpu", off):
    told("train", workloads.train, False)
    told("compile_forward", workloads.compile_forward)
with mock.patch.object(torch.optim.SGD, "step", still):
    told("still", workloads.train, False)
with mock.patch.object(torch.nn.Module, "to", bare):
    told("bare", workloads.compile_forward)
"""


def test_a_device_that_computes_wrong_is_told_within_the_devices_tolerance(
    image: Image, simulator: Path
) -> None:
    options = (
        *HARDENED,
        *_simulated(simulator),
        *mount(ROOT / "smoke", "/opt/tpuforge/smoke"),
        "--env=TF_CPP_MIN_LOG_LEVEL=3",
    )
    done = image.run("python", "-c", WRONG, options=options)
    told = ("right", "readme", "train", "compile_forward", "still", "bare")
    assert done.stdout.splitlines() == [f"{what} True" for what in told], done.stderr


def test_a_simulator_whose_plugin_is_gone_is_noticed(image: Image, simulator: Path) -> None:
    options = (*_simulated(simulator), "--env=TPUFORGE_PJRT_PLUGIN=/nowhere.so")
    done, report = health(image, "--tier", "simulate", "-k", "simulate.readme", options=options)
    assert done.returncode == 1
    assert set(failed(report)) == {"simulate.readme"}


def test_a_tpu_that_cannot_be_used_ends_with_3(image: Image, simulator: Path) -> None:
    # a chip on the bus, and nobody says that it is simulated
    options = (
        *mount(simulator / "pci", "/sys/bus/pci/devices"),
        *mount(simulator / "vfio", "/dev/vfio/7"),
    )
    done, report = health(image, "--tier", "device", options=options)
    assert done.returncode == 3
    assert report["verdict"] == "device"
    assert set(failed(report)) == {"device.usable"}
    # all but device.chips, which counts and opens nothing
    assert report["tiers"]["device"]["not_run"] == 7
