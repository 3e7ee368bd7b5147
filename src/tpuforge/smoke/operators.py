"""The verb ``operators``: run the audit of operators inside an image, and show its figures.

One container run with the simulator mounted: ``health operators``. The table and the exit code are
the suite's. A run with the same image, simulator and options as before is not repeated. With
``--compare`` the new table is then compared with an older one, by the suite itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, Literal

from tpuforge.console import Progress, print_table, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import ROOT, out_dir, read_json
from tpuforge.process import clean_env, run
from tpuforge.records import read_record
from tpuforge.smoke import container, simulator
from tpuforge.verb import Outcome, main_of, parser

SCHEMA = "tpuforge.operators/1"
FILES = ("operators.json", "operators.html")
LIMIT_S = 3600.0
_JUDGED = (Exit.OK, Exit.FAULT)
# what is read here
_TABLE = {
    "exit_code": int,
    "audited": bool,
    "counts": dict,
    "compiled": dict,
    "problems": list,
    "census": dict,
    "seconds": dict,
    "peak_memory_bytes": int,
}
_SHOWN = 20
_COLUMNS = ("passes", "unsupported", "differs", "error", "simulator limit", "not run")


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "operators",
        "Run every operator of PyTorch inside an image, on the simulator, compare it with the CPU, "
        "and compile what it was lowered to with libtpu. Exit codes: 0 all as known, 1 something "
        "that nobody knew (with --compare: or something lost), 2 could not be judged.",
    )
    container.add_choice(made)
    made.add_argument(
        "--dtype", default="", metavar="LIST", help="by commas; the suite's own choice if not given"
    )
    made.add_argument(
        "--ways",
        default="",
        metavar="LIST",
        help="how else to call what passes, by commas: gradient, out, inplace; or none; the "
        "suite's own choice if not given",
    )
    made.add_argument(
        "--samples", type=int, default=1, metavar="N", help="samples of each entry (default: 1)"
    )
    made.add_argument("--only", default="", metavar="REGEX", help="only entries whose name matches")
    made.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="TOPOLOGY",
        help="compile for this TPU, such as v6e:2x2; again for more",
    )
    made.add_argument("--again", action="store_true", help="run even if nothing has changed")
    made.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="tell what changed since this table"
    )
    return made


def _operators(options: argparse.Namespace, progress: Progress) -> Outcome:
    if options.samples < 1:
        raise ForgeError(f"--samples {options.samples}", expected="1 or more", mend="leave it out")
    if options.compare is not None and read_record(options.compare, SCHEMA, _TABLE) is None:
        raise ForgeError(
            f"{options.compare} is no table of operators",
            expected=f"a document of the schema {SCHEMA}",
            mend="name the operators.json of an earlier run",
        )
    engine, subject = container.chosen(options, progress)
    folder = out_dir() / "operators" / subject.slug
    inputs = {
        "the image": subject.digest,
        "the simulator": simulator.key(python=options.python),
        "the choice of dtypes": options.dtype,
        "the choice of ways": options.ways,
        "the number of samples": str(options.samples),
        "the choice of operators": options.only,
        "the choice of targets": ",".join(options.target),
    }
    key = container.key_of(inputs)
    status: Literal["done", "unchanged"] = "unchanged"
    # what was audited before waits for nobody who is running an image
    kept = None if options.again else _kept(folder, key)
    if kept is None:
        with container.turn(progress):
            # whom it waited for may have audited the same
            kept = None if options.again else _kept(folder, key)
            if kept is None:
                status = "done"
                if why := container.changes(folder, inputs):
                    progress.note(why)
                started = time.monotonic()
                engine = engine or container.find_engine(progress)
                simulated = simulator.ensure_simulator(progress, python=options.python)
                container.clear(engine, "operators")
                with (
                    container.loaded(engine, subject, progress) as digest,
                    container.room(engine, digest, "operators", progress) as room,
                ):
                    found = _audit(room, options, simulated)
                    record = {
                        "key": key,
                        "inputs": inputs,
                        "verb": "operators",
                        "image": subject.reference,
                        "manifest_digest": subject.digest,
                        "exit_code": found["exit_code"],
                        "seconds": round(time.monotonic() - started, 1),
                    }
                    files = {name: room.results / name for name in FILES}
                    with container.shelf():
                        container.publish(folder, files, record)
                kept = record, found
    record, found = kept
    if not options.json:
        _show(found, subject)
    outcome = _outcome(status, subject, folder, found, record)
    if options.compare is not None:
        _compare(options, folder / "operators.json", outcome)
    return outcome


def _kept(folder: Path, key: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The record and the table of an earlier run with the same inputs, if both are whole."""
    with container.shelf():
        record = container.earlier(folder, FILES, key)
        found = read_record(folder / "operators.json", SCHEMA, _TABLE)
    if record is None or record["exit_code"] not in _JUDGED or found is None:
        return None
    return record, found


