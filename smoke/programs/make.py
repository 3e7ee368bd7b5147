"""Make the corpus again: lower its models with the installed torch_tpu, on the simulator.

    python -m smoke.programs.make [--baseline] [--into FOLDER]

Runs where a simulated chip is mounted (``docs/compile.md`` has the command). Without options the
programs are lowered and stored beside this file with ``corpus.toml``. With ``--baseline`` nothing
is lowered: every stored program is compiled for every target, and the figures of the installed
libtpu take their place in ``baseline.toml``; that needs no simulator.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from smoke import isolate, lowering, pjrt, programs

_LIMIT_S = 600.0


def make(folder: Path) -> None:
    """Lower every model, and store programs and manifest.

    Args:
        folder: Where they go.

    Raises:
        SystemExit: If a model is not lowered to one program, or a pair if it is trained.
    """
    from smoke.programs import models

    made = {name: metadata.version(name) for name in ("torch", "torch-tpu", "libtpu")}
    spoken = isolate.run(pjrt.stablehlo_version, timeout=_LIMIT_S, env=pjrt.QUIET)
    if spoken.error is not None:
        raise SystemExit(f"libtpu does not tell its StableHLO version: {spoken.story}")
    lines = [
        "# Programs that torch_tpu lowered from models.py, made by make.py on the simulator.",
        "",
        "[made_by]",
        *(f'{name.replace("-", "_")} = "{version}"' for name, version in made.items()),
        f'stablehlo = "{spoken.value}"',
    ]
    for name, (_, trained) in models.CORPUS.items():
        with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as kept:
            env = {lowering.KEPT: kept, lowering.SPOKEN: spoken.value}
            ended = isolate.run(lowering.lower_named, name, scratch, timeout=_LIMIT_S, env=env)
            if ended.error is not None:
                raise SystemExit(f"{name}: {ended.story}")
            kinds = [one["kind"] for one in ended.value]
            if kinds != (["forward", "backward"] if trained else ["forward"]):
                raise SystemExit(f"{name} was lowered to {', '.join(kinds) or 'nothing'}")
            for one in ended.value:
                title = f"{name}-{one['kind']}" if trained else name
                text = Path(one["path"]).read_bytes()
                data = lzma.compress(text, format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)
                (folder / f"{title}.mlir.xz").write_bytes(data)
                lines += [
                    "",
                    f'[programs."{title}"]',
                    f'sha256 = "{hashlib.sha256(text).hexdigest()}"',
                    f"operators = {one['operators']}",
                ]
                print(f"{title}: {len(text)} bytes, {len(data)} stored", flush=True)
    (folder / "corpus.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def baseline(path: Path) -> int:
    """Compile every program for every target and write down the figures of this libtpu.

    Figures of other versions of libtpu stay as they are.

    Args:
        path: The baseline.

    Returns:
        The exit code: 1 if a program was refused that should not be.
    """
    version = metadata.version("libtpu")
    whole = programs.read_baseline(path)
    mine: dict[str, dict[str, dict[str, int]]] = {}
    refused = 0
    for target in pjrt.ALL_TARGETS:
        for one in programs.corpus():
            if one.refused is not None:
                continue
            topology = one.topology(target)
            ended = isolate.run(
                pjrt.compile_program, one.name, topology, timeout=_LIMIT_S, env=pjrt.QUIET
            )
            found = ended.value or {"stage": "process", "error": ended.story}
            if found["stage"] != "done":
                print(f"{one.name} for {topology}: {found['error']}", file=sys.stderr)
                refused += 1
                continue
            # libtpu says a negative number where it does not count
            figures = {name: int(found[name]) for name in programs.JUDGED if found[name] >= 0}
            mine.setdefault(target, {})[one.name] = figures
            seconds = f"{found['compile_seconds']:.2f} s"
            print(f"{one.name} for {topology}: {figures} {seconds}", flush=True)
        # a run that is ended keeps the targets that it has finished
        whole[version] = dict(whole.get(version, {})) | mine
        path.write_text(programs.write_baseline(whole), encoding="utf-8")
    return 1 if refused else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run it.

    Args:
        argv: Arguments; the process's own if not given.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="make.py", description="Make the corpus again.", allow_abbrev=False
    )
    parser.add_argument("--baseline", action="store_true", help="only the figures of this libtpu")
    parser.add_argument("--into", type=Path, default=programs.HERE, metavar="FOLDER")
    options = parser.parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if options.baseline:
        return baseline(options.into / "baseline.toml")
    make(options.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
