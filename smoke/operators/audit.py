"""The audit's work: one OpInfo entry, one dtype, one way, on the TPU and on the CPU, compared.

PyTorch describes its operators to its own tests as OpInfo entries: for each a callable, the dtypes
it takes and samples of its inputs. :func:`worker` runs in the processes of :mod:`smoke.operators.
crew`; everything here may end its process.

OpInfo is private to PyTorch's tests (``torch.testing._internal``), and it is the only complete list
of operators with inputs that there is. Its module imports ``expecttest`` for the base class of test
cases, which nothing here uses; where that package is missing, an empty module stands in for it.

The reference is the same operator on the CPU with the same inputs. Outputs are compared by
``torch.testing.assert_close``, with the tolerance of their own dtype (:data:`TOLERANCES`); integers
and truth values must be equal. An operator that draws random numbers is found out by running it
twice on the CPU with two seeds, and, if it differs on the TPU, by the tags of the overloads that it
calls: then only shapes and dtypes are compared, and the result says so. The same holds for the
``empty`` family, whose values nobody promises. In bfloat16 and float16 the CPU's own steps may be
the worse ones: a result that is the CPU's float32 result within the tolerance passes too.

An operator is called *forward*, and where its entry knows it in the further ways of
:data:`smoke.operators.table.WAYS`: for the *gradient* of its inputs, *out=* and *in place*. Each
way is a task of its own: if one ends its process, no other is blamed.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import time
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from smoke.operators import census
from smoke.operators.table import FORWARD

TOLERANCES: dict[str, tuple[float, float]] = {
    "float64": (1e-7, 1e-7),
    "float32": (1e-4, 1e-4),
    "float16": (4e-3, 4e-3),
    "bfloat16": (2e-2, 2e-2),
    "complex64": (1e-4, 1e-4),
    "complex128": (1e-7, 1e-7),
    "float8_e4m3fn": (0.13, 0.13),
    "float8_e5m2": (0.26, 0.26),
}
"""Relative and absolute tolerance by dtype of an output; any other dtype must be equal."""

_MESSAGE = 1500
_PROGRAMS = "TPUFORGE_PROGRAMS_DIR"
"""Read by the simulator whenever a program is compiled or run (``simulator/wrapper.c``)."""

_SEEDS = (20, 21)
_ON_THE_HOST = frozenset({"tensor_split"})
"""Entries whose further tensors PyTorch wants on the CPU, whatever the device of the input."""


def survey() -> dict[str, Any]:
    """The census and all OpInfo entries; call it through :mod:`smoke.isolate`.

    Returns:
        ``versions``, the ``census`` (:func:`smoke.operators.census.take`), and ``entries``: name,
        the dtypes that the entry takes on the CPU, and for each further way the dtypes for which
        it can be called so.
    """
    taken = census.take()
    import torch

    entries = [
        {"op": name, "dtypes": _names(info.supported_dtypes("cpu")), "ways": _ways(info)}
        for name, info in _entries().items()
    ]
    versions: dict[str, str | None] = {"torch": torch.__version__}
    for package in ("torch_tpu", "libtpu"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {"versions": versions, "census": taken, "entries": entries}


def _names(dtypes: Any) -> list[str]:
    return sorted(str(one).removeprefix("torch.") for one in dtypes)


def _ways(info: Any) -> dict[str, list[str]]:
    """The dtypes for which an entry can be called in each of the further ways."""
    dtypes = _names(info.supported_dtypes("cpu"))
    backward = _names(info.supported_backward_dtypes("cpu")) if info.supports_autograd else []
    return {
        "gradient": [one for one in backward if one in dtypes],
        "out": dtypes if info.supports_out else [],
        "inplace": dtypes if info.inplace_variant is not None else [],
    }


def _entries() -> dict[str, Any]:
    """Name to OpInfo, in PyTorch's order."""
    if importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        stand_in.ACCEPT = False  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return {info.full_name: info for info in op_db}


