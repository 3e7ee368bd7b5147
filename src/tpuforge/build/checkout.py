"""The source of TorchTPU that a wheel is built from."""

from __future__ import annotations

from pathlib import Path

from tpuforge.errors import ForgeError
from tpuforge.pins import Pins

TARGET = "//ci/wheel:torch_tpu_wheel"
"""The wheel's target in the source of TorchTPU."""


def local(given: str | None, pins: Pins) -> Path:
    """A source folder that the user named, once it looks like one.

    Args:
        given: The folder, or None.
        pins: What names the upstream.

    Raises:
        ForgeError: If there is none, or it is not a checkout of TorchTPU.
    """
    clone = f"git clone --branch {pins.upstream.ref} {pins.upstream.repository} SOURCE"
    mend = f"{clone}, then: forge build_wheel --source SOURCE"
    if given is None:
        raise ForgeError(
            "no source folder was given",
            expected="--source DIR, a checkout of TorchTPU (--dry-run prints the line alone)",
            mend=mend,
        )
    source = Path(given).expanduser().absolute()
    if not source.is_dir():
        raise ForgeError(f"{source}: no such folder", expected="a checkout of TorchTPU", mend=mend)
    marks = ("MODULE.bazel", "WORKSPACE.bazel", "WORKSPACE")
    package = TARGET.removeprefix("//").partition(":")[0]
    if not any((source / mark).is_file() for mark in marks) or not any(
        (source / package / name).is_file() for name in ("BUILD.bazel", "BUILD")
    ):
        raise ForgeError(
            f"{source} is not a checkout of TorchTPU",
            expected=f"a Bazel workspace with the target {TARGET}",
            mend=mend,
        )
    return source
