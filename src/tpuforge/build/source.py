"""``build_wheel``: build the TorchTPU wheel from a source folder, through Bazelisk.

The command is the one upstream documents. Bazel runs in a scrubbed environment with its caches
under ``out/bazel``; where the wheel is comes from Bazel's build events, never from a guess in
``bazel-bin``, where older wheels stay. No Bazel server outlives a run.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from tpuforge import pins as pins_module
from tpuforge.build.bazelisk import Tool, end_server, environment, find_bazelisk
from tpuforge.build.checkout import TARGET, local
from tpuforge.build.events import Built, read_events
from tpuforge.console import Progress, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import atomic_file, exclusive, out_dir, sha256_file, write_atomic
from tpuforge.process import Completed, run
from tpuforge.verb import Outcome, parser, run_verb

VERB = "build_wheel"
# of Bazel's exit codes, those that speak about the source and not about this machine:
# 1 the build failed, 3 it succeeded in part
_ABOUT_THE_SOURCE = (1, 3)
_STEP = re.compile(r"\[[\d,]+ / [\d,]+\]")


def command(tool: str, python: str, suffix: str | None, work: Path, events: Path) -> list[str]:
    """The Bazelisk line.

    Args:
        tool: Path or name of Bazelisk.
        python: ``X.Y`` that the wheel is for.
        suffix: Development suffix of its version, such as ``.dev20261130``; None for a release.
        work: Folder for everything that Bazel keeps.
        events: Where Bazel writes its build events.

    Returns:
        The words of the line. ``no_rbe`` comes after ``wheel_common`` because the later one wins:
        both set the remote executor.
    """
    line = [
        tool,
        f"--output_user_root={work / 'root'}",
        "build",
        "--config=wheel_common",
        "--config=no_rbe",
        f"--repo_env=HERMETIC_PYTHON_VERSION={python}",
        "--define",
        f"PYTHON_VERSION={python}",
    ]
    if suffix:
        line.append(f"--repo_env=WHEEL_VERSION_EXTRAS={suffix}")
    return [
        *line,
        "--curses=no",
        "--color=no",
        f"--build_event_json_file={events}",
        TARGET,
    ]


def build(options: argparse.Namespace, progress: Progress) -> Outcome:
    """The verb: find Bazelisk, run the line on the source, keep the wheel.

    Args:
        options: Its arguments.
        progress: Its display.

    Returns:
        The wheel, or the line alone with ``--dry-run``.

    Raises:
        ForgeError: If there is no source, no Bazelisk, or no wheel.
    """
    pins = pins_module.load()
    python = pins.python(options.python)
    work = out_dir() / "bazel"
    if options.dry_run:
        tool = options.bazelisk or shutil.which("bazelisk") or "bazelisk"
        line = shlex.join(command(tool, python, options.suffix, work, work / "events.json"))
        return Outcome("done", "the line only; nothing was run", {"line": line}, text=line)
    source = local(options.source, pins)
    with exclusive("build_wheel", on_wait=lambda who: progress.note(f"waiting for {who}")):
        work.mkdir(parents=True, exist_ok=True)
        for left_by_dead_run in work.glob("run-*"):
            shutil.rmtree(left_by_dead_run)
        tool_found = find_bazelisk(options.bazelisk, pins.bazelisk, work)
        # the events hold the environment of the run, proxies included: gone when it ends
        with tempfile.TemporaryDirectory(prefix="run-", dir=work) as scratch:
            events = Path(scratch) / "events.json"
            line_words = command(str(tool_found.path), python, options.suffix, work, events)
            progress.note(shlex.join(line_words))
            done = _run_bazel(line_words, source, work, options, progress)
            built = read_events(events)
        _judge(done, built, work)
        return _keep(built, tool_found, done, python)


def _run_bazel(
    line: Sequence[str],
    source: Path,
    work: Path,
    options: argparse.Namespace,
    progress: Progress,
) -> Completed:
    """Run the line; however it ends, no server is left."""
    env = environment(work, options.bazel, options.bazel_url)
    log = work / "build_wheel.log"

    def show(text: str) -> None:
        if _STEP.match(text):
            progress.detail(text)

    # the work folder is ours alone now, so a server in it is what a killed run left behind
    end_server(line[:2], source, work, env)
    try:
        with progress.step("building the wheel"):
            return run(
                line,
                timeout=options.limit_hours * 3600,
                env=env,
                cwd=source,
                check=False,
                on_line=show,
                log=log,
                doing="building the wheel",
                mend=f"read {log}, or give it more time: --limit-hours {2 * options.limit_hours:g}",
            )
    finally:
        end_server(line[:2], source, work, env)


def _judge(done: Completed, built: Built, work: Path) -> None:
    """Turn Bazel's end into ours."""
    if done.code == 0 and len(built.wheels) == 1:
        return
    log = work / "build_wheel.log"
    if done.code == 0:
        names = ", ".join(uri.rpartition("/")[2] for uri, _ in built.wheels) or "no wheel"
        raise ForgeError(
            f"Bazel ended well, and its build events name {names}",
            expected=f"exactly one wheel among the outputs of {TARGET}",
            mend=f"look at ci/wheel in the source, and at {log}",
            exit_code=Exit.FAULT,
        )
    about_source = built.finished and done.code in _ABOUT_THE_SOURCE
    raise ForgeError(
        f"Bazel ended with exit code {done.code}\n{done.tail}",
        expected="exit code 0 and a wheel",
        mend=f"read {log}" + ("" if built.finished else "; no build was begun: see --bazel"),
        exit_code=Exit.FAULT if about_source else Exit.CANNOT,
    )


