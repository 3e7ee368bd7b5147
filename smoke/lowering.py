"""Lower PyTorch with the real torch_tpu to the programs that a TPU would be given, and run none.

Needs a simulated chip (or a TPU): torch_tpu lowers only for a device that it has found. The tensors
are PyTorch's fake ones on device ``tpu``: they have shapes and no memory, so a model of any size is
lowered in the memory of its graph. ``torch.compile`` with torch_tpu's own backend does everything
that it does on a TPU (its graph passes, its partition into forward and backward, its kernels); only
what would be executed is answered with more fake tensors.

What is private in torch_tpu 0.2.0 and used here, because nothing public hands out a program:
``compile.compiler.StaticCompiler._compile`` (a graph on its way to a program),
``compile.torch_tpu_compiled_executable.TorchTpuCompiledExecutable`` (a program that can be called)
and ``export.export.tpu_torch_compile.traverse_and_compile`` (lowering, then compiling). Without one
of them :func:`capture` raises :class:`NoLoweringError`. The programs themselves come from the
simulator's plugin, which keeps a copy of each one, written for the StableHLO version of libtpu.

Call these functions through :mod:`smoke.isolate`: torch_tpu is patched for good.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

KEPT = "TPUFORGE_PROGRAMS_DIR"
"""Variable that names the folder in which the simulator's plugin keeps every program."""

SPOKEN = "TPUFORGE_LOWER_FOR"
"""Variable with the StableHLO version that the simulator's plugin says it reads."""

_COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")


class NoLoweringError(RuntimeError):
    """This torch_tpu, or this machine, cannot lower a model without a TPU."""


@dataclass
class Program:
    """One program that torch_tpu made.

    Attributes:
        kind: ``forward`` or ``backward``.
        path: The StableHLO (MLIR byte code), or None if lowering refused the graph.
        operators: Calls of each operator in the graph that it was made from.
        seconds: Time of the lowering, without the simulator's own compilation where that is apart.
        refused: Why lowering refused the graph; None if it did not.
        on_tpu: Whether any tensor of the graph is on device ``tpu``.
    """

    kind: str
    path: Path | None
    operators: Counter[str]
    seconds: float
    refused: str | None = None
    on_tpu: bool = True


@dataclass
class Captured:
    """Everything that was lowered while capturing.

    Attributes:
        programs: In the order in which torch_tpu made them.
        eager: Calls of each operator outside of any compiled graph, on device ``tpu``.
    """

    programs: list[Program] = field(default_factory=list)
    eager: Counter[str] = field(default_factory=Counter)


class _NothingToRun:
    """Stands for the executable of a program, which nobody will run and no cache will keep."""


def supported(name: str) -> bool:
    """Whether an operator has a kernel for a TPU, or is made of operators.

    The dispatcher's own tables, as torch_tpu filled them: a kernel for its key (PrivateUse1) or a
    composite one. Without either, a call ends in torch_tpu's fallback, which raises.

    Args:
        name: Such as ``aten::add.Tensor``.
    """
    import torch

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if not torch._C._dispatch_has_kernel(name):
        return False
    if has(name, "PrivateUse1") or any(has(name, key) for key in _COMPOSITE):
        return True
    if not has(name, "CompositeExplicitAutogradNonFunctional"):
        return False
    # one that only calls the kernel which writes into given results
    space, _, rest = name.partition("::")
    packet = getattr(getattr(torch.ops, space), rest.partition(".")[0])
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    writing = (one for one in overloads if any(arg.is_out for arg in one._schema.arguments))
    return any(has(name_of(one), "PrivateUse1") for one in writing)


def name_of(target: Any) -> str | None:
    """The dispatcher's name of what a graph node or a call calls; None for anything else.

    Args:
        target: An operator overload.
    """
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    overload = getattr(schema, "overload_name", "")
    return f"{schema.name}.{overload}" if overload else str(schema.name)


