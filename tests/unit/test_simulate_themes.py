"""Themes of the simulate tier: order, blame, ends; and how known limits are judged."""

from __future__ import annotations

import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from smoke import isolate, workloads
from smoke.plugin import Check
from smoke.simulator import limits, programs, themes

from smoke_suite_support import ROOT
from tpuforge.smoke import simulator

Run = Callable[..., isolate.Ended]
Make = Callable[[Sequence[tuple[str, str]], Run], themes.Crew]
EAGER = [("eager", name) for name in ("train", "amp", "fallback")]


def ended(value: Any, error: str | None = None, kind: str | None = None) -> isolate.Ended:
    return isolate.Ended(value, error, kind, 1.0, 700, "")


def fine(names: Sequence[str]) -> isolate.Ended:
    return ended({name: {"value": {"detail": name}, "seconds": 0.5} for name in names})


def check() -> Check:
    return Check("simulate.x", "simulate", "p", "critical", "r")


@pytest.fixture
def crew_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """A started crew whose processes are a function of the test's own."""
    monkeypatch.setenv("TPUFORGE_SIMULATOR", str(tmp_path))
    started: list[themes.Crew] = []

    def make(chosen: Sequence[tuple[str, str]], run: Run) -> themes.Crew:
        monkeypatch.setattr(isolate, "run", run)
        crew = themes.Crew(chosen)
        crew.start()
        started.append(crew)
        return crew

    yield make
    for crew in started:
        crew.stop()


def test_every_program_exists_and_no_theme_waits_for_a_later_one() -> None:
    names = list(themes.THEMES)
    for name, theme in themes.THEMES.items():
        assert all(callable(getattr(programs, program)) for program in theme.programs)
        assert theme.after is None or names.index(theme.after) < names.index(name)
    assert set(themes.GENERATIONS) == set(simulator.GENERATIONS)


def test_a_check_gets_the_figures_of_its_program(crew_of: Make) -> None:
    crew = crew_of(EAGER, lambda function, names, **_: fine(names))
    asked = check()
    assert crew.figures(asked, "eager", "amp") == {}
    assert asked.detail == "amp"
    assert asked.figures == {"program_seconds": 0.5}
    assert asked.peak_memory_bytes == 700


def test_a_program_that_fails_fails_alone(crew_of: Make) -> None:
    def run(function: Any, names: Sequence[str], **_: Any) -> isolate.Ended:
        value = fine(names).value
        value["amp"] = {"error": "it differs"}
        value["fallback"] = {"cannot": "no counters"}
        return ended(value)

    crew = crew_of(EAGER, run)
    crew.figures(check(), "eager", "train")
    with pytest.raises(AssertionError, match="it differs"):
        crew.figures(check(), "eager", "amp")
    with pytest.raises(pytest.skip.Exception, match="no counters"):
        crew.figures(check(), "eager", "fallback")


def test_of_a_theme_that_died_only_the_program_to_blame_fails(crew_of: Make) -> None:
    def run(function: Any, names: Sequence[str], **_: Any) -> isolate.Ended:
        if "amp" in names:
            return ended(None, "the process was ended by SIGABRT", "signal")
        return fine(names)

    crew = crew_of(EAGER, run)
    crew.figures(check(), "eager", "train")
    with pytest.raises(AssertionError, match="SIGABRT"):
        crew.figures(check(), "eager", "amp")


def test_a_theme_killed_from_outside_is_not_judged(crew_of: Make) -> None:
    crew = crew_of(EAGER, lambda *_, **__: ended(None, "a memory limit does that", "killed"))
    with pytest.raises(pytest.skip.Exception, match="memory limit"):
        crew.figures(check(), "eager", "train")


def test_the_second_process_starts_after_the_first_with_the_same_cache(crew_of: Make) -> None:
    spans: list[tuple[float, float]] = []
    seen: list[dict[str, str]] = []

    def run(function: Any, names: Sequence[str], *, env: dict[str, str], **_: Any) -> isolate.Ended:
        started = time.monotonic()
        time.sleep(0.05)
        spans.append((started, time.monotonic()))
        seen.append(env)
        return fine(names)

    crew = crew_of([("warm", "counted_work"), ("cold", "counted_work")], run)
    crew.figures(check(), "cold", "counted_work")
    crew.figures(check(), "warm", "counted_work")
    root = Path(seen[0][themes.CACHE_ROOT])
    assert root.is_dir()
    crew.stop()
    assert spans[0][1] <= spans[1][0]
    assert seen[0] == seen[1]
    assert seen[0]["TORCH_TPU_TIER2_COMPILATION_CACHE"] == root.name
    assert not root.exists()


