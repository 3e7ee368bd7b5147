"""The simulate tier can fail: every check meets a fault of its own kind, and tells it.

One run has a fault for each program, made around it; another has a plugin whose numbers are wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bake_support import HARDENED, ROOT, Image, result
from tpuforge.console import Progress
from tpuforge.smoke import simulator

PROGRAMS = ROOT / "smoke" / "simulator" / "programs.py"

FAULTS = '''

import contextlib
from unittest import mock


def _changed(torch, name, change):
    """A function of torch whose results on the TPU are changed."""
    kept = getattr(torch, name)

    def wrong(*given, **more):
        found = kept(*given, **more)
        first = given[0] if given else None
        on_tpu = getattr(getattr(first, "device", None), "type", "") == "tpu"
        return change(found) if on_tpu else found

    return mock.patch.object(torch, name, wrong)


def _fault(name):
    """Something broken, for one program."""
    if name == "counted_work":
        return mock.patch.dict(os.environ, {"TORCH_TPU_TIER2_COMPILATION_CACHE": "disabled"})
    torch = _torch()
    if name == "eager":
        return _changed(torch, "sort", lambda found: type(found)((found[0].flip(1), found[1])))
    if name == "autograd":
        kept = torch.autograd.grad
        return mock.patch.object(
            torch.autograd,
            "grad",
            lambda outputs, inputs, **more: tuple(
                one * 1.01 if inputs.device.type == "tpu" else one
                for one in kept(outputs, inputs, **more)
            ),
        )
    if name == "optimizers":
        kept_step = torch.optim.RMSprop.step

        def step(self, *given):
            kept_step(self, *given)
            with torch.no_grad():
                for value in self.param_groups[0]["params"]:
                    value.add_(0.01 if value.device.type == "tpu" else 0)

        return mock.patch.object(torch.optim.RMSprop, "step", step)
    if name == "amp":
        return mock.patch.object(
            torch, "autocast", lambda device, **more: contextlib.nullcontext()
        )
    if name == "checkpoint":
        kept_load = torch.load

        def load(*given, **more):
            found = kept_load(*given, **more)
            found["model"]["0.weight"] += 0.01
            return found

        return mock.patch.object(torch, "load", load)
    if name == "fallback":
        from torch_tpu._internal import execution_mode

        @contextlib.contextmanager
        def on():
            execution_mode.enable_cpu_fallback = True
            try:
                yield
            finally:
                execution_mode.enable_cpu_fallback = False

        return on()
    if name == "modes":
        return mock.patch.object(torch.tpu, "set_eager_mode", lambda mode: contextlib.nullcontext())
    if name in ("cache", "shapes"):
        # a cache that is never hit
        from types import SimpleNamespace

        asked = torch.tpu._get_cache_stats
        calls = iter(range(1000))

        def stats():
            requests = asked().num_cache_reqs + next(calls)
            return SimpleNamespace(
                num_cache_reqs=requests, num_cache_hits=0, num_compilations=requests
            )

        return mock.patch.object(torch.tpu, "_get_cache_stats", stats)
    if name == "generation":
        from torch_tpu._internal.utils import hardware

        return mock.patch.object(hardware, "get_tpu_device_name", lambda: "TPU v4")
    if name == "limits":
        return mock.patch.object(torch, "cumsum", lambda value, dim: torch.zeros(6))
    kept_cpu = torch.Tensor.cpu

    def cpu(value):
        found = kept_cpu(value)
        changed = value.device.type == "tpu" and found.is_floating_point()
        return found * 1.01 if changed else found

    return mock.patch.object(torch.Tensor, "cpu", cpu)


_healthy = run


def run(names):
    """The real one, with a fault around each program."""
    results = {}
    for name in names:
        with _fault(name):
            results |= _healthy([name])
    return results
'''

WORDS = {
    "compile-forward": "not close",
    "compile-train": "not close",
    "new-shapes": "a known shape was compiled again",
    "eager-modes": "fusion made 90 requests",
    "cache": "times again",
    "readme": "the product differs",
    "train": "not close",
    "eager": "sort: ",
    "autograd": "second derivative: ",
    "optimizers": "RMSprop: ",
    "amp": "autocast gave torch.float32",
    "checkpoint": "resumed ",
    "fallback": "nobody asked for that",
    "collectives": "all_reduce: ",
    "ddp": "loss: ",
    "fsdp2": "loss: ",
    "dtensor": "sharded product: ",
    "second-process": "left nothing in the cache's folder",
    "generation-v5e": "TorchTPU calls the chip TPU v4",
    "limits": "this works by now; take it out of limits.toml",
    "api": "in EagerMode.DEFER_NEVER 1 * 3 is tensor([3.0300",
}
"""Check to what it must say of its fault; for a TPU v4 the fault is none."""


def mount(source: Path, target: str) -> tuple[str, str]:
    """A read-only mount."""
    return ("--mount", f"type=bind,source={source},target={target},readonly")


def judged(image: Image, folder: Path, *options: str, chosen: str = "") -> dict[str, Any]:
    """The report of the tier on a simulator, with this checkout's suite."""
    words = ["health", "--tier", "simulate", "--json", "-", *(("-k", chosen) if chosen else ())]
    mounts = (
        *mount(folder, "/opt/simulator"),
        *mount(folder / "pci", "/sys/bus/pci/devices"),
        *mount(folder / "vfio", "/dev/vfio/7"),
        *mount(ROOT / "smoke", "/opt/tpuforge/smoke"),
        "--env=TPU_LIBRARY_PATH=/opt/simulator/wrapper.so",
        "--env=TPUFORGE_SIMULATOR=/opt/simulator",
    )
    done = image.run(*words, options=(*HARDENED, *mounts, *options), timeout=900)
    assert done.stdout.startswith("{"), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode
    return report