def _operators(graph_module: Any) -> Counter[str]:
    calls = (node for node in graph_module.graph.nodes if node.op == "call_function")
    return Counter(name for node in calls if (name := name_of(node.target)) is not None)


@contextlib.contextmanager
def fake() -> Iterator[None]:
    """Make every new tensor one that has a shape and no memory.

    Meanwhile ``module.to`` replaces parameters: PyTorch's own would exchange the insides of fake
    tensors, which it refuses.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    original = torch.nn.Module._apply
    moved: dict[tuple[int, int], tuple[Any, ...]] = {}

    def apply(module: Any, function: Any, recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(function)
        for store in (module._parameters, module._buffers):
            for name, tensor in list(store.items()):
                if tensor is None:
                    continue
                key = (id(tensor), id(function))
                if key not in moved:
                    with torch.no_grad():
                        made = function(tensor)
                    if isinstance(tensor, torch.nn.Parameter) and made is not tensor:
                        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
                    # both are kept, so that their identities are not given to others
                    moved[key] = (made, tensor, function)
                store[name] = moved[key][0]
        return module

    torch.nn.Module._apply = apply
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.nn.Module._apply = original


@contextlib.contextmanager
def capture(folder: Path) -> Iterator[Captured]:
    """Lower what is compiled within, keep the programs, and execute none of it.

    Args:
        folder: Where the programs go, as ``<number>-<kind>.mlir``. The simulator's plugin must
            have been told, by :data:`KEPT` and :data:`SPOKEN`, to keep programs and run none.

    Yields:
        What has been lowered so far.

    Raises:
        NoLoweringError: If this torch_tpu has no such inner parts, or no chip was found.
    """
    import torch

    kept = os.environ.get(KEPT)
    if not (kept and os.environ.get(SPOKEN)):
        raise NoLoweringError(f"{KEPT} and {SPOKEN} are not set")
    if not torch.accelerator.is_available():
        raise NoLoweringError("torch found no TPU, not even a simulated one")
    try:
        from torch_tpu._internal.compile.compiler import StaticCompiler
        from torch_tpu._internal.compile.torch_tpu_compiled_executable import (
            TorchTpuCompiledExecutable,
        )
        from torch_tpu._internal.export.export import tpu_torch_compile

        lower, compile_graph = tpu_torch_compile.traverse_and_compile, StaticCompiler._compile
        # positions in the source would put this machine's paths into every program
        tpu_torch_compile.push_enable_tracebacks(False)
    except (ImportError, AttributeError) as error:
        raise NoLoweringError(f"this torch_tpu lowers in another way: {error}") from error
    captured = Captured()
    source = Path(kept)
    source.mkdir(exist_ok=True)

    def lowered(*arguments: Any, **named: Any) -> Any:
        before = set(source.glob("*.mlir"))
        try:
            lower(*arguments, **named)
        except RuntimeError:
            # a program that was handed to the plugin is lowered; the plugin refuses each on purpose
            if not set(source.glob("*.mlir")) - before:
                raise
        return SimpleNamespace(module=None, executable=_NothingToRun())

    def compiled(compiler: Any, graph_module: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        forward = rest[0] if rest else named.get("is_fwd", True)
        program = Program("forward" if forward else "backward", None, _operators(graph_module), 0.0)
        program.on_tpu = _any_on_tpu(torch, graph_module)
        captured.programs.append(program)
        for old in source.iterdir():
            old.unlink()
        started = time.perf_counter()
        try:
            artifact = compile_graph(compiler, graph_module, inputs, *rest, **named)
        except Exception as error:
            lines = str(error).strip().splitlines()
            program.refused = lines[0][:300] if lines else type(error).__name__
            raise
        finally:
            program.seconds = time.perf_counter() - started
        made = sorted(source.glob("*.mlir"))
        if not made:
            # a graph without anything to compute makes no program
            captured.programs.remove(program)
        else:
            target = folder / f"{len(captured.programs):03}-{program.kind}.mlir"
            program.path = target
            shutil.move(made[-1], target)
        artifact.tpuforge_outputs = _outputs(torch, graph_module)
        return artifact

    def answered(artifact: Any, *arguments: Any, **named: Any) -> Any:
        del arguments, named
        return [_like(torch, one) for one in artifact.tpuforge_outputs]

    # an artifact that comes out of a cache was not lowered here
    torch._functorch.config.enable_autograd_cache = False
    tpu_torch_compile.traverse_and_compile = lowered
    StaticCompiler._compile = compiled
    TorchTpuCompiledExecutable.__call__ = answered
    try:
        with _eager(captured):
            yield captured
    finally:
        tpu_torch_compile.traverse_and_compile = lower
        StaticCompiler._compile = compile_graph


def _any_on_tpu(torch: Any, graph_module: Any) -> bool:
    values = torch.utils._pytree.tree_leaves(
        [node.meta.get("val") for node in graph_module.graph.nodes]
    )
    return any(isinstance(one, torch.Tensor) and one.device.type == "tpu" for one in values)


def _outputs(torch: Any, graph_module: Any) -> list[Any]:
    (output,) = (node for node in graph_module.graph.nodes if node.op == "output")
    leaves = torch.utils._pytree.tree_leaves(output.args[0])
    return [one.meta.get("val") if isinstance(one, torch.fx.Node) else one for one in leaves]


def _like(torch: Any, value: Any) -> Any:
    """A new tensor of the same shape: a fake one where fake ones are made."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


