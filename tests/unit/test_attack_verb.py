"""An argument that is no name of a file does not choose where the result goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from smoke_host_support import forge


@pytest.mark.parametrize("image", ["../../../victim", "x" * 5000, "a\x1b[2J b\n", "--help"])
def test_a_result_stays_in_its_folder(tmp_path: Path, image: str) -> None:
    out = tmp_path / "out"
    done = forge("release.verify", f"--image={image}", out=out)
    assert done.returncode == 2, done.stderr
    assert "there is no finished image" in done.stderr
    assert "\x1b" not in done.stderr and len(done.stderr) < 2000
    results = list((out / "results").iterdir())
    assert len(results) == 1 and results[0].suffix == ".json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
