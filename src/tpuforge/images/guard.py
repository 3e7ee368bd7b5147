"""What keeps CUDA out of an image later on: the settings of pip and uv that it is baked with.

The main index's torch is a CUDA build. A constraint holds torch and its kin to the locked CPU
builds, and the index of those builds is named, so that a fresh environment in the image can have
them as well. Both stand in files of the system, for each tool, beside the variables that name the
constraint: pip's ``--isolated`` and uv's ``--no-config`` turn off one of the two, never both.
"""

from __future__ import annotations

from tpuforge.pins import Pins

CONSTRAINTS = "/opt/tpuforge/constraints.txt"
"""The constraint file in an image, for pip and uv alike."""


def files(torch: str, pins: Pins) -> dict[str, str]:
    """The files of the guard.

    Args:
        torch: The version that the image holds, such as ``2.13.0+cpu``.
        pins: The pins: further CPU builds, and their index.

    Returns:
        The text of each file, by its absolute path in the image.
    """
    held = {name: f"{one.version}+{one.local}" for name, one in pins.cpu_builds.items()}
    lines = [f"{name}=={version}" for name, version in (held | {"torch": torch}).items()]
    constraints = "".join(f"{line}\n" for line in lines)
    quoted = ", ".join(f'"{line}"' for line in lines)
    return {
        CONSTRAINTS: (
            "# The CPU builds, for ever: the main index serves CUDA builds of these numbers.\n"
            f"{constraints}"
        ),
        "/etc/pip.conf": (
            "# A later installation must not bring a CUDA build of torch.\n"
            "[global]\n"
            f"constraint = {CONSTRAINTS}\n"
            f"extra-index-url = {pins.torch.index}\n"
            "disable-pip-version-check = true\n"
        ),
        # a constraint file cannot be named here, so uv is told the same versions once more; the
        # backend stands for the index of the CPU builds, and is asked for torch and its kin alone
        "/etc/uv/uv.toml": (
            "# A later installation must not bring a CUDA build of torch.\n"
            f"constraint-dependencies = [{quoted}]\n"
            "\n"
            "[pip]\n"
            f'torch-backend = "{pins.torch.local}"\n'
        ),
    }
