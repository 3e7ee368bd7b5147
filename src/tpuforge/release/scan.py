"""``scan``: are there known vulnerabilities in an image?

The scanners are other people's: pip-audit for the wheels, and grype or trivy, where one is on PATH,
for the whole layout. A scanner that could not run, or a package that its database does not know, is
said; it never counts as clean. What is known and accepted stands in ``images/vulnerabilities.toml``
with a reason and a last day.

Formats: the JSON of pip-audit 2.10, of grype 0.9 to 0.10x (``matches``), of trivy's schema 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from tpuforge import baked, host, tables
from tpuforge.baked import Baked
from tpuforge.console import Progress, print_table
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import ROOT, out_dir, scratch_dir, user_path
from tpuforge.process import Completed, clean_env, run
from tpuforge.release import bill, sbom
from tpuforge.verb import Outcome, add_image, main_of, parser

VERB = "scan"
ACCEPTED = ROOT / "images" / "vulnerabilities.toml"

_SCAN_S = 1200.0
# where a scanner has its database, and how it gets it
_PASSED_ON = (
    "GRYPE_DB_AUTO_UPDATE",
    "GRYPE_DB_CACHE_DIR",
    "GRYPE_DB_UPDATE_URL",
    "GRYPE_DB_VALIDATE_AGE",
    "TRIVY_CACHE_DIR",
    "TRIVY_DB_REPOSITORY",
    "TRIVY_OFFLINE_SCAN",
    "TRIVY_SKIP_DB_UPDATE",
    "XDG_CACHE_HOME",
)


@dataclass(frozen=True)
class Accepted:
    """A vulnerability that is accepted for a while.

    Attributes:
        id: Any of its names.
        package: The package it is accepted in.
        reason: Why.
        until: The last day.
    """

    id: str
    package: str
    reason: str
    until: date


@dataclass(frozen=True)
class Finding:
    """A known vulnerability of something in an image.

    Attributes:
        id: Its name.
        aliases: Its other names.
        package: The package.
        version: The package's version.
        fixed: Versions that do not have it.
        severity: In the scanner's words; empty if it tells none.
        by: The scanner.
    """

    id: str
    aliases: tuple[str, ...]
    package: str
    version: str
    fixed: tuple[str, ...]
    severity: str
    by: str

    def is_accepted(self, one: Accepted) -> bool:
        """Whether an entry of the list is about this.

        Args:
            one: The entry.
        """
        return one.package == self.package and one.id in (self.id, *self.aliases)


@dataclass
class Report:
    """What one scanner found.

    Attributes:
        scanner: Its name.
        covers: What it looked at: ``wheels`` or ``system``, or both.
        findings: What it found.
        skipped: What it could not look at, and why.
        not_run: Why it did not run; empty if it did.
    """

    scanner: str
    covers: tuple[str, ...]
    findings: list[Finding] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    not_run: str = ""


def read_accepted(path: Path) -> list[Accepted]:
    """Read the list of what is accepted.

    Args:
        path: A TOML file.

    Raises:
        ForgeError: If it cannot be read (exit code 2), or an entry has no reason or last day (1).
    """
    whole = tables.read(path, "docs/scan.md")
    schema = whole.integer("schema")
    if schema != 1:
        raise whole.bad("schema", str(schema), "1")
    entries = whole.tables("accepted")
    whole.end()
    return [
        one.ended(
            Accepted(one.text("id"), one.text("package"), one.text("reason"), one.day("until"))
        )
        for one in entries
    ]


def wheels_of(image: Baked) -> list[tuple[str, str]]:
    """The wheels of an image, as a database of vulnerabilities knows them.

    Args:
        image: The image, with its bill of materials.

    Returns:
        Name and public version: no database knows a build's own label such as ``+cpu``.

    Raises:
        ForgeError: If it has no bill of materials.
    """
    path = image.attestations / sbom.BILL
    try:
        said = bill.read_cyclonedx(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _no_bill(image, str(error)) from error
    if sbom.record_of(image) is None or said.digest != image.image.manifest.digest:
        raise _no_bill(image, f"it is of {said.digest}")
    found = {(part[1], _public(part[2])) for part in said.parts if part[0] == "wheel"}
    return sorted(found)


def _no_bill(image: Baked, why: str) -> ForgeError:
    return ForgeError(
        f"{image.slug} has no bill of materials to scan: {why}",
        expected=f"one of {image.image.manifest.digest}",
        mend=f"./forge sbom --image {image.record['image']}",
    )


def _public(version: str) -> str:
    try:
        return Version(version).public
    except InvalidVersion:
        return version


def pip_audit(
    wheels: Sequence[tuple[str, str]], service: str, osv_url: str | None, timeout: int
) -> Report:
    """Ask pip-audit.

    Args:
        wheels: Name and version of each.
        service: Whose database: ``pypi`` or ``osv``.
        osv_url: Another address of the latter.
        timeout: Seconds for one request.
    """
    report = Report("pip-audit", ("wheels",))
    cache = out_dir() / "cache" / "pip-audit"
    words = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--format", "json"]
    words += ["--progress-spinner", "off", "--timeout", str(timeout), "--cache-dir", str(cache)]
    words += ["--vulnerability-service", service]
    words += ["--osv-url", osv_url] if osv_url else []

    def ask(folder: Path) -> Completed:
        listed = folder / "requirements.txt"
        listed.write_text("".join(f"{name}=={version}\n" for name, version in wheels))
        words.extend(["--requirement", str(listed), "--output", str(folder / "found.json")])
        return run(words, timeout=_SCAN_S, env=clean_env(), check=False, doing="pip-audit")

    _ask(report, ask, lambda body: take_pip_audit(report, body, len(wheels)))
    return report


def take_pip_audit(report: Report, body: Any, asked: int) -> None:
    """Take what pip-audit wrote into its report.

    Args:
        report: The report.
        body: Its JSON.
        asked: How many packages it was asked about.
    """
    for one in body["dependencies"]:
        if "skip_reason" in one:
            report.skipped.append(str(one["skip_reason"]))
        for vuln in one.get("vulns", []):
            aliases, fixed = tuple(vuln.get("aliases", [])), tuple(vuln.get("fix_versions", []))
            report.findings.append(
                Finding(vuln["id"], aliases, one["name"], one["version"], fixed, "", report.scanner)
            )
    if asked and len(report.skipped) >= asked:
        # a network that answers "not found" to all must not look like a clean image
        report.not_run = f"its database knows none of the {asked} packages"


def grype(image: Baked, program: str) -> Report:
    """Ask grype.

    Args:
        image: The image.
        program: Path of grype.
    """
    report = Report("grype", ("system", "wheels"))

    def ask(folder: Path) -> Completed:
        words = [program, "--quiet", "--output", "json", "--file", str(folder / "found.json")]
        return _system(words, f"oci-dir:{image.layout}", "grype")

    _ask(report, ask, lambda body: _take_grype(report, body))
    return report


def _take_grype(report: Report, body: Any) -> None:
    for one in body["matches"]:
        vuln, package = one["vulnerability"], one["artifact"]
        related = [other["id"] for other in one.get("relatedVulnerabilities") or []]
        fixed = tuple((vuln.get("fix") or {}).get("versions") or [])
        report.findings.append(
            Finding(
                vuln["id"],
                tuple(related),
                package["name"],
                package["version"],
                fixed,
                vuln.get("severity", ""),
                report.scanner,
            )
        )


def trivy(image: Baked, program: str) -> Report:
    """Ask trivy.

    Args:
        image: The image.
        program: Path of trivy.
    """
    report = Report("trivy", ("system", "wheels"))

    def ask(folder: Path) -> Completed:
        words = [program, "image", "--quiet", "--scanners", "vuln", "--format", "json"]
        words += ["--output", str(folder / "found.json"), "--input"]
        return _system(words, str(image.layout), "trivy")

    _ask(report, ask, lambda body: _take_trivy(report, body))
    return report


def _take_trivy(report: Report, body: Any) -> None:
    # it leaves the key out where it found nothing
    for result in body.get("Results") or []:
        for one in result.get("Vulnerabilities") or []:
            fixed = tuple(part.strip() for part in one.get("FixedVersion", "").split(",") if part)
            report.findings.append(
                Finding(
                    one["VulnerabilityID"],
                    tuple(one.get("VendorIDs") or ()),
                    one["PkgName"],
                    one["InstalledVersion"],
                    fixed,
                    one.get("Severity", ""),
                    report.scanner,
                )
            )


def _system(words: Sequence[str], what: str, doing: str) -> Completed:
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return run([*words, what], timeout=_SCAN_S, env=clean_env(**passed), check=False, doing=doing)


def _ask(report: Report, ask: Callable[[Path], Completed], take: Callable[[Any], None]) -> None:
    """Take what a scanner wrote; the report says why if it wrote nothing, or something else."""
    with scratch_dir() as folder:
        try:
            done = ask(folder)
            # the exit code does not tell a vulnerability from a database that cannot be had
            body = json.loads((folder / "found.json").read_bytes())
        except ForgeError as error:
            report.not_run = error.found
            return
        except (OSError, ValueError):
            last = done.output.strip().splitlines()[-1:] or [f"exit code {done.code}"]
            report.not_run = last[0][:300]
            return
    try:
        take(body)
    except (KeyError, TypeError, AttributeError) as error:
        report.not_run = f"its answer has another form: {type(error).__name__}: {error}"


def scan(image: Baked, options: argparse.Namespace, progress: Progress) -> list[Report]:
    """Ask every scanner that there is.

    Args:
        image: The image.
        options: The verb's.
        progress: Told what happens.
    """
    reports = []
    if options.scope in ("all", "wheels"):
        wheels = wheels_of(image)
        with progress.step(f"asking pip-audit about {len(wheels)} wheels"):
            if wheels:
                reports.append(pip_audit(wheels, options.service, options.osv_url, options.timeout))
    if options.scope in ("all", "system"):
        reports.append(_of_the_system(image, progress))
    return reports


def _of_the_system(image: Baked, progress: Progress) -> Report:
    for name, ask in (("grype", grype), ("trivy", trivy)):
        program = host.which(name)
        if program:
            with progress.step(f"asking {name}"):
                return ask(image, program)
    return Report("grype or trivy", ("system", "wheels"), not_run="neither is on PATH")


@dataclass
class Judged:
    """All that was found, held against what is accepted.

    Attributes:
        open: What is not accepted.
        accepted: What is, with the entry.
        expired: Entries whose last day is over.
        unused: Entries that nothing was found for.
    """

    open: list[Finding]
    accepted: list[tuple[Finding, Accepted]]
    expired: list[Accepted]
    unused: list[Accepted]


def judge(findings: Iterable[Finding], accepted: Sequence[Accepted], today: date) -> Judged:
    """Hold what was found against what is accepted.

    Args:
        findings: What the scanners found.
        accepted: The list.
        today: The day; an entry counts until the end of its last one.
    """
    valid = [one for one in accepted if one.until >= today]
    judged = Judged([], [], [one for one in accepted if one.until < today], list(valid))
    for finding in findings:
        entry = next((one for one in valid if finding.is_accepted(one)), None)
        if entry is None:
            judged.open.append(finding)
        else:
            judged.accepted.append((finding, entry))
            if entry in judged.unused:
                judged.unused.remove(entry)
    return judged


def _act(options: argparse.Namespace, progress: Progress) -> Outcome:
    accepted = read_accepted(user_path(options.accepted))
    (image,) = baked.choose(options)
    reports = scan(image, options, progress)
    ran = [one for one in reports if not one.not_run]
    judged = judge(
        (finding for one in reports for finding in one.findings),
        accepted,
        datetime.now(UTC).date(),
    )
    silent = [one for one in reports if one.not_run]
    code = Exit.OK
    if silent:
        code = Exit.CANNOT
    if judged.open or judged.expired:
        code = Exit.FAULT
    if not options.json:
        _print(judged)
    lines = [f"  {one.scanner}: not run: {one.not_run}" for one in silent]
    lines += [f"  {one.scanner}: not looked at: {what}" for one in ran for what in one.skipped]
    lines += [
        f"  {one.id} in {one.package} was accepted until {one.until}: look again, then renew or "
        f"remove it in {Path(options.accepted).name}"
        for one in judged.expired
    ]
    notes = [f"{one.scanner} was not run: {one.not_run}" for one in silent]
    notes += [
        f"nothing was found for the accepted {one.id} in {one.package}" for one in judged.unused
    ]
    what = ", ".join(one.scanner for one in ran) or "no scanner"
    summary = (
        f"{image.slug}: {what} ran; {len(judged.open)} open, {len(judged.accepted)} accepted, "
        f"{len(judged.expired)} expired"
    )
    if silent:
        summary += f"; not run: {', '.join(one.scanner for one in silent)}"
    return Outcome(
        "done",
        summary,
        data={
            "image": image.slug,
            "digest": image.image.manifest.digest,
            "scope": options.scope,
            "scanners": [
                {
                    "scanner": one.scanner,
                    "covers": list(one.covers),
                    "not_run": one.not_run or None,
                    "found": len(one.findings),
                    "skipped": one.skipped,
                }
                for one in reports
            ],
            "open": [_finding(one) for one in judged.open],
            "accepted": [
                {**_finding(one), "reason": entry.reason, "until": entry.until.isoformat()}
                for one, entry in judged.accepted
            ],
            "expired": [{**one.__dict__, "until": one.until.isoformat()} for one in judged.expired],
        },
        notes=notes,
        exit_code=code,
        text="\n".join(lines),
    )


def _finding(one: Finding) -> dict[str, Any]:
    return {**one.__dict__, "aliases": list(one.aliases), "fixed": list(one.fixed)}


def _print(judged: Judged) -> None:
    rows = [
        (one.id, f"{one.package} {one.version}", one.severity, ", ".join(one.fixed), "open")
        for one in judged.open
    ]
    rows += [
        (one.id, f"{one.package} {one.version}", one.severity, "", f"accepted until {entry.until}")
        for one, entry in judged.accepted
    ]
    if rows:
        print_table(("vulnerability", "in", "severity", "fixed in", ""), rows)


def arguments() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = parser(VERB, "Look for known vulnerabilities in an image.")
    add_image(made)
    made.add_argument(
        "--scope",
        choices=("all", "wheels", "system"),
        default="all",
        help="what is looked at: wheels, the system's packages, or both (default: all)",
    )
    made.add_argument(
        "--service",
        choices=("pypi", "osv"),
        default="pypi",
        help="whose database pip-audit asks (default: pypi)",
    )
    made.add_argument("--osv-url", metavar="URL", help="another address of the database osv")
    made.add_argument(
        "--timeout", type=int, default=15, metavar="S", help="seconds for one request (default: 15)"
    )
    made.add_argument(
        "--accepted",
        metavar="FILE",
        default=str(ACCEPTED),
        help="what is accepted, instead of images/vulnerabilities.toml",
    )
    return made


main = main_of(VERB, arguments, _act, subject=baked.slug_of)


if __name__ == "__main__":
    raise SystemExit(main())
