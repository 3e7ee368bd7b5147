"""Whether a health report is whole, and says what its own checks say.

``smoke`` takes such a report out of a container, ``report`` finds it on disk, and a release carries
it with the image. All ask here, and the verdict is judged again by the suite's own rules
(``smoke/verdict.py``), so that no single word in a file makes an image healthy.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from tpuforge.errors import ForgeError
from tpuforge.paths import ROOT, out_dir, parse_json, read_json
from tpuforge.records import Form, misfit

SCHEMA = "tpuforge.health/1"
TIERS = ("static", "import", "compile", "simulate", "device")
# of what a report tells in one line
_MOST = 1000
_STATUSES = ("passed", "failed", "not run")
_NUMBER = (int, float)
_OPTIONAL_TEXT, _OPTIONAL_COUNT = (str, type(None)), (int, type(None))
_REPORT: Form = {
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
_TIER: Form = {
    "status": str,
    "why": str,
    "required": bool,
    "seconds": _NUMBER,
    "peak_memory_bytes": _OPTIONAL_COUNT,
    "passed": int,
    "failed": int,
    "not_run": int,
}
_CHECK: Form = {
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


@dataclass(frozen=True)
class Told:
    """What a health report says of its image.

    Attributes:
        word: The verdict. ``not judged`` is one that came to none; ``damaged`` a report that its
            own checks do not bear out.
        why: What is behind it, as a clause.
    """

    word: Literal["healthy", "unhealthy", "not judged", "damaged"]
    why: str


def told(data: bytes) -> Told:
    """What a report says of its image, as far as it can be believed.

    Args:
        data: The report, whoever may have written it.

    Raises:
        ForgeError: If the suite's rules are not in this checkout.
    """
    try:
        report = parse_json(data)
    except ValueError:
        return Told("damaged", "it is no JSON")
    if wrong := flaw(report):
        return Told("damaged", wrong)
    verdict = report["verdict"]
    if verdict == "unhealthy":
        return Told("unhealthy", _line("; ".join(failures(report))))
    if report.get("selection"):
        return Told("not judged", _line(f"some checks only were run ({report['selection']})"))
    if verdict == "healthy" and not report["tiers"]["static"]["passed"]:
        return Told("not judged", "the tier static was left out")
    if verdict != "healthy":
        left = "a TPU was there, and unusable" if verdict == "device" else report["trouble"]
        return Told("not judged", _line(left or "the suite came to no verdict"))
    passed = sum(check["status"] == "passed" for check in report["checks"])
    return Told(
        "healthy", _line(f"{passed} checks passed, up to the tier {report['highest_tier']}")
    )


def _line(text: str) -> str:
    """A text of a stranger's report as part of one line: it could look like a verdict."""
    line = "".join(sign if sign.isprintable() else " " for sign in text)
    return line if len(line) <= _MOST else f"{line[:_MOST]} …"


def warning(slug: str, words: str, digest: str, attached: bytes | None) -> str:
    """What a person has to know who hands an image on; empty for a healthy one.

    The report that ``smoke`` left here counts; without one the report that is attached.

    Args:
        slug: The image's folder in ``out/images``.
        words: The arguments that name it.
        digest: Digest of its manifest.
        attached: The health report that goes with it; None without one.
    """
    own = of_image(slug, digest)
    data = own if own is not None else attached
    judge = f"./forge smoke {words}, then ./forge sbom {words}"
    if data is None:
        return f"{slug} was NOT JUDGED by the health suite: {judge}"
    found = told(data)
    if found.word == "unhealthy":
        return f"{slug} is UNHEALTHY, and nobody should be given it: {found.why}"
    if found.word != "healthy":
        return f"{slug} was NOT JUDGED by the health suite: {found.why}: {judge}"
    if own is not None and own != attached:
        return f"the health report of {slug} is not attached yet: ./forge sbom {words}"
    return ""


def failures(report: Mapping[str, Any]) -> list[str]:
    """The checks that make an image unhealthy, each with what was found.

    Args:
        report: A whole health report.
    """
    return [
        f"{check['id']}: {check['detail'] or check['purpose']}"
        for check in report["checks"]
        if check["status"] == "failed" and check["severity"] == "critical"
    ]


def of_image(slug: str, digest: str) -> bytes | None:
    """The report that ``smoke`` left of one very image, whole as the suite left it; None without.

    Args:
        slug: The image's folder in ``out/images``.
        digest: Digest of its manifest.
    """
    folder = out_dir() / "health" / slug
    run = read_json(folder / "run.json")
    if not isinstance(run, dict) or run.get("manifest_digest") != digest:
        return None
    try:
        data = (folder / "health.json").read_bytes()
    except FileNotFoundError:
        return None
    return data if hashlib.sha256(data).hexdigest() == run.get("sha256") else None


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
    if wrong := misfit(report, _REPORT):
        return wrong
    tiers, checks = report["tiers"], report["checks"]
    if set(tiers) != set(TIERS):
        return f"its tiers are not {', '.join(TIERS)}"
    for name, tier in tiers.items():
        if wrong := misfit(tier, _TIER):
            return f"tier {name}: {wrong}"
    for check in checks:
        if wrong := misfit(check, _CHECK):
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


def _rules() -> ModuleType:
    """``smoke/verdict.py``, loaded as a file: it travels in images and knows nothing of us."""
    path = ROOT / "smoke" / "verdict.py"
    spec = importlib.util.spec_from_file_location("tpuforge_verdict", path)
    if spec is None or spec.loader is None:
        raise ForgeError(f"{path} cannot be loaded", expected="the rules of the health suite")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