def _audit(room: container.Room, options: argparse.Namespace, simulated: Path) -> dict[str, Any]:
    """Run the image's own audit; its files stay in the room."""
    words = ["health", "operators", "--samples", str(options.samples)]
    given = {"--dtype": options.dtype, "--ways": options.ways, "--only": options.only}
    for option, value in given.items():
        words += [option, value] if value else []
    for target in options.target:
        words += ["--target", target]
    for option, name in zip(("--json", "--html"), FILES, strict=True):
        words += [option, f"{container.RESULTS}/{name}"]
    job = container.Job(
        words,
        LIMIT_S,
        mounts=container.simulator_mounts(simulated),
        env=container.SIMULATOR_ENV,
    )
    with room.progress.step("running operators"):
        done = room.run(job)
    found = read_record(room.results / "operators.json", SCHEMA, _TABLE)
    if found is None or found["exit_code"] != done.code:
        raise ForgeError(
            f"the audit ended with exit code {done.code} and left no table of that\n{done.tail}",
            expected=f"a table of the schema {SCHEMA}",
            mend="./forge operators --help for the options; ./forge bake if the image is older",
        )
    return found


def _show(found: dict[str, Any], subject: container.Subject) -> None:
    """Counts by dtype and way, then what nobody knew."""
    rows = [
        (f"{dtype} {way}".rstrip(), *(str(counts.get(status, "")) for status in _COLUMNS))
        for way, by_dtype in {"": found["counts"], **found.get("counts_of_ways", {})}.items()
        for dtype, counts in by_dtype.items()
    ]
    print_table(("dtype", *_COLUMNS), rows, title=subject.reference)
    for target, counts in found["compiled"].items():
        words = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
        print(f"programs compiled for {target}: {words or 'none'}")
    for one in found["problems"][:_SHOWN]:
        detail = " ".join(str(one["detail"]).split())
        print(f"{one['op']} {one['dtype']}: {one['what']}: {detail[:300]}")
    if len(found["problems"]) > _SHOWN:
        print(f"… and {len(found['problems']) - _SHOWN} more in the table")


def _outcome(
    status: Literal["done", "unchanged"],
    subject: container.Subject,
    folder: Path,
    found: dict[str, Any],
    record: dict[str, Any],
) -> Outcome:
    number = len(found["problems"])
    words = f"{number} that nobody knew" if number else "all as known"
    summary = f"operators of {subject.reference}: {words}; {folder / 'operators.html'}"
    if status == "unchanged":
        summary += container.as_before(record)
    else:
        summary += f"; largest process {size(found['peak_memory_bytes'])}"
    return Outcome(
        status,
        summary,
        data={
            "image": subject.reference,
            "manifest_digest": subject.digest,
            "run_seconds": record["seconds"],
            "counts": found["counts"],
            "counts_of_ways": found.get("counts_of_ways", {}),
            "compiled": found["compiled"],
            "census": found["census"].get("counts"),
            "problems": number,
            "table": str(folder / "operators.json"),
            "page": str(folder / "operators.html"),
        },
        exit_code=Exit(found["exit_code"]),
    )


def _compare(options: argparse.Namespace, new: Path, outcome: Outcome) -> None:
    """Let the suite compare two tables; what was lost makes the verb fail."""
    target = new.with_name("changes.json")
    words = ["health", "operators", "--compare", options.compare, new, "--json", target]
    done = run(
        [sys.executable, ROOT / "smoke" / "cli.py", *words],
        timeout=120,
        env=clean_env(),
        check=False,
        doing="comparing two tables of operators",
    )
    changes = read_json(target)
    if done.code not in _JUDGED or not isinstance(changes, dict):
        raise ForgeError(
            f"the tables cannot be compared\n{done.tail}",
            expected=f"two documents of the schema {SCHEMA}",
            mend="name the operators.json of an earlier run",
        )
    outcome.text = done.output.rstrip()
    outcome.data["changes"] = {kind: len(changes[kind]) for kind in ("lost", "gained", "changed")}
    outcome.data["changes_file"] = str(target)
    if done.code == Exit.FAULT:
        outcome.exit_code = Exit.FAULT


main = main_of("operators", _parser, _operators, subject=container.slug)


if __name__ == "__main__":
    raise SystemExit(main())
