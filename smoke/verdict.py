"""From check results to tiers, a verdict and an exit code.

Rules, in this order (``docs/health.md`` gives them to people):

A tier *passed* when its critical checks were executed, all of them, and none failed. One of which a
critical check was not run is *incomplete*: what was executed passed, and nobody knows the rest.

1. A critical check failed: *unhealthy*, exit 1. The check ``device.usable`` is the one exception,
   see rule 3.
2. The suite itself failed, nothing at all was executed, or a required tier or one of its critical
   checks did not run: *unjudged*, exit 2. A tier is required when it was asked for, with two
   exceptions: *device* without a TPU, and *simulate* without a simulator unless ``--tier`` named
   it. A tier that ``-k`` left nothing of is not required either.
3. A TPU is there and cannot be used: *device*, exit 3.
4. Otherwise *healthy*, exit 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TIERS = ("static", "import", "compile", "simulate", "device")
"""All tiers, from the cheapest to the one that needs a TPU."""

HEALTHY, UNHEALTHY, UNJUDGED, DEVICE = 0, 1, 2, 3
VERDICTS = {HEALTHY: "healthy", UNHEALTHY: "unhealthy", UNJUDGED: "unjudged", DEVICE: "device"}
DEVICE_CHECK = "device.usable"


def tier(
    checks: Sequence[Mapping[str, Any]],
    *,
    why: str = "",
    required: bool = True,
    seconds: float = 0.0,
    peak_memory_bytes: int | None = None,
) -> dict[str, Any]:
    """Sum up the checks of one tier.

    Args:
        checks: Its checks.
        why: Why it did not run, if its checks do not say so.
        required: Whether its not running leaves the image unjudged.
        seconds: Wall time of its checks.
        peak_memory_bytes: Memory of the suite itself; the checks' own is added.

    Returns:
        The tier as it stands in ``health.json``.
    """
    count = {word: sum(c["status"] == word for c in checks) for word in _WORDS}
    bad = [c for c in checks if c["status"] == "failed" and c["severity"] == "critical"]
    warned = [c for c in checks if c["status"] == "failed" and c["severity"] != "critical"]
    left = [c for c in checks if c["status"] == "not run" and c["severity"] == "critical"]
    executed = count["passed"] + count["failed"]
    if bad:
        status = "failed"
        why = f"{bad[0]['id']}: {bad[0]['detail']}"
    elif executed and left:
        status = "incomplete"
        why = "; ".join(f"{c['id']} was not run: {c['detail']}" for c in left)
    elif executed:
        status = "passed"
        why = "; ".join(f"warning {c['id']}: {c['detail']}" for c in warned)
    else:
        status = "not run"
        why = next((c["detail"] for c in checks if c["detail"]), why) or "it has no check"
    peaks = [c["peak_memory_bytes"] for c in checks if c["peak_memory_bytes"]]
    if peak_memory_bytes and executed:
        peaks.append(peak_memory_bytes)
    return {
        "status": status,
        "why": why,
        "required": required,
        "seconds": round(seconds, 3),
        "peak_memory_bytes": max(peaks) if peaks else None,
        "passed": count["passed"],
        "failed": count["failed"],
        "not_run": count["not run"],
    }


_WORDS = ("passed", "failed", "not run")


def judge(
    tiers: Mapping[str, Mapping[str, Any]],
    checks: Sequence[Mapping[str, Any]],
    trouble: str | None = None,
) -> int:
    """The exit code of a run, by the rules above.

    Args:
        tiers: All five tiers.
        checks: All checks.
        trouble: What went wrong in the suite itself, if anything did.
    """
    failed = [c for c in checks if c["status"] == "failed" and c["severity"] == "critical"]
    if any(c["id"] != DEVICE_CHECK for c in failed):
        return UNHEALTHY
    if trouble or not any(c["status"] in ("passed", "failed") for c in checks):
        return UNJUDGED
    unusable = bool(failed)
    for name, one in tiers.items():
        if not one["required"] or (name == "device" and unusable):
            continue
        left = any(
            c["tier"] == name and c["severity"] == "critical" and c["status"] == "not run"
            for c in checks
        )
        if left or one["status"] in ("not run", "incomplete"):
            return UNJUDGED
    return DEVICE if unusable else HEALTHY


def highest(tiers: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The highest tier that passed whole, with no failed tier below it; None if there is none.

    Args:
        tiers: All five tiers.
    """
    reached = None
    for name in TIERS:
        if tiers[name]["status"] == "failed":
            break
        if tiers[name]["status"] == "passed":
            reached = name
    return reached


def merge(earlier: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Join two runs on the same image: this run's tiers, and the earlier run's other ones.

    Args:
        earlier: An earlier ``health.json``.
        current: This run's.

    Returns:
        One document, judged anew.

    Raises:
        ValueError: If the earlier one has another schema or is of another image.
    """
    if earlier.get("schema") != current["schema"]:
        raise ValueError(f"its schema is {earlier.get('schema')!r}, not {current['schema']!r}")
    if _lock_of(earlier) != _lock_of(current):
        raise ValueError("it is of another image: the digests of the locks differ")
    if earlier.get("trouble") and not current["trouble"]:
        trouble: str | None = earlier["trouble"]
    else:
        trouble = current["trouble"]
    took = {name: current for name in TIERS if current["tiers"][name]["asked"]}
    tiers = {name: took.get(name, earlier)["tiers"][name] for name in TIERS}
    checks = [
        check
        for name in TIERS
        for check in took.get(name, earlier)["checks"]
        if check["tier"] == name
    ]
    code = judge(tiers, checks, trouble)
    return {
        **current,
        "started": min(earlier["started"], current["started"]),
        "seconds": round(earlier["seconds"] + current["seconds"], 3),
        "tiers": tiers,
        "checks": checks,
        "trouble": trouble,
        "verdict": VERDICTS[code],
        "exit_code": code,
        "highest_tier": highest(tiers),
    }


def _lock_of(health: Mapping[str, Any]) -> Any:
    return (health.get("image") or {}).get("lock_sha256")