def worker(samples: int, programs: str | None) -> Callable[[dict[str, str]], dict[str, Any]]:
    """Get ready to audit operators.

    Args:
        samples: How many samples of each entry.
        programs: A folder; the programs that a task runs go to a folder of its own in it,
            compiled now or for an earlier task.

    Returns:
        A function that takes ``{"op": …, "dtype": …, "way": …}`` and tells what happened:
        ``outcome`` (``same``, ``differs``, ``raised`` or ``no reference``), ``message``,
        ``samples`` compared, ``values`` (whether values were compared, or only shapes),
        ``overloads`` that were called, ``seconds``, ``programs``.

    Raises:
        RuntimeError: If there is no accelerator called tpu.
    """
    import torch

    torch.set_num_threads(1)
    entries = _entries()
    if programs is not None:
        # the simulator can only tell which program is run if it saw it compiled
        os.environ[_PROGRAMS] = programs
    if str(torch.accelerator.current_accelerator()) != "tpu":
        raise RuntimeError("torch finds no TPU, neither a real nor a simulated one")
    # the first contact with the plugin takes its time; it belongs to no operator
    torch.ones(1).to("tpu").cpu()

    def handle(task: dict[str, str]) -> dict[str, Any]:
        folder = None
        if programs is not None:
            name = f"{task['op']}@{task['dtype']}@{task['way']}"
            folder = Path(programs) / name.replace("/", "_")
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[_PROGRAMS] = str(folder)
        started = time.perf_counter()
        called: set[str] = set()
        call = _Call(torch, entries[task["op"]], getattr(torch, task["dtype"]), task["way"])
        found = _audit(torch, call, samples, called)
        found["overloads"] = sorted(called)
        found["seconds"] = round(time.perf_counter() - started, 4)
        found["programs"] = (
            sorted(path.stem for path in folder.glob("[0-9a-f]*.mlir")) if folder else []
        )
        return found

    return handle


def _audit(torch: Any, call: _Call, samples: int, called: set[str]) -> dict[str, Any]:
    compared = 0
    values = True
    note = ""
    uninitialised = "empty" in call.info.name
    stream = _samples(torch, call)
    for _ in range(samples):
        try:
            sample = next(stream, None)
        except Exception as error:
            return _told("no reference", error, compared, values, "PyTorch makes no sample: ")
        if sample is None:
            break
        given = (sample.input, sample.args, sample.kwargs, sample.output_process_fn_grad)
        try:
            expected = call.on("cpu", given, _SEEDS[0])
            other, drawn = _watched(torch, call, given, called)
        except Exception as error:
            return _told("no reference", error, compared, values, "the CPU does not do it: ")
        fixed = not uninitialised and _agree(torch, other, expected, values=True)
        values = values and fixed
        try:
            found = call.on("tpu", given, _SEEDS[0])
        except Exception as error:
            return _told("raised", error, compared, values)
        try:
            _compare(torch, found, expected, fixed)
        except AssertionError as error:
            if fixed and _near_float32(torch, call, given, found, expected):
                note = "the CPU's float32 result, not the one of its own short steps"
            elif fixed and drawn and _agree(torch, found, expected, values=False):
                values = False
            else:
                return _told("differs", error, compared, values)
        compared += 1
    if not compared:
        return _told("no reference", None, 0, values, "its entry has no sample for this dtype")
    return _told("same", None, compared, values, note)


def _told(
    outcome: str, error: Exception | None, samples: int, values: bool, head: str = ""
) -> dict[str, Any]:
    message = head
    if error is not None:
        kind = type(error).__name__
        text = str(error).strip() or kind
        message += text if isinstance(error, AssertionError) else f"{kind}: {text}"
    return {
        "outcome": outcome,
        "message": message[:_MESSAGE],
        "samples": samples,
        "values": values,
    }


