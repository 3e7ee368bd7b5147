"""Which commit of this project a work was made from, as git tells it."""

from __future__ import annotations

from dataclasses import dataclass

from tpuforge.errors import ForgeError
from tpuforge.paths import ROOT
from tpuforge.process import run

_SOURCES = ("images", "lock", "smoke", "src")
_GIT_S = 60.0


@dataclass(frozen=True)
class Revision:
    """The state of the checkout.

    Attributes:
        commit: The commit, 40 hex digits; None where there is none to name.
        dirty: Whether files that go into images differ from that commit.
        why: Why there is no commit; empty if there is one.
    """

    commit: str | None
    dirty: bool = False
    why: str = ""

    @property
    def exact(self) -> bool:
        """Whether the commit alone tells the files."""
        return self.commit is not None and not self.dirty


def revision() -> Revision:
    """The commit of this checkout, and whether what goes into images differs from it."""
    here = ["git", "-C", str(ROOT)]
    try:
        head = run([*here, "rev-parse", "--verify", "HEAD"], timeout=_GIT_S, check=False)
        if head.code != 0:
            return Revision(None, why="the checkout is no git repository")
        state = run([*here, "status", "--porcelain", "--", *_SOURCES], timeout=_GIT_S)
    except ForgeError as error:
        return Revision(None, why=error.found)
    return Revision(head.output.strip(), bool(state.output.strip()))
