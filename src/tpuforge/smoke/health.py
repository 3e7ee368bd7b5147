"""The verb ``smoke``: run the health suite inside images, and show the verdict.

Two container runs for each image: one with nothing mounted (static, import, compile, device), one
with the simulator mounted (simulate), which merges the first one's results into its own. The
verdict and the exit code are the suite's; of several images the worst one counts. A pair of image
and choice that came to a verdict before is not run again (:mod:`tpuforge.smoke.cache`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tpuforge import health_report
from tpuforge.console import Progress, duration, print_table, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.health_report import TIERS
from tpuforge.paths import out_dir, read_json, write_json
from tpuforge.process import Completed
from tpuforge.smoke import cache, container, gate, simulator
from tpuforge.verb import Outcome, parser, run_verb

LIMIT_S = 1200.0


@dataclass(frozen=True)
class _Choice:
    """What of the suite is run.

    Attributes:
        tiers: In their order.
        targets: Topologies; the suite's own if empty.
        keywords: pytest's ``-k``.
        markers: pytest's ``-m``.
        full: Whether the slow programs of the corpus are compiled as well.
    """

    tiers: tuple[str, ...]
    targets: tuple[str, ...]
    keywords: str
    markers: str
    full: bool

    @property
    def corpus(self) -> str:
        return "full" if self.full else "default"

    @property
    def simulates(self) -> bool:
        return "simulate" in self.tiers


@dataclass
class _Case:
    """One image on its way to a verdict.

    Attributes:
        subject: The image.
        inputs: What decides its verdict, each under a name for people.
        record: Facts of the run that its report is of.
        health: Its report.
        error: Why it has none.
        cached: Whether the report is of an earlier run.
        notes: What the reader must not miss.
        doubt: Why an earlier result was not believed, as it was said already.
    """

    subject: container.Subject
    inputs: dict[str, str]
    record: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] | None = None
    error: ForgeError | None = None
    cached: bool = False
    notes: list[str] = field(default_factory=list)
    doubt: str = ""

    @property
    def key(self) -> str:
        return container.key_of(self.inputs)

    @property
    def folder(self) -> Path:
        return out_dir() / "health" / self.subject.slug

    @property
    def settled(self) -> bool:
        return self.health is not None or self.error is not None

    def entry(self) -> dict[str, Any]:
        """The image's part of the verdict file."""
        facts = {
            "image": self.subject.slug,
            "reference": self.subject.reference,
            "manifest_digest": self.subject.digest,
            "suite_sha256": self.subject.suite,
            "key": self.key,
            "seconds": float(self.record.get("seconds", 0.0)),
            "notes": self.notes,
            "report": str(self.folder / cache.REPORT) if self.health else None,
        }
        error = self.error.as_dict() if self.error else None
        return gate.of_image(facts, self.health, error, cached=self.cached)


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "smoke",
        "Run the health suite inside one or more images. Exit codes: 0 healthy, 1 unhealthy, 2 "
        "could not be judged, 3 a TPU is busy or unusable; of several images the worst, in the "
        "order 1, 2, 3.",
    )
    container.add_choice(made, several=True)
    made.add_argument("--all", action="store_true", help="every image of out/images with a suite")
    made.add_argument(
        "--tier", default=",".join(TIERS), metavar="LIST", help=f"by commas: {', '.join(TIERS)}"
    )
    made.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="TOPOLOGY",
        help="compile for this TPU, such as v6e:2x2; again for more",
    )
    made.add_argument(
        "--corpus",
        choices=("default", "full"),
        default="default",
        help="programs to compile; full adds the slow ones",
    )
    made.add_argument(
        "-k", dest="keywords", default="", metavar="EXPR", help="only checks whose name matches"
    )
    made.add_argument(
        "-m",
        dest="markers",
        default="",
        metavar="EXPR",
        help="only checks with these marks: tiers, critical, warning",
    )
    made.add_argument(
        "--jobs", type=int, metavar="N", help="images at once (default: by cores and free memory)"
    )
    made.add_argument("--again", action="store_true", help="run even if nothing has changed")
    return made


