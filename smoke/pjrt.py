"""PJRT plugins: their API versions, and libtpu as a compiler that needs no TPU.

The functions whose names say *measure* or *compile* load plugins, which end the process when they
are unhappy: call them through :mod:`smoke.isolate`.

Facts: the head of ``PJRT_Api`` is ``struct_size``, ``extension_start`` and a ``PJRT_Api_Version``
of the same two fields and two ints, in every version of ``pjrt_c_api.h``. ``PJRT_Compile`` takes a
topology and no device.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEFAULT_TARGETS = ("v6e:2x2", "v5e:2x2")
"""Topologies compiled for when none is named: one host of four chips of each generation."""

ALL_TARGETS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
"""What ``--target all`` means: one host of four chips of every generation TorchTPU supports."""


def targets(named: Sequence[str] | None) -> tuple[str, ...]:
    """The topologies that a person's words mean.

    Args:
        named: Topologies, or ``all``; the default ones if none is named.
    """
    words = named or DEFAULT_TARGETS
    each = [one for word in words for one in (ALL_TARGETS if word == "all" else (word,))]
    return tuple(dict.fromkeys(each))


QUIET = {
    # without the first, libtpu asks the metadata server of a cloud VM for minutes
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    # a lock file in the common temporary folder otherwise lets one process in at a time
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment in which libtpu compiles without a TPU, quickly and quietly."""

_CREATE_API = (
    "_ZN4pjrt13CreatePjrtApiEPFP10PJRT_ErrorP23PJRT_Client_Create_ArgsEPFS1_P31PJRT_ExecuteContext"
    "_Create_ArgsEPFS1_P36PJRT_TopologyDescription_Create_ArgsEPFS1_P27PJRT_Plugin_Initialize_Args"
    "EP19PJRT_Extension_BasePFS1_P27PJRT_Plugin_Attributes_ArgsE"
)
"""``pjrt::CreatePjrtApi``: fills a table with the version that XLA was compiled with."""


