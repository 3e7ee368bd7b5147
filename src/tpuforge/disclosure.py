"""What a published document must not tell: credentials of the person who made it.

Statements about wheels and images are made to be shown. What looks like a secret in the
environment is blotted out wherever it appears in them.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
"""What stands in the place of a secret."""
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.IGNORECASE)
"""An address in a text."""
SECRET_NAME = re.compile(
    r"password|passwd|token|secret|credential|cookie|auth(?!or)|api_?key|access_?key|_key$",
    re.IGNORECASE,
)
"""What the name of a variable or an option with a secret in it looks like."""
# shorter values are ordinary words, and blotting them out would spoil the text
_SECRET_CHARACTERS = 8


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is not known: the formats have optional fields, and no null.

    Args:
        values: The fields; None for one that is not known.
    """
    return {key: value for key, value in values.items() if value is not None}


def secrets(environment: Mapping[str, str]) -> set[str]:
    """What must appear nowhere: values of secret variables, and passwords in addresses.

    Args:
        environment: Variables by name.
    """
    found: set[str] = set()
    for name, value in environment.items():
        if SECRET_NAME.search(name):
            found |= {value, value.strip()}
        for address in ADDRESS.findall(value):
            userinfo = address.partition("://")[2].rpartition("@")[0]
            found |= {userinfo, userinfo.partition(":")[2]}
    found |= {urllib.parse.quote(text, safe="") for text in found}
    return {text for text in found if len(text) >= _SECRET_CHARACTERS}


def blot(value: Any, hidden: Sequence[str]) -> Any:
    """A JSON value in which no text holds a secret.

    Args:
        value: Objects, lists and texts.
        hidden: The secrets, the longest first.
    """
    if isinstance(value, dict):
        return {key: blot(item, hidden) for key, item in value.items()}
    if isinstance(value, list):
        return [blot(item, hidden) for item in value]
    if isinstance(value, str):
        for text in hidden:
            value = value.replace(text, HIDDEN)
    return value
