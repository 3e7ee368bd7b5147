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
        (["unit", "tests/unit/test_pins.py", "-k", "y"], ["tests/unit", "tests/unit/test_pins.py"]),
    ],
)
@pytest.mark.parametrize("cores", [1, 2, 16])
def test_rings(
    words: list[str], places: list[str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, argv: run.append(argv[3:]))
    monkeypatch.setattr(os, "chdir", lambda folder: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    tests.main(words)
    options = [word for word in words if word not in ("unit", "remote", "tests/unit/test_pins.py")]
    # the remote ring has one set of services, and one core has nothing to spread to
    alone = cores == 1 or "remote" in words
    spread = [] if alone else ["-n", str(min(cores, 4)), "--dist", "loadfile"]
    assert run == [[*spread, *places, *options]]


@pytest.mark.parametrize("option", ["-n0", "-n", "--pdb", "-s", "-p"])
def test_an_option_that_wants_one_at_a_time_gets_it(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, argv: run.append(argv[3:]))
    monkeypatch.setattr(os, "chdir", lambda folder: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    tests.main(["unit", option])
    assert run == [["tests/unit", option]]


def test_a_ring_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert tests.main(["unti", "-x"]) == 2
    said = capsys.readouterr().err
    assert "tests: there is no ring and no file unti" in said
    assert "mend:     ./forge tests --help" in said
