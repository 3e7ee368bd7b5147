"""Which images there are, which of them arguments name, and how each is made.

The tree stands in ``images/docker-bake.hcl``; the Pythons of an image are those that its flavour is
locked for (``lock/pins.toml``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tpuforge import tree
from tpuforge.console import Progress
from tpuforge.errors import ForgeError
from tpuforge.images import bare, builder, context, simulation
from tpuforge.images.context import Inputs, Target, flavours, image_name
from tpuforge.images.overlay import Wheel
from tpuforge.paths import out_dir
from tpuforge.pins import Pins
from tpuforge.tree import Image

ONE_FOR_ALL = (builder.NAME, simulation.NAME)
"""Images that are the same for every Python."""


class Recipe(Protocol):
    """What one kind of image is made of: a module such as ``context`` or ``builder``."""

    def read_inputs(self, target: Target, pins: Pins) -> Inputs:
        """Everything that decides what the image is, apart from its base."""

    def prepare(self, target: Target, inputs: Inputs, pins: Pins, progress: Progress) -> None:
        """Fill the folders that BuildKit reads."""

    def labels(self, target: Target, inputs: Inputs, pins: Pins) -> dict[str, str]:
        """What the image says of itself, beside what the tree says."""

    def run_line(self, name: str) -> str:
        """The line that runs the image where it is meant to run."""


@dataclass(frozen=True)
class Member:
    """One image of the set.

    Attributes:
        image: As the tree declares it.
        python: ``X.Y``; empty for an image that is the same for every Python.
    """

    image: Image
    python: str

    @property
    def slug(self) -> str:
        """Its folder name, such as ``pallas-py311``."""
        return Target(self.image.name, self.python, "", "").slug


def members(pins: Pins) -> Iterator[Member]:
    """Every image of the set, for every Python that it can be made for.

    Args:
        pins: The pins.

    Yields:
        In the order of the tree, older Pythons first.
    """
    for image in tree.images(context.IMAGES).values():
        if image.name in ONE_FOR_ALL:
            yield Member(image, "")
            continue
        flavour = pins.flavours.get(image.flavour or pins.default_flavour)
        pythons = flavour.pythons if image.wheels and flavour is not None else pins.pythons
        for python in pythons:
            yield Member(image, python)


def member_target(member: Member, pins: Pins) -> Target:
    """An image of the set, to bake.

    Args:
        member: The image.
        pins: The pins.

    Raises:
        ForgeError: If there is no base or lock for it.
    """
    named = argparse.Namespace(image=member.image.name, python=member.python or None, flavour=None)
    return choose(named, pins)


def lacks(target: Target, pins: Pins) -> str:
    """What an image with wheels lacks on this machine; empty if nothing that is plain to see.

    Args:
        target: The image.
        pins: The pins.

    Raises:
        ForgeError: If its lock is missing or bad.
    """
    if not target.flavour:
        return ""
    house = out_dir() / "wheelhouse"
    inputs = context.read_inputs(target, pins)
    # torch first: it is what a machine lacks when it lacks much
    order = sorted(inputs.groups, key=lambda name: name != "torch")
    missing = [
        f"{one.name} {one.version}"
        for name in order
        for one in inputs.groups[name]
        if not any((house / one.sha256).glob("*.whl"))
    ]
    if not missing:
        return ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return (
        f"no wheel of {missing[0]}{more} for Python {target.python} in the wheelhouse: "
        f"./forge fetch_wheel --python {target.python} --flavour {target.flavour}"
    )


def choose(options: argparse.Namespace, pins: Pins, wheel: Wheel | None = None) -> Target:
    """The image that the arguments name.

    Args:
        options: With ``image``, ``python`` and ``flavour``; each None for the pins' default.
        pins: The pins.
        wheel: A torch_tpu that was given in the place of the locked one.

    Raises:
        ForgeError: If there is no such image, lock or base.
    """
    python = options.python or pins.default_python
    image = options.image or pins.default_image
    declared = tree.image(context.IMAGES, image)
    if image in ONE_FOR_ALL:
        if options.python or options.flavour or wheel is not None:
            raise ForgeError(
                f"the image {image} is the same for every Python, and holds no wheels",
                expected=f"--image {image} without --python, --flavour and --wheel",
                mend=f"./forge bake --image {image}",
            )
        return builder.target(pins) if image == builder.NAME else simulation.target(pins)
    if image == bare.NAME and (options.flavour or wheel is not None):
        raise ForgeError(
            f"the image {image} holds no wheels",
            expected=f"--image {image} without --flavour and --wheel",
            mend=f"./forge bake --image {image} --python {python}",
        )
    if python not in pins.suites:
        raise ForgeError(
            f"there is no base with Python {python}",
            expected=f"one of {', '.join(sorted(pins.suites))}: the pins name their Debian suites",
            mend=f"use --python {pins.default_python}",
        )
    if image == bare.NAME:
        return bare.target(pins, python)
    own = declared.flavour
    if own and options.flavour not in (None, own):
        raise ForgeError(
            f"the image {image} is made from the flavour {own}, not from {options.flavour}",
            expected=f"--image {image} alone",
            mend=f"./forge bake --image {image}",
        )
    flavour = own or options.flavour or pins.default_flavour
    # without its lock, the default one is reported by whoever reads the lock: it can be made
    if flavour != pins.default_flavour and flavour not in flavours(python):
        raise ForgeError(
            f"there is no flavour {flavour!r} for Python {python}",
            expected=f"one of {', '.join(flavours(python))}",
            mend=f"use --flavour {pins.default_flavour}"
            if not own
            else f"use --python with one of {', '.join(pins.flavours[own].pythons)}",
        )
    return Target(image, python, flavour, image_name(image, python, pins, wheel), wheel)


def images() -> list[str]:
    """The images that ``images/docker-bake.hcl`` declares."""
    return sorted(tree.images(context.IMAGES))


def recipe(target: Target) -> Recipe:
    """How an image is made.

    Args:
        target: The image.
    """
    made: dict[str, Recipe] = {
        bare.NAME: bare,
        builder.NAME: builder,
        simulation.NAME: simulation,
    }
    return made.get(target.image, context)
