"""Checks chosen by name and by mark, as users of pytest expect it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from smoke_suite_support import Environment


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    yield Environment(tmp_path_factory.mktemp("selection"))


def chosen(installed: Environment, *words: str) -> tuple[int, dict[str, Any]]:
    done = installed.run("health", "--tier", "static,device", *words, "--json", "-")
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def test_marks_are_tiers_and_severities(installed: Environment) -> None:
    _, found = chosen(installed, "-m", "static and warning")
    assert found["checks"]
    assert {(one["tier"], one["severity"]) for one in found["checks"]} == {("static", "warning")}
    assert found["selection"] == "static and warning"
    assert found["tiers"]["device"]["why"] == "no TPU found"


def test_a_mark_and_a_name_together(installed: Environment) -> None:
    code, found = chosen(installed, "-m", "critical", "-k", "static.cuda or static.guard-env")
    assert [one["id"] for one in found["checks"]] == ["static.cuda"]
    assert found["selection"] == "static.cuda or static.guard-env critical"
    assert code == 0


def test_a_tier_of_which_nothing_is_left_is_not_run_and_not_asked_for(
    installed: Environment,
) -> None:
    code, found = chosen(installed, "-m", "device")
    assert found["tiers"]["static"]["status"] == "not run"
    assert found["tiers"]["static"]["why"] == "none of its checks matches device"
    # nothing at all was executed: that is no health
    assert (code, found["verdict"]) == (2, "unjudged")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-m", "static or nonsense"), "Unknown marker"),
        (("-m", "static ("), "Wrong expression passed to '-m'"),
        (("-k", "static ("), "Wrong expression passed to '-k'"),
    ],
)
def test_an_expression_that_makes_no_sense_is_named(
    installed: Environment, words: tuple[str, ...], said: str
) -> None:
    code, found = chosen(installed, *words)
    assert (code, found["verdict"]) == (2, "unjudged")
    assert said in found["trouble"]


def test_every_tier_can_be_named_as_a_mark(installed: Environment) -> None:
    # each tier's checks are kept out by its own name alone; "import" is a word of Python itself
    tiers = ("static", "import", "compile", "simulate", "device")
    marks = " and ".join(f"not {tier}" for tier in tiers)
    done = installed.run("health", "--tier", ",".join(tiers), "-m", marks, "--json", "-")
    found = json.loads(done.stdout)
    assert found["checks"] == []
    assert found["trouble"] is None
