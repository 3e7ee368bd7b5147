"""TorchTPU's own public API, ``torch.tpu``: what can be called is called.

TorchTPU sends user code to ``torch.accelerator`` for much of it, and refuses the same names of its
own to everybody but PyTorch. So for each public name there is one of three things: a call that must
work, a call that must be refused with the name to use instead, or a reason why it is not called
here. A name that stands in none of them is new: nobody tries it yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SIZE = 4
_MODES = ("DEFER_NEVER", "DEFER_NEVER_AND_LAUNCH_BLOCKING", "DEFER_AND_FUSE")
"""The eager modes that compute; TorchTPU has further ones, which only record what is called."""


def _event(torch: Any) -> None:
    event = torch.tpu.Event()
    torch.ones(_SIZE, device="tpu").add_(1)
    event.record()
    event.synchronize()
    assert event.query(), "an event is not done after it was waited for"


def _stream(torch: Any) -> None:
    stream = torch.tpu.Stream()
    with torch.tpu.stream(stream):
        found = torch.ones(_SIZE, device="tpu") + 1
    stream.synchronize()
    assert found.cpu().tolist() == [2.0] * _SIZE, f"on a stream of its own 1 + 1 is {found.cpu()}"


def _default_stream(torch: Any) -> None:
    torch.tpu.default_stream().synchronize()


def _device_of(torch: Any) -> None:
    with torch.tpu.device_of(torch.ones(_SIZE, device="tpu")):
        found = torch.zeros(_SIZE, device="tpu")
    assert found.device.index == 0, f"the device of a tensor of the first one is {found.device}"


def _eager_mode(torch: Any) -> None:
    before = torch.tpu.eager_mode
    for name in _MODES:
        mode = torch.tpu.EagerMode[name]
        with torch.tpu.set_eager_mode(mode):
            assert torch.tpu.eager_mode == mode, f"{mode} was set, {torch.tpu.eager_mode} is there"
            found = (torch.full((_SIZE,), 1.0).to("tpu") * 3).cpu()
        assert found.tolist() == [3.0] * _SIZE, f"in {mode} 1 * 3 is {found}"
    assert torch.tpu.eager_mode == before, "an eager mode stays after its block"


def _precision(torch: Any) -> None:
    left = torch.full((_SIZE, _SIZE), 1.0 + 2**-12)
    for name in ("DEFAULT", "HIGH", "HIGHEST"):
        with torch.tpu.precision(getattr(torch.tpu.Precision, name)):
            found = (left.to("tpu") @ left.to("tpu")).cpu()
        torch.testing.assert_close(found, left @ left, rtol=1e-2, atol=1e-2)


def _excess_precision(torch: Any) -> None:
    assert isinstance(torch.tpu.allow_excess_precision, bool)


def _amp_dtypes(torch: Any) -> None:
    assert torch.bfloat16 in torch.tpu.get_amp_supported_dtype(), "AMP has no bfloat16"


def _name(torch: Any) -> None:
    name = torch.tpu.get_device_name()
    assert name.startswith("TPU "), f"the device is called {name}"
    assert torch.tpu.get_device_properties().name == name


def _initialized(torch: Any) -> None:
    torch.ones(1, device="tpu").cpu()
    assert torch.tpu.is_initialized(), "the device computes, and is said not to be initialised"


def _seeds(torch: Any) -> None:
    drawn = []
    for seed in (torch.tpu.manual_seed, torch.tpu.manual_seed_all, torch.tpu.manual_seed):
        seed(7)
        drawn.append(torch.randn(_SIZE, device="tpu").cpu())
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2]), (
        "the same seed gives other numbers"
    )


def _generators(torch: Any) -> None:
    one = torch.tpu.default_generators[0]
    assert one.device.type == "tpu", f"the first generator is of {one.device}"


def _compiler_options(torch: Any) -> None:
    assert callable(torch.tpu.compiler.custom_compiler_options)


def _barrier(torch: Any) -> None:
    value = torch.arange(float(_SIZE)).to("tpu")
    found = torch.tpu.ops.optimization_barrier([value])[0].cpu()
    assert found.tolist() == [0.0, 1.0, 2.0, 3.0], f"a barrier changes values: {found}"


def _optimizers(torch: Any) -> None:
    wanted = {"AdamW", "Muon", "Sgd"}
    missing = wanted - set(dir(torch.tpu.optimizers))
    assert not missing, f"torch.tpu.optimizers has no {', '.join(sorted(missing))}"


def _distributed(torch: Any) -> None:
    assert callable(torch.tpu.distributed.set_tpu_launch_env)


def _profiler(torch: Any) -> None:
    torch.tpu.profiler.TpuProfilerConfig()


CALLS: dict[str, Callable[[Any], None]] = {
    "EagerMode": _eager_mode,
    "Event": _event,
    "Precision": _precision,
    "Stream": _stream,
    "allow_excess_precision": _excess_precision,
    "compiler": _compiler_options,
    "default_generators": _generators,
    "default_stream": _default_stream,
    "device_of": _device_of,
    "distributed": _distributed,
    "eager_mode": _eager_mode,
    "get_amp_supported_dtype": _amp_dtypes,
    "get_device_name": _name,
    "get_device_properties": _name,
    "is_initialized": _initialized,
    "manual_seed": _seeds,
    "manual_seed_all": _seeds,
    "ops": _barrier,
    "optimizers": _optimizers,
    "precision": _precision,
    "profiler": _profiler,
    "set_eager_mode": _eager_mode,
    "stream": _stream,
}
"""Public name to a call of it that must work; one call may serve several names."""

REFUSED: dict[str, Callable[[Any], Any]] = {
    "current_device": lambda tpu: tpu.current_device(),
    "current_stream": lambda tpu: tpu.current_stream(),
    "device": lambda tpu: tpu.device(0).__enter__(),
    "device_count": lambda tpu: tpu.device_count(),
    "get_rng_state": lambda tpu: tpu.get_rng_state(),
    "initial_seed": lambda tpu: tpu.initial_seed(),
    "is_available": lambda tpu: tpu.is_available(),
    "set_device": lambda tpu: tpu.set_device(0),
    "synchronize": lambda tpu: tpu.synchronize(),
}
"""Names that TorchTPU keeps for PyTorch: a call must be refused, and say what to use instead."""

NOT_CALLED = {
    "pallas": "its kernels are for the TPU alone, and need jax; compile.pallas compiles one",
    "set_rng_state": "the state that it takes is had from torch.accelerator, which is PyTorch's",
    "set_stream": "it would change the stream of every later program in this process",
    "topology_aware_mesh": "deprecated, and it needs a process group of several chips",
}
"""Name to why it is not called."""


def exercise(torch: Any) -> dict[str, Any]:
    """Call what can be called.

    Args:
        torch: The module, with a TPU that it has found.

    Returns:
        ``names`` (how many there are), ``called``, ``refused`` and ``not_called`` (name to reason),
        ``unknown`` (names that nobody tries yet) and ``gone`` (names that are no more).

    Raises:
        AssertionError: If a call does not do what it should; the message names it.
    """
    public = set(torch.tpu.__all__)
    called, refused, wrong = [], [], []
    # one call may serve several names, and is made once
    failed: dict[Callable[[Any], None], str] = {}
    tried: set[Callable[[Any], None]] = set()
    for name, call in CALLS.items():
        if name not in public:
            continue
        if call not in tried:
            tried.add(call)
            try:
                call(torch)
            except Exception as error:
                failed[call] = f"{type(error).__name__}: {error}"
        if call in failed:
            wrong.append(f"torch.tpu.{name}: {failed[call]}")
        else:
            called.append(name)
    for name, use in REFUSED.items():
        if name not in public:
            continue
        try:
            use(torch.tpu)
        except RuntimeError as error:
            if "torch.accelerator" in str(error):
                refused.append(name)
            else:
                wrong.append(f"torch.tpu.{name}: refused without a word on what to use: {error}")
        else:
            wrong.append(f"torch.tpu.{name}: this works by now; call it instead")
    assert not wrong, "\n".join(wrong)
    known = CALLS.keys() | REFUSED.keys() | NOT_CALLED.keys()
    return {
        "names": len(public),
        "called": called,
        "refused": refused,
        "not_called": {name: why for name, why in NOT_CALLED.items() if name in public},
        "unknown": sorted(public - known),
        "gone": sorted(known - public),
    }
