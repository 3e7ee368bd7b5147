"""Tables: whole rows where a program reads them, the width of the terminal where a person does."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest
from rich.cells import cell_len

from tpuforge.console import print_table
from tpuforge.paths import ROOT

DIGEST = "sha256:" + "3f" * 32
ROWS = (("runtime-py311", DIGEST, "two\nlines"), ("名前", DIGEST, ""), ("x", "y" * 200, "[odd]"))
CODE = f"from tpuforge.console import print_table; print_table(('image', 'digest', ''), {ROWS!r})"


@pytest.mark.parametrize("columns", ["20", "80", ""])
def test_a_piped_table_has_a_line_for_each_row(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_table(("image", "digest", ""), ROWS, title="A title")
    assert capsys.readouterr().out.splitlines() == [
        "A title",
        "image          digest",
        f"runtime-py311  {DIGEST}{' ' * (200 - len(DIGEST))}  two lines",
        f"名前           {DIGEST}",
        f"x              {'y' * 200}  [odd]",
    ]


def test_a_table_without_rows(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("image", "digest"), [])
    assert capsys.readouterr().out == "image  digest\n"


def test_a_table_on_a_terminal_fits_it() -> None:
    here, there = pty.openpty()
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "60", "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", CODE], stdout=there, env=env, check=True, timeout=60)
    # it fits into the terminal's buffer: all of it is there by now
    lines = re.sub(r"\x1b\[\d*m", "", os.read(here, 65536).decode()).splitlines()
    os.close(there)
    os.close(here)
    assert len(lines) > len(ROWS) + 1
    assert max(map(cell_len, lines)) <= 60
