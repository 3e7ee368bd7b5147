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
from tpuforge.paths import out_dir, read_json
from tpuforge.records import Form, misfit

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
    return [load(slug_of(options), options.flavour)]


def read_baked(
    slug: str,
    form: Mapping[str, Form],
    flavour: str | None = None,
    *,
    exit_code: Exit = Exit.CANNOT,
) -> dict[str, Any]:
    """The record of a finished image; its layout is not looked at.

    Args:
        slug: Its folder name.
        form: The keys that are used, each with the form of its value.
        flavour: The flavour that it must have; any if None.
        exit_code: That of a damaged record.

    Raises:
        ForgeError: If it was not baked or has another flavour (exit code 2), or is damaged.
    """
    path = out_dir() / "images" / named(slug) / "image.json"
    record = read_json(path)
    if record is None and not path.exists():
        there = ", ".join(names())
        mend = f"name one of them, or {_bake(slug)}" if there else _bake(slug)
        raise ForgeError(
            f"the image {slug} was not baked here",
            expected=f"one of the baked images: {there}" if there else "an image in out/images",
            mend=mend,
        )
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        bad = ["schema"]
    else:
        bad = [key for key, kind in form.items() if misfit(record.get(key), kind)]
    if bad:
        raise ForgeError(
            f"{path} is damaged: {', '.join(bad)}",
            expected=f"a record of the schema {SCHEMA}",
            mend=_bake(slug),
            exit_code=exit_code,
        )
    if flavour and record.get("flavour") != flavour:
        raise ForgeError(
            f"{slug} was baked from the flavour {record.get('flavour')}",
            expected=f"the flavour {flavour}",
            mend=f"leave --flavour out, or: {_bake(slug)} --flavour {flavour}",
        )
    return dict(record)


def _bake(slug: str) -> str:
    """The command that bakes an image."""
    name, _, python = slug.partition("-py")
    version = f"{python[:1]}.{python[1:]}"
    # the builder and the simulator are baked without a Python, whatever was asked for
    more = f" --python {version}" if version not in (".", pins_module.load().default_python) else ""
    return f"./forge bake --image {name}{more}"


def load(slug: str, flavour: str | None = None) -> Baked:
    """A finished image.

    Args:
        slug: Its folder name.
        flavour: The flavour that it must have; any if None.

    Raises:
        ForgeError: If it is not there or has another flavour (exit code 2), or is damaged (exit
            code 1).
    """
    folder = out_dir() / "images" / slug
    record = read_baked(slug, _FORM, flavour, exit_code=Exit.FAULT)
    image = oci.read_image(folder / "oci")
    if image.manifest.digest != record["manifest_digest"]:
        raise ForgeError(
            f"{slug}: the layout holds {image.manifest.digest}, and image.json tells of "
            f"{record['manifest_digest']}",
            expected="one and the same image",
            mend=_bake(slug),
            exit_code=Exit.FAULT,
        )
    return Baked(slug, folder, record, image)