@contextlib.contextmanager
def _eager(captured: Captured) -> Iterator[None]:
    """Count the operators that are called outside of compiled graphs."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            # or Dynamo would leave every graph alone
            return True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            del types
            given = torch.utils._pytree.tree_leaves((args, kwargs or {}))
            on_tpu = any(isinstance(x, torch.Tensor) and x.device.type == "tpu" for x in given)
            if on_tpu and (name := name_of(func)) is not None and func.namespace != "prim":
                captured.eager[name] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        yield


def on_tpu(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """The same module or nested inputs with fake tensors on device ``tpu``.

    Parameters and buffers of a module are replaced in it, shared ones by one.

    Args:
        value: A module, a tensor, or lists, tuples and dictionaries of tensors.
        seen: What was replaced before, by identity.
    """
    import torch

    known: dict[int, Any] = {} if seen is None else seen

    def fake(tensor: Any) -> Any:
        if id(tensor) not in known:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="tpu"
            )
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                made.requires_grad_()
            # the original is kept, so that its identity is not given to another
            known[id(tensor)] = (made, tensor)
        return known[id(tensor)][0]

    if isinstance(value, torch.nn.Module):
        for module in value.modules():
            for store in (module._parameters, module._buffers):
                for name, tensor in list(store.items()):
                    if tensor is not None:
                        store[name] = fake(tensor)
        return value
    return torch.utils._pytree.tree_map_only(torch.Tensor, fake, value)


def lower_named(name: str, folder: str) -> list[dict[str, Any]]:
    """Lower one model of the corpus.

    Args:
        name: A key of ``smoke.programs.models.CORPUS``.
        folder: Where the programs go.

    Returns:
        Kind, path and number of operator calls of each program.
    """
    import torch

    from smoke.programs import models

    build, trained = models.CORPUS[name]
    with fake():
        module, inputs = build()
        module, inputs = on_tpu(module), on_tpu(inputs)
        with capture(Path(folder)) as captured, torch.set_grad_enabled(trained):
            result = torch.compile(module, backend="tpu", fullgraph=True)(*inputs)
            if trained:
                result.sum().backward()
    return [
        {"kind": one.kind, "path": str(one.path), "operators": sum(one.operators.values())}
        for one in captured.programs
    ]
