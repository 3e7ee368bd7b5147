"""The whole of measure around its slow parts: what it writes, shows and leaves behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tpuforge.errors import ForgeError
from tpuforge.images import measure

Arrange = Callable[[int], None]


@pytest.fixture
def arrange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arrange:
    """Have bakes, builds and an engine that take no time; so many of three rebuilds agree."""
    out = tmp_path / "measure" / "work"
    wheel = tmp_path / "torch_tpu-0.2.0-py3-none-any.whl"
    wheel.write_bytes(b"")
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path))
    monkeypatch.setattr(measure, "_wheel", lambda package: wheel)
    monkeypatch.setattr(measure, "fill", lambda out, **_: (out / "base").mkdir(parents=True))
    monkeypatch.setattr(measure, "bumped", lambda wheel, folder: wheel)
    monkeypatch.setattr(measure.socket, "if_nameindex", lambda: [(1, "lo")])

    @contextmanager
    def own_engine(folder: Path, progress: object) -> Iterator[dict[str, object]]:
        assert folder == out
        yield {"docker": "docker", "env": {}, "builder": "default", "versions": {"engine": "26"}}

    def verb(bench: measure.Bench, doing: str, module: str, *words: str) -> float:
        assert (module, words) == ("tpuforge.images.base", ("--suite", "bookworm"))
        record = {"layout": "base/x", "manifest_digest": "sha256:0"}
        (bench.out / "base" / "bookworm.json").write_text(json.dumps(record))
        return 1.0

    def plainly(*_: object) -> tuple[Path, Path]:
        raise ForgeError("no index answers\nsecond line")

    def pulls(
        bench: measure.Bench,
        registry: object,
        side: Callable[[measure.Row], measure.Figure],
        *_: object,
    ) -> None:
        side(bench.rows["pull.full"]).samples.append(2.0)

    @contextmanager
    def loopback(folder: Path, progress: object) -> Iterator[str]:
        yield "registry"

    monkeypatch.setattr(measure, "own_engine", own_engine)
    monkeypatch.setattr(measure.Bench, "verb", verb)
    monkeypatch.setattr(measure.Bench, "empty", lambda bench: None)
    monkeypatch.setattr(measure.Plain, "settle", lambda *_: None)
    monkeypatch.setattr(measure, "plainly", plainly)
    monkeypatch.setattr(measure, "pulls", pulls)
    monkeypatch.setattr(measure, "loopback", loopback)

    def agree(count: int) -> None:
        def ours(bench: measure.Bench, wheel: Path, times: int) -> tuple[Path, Path]:
            bench.rows["bake.cold"].ours.samples.append(40.0)
            bench.rows["equal"].ours.samples += [count, times]
            return out, out

        monkeypatch.setattr(measure, "ours", ours)

    return agree


def test_a_side_that_cannot_be_had_says_why_and_the_other_is_measured(
    arrange: Arrange, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrange(3)
    assert measure.main([]) == 0
    document = json.loads((tmp_path / "measure" / "measure.json").read_text())
    found = {row["id"]: row for row in document["rows"]}
    assert found["bake.cold"]["tpuforge"] == {"samples": [40.0], "median": 40.0, "not_run": None}
    assert {row["plain"]["not_run"] for row in document["rows"]} == {"no index answers"}
    assert found["pull.full"]["tpuforge"]["samples"] == [2.0]
    assert any("second line" in note for note in document["notes"])
    assert document["command"] == "./forge measure"
    assert document["machine"]["cores"] >= 1
    assert "host" not in json.dumps(document["machine"])
    assert not (tmp_path / "measure" / "work").exists()
    printed = capsys.readouterr().out
    assert "40.0 s" in printed and "not run" in printed and "3 of 3 rebuilds agree" in printed


def test_a_rebuild_that_differs_is_a_fault(arrange: Arrange, tmp_path: Path) -> None:
    arrange(2)
    assert measure.main(["--no-plain", "--json"]) == 1
    data = json.loads((tmp_path / "results" / "measure.json").read_text())["data"]
    assert {row["plain"]["not_run"] for row in data["rows"]} == {"left out with --no-plain"}
    assert data["command"] == "./forge measure --no-plain --json"


def test_rebuilds_that_could_not_be_made_are_no_verdict(
    arrange: Arrange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured before is kept: it took minutes."""
    arrange(3)

    def fail(*_: object) -> None:
        raise ForgeError("no space for a rebuild")

    def ours(bench: measure.Bench, *_: object) -> tuple[Path, Path]:
        bench.rows["bake.cold"].ours.samples.append(40.0)
        measure._try(bench, lambda row: row.ours, "rebuilds", fail, ("equal",))
        return tmp_path, tmp_path

    monkeypatch.setattr(measure, "ours", ours)
    assert measure.main(["--no-plain", "--json"]) == 2
    result = json.loads((tmp_path / "results" / "measure.json").read_text())
    assert "could not be made: no space for a rebuild" in result["summary"]
    found = {row["id"]: row["tpuforge"] for row in result["data"]["rows"]}
    assert found["equal"]["not_run"] == "no space for a rebuild"
    assert found["bake.cold"]["samples"] == [40.0]
    assert found["pull.full"]["samples"] == [2.0]
    assert found["bake.warm"]["not_run"] is None
