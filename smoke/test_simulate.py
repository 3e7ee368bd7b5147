"""Tier *simulate*: the real torch_tpu wheel on a CPU plugin, loaded for a simulated chip.

The programs are those of :mod:`smoke.simulator.programs`; a check waits for the program of its
name. The time of a check is therefore what was waited for; ``program_seconds`` is the program's
own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smoke import flavours, workloads
from smoke.place import Place
from smoke.plugin import Check
from smoke.simulator import limits, themes

_REMEDY = "compare with the device tier on a TPU; if only the simulator fails, build it again"
_CHIPS = {
    "v4": (32, "2,2,1"),
    "v5e": (16, "2,2,1"),
    "v5p": (95, "2,2,1"),
    "v6e": (32, "2,2,1"),
    # one device is one of the chip's two cores
    "v7": (96, "1,2,1,2"),
}
"""Generation to GiB of memory of one device, and the shape of a host with four, as published."""

_LIBRARIES = (
    "install the torch that this torch_tpu was made for; if the device tier passes on a TPU, build "
    "the simulator again"
)


@pytest.fixture(scope="session")
def crew(request: pytest.FixtureRequest) -> Iterator[themes.Crew]:
    """The programs of all checks that will be run, two themes at a time."""
    chosen = [
        (str(marker.args[0]), str(marker.args[1]))
        for item in request.session.items
        for marker in item.iter_markers("program")
    ]
    running = themes.Crew(chosen)
    try:
        running.start()
        yield running
    finally:
        running.stop()


def _check(name: str, theme: str, program: str, purpose: str, remedy: str = _REMEDY) -> object:
    return pytest.param(
        theme,
        program,
        marks=(
            pytest.mark.check(
                id=f"simulate.{name}", purpose=purpose, severity="critical", remedy=remedy
            ),
            pytest.mark.program(theme, program),
        ),
        id=name,
    )


@pytest.mark.parametrize(
    ("theme", "program"),
    [
        _check(
            "compile-forward",
            "compile",
            "compile_forward",
            "torch.compile of a forward pass gives the CPU's result, the second time as well",
        ),
        _check(
            "compile-train",
            "compile",
            "compile_train",
            "training steps of a compiled model give the CPU's losses and weights",
        ),
        _check(
            "new-shapes",
            "compile",
            "shapes",
            "a compiled function compiles once for each new shape, and never for a known one",
        ),
        _check(
            "eager-modes",
            "compile",
            "modes",
            "blocking, default and fused eager mode agree, and fusion asks the cache less often",
        ),
        _check(
            "cache",
            "compile",
            "cache",
            "what ran before compiles nothing, nor does warm training; a new shape does",
        ),
        _check(
            "readme",
            "eager",
            "readme",
            "the first program of TorchTPU's README runs on device tpu, with no private call",
        ),
        _check(
            "train",
            "eager",
            "train",
            "training steps on device tpu give the CPU's losses and weights",
        ),
        _check(
            "eager",
            "eager",
            "eager",
            "an operation of every usual kind and type gives the CPU's result",
        ),
        _check(
            "autograd",
            "eager",
            "autograd",
            "gradients of convolution, recurrence and embedding, and second derivatives, agree",
        ),
        _check(
            "optimizers",
            "eager",
            "optimizers",
            "steps of SGD, Adam, AdamW and RMSprop give the CPU's weights",
        ),
        _check(
            "amp",
            "eager",
            "amp",
            "autocast computes in bfloat16, forward and backward, and agrees with the CPU's",
        ),
        _check(
            "checkpoint",
            "eager",
            "checkpoint",
            "recomputed activations and a saved and resumed training change nothing",
        ),
        _check(
            "fallback",
            "eager",
            "fallback",
            "an operator without a kernel is refused by name, and runs on the CPU only when asked",
            "compare the message with TorchTPU's release notes; unset what turns its fallback on",
        ),
        _check(
            "collectives",
            "distributed",
            "collectives",
            "the process group tpu_dist is made, and five collectives of a world of one agree",
            _LIBRARIES,
        ),
        _check(
            "ddp",
            "distributed",
            "ddp",
            "a step under DistributedDataParallel gives the CPU's weights",
            _LIBRARIES,
        ),
        _check(
            "fsdp2",
            "distributed",
            "fsdp2",
            "a step under FSDP2 gives the CPU's weights",
            _LIBRARIES,
        ),
        _check(
            "dtensor",
            "distributed",
            "dtensor",
            "products of sharded and replicated DTensors give the CPU's result",
            _LIBRARIES,
        ),
    ],
)
def test_program(check: Check, crew: themes.Crew, theme: str, program: str) -> None:
    crew.figures(check, theme, program)


@pytest.mark.check(
    id="simulate.second-process",
    purpose="a second process with the same persistent compile cache compiles nothing",
    severity="critical",
    remedy="give TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT a folder that can be written, or go back "
    "to a torch_tpu whose cache works",
)
@pytest.mark.program("cold", "counted_work")
@pytest.mark.program("warm", "counted_work")
def test_second_process(check: Check, crew: themes.Crew) -> None:
    cold = crew.figures(check, "cold", "counted_work")
    warm = crew.figures(check, "warm", "counted_work")
    check.figures.clear()
    check.figures |= {"first": cold, "second": warm}
    assert cold["num_compilations"] > 0, "the first process compiled nothing: counters do not count"
    assert cold["files"] > 0, "the first process left nothing in the cache's folder"
    assert warm["num_cache_reqs"] == cold["num_cache_reqs"], "the second process did other work"
    assert warm["num_compilations"] == 0, (
        f"the second process compiled {warm['num_compilations']} of the first one's "
        f"{cold['num_compilations']} programs again"
    )
    check.detail = (
        f"{cold['num_compilations']} compilations, then none; the cache holds {cold['files']} "
        f"files, {cold['bytes'] / 1e6:.1f} MB"
    )


@pytest.mark.check(
    id="simulate.api",
    purpose="each name of torch.tpu does what it should, is refused with a better one, or is named "
    "as not tried",
    severity="warning",
    remedy="compare with TorchTPU's release notes, and correct smoke/simulator/api.py",
)
@pytest.mark.program("eager", "public_api")
def test_api(check: Check, crew: themes.Crew) -> None:
    found = crew.figures(check, "eager", "public_api")
    changed = [f"new: {name}" for name in found["unknown"]]
    changed += [f"gone: {name}" for name in found["gone"]]
    assert not changed, f"torch.tpu has changed: {', '.join(changed)}"


@pytest.mark.check(
    id="simulate.transformers",
    purpose="a small model of transformers runs forward as on the CPU, in an image that has it",
    severity="critical",
    remedy="install the transformers that the lock names; " + _LIBRARIES,
)
def test_transformers(check: Check, here: Place) -> None:
    flavours.own(check, here, "checks")
    found = check.value(
        flavours.run_transformer,
        *workloads.FLOAT32,
        timeout=themes.LIMIT_S,
        env={"TF_CPP_MIN_LOG_LEVEL": "3", themes.CACHE_ROOT: None},
    )
    check.figures |= found
    check.detail = (
        f"transformers {found['version']}, {found['parameters']} parameters, within "
        f"{found['difference']:.1e} of the CPU, first forward {found['forward_seconds']:.1f} s"
    )


@pytest.mark.parametrize(
    "generation",
    [
        pytest.param(
            name,
            marks=(
                pytest.mark.check(
                    id=f"simulate.generation-{name}",
                    purpose=f"a plain import finds a TPU {name}, names it, and computes on it",
                    severity="critical",
                    remedy="use a torch_tpu that knows this generation; if the device tier passes "
                    "on such a TPU, build the simulator again",
                ),
                pytest.mark.program(name, "generation"),
            ),
            id=name,
        )
        for name in themes.GENERATIONS
    ],
)
def test_generation(check: Check, crew: themes.Crew, generation: str) -> None:
    gibibytes, topology = _CHIPS[generation]
    found = crew.figures(check, generation, "generation")
    assert found["name"] == f"TPU {generation}", f"TorchTPU calls the chip {found['name']}"
    assert found["memory_bytes"] == gibibytes << 30, (
        f"TorchTPU gives a device {found['memory_bytes'] / 2**30:.0f} GiB, and it has {gibibytes}"
    )
    assert found["topology_of_4"] == topology, (
        f"four processes are launched for the shape {found['topology_of_4']}, not {topology}"
    )
    check.detail = f"{found['name']}, {gibibytes} GiB for each device, {topology} for four"


@pytest.mark.check(
    id="simulate.limits",
    purpose="what is listed as a limit of the simulator still fails, and in the way that is listed",
    severity="warning",
    remedy="correct smoke/simulator/limits.toml, and use what works by now in the other checks",
)
@pytest.mark.program("limits", "limits")
def test_limits(check: Check, crew: themes.Crew) -> None:
    failures = crew.figures(check, "limits", "limits")["failures"]
    known = limits.listed()
    wrong = [words for one in known if (words := limits.judge(one, failures[one["probe"]]))]
    assert not wrong, "\n".join(wrong)
    check.detail = f"all {len(known)} known limits are as listed"
