"""The image ``base``: Debian with its Python and the user, one for each Python, without wheels.

It is the layer that every other image of that Python stands on, with settings to run it.
"""

from __future__ import annotations

from pathlib import Path

from tpuforge.console import Progress
from tpuforge.images.context import Inputs, Target, base_set, recipe_digest
from tpuforge.images.debian import lock_path
from tpuforge.paths import sha256_file, sha256_text
from tpuforge.pins import Pins

NAME = "base"


def target(pins: Pins, python: str) -> Target:
    """The base of a Python, under its name and tag.

    Args:
        pins: The pins.
        python: ``X.Y``; the pins name a suite for it.
    """
    suite = pins.debian[pins.suites[python]]
    tag = f"{suite.name}-py{python.replace('.', '')}"
    return Target(NAME, python, "", f"tpuforge/{NAME}:{tag}")


def read_inputs(target: Target, pins: Pins) -> Inputs:
    """Everything that the image is made of, apart from the Debian layer itself.

    Args:
        target: The image.
        pins: The pins.
    """
    here = Path(__file__).parent
    lock = lock_path(base_set(target, pins).label)
    parts = {
        "the image's name": target.name,
        "the pins": str(pins.epoch),
        "images/": recipe_digest("Dockerfile.base"),
        "the bake itself": sha256_text(
            *(sha256_file(here / name) for name in ("bake.py", "bare.py", "context.py"))
        ),
    }
    return Inputs({}, sha256_file(lock) if lock.is_file() else "", "", parts)


def labels(target: Target, inputs: Inputs, pins: Pins) -> dict[str, str]:
    """What the image says of itself, beside what the tree says.

    Args:
        target: The image.
        inputs: What it is made of.
        pins: The pins.
    """
    return {
        "io.tpuforge.lock.sha256": inputs.lock_sha256,
        "io.tpuforge.base.suite": base_set(target, pins).label,
    }


def prepare(target: Target, inputs: Inputs, pins: Pins, progress: Progress) -> None:
    """Make the folder that the bake works in; there is nothing to read but the base.

    Args:
        target: The image.
        inputs: What it is made of.
        pins: The pins.
        progress: Told what happens.
    """
    del inputs, pins, progress
    target.work.mkdir(parents=True, exist_ok=True)


def run_line(name: str) -> str:
    """The line that opens a shell in the image.

    Args:
        name: Name and tag.
    """
    return f"docker run --rm -it {name}"
