"""The verb ``bench``: run the benchmarks inside an image, each cost apart.

Three container runs: imports and compiles with nothing mounted, the training steps with the
simulator mounted, and pip installing the image's own wheels again, from the wheelhouse, into an
empty volume. A run with the same image, simulator and options as before is not repeated.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, Literal

from tpuforge.console import Progress, print_table
from tpuforge.errors import Exit, ForgeError
from tpuforge.lockfile import Locked, read_lock
from tpuforge.paths import ROOT, out_dir, read_json, sha256_file, write_json
from tpuforge.records import Form, read_record
from tpuforge.smoke import container, simulator
from tpuforge.verb import Outcome, main_of, parser

BENCH_SCHEMA = "tpuforge.bench/1"
LIMIT_S = 1200.0
INSTALL = "install.wheels"
_WHEELS = "/wheels"
_TARGET = "/install"
# one takes a fifth of the whole run: enough to show a spread
_INSTALLS = 2
_FIGURES = ("min", "median", "max")
_MEASUREMENT: Form = {
    "id": str,
    "unit": str,
    "samples": list,
    "not_run": (str, type(None)),
    **dict.fromkeys(_FIGURES, (int, float, type(None))),
}


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "bench",
        "Time installs, imports, steps and compiles inside an image. Exit codes: 0 measured, "
        "1 a measurement failed, 2 could not be measured here.",
    )
    container.add_choice(made)
    made.add_argument(
        "--samples", type=int, default=3, metavar="N", help="samples of each (default: 3)"
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


def _bench(options: argparse.Namespace, progress: Progress) -> Outcome:
    if options.samples < 1:
        raise ForgeError(
            f"--samples {options.samples}", expected="1 or more", mend="leave it out for 3"
        )
    engine, subject = container.chosen(options, progress)
    folder = out_dir() / "bench" / subject.slug
    inputs = {
        "the image": subject.digest,
        "the simulator": simulator.key(python=options.python),
        "the number of samples": str(options.samples),
        "the choice of targets": ",".join(options.target),
    }
    key = container.key_of(inputs)
    # what was measured before waits for nobody who is running an image
    if kept := None if options.again else _kept(folder, key):
        return _unchanged(kept, subject, folder, show=not options.json)
    with container.turn(progress):
        # whom it waited for may have measured the same
        if kept := None if options.again else _kept(folder, key):
            return _unchanged(kept, subject, folder, show=not options.json)
        if why := container.changes(folder, inputs):
            progress.note(why)
        started = time.monotonic()
        engine = engine or container.find_engine(progress)
        notes: list[str] = []
        simulated = None
        try:
            simulated = simulator.ensure_simulator(progress, python=options.python)
        except ForgeError as error:
            notes.append(f"the simulator could not be made: {error.found}; mend: {error.mend}")
            progress.note(notes[-1], loud=True)
        container.clear(engine, "bench")
        with (
            container.loaded(engine, subject, progress) as digest,
            container.room(engine, digest, "bench", progress) as room,
        ):
            code = _measure(room, options, simulated)
            result = read_json(room.results / "bench.json")
            lock = _lock_of(subject)
            result["measurements"].insert(0, _install(room, lock, options.samples))
            write_json(room.results / "whole.json", result)
            record = {
                "key": key if simulated is not None else "",
                "inputs": inputs,
                "verb": "bench",
                "image": subject.reference,
                "manifest_digest": subject.digest,
                "exit_code": code,
                "seconds": round(time.monotonic() - started, 1),
                "notes": notes,
            }
            files = {"bench.json": room.results / "whole.json"}
            with container.shelf():
                container.publish(folder, files, record)
    if not options.json:
        _show(result, subject)
    return _outcome("done", subject, folder, record)


def _kept(folder: Path, key: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The record and the result of an earlier run with the same inputs, if both are whole."""
    with container.shelf():
        record = container.earlier(folder, ["bench.json"], key)
        result = _read(folder / "bench.json")
    if record is None or record["exit_code"] != Exit.OK or result is None:
        return None
    return record, result


def _unchanged(
    kept: tuple[dict[str, Any], dict[str, Any]],
    subject: container.Subject,
    folder: Path,
    *,
    show: bool,
) -> Outcome:
    record, result = kept
    if show:
        _show(result, subject)
    return _outcome("unchanged", subject, folder, record)


def _measure(room: container.Room, options: argparse.Namespace, simulated: Path | None) -> int:
    """Run the image's own benchmarks; ``bench.json`` in the room holds all of them."""
    words = ["bench", "--samples", str(options.samples)]
    for target in options.target:
        words += ["--target", target]
    plain = "import,compile" if simulated is not None else "import,compile,step"
    first, last = (f"{container.RESULTS}/{name}.json" for name in ("plain", "bench"))
    with room.progress.step("timing imports and compiles"):
        done = room.run(
            container.Job(
                [*words, "--only", plain, "--json", first if simulated is not None else last],
                LIMIT_S,
            )
        )
    code = done.code
    if simulated is not None:
        with room.progress.step("timing steps on the simulator"):
            done = room.run(
                container.Job(
                    [*words, "--only", "step", "--merge", first, "--json", last],
                    LIMIT_S,
                    mounts=container.simulator_mounts(simulated),
                    env=container.SIMULATOR_ENV,
                )
            )
        code = max(code, done.code)
    if _read(room.results / "bench.json") is None:
        raise ForgeError(
            f"the benchmarks ended with exit code {done.code} and left no result\n{done.tail}",
            expected=f"a result of the schema {BENCH_SCHEMA}",
            mend="./forge bench --help for the options; ./forge bake if the image is older",
        )
    return code


