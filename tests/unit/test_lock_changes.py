"""Upgrades, without a network: the moments in the pins, and the text of a pull request."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from tpuforge.errors import Exit, ForgeError
from tpuforge.lock.changes import check_names, pull_request, with_moments
from tpuforge.lock.inputs import inputs_key
from tpuforge.pins import PINS_FILE, load

CUTOFF = datetime(2026, 5, 1, tzinfo=UTC)
LATER = datetime(2026, 6, 1, tzinfo=UTC)


def test_moments_are_written_and_read_again(tmp_path: Path) -> None:
    text = PINS_FILE.read_text(encoding="utf-8")
    path = tmp_path / "pins.toml"
    path.write_text(with_moments(text, CUTOFF, {"numpy": LATER, "a-b": LATER}), encoding="utf-8")
    pins = load(path)
    assert pins.cutoff == CUTOFF
    assert pins.later == {"a-b": LATER, "numpy": LATER}
    # the same again, and back, change nothing else
    written = path.read_text(encoding="utf-8")
    assert with_moments(written, CUTOFF, {"numpy": LATER, "a-b": LATER}) == written
    real = load()
    assert with_moments(written, real.cutoff, real.later) == text


def test_pins_of_another_form_are_not_edited() -> None:
    with pytest.raises(ForgeError, match=r"0 line\(s\) cutoff"):
        with_moments('[resolver]\n"cutoff" = "2026-05-01T00:00:00Z"\n', CUTOFF, {})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('Numpy = "2026-06-01T00:00:00Z"', "resolver.later.Numpy is a name"),
        ('numpy = "2026-04-01T00:00:00Z"', "resolver.later.numpy is 2026-04-01"),
        ('numpy = "2926-06-01T00:00:00Z"', "resolver.later.numpy is 2926-06-01"),
        ('numpy = "2026-06-01"', "resolver.later.numpy is"),
        ("numpy = 1", "resolver.later.numpy is 1"),
    ],
)
def test_bad_moment_of_a_package_is_refused(tmp_path: Path, line: str, words: str) -> None:
    text = with_moments(PINS_FILE.read_text(encoding="utf-8"), CUTOFF, {"numpy": LATER})
    path = tmp_path / "pins.toml"
    path.write_text(text.replace('numpy = "2026-06-01T00:00:00Z"', line), encoding="utf-8")
    with pytest.raises(ForgeError) as caught:
        load(path)
    assert words in caught.value.found
    assert caught.value.exit_code == Exit.FAULT


def test_later_moment_makes_stale_only_the_locks_with_that_package(tmp_path: Path) -> None:
    text = PINS_FILE.read_text(encoding="utf-8")
    path = tmp_path / "pins.toml"
    keys = []
    for later in ({}, {"numpy": LATER}):
        path.write_text(with_moments(text, CUTOFF, later), encoding="utf-8")
        pins = load(path)
        keys.append(
            [inputs_key(pins, "tools", "3.11", reached) for reached in (["pip"], ["pip", "numpy"])]
        )
    assert keys[0][0] == keys[0][1] == keys[1][0] != keys[1][1]


def test_names_are_canonical_known_and_not_decided_by_the_pins() -> None:
    pins = load()
    assert check_names(
        pins, ["Typing_Extensions", "numpy", "NumPy"], {"numpy", "typing-extensions"}
    ) == [
        "numpy",
        "typing-extensions",
    ]
    with pytest.raises(ForgeError, match="did you mean numpy"):
        check_names(pins, ["nunpy"], {"numpy"})
    for name in ("torch", "torch_tpu", "libtpu", "torchvision"):
        with pytest.raises(ForgeError, match="stands in the pins") as caught:
            check_names(pins, [name], {"torch", "torch-tpu", "libtpu", "torchvision"})
        assert caught.value.mend.startswith(f"edit {name}.version in lock/pins.toml")


def test_text_of_a_pull_request_has_one_row_for_each_change() -> None:
    def entry(version: str, size: int | None) -> dict[str, object]:
        return {"version": version, "sha256": version, "bytes": size, "why": ["top", "alpha"]}

    before = {("a", "3.11"): {"alpha": entry("1", 1_500_000)}, ("b", "3.11"): {}}
    after = {
        ("a", "3.11"): {"alpha": entry("2", 2_000_000)},
        ("b", "3.11"): {"beta": entry("1", None)},
    }
    text = pull_request(before, after, "Upgrade alpha", "It may be newer.")
    assert text.startswith("# Upgrade alpha\n\nIt may be newer.\n\n2 packages changed in 2 locks.")
    assert "| alpha | 1 | 2 | 1.5 → 2.0 | top > alpha | a-py311 |" in text
    assert "| beta | new | 1 | 0 → ? | top > alpha | b-py311 |" in text
    assert "No package changed" in pull_request(after, after, "Upgrade alpha", "It may be newer.")
