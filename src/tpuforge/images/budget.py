"""Size budgets of images: what an image may come to, and what to look at when it is more.

A budget stands in ``images/docker-bake.hcl``, as two labels of the image.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from tpuforge import layout as oci
from tpuforge.console import size
from tpuforge.errors import Exit, ForgeError
from tpuforge.tree import budget

SHOWN = 10
"""Additions that are named."""

_PACKAGES = re.compile(r".*/site(?:-packages)?/(?P<top>[^/]+)")


def check(
    layout: Path,
    image: oci.Image,
    unpacked: int,
    before: Collection[str],
    name: str,
) -> None:
    """Refuse an image that is larger than its budget.

    Args:
        layout: Where it is.
        image: The image, with the labels that hold its budget.
        unpacked: Bytes of its files.
        before: Digests of the layers of the image of before; empty without one.
        name: Its name, for the message.

    Raises:
        ForgeError: If it is; the message has a table of what it adds to the image of before, or of
            all it holds when there is none. Exit code 1.
    """
    over = [
        f"{size(found)} {what}, the budget is {size(most)}"
        for what, found, most in (
            ("compressed", image.compressed, _most(image.labels, "compressed")),
            ("unpacked", unpacked, _most(image.labels, "unpacked")),
        )
        if most is not None and found > most
    ]
    if not over:
        return
    new = [layer for layer in image.layers if layer.digest not in before] or list(image.layers)
    table = "\n".join(f"  {number / 1e6:8.1f} MB  {what}" for what, number in largest(layout, new))
    since = "new since the image of before" if before else "in it"
    raise ForgeError(
        f"{name} is over its budget: {'; '.join(over)}\nthe largest of what is {since}, unpacked:\n"
        f"{table}",
        expected="no more than the budget in images/docker-bake.hcl",
        mend="leave something out of the lock; or raise the budget there, and say why",
        exit_code=Exit.FAULT,
    )


def _most(labels: Mapping[str, str], what: str) -> int | None:
    """A budget in bytes; None for an image that has none, such as one from before there were."""
    try:
        return budget(labels, what)
    except (KeyError, ValueError):
        return None


def largest(layout: Path, layers: Collection[oci.Blob]) -> list[tuple[str, int]]:
    """What takes the most room in some layers.

    Args:
        layout: Where they are.
        layers: The layers.

    Returns:
        Package, or folder where there are no packages, and the bytes of its files; largest first.
    """
    found: Counter[str] = Counter()
    for layer in layers:
        with oci.open_layer(layout, layer) as tar:
            for entry in tar:
                if entry.isreg():
                    path = entry.name.removeprefix("./")
                    inside = _PACKAGES.match(path)
                    folder = "/".join(path.split("/")[:-1][:2])
                    found[inside["top"] if inside is not None else f"/{folder}"] += entry.size
    return found.most_common(SHOWN)
