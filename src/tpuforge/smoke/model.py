"""The verb ``model``: lower and compile a user's own model inside an image, with no TPU.

One container run of ``health model``, with the simulator and the user's folder mounted, both
read-only. The figures and the exit code are the suite's (``docs/model.md``). Nothing is cached:
what a user's file does may depend on more than its bytes.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuforge.console import Progress, duration, print_table, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import out_dir
from tpuforge.records import read_record
from tpuforge.smoke import container, simulator
from tpuforge.verb import Outcome, main_of, parser

SCHEMA = "tpuforge.model/1"
_MOUNTED = "/model"
_PLENTY_S = 3600.0
_JUDGED = (Exit.OK, Exit.FAULT, Exit.CANNOT)
# what is read here
_RESULT = {
    "exit_code": int,
    "verdict": str,
    "findings": list,
    "notes": list,
    "targets": dict,
    "programs": list,
    "model": dict,
}


@dataclass(frozen=True)
class _Given:
    """What the user gave: a folder to mount, and how the suite is to be called on it."""

    folder: Path
    words: tuple[str, ...]
    title: str


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "model",
        "Lower a model with torch_tpu and compile it with libtpu inside an image, with no TPU. "
        "Exit codes: 0 it compiles and fits every target, 1 it does not, 2 could not be judged.",
    )
    container.add_choice(made)
    made.add_argument(
        "source",
        nargs="?",
        metavar="FILE.py:FUNCTION",
        help="a function that returns (module, example inputs), or a callable; its folder is "
        "mounted read-only",
    )
    made.add_argument("--config", type=Path, metavar="PATH", help="a Hugging Face config.json")
    made.add_argument("--tokens", type=int, metavar="N", help="length of the text for --config")
    made.add_argument(
        "--mode",
        choices=("auto", "training", "inference"),
        default="auto",
        help="what is compiled (default: auto, training if the model is in that mode)",
    )
    made.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="TOPOLOGY",
        help="compile for this TPU, such as v6e:2x2; again for more; all for every generation",
    )
    made.add_argument("--limit", type=float, metavar="S", help="seconds for the model's own code")
    made.add_argument("--memory", type=float, metavar="GIB", help="memory for the model's own code")
    return made


def _given(options: argparse.Namespace) -> _Given:
    if bool(options.source) == bool(options.config):
        raise ForgeError(
            "name either FILE.py:FUNCTION or --config",
            expected="one of them",
            mend="./forge model net.py:build",
        )
    if options.config:
        path = options.config
        file = path / "config.json" if path.is_dir() else path
        _readable(file)
        inside = f"{_MOUNTED}/{file.name}"
        words = ["--config", inside]
        if options.tokens is not None:
            words += ["--tokens", str(options.tokens)]
        return _Given(file.resolve().parent, tuple(words), str(path))
    name, colon, function = options.source.rpartition(":")
    if not (colon and name and function.isidentifier()):
        raise ForgeError(
            f"{options.source!r} names no function",
            expected="FILE.py:FUNCTION",
            mend=f"./forge model {options.source.rstrip(':')}:NAME_OF_THE_FUNCTION",
        )
    file = Path(name)
    _readable(file)
    inside = f"{_MOUNTED}/{file.name}:{function}"
    return _Given(file.resolve().parent, (inside,), options.source)


def _readable(file: Path) -> None:
    if not file.is_file():
        raise ForgeError(
            f"there is no file {file}", expected="a file of yours", mend="check the path"
        )


def _model(options: argparse.Namespace, progress: Progress) -> Outcome:
    given = _given(options)
    engine, subject = container.chosen(options, progress)
    folder = out_dir() / "model" / subject.slug
    with container.turn(progress):
        started = time.monotonic()
        engine = engine or container.find_engine(progress)
        simulated = simulator.ensure_simulator(progress, python=options.python)
        container.clear(engine, "model")
        with (
            container.loaded(engine, subject, progress) as digest,
            container.room(engine, digest, "model", progress) as room,
        ):
            found = _judge(room, options, given, simulated)
            record = {
                "verb": "model",
                "source": given.title,
                "image": subject.reference,
                "manifest_digest": subject.digest,
                "exit_code": found["exit_code"],
                "seconds": round(time.monotonic() - started, 1),
            }
            container.publish(folder, {"model.json": room.results / "model.json"}, record)
    if not options.json:
        _show(found)
    path = folder / "model.json"
    return Outcome(
        "done",
        f"{given.title}: {_verdict(found)} in {subject.reference}; {path}",
        data={
            "image": subject.reference,
            "manifest_digest": subject.digest,
            "model": str(path),
            "verdict": found["verdict"],
            "findings": found["findings"],
            "targets": found["targets"],
            "run_seconds": record["seconds"],
        },
        notes=list(found["notes"]),
        exit_code=Exit(found["exit_code"]),
    )


def _judge(
    room: container.Room, options: argparse.Namespace, given: _Given, simulated: Path
) -> dict[str, Any]:
    """Run the suite on the mounted folder; its result stays in the room."""
    words = ["health", "model", *given.words, "--mode", options.mode]
    for target in options.target:
        words += ["--target", target]
    for option, value in (("--limit", options.limit), ("--memory", options.memory)):
        words += [option, str(value)] if value is not None else []
    words += ["--json", f"{container.RESULTS}/model.json"]
    job = container.Job(
        words,
        (options.limit or 0) + _PLENTY_S,
        mounts=(*container.simulator_mounts(simulated), container.Mount(given.folder, _MOUNTED)),
        env=container.SIMULATOR_ENV,
    )
    with room.progress.step(f"lowering and compiling {given.title}"):
        done = room.run(job)
    found = read_record(room.results / "model.json", SCHEMA, _RESULT)
    if found is None or found["exit_code"] not in _JUDGED or found["exit_code"] != done.code:
        raise ForgeError(
            f"health model ended with exit code {done.code} and left no result\n{done.tail}",
            expected=f"a result of the schema {SCHEMA}",
            mend="see the lines above; ./forge bake if the image is older than this command",
        )
    return found


def _verdict(found: dict[str, Any]) -> str:
    return {
        Exit.OK: "compiles and fits every target",
        Exit.FAULT: "does not compile for, or fit, every target",
        Exit.CANNOT: "could not be judged",
    }[Exit(found["exit_code"])]


def _show(found: dict[str, Any]) -> None:
    """The figures of each target as a table, then what else was found."""
    model, graphs = found["model"], found.get("graphs") or {}
    if model.get("parameters") is not None:
        mode = "training" if model["training"] else "inference"
        print(f"{mode}, {model['parameters']:,} parameters in {size(model['parameter_bytes'])}")
    if found["programs"]:
        print(
            f"programs: {len(found['programs'])}, graph breaks: {graphs.get('breaks', 'unknown')}"
        )
        for one in graphs.get("reasons", []):
            print(f"  {one['times']}x {one['reason']}")
        rows = [
            (
                target,
                one["verdict"],
                _size(one["needed_hbm_bytes"]),
                _size(one["usable_hbm_bytes"]),
                _size(one["code_bytes"]),
                f"{one['flops'] / 1e9:.2f}" if one["flops"] is not None else "-",
                duration(one["compile_seconds"]),
            )
            for target, one in found["targets"].items()
        ]
        columns = ("target", "verdict", "needs", "usable HBM", "code", "GFLOP", "compiled in")
        print_table(columns, rows)
    for words in found["findings"]:
        print(words)


def _size(value: int | None) -> str:
    return size(value) if value is not None else "-"


main = main_of("model", _parser, _model, subject=container.slug)


if __name__ == "__main__":
    raise SystemExit(main())