def _samples(torch: Any, call: _Call) -> Iterator[Any]:
    torch.manual_seed(0)
    if importlib.util.find_spec("numpy") is not None:
        # some samples are drawn by numpy
        importlib.import_module("numpy").random.seed(0)
    wanted = call.way == "gradient"
    yield from call.info.sample_inputs("cpu", call.dtype, requires_grad=wanted)


def _moved(torch: Any, value: Any, device: str) -> Any:
    """A copy of inputs on a device; arguments that name a device name that one."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, torch.device):
        return torch.device(device)
    if isinstance(value, torch.Generator):
        return torch.Generator(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(torch, one, device) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(_moved(torch, one, device) for one in value)
    if isinstance(value, dict):
        return {
            key: device if key == "device" and one is not None else _moved(torch, one, device)
            for key, one in value.items()
        }
    return copy.copy(value)


class _Call:
    """An operator, called in one way.

    Args:
        torch: The module.
        info: Its OpInfo entry.
        dtype: The dtype of its samples.
        way: ``forward``, or one of :data:`smoke.operators.table.WAYS`.
    """

    def __init__(self, torch: Any, info: Any, dtype: Any, way: str) -> None:
        self._torch = torch
        self.info = info
        self.dtype = dtype
        self.way = way
        self._called = {
            FORWARD: self._forward,
            "gradient": self._gradient,
            "out": self._out,
            "inplace": self._inplace,
        }[way]

    def on(self, device: str, given: Any, seed: int) -> list[Any]:
        """Call it; its results one after the other, tensors on the CPU."""
        torch = self._torch
        first, args, kwargs, process = given
        first = _moved(torch, first, device)
        others = "cpu" if self.info.name in _ON_THE_HOST else device
        args, kwargs = _moved(torch, (args, kwargs), others)
        torch.manual_seed(seed)
        with mock.patch.object(torch, "manual_seed"):
            # entries of random operators set a seed of their own, and would hide that they are
            # random
            found = list(_leaves(torch, self._called(first, args, kwargs, process)))
        if device != "cpu":
            torch.accelerator.synchronize()
            tensors = (one for one in found if isinstance(one, torch.Tensor))
            strangers = {one.device.type for one in tensors} - {device}
            if strangers:
                raise RuntimeError(f"a result is on {strangers.pop()}, not on {device}")
        return [one.detach().cpu() if isinstance(one, torch.Tensor) else one for one in found]

    def _forward(self, first: Any, args: Any, kwargs: Any, process: Any) -> Any:
        del process
        return self.info.op(first, *args, **kwargs)

    def _gradient(self, first: Any, args: Any, kwargs: Any, process: Any) -> Any:
        """Gradients of all inputs, for fixed gradients of all results."""
        torch = self._torch
        inputs = [
            one
            for one in _leaves(torch, (first, args, kwargs))
            if isinstance(one, torch.Tensor) and one.requires_grad
        ]
        # some entries turn a result that is one of many into one that is determined
        result = process(self.info.op(first, *args, **kwargs))
        ends = [
            one
            for one in _leaves(torch, result)
            if isinstance(one, torch.Tensor) and one.requires_grad
        ]
        if not inputs:
            raise RuntimeError("no input of this sample can have a gradient")
        if not ends:
            raise RuntimeError("the result has no gradient, although an input wants one")
        return torch.autograd.grad(
            ends, inputs, [self._weights(one) for one in ends], allow_unused=True
        )

    def _weights(self, result: Any) -> Any:
        """What the backward pass begins with: not all the same, or an error could cancel out.

        They are rounded to the dtype that is audited even where the result has a longer one, so
        that a float32 reference begins with what the device began with.
        """
        ramp = self._torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape)
        ramp = ramp.to(self.dtype.to_real())
        ramp = ramp * (1 + 0.5j) if result.dtype.is_complex else ramp
        return ramp.to(result.dtype).to(result.device)

    def _out(self, first: Any, args: Any, kwargs: Any, process: Any) -> Any:
        """What stands in tensors that the caller made."""
        del process
        torch = self._torch
        like = self.info.op(first, *args, **kwargs)
        one = isinstance(like, torch.Tensor)
        made = tuple(torch.zeros_like(each) for each in _leaves(torch, like))
        self.info.op(first, *args, **kwargs, out=made[0] if one else made)
        return made

    def _inplace(self, first: Any, args: Any, kwargs: Any, process: Any) -> Any:
        """The result, and what stands in the input afterwards."""
        del process
        return self.info.inplace_variant(first, *args, **kwargs), first


def _watched(torch: Any, call: _Call, given: Any, called: set[str]) -> tuple[list[Any], bool]:
    """Run an operator on the CPU and see which overloads it calls.

    Above the kernels the way is the same for every device, so these are the overloads that a TPU
    is asked for too.

    Returns:
        The results, and whether an overload draws random numbers: two seeds may give the same by
        chance. ``called`` gets the names.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    drawn: list[Any] = []

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.add(function.name().removeprefix("aten::"))
            if torch.Tag.nondeterministic_seeded in function.tags:
                drawn.append(function)
            return function(*args, **(kwargs or {}))

    try:
        with Watch():
            found = call.on("cpu", given, _SEEDS[1])
    except Exception:
        # a few entries make something of their own that cannot be watched
        found = call.on("cpu", given, _SEEDS[1])
    return found, bool(drawn)


