"""The ``lint`` verb: style, types, shell scripts and Dockerfiles, with the locked tools."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tpuforge import process
from tpuforge.console import Progress
from tpuforge.errors import Exit
from tpuforge.paths import ROOT
from tpuforge.verb import Outcome, main_of, parser

_LIMIT_S = 600.0
_SCRIPTS = ("images/tpu-vm/gke-manifest", "images/tpu-vm/tpu-run")
"""Programs without a suffix, which the checkers do not find by themselves."""


def _first_line(path: Path) -> str:
    with path.open("rb") as file:
        return file.readline(200).decode("utf-8", "replace")


def checkers(files: Sequence[Path]) -> dict[str, list[str]]:
    """The command of each checker, by its name.

    Args:
        files: Every file of the project, as git lists them.

    Returns:
        Name to argv; a checker with nothing to check is left out.
    """
    tools = Path(sys.executable).parent
    python = ["noxfile.py", "forge", *_SCRIPTS, "src", "smoke", "tests"]
    shell = [
        str(p)
        for p in files
        if _first_line(p).startswith(("#!/bin/sh", "#!/bin/bash", "#!/usr/bin/env bash"))
    ]
    docker = [str(p) for p in files if p.name.startswith("Dockerfile") or p.suffix == ".Dockerfile"]
    commands = {
        "ruff check": [str(tools / "ruff"), "check", *python],
        "ruff format": [str(tools / "ruff"), "format", "--check", *python],
        "mypy": [str(tools / "mypy")],
        "shellcheck": [str(tools / "shellcheck"), *shell] if shell else [],
        "hadolint": [str(tools / "hadolint"), *docker] if docker else [],
        "the tree of images": [sys.executable, "-m", "tpuforge.tree"],
    }
    return {name: command for name, command in commands.items() if command}


def _lint(options: argparse.Namespace, progress: Progress) -> Outcome:
    del options
    listed = process.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, timeout=60)
    files = [ROOT / name for name in listed.output.splitlines()]
    faults: dict[str, str] = {}
    env = process.clean_env(PYTHONPATH=str(ROOT / "src"))
    commands = checkers([path for path in files if path.is_file()])
    for name, command in commands.items():
        with progress.step(name):
            done = process.run(command, cwd=ROOT, timeout=_LIMIT_S, env=env, check=False)
        if done.code:
            faults[name] = done.output
    if faults:
        text = "\n".join(f"{name}:\n{output}" for name, output in faults.items())
        summary = f"{', '.join(faults)} found faults"
        return Outcome("done", summary, {"faults": faults}, exit_code=Exit.FAULT, text=text)
    return Outcome("done", f"{', '.join(commands)} found nothing", {"faults": {}})


def _parser() -> argparse.ArgumentParser:
    return parser(
        "lint", "Check style, types, shell scripts and Dockerfiles with the locked tools."
    )


main = main_of("lint", _parser, _lint)


if __name__ == "__main__":
    raise SystemExit(main())
