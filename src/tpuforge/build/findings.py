"""What an audit finds. Apart from the rules, which take a tenth of a second to load."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

TORCH_TPU = "torch-tpu"
LIBTPU = "libtpu"


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """The wheel is not what it says, or does not work."""
    WARNING = "warning"
    """It works, and somebody should mend it."""
    NOTE = "note"
    """Worth knowing."""


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found.

    Attributes:
        rule: The rule's id.
        severity: How bad it is.
        what: What was found.
        expected: What was expected instead.
        remedy: What mends it.
    """

    rule: str
    severity: Severity
    what: str
    expected: str
    remedy: str
