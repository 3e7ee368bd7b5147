"""Addresses that a person gives: one place that refuses what must not be shown or cannot be one.

An address goes into the line that is printed, into the process list, the log, the result and the
statement beside the wheel. So none of them may hold a password.
"""

from __future__ import annotations

import re
import urllib.parse

from tpuforge.errors import ForgeError
from tpuforge.process import redact

_USERINFO = re.compile(r"[^/=\s]*@")
_IMPOSSIBLE = re.compile(r"[\s\x00-\x1f\x7f]")


def shown(address: str) -> str:
    """An address for people, without what may be a password, even where it is none.

    Args:
        address: Whatever was given.
    """
    return redact(address) if "://" in address else _USERINFO.sub("***@", address)


def require_public(option: str, address: str, mend: str) -> None:
    """Refuse an address with user, password or query in it.

    Args:
        option: The option that gave it, such as ``--repository``.
        address: The address; a path is none, and passes.
        mend: Where credentials belong instead.

    Raises:
        ForgeError: If it holds credentials.
    """
    if redact(address) != address:
        raise ForgeError(
            f"{option} {shown(address)} holds credentials",
            expected="an address without user, password and query: it stands in the process list"
            " and in the log",
            mend=mend,
        )


def split(address: str) -> urllib.parse.SplitResult | None:
    """The parts of an address that can be one.

    Args:
        address: Whatever was given.

    Returns:
        None where it has spaces, control characters, no host, or a port that is no number.
    """
    if _IMPOSSIBLE.search(address):
        return None
    try:
        parts = urllib.parse.urlsplit(address)
        # it is read to learn whether it is a number
        _ = parts.port
        return parts if parts.hostname else None
    except ValueError:
        return None
