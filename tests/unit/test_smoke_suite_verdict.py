"""The rules from results to verdict and exit code, one by one."""

from __future__ import annotations

from typing import Any

import pytest
from smoke import verdict
from smoke.verdict import DEVICE, HEALTHY, TIERS, UNHEALTHY, UNJUDGED


def _check(tier: str, status: str = "passed", severity: str = "critical", what: str = "x") -> Any:
    return {
        "id": f"{tier}.{what}",
        "tier": tier,
        "severity": severity,
        "status": status,
        "detail": f"{what} {status}",
        "peak_memory_bytes": None,
    }


def _tiers(checks: list[Any], not_required: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        name: verdict.tier(
            [c for c in checks if c["tier"] == name], required=name not in not_required
        )
        | {"asked": True}
        for name in TIERS
    }


def _judge(*checks: Any, excused: tuple[str, ...] = (), trouble: str | None = None) -> int:
    return verdict.judge(_tiers(list(checks), excused), list(checks), trouble)


ALL = [_check(name) for name in TIERS]


def test_everything_passed_is_healthy() -> None:
    assert _judge(*ALL) == HEALTHY


def test_one_critical_failure_is_unhealthy() -> None:
    assert _judge(*ALL, _check("static", "failed", what="y")) == UNHEALTHY


def test_a_failed_warning_changes_nothing() -> None:
    assert _judge(*ALL, _check("static", "failed", "warning", "y")) == HEALTHY


def test_a_missing_required_tier_is_unjudged() -> None:
    assert _judge(*ALL[:-2], excused=("device",)) == UNJUDGED


def test_a_missing_excused_tier_is_healthy() -> None:
    assert _judge(*ALL[:-2], excused=("simulate", "device")) == HEALTHY


def test_nothing_executed_is_unjudged() -> None:
    assert _judge(excused=TIERS) == UNJUDGED
    assert _judge(_check("device", "not run"), excused=TIERS) == UNJUDGED


def test_a_critical_check_that_did_not_run_leaves_its_tier_unjudged() -> None:
    assert _judge(*ALL, _check("compile", "not run", what="y")) == UNJUDGED
    assert _judge(*ALL, _check("compile", "not run", "warning", "y")) == HEALTHY


def test_trouble_of_the_suite_is_unjudged_and_a_failure_stays_a_failure() -> None:
    assert _judge(*ALL, trouble="it broke") == UNJUDGED
    assert _judge(*ALL, _check("import", "failed", what="y"), trouble="it broke") == UNHEALTHY


def test_an_unusable_tpu_is_its_own_verdict() -> None:
    device = [
        _check("device", "failed", what="usable"),
        _check("device", "not run", what="train"),
    ]
    assert _judge(*ALL[:-1], *device) == DEVICE
    assert _judge(*ALL[:-1], *device, _check("static", "failed", what="y")) == UNHEALTHY
    assert _judge(*ALL[1:-1], *device) == UNJUDGED


def test_wrong_results_on_a_usable_tpu_are_unhealthy() -> None:
    device = [_check("device", what="usable"), _check("device", "failed", what="train")]
    assert _judge(*ALL[:-1], *device) == UNHEALTHY


def test_a_tier_without_an_executed_check_never_passed() -> None:
    assert verdict.tier([])["status"] == "not run"
    skipped = verdict.tier([_check("static", "not run")])
    assert (skipped["status"], skipped["why"], skipped["not_run"]) == ("not run", "x not run", 1)


def test_a_tier_counts_and_says_why() -> None:
    checks = [
        _check("static"),
        _check("static", "failed", "warning", "w"),
        _check("static", "not run", "warning", what="n"),
    ]
    checks[0]["peak_memory_bytes"] = 7
    one = verdict.tier(checks, seconds=1.23456, peak_memory_bytes=5)
    assert one["status"] == "passed"
    assert one["why"] == "warning static.w: w failed"
    assert (one["passed"], one["failed"], one["not_run"]) == (1, 1, 1)
    assert (one["peak_memory_bytes"], one["seconds"]) == (7, 1.235)
    bad = verdict.tier([*checks, _check("static", "failed", what="c")])
    assert (bad["status"], bad["why"]) == ("failed", "static.c: c failed")


