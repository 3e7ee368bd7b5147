"""How every verb runs: arguments, display, result file, exit code.

A verb is a function from its arguments to an :class:`Outcome`. :func:`run_verb` gives it
``--help`` and ``--json``, a progress display, one place for errors, and writes
``out/results/<name>.json`` (schema in ``docs/results.md``), which is what the next stage and the
report read.
"""

from __future__ import annotations

import argparse
import errno
import io
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Literal, NoReturn, Protocol

from tpuforge.console import (
    Progress,
    duration,
    guard_streams,
    lost_output,
    print_error,
    size,
    visible,
)
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import ROOT, json_text, out_dir, write_json
from tpuforge.process import heed_signals, redact

_NO_NAME = re.compile(r"[^A-Za-z0-9._-]")
_MOST_NAME = 120


@dataclass
class Outcome:
    """What a verb did.

    Attributes:
        status: ``done``, or ``unchanged`` when nothing had to be done.
        summary: One line for people: what was done, or why nothing had to be.
        data: Figures, digests and paths for machines and for the report.
        notes: What the reader of the report must not miss, one sentence each.
        exit_code: The verb's exit code.
        text: More lines for people, printed before the summary.
    """

    status: Literal["done", "unchanged"]
    summary: str
    data: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    exit_code: Exit = Exit.OK
    text: str = ""


Action = Callable[[argparse.Namespace, Progress], Outcome]


class _Interrupted(BaseException):
    """Raised in the main thread by TERM and HUP, so that every ``finally`` runs."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    raise _Interrupted(signal.Signals(number).name)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are those of every verb."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments, and what they should be."""
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise ForgeError(message, expected=usage, mend=f"{self.prog} --help")


def parser(verb: str, description: str, *, module: str = "") -> argparse.ArgumentParser:
    """An argument parser with what all verbs share.

    Args:
        verb: The verb, as ``nox -s`` knows it.
        description: One or two sentences on what it does.
        module: What starts it, if it is no verb of ``./forge``.

    Returns:
        A parser that already has ``--json``, and takes no option by a part of its name: a script
        that leaves the rest out would mean another one once there are two that begin so.
    """
    page = f"docs/{verb}.md"
    more = f"More: {page}; all exit codes: docs/exit-codes.md" if (ROOT / page).exists() else None
    prog = f".venv/bin/python -m {module}" if module else f"./forge {verb}"
    made = _Parser(prog=prog, description=description, epilog=more, allow_abbrev=False)
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    return made


def add_image(
    made: argparse.ArgumentParser,
    flavour: str | None = "the lock that it must have been baked from",
    *,
    several: bool = False,
) -> None:
    """Add the options that name an image.

    Args:
        made: The verb's parser.
        flavour: What ``--flavour`` names; the verb has none if this is None.
        several: Take more than one; ``image`` is then a list, or None.
    """
    made.add_argument(
        "--image",
        action="append" if several else "store",
        metavar="NAME",
        help=f"the image, such as runtime{'; by commas, or again, for more' if several else ''} "
        "(default: lock/pins.toml's)",
    )
    made.add_argument("--python", metavar="X.Y", help="its Python (default: lock/pins.toml's)")
    if flavour is not None:
        made.add_argument("--flavour", metavar="NAME", help=flavour)


class Main(Protocol):
    """What a module of a verb is started by."""

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the verb with its arguments, the process's own if not given, to its exit code."""


