"""Strict reading of TOML that people write: every key is known, every value of its form."""

from __future__ import annotations

import re
import tomllib
from datetime import date, datetime
from pathlib import Path
from typing import Any, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import ROOT, read_regular

_T = TypeVar("_T")
_MOST_BYTES = 1 << 24


def read(path: Path, page: str) -> Table:
    """Read a file.

    Args:
        path: Such as ``lock/pins.toml``.
        page: The page of the docs with its format.

    Returns:
        All of it, as a table.

    Raises:
        ForgeError: If it cannot be read (exit code 2), or is no TOML (exit code 1).
    """
    try:
        return Table(path, page, "", tomllib.loads(read_regular(path, _MOST_BYTES).decode()))
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise ForgeError(
            f"{path} is not there" if missing else f"{path} cannot be read: {error.strerror}",
            expected=f"a file as in {page}",
            mend=f"git checkout -- {path.relative_to(ROOT)}"
            if path.is_relative_to(ROOT)
            else "name a file that is there",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ForgeError(
            f"{path.name} is not TOML: {error}",
            expected=f"TOML as in {page}",
            mend=f"edit {path.name}",
            exit_code=Exit.FAULT,
        ) from error


class Table:
    """One table, read key by key, that knows its name and what was not read.

    Every reader takes the key and raises a ForgeError that names it, with exit code 1, for a value
    that is missing or of another form.

    Args:
        path: The file.
        page: The page of the docs with its format.
        name: The table's name; empty for the whole file.
        values: What it holds.
    """

    def __init__(self, path: Path, page: str, name: str, values: Any) -> None:
        self._path = path
        self._page = page
        self._name = name
        if not isinstance(values, dict):
            raise self.bad("", f"{values!r}", "a table")
        self._values: dict[str, Any] = values
        self._read: set[str] = set()

    def bad(self, key: str, found: str, expected: str) -> ForgeError:
        """The error for a value that cannot be.

        Args:
            key: Its key.
            found: What is there.
            expected: What should be.
        """
        where = ".".join(part for part in (self._name, key) if part)
        return ForgeError(
            f"{self._path.name}: {where} is {found}",
            expected=expected,
            mend=f"edit {self._path.name} (its format: {self._page})",
            exit_code=Exit.FAULT,
        )

    def names(self) -> list[str]:
        """The keys that are there."""
        return list(self._values)

    def table(self, key: str) -> Table:
        """A table in it."""
        name = ".".join(part for part in (self._name, key) if part)
        return Table(self._path, self._page, name, self._get(key, "a table"))

    def tables(self, key: str) -> list[Table]:
        """A list of tables in it, which may be missing."""
        values = self._get(key, "a list of tables") if key in self._values else []
        if not isinstance(values, list):
            raise self.bad(key, f"{values!r}", "a list of tables")
        return [
            Table(self._path, self._page, f"{key}[{at}]", one) for at, one in enumerate(values, 1)
        ]

    def text(self, key: str, form: re.Pattern[str] | None = None) -> str:
        """A text in one line, of a form if one is given."""
        value = self._get(key, "a text")
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise self.bad(key, f"{value!r}", "a text in one line that is not empty")
        if form is not None and not form.fullmatch(value):
            raise self.bad(key, f"{value!r}", f"a text of the form {form.pattern}")
        return value

    def texts(self, key: str, form: re.Pattern[str]) -> tuple[str, ...]:
        """A list of texts of a form, each once."""
        value = self._get(key, "a list of texts")
        if not isinstance(value, list) or not value:
            raise self.bad(key, f"{value!r}", "a list of texts that is not empty")
        for item in value:
            if not isinstance(item, str) or not form.fullmatch(item):
                raise self.bad(key, f"{item!r}", f"texts of the form {form.pattern}")
        if len(set(value)) != len(value):
            raise self.bad(key, f"{value!r}", "each item once")
        return tuple(value)

    def integer(self, key: str) -> int:
        """A whole number."""
        value = self._get(key, "a whole number")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.bad(key, f"{value!r}", "a whole number")
        return value

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._get(key, "true or false")
        if not isinstance(value, bool):
            raise self.bad(key, f"{value!r}", "true or false")
        return value

    def version(self, key: str) -> str:
        """A version, as it is written (PEP 440)."""
        value = self.text(key)
        try:
            Version(value)
        except InvalidVersion as error:
            raise self.bad(key, f"{value!r}", "a version, such as 2.13.0") from error
        return value

    def specifiers(self, key: str) -> SpecifierSet:
        """A range of versions (PEP 440)."""
        value = self.text(key)
        try:
            return SpecifierSet(value)
        except InvalidSpecifier as error:
            raise self.bad(key, f"{value!r}", "a range, such as >=2.11.0,<=2.15.0") from error

    def day(self, key: str) -> date:
        """A day."""
        value = self._get(key, "a day")
        # a moment is a day for Python
        if type(value) is not date:
            raise self.bad(key, f"{value!r}", "a day, such as 2027-01-31, without quotes")
        return value

    def moment(self, key: str) -> datetime:
        """A moment with its zone, written as a text."""
        value = self.text(key)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError as error:
            raise self.bad(key, f"{value!r}", "a moment, such as 2026-11-30T00:00:00Z") from error
        if moment.tzinfo is None:
            raise self.bad(key, f"{value!r}", "a moment with its zone, such as …T00:00:00Z")
        return moment

    def end(self) -> None:
        """Refuse keys that nothing has read: they are slips of the pen."""
        for key in self._values:
            if key not in self._read:
                known = ", ".join(sorted(self._read))
                raise self.bad(key, "an unknown key", f"one of {known}")

    def ended(self, made: _T) -> _T:
        """What was made of this table, once nothing unread is left in it."""
        self.end()
        return made

    def _get(self, key: str, kind: str) -> Any:
        if key not in self._values:
            raise self.bad(key, "missing", kind)
        self._read.add(key)
        return self._values[key]