def test_an_end_does_not_wait_for_what_runs(crew_of: Make) -> None:
    def run(function: Any, names: Sequence[str], *, stop: threading.Event, **_: Any) -> Any:
        assert stop.wait(20), "it was never told to stop"
        return ended(None, "ended", "timeout")

    crew = crew_of([(name, one.programs[0]) for name, one in themes.THEMES.items()], run)
    started = time.monotonic()
    crew.stop()
    assert time.monotonic() - started < 5


def test_a_process_can_be_ended_before_its_time() -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    done = isolate.run(time.sleep, 30, timeout=60, stop=stop)
    assert done.kind == "timeout"
    assert done.seconds < 10


def test_another_chip_is_shown_beside_what_is_preloaded() -> None:
    env = themes.other_chip(Path("/opt/simulator"), "v4", {"LD_PRELOAD": "/usr/lib/malloc.so"})
    assert env == {
        "LD_PRELOAD": "/usr/lib/malloc.so:/opt/simulator/bus.so",
        "TPUFORGE_PCI_DEVICES": "/opt/simulator/generations/v4",
    }
    assert themes.other_chip(Path("/s"), "v7", {})["LD_PRELOAD"] == "/s/bus.so"


def test_the_limits_are_listed_each_with_its_probe() -> None:
    known = limits.listed()
    assert {entry["probe"] for entry in known} == set(limits.PROBES)
    with (ROOT / "smoke/operators/limits.toml").open("rb") as file:
        operators = tomllib.load(file)["listed"]
    # what both lists hold back for is the same
    assert {"vhlo\\.composite"} <= {one["match"] for one in operators} & {
        one["match"] for one in known
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('what = "w"', "not the fields"),
        ('what = "w"\nreason = ""\ninstead = "i"\nprobe = "scan"\nmatch = "m"', "an empty field"),
        ('what = "w"\nreason = "r"\ninstead = "i"\nprobe = "x"\nmatch = "m"', "no probe x"),
    ],
)
def test_an_entry_that_nobody_could_try_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f"[[limit]]\n{text}\n")
    with pytest.raises(AssertionError, match=words):
        limits.listed(file)


def test_a_limit_that_is_gone_or_has_changed_is_told() -> None:
    entry = {"what": "scans", "match": "vhlo\\.composite"}
    assert limits.judge(entry, "failed to legalize vhlo.composite_v2") is None
    gone = limits.judge(entry, None)
    assert gone is not None
    assert "works by now" in gone
    (unique,) = [one for one in limits.listed() if one["probe"] == "unique"]
    for name in ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGBUS"):
        assert limits.judge(unique, f"its process was ended by {name}") is None
    for words in ("its process was ended by SIGKILL", "exit 1", "RuntimeError: SIGSEGV"):
        assert "another way" in (limits.judge(unique, words) or "")
    other = limits.judge(entry, "no such operator")
    assert other is not None
    assert "another way" in other
    assert "no such operator" in other


def counted(requests: int, hits: int, compilations: int) -> dict[str, int]:
    """What the counters of the compile cache say of one round."""
    names = ("num_cache_reqs", "num_cache_hits", "num_compilations")
    return dict(zip(names, (requests, hits, compilations), strict=True))


ROUNDS = (counted(4, 0, 4), counted(4, 4, 0), counted(4, 0, 4))
STEPS = (9, 2, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("rounds", "steps", "words"),
    [
        ({0: counted(4, 4, 0)}, STEPS, "the first round compiled nothing"),
        ({1: counted(4, 3, 1)}, STEPS, "compiled 1 times again"),
        ({1: counted(4, 3, 0)}, STEPS, "the cache was not asked"),
        ({1: counted(0, 0, 0)}, STEPS, "the cache was not asked"),
        ({2: counted(4, 4, 0)}, STEPS, "a new shape was not compiled"),
        ({}, (0, 0, 0, 0, 0, 0), "the first training step compiled nothing"),
        ({}, (9, 2, 0, 1, 0, 0), "training steps compile after 2 steps"),
    ],
)
def test_a_compile_cache_that_does_not_work_is_told(
    monkeypatch: pytest.MonkeyPatch,
    rounds: dict[int, dict[str, int]],
    steps: tuple[int, ...],
    words: str,
) -> None:
    def answer(said: Sequence[dict[str, int]], made: Sequence[int]) -> None:
        monkeypatch.setattr(workloads, "cache_counters", lambda: {"counters": list(said)})
        monkeypatch.setattr(programs, "_compilations_of_training", lambda: list(made))

    answer(ROUNDS, STEPS)
    assert "then 4 hits and none" in programs.cache()["detail"]
    answer([rounds.get(number, usual) for number, usual in enumerate(ROUNDS)], steps)
    with pytest.raises(AssertionError, match=words):
        programs.cache()


def test_without_counters_nothing_is_said_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "cache_counters", lambda: {"counters": None})
    with pytest.raises(programs.CannotError, match="the only counters"):
        programs.cache()