def main_of(
    verb: str,
    arguments: Callable[[], argparse.ArgumentParser],
    action: Action,
    *,
    subject: Callable[[argparse.Namespace], str] | None = None,
) -> Main:
    """The ``main`` of a verb that has nothing to do around :func:`run_verb`.

    Args:
        verb: The verb, as ``nox -s`` knows it.
        arguments: Makes its parser.
        action: What it does.
        subject: As for :func:`run_verb`.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        return run_verb(verb, arguments(), action, argv, subject=subject)

    return main


def run_verb(
    verb: str,
    arguments: argparse.ArgumentParser,
    action: Action,
    argv: Sequence[str] | None = None,
    *,
    subject: Callable[[argparse.Namespace], str] | None = None,
) -> int:
    """Run a verb from its command line to its exit code.

    Args:
        verb: The verb, as ``nox -s`` knows it.
        arguments: Its parser, from :func:`parser`.
        action: What it does.
        argv: Its arguments; the process's own if not given.
        subject: What the parsed arguments are about, such as ``runtime-py311``: its file in
            ``out/results`` has that in its name, and the verb alone if this is empty or not given.

    Returns:
        The exit code (see :class:`~tpuforge.errors.Exit`). A reader of the output who went away
        does not change it; output that could not be written makes it 2.
    """
    guard_streams()
    try:
        code = _run(verb, arguments, action, argv, subject)
    except SystemExit as end:
        # --help
        code = end.code if isinstance(end.code, int) else Exit.CANNOT
        if not lost_output():
            raise
    why = lost_output()
    if why and code != Exit.INTERRUPTED:
        failure = ForgeError(
            f"what was printed did not arrive: {why}",
            expected="a standard output that takes it",
            mend="free some space, or send it elsewhere; the result is in out/results too",
        )
        print_error(verb, failure)
        return Exit.CANNOT
    return code


def _run(
    verb: str,
    arguments: argparse.ArgumentParser,
    action: Action,
    argv: Sequence[str] | None,
    subject: Callable[[argparse.Namespace], str] | None,
) -> int:
    words = sys.argv[1:] if argv is None else argv
    started = datetime.now(UTC)
    clock = time.monotonic()
    try:
        options = arguments.parse_args(words)
    except ForgeError as error:
        # nothing was begun, so the result of the run before this one stays
        record = {"status": "failed", "error": error.as_dict(), "exit_code": int(error.exit_code)}
        _leave(None, verb, record, started, clock, as_json="--json" in words)
        print_error(verb, error)
        return error.exit_code
    before = {
        number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    name = verb
    try:
        heed_signals()
        # it may read the pins, and those may be bad
        if subject is not None and (about := subject(options)):
            name = f"{verb}-{about}"
        with Progress(verb, quiet=options.json) as progress:
            outcome = action(options, progress)
    except ForgeError as error:
        record = {"status": "failed", "error": error.as_dict(), "exit_code": int(error.exit_code)}
        _leave(name, verb, record, started, clock, as_json=options.json)
        print_error(verb, error)
        return error.exit_code
    except OSError as error:
        # a full disk or a missing permission can come from any line that writes
        failure = _failure(error)
        record = {"status": "failed", "error": failure.as_dict(), "exit_code": int(Exit.CANNOT)}
        _leave(name, verb, record, started, clock, as_json=options.json)
        print_error(verb, failure)
        return Exit.CANNOT
    except Exception as error:
        # a mistake of ours: shown whole, and never with the exit code of "judged, and bad"
        traceback.print_exc()
        found = f"a mistake in tpuforge: {type(error).__name__}: {redact(str(error))}"
        failure = ForgeError(found, expected="none", mend="report it, with the lines above")
        record = {"status": "failed", "error": failure.as_dict(), "exit_code": int(Exit.CANNOT)}
        _leave(name, verb, record, started, clock, as_json=options.json)
        print_error(verb, failure)
        return Exit.CANNOT
    except (KeyboardInterrupt, _Interrupted):
        record = {"status": "interrupted", "exit_code": int(Exit.INTERRUPTED)}
        _leave(name, verb, record, started, clock, as_json=options.json)
        print(f"{verb}: interrupted; what was finished is kept", file=sys.stderr)
        return Exit.INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    record = {
        "status": outcome.status,
        "summary": outcome.summary,
        "notes": outcome.notes,
        "data": outcome.data,
        "exit_code": int(outcome.exit_code),
    }
    _leave(name, verb, record, started, clock, as_json=options.json)
    if not options.json:
        if outcome.text:
            print(visible(outcome.text))
        spent = duration(time.monotonic() - clock)
        word = "nothing to do" if outcome.status == "unchanged" else "done"
        print(f"{verb}: {word} in {spent}: {visible(outcome.summary)}", flush=True)
    return outcome.exit_code


def _failure(error: OSError) -> ForgeError:
    """What an error of the file system means for a person."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = error.filename
        if where is None:
            # a write does not tell its file
            out = out_dir()
            where = f"the out folder is {out}, with {size(shutil.disk_usage(out).free)} free"
        return ForgeError(
            redact(f"{error.strerror}: {where}"),
            expected="space for what is made",
            mend="free some space, or set TPUFORGE_OUT to a larger disk, then run the same command "
            "again",
        )
    return ForgeError(
        redact(str(error)),
        expected="files and folders that can be read and written",
        mend="mend the permissions, or take away what is in the way, then run the same command "
        "again",
    )


def _file_name(name: str) -> str:
    """The name of a result as that of one file: an argument in it may be anything."""
    return _NO_NAME.sub("_", name)[:_MOST_NAME]


def _leave(
    name: str | None,
    verb: str,
    record: dict[str, Any],
    started: datetime,
    clock: float,
    *,
    as_json: bool,
) -> None:
    """Write the result file, if it has a name, and print it for a machine that asked."""
    record = {
        "schema": "tpuforge.result/1",
        "verb": verb,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - clock, 3),
        **record,
    }
    try:
        if name is not None:
            write_json(out_dir() / "results" / f"{_file_name(name)}.json", record)
    except OSError as error:
        print(f"{verb}: the result file could not be written: {error}", file=sys.stderr)
    if as_json:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # JSON is UTF-8 whatever the locale
            sys.stdout.reconfigure(encoding="utf-8")
        print(json_text(record), flush=True)
