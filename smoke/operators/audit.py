"""The audit's work: one OpInfo entry, one dtype, on the TPU and on the CPU, compared.

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
        and the dtypes that the entry takes on the CPU.
    """
    taken = census.take()
    import torch

    entries = [
        {"op": name, "dtypes": sorted(str(d).removeprefix("torch.") for d in _dtypes(info))}
        for name, info in _entries().items()
    ]
    versions: dict[str, str | None] = {"torch": torch.__version__}
    for package in ("torch_tpu", "libtpu"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {"versions": versions, "census": taken, "entries": entries}


def _dtypes(info: Any) -> Any:
    return info.supported_dtypes("cpu")


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
        A function that takes ``{"op": …, "dtype": …}`` and tells what happened: ``outcome``
        (``same``, ``differs``, ``raised`` or ``no reference``), ``message``, ``samples`` compared,
        ``values`` (whether values were compared, or only shapes), ``overloads`` that were called,
        ``seconds``, ``programs``.

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
            folder = Path(programs) / f"{task['op']}@{task['dtype']}".replace("/", "_")
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[_PROGRAMS] = str(folder)
        started = time.perf_counter()
        called: set[str] = set()
        dtype = getattr(torch, task["dtype"])
        found = _audit(torch, entries[task["op"]], dtype, samples, called)
        found["overloads"] = sorted(called)
        found["seconds"] = round(time.perf_counter() - started, 4)
        found["programs"] = (
            sorted(path.stem for path in folder.glob("[0-9a-f]*.mlir")) if folder else []
        )
        return found

    return handle


def _audit(torch: Any, info: Any, dtype: Any, samples: int, called: set[str]) -> dict[str, Any]:
    compared = 0
    values = True
    note = ""
    uninitialised = "empty" in info.name
    stream = _samples(torch, info, dtype)
    for _ in range(samples):
        try:
            sample = next(stream, None)
        except Exception as error:
            return _told("no reference", error, compared, values, "PyTorch makes no sample: ")
        if sample is None:
            break
        given = (sample.input, sample.args, sample.kwargs)
        try:
            expected = _call(torch, info, given, "cpu", _SEEDS[0])
            other, drawn = _watched(torch, info, given, called)
        except Exception as error:
            return _told("no reference", error, compared, values, "the CPU does not do it: ")
        fixed = not uninitialised and _equal(torch, expected, other)
        values = values and fixed
        try:
            found = _call(torch, info, given, "tpu", _SEEDS[0])
        except Exception as error:
            return _told("raised", error, compared, values)
        try:
            _compare(torch, found, expected, fixed)
        except AssertionError as error:
            if fixed and _near_float32(torch, info, given, found, expected):
                note = "the CPU's own result is further from its float32 result"
            elif fixed and drawn and _alike(torch, found, expected):
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
    if error is None:
        return {"outcome": outcome, "message": head, "samples": samples, "values": values}
    text = str(error).strip() or type(error).__name__
    kind = "" if isinstance(error, AssertionError) else type(error).__name__
    message = head + (f"{kind}: {text}" if kind else text)
    return {
        "outcome": outcome,
        "message": message[:_MESSAGE],
        "samples": samples,
        "values": values,
    }


def _samples(torch: Any, info: Any, dtype: Any) -> Iterator[Any]:
    torch.manual_seed(0)
    if importlib.util.find_spec("numpy") is not None:
        # some samples are drawn by numpy
        importlib.import_module("numpy").random.seed(0)
    yield from info.sample_inputs("cpu", dtype, requires_grad=False)


def _moved(torch: Any, value: Any, device: str) -> Any:
    """A copy of inputs on a device; arguments that name a device name that one."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().to(device)
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


def _call(torch: Any, info: Any, given: Any, device: str, seed: int) -> list[Any]:
    """Run an operator; its results one after the other, tensors on the CPU."""
    first, args, kwargs = given
    first = _moved(torch, first, device)
    others = "cpu" if info.name in _ON_THE_HOST else device
    args, kwargs = _moved(torch, (args, kwargs), others)
    torch.manual_seed(seed)
    with mock.patch.object(torch, "manual_seed"):
        # entries of random operators set a seed of their own, and would hide that they are random
        found = list(_leaves(torch, info.op(first, *args, **kwargs)))
    if device != "cpu":
        torch.accelerator.synchronize()
        strangers = {one.device.type for one in found if isinstance(one, torch.Tensor)} - {device}
        if strangers:
            raise RuntimeError(f"a result is on {strangers.pop()}, not on {device}")
    return [one.detach().cpu() if isinstance(one, torch.Tensor) else one for one in found]


def _watched(torch: Any, info: Any, given: Any, called: set[str]) -> tuple[list[Any], bool]:
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
            found = _call(torch, info, given, "cpu", _SEEDS[1])
    except Exception:
        # a few entries make something of their own that cannot be watched
        found = _call(torch, info, given, "cpu", _SEEDS[1])
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


def _equal(torch: Any, first: list[Any], second: list[Any]) -> bool:
    """Whether two results are the same within the tolerance."""
    try:
        _compare(torch, second, first, values=True)
    except AssertionError:
        return False
    return True


def _alike(torch: Any, found: list[Any], expected: list[Any]) -> bool:
    """Whether two results have the same shapes and dtypes."""
    try:
        _compare(torch, found, expected, values=False)
    except AssertionError:
        return False
    return True


def _near_float32(torch: Any, info: Any, given: Any, found: list[Any], expected: list[Any]) -> bool:
    """Whether a result in a short floating format is the float32 one within its tolerance.

    The CPU computes some operators in the short format itself, step by step; what is nearer to the
    result with float32 inputs is no difference to complain about.
    """
    short = (torch.bfloat16, torch.float16)
    if not _alike(torch, found, expected):
        return False

    def longer(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in short else value

    try:
        exact = _call(torch, info, _mapped(longer, given), "cpu", _SEEDS[0])
    except Exception:
        return False
    if len(exact) != len(found):
        return False
    pairs = zip(found, exact, strict=True)
    back = [one.to(mine.dtype) if isinstance(one, torch.Tensor) else one for mine, one in pairs]
    return _equal(torch, back, found)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_mapped(change, one) for one in value)
    if isinstance(value, dict):
        return {key: _mapped(change, one) for key, one in value.items()}
    return change(value)


def _compare(torch: Any, found: list[Any], expected: list[Any], values: bool) -> None:
    """Compare results.

    Raises:
        AssertionError: If they differ by more than their dtype's tolerance.
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
