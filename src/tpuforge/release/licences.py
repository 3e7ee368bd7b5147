"""What wheels and Debian packages say of their licences, in the words of SPDX.

Nothing is concluded here: what a package states is written down, under SPDX's name where it has
one. Sources: Core metadata 2.4 (PEP 639) for wheels; Debian's machine-readable copyright format 1.0
and the folder ``/usr/share/common-licenses`` for packages; SPDX specification 2.3, annex D.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from email.message import Message

from license_expression import (  # type: ignore[import-untyped]
    ExpressionError,
    Licensing,
    get_spdx_licensing,
)

NONE = "NOASSERTION"
"""What SPDX says where a package states nothing."""

_LONGEST = 60
_REFERENCE = re.compile(r"LicenseRef-[A-Za-z0-9.-]+")
_NAMED = re.compile(r"^License:[ \t]*(\S.*)$", re.MULTILINE)
_COMMON = re.compile(r"/usr/share/common-licenses/([A-Za-z0-9.+-]*[A-Za-z0-9+])")
# names of Debian's format that SPDX spells otherwise; those that it spells alike are not here
_DEBIAN = {
    "apache-2": "Apache-2.0",
    "artistic": "Artistic-1.0-Perl",
    "artistic-2": "Artistic-2.0",
    "bsl-1": "BSL-1.0",
    "expat": "MIT",
    "gpl": "GPL-1.0-or-later",
    "lgpl": "LGPL-2.0-or-later",
    "psf": "PSF-2.0",
}
_GNU = re.compile(r"(?P<name>A?GPL|LGPL|GFDL)-(?P<number>\d+(?:\.\d+)?)(?P<later>\+?)", re.I)
# classifiers that name one licence of SPDX; "BSD License" names none
_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}


@functools.cache
def _spdx() -> Licensing:
    return get_spdx_licensing()


def known(expression: str) -> bool:
    """Whether a text is an SPDX expression of licences that SPDX lists.

    Args:
        expression: Such as ``Apache-2.0 OR BSD-2-Clause``.
    """
    try:
        return bool(expression) and not _spdx().validate(expression, strict=True).errors
    except (ExpressionError, AttributeError):
        # the library's own way to refuse some texts that are no expression at all
        return False


def _spelled(expression: str) -> str:
    """An expression in the spelling of SPDX's list, which some packages take lightly."""
    return str(_spdx().parse(expression))


def reference(name: str) -> str:
    """The name that a document gives to a licence that SPDX does not list.

    Args:
        name: What the package calls it.
    """
    # a plus sign says "or later", and no name of SPDX may have one
    text = name.replace("+", " plus ")
    return "LicenseRef-" + re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")


def references(expression: str) -> set[str]:
    """The licences in an expression that SPDX does not list.

    Args:
        expression: Such as :func:`of_wheel` gives.
    """
    return set(_REFERENCE.findall(expression))


def of_wheel(metadata: Message) -> str:
    """What a wheel says of its licence.

    Args:
        metadata: Its ``METADATA``.

    Returns:
        An SPDX expression, with ``LicenseRef-…`` for what SPDX does not list; ``NOASSERTION`` if
        it says nothing.
    """
    stated = [str(metadata.get("License-Expression", "")), str(metadata.get("License", ""))]
    for text in stated:
        if known(text.strip()):
            return _spelled(text.strip())
    classes = [
        str(one).rpartition("::")[2].strip()
        for one in metadata.get_all("Classifier", [])
        if str(one).startswith("License ::")
    ]
    found = sorted({_CLASSIFIERS[name] for name in classes if name in _CLASSIFIERS})
    if found:
        return " AND ".join(found)
    # a short text is a name; a long one is the licence itself
    names = [text.strip() for text in stated if 0 < len(text.strip()) <= _LONGEST]
    for name in [*names, *classes]:
        return reference(name)
    return NONE


def of_deb(copyright_file: str) -> str:
    """The licences that a Debian package's copyright file names.

    Args:
        copyright_file: Its text; empty if there is none.

    Returns:
        An SPDX expression: all of them, joined by AND, with ``LicenseRef-…`` for what SPDX does
        not list; ``NOASSERTION`` if it names none.
    """
    if copyright_file.lstrip().lower().startswith("format"):
        names: Iterable[str] = _NAMED.findall(copyright_file)
    else:
        names = _COMMON.findall(copyright_file)
    parts = sorted({_debian(part) for name in names for part in _parts(name.strip())})
    return " AND ".join(parts) or NONE


def _parts(name: str) -> list[str]:
    """The licences of a line that hold together; a line with a choice in it stays whole."""
    return [name] if re.search(r"\bor\b|,", name) else re.split(r"\s+and\s+", name)


def _debian(name: str) -> str:
    """One licence, as Debian's format names it, in the words of SPDX."""
    choices = re.split(r"\s+or\s+", name)
    if len(choices) > 1 and "," not in name:
        found = [_debian(choice) for choice in choices]
        if all(" " not in one for one in found):
            return f"({' OR '.join(sorted(set(found)))})"
        return reference(name)
    gnu = _GNU.fullmatch(name)
    if gnu is not None:
        number = gnu["number"] if "." in gnu["number"] else f"{gnu['number']}.0"
        name = f"{gnu['name'].upper()}-{number}-{'or-later' if gnu['later'] else 'only'}"
    else:
        name = _DEBIAN.get(name.lower(), name)
    if " " not in name and known(name):
        return _spelled(name)
    return reference(name)
