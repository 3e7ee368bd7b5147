"""The finished images of ``out/images``, for the verbs of every stage that are about them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuforge import layout as oci
from tpuforge import pins as pins_module
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import out_dir
from tpuforge.records import read_record

_SLUG = re.compile(r"[a-z][a-z0-9-]{0,99}")
_MOST_SHOWN = 100
SCHEMA = "tpuforge.image/1"
# what the verbs about an image read of its record
_FORM = {
    "image": str,
    "python": str,
    "flavour": str,
    "name": str,
    "manifest_digest": str,
    "labels": dict,
    "inputs": dict,
    "engine": dict,
}


@dataclass(frozen=True)
class Baked:
    """A finished image.

    Attributes:
        slug: Its folder name, such as ``runtime-py311``.
        folder: Its folder.
        record: Its ``image.json``.
        image: What its layout holds.
    """

    slug: str
    folder: Path
    record: dict[str, Any]
    image: oci.Image

    @property
    def layout(self) -> Path:
        """Its OCI layout."""
        return self.folder / "oci"

    @property
    def referrers(self) -> Path:
        """The layout of what is attached to it."""
        return self.folder / "referrers"

    @property
    def twin(self) -> oci.Image | None:
        """The same image with gzip layers, for pullers from before zstd; None without one.

        Raises:
            ForgeError: If it is damaged; exit code 1.
        """
        layout = self.folder / "oci-gzip"
        if not (layout / "index.json").is_file():
            return None
        found = oci.read_image(layout)
        return found if found.config.digest == self.image.config.digest else None

    @property
    def twin_referrers(self) -> Path:
        """The layout of what is attached to its twin."""
        return self.folder / "referrers-gzip"

    @property
    def attestations(self) -> Path:
        """The folder of the documents themselves, and of their record."""
        return self.folder / "attestations"


def names() -> list[str]:
    """The folder names of the images that are here, whole or not."""
    return sorted(path.parent.name for path in (out_dir() / "images").glob("*/image.json"))


def not_baked(slug: str, mend: str) -> ForgeError:
    """What a verb says of an image that is not in ``out/images``.

    Args:
        slug: The folder that it would have, such as ``runtime-py311``.
        mend: The command that bakes it.

    Returns:
        The error, which names the images that are there.
    """
    there = ", ".join(names())
    return ForgeError(
        f"the image {slug} was not baked here",
        expected=f"one of the baked images: {there}" if there else "an image in out/images",
        mend=f"name one of them, or {mend}" if there else mend,
    )


def slug_of(options: argparse.Namespace) -> str:
    """The folder name of the image that the arguments name.

    Args:
        options: With ``image`` and ``python``; each None for the pins' default.

    Raises:
        ForgeError: If it can be none, there is no such Python, or the pins are bad.
    """
    pins = pins_module.load()
    image = named(options.image or pins.default_image)
    whole = out_dir() / "images" / image
    # the builder and the simulator are the same for every Python
    if not options.python and (whole / "image.json").is_file():
        return str(image)
    return named(f"{image}-py{pins.python(options.python).replace('.', '')}")


def named(slug: str) -> str:
    """The folder name of an image, as a person gave it.

    Args:
        slug: The name.

    Raises:
        ForgeError: If it can be none: it becomes the path of a folder.
    """
    if _SLUG.fullmatch(slug):
        return slug
    raise ForgeError(
        f"there is no finished image {slug[:_MOST_SHOWN]!r}",
        expected="a folder of out/images, such as runtime-py311",
        mend="./forge images lists them",
    )


def words(record: Mapping[str, Any]) -> str:
    """The arguments that name an image, as a person gives them.

    Args:
        record: Its ``image.json``.
    """
    python = f" --python {record['python']}" if record["python"] else ""
    return f"--image {record['image']}{python}"


def every(options: argparse.Namespace) -> list[str]:
    """The folder names of all images, for ``--all``.

    Args:
        options: With ``image`` and ``python``; also with ``flavour``, if the verb has it.

    Raises:
        ForgeError: If there is none, or the arguments also name one.
    """
    if options.image or options.python or getattr(options, "flavour", None):
        raise ForgeError(
            "--all was given with options that name one image",
            expected="one of them",
            mend="leave one out",
        )
    found = names()
    if not found:
        raise ForgeError(
            "no image is baked here", expected="an image in out/images", mend="./forge bake"
        )
    return found


def choose(options: argparse.Namespace) -> list[Baked]:
    """The images that the arguments name.

    Args:
        options: With ``image``, ``python`` and ``flavour``; also with ``all``, if the verb has it.

    Raises:
        ForgeError: If there is none of them (exit code 2), or one is damaged (exit code 1).
    """
    if getattr(options, "all", False):
        return [load(slug) for slug in every(options)]
    one = load(slug_of(options))
    if options.flavour and one.record["flavour"] != options.flavour:
        raise ForgeError(
            f"{one.slug} was baked from the flavour {one.record['flavour']}",
            expected=f"the flavour {options.flavour}",
            mend="leave --flavour out, or: "
            f"./forge bake --image {one.record['image']} --flavour {options.flavour}",
        )
    return [one]


def load(slug: str) -> Baked:
    """A finished image.

    Args:
        slug: Its folder name.

    Raises:
        ForgeError: If it is not there (exit code 2), or is damaged (exit code 1).
    """
    folder = out_dir() / "images" / named(slug)
    name, _, python = slug.partition("-py")
    version = f"{python[:1]}.{python[1:]}"
    # the builder and the simulator are baked without a Python, whatever was asked for
    more = f" --python {version}" if version not in (".", pins_module.load().default_python) else ""
    mend = f"./forge bake --image {name}{more}"
    record = read_record(folder / "image.json", SCHEMA, _FORM)
    if record is None and (folder / "image.json").exists():
        raise ForgeError(
            f"{folder / 'image.json'} is damaged",
            expected=f"a record of the schema {SCHEMA}",
            mend=mend,
            exit_code=Exit.FAULT,
        )
    if record is None:
        raise not_baked(slug, mend)
    image = oci.read_image(folder / "oci")
    if image.manifest.digest != record["manifest_digest"]:
        raise ForgeError(
            f"{slug}: the layout holds {image.manifest.digest}, and image.json tells of "
            f"{record['manifest_digest']}",
            expected="one and the same image",
            mend=mend,
            exit_code=Exit.FAULT,
        )
    return Baked(slug, folder, record, image)
