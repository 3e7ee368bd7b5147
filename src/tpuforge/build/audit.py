"""``audit_wheel``: judge a wheel by rules, without installing it.

For wheels of torch_tpu, built here or fetched, and of libtpu; the general rules fit any wheel.
The rules stand in :mod:`tpuforge.build.rules`, what they look at in
:mod:`tpuforge.build.contents`. ``fetch_wheel`` and ``build_wheel`` call :func:`audit` and
:func:`remembered`. The report's JSON, ``tpuforge.audit/1``, is described in docs/audit_wheel.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from tpuforge import pins as pins_module
from tpuforge.build.findings import LIBTPU, TORCH_TPU, Finding, Severity
from tpuforge.console import Progress, error_console, print_table
from tpuforge.errors import Exit, ForgeError
from tpuforge.lockfile import read_lock
from tpuforge.paths import ROOT, out_dir, read_json, sha256_file, sha256_text, write_json
from tpuforge.process import clean_env, run
from tpuforge.verb import Outcome, parser, run_verb

VERB = "audit_wheel"
SCHEMA = "tpuforge.audit/1"
PACKAGES = (TORCH_TPU, LIBTPU)
"""The packages whose wheels are audited when they are fetched."""

# of what each rule finds: a wheel may be made of faults alone
_FINDINGS_MOST = 200
_TEXT_MOST = 1000
_LOAD_LIMIT_S = 120.0
# The head of PJRT_Api is the same in every version of pjrt_c_api.h: two sizes and pointers, the
# same for the version, then its two numbers.
_PJRT = """
import ctypes, sys
class Api(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("extensions", ctypes.c_void_p),
                ("version_size", ctypes.c_size_t), ("version_extensions", ctypes.c_void_p),
                ("major", ctypes.c_int), ("minor", ctypes.c_int)]
