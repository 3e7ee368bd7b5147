"""The corpus of the compile tier: programs, what is expected of each, and figures to hold them to.

``*.mlir.xz`` were lowered by torch_tpu from the modules in ``models.py`` (``make.py`` makes them
again; ``corpus.toml`` says by which versions); ``*.mlir`` were written by hand. ``baseline.toml``
has code size, peak memory and operations of each program for each target, by version of libtpu.
"""

from __future__ import annotations

import hashlib
import lzma
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
JUDGED = {"code_bytes": 0.10, "peak_device_bytes": 0.05, "flops": 0.0}
"""Figures that are held to the baseline, and by what share of it each may differ."""

_TOPOLOGIES = {
    4: {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "tpu7x": "1x2x1"},
    256: {"v4": "4x8x8", "v5e": "16x16", "v5p": "4x8x8", "v6e": "16x16", "tpu7x": "4x4x8"},
}
"""Topologies with so many devices, by generation; a chip of tpu7x counts as two devices."""


@dataclass(frozen=True)
class Program:
    """One program of the corpus.

    Attributes:
        name: Its name, as in ``compile.NAME``.
        what: What it is, for people.
        slow: Whether it belongs to the full corpus only.
        replicas: Devices that each run the whole program.
        partitions: Devices that share one program (SPMD).
        refused: Words of the error with which it must be refused; None if it must compile.
        kind: Class of that error.
        flops: The floating point operations it has by its shapes, where libtpu counts as many.
    """

    name: str
    what: str
    slow: bool = False
    replicas: int = 1
    partitions: int = 1
    refused: str | None = None
    kind: str = ""
    flops: float | None = None

    @property
    def devices(self) -> int:
        """How many devices it is for."""
        return self.replicas * self.partitions

    def topology(self, target: str) -> str:
        """The topology to compile it for.

        Args:
            target: The one that was asked for; a program for several devices gets one of its
                generation that has as many.
        """
        if self.devices == 1:
            return target
        generation = target.partition(":")[0]
        shape = _TOPOLOGIES[self.devices].get(generation)
        return f"{generation}:{shape}" if shape else target

    def text(self) -> bytes:
        """The program, unpacked and checked.

        Raises:
            ValueError: If it is not what the corpus was made with.
        """
        plain = HERE / f"{self.name}.mlir"
        if plain.is_file():
            return plain.read_bytes()
        text = lzma.decompress((HERE / f"{self.name}.mlir.xz").read_bytes())
        if hashlib.sha256(text).hexdigest() != manifest()["programs"][self.name]["sha256"]:
            raise ValueError(f"{self.name}.mlir.xz is not the program that corpus.toml names")
        return text


_PROGRAMS = (
    Program("small", "the 2x2 matrix product of TorchTPU's README", flops=2.0 * 2**3),
    Program("large", "an 8192x8192 bfloat16 matrix product", flops=2.0 * 8192**3),
    Program("embedding-forward", "an embedding and a cross entropy over it, forward"),
    Program("embedding-backward", "the same embedding and cross entropy, backward"),
    Program("collectives-4", "five collectives among 4 devices", replicas=4),
    Program("collectives-256", "a matrix product and collectives among 256 devices", replicas=256),
    Program("sharded-256", "a matrix product divided by it over 256 devices", partitions=256),
    Program("llama-forward", "a Llama-like layer, forward, with TorchTPU's attention", slow=True),
    Program("llama-backward", "a Llama-like layer, backward", slow=True),
    Program("qwen-forward", "a Qwen-like layer, forward, with TorchTPU's attention", slow=True),
    Program("qwen-backward", "a Qwen-like layer, backward", slow=True),
    Program("conv-forward", "a residual block of two convolutions, forward", slow=True),
    Program("conv-backward", "a residual block of two convolutions, backward", slow=True),
    Program("experts-forward", "a mixture of experts, gather and scatter, forward", slow=True),
    Program("experts-backward", "a mixture of experts, backward", slow=True),
    Program(
        "too-large",
        "a program too large for the chip's memory",
        refused="HBM",
        kind="ResourceExhausted",
    ),
    Program("malformed", "a program whose shapes do not fit", refused="contracting dimension"),
    Program("unknown-operation", "a program with an unknown operation", refused="is unknown"),
)


def corpus() -> tuple[Program, ...]:
    """All programs."""
    return _PROGRAMS


def named(name: str) -> Program:
    """One program.

    Args:
        name: Its name.

    Raises:
        KeyError: If there is none.
    """
    for one in _PROGRAMS:
        if one.name == name:
            return one
    raise KeyError(name)


def manifest() -> dict[str, Any]:
    """By what the stored programs were made, and the digest of each."""
    return tomllib.loads((HERE / "corpus.toml").read_text(encoding="utf-8"))


Baseline = dict[str, dict[str, dict[str, dict[str, int]]]]
"""libtpu's version, target, program, figure."""


def read_baseline(path: Path = HERE / "baseline.toml") -> Baseline:
    """The figures that were written down.

    Args:
        path: The file; empty if there is none.
    """
    if not path.is_file():
        return {}
    figures: Baseline = tomllib.loads(path.read_text(encoding="utf-8")).get("libtpu", {})
    return figures


def write_baseline(baseline: Baseline) -> str:
    """The same as a text, in a stable order.

    Args:
        baseline: The figures.
    """
    lines = [
        "# Figures of the corpus by version of libtpu, made by: python -m smoke.programs.make",
        "# --baseline. Bytes, and floating point operations.",
    ]
    for version, targets in sorted(baseline.items()):
        for target, found in sorted(targets.items()):
            lines += ["", f'[libtpu."{version}"."{target}"]']
            for name, figures in sorted(found.items()):
                inner = ", ".join(f"{key} = {value}" for key, value in figures.items())
                lines.append(f'"{name}" = {{ {inner} }}')
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Comparison:
    """Figures of a compiled program beside the baseline.

    Attributes:
        judged: Whether there was something to compare with.
        wrong: What is outside its band, one sentence each.
        why: Why nothing could be compared, and what to do.
    """

    judged: bool
    wrong: tuple[str, ...] = ()
    why: str = ""


def compare(
    name: str, target: str, version: str, found: dict[str, Any], baseline: Baseline
) -> Comparison:
    """Hold figures to the baseline.

    Args:
        name: The program.
        target: The target that was asked for.
        version: libtpu's version.
        found: What the compiler returned.
        baseline: The figures written down.
    """
    expected = baseline.get(version, {}).get(target, {}).get(name)
    if expected is None:
        where = f"libtpu {version}" if version not in baseline else f"{name} for {target}"
        return Comparison(False, why=f"recorded, not judged: the baseline has no {where}")
    wrong = []
    for figure, was in expected.items():
        band, now = JUDGED[figure], int(found[figure])
        if abs(now - was) > band * was:
            allowed = f"within {band:.0%}" if band else "exactly"
            wrong.append(f"{figure} is {now}, the baseline has {was} ({allowed})")
    return Comparison(True, tuple(wrong))
