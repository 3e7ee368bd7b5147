"""Reading back what a stage wrote: a record is taken whole, or it counts as missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuforge.paths import read_json

Form = type | tuple[type, ...] | list[Any] | Mapping[str, Any]
"""What a value has to be: a type or one of several, a list of one form, or an object with at least
these keys."""


def read_record(path: Path, schema: str, form: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record at a path, if it has the schema and every key that its reader uses.

    Args:
        path: A JSON file.
        schema: The value of its key ``schema``.
        form: The keys that are used, each with the form of its value.

    Returns:
        The record, with all its keys; None if there is none or it has another form.
    """
    found = read_json(path)
    if isinstance(found, dict) and found.get("schema") == schema and not misfit(found, form):
        return found
    return None


def misfit(value: object, form: Form) -> str:
    """What keeps a value from having a form.

    Args:
        value: Any JSON.
        form: The form.

    Returns:
        A clause about the first key that is missing or of another type; empty if it fits.
    """
    if isinstance(form, Mapping):
        if not isinstance(value, dict):
            return "it is no object"
        for name, inner in form.items():
            if name not in value:
                return f"it has no {name}"
            if misfit(value[name], inner):
                return f"its {name} has another type"
        return ""
    if isinstance(form, list):
        fits = isinstance(value, list) and not any(misfit(item, form[0]) for item in value)
    else:
        # exactly this type: in Python a bool is an int, in JSON it is not
        fits = type(value) in (form if isinstance(form, tuple) else (form,))
    return "" if fits else "it has another type"