class _ApiHead(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("version_struct_size", ctypes.c_size_t),
        ("version_extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


@dataclass(frozen=True)
class Judgement:
    """What the table says about a pair.

    Attributes:
        works: Whether the pair is known to work.
        why: The table's words, or why there are none.
    """

    works: bool
    why: str


def judge(framework: str, plugin: str, table: Path = HERE / "pjrt_pairs.toml") -> Judgement:
    """Judge a pair of PJRT API versions by the table.

    Args:
        framework: Version that torch_tpu was built with, such as ``0.116``.
        plugin: Version that the plugin reports.
        table: The table.
    """
    if framework.partition(".")[0] != plugin.partition(".")[0]:
        return Judgement(False, "the major versions differ, so the tables have other layouts")
    pairs = tomllib.loads(table.read_text(encoding="utf-8"))["pair"]
    for pair in pairs:
        if (pair["framework"], pair["plugin"]) == (framework, plugin):
            return Judgement(bool(pair["works"]), str(pair["why"]))
    return Judgement(False, f"nobody has tried this pair yet: it is not in {table.name}")


def _version(head: _ApiHead) -> str:
    if head.struct_size < ctypes.sizeof(_ApiHead) or head.major < 0 or head.minor <= 0:
        raise RuntimeError("the head of PJRT_Api makes no sense")
    return f"{head.major}.{head.minor}"


def measure_plugin(path: str | None = None) -> dict[str, Any]:
    """The PJRT API version that a plugin reports.

    Args:
        path: The plugin; libtpu's own library if not given.

    Returns:
        ``path``, ``version`` and ``table_bytes``.
    """
    if path is None:
        import libtpu  # the wheel's module knows where its library is; importing it loads nothing

        path = libtpu.get_library_path()
    library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    library.GetPjrtApi.restype = ctypes.POINTER(_ApiHead)
    head = library.GetPjrtApi().contents
    return {"path": path, "version": _version(head), "table_bytes": head.struct_size}


def stablehlo_version() -> str:
    """The StableHLO version that libtpu reads, such as ``1.24.0``."""
    import libtpu
    import pypjrt

    told = pypjrt.Plugin(libtpu.get_library_path()).attributes
    return ".".join(str(part) for part in told["stablehlo_current_version"])


def measure_framework() -> dict[str, Any]:
    """The PJRT API version that torch_tpu's own XLA was built with.

    It stands in no file of the wheel: only the code that fills a function table knows it, so that
    code is asked for a table. The library finds torch's own by its run path, and loads the plugin
    that ``TPU_LIBRARY_PATH`` names, which importing libtpu sets; without one it ends the process.

    Returns:
        ``version`` and ``table_bytes``.

    Raises:
        RuntimeError: If the library does not export that function.
    """
    import libtpu  # noqa: F401

    spec = importlib.util.find_spec("torch_tpu")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch_tpu is not installed")
    path = Path(spec.origin).parent / "csrc" / "common" / "libxla_base.so"
    library = ctypes.CDLL(str(path))
    try:
        create = getattr(library, _CREATE_API)
    except AttributeError as error:
        raise RuntimeError(f"{path.name} does not export pjrt::CreatePjrtApi") from error
    # a C++ function that returns a large structure takes a pointer to it before its arguments
    room = ctypes.create_string_buffer(1 << 16)
    create.argtypes = [ctypes.c_void_p] * 7
    create.restype = ctypes.c_void_p
    create(ctypes.addressof(room), None, None, None, None, None, None)
    head = _ApiHead.from_buffer(room)
    return {"version": _version(head), "table_bytes": head.struct_size}


def compile_program(program: str, target: str) -> dict[str, Any]:
    """Compile a program of the corpus with libtpu for a topology, without a device.

    Args:
        program: Its name (see :mod:`smoke.programs`).
        target: A topology, such as ``v6e:2x2``.

    Returns:
        See :func:`compile_text`.
    """
    from smoke import programs

    one = programs.named(program)
    return compile_text(one.text(), target, replicas=one.replicas, partitions=one.partitions)


def compile_file(path: str, target: str) -> dict[str, Any]:
    """Compile a StableHLO file for one chip of a topology.

    Args:
        path: The file.
        target: A topology.

    Returns:
        See :func:`compile_text`.
    """
    return compile_text(Path(path).read_bytes(), target)


def compile_text(
    text: bytes, target: str, *, replicas: int = 1, partitions: int = 1
) -> dict[str, Any]:
    """Compile StableHLO, as text or MLIR byte code, for a topology.

    Args:
        text: The program.
        target: A topology.
        replicas: Chips that each run the whole program.
        partitions: Chips that the program is written for as one of them (SPMD).

    Returns:
        ``stage`` (``topology``, ``compile`` or ``done``), ``error`` with ``kind`` when the stage
        failed, and figures: seconds, bytes and operations.
    """
    import libtpu
    import pypjrt

    started = time.perf_counter()
    plugin = pypjrt.Plugin(libtpu.get_library_path())
    plugin.initialize()
    found: dict[str, Any] = {"load_seconds": time.perf_counter() - started}
    try:
        topology = pypjrt.Topology.create(plugin, target)
        chips = topology.device_descriptions()
    except pypjrt.errors.PjrtError as error:
        return found | {"stage": "topology", "kind": type(error).__name__, "error": str(error)}
    found |= {"chips": len(chips), "chip": chips[0]["kind"]}
    found["memory_of_chip_bytes"] = chips[0]["attributes"].get("device_memory_bytes_limit")
    code = ctypes.create_string_buffer(text, len(text))
    kind = ctypes.create_string_buffer(b"mlir", 4)
    encoded = pypjrt.CompileOptions(
        num_replicas=replicas, num_partitions=partitions, use_spmd_partitioning=partitions > 1
    ).encode(plugin.abi)
    options = ctypes.create_string_buffer(encoded, len(encoded))
    source = plugin.args(
        "PJRT_Program",
        code=ctypes.addressof(code),
        code_size=len(text),
        format=ctypes.addressof(kind),
        format_size=4,
    )
    asked = plugin.args(
        "PJRT_Compile_Args",
        topology=topology._ptr,
        program=ctypes.addressof(source),
        compile_options=ctypes.addressof(options),
        compile_options_size=len(encoded),
    )
    started = time.perf_counter()
    try:
        plugin.call("PJRT_Compile", asked)
    except pypjrt.errors.PjrtError as error:
        found["compile_seconds"] = time.perf_counter() - started
        return found | {"stage": "compile", "kind": type(error).__name__, "error": str(error)}
    found["compile_seconds"] = time.perf_counter() - started
    return found | {"stage": "done"} | _figures(plugin, int(asked.executable))


def _figures(plugin: Any, executable: int) -> dict[str, Any]:
    """Code size, memory and operations of a compiled program."""
    from pypjrt._loader import read_named_values

    size = plugin.args("PJRT_Executable_SizeOfGeneratedCodeInBytes_Args", executable=executable)
    plugin.call("PJRT_Executable_SizeOfGeneratedCodeInBytes", size)
    memory = plugin.args("PJRT_Executable_GetCompiledMemoryStats_Args", executable=executable)
    plugin.call("PJRT_Executable_GetCompiledMemoryStats", memory)
    cost = plugin.args("PJRT_Executable_GetCostAnalysis_Args", executable=executable)
    plugin.call("PJRT_Executable_GetCostAnalysis", cost)
    analysis = read_named_values(plugin.abi, cost.properties, cost.num_properties)
    return {
        "code_bytes": int(size.size_in_bytes),
        "argument_bytes": int(memory.argument_size_in_bytes),
        "output_bytes": int(memory.output_size_in_bytes),
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "peak_device_bytes": int(memory.peak_memory_in_bytes),
        "flops": analysis.get("flops"),
        "own_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
