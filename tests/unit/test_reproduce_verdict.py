"""What reproduce makes of its rebuilds; the bakes are small images that are written here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproduce_support import image, layer
from tpuforge import layout as oci
from tpuforge.errors import ForgeError
from tpuforge.images import reproduce
from tpuforge.images.context import Target
from tpuforge.images.reproduce import Way

SLUG = "runtime-py311"
Rebuilds = Callable[..., None]


def record(layout: Path, key: str = "k") -> dict[str, Any]:
    return {
        "schema": "tpuforge.image/1",
        "manifest_digest": oci.read_image(layout).manifest.digest,
        "inputs": {"smoke/": "1"},
        "key": key,
    }


@pytest.fixture
def rebuilds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rebuilds:
    """Have rebuilds come out with given contents, one after the other."""
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path))
    monkeypatch.setattr(reproduce, "ensure_engine", lambda progress: {"private": False})

    def give(*contents: bytes) -> None:
        def rebuild(
            target: object, top: Path, number: int, *rest: object
        ) -> tuple[Way, dict[str, Any], float]:
            del target, rest
            way = Way(f"out-{number}", "077", top, {}, (), (f"place {number}",))
            layout = top / way.folder / "images" / SLUG / "oci"
            image(layout, layer({"opt/x": contents[number - 1]}))
            for name in ("checkout", "home", "engine"):
                (top / f"{name}-{number}").mkdir()
            return way, record(layout), 1.0

        monkeypatch.setattr(reproduce, "rebuild", rebuild)

    return give


def run(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    code = reproduce.main(list(words))
    found = json.loads((tmp_path / "results" / "reproduce.json").read_text())
    return code, found["data"]


def test_rebuilds_that_agree_leave_nothing_behind(tmp_path: Path, rebuilds: Rebuilds) -> None:
    rebuilds(b"1", b"1", b"1")
    code, data = run(tmp_path)
    assert (code, data["equal"], data["differences"], data["kept"]) == (0, 3, [], None)
    assert data["rebuilds"][2]["differs_in"] == ["place 3"]
    assert not (tmp_path / "reproduce" / SLUG).exists()


def test_one_that_differs_is_found_named_and_kept(tmp_path: Path, rebuilds: Rebuilds) -> None:
    rebuilds(b"1", b"1", b"2", b"3")
    code, data = run(tmp_path, "--times", "4")
    assert code == 1
    assert data["equal"] == 2
    assert "opt/x: content" in data["differences"][0]
    assert data["looked_into"][0] == "opt/x: differs from line 1 on: '1' and '2'"
    # the first, and the first that differs; a disk would not hold ten of them
    kept = {path.name for path in Path(data["kept"]).iterdir()}
    assert kept == {"out-1", "out-3"}


def test_a_checkout_that_changes_meanwhile_proves_nothing(
    tmp_path: Path, rebuilds: Rebuilds, monkeypatch: pytest.MonkeyPatch
) -> None:
    rebuilds(b"1", b"2")
    works = reproduce.rebuild

    def edited(target: Target, top: Path, number: int, *rest: Any) -> tuple[Way, Any, float]:
        way, made, spent = works(target, top, number, *rest)
        return way, {**made, "inputs": {"smoke/": str(number)}}, spent

    monkeypatch.setattr(reproduce, "rebuild", edited)
    assert reproduce.main(["--times", "2"]) == 2
    found = json.loads((tmp_path / "results" / "reproduce.json").read_text())["error"]["found"]
    assert found == f"smoke/ changed while {SLUG} was being baked"
    # what changed and made no difference is no fault
    rebuilds(b"1", b"1")
    assert run(tmp_path, "--times", "2")[0] == 0


def test_a_bake_that_fails_leaves_no_image_of_those_before(
    tmp_path: Path, rebuilds: Rebuilds, monkeypatch: pytest.MonkeyPatch
) -> None:
    rebuilds(b"1")
    works = reproduce.rebuild

    def second(target: Target, top: Path, number: int, *rest: Any) -> tuple[Way, Any, float]:
        if number > 1:
            raise ForgeError("no space left")
        way, made, spent = works(target, top, number, *rest)
        (top / way.folder).rename(top / "first")
        return replace(way, folder="first"), made, spent

    monkeypatch.setattr(reproduce, "rebuild", second)
    assert reproduce.main([]) == 2
    assert not (tmp_path / "reproduce" / SLUG / "first").exists()


def test_the_finished_image_of_the_same_inputs_has_to_agree(
    tmp_path: Path, rebuilds: Rebuilds
) -> None:
    finished = tmp_path / "images" / SLUG
    layout = image(finished / "oci", layer({"opt/x": b"2"}))
    rebuilds(b"1", b"1")
    (finished / "image.json").write_text(json.dumps(record(layout, key="of other inputs")))
    code, data = run(tmp_path, "--times", "2")
    assert (code, data["finished"]) == (0, None)
    (finished / "image.json").write_text(json.dumps(record(layout)))
    code, data = run(tmp_path, "--times", "2")
    assert code == 1
    assert data["finished"] == oci.read_image(layout).manifest.digest
    assert data["equal"] == 2
    assert "opt/x: content" in data["differences"][0]


def test_all_is_what_was_baked_here_from_the_locks(
    tmp_path: Path, rebuilds: Rebuilds, monkeypatch: pytest.MonkeyPatch
) -> None:
    rebuilds(b"1", b"1")
    common = {
        "schema": "tpuforge.image/1",
        "python": "3.11",
        "flavour": "runtime",
        "name": "n",
        "manifest_digest": "d",
    }
    for slug, more in (
        (SLUG, {"image": "runtime"}),
        ("runtime-py312", {"image": "runtime", "python": "3.12", "overlay": {"file": "x.whl"}}),
        ("builder", {"image": "builder", "python": "", "flavour": ""}),
        ("half", {"image": "half"}),
    ):
        (tmp_path / "images" / slug).mkdir(parents=True)
        (tmp_path / "images" / slug / "image.json").write_text(json.dumps(common | more))
    (tmp_path / "images" / "half" / "image.json").write_text("{")
    assert [one["image"] for one in reproduce.baked()] == ["builder", "runtime"]
    # one that cannot be baked does not cost the others
    works = reproduce.rebuild

    def fails(target: Target, *rest: Any) -> tuple[Way, dict[str, Any], float]:
        if target.image == "builder":
            raise ForgeError("no bazelisk")
        return works(target, *rest)

    monkeypatch.setattr(reproduce, "rebuild", fails)
    code, data = run(tmp_path, "--all", "--times", "2")
    assert (code, [one["equal"] for one in data["images"]]) == (2, [2])
    assert [error["found"] for error in data["failed"].values()] == ["no bazelisk"]
    shutil.rmtree(tmp_path / "images" / "builder")
    code, data = run(tmp_path, "--all", "--times", "2")
    assert code == 0
    (only,) = data["images"]
    assert only["name"].startswith("tpuforge/runtime:")
    assert only["equal"] == 2