get = ctypes.CDLL(sys.argv[1]).GetPjrtApi
get.restype = ctypes.POINTER(Api)
api = get().contents
print(f"PJRT {api.major}.{api.minor}")
"""
# without the first, libtpu asks the metadata server of a cloud VM for minutes
_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Ruling:
    """What one rule came to.

    Attributes:
        rule: Its id.
        title: What it proves.
        status: ``passed``, ``not judged``, or the severity of its worst finding.
        detail: What it saw, or why it cannot judge.
    """

    rule: str
    title: str
    status: str
    detail: str


@dataclass(frozen=True)
class Report:
    """The audit of one wheel.

    Attributes:
        file: The wheel's file name.
        sha256: Its digest.
        length: Its size in bytes.
        package: Its canonical name, such as ``torch-tpu``.
        version: Its version, as its metadata say.
        torch: The torch that it was judged against; None if against none.
        rulings: What each rule came to, in their order.
        findings: What is wrong with it, the worst first.
    """

    file: str
    sha256: str
    length: int
    package: str
    version: str
    torch: str | None
    rulings: tuple[Ruling, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings and notes may be."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)

    def count(self, severity: Severity) -> int:
        """How many findings are of this severity."""
        return Counter(finding.severity for finding in self.findings)[severity]

    @property
    def verdict(self) -> str:
        """The result in a few words, such as ``no error, 1 warning``."""
        errors = self.count(Severity.ERROR)
        words = [f"{errors or 'no'} error" + ("s" if errors > 1 else "")]
        for severity in (Severity.WARNING, Severity.NOTE):
            if count := self.count(severity):
                words.append(f"{count} {severity}" + ("s" if count > 1 else ""))
        return ", ".join(words)

    def as_dict(self) -> dict[str, Any]:
        """The report for machines (docs/audit_wheel.md); the same for the same wheel."""
        return {
            "schema": SCHEMA,
            "wheel": {
                "file": self.file,
                "sha256": self.sha256,
                "bytes": self.length,
                "name": self.package,
                "version": self.version,
            },
            "torch": self.torch,
            "ok": self.ok,
            "counts": {str(severity): self.count(severity) for severity in Severity},
            "rules": [
                {"id": one.rule, "title": one.title, "status": one.status, "detail": one.detail}
                for one in self.rulings
            ],
            "findings": [
                {
                    "rule": one.rule,
                    "severity": str(one.severity),
                    "what": one.what,
                    "expected": one.expected,
                    "remedy": one.remedy,
                }
                for one in self.findings
            ],
        }


def from_dict(record: Mapping[str, Any]) -> Report:
    """The report that :meth:`Report.as_dict` gave.

    Args:
        record: A document of this schema.

    Raises:
        KeyError: If it is not whole; also TypeError and ValueError.
    """
    wheel = record["wheel"]
    return Report(
        file=wheel["file"],
        sha256=wheel["sha256"],
        length=wheel["bytes"],
        package=wheel["name"],
        version=wheel["version"],
        torch=record["torch"],
        rulings=tuple(
            Ruling(one["id"], one["title"], one["status"], one["detail"]) for one in record["rules"]
        ),
        findings=tuple(
            Finding(
                one["rule"], Severity(one["severity"]), one["what"], one["expected"], one["remedy"]
            )
            for one in record["findings"]
        ),
    )


def audit(
    wheel: Path,
    *,
    torch: str | None,
    xla_commit: str | None = None,
    load: bool = False,
    sha256: str | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Report:
    """Judge a wheel by every rule that is for it.

    Args:
        wheel: The wheel; it is only read, and nothing of it is run without ``load``.
        torch: The torch it will meet, such as ``2.13.0+cpu``; None to judge against none.
        xla_commit: The XLA commit it must record; None if any will do.
        load: Load libtpu in a process of its own to learn its PJRT API version.
        sha256: Its digest, if it was just computed.
        advance: Called with unpacked bytes as they are read.

    Returns:
        What the rules came to.

    Raises:
        ForgeError: If there is no such file.
        OSError: If it cannot be read, or there is no space for its largest file in ``out``.
    """
    # loaded here: a run that remembers its audits has no use for the rules and the ELF reader
    from tpuforge.build.contents import read  # noqa: PLC0415
    from tpuforge.build.rules import RULES, Subject, UnjudgedError  # noqa: PLC0415

    if not wheel.is_file():
        raise ForgeError(
            f"{wheel} is not a file", expected="a wheel", mend="name a file that ends in .whl"
        )
    digest = sha256 or sha256_file(wheel)
    contents = read(wheel, out_dir(), advance)
    subject = Subject(
        contents,
        torch=torch,
        xla_commit=xla_commit,
        measure_pjrt=(lambda name: measure_pjrt(wheel, name)) if load else None,
    )
    rulings: list[Ruling] = []
    findings: list[Finding] = []
    for rule in RULES:
        if rule.kind not in ("", subject.kind):
            continue
        if contents.faults and rule.id != "archive":
            rulings.append(Ruling(rule.id, rule.title, "not judged", "the archive is bad"))
            continue
        found: list[Finding] = []

        def fault(
            what: str,
            expected: str,
            remedy: str,
            *,
            severity: Severity = Severity.ERROR,
            rule_id: str = rule.id,
            found: list[Finding] = found,
        ) -> None:
            if len(found) < _FINDINGS_MOST:
                found.append(
                    Finding(rule_id, severity, _short(what), _short(expected), _short(remedy))
                )
            elif severity is Severity.ERROR:
                # a thousand warnings must not hide an error
                found[-1] = Finding(rule_id, severity, _short(what), _short(expected), remedy)

        try:
            detail = rule.judge(subject, fault)
            status = "passed"
        except UnjudgedError as why:
            detail, status = str(why), "not judged"
        if found:
            found.sort(key=_rank)
            status = str(found[0].severity)
        if found and found[0].severity is not Severity.NOTE:
            detail = found[0].what
        rulings.append(Ruling(rule.id, rule.title, status, detail))
        findings += found
    return Report(
        file=wheel.name,
        sha256=digest,
        length=contents.length,
        package=subject.kind,
        version=subject.raw.get("version", ""),
        torch=torch,
        rulings=tuple(rulings),
        findings=tuple(sorted(findings, key=_rank)),
    )


def _short(text: str) -> str:
    """A text that a wheel may have filled at will."""
    return text if len(text) <= _TEXT_MOST else f"{text[:_TEXT_MOST]}…"


def _rank(finding: Finding) -> int:
    return list(Severity).index(finding.severity)


def measure_pjrt(wheel: Path, name: str) -> str:
    """Load a plugin of a wheel in a process of its own, and ask for its PJRT API version.

    Args:
        wheel: The wheel.
        name: The plugin's path in it.

    Returns:
        Such as ``0.116``; or the last line of what went wrong.
    """
    with tempfile.TemporaryFile(dir=out_dir()) as copy:
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as source:
            shutil.copyfileobj(source, copy, 1 << 20)
        copy.flush()
        try:
            done = run(
                # a file without a name, which is gone when the last process that has it ends
                [sys.executable, "-c", _PJRT, "/proc/self/fd/0"],
                timeout=_LOAD_LIMIT_S,
                env=clean_env(**_QUIET),
                stdin=copy.fileno(),
                check=False,
                doing=f"loading {name}",
            )
        except ForgeError as error:
            return error.found.splitlines()[0]
    version = re.search(r"^PJRT (\d+\.\d+)$", done.output, re.MULTILINE)
    if done.code == 0 and version:
        return version[1]
    return done.tail.rpartition("\n")[2] or f"its process ended with {done.code}"


@cache
def _rules_digest() -> str:
    """A digest of the rules and readers: remembered audits end when one of them changes."""
    here = Path(__file__)
    parts = ("findings", "rules", "contents", "elf")
    files = [here.parents[1] / "archives.py", *map(here.with_stem, (*parts, here.stem))]
    return sha256_text(*map(sha256_file, files))


def remembered(
    wheel: Path,
    sha256: str,
    *,
    torch: str | None,
    xla_commit: str | None,
    progress: Progress,
) -> tuple[Report, bool]:
    """The audit of a wheel whose digest was just proven; from ``out/audit`` if it is known.

    Args:
        wheel: The wheel.
        sha256: Its proven digest.
        torch: The torch it will meet.
        xla_commit: The XLA commit it must record; None if any will do.
        progress: Shows the reading, if there has to be any.

    Returns:
        The report, and whether the wheel had to be read for it.
    """
    key = sha256_text(_rules_digest(), sha256, wheel.name, torch or "", xla_commit or "")
    place = out_dir() / "audit" / f"{sha256}.json"
    known = read_json(place)
    if isinstance(known, dict) and known.get("key") == key:
        try:
            return from_dict(known), False
        except (KeyError, TypeError, ValueError):
            pass  # it was edited: judge again
    with progress.step(f"auditing {wheel.name}"):
        report = audit(
            wheel, torch=torch, xla_commit=xla_commit, sha256=sha256, advance=progress.advance
        )
    write_json(place, {**report.as_dict(), "key": key})
    return report, True


def errors_text(report: Report) -> str:
    """The errors of a report for people, two lines each.

    Args:
        report: The report.
    """
    return "\n".join(
        f"  {one.severity} {one.rule}: {one.what}\n    expected {one.expected}; {one.remedy}"
        for one in report.findings
        if one.severity is Severity.ERROR
    )


def _show(report: Report) -> None:
    """Print a report: the rules as a table, then the findings in full."""
    rows = [(one.status, one.rule, one.detail) for one in report.rulings]
    print_table(("result", "rule", "seen"), rows, title=report.file)
    console = error_console()
    for one in report.findings:
        colour = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow"}.get(one.severity, "")
        console.print(f"{one.severity} {one.rule}: {one.what}", style=colour, markup=False)
        console.print(f"  expected: {one.expected}\n  mend:     {one.remedy}", markup=False)


def _locked(python: str, flavour: str) -> list[tuple[Path, str]]:
    """The wheels of torch_tpu and libtpu that a lock names, in the wheelhouse, with digests."""
    lock = ROOT / "lock" / f"{flavour}-py{python.replace('.', '')}.txt"
    found = []
    for package in read_lock(lock):
        if package.name in PACKAGES:
            folder = out_dir() / "wheelhouse" / package.sha256
            wheels = sorted(folder.glob("*.whl"))
            if not wheels:
                raise ForgeError(
                    f"the wheel of {package.name} {package.version} is not in the wheelhouse",
                    expected=str(folder),
                    mend=f"./forge fetch_wheel --python {python} --only {','.join(PACKAGES)}",
                )
            found.append((wheels[0], package.sha256))
    return found


def _is_locked(sha256: str) -> bool:
    """Whether any lock names this digest."""
    locks = (ROOT / "lock").glob("*-py*.txt")
    return any(f"--hash=sha256:{sha256}" in lock.read_text(encoding="utf-8") for lock in locks)


def judge(options: argparse.Namespace, progress: Progress) -> Outcome:
    """The verb: audit the named wheels, or those of the lock.

    Args:
        options: Its arguments.
        progress: Its display.

    Returns:
        The reports.

    Raises:
        ForgeError: If a wheel is not there.
    """
    pins = pins_module.load()
    torch = options.torch or pins.torch.full
    try:
        Version(torch)
    except InvalidVersion as error:
        raise ForgeError(
            f"--torch {torch} is not a version", expected="such as 2.13.0", mend="name a version"
        ) from error
    if options.wheel:
        wheels = [Path(name) for name in options.wheel]
    else:
        found = _locked(pins.python(options.python), options.flavour or pins.default_flavour)
        wheels = [path for path, _ in found]
    reports = []
    for wheel in wheels:
        with progress.step(f"auditing {wheel.name}"):
            # a wheel that was built here may record another commit; a locked one is the release
            digest = sha256_file(wheel) if wheel.is_file() else None
            commit = pins.torch_tpu.xla_commit if digest and _is_locked(digest) else None
            reports.append(
                audit(
                    wheel,
                    torch=torch,
                    xla_commit=commit,
                    load=options.load,
                    sha256=digest,
                    advance=progress.advance,
                )
            )
    if not options.json:
        for report in reports:
            _show(report)
    bad = [report for report in reports if not report.ok]
    strict = [report for report in reports if options.strict and report.count(Severity.WARNING)]
    return Outcome(
        "done",
        "; ".join(f"{report.file}: {report.verdict}" for report in reports),
        {"torch": torch, "strict": options.strict, "wheels": [one.as_dict() for one in reports]},
        exit_code=Exit.FAULT if bad or strict else Exit.OK,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb.

    Args:
        argv: Its arguments; the process's own if not given.

    Returns:
        Its exit code.
    """
    arguments = parser(VERB, "Judge wheels of torch_tpu and libtpu by rules, without installing.")
    arguments.add_argument(
        "wheel", nargs="*", help="wheels; those of the lock in the wheelhouse if none is named"
    )
    arguments.add_argument(
        "--python", metavar="X.Y", help="the Python of the lock to take them from"
    )
    arguments.add_argument("--flavour", metavar="NAME", help="the lock to take them from")
    arguments.add_argument(
        "--torch", metavar="VERSION", help="judge against this torch instead of the locked one"
    )
    arguments.add_argument(
        "--load",
        action="store_true",
        help="load libtpu in a process of its own for its PJRT API version",
    )
    arguments.add_argument(
        "--strict", action="store_true", help="end with exit code 1 on warnings as well"
    )
    return run_verb(VERB, arguments, judge, argv)


if __name__ == "__main__":
    raise SystemExit(main())
