"""What cannot be locked, and the page that says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tpuforge.errors import Exit, ForgeError
from tpuforge.lock import compatibility
from tpuforge.lock.conflicts import CONFLICTS_FILE, load_conflicts, locked_version, over
from tpuforge.pins import load

TEXT = CONFLICTS_FILE.read_text(encoding="utf-8")


def test_page_is_current() -> None:
    assert compatibility.PAGE.read_text(encoding="utf-8") == compatibility.page(load())


def test_each_conflict_still_stands() -> None:
    found = load_conflicts(load())
    assert {one.flavour for one in found} == {"sglang"}
    assert [one.name for one in found if over(one)] == []


def test_conflict_that_is_over_is_seen() -> None:
    one = next(one for one in load_conflicts(load()) if one.states == "torch==2.14.1")
    held = locked_version(one)
    assert over(replace(one, states="torch>=2.13")) == (
        f"torch {held} of runtime satisfies torch>=2.13"
    )
    assert over(replace(one, states="ghost==1")) == "lock/runtime-py312.txt has no ghost"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('flavour = "sglang"', 'colour = "sglang"', "conflict[1].flavour is missing"),
        ('states = "torch==2.14.1"\n', "", ".states is missing"),
        ('"torch==2.14.1"', '"torch is 2"', ".states is torch is 2"),
        ('"torch==2.14.1"', "2", ".states is 2"),
        ('against = "runtime"', 'against = "ghost"', "conflict[1].against is ghost"),
        ('python = "3.12"', 'python = "3.9"', "conflict[1].python is 3.9"),
        ("[[conflict]]", "[[conflict]", "conflicts.toml is not TOML: Expected"),
        ("[[conflict]]", "[[conflicts]]", "conflicts is an unknown key"),
        ("[[conflict]]", "[conflict]", "conflicts.toml is not TOML: "),
        ('version = "0.5.23"', 'version = "0.5.023"', "conflict[1].version is 0.5.023"),
        ('version = "0.5.23"', 'version = "--pre"', "conflict[1].version is '--pre'"),
        ('flavour = "sglang"', 'flavour = "../x"', "conflict[1].flavour is '../x'"),
        ('"torch==2.14.1"', '"torch @ file:///torch.whl"', ".states is torch @ file"),
        ('why = "SGLang', 'why = "a\\n', ".why is 'a"),
    ],
)
def test_bad_conflict_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in TEXT
    path = tmp_path / "conflicts.toml"
    path.write_text(TEXT.replace(old, new), encoding="utf-8")
    with pytest.raises(ForgeError) as caught:
        load_conflicts(load(), path)
    assert words in caught.value.found
    assert caught.value.exit_code == Exit.FAULT


@pytest.mark.parametrize(
    "name",
    [
        "/folder/package",
        "./package",
        "..",
        "evil @ file:///folder/package",
        "evil[extra]",
        "evil==1",
        "evil ",
        "evil.whl",
        "-r/folder/req.txt",
        "--index-url=http://127.0.0.1:9/simple",
        "--no-deps",
        "git+file:///folder",
        "Sglang",
        "sglang-",
        "sgl\u0430ng",
        "",
    ],
)
def test_what_goes_to_pip_is_a_name_and_nothing_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / "conflicts.toml"
    path.write_text(TEXT.replace('name = "sglang"', f'name = "{name}"'), encoding="utf-8")
    with pytest.raises(ForgeError) as caught:
        load_conflicts(load(), path)
    assert caught.value.exit_code == Exit.FAULT


@pytest.mark.parametrize("data", [b"conflict = [1]", b'conflict = ["x"]', b"# \xff", b"a=" * 2])
def test_what_is_no_list_of_conflicts_is_a_fault(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "conflicts.toml"
    path.write_bytes(data)
    with pytest.raises(ForgeError) as caught:
        load_conflicts(load(), path)
    assert caught.value.exit_code == Exit.FAULT