def test_every_check_tells_its_fault(image: Image, tmp_path: Path) -> None:
    folder = Path(result("tpuforge.smoke.simulator")["folder"])
    broken = tmp_path / "programs.py"
    broken.write_text(PROGRAMS.read_text(encoding="utf-8") + FAULTS, encoding="utf-8")
    options = mount(broken, "/opt/tpuforge/smoke/simulator/programs.py")
    # the check of the other generations is the same one, and each takes a process
    report = judged(image, folder, *options, chosen="not (v5p or v6e or v7)")
    assert report["verdict"] == "unhealthy"
    found = {one["id"].partition(".")[2]: one for one in report["checks"]}
    status = {name: one["status"] for name, one in found.items()}
    # what the image has no packages for has no fault to tell either
    sound = {"generation-v4": "passed", "transformers": "not run"}
    assert status == {**dict.fromkeys(WORDS, "failed"), **sound}
    missing = {
        name: found[name]["detail"] for name in WORDS if WORDS[name] not in found[name]["detail"]
    }
    assert missing == {}
    assert found["limits"]["severity"] == "warning"


def test_a_plugin_that_computes_wrong_is_told(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the wrapper, and one entry more: whoever fetches a result gets its first number changed
    source = simulator.WRAPPER.read_text(encoding="utf-8")
    fetch = """
static PJRT_Error* to_host(PJRT_Buffer_ToHostBuffer_Args* args) {
  PJRT_Error* error = cpu->PJRT_Buffer_ToHostBuffer(args);
  if (error != NULL || args->dst == NULL || args->dst_size < 4) return error;
  PJRT_Event_Await_Args ready = {.struct_size = PJRT_Event_Await_Args_STRUCT_SIZE,
                                 .event = args->event};
  error = cpu->PJRT_Event_Await(&ready);
  *(float*)args->dst += 0.25f;
  return error;
}

static int plugin_path("""
    changed = source.replace("\nstatic int plugin_path(", fetch, 1)
    changed = changed.replace(
        "  table = copy;\n", "  copy->PJRT_Buffer_ToHostBuffer = to_host;\n  table = copy;\n", 1
    )
    assert changed.count("to_host") == 2
    wrapper = tmp_path / "wrapper.c"
    wrapper.write_text(changed, encoding="utf-8")
    out = tmp_path / "out"
    out.mkdir()
    (out / "wheelhouse").symlink_to(image.out / "wheelhouse")
    monkeypatch.setattr(simulator, "WRAPPER", wrapper)
    monkeypatch.setenv("TPUFORGE_OUT", str(out))
    folder = simulator.ensure_simulator(Progress("test", quiet=True))
    chosen = "simulate.readme or simulate.train or simulate.eager and not modes"
    report = judged(image, folder, chosen=chosen)
    assert report["verdict"] == "unhealthy"
    status = {one["id"]: one["status"] for one in report["checks"]}
    assert status == dict.fromkeys(
        ("simulate.readme", "simulate.train", "simulate.eager"), "failed"
    )
