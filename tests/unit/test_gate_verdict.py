"""The release gate's own rules: the worst of several, annotations, and how many at once."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from smoke_host_support import health
from tpuforge.errors import Exit, ForgeError
from tpuforge.smoke import gate


def image(name: str, report: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    facts = {
        "image": name,
        "reference": f"some/{name}:1",
        "manifest_digest": "sha256:" + "0" * 64,
        "suite_sha256": "",
        "key": "k",
        "seconds": 1.0,
        "notes": [],
        "report": None,
    }
    return gate.of_image(facts, report, more.pop("error", None), cached=False)


def verdict(*images: dict[str, Any]) -> dict[str, Any]:
    return gate.document(images, {}, "2026-11-30T12:00:00+00:00", 1.0)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([0, 3], 3),
        ([3, 2, 0], 2),
        ([2, 3, 1, 0], 1),
        ([0, 130], 2),
        ([0, 77], 2),
        ([], 2),
    ],
)
def test_the_worst_counts_and_nothing_at_all_is_no_health(codes: list[int], expected: int) -> None:
    assert gate.worst(codes) == expected


def test_an_image_without_a_report_is_never_healthy() -> None:
    error = ForgeError("no engine", mend="./forge engine").as_dict()
    found = verdict(image("a", health()), image("b", None, error=error), image("c", None))
    assert (found["verdict"], found["exit_code"]) == ("unjudged", 2)
    assert [one["verdict"] for one in found["images"]] == ["healthy", "unjudged", "unjudged"]
    assert gate.notices(found)[0] == (
        "::error title=b%3A not judged::no engine%0Amend: ./forge engine"
    )


def test_a_warning_is_a_warning_and_a_critical_check_an_error() -> None:
    report = health("unhealthy", 1)
    report["checks"][0] |= {"status": "failed", "severity": "warning", "detail": "x"}
    lines = gate.notices(verdict(image("a,b", report)))
    assert [line.split("::")[1] for line in lines] == [
        "warning title=a%2Cb%3A static.closure",
        "error title=a%2Cb%3A import.torch",
    ]


def test_an_incomplete_tier_is_shown_as_what_it_is() -> None:
    report = health("unjudged", 2) | {"trouble": None}
    why = "compile.small was not run: killed"
    report["tiers"]["compile"] |= {"status": "incomplete", "why": why}
    found = verdict(image("a", report))
    assert "incomplete" in gate.rows(found)[1][0]
    assert f"compile: {why}" in gate.trouble_of(found["images"][0])
    text = gate.summary(found)
    assert f"- incomplete: compile: {why}" in text
    assert "| incomplete |" in text


def test_what_was_not_judged_says_why() -> None:
    found = verdict(image("a", health("unjudged", 2)))
    assert gate.notices(found) == ["::error title=a%3A not judged::the suite stopped"]
    assert "- not judged: the suite stopped" in gate.summary(found)


def test_a_summary_holds_no_markup_of_an_image() -> None:
    report = health("unhealthy", 1)
    report["checks"][1]["detail"] = "<script>|`[x](y)\n# big"
    text = gate.summary(verdict(image("a", report)))
    assert "&lt;script&gt;\\|'\\[x](y) Expected: import.torch holds. Mend" in text
    report["checks"][1]["detail"] = "x" * 2_000_000
    assert len(gate.summary(verdict(image("a", report))).encode()) < 1 << 20


@pytest.mark.parametrize(
    ("free_kb", "count", "expected"),
    [(100_000_000, 1, 1), (100_000_000, 100, None), (7_000_000, 100, 2), (10_000, 5, 1)],
)
def test_as_many_at_once_as_cores_and_memory_allow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_kb: int,
    count: int,
    expected: int | None,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable:   {free_kb} kB\n")
    assert gate.lanes(count, meminfo) == (8 if expected is None else expected)
    assert gate.lanes(count, tmp_path / "none") == 1


def test_a_mistake_in_one_ends_the_others() -> None:
    ended = []

    def fails(stop: threading.Event) -> None:
        raise OSError("no space")

    def waits(stop: threading.Event) -> None:
        stop.wait(60)
        ended.append(stop.is_set())

    started = time.monotonic()
    with pytest.raises(OSError, match="no space"):
        gate.side_by_side([waits, fails], 2)
    assert ended == [True]
    assert time.monotonic() - started < 30


def test_no_more_at_once_than_told() -> None:
    running, most = [0], [0]
    lock = threading.Lock()

    def works(stop: threading.Event) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        stop.wait(0.05)
        with lock:
            running[0] -= 1

    gate.side_by_side([works] * 6, 2)
    assert most == [2]


def test_every_exit_code_of_a_report_has_its_word() -> None:
    assert {int(code): word for code, word in gate.VERDICTS.items()} == {
        int(Exit.OK): "healthy",
        int(Exit.FAULT): "unhealthy",
        int(Exit.CANNOT): "unjudged",
        int(Exit.DEVICE): "device",
    }
