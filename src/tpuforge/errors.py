"""The one error type that people see, and the exit codes of every verb."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes shared by all verbs (listed in ``docs/exit-codes.md``)."""

    OK = 0
    """The work is done, or there was nothing to do."""
    FAULT = 1
    """What was checked or made is bad: a stale lock, a wrong digest, an unhealthy image."""
    CANNOT = 2
    """The work could not be done or judged here: usage, a missing tool, source or space."""
    DEVICE = 3
    """A TPU is there and busy or unusable (health only)."""
    INTERRUPTED = 130
    """Stopped by INT or TERM; finished work is kept."""


class ForgeError(Exception):
    """Something a person has to act on.

    Args:
        found: What was found, in one sentence.
        expected: What was expected instead.
        mend: The command (or the act) that mends it.
        exit_code: The exit code of the verb that fails with this error.
    """

    def __init__(
        self, found: str, *, expected: str = "", mend: str = "", exit_code: Exit = Exit.CANNOT
    ) -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected
        self.mend = mend
        self.exit_code = exit_code

    def as_dict(self) -> dict[str, str | int]:
        """The error for machines: found, expected, mend and exit_code."""
        return {
            "found": self.found,
            "expected": self.expected,
            "mend": self.mend,
            "exit_code": int(self.exit_code),
        }