def test_a_tier_of_which_a_critical_check_was_not_run_is_incomplete() -> None:
    checks = [_check("compile"), _check("compile", "not run", what="n")]
    one = verdict.tier(checks)
    assert (one["status"], one["why"]) == ("incomplete", "compile.n was not run: n not run")
    assert verdict.tier([checks[0], _check("compile", "not run", "warning")])["status"] == "passed"
    assert verdict.tier([*checks, _check("compile", "failed", what="c")])["status"] == "failed"


def test_an_incomplete_tier_leaves_the_image_unjudged_and_is_not_reached() -> None:
    checks = [*ALL, _check("compile", "not run", what="y")]
    assert _judge(*checks) == UNJUDGED
    # also where only the tier is known, as in a file of an older run
    assert verdict.judge(_tiers(checks), ALL) == UNJUDGED
    assert verdict.highest(_tiers(checks[:3] + checks[5:])) == "import"
    assert _judge(*checks, excused=("compile",)) == HEALTHY


@pytest.mark.parametrize(
    ("statuses", "reached"),
    [
        (("passed", "passed", "incomplete", "not run", "not run"), "import"),
        (("passed", "passed", "passed", "passed", "not run"), "simulate"),
        (("passed", "passed", "passed", "not run", "passed"), "device"),
        (("passed", "failed", "passed", "passed", "passed"), "static"),
        (("failed", "passed", "passed", "passed", "passed"), None),
        (("not run",) * 5, None),
    ],
)
def test_the_highest_tier(statuses: tuple[str, ...], reached: str | None) -> None:
    tiers = {name: {"status": word} for name, word in zip(TIERS, statuses, strict=True)}
    assert verdict.highest(tiers) == reached


def _run(asked: tuple[str, ...], checks: list[Any], lock: str = "a", **more: Any) -> dict[str, Any]:
    tiers = _tiers(checks, tuple(name for name in TIERS if name not in asked or name == "device"))
    for name in TIERS:
        tiers[name]["asked"] = name in asked
    code = verdict.judge(tiers, checks, None)
    return {
        "schema": "tpuforge.health/1",
        "image": {"lock_sha256": lock},
        "started": "2026-01-01T00:00:00+00:00",
        "seconds": 1.0,
        "trouble": None,
        "tiers": tiers,
        "checks": checks,
        "exit_code": code,
        **more,
    }


PLAIN = ("static", "import", "compile", "device")


def test_merging_takes_each_tier_from_the_run_that_was_asked_for_it() -> None:
    earlier = _run(PLAIN, [_check("static"), _check("import"), _check("compile")])
    current = _run(("simulate",), [_check("simulate")], started="2026-01-01T00:01:00+00:00")
    merged = verdict.merge(earlier, current)
    assert (merged["verdict"], merged["exit_code"]) == ("healthy", HEALTHY)
    assert merged["highest_tier"] == "simulate"
    assert [check["tier"] for check in merged["checks"]] == list(TIERS[:4])
    assert (merged["seconds"], merged["started"]) == (2.0, earlier["started"])


def test_merging_keeps_an_earlier_failure_and_takes_a_newer_result() -> None:
    earlier = _run(PLAIN, [_check("static", "failed"), _check("import"), _check("compile")])
    simulated = _run(("simulate",), [_check("simulate")])
    assert verdict.merge(earlier, simulated)["exit_code"] == UNHEALTHY
    again = _run(("static",), [_check("static")])
    assert verdict.merge(earlier, again)["exit_code"] == HEALTHY


def test_merging_keeps_earlier_trouble() -> None:
    earlier = _run(PLAIN, [_check("static"), _check("import"), _check("compile")], trouble="broke")
    merged = verdict.merge(earlier, _run(("simulate",), [_check("simulate")]))
    assert (merged["trouble"], merged["exit_code"]) == ("broke", UNJUDGED)


def test_merging_refuses_another_image_and_another_schema() -> None:
    current = _run(("simulate",), [_check("simulate")])
    with pytest.raises(ValueError, match="another image"):
        verdict.merge(_run(PLAIN, [_check("static")], lock="b"), current)
    with pytest.raises(ValueError, match="schema"):
        verdict.merge(_run(PLAIN, [_check("static")], schema="other/1"), current)
