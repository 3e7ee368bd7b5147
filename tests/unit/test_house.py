"""The house: which way the imports go."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tpuforge.paths import ROOT

SOURCE = ROOT / "src" / "tpuforge"
STAGES = ("lock", "build", "images", "smoke", "release")


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_no_other(stage: str) -> None:
    others = tuple(f"tpuforge.{other}." for other in STAGES if other != stage)
    files = list((SOURCE / stage).rglob("*.py"))
    assert len(files) > 2
    for path in files:
        assert not [name for name in imported(path) if name.startswith(others)], path


def test_the_ground_floor_imports_no_stage() -> None:
    stages = tuple(f"tpuforge.{stage}." for stage in STAGES)
    files = list(SOURCE.glob("*.py"))
    assert len(files) > 10
    for path in files:
        assert not [name for name in imported(path) if name.startswith(stages)], path


def test_the_suite_imports_nothing_of_the_project() -> None:
    files = list((ROOT / "smoke").rglob("*.py"))
    assert len(files) > 10
    for path in files:
        assert not [name for name in imported(path) if name.split(".")[0] == "tpuforge"], path
