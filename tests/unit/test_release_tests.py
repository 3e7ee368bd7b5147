"""Which rings of tests run when."""

from __future__ import annotations

import os

import pytest

from tpuforge.release import tests


@pytest.mark.parametrize(
    ("words", "places"),
    [
        ([], ["tests/unit", "tests/engine", "tests/faults"]),
        (["unit"], ["tests/unit"]),
        (["remote", "-x"], ["tests/remote"]),
        (["unit", "tests/engine/test_x.py", "-k", "y"], ["tests/unit", "tests/engine/test_x.py"]),
    ],
)
def test_rings(words: list[str], places: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, argv: run.append(argv[3:]))
    monkeypatch.setattr(os, "chdir", lambda folder: None)
    tests.main(words)
    options = [word for word in words if word not in ("unit", "remote", "tests/engine/test_x.py")]
    assert run == [[*places, *options]]
