"""What both copies of XLA say of themselves: torch_tpu's own, and the one inside libtpu.

Call these through :mod:`smoke.isolate`: they load libraries that end the process when unhappy.

torch_tpu writes programs as StableHLO of a version that both sides know: its XLA's default version,
or an older one if the plugin reads nothing newer. So what the plugin reads and what torch_tpu can
write must overlap.
"""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WRITES = "_ZN3xla26GetDefaultStablehloVersionB5cxx11Ev"
_NEWEST = "_ZN4mlir9stablehlo17getCurrentVersionB5cxx11Ev"
_OLDEST = "_ZN4mlir9stablehlo17getMinimumVersionB5cxx11Ev"
_FLAGS = "_ZN3xla24GetDebugOptionsFromFlagsEv"
"""``xla::GetDebugOptionsFromFlags``: reads XLA_FLAGS, as every compilation does first."""

_OPTIONS_BYTES = 1 << 16


class _Text(ctypes.Structure):
    """A ``std::string`` of libstdc++."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("room", ctypes.c_char * 16),
    )


def _library() -> ctypes.CDLL:
    # importing libtpu sets TPU_LIBRARY_PATH, without which loading this library ends the process
    import libtpu  # noqa: F401

    spec = importlib.util.find_spec("torch_tpu")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch_tpu is not installed")
    return ctypes.CDLL(str(Path(spec.origin).parent / "csrc" / "common" / "libxla_base.so"))


def _function(library: ctypes.CDLL, name: str) -> Any:
    try:
        function = getattr(library, name)
    except AttributeError as error:
        raise RuntimeError(f"libxla_base.so does not export {name}") from error
    # a C++ function that returns an object takes a pointer to room for it
    function.argtypes = [ctypes.c_void_p]
    function.restype = ctypes.c_void_p
    return function


def measure_framework() -> dict[str, str]:
    """The StableHLO versions of torch_tpu's own XLA.

    Returns:
        ``writes``, what it writes if the plugin takes it; ``oldest``, how far down it can go; and
        ``newest``, the version it was built with.

    Raises:
        RuntimeError: If torch_tpu is missing or its library exports something else.
    """
    library = _library()
    found = {}
    for key, name in (("writes", _WRITES), ("oldest", _OLDEST), ("newest", _NEWEST)):
        text = _Text()
        _function(library, name)(ctypes.addressof(text))
        found[key] = ctypes.string_at(text.start, text.length).decode("ascii")
    return found


def measure_plugin() -> dict[str, str]:
    """The StableHLO versions that libtpu reads, as its PJRT attributes say them.

    Returns:
        ``oldest`` and ``newest``.
    """
    import libtpu
    import pypjrt

    told = pypjrt.Plugin(libtpu.get_library_path()).attributes
    named = {"oldest": "stablehlo_minimum_version", "newest": "stablehlo_current_version"}
    return {key: ".".join(str(part) for part in told[name]) for key, name in named.items()}


def read_flags() -> bool:
    """Have torch_tpu's XLA read XLA_FLAGS; it ends the process at a flag that it does not know."""
    room = ctypes.create_string_buffer(_OPTIONS_BYTES)
    _function(_library(), _FLAGS)(ctypes.addressof(room))
    return True


def read_arguments() -> bool:
    """Have libtpu read LIBTPU_INIT_ARGS; it ends the process at a flag that it does not know."""
    import libtpu
    import pypjrt

    pypjrt.Plugin(libtpu.get_library_path()).initialize()
    return True


@dataclass(frozen=True)
class Meeting:
    """Whether a writer and a reader of StableHLO have a version in common.

    Attributes:
        version: The version that programs are then written in, None if there is none.
        why: One sentence.
    """

    version: str | None
    why: str


def meet(framework: dict[str, str], plugin: dict[str, str]) -> Meeting:
    """Find the StableHLO version that torch_tpu writes for a plugin.

    Args:
        framework: What :func:`measure_framework` gives.
        plugin: What :func:`measure_plugin` gives.
    """
    words = (
        f"torch_tpu writes StableHLO {framework['writes']} or older, down to "
        f"{framework['oldest']}; libtpu reads {plugin['oldest']} to {plugin['newest']}"
    )
    version = min(framework["writes"], plugin["newest"], key=_order)
    oldest = max(framework["oldest"], plugin["oldest"], key=_order)
    if _order(version) < _order(oldest):
        return Meeting(None, f"{words}: they have no version in common")
    return Meeting(version, words)


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
