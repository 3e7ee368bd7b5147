"""``build_wheel``: build the TorchTPU wheel from a source folder, through Bazelisk.

The command is the one upstream documents. Bazel runs in a scrubbed environment with its caches
under ``out/bazel``; where the wheel is comes from Bazel's build events, never from a guess in
``bazel-bin``, where older wheels stay. No Bazel server outlives a run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import tarfile
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from tpuforge import pins as pins_module
from tpuforge.console import Progress, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import atomic_file, exclusive, out_dir, sha256_file, write_atomic
from tpuforge.pins import Bazelisk, Pins
from tpuforge.process import Completed, clean_env, run
from tpuforge.verb import Outcome, parser, run_verb

VERB = "build_wheel"
TARGET = "//ci/wheel:torch_tpu_wheel"
"""The wheel's target in the source of TorchTPU."""

_NPM_TIMEOUT_S = 300.0
_SHUTDOWN_TIMEOUT_S = 20.0
_ELF = b"\x7fELF"
# of Bazel's exit codes, those that speak about the source and not about this machine:
# 1 the build failed, 3 it succeeded in part
_ABOUT_THE_SOURCE = (1, 3)
# how npm reaches its registry, beside its files under HOME
_NPM_ACCESS = ("NODE_EXTRA_CA_CERTS",)
_STEP = re.compile(r"\[[\d,]+ / [\d,]+\]")


@dataclass(frozen=True)
class Tool:
    """A Bazelisk that can be run.

    Attributes:
        path: The native binary.
        origin: ``given``, ``PATH`` or ``npm``.
        sha256: Its digest.
    """

    path: Path
    origin: str
    sha256: str


@dataclass(frozen=True)
class Built:
    """What Bazel's build events say.

    Attributes:
        finished: Whether Bazel got as far as a result.
        wheels: Every ``.whl`` among the outputs of the target, with the digest Bazel states.
    """

    finished: bool
    wheels: tuple[tuple[str, str | None], ...]


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


def find_bazelisk(given: str | None, pin: Bazelisk, work: Path) -> Tool:
    """The Bazelisk to run: the one given, else the one on PATH, else the pinned one from npm.

    Args:
        given: A path from the command line.
        pin: The pinned one.
        work: Folder that keeps the fetched one.

    Returns:
        A native binary. The fetched one has the pinned digest, checked now.

    Raises:
        ForgeError: If there is none, or its digest is wrong.
    """
    if given is not None:
        path = Path(given).expanduser().absolute()
        if not _native(path):
            raise ForgeError(
                f"--bazelisk {given}: not a native program",
                expected="Bazelisk's binary: its npm script does not pass signals on",
                mend=f"give the file {pin.file} of the npm package {pin.npm}",
            )
        return Tool(path, "given", sha256_file(path))
    on_path = shutil.which("bazelisk")
    if on_path is not None and _native(Path(on_path)):
        return Tool(Path(on_path), "PATH", sha256_file(Path(on_path)))
    path = work / "bazelisk" / pin.sha256 / pin.file
    if not path.exists():
        _fetch_bazelisk(pin, path)
    found = sha256_file(path)
    if found != pin.sha256:
        raise ForgeError(
            f"{path} has SHA-256 {found}",
            expected=f"{pin.sha256}, as lock/pins.toml says",
            mend=f"rm {shlex.quote(str(path))}, then run the same command again",
            exit_code=Exit.FAULT,
        )
    return Tool(path, "npm", found)


def read_events(path: Path) -> Built:
    """Find the wheel in Bazel's build events (the JSON form of the build event protocol).

    Args:
        path: The file that ``--build_event_json_file`` named.

    Returns:
        What it says; nothing finished where there is no such file. A last line that was cut off
        is left out.
    """
    finished = False
    sets: dict[str, dict[str, Any]] = {}
    roots: list[str] = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        name = event.get("id", {})
        if "namedSet" in name:
            sets[name["namedSet"]["id"]] = event.get("namedSetOfFiles", {})
        elif name.get("targetCompleted", {}).get("label", "").removeprefix("@@") == TARGET:
            for group in event.get("completed", {}).get("outputGroup", []):
                if group.get("name") == "default":
                    roots += [entry["id"] for entry in group.get("fileSets", [])]
        elif "finished" in event:
            finished = True
    wheels: dict[str, str | None] = {}
    seen: set[str] = set()
    while roots:
        key = roots.pop()
        if key in seen:
            continue
        seen.add(key)
        members = sets.get(key, {})
        roots += [entry["id"] for entry in members.get("fileSets", [])]
        for file in members.get("files", []):
            if file.get("name", "").endswith(".whl"):
                wheels[file.get("uri", "")] = file.get("digest")
    return Built(finished, tuple(sorted(wheels.items())))


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
    source = _source(options.source, pins)
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


