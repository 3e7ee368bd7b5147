"""Reading back what a stage wrote: a record is taken whole, or it counts as missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuforge.paths import read_json

Form = type | list[Any] | Mapping[str, Any]
"""What a value has to be: a type, a list of one form, or an object with at least these keys."""


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
    if isinstance(found, dict) and found.get("schema") == schema and _fits(found, form):
        return found
    return None


def _fits(value: object, form: Form) -> bool:
    if isinstance(form, Mapping):
        return isinstance(value, dict) and all(
            name in value and _fits(value[name], inner) for name, inner in form.items()
        )
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(item, form[0]) for item in value)
    # exactly this type: in Python a bool is an int, in JSON it is not
    return type(value) is form