def _leaves(torch: Any, value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for one in value:
            yield from _leaves(torch, one)
    elif isinstance(value, dict):
        for key in sorted(value):
            yield from _leaves(torch, value[key])
    else:
        yield value


def _agree(torch: Any, found: list[Any], expected: list[Any], *, values: bool) -> bool:
    """Whether two results have the same shapes and dtypes, and the same values if they matter."""
    try:
        _compare(torch, found, expected, values)
    except AssertionError:
        return False
    return True


def _near_float32(
    torch: Any, call: _Call, given: Any, found: list[Any], expected: list[Any]
) -> bool:
    """Whether a result in a short floating format is the float32 one within its tolerance.

    The CPU computes some operators in the short format itself, step by step; what agrees with the
    result of the same inputs in float32 is no difference to complain about.
    """
    short = (torch.bfloat16, torch.float16)
    if not _agree(torch, found, expected, values=False):
        return False

    def longer(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in short else value

    try:
        exact = call.on("cpu", _mapped(longer, given), _SEEDS[0])
    except Exception:
        return False
    if len(exact) != len(found):
        return False
    pairs = zip(found, exact, strict=True)
    back = [one.to(mine.dtype) if isinstance(one, torch.Tensor) else one for mine, one in pairs]
    return _agree(torch, found, back, values=True)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_mapped(change, one) for one in value)
    if isinstance(value, dict):
        return {key: _mapped(change, one) for key, one in value.items()}
    return change(value)


def _compare(torch: Any, found: list[Any], expected: list[Any], values: bool) -> None:
    """Compare results: their values, or only their shapes and dtypes.

    Raises:
        AssertionError: If they differ, values by more than their dtype's tolerance.
    """
    assert len(found) == len(expected), f"{len(found)} results, the CPU gives {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        if not isinstance(other, torch.Tensor):
            if values and isinstance(other, int | float | complex | bool):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
            else:
                assert type(one) is type(other), f"a result is {type(one)}, not {type(other)}"
            continue
        assert isinstance(one, torch.Tensor), f"a result is {type(one)}, the CPU gives a tensor"
        if values:
            relative, absolute = TOLERANCES.get(str(other.dtype).removeprefix("torch."), (0, 0))
            torch.testing.assert_close(
                one, other, rtol=relative, atol=absolute, equal_nan=True, check_stride=False
            )
        else:
            assert one.shape == other.shape, f"shape {one.shape}, the CPU gives {other.shape}"
            assert one.dtype == other.dtype, f"dtype {one.dtype}, the CPU gives {other.dtype}"
