"""Where the suite finds what it judges: site-packages, the file system, the image's own facts.

Tests of the suite point these at small trees of their own; in an image the defaults hold.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Place:
    """One installation.

    Attributes:
        site: The site-packages folder with torch in it.
        root: The root of the file system.
        home: The folder with ``lock.txt``, ``image.json`` and ``constraints.txt``.
        environ: The environment the user gave the container.
        uid: The user that runs it.
        maps: The memory map of this process, a file in the format of ``/proc/self/maps``.
    """

    site: Path
    root: Path
    home: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    uid: int = 0
    maps: Path = Path("/proc/self/maps")

    @property
    def facts(self) -> dict[str, Any] | None:
        """The facts that the bake wrote into the image, or None outside an image.

        Raises:
            ValueError: If ``image.json`` is there and is not a JSON object.
        """
        try:
            text = (self.home / "image.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        facts = json.loads(text)
        if not isinstance(facts, dict):
            raise ValueError(f"{self.home / 'image.json'} is not a JSON object")
        return facts

    def under(self, path: str) -> Path:
        """An absolute path of the image, below this root.

        Args:
            path: Such as ``/etc/pip.conf``.
        """
        return self.root / path.lstrip("/")


def here() -> Place:
    """The installation of the running interpreter.

    ``TPUFORGE_HOME`` names the home of an installation outside an image.
    """
    home = os.environ.get("TPUFORGE_HOME") or Path(__file__).resolve().parent.parent
    return Place(
        site=Path(sysconfig.get_path("purelib")),
        root=Path("/"),
        home=Path(home),
        environ=dict(os.environ),
        uid=os.getuid(),
    )