def _tiers(text: str) -> tuple[str, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in TIERS:
            raise ForgeError(
                f"there is no tier {word!r}",
                expected=f"a list of {', '.join(TIERS)}",
                mend="./forge smoke --help",
            )
    if not words:
        raise ForgeError(
            "--tier names no tier", expected=f"a list of {', '.join(TIERS)}", mend="leave it out"
        )
    return tuple(tier for tier in TIERS if tier in words)


def _names(options: argparse.Namespace) -> list[argparse.Namespace]:
    """The images that were asked for, each as the options of one."""

    def one(
        image: str | None = None, python: str | None = options.python, ref: str | None = None
    ) -> argparse.Namespace:
        return argparse.Namespace(
            image=image, python=python, flavour=options.flavour, image_ref=ref
        )

    images = [name.strip() for text in options.image or () for name in text.split(",")]
    if not all(images) or not all(options.image_ref or ["-"]):
        raise ForgeError(
            "an image without a name was given",
            expected="--image NAME[,NAME…]",
            mend="./forge smoke --help",
        )
    made = [one(name) for name in images]
    made += [one(ref=reference) for reference in options.image_ref or ()]
    if options.all:
        for path in sorted((out_dir() / "images").glob("*-py*/image.json")):
            name, _, digits = path.parent.name.rpartition("-py")
            python = f"{digits[:1]}.{digits[1:]}"
            record = read_json(path)
            # the builder's image, say, carries none; a damaged record is judged, and refused
            suite = record.get("suite_sha256") if isinstance(record, dict) else "unknown"
            if suite and options.python in (None, python):
                made.append(one(name, python))
        if not made:
            raise ForgeError(
                f"no image stands in {out_dir() / 'images'}",
                expected="a baked image with a health suite",
                mend="./forge bake",
            )
    return made or [one()]


def _subject(options: argparse.Namespace) -> str:
    names = _names(options)
    return container.slug(names[0]) if len(names) == 1 else ""


def _subjects(
    names: Sequence[argparse.Namespace], progress: Progress
) -> tuple[list[container.Subject], container.Engine | None]:
    """The images; an engine only if one of them is known to nobody else."""
    engine = None
    found: dict[str, container.Subject] = {}
    for name in names:
        engine, subject = container.chosen(name, progress, engine)
        found.setdefault(subject.slug, subject)
    return list(found.values()), engine


def _smoke(
    options: argparse.Namespace, progress: Progress, verdicts: list[dict[str, Any]]
) -> Outcome:
    """Judge every image; the verdict file is there only if the run came to its end."""
    path = out_dir() / "health" / "verdict.json"
    path.unlink(missing_ok=True)
    choice = _Choice(
        _tiers(options.tier),
        tuple(options.target),
        options.keywords.strip(),
        options.markers.strip(),
        options.corpus == "full",
    )
    if options.jobs is not None and options.jobs < 1:
        raise ForgeError(
            f"--jobs {options.jobs} judges nothing", expected="1 or more", mend="leave it out"
        )
    started, clock = datetime.now(UTC), time.monotonic()
    subjects, engine = _subjects(_names(options), progress)
    cases = [_Case(subject, _inputs(subject, choice)) for subject in subjects]
    # what was judged before waits for nobody who is running an image
    if options.again or not _recall(cases, progress):
        with container.turn(progress):
            # whom it waited for may have judged the same
            if options.again or not _recall(cases, progress):
                engine = engine or container.find_engine(progress)
                _run_all(cases, choice, engine, progress, options.jobs)
    verdict = gate.document(
        [case.entry() for case in cases],
        {
            "tiers": list(choice.tiers),
            "targets": list(choice.targets),
            "keywords": choice.keywords,
            "markers": choice.markers,
            "corpus": choice.corpus,
        },
        started.isoformat(timespec="seconds"),
        time.monotonic() - clock,
    )
    write_json(path, verdict)
    verdicts.append(verdict)
    if len(cases) == 1:
        return _outcome_of_one(cases[0], path, show=not options.json)
    return _outcome_of_many(cases, verdict, path, show=not options.json)


def _inputs(subject: container.Subject, choice: _Choice) -> dict[str, str]:
    """What decides a verdict, under names for people."""
    simulated = simulator.key(python=subject.python) if choice.simulates else ""
    return {
        "the image": subject.digest,
        "the suite": subject.suite,
        "the simulator": simulated,
        "the choice of tiers": ",".join(choice.tiers),
        "the choice of targets": ",".join(choice.targets),
        "the choice of checks": f"{choice.keywords}\n{choice.markers}".strip(),
        "the choice of programs": choice.corpus,
        "the limits of a run": f"{LIMIT_S:.0f} s, {container.MEMORY}",
    }


def _recall(cases: Sequence[_Case], progress: Progress) -> bool:
    """Take earlier verdicts where there are some that can be believed; whether all have one."""
    for case in cases:
        if case.settled:
            continue
        with container.shelf():
            entry, wrong = cache.recall(case.key)
            if entry is not None:
                cache.show(entry, case.folder, case.key)
        if wrong and wrong != case.doubt:
            case.doubt = wrong
            words = f"{case.subject.slug}: an earlier result is not believed: {wrong}"
            progress.note(words, loud=True)
        if entry is not None:
            case.record, case.health, case.cached = entry.record, entry.health, True
            case.notes += entry.record.get("notes", [])
    return all(case.settled for case in cases)


def _run_all(
    cases: Sequence[_Case],
    choice: _Choice,
    engine: container.Engine,
    progress: Progress,
    jobs: int | None,
) -> None:
    """Judge what has no verdict yet; the same bytes under another name are the same image."""
    ahead: dict[str, _Case] = {}
    for case in cases:
        if not case.settled:
            ahead.setdefault(case.key, case)
    _run(list(ahead.values()), choice, engine, progress, jobs)
    for case in cases:
        if not case.settled:
            _share(ahead[case.key], case)


def _share(done: _Case, case: _Case) -> None:
    case.record, case.health, case.error = done.record, done.health, done.error
    case.notes, case.cached = done.notes, done.health is not None
    if case.health is not None:
        files = {name: done.folder / name for name in cache.FILES}
        with container.shelf():
            container.publish(case.folder, files, {**done.record, "image": case.subject.reference})


def _run(
    cases: Sequence[_Case],
    choice: _Choice,
    engine: container.Engine,
    progress: Progress,
    jobs: int | None,
) -> None:
    """Judge images in containers, side by side; each case is settled afterwards."""
    for case in cases:
        if why := container.changes(case.folder, case.inputs):
            progress.note(f"{case.subject.slug}: {why}" if len(cases) > 1 else why)
    simulated = _simulators(cases, choice, progress)
    container.clear(engine, "health")
    with contextlib.ExitStack() as stack:
        tasks: list[Callable[[threading.Event], None]] = []
        for case in cases:
            try:
                digest = stack.enter_context(container.loaded(engine, case.subject, progress))
            except ForgeError as error:
                case.error = error
                continue
            lane = gate.Lane(progress, case.subject.slug) if len(cases) > 1 else progress
            tasks.append(
                partial(
                    _judge,
                    case=case,
                    choice=choice,
                    engine=engine,
                    digest=digest,
                    simulated=simulated[case.key],
                    progress=lane,
                )
            )
        at_once = min(jobs or gate.lanes(len(tasks)), max(1, len(tasks)))
        if len(cases) > 1:
            words = f"judging {len(tasks)} images, {at_once} at a time"
            stack.enter_context(progress.step(words))
        gate.side_by_side(tasks, at_once)


def _simulators(
    cases: Sequence[_Case], choice: _Choice, progress: Progress
) -> dict[str, Path | None]:
    """The simulator for each case, by its key; without one the other tiers can still be judged."""
    made: dict[str, Path | None] = {}
    for case in cases:
        made[case.key] = None
        if not choice.simulates:
            continue
        try:
            made[case.key] = simulator.ensure_simulator(progress, python=case.subject.python)
        except ForgeError as error:
            # the suite itself says that this tier was not judged
            case.notes.append(f"the simulator could not be made: {error.found}; mend: {error.mend}")
            progress.note(case.notes[-1], loud=True)
    return made


def _judge(
    stop: threading.Event,
    *,
    case: _Case,
    choice: _Choice,
    engine: container.Engine,
    digest: str,
    simulated: Path | None,
    progress: Progress,
) -> None:
    """Run the suite in one image and keep what it found; a failure is the case's own."""
    started = time.monotonic()
    try:
        with container.room(engine, digest, "health", progress, stop) as room:
            done = _run_tiers(room, choice, simulated)
            health = _read(room.results / cache.REPORT, done)
            whole = simulated is not None or not choice.simulates
            record = {
                # without the simulator it is no answer to what was asked: ask again next time
                "key": case.key if whole else "",
                "inputs": case.inputs,
                "verb": "smoke",
                "image": case.subject.reference,
                "manifest_digest": case.subject.digest,
                "exit_code": done.code,
                "seconds": round(time.monotonic() - started, 1),
                "notes": list(case.notes),
            }
            files = {name: room.results / name for name in cache.FILES}
            with container.shelf():
                container.publish(case.folder, files, record)
                if whole:
                    cache.keep(case.key, files, record)
        case.record, case.health = record, health
    except ForgeError as error:
        case.error = error


def _run_tiers(room: container.Room, choice: _Choice, simulated: Path | None) -> Completed:
    """Make the container runs; the last one leaves the whole result."""
    plain = [tier for tier in choice.tiers if tier != "simulate" or simulated is None]
    merge: list[str] = []
    if plain:
        stem = "health" if simulated is None else "plain"
        with room.progress.step(f"judging {', '.join(plain)}"):
            done = room.run(container.Job(_command(plain, choice, stem), LIMIT_S))
        if simulated is None:
            return done
        _read(room.results / "plain.json", done)
        merge = ["--merge", f"{container.RESULTS}/plain.json"]
    assert simulated is not None  # noqa: S101 - only then a tier can be missing from "plain"
    job = container.Job(
        [*_command(["simulate"], choice, "health"), *merge],
        LIMIT_S,
        mounts=container.simulator_mounts(simulated),
        env=container.SIMULATOR_ENV,
    )
    with room.progress.step("judging simulate"):
        done = room.run(job)
    if plain:
        _join_junit(room.results / "health.xml", room.results / "plain.xml")
    return done


def _join_junit(path: Path, other: Path) -> None:
    """Put the checks of another run first in a JUnit file: each run writes only its own."""
    try:
        # written by an image that is being run anyway; expat itself bounds entity expansion
        tree = ElementTree.parse(path)  # noqa: S314
        first = ElementTree.parse(other)  # noqa: S314
    except (OSError, ElementTree.ParseError) as error:
        raise ForgeError(
            f"the health suite left no JUnit XML: {error}",
            expected="a suite that --junit makes write one",
            mend="./forge bake",
            exit_code=Exit.FAULT,
        ) from error
    for position, suite in enumerate(first.getroot()):
        tree.getroot().insert(position, suite)
    joined = path.with_suffix(".joined")
    tree.write(joined, encoding="utf-8", xml_declaration=True)
    joined.replace(path)


def _command(tiers: Sequence[str], choice: _Choice, stem: str) -> list[str]:
    words = ["health", "--tier", ",".join(tiers)]
    for target in choice.targets:
        words += ["--target", target]
    if choice.full:
        words += ["--corpus", choice.corpus]
    if choice.keywords:
        words += ["-k", choice.keywords]
    if choice.markers:
        words += ["-m", choice.markers]
    for option, suffix in (("--json", "json"), ("--junit", "xml"), ("--html", "html")):
        words += [option, f"{container.RESULTS}/{stem}.{suffix}"]
    return words


def _read(path: Path, done: Completed) -> dict[str, Any]:
    """The report that a container run left, if it is one."""
    output = done.tail
    health = read_json(path)
    wrong = health_report.flaw(health)
    if not wrong:
        if health["exit_code"] == done.code:
            return dict(health)
        wrong = f"it says exit code {health['exit_code']}"
    if health is not None:
        output = f"{wrong}\n{output}"
    raise ForgeError(
        f"the health suite ended with exit code {done.code} and left no report of that\n{output}",
        expected=f"a report of the schema {health_report.SCHEMA}",
        mend="./forge smoke --help for the options; ./forge bake if the image is older",
    )


def _outcome_of_one(case: _Case, path: Path, *, show: bool) -> Outcome:
    if case.error is not None:
        raise case.error
    assert case.health is not None  # noqa: S101 - a settled case has one of both
    health, record = case.health, case.record
    if show:
        _show(health, case.subject)
    verdict = str(health["verdict"])
    page = case.folder / "health.html"
    reached = health["highest_tier"]
    summary = f"{case.subject.reference} is {verdict}"
    summary += f", highest tier {reached}" if reached else ""
    summary += f", by some checks only: {health['selection']}" if health.get("selection") else ""
    summary += f"; {page}"
    if case.cached:
        summary += container.as_before(record)
    return Outcome(
        "unchanged" if case.cached else "done",
        summary,
        data={
            "image": case.subject.reference,
            "manifest_digest": case.subject.digest,
            "run_seconds": record["seconds"],
            "verdict": verdict,
            "highest_tier": reached,
            "tiers": {name: tier["status"] for name, tier in health["tiers"].items()},
            "health": str(case.folder / cache.REPORT),
            "page": str(page),
            "key": record["key"],
            "verdict_file": str(path),
        },
        notes=case.notes,
        exit_code=Exit(health["exit_code"]),
    )


def _outcome_of_many(
    cases: Sequence[_Case], verdict: dict[str, Any], path: Path, *, show: bool
) -> Outcome:
    if show:
        columns, rows = gate.rows(verdict)
        print_table(columns, rows)
        for case in cases:
            _show_failed(case)
    counted: dict[str, int] = {}
    for image in verdict["images"]:
        counted[image["verdict"]] = counted.get(image["verdict"], 0) + 1
    words = ", ".join(f"{count} {word}" for word, count in counted.items())
    cached = sum(case.cached for case in cases)
    chosen = " ".join(filter(None, (verdict["chosen"]["keywords"], verdict["chosen"]["markers"])))
    words += f", by some checks only: {chosen}" if chosen else ""
    summary = f"{len(cases)} images: {words}; {path}"
    if cached:
        summary += f" ({cached} unchanged since an earlier run, and not run again)"
    return Outcome(
        "unchanged" if cached == len(cases) else "done",
        summary,
        data={**verdict, "verdict_file": str(path)},
        notes=[f"{case.subject.slug}: {note}" for case in cases for note in case.notes],
        exit_code=Exit(verdict["exit_code"]),
    )


def _show_failed(case: _Case) -> None:
    """What failed in one image of several."""
    if case.error is not None:
        print(f"\n{case.subject.slug}: {case.error.found}")
        print(f"  expected: {case.error.expected}\n  mend: {case.error.mend}")
    elif case.health is not None:
        _show_checks(case.health, f"{case.subject.slug}: ")


def _show(health: dict[str, Any], subject: container.Subject) -> None:
    """The verdict of each tier as a table, then what failed and what mends it."""
    rows = []
    for name in TIERS:
        tier = health["tiers"][name]
        counts = [
            f"{tier[key]} {key.replace('_', ' ')}"
            for key in ("passed", "failed", "not_run")
            if tier.get(key)
        ]
        ran = tier["status"] != "not run"
        peak = tier.get("peak_memory_bytes")
        rows.append(
            (
                name,
                tier["status"],
                ", ".join(counts),
                duration(tier["seconds"]) if ran and tier.get("seconds") is not None else "",
                size(peak) if ran and peak else "",
                tier.get("why") or "",
            )
        )
    columns = ("tier", "verdict", "checks", "time", "peak memory", "")
    print_table(columns, rows, title=f"{subject.reference}  {subject.digest[:19]}")
    facts = health.get("image")
    if isinstance(facts, dict) and facts.get("overlay"):
        print(f"\ntorch_tpu is a wheel that was given to the bake: {facts['overlay']}")
    _show_checks(health)


def _show_checks(health: dict[str, Any], prefix: str = "") -> None:
    """What failed, and what mends it."""
    for check in health["checks"]:
        if check["status"] != "failed":
            continue
        word = "warning" if check.get("severity") == "warning" else "failed"
        first, *more = str(check.get("detail") or "").strip().splitlines() or ["it failed"]
        print(f"\n{prefix}{word}: {check['id']}: {first}")
        for line in more[:11]:
            print(f"    {line}")
        print(f"  expected: {check['purpose']}")
        if check.get("remedy"):
            print(f"  mend: {check['remedy']}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb ``smoke``.

    Args:
        argv: Arguments; the process's own if not given.

    Returns:
        The exit code.
    """
    verdicts: list[dict[str, Any]] = []
    given = sys.argv[1:] if argv is None else argv
    # a machine that asked for JSON gets nothing else on standard output
    stream = sys.stderr if "--json" in given else sys.stdout
    with gate.muted(stream):
        code = run_verb(
            "smoke",
            _parser(),
            lambda options, progress: _smoke(options, progress, verdicts),
            argv,
            subject=_subject,
        )
    gate.announce(verdicts[0] if verdicts else None, code, stream)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
