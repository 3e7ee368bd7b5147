"""What a terminal is shown of text that others wrote."""

from __future__ import annotations

import pytest

from tpuforge.console import Progress, print_error, print_table, visible
from tpuforge.errors import ForgeError


def test_control_characters_are_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[2K\rb\x9b1A\nc\td"
    assert visible(evil) == "a\\x1b[2K\\x0db\\x9b1A\nc\td"
    print_error("verb", ForgeError(evil, expected=evil, mend=evil))
    print_table(("column",), [[evil]])
    with Progress("verb") as progress:
        progress.note(evil)
    out, err = capsys.readouterr()
    assert "\x1b[2K" not in out + err
    assert "\x9b" not in out + err
    assert err.count("\\x1b[2K") == 4
    assert out.count("\\x1b[2K") == 1