def _read(path: Path) -> dict[str, Any] | None:
    """The measurements at a path, if they have what is read here."""
    found = read_record(path, BENCH_SCHEMA, {"measurements": [_MEASUREMENT]})
    whole = found is not None and all(
        len({item[key] is None for key in _FIGURES}) == 1 for item in found["measurements"]
    )
    return found if whole else None


def _lock_of(subject: container.Subject) -> list[Locked] | str:
    """The lock an image was baked from, or why it cannot be installed again."""
    if subject.layout is None:
        return "only for a baked image: the wheels of another are not known"
    record = read_json(subject.layout.parent / "image.json")
    given = record.get("overlay")
    if isinstance(given, dict):
        return f"only for the wheels of a lock: {given.get('file')} was given to the bake"
    path = ROOT / "lock" / f"{record['flavour']}-py{record['python'].replace('.', '')}.txt"
    if not path.is_file() or sha256_file(path) != record["lock_sha256"]:
        return f"{path.name} is no longer the lock that the image was baked from"
    return read_lock(path)


def _install(room: container.Room, lock: list[Locked] | str, samples: int) -> dict[str, Any]:
    """Time pip installing the locked wheels anew, offline, each time into an empty volume."""
    if isinstance(lock, str):
        return _measurement(0, [], lock)
    wheelhouse = out_dir() / "wheelhouse"
    lines = []
    for package in lock:
        wheels = list((wheelhouse / package.sha256).glob("*.whl"))
        if len(wheels) != 1:
            return _measurement(len(lock), [], f"{package.name} is not in the wheelhouse")
        name = f"{_WHEELS}/{package.sha256}/{wheels[0].name}"
        lines.append(f"{name} --hash=sha256:{package.sha256}\n")
    (room.results / "install.txt").write_text("".join(lines), encoding="utf-8")
    pip = [
        *(
            "python",
            "-m",
            "pip",
            "install",
            "--isolated",
            "--no-index",
            "--no-deps",
            "--no-compile",
        ),
        *("--no-cache-dir", "--quiet", "--require-hashes", "--target", _TARGET),
        *("-r", f"{container.RESULTS}/install.txt"),
    ]
    job = container.Job(
        pip,
        LIMIT_S,
        mounts=(container.Mount(wheelhouse, _WHEELS),),
        # pip unpacks in its temporary folder first and then moves: keep both on one disk
        env={"TMPDIR": _TARGET},
        # an anonymous volume goes with its container; it belongs to root, who has no rights here
        options=("--user", "0:0", "--mount", f"type=volume,target={_TARGET}"),
    )
    spent: list[float] = []
    count = min(samples, _INSTALLS)
    for number in range(1, count + 1):
        with room.progress.step(f"timing pip: {len(lock)} wheels, {number} of {count}"):
            done = room.run(job)
        if done.code != 0:
            why = f"failed: pip ended with {done.code}: {done.tail}"
            return _measurement(len(lock), spent, why)
        spent.append(round(done.seconds, 3))
    return _measurement(len(lock), spent, None)


def _measurement(count: int, samples: list[float], not_run: str | None) -> dict[str, Any]:
    return {
        "id": INSTALL,
        "what": f"pip installs {count or 'the'} locked wheels offline into an empty folder, hashes "
        "checked, no byte code; start of the container included",
        "unit": "s",
        "samples": samples,
        "min": min(samples, default=None),
        "median": statistics.median(samples) if samples else None,
        "max": max(samples, default=None),
        "not_run": not_run,
        "failed": bool(not_run and not_run.startswith("failed")),
    }


def _outcome(
    status: Literal["done", "unchanged"],
    subject: container.Subject,
    folder: Path,
    record: dict[str, Any],
) -> Outcome:
    result = read_json(folder / "bench.json")
    measured = [item for item in result["measurements"] if item["median"] is not None]
    missing = len(result["measurements"]) - len(measured)
    summary = f"{len(measured)} measurements of {subject.reference}"
    if missing:
        summary += f", {missing} not run"
    summary += f"; {folder / 'bench.json'}"
    if status == "unchanged":
        summary += container.as_before(record)
    return Outcome(
        status,
        summary,
        data={
            "image": subject.reference,
            "manifest_digest": subject.digest,
            "run_seconds": record["seconds"],
            "bench": str(folder / "bench.json"),
            "medians": {item["id"]: [item["median"], item["unit"]] for item in measured},
        },
        notes=list(record.get("notes", [])),
        exit_code=Exit(record["exit_code"]),
    )


def _show(result: dict[str, Any], subject: container.Subject) -> None:
    rows, missing = [], []
    for item in result["measurements"]:
        if item["median"] is None:
            rows.append((item["id"], "not run", ""))
            missing.append(f"not run: {item['id']}: {item['not_run']}")
            continue
        count = len(item["samples"])
        spread = f"{item['min']:.4g} to {item['max']:.4g} ({count})" if count > 1 else ""
        rows.append((item["id"], f"{item['median']:.4g} {item['unit']}", spread))
    print_table(("measurement", "median", "spread (samples)"), rows, title=subject.reference)
    for line in missing:
        print(line)


main = main_of("bench", _parser, _bench, subject=container.slug)


if __name__ == "__main__":
    raise SystemExit(main())
