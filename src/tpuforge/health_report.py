"""Whether a health report is whole, and says what its own checks say.

Two verbs believe such a report: ``smoke``, which takes it out of a container, and ``report``, which
finds it on disk. Both ask here, and the verdict is judged again by the suite's own rules
(``smoke/verdict.py``), so that no single word in a file makes an image healthy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tpuforge.errors import ForgeError
from tpuforge.paths import ROOT

SCHEMA = "tpuforge.health/1"
TIERS = ("static", "import", "compile", "simulate", "device")
_STATUSES = ("passed", "failed", "not run")
_NUMBER = (int, float)
_OPTIONAL_TEXT, _OPTIONAL_COUNT = (str, type(None)), (int, type(None))
_Shape = Mapping[str, type | tuple[type, ...]]
_REPORT: _Shape = {
    "image": (dict, type(None)),
    "started": str,
    "seconds": _NUMBER,
    "host": dict,
    "trouble": _OPTIONAL_TEXT,
    "verdict": str,
    "exit_code": int,
    "highest_tier": _OPTIONAL_TEXT,
    "tiers": dict,
    "checks": list,
    "packages": list,
}
_TIER: _Shape = {
    "status": str,
    "why": str,
    "required": bool,
    "seconds": _NUMBER,
    "peak_memory_bytes": _OPTIONAL_COUNT,
    "passed": int,
    "failed": int,
    "not_run": int,
}
_CHECK: _Shape = {
    "id": str,
    "tier": str,
    "purpose": str,
    "severity": str,
    "remedy": str,
    "status": str,
    "detail": str,
    "seconds": _NUMBER,
    "peak_memory_bytes": _OPTIONAL_COUNT,
    "figures": dict,
}


def flaw(report: Any) -> str:
    """What keeps a document from being a health report that can be believed.

    Args:
        report: Any JSON document.

    Returns:
        One clause, such as ``it has no tiers``; empty if the report is whole.

    Raises:
        ForgeError: If the suite's rules are not in this checkout.
    """
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        return f"it has not the schema {SCHEMA}"
    if wrong := _misfit(report, _REPORT):
        return wrong
    tiers, checks = report["tiers"], report["checks"]
    if set(tiers) != set(TIERS):
        return f"its tiers are not {', '.join(TIERS)}"
    for name, tier in tiers.items():
        if wrong := _misfit(tier, _TIER):
            return f"tier {name}: {wrong}"
    for check in checks:
        if wrong := _misfit(check, _CHECK):
            return f"a check: {wrong}"
        if check["tier"] not in TIERS or check["status"] not in _STATUSES:
            return f"the check {check['id']} has an unknown tier or status"
    rules = _rules()
    for name, tier in tiers.items():
        summed = rules.tier([check for check in checks if check["tier"] == name])
        for key in ("status", "passed", "failed", "not_run"):
            if tier[key] != summed[key]:
                return f"tier {name} says {key} {tier[key]}, and its checks {summed[key]}"
    if rules.VERDICTS.get(report["exit_code"]) != report["verdict"]:
        return f"its verdict {report['verdict']} has the exit code {report['exit_code']}"
    judged = rules.VERDICTS[rules.judge(tiers, checks, report["trouble"])]
    # "unjudged" claims nothing, and the suite says it also for reasons that no check shows
    if report["verdict"] not in (judged, "unjudged"):
        return f"it says {report['verdict']}, and its checks say {judged}"
    return ""


def _misfit(value: Any, shape: _Shape) -> str:
    """The first key of a table that is missing or of another type."""
    if not isinstance(value, dict):
        return "it is no object"
    for key, kind in shape.items():
        if key not in value:
            return f"it has no {key}"
        # for Python true is a number
        if not isinstance(value[key], kind) or (isinstance(value[key], bool) and kind is not bool):
            return f"its {key} has another type"
    return ""


def _rules() -> ModuleType:
    """``smoke/verdict.py``, loaded as a file: it travels in images and knows nothing of us."""
    path = ROOT / "smoke" / "verdict.py"
    spec = importlib.util.spec_from_file_location("tpuforge_verdict", path)
    if spec is None or spec.loader is None:
        raise ForgeError(f"{path} cannot be loaded", expected="the rules of the health suite")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
