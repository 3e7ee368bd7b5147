"""What differs between two images: named by layer, path and attribute, and looked into."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from reproduce_support import image, layer
from tpuforge.errors import ForgeError
from tpuforge.images import differences
from tpuforge.images.differences import compare, look_into


def texts(one: Path, two: Path) -> list[str]:
    return [item.text for item in compare(one, two)]


def test_the_same_image_has_no_differences(tmp_path: Path) -> None:
    one, two = (image(tmp_path / name, layer({"a": b"1"})) for name in ("1", "2"))
    assert texts(one, two) == []


def test_a_capability_of_a_file_counts(tmp_path: Path) -> None:
    """A file's extended attributes decide what it may do, and no other attribute tells of them."""
    headers = {"SCHILY.xattr.security.capability": "cap"}
    one = image(tmp_path / "1", layer({"a": b"1"}))
    two = image(tmp_path / "2", layer({"a": b"1"}, headers=headers))
    (line,) = texts(one, two)
    assert "layer 1" in line and ": a: extended attributes {} and " in line


def test_a_path_cannot_write_lines_of_its_own(tmp_path: Path) -> None:
    name = "a\n3 of 3 agree\x1b[2J"
    one, two = (image(tmp_path / n, layer({name: n.encode()})) for n in ("1", "2"))
    found = list(compare(one, two))
    assert found
    for line in (*(item.text for item in found), *look_into(one, two, found)):
        assert line.isprintable() and "a 3 of 3 agree\\x1b[2J: " in line


def test_the_config_is_named_down_to_the_entry(tmp_path: Path) -> None:
    same = layer({"a": b"1"})
    one = image(tmp_path / "1", same, labels={"x": "1", "y": "1"})
    two = image(tmp_path / "2", same, labels={"x": "2", "y": "1"}, created="2027-01-01T00:00:00Z")
    assert texts(one, two) == [
        "config: config: Labels: x: '1' and '2'",
        "config: created: '2026-11-30T00:00:00Z' and '2027-01-01T00:00:00Z'",
    ]


def test_annotations_and_the_number_of_layers_are_named(tmp_path: Path) -> None:
    one = image(tmp_path / "1", layer({"a": b"1"}), annotations={"v": "1"})
    two = image(tmp_path / "2", layer({"a": b"1"}), layer({"b": b"1"}), annotations={"v": "2"})
    found = texts(one, two)
    assert "1 layers and 2 layers" in found
    assert "annotations: v: '1' and '2'" in found


def test_layers_that_both_have_need_not_be_there(tmp_path: Path) -> None:
    """A published image is compared without the layers that are one's own as well."""
    shared, own = layer({"a": b"1"}), layer({"b": b"1"})
    one, two = image(tmp_path / "1", shared, own), image(tmp_path / "2", shared, layer({"b": b"2"}))
    common = {p.name for p in (one / "blobs/sha256").iterdir()}
    common &= {p.name for p in (two / "blobs/sha256").iterdir()}
    (name,) = common
    (two / "blobs/sha256" / name).unlink()
    (line,) = texts(one, two)
    assert "layer 2 (files in /): b: content" in line
    (one / "blobs/sha256" / name).unlink()
    assert texts(one, two) == [line]


@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        (b"x\ny\n", b"x\nz\n", "differs from line 2 on: 'y' and 'z'"),
        (b"\xff\x00\x01", b"\xff\x00\x02", "differs from byte 2 on: 01 and 02"),
        (b"x", b"xy", "one is the beginning of the other; 1 and 2 bytes"),
    ],
)
def test_small_files_are_looked_into(tmp_path: Path, one: bytes, two: bytes, said: str) -> None:
    first, second = (
        image(tmp_path / name, layer({"etc/a": data})) for name, data in (("1", one), ("2", two))
    )
    lines = look_into(first, second, list(compare(first, second)))
    assert lines[0] == f"etc/a: {said}"


def test_three_files_are_looked_into_and_large_ones_are_not(tmp_path: Path) -> None:
    large = b"0" * (2 << 20)
    files = {"a": large, **dict.fromkeys("bcd", b"1")}
    first = image(tmp_path / "1", layer(files))
    second = image(tmp_path / "2", layer({name: data + b"2" for name, data in files.items()}))
    found = list(compare(first, second))
    lines = look_into(first, second, found)
    assert len([item for item in found if item.path]) == 4
    assert lines[0] == "a: too large to be looked into"
    assert [line[0] for line in lines if not line.startswith(" ")] == ["a", "b", "c"]


def test_diffoscope_is_asked_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "diffoscope"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nfor file; do :; done\necho "it looked at $(cat "$file")"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    first, second = (image(tmp_path / str(n), layer({"a": b"%d" % n})) for n in (1, 2))
    lines = look_into(first, second, list(compare(first, second)))
    assert lines == ["a: differs from line 1 on: '1' and '2'", "  it looked at 2"]


def test_a_damaged_layer_is_an_error(tmp_path: Path) -> None:
    one, two = image(tmp_path / "1", layer({"a": b"1"})), image(tmp_path / "2", layer({"a": b"2"}))
    manifest = differences.oci.read_image(two)
    manifest.config.path(two).write_bytes(b"{}")
    with pytest.raises(ForgeError, match="has another digest") as caught:
        texts(one, two)
    assert caught.value.exit_code == 1
