"""The verb ``smoke``: run the health suite inside an image, and show its verdict.

Two container runs: one with nothing mounted (static, import, compile, device), one with the
simulator mounted (simulate), which merges the first one's results into its own. The verdict and
the exit code are the suite's. A run with the same image, simulator and options as before is not
repeated when that run came to a verdict.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from tpuforge import health_report
from tpuforge.console import Progress, duration, print_table, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.health_report import TIERS
from tpuforge.paths import exclusive, out_dir, read_json
from tpuforge.process import Completed
from tpuforge.smoke import container, simulator
from tpuforge.verb import Outcome, parser, run_verb

FILES = ("health.json", "health.xml", "health.html")
LIMIT_S = 1200.0
_JUDGED = (Exit.OK, Exit.FAULT)
"""Exit codes that say something about the image, and not about this machine at this moment."""


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "smoke",
        "Run the health suite inside an image. Exit codes: 0 healthy, 1 unhealthy, 2 could not be "
        "judged, 3 a TPU is busy or unusable.",
    )
    container.add_choice(made)
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
    made.add_argument("--again", action="store_true", help="run even if nothing has changed")
    return made


def _tiers(text: str) -> list[str]:
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
    return [tier for tier in TIERS if tier in words]


def _smoke(options: argparse.Namespace, progress: Progress) -> Outcome:
    tiers = _tiers(options.tier)
    if options.image_ref:
        engine = container.find_engine(progress)
        subject = container.referenced(engine, options.image_ref)
    else:
        engine, subject = None, container.baked(options)
    folder = out_dir() / "health" / subject.slug
    inputs = {
        "the image": subject.digest,
        "the simulator": simulator.key(python=options.python) if "simulate" in tiers else "",
        "the choice of tiers": ",".join(tiers),
        "the choice of targets": ",".join(options.target),
    }
    key = container.key_of(inputs)
    with exclusive("smoke", container.say_wait(progress)):
        record = None if options.again else container.earlier(folder, FILES, key)
        health = read_json(folder / "health.json")
        if (
            record is not None
            and record["exit_code"] in _JUDGED
            and not health_report.flaw(health)
            and health["exit_code"] == record["exit_code"]
        ):
            if not options.json:
                _show(health, subject)
            return _outcome("unchanged", subject, folder, health, record)
        if why := container.changes(folder, inputs):
            progress.note(why)
        started = time.monotonic()
        engine = engine or container.find_engine(progress)
        notes: list[str] = []
        simulated = None
        if "simulate" in tiers:
            try:
                simulated = simulator.ensure_simulator(progress, python=options.python)
            except ForgeError as error:
                # the other tiers can be judged; the suite itself says that this one was not
                notes.append(f"the simulator could not be made: {error.found}; mend: {error.mend}")
                progress.note(notes[-1], loud=True)
        with (
            container.loaded(engine, subject, progress) as digest,
            container.room(engine, digest, "health", progress) as room,
        ):
            done = _run_tiers(room, tiers, options.target, simulated)
            health = _read(room.results / "health.json", done)
            whole = simulated is not None or "simulate" not in tiers
            record = {
                # without the simulator it is no answer to what was asked: ask again next time
                "key": key if whole else "",
                "inputs": inputs,
                "verb": "smoke",
                "image": subject.reference,
                "manifest_digest": subject.digest,
                "exit_code": done.code,
                "seconds": round(time.monotonic() - started, 1),
                "notes": notes,
            }
            files = {name: room.results / name for name in FILES}
            container.publish(folder, files, record)
    if not options.json:
        _show(health, subject)
    return _outcome("done", subject, folder, health, record)


def _run_tiers(
    room: container.Room, tiers: Sequence[str], targets: Sequence[str], simulated: Path | None
) -> Completed:
    """Make the container runs; the last one leaves the whole result."""
    plain = [tier for tier in tiers if tier != "simulate" or simulated is None]
    merge: list[str] = []
    if plain:
        stem = "health" if simulated is None else "plain"
        with room.progress.step(f"judging {', '.join(plain)}"):
            done = room.run(container.Job(_command(plain, targets, stem), LIMIT_S))
        if simulated is None:
            return done
        _read(room.results / "plain.json", done)
        merge = ["--merge", f"{container.RESULTS}/plain.json"]
    assert simulated is not None  # noqa: S101 - only then a tier can be missing from "plain"
    job = container.Job(
        [*_command(["simulate"], targets, "health"), *merge],
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


def _command(tiers: Sequence[str], targets: Sequence[str], stem: str) -> list[str]:
    words = ["health", "--tier", ",".join(tiers)]
    for target in targets:
        words += ["--target", target]
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


def _outcome(
    status: Literal["done", "unchanged"],
    subject: container.Subject,
    folder: Path,
    health: dict[str, Any],
    record: dict[str, Any],
) -> Outcome:
    verdict = str(health.get("verdict"))
    page = folder / "health.html"
    reached = health.get("highest_tier")
    summary = f"{subject.reference} is {verdict}"
    summary += f", highest tier {reached}; {page}" if reached else f"; {page}"
    if status == "unchanged":
        summary += (
            " (same image, simulator and options as in the last run, which took "
            f"{duration(record['seconds'])})"
        )
    return Outcome(
        status,
        summary,
        data={
            "image": subject.reference,
            "manifest_digest": subject.digest,
            "run_seconds": record["seconds"],
            "verdict": verdict,
            "highest_tier": reached,
            "tiers": {name: tier["status"] for name, tier in health["tiers"].items()},
            "health": str(folder / "health.json"),
            "page": str(page),
            "key": record["key"],
        },
        notes=list(record.get("notes", [])),
        exit_code=Exit(health["exit_code"]),
    )


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
    failed = [check for check in health["checks"] if check["status"] == "failed"]
    for check in failed:
        word = "warning" if check.get("severity") == "warning" else "failed"
        print(f"\n{word}: {check['id']}: {check['purpose']}")
        for line in str(check.get("detail") or "").rstrip().splitlines()[:12]:
            print(f"    {line}")
        if check.get("remedy"):
            print(f"  mend: {check['remedy']}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb ``smoke``.

    Args:
        argv: Arguments; the process's own if not given.

    Returns:
        The exit code.
    """
    return run_verb(
        "smoke",
        _parser(),
        _smoke,
        argv,
        result_name=lambda options: f"smoke-{container.slug(options)}",
    )


if __name__ == "__main__":
    raise SystemExit(main())