def _keep(built: Built, tool: Tool, done: Completed, python: str) -> Outcome:
    """Copy the wheel to ``out/wheels`` with its digest beside it."""
    uri, stated = built.wheels[0]
    parts = urllib.parse.urlsplit(uri)
    made = Path(urllib.request.url2pathname(parts.path))
    try:
        if parts.scheme != "file":
            raise ValueError(f"it is not on this machine ({parts.scheme})")
        name, version, _, tags = parse_wheel_filename(made.name)
        interpreters = sorted({tag.interpreter for tag in tags})
        wanted = f"cp{python.replace('.', '')}"
        if name != "torch-tpu" or wanted not in interpreters:
            raise ValueError(f"it is {name} for {', '.join(interpreters)}")
    except (InvalidWheelFilename, ValueError) as error:
        raise ForgeError(
            f"{made.name} is not the wheel that was asked for: {error}",
            expected=f"torch_tpu for Python {python}",
            mend="look at ci/wheel in the source",
            exit_code=Exit.FAULT,
        ) from error
    final = out_dir() / "wheels" / made.name
    before = sha256_file(final) if final.is_file() else None
    with atomic_file(final) as temporary:
        shutil.copyfile(made, temporary)
        digest = sha256_file(temporary)
        if stated is not None and len(stated) == 64 and digest != stated:
            raise ForgeError(
                f"{made.name} has SHA-256 {digest}",
                expected=f"{stated}, as Bazel's build events say",
                mend="run the same command again; something changed the file meanwhile",
                exit_code=Exit.FAULT,
            )
    write_atomic(final.with_name(f"{made.name}.sha256"), f"{digest}  {made.name}\n")
    count = final.stat().st_size
    return Outcome(
        "unchanged" if before == digest else "done",
        f"{made.name}, {size(count)}, sha256 {digest}",
        {
            "python": python,
            "wheel": f"wheels/{made.name}",
            "version": str(version),
            "sha256": digest,
            "bytes": count,
            "bazelisk": {"origin": tool.origin, "sha256": tool.sha256},
            "bazel_seconds": round(done.seconds, 3),
            "line": shlex.join(done.argv),
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb.

    Args:
        argv: Its arguments; the process's own if not given.

    Returns:
        Its exit code.
    """
    arguments = parser(VERB, "Build the TorchTPU wheel from a source folder with Bazelisk.")
    arguments.add_argument("--source", metavar="DIR", help="a checkout of TorchTPU")
    arguments.add_argument("--python", metavar="X.Y", help="the Python that the wheel is for")
    arguments.add_argument(
        "--suffix", metavar=".devN", help="a development suffix for the wheel's version"
    )
    arguments.add_argument("--bazelisk", metavar="PATH", help="the native Bazelisk to run")
    arguments.add_argument(
        "--bazel", metavar="VERSION_OR_PATH", help="the Bazel that Bazelisk is to run"
    )
    arguments.add_argument(
        "--bazel-url", metavar="URL", help="where Bazelisk gets Bazel instead of its own default"
    )
    arguments.add_argument(
        "--limit-hours", type=float, default=12.0, metavar="N", help="end the build after N hours"
    )
    arguments.add_argument("--dry-run", action="store_true", help="print the line, run nothing")
    return run_verb(VERB, arguments, build, argv)


if __name__ == "__main__":
    raise SystemExit(main())