def _source(given: str | None, pins: Pins) -> Path:
    """The source folder, once it looks like one."""
    clone = f"git clone --branch {pins.upstream.ref} {pins.upstream.repository} SOURCE"
    mend = f"{clone}, then: forge build_wheel --source SOURCE"
    if given is None:
        raise ForgeError(
            "no source folder was given",
            expected="--source DIR, a checkout of TorchTPU (--dry-run prints the line alone)",
            mend=mend,
        )
    source = Path(given).expanduser().absolute()
    if not source.is_dir():
        raise ForgeError(f"{source}: no such folder", expected="a checkout of TorchTPU", mend=mend)
    marks = ("MODULE.bazel", "WORKSPACE.bazel", "WORKSPACE")
    package = TARGET.removeprefix("//").partition(":")[0]
    if not any((source / mark).is_file() for mark in marks) or not any(
        (source / package / name).is_file() for name in ("BUILD.bazel", "BUILD")
    ):
        raise ForgeError(
            f"{source} is not a checkout of TorchTPU",
            expected=f"a Bazel workspace with the target {TARGET}",
            mend=mend,
        )
    return source


def _native(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == _ELF and os.access(path, os.X_OK)
    except OSError:
        return False


def _fetch_bazelisk(pin: Bazelisk, path: Path) -> None:
    """Get the pinned binary out of its npm package; nothing stays unless the digest agrees."""
    if shutil.which("npm") is None:
        raise ForgeError(
            "there is no Bazelisk, and no npm to get it with",
            expected=f"bazelisk on PATH, or npm, which has it as {pin.npm}@{pin.version}",
            mend="install npm or Bazelisk, or: forge build_wheel --bazelisk PATH",
        )
    env = clean_env()
    env |= {
        key: value
        for key, value in os.environ.items()
        if key in _NPM_ACCESS or key.lower().startswith("npm_config_")
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".npm-", dir=path.parent) as name:
        run(
            ["npm", "pack", "--silent", "--ignore-scripts", f"{pin.npm}@{pin.version}"],
            timeout=_NPM_TIMEOUT_S,
            env=env,
            cwd=Path(name),
            doing=f"getting {pin.npm}@{pin.version} with npm",
            mend="check the network and npm config list, or: forge build_wheel --bazelisk PATH",
        )
        try:
            (package,) = Path(name).glob("*.tgz")
            with (
                tarfile.open(package) as tar,
                atomic_file(path, mode=0o755) as temporary,
            ):
                member = tar.extractfile(f"package/{pin.file}")
                if member is None:
                    raise KeyError(pin.file)
                with temporary.open("wb") as target:
                    shutil.copyfileobj(member, target)
                found = sha256_file(temporary)
                if found != pin.sha256:
                    raise ForgeError(
                        f"{pin.file} of {pin.npm}@{pin.version} has SHA-256 {found}",
                        expected=f"{pin.sha256}, as lock/pins.toml says",
                        mend="do not use it; look at who changed what: the package or the pin",
                        exit_code=Exit.FAULT,
                    )
        except (KeyError, ValueError, tarfile.TarError) as error:
            raise ForgeError(
                f"the npm package {pin.npm}@{pin.version} has no {pin.file}: {error}",
                expected="the package that lock/pins.toml names",
                mend="forge build_wheel --bazelisk PATH",
            ) from error


def _environment(options: argparse.Namespace, work: Path) -> dict[str, str]:
    """Bazel's whole environment: nothing of the user's own Bazel settings, unless a flag says."""
    extra = {"BAZELISK_HOME": str(work / "bazelisk-home")}
    if options.bazel:
        given = Path(options.bazel).expanduser()
        extra["USE_BAZEL_VERSION"] = str(given.absolute()) if given.is_file() else options.bazel
    if options.bazel_url:
        extra["BAZELISK_BASE_URL"] = options.bazel_url
    return clean_env(**extra)


def _run_bazel(
    line: Sequence[str],
    source: Path,
    work: Path,
    options: argparse.Namespace,
    progress: Progress,
) -> Completed:
    """Run the line; however it ends, no server is left."""
    env = _environment(options, work)
    log = work / "build_wheel.log"

    def show(text: str) -> None:
        if _STEP.match(text):
            progress.detail(text)

    # the work folder is ours alone now, so a server in it is what a killed run left behind
    _end_server(line[:2], source, work, env)
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
        _end_server(line[:2], source, work, env)


def _end_server(startup: Sequence[str], source: Path, work: Path, env: Mapping[str, str]) -> None:
    """Ask Bazel's server to go; end it by its process id if it does not.

    Ending the client leaves the server, which is in a session of its own, with the build.
    """
    servers = list((work / "root").glob("*/server/server.pid.txt"))
    if not servers:
        return
    with contextlib.suppress(ForgeError):
        run(
            [startup[0], "--noblock_for_lock", *startup[1:], "shutdown"],
            timeout=_SHUTDOWN_TIMEOUT_S,
            env=env,
            cwd=source,
            check=False,
        )
    for file in servers:
        for number in (signal.SIGTERM, signal.SIGKILL):
            process = _server(file)
            if process is None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
            deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S / 4
            while _server(file) is not None and time.monotonic() < deadline:
                time.sleep(0.05)


def _server(file: Path) -> int | None:
    """The running server that a pid file speaks of, if its command line names its folder."""
    base = str(file.parent.parent)
    try:
        process = int(file.read_text().strip())
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return process if any(os.fsencode(base) in word for word in words) else None


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
