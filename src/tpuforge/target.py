"""The target of every lock and image, in the terms of wheels: a CPython on Linux on x86-64."""

from __future__ import annotations

from collections.abc import Sequence

from packaging.tags import Tag, compatible_tags, cpython_tags

# what PEP 600 calls manylinux_2_17, _2_12 and _2_5
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


def platforms(glibc: str) -> list[str]:
    """Every platform tag that a system with some glibc accepts, best first (PEP 600).

    Args:
        glibc: Its release, such as ``2.31``.
    """
    found = []
    for minor in range(int(glibc.partition(".")[2]), 4, -1):
        found.append(f"manylinux_2_{minor}_x86_64")
        if minor in _OLD_NAMES:
            found.append(f"{_OLD_NAMES[minor]}_x86_64")
    return found


def tags(python: str, platforms: Sequence[str]) -> list[Tag]:
    """The wheel tags that a Python takes, best first.

    Args:
        python: ``X.Y``.
        platforms: Platform tags, best first.
    """
    major, minor = (int(part) for part in python.split("."))
    own = f"cp{major}{minor}"
    return [
        *cpython_tags((major, minor), [own], platforms),
        *compatible_tags((major, minor), own, platforms),
    ]


def fitting(python: str, glibc: str) -> frozenset[Tag]:
    """The tags of the wheels that can be installed for a Python.

    Args:
        python: ``X.Y``.
        glibc: The newest glibc that they may ask for, such as ``2.31``.
    """
    return frozenset(tags(python, [*platforms(glibc), "linux_x86_64"]))


def environment(python: str) -> dict[str, str]:
    """What the markers of requirements are read against, on whatever machine (PEP 508).

    Args:
        python: ``X.Y``.
    """
    return {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
