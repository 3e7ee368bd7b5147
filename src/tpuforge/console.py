"""What people see: progress, tables and errors on standard error; results on standard output.

On a terminal progress is a live line; elsewhere it is a plain line when a step starts, ends, or
has run for another ten seconds. Colour only on terminals, and never with ``NO_COLOR``.

Where output goes decides nothing about what was judged: :func:`guard_streams` takes care of readers
that go away, full disks, closed streams and characters that a stream cannot show.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpuforge.errors import ForgeError

_PLAIN_EVERY_S = 10.0
# all but the tab and the end of a line
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Stream(io.FileIO):
    """A standard stream that never raises: whoever prints has no way to mend it.

    Attributes:
        fault: Why output was lost; empty as long as none was, or where nobody wanted to read it.
    """

    def __init__(self, handle: int) -> None:
        super().__init__(handle, "w", closefd=False)
        self.fault = ""
        self._gone = False

    def write(self, data: Any, /) -> int:
        """Write what can be written; what comes after a fault is dropped."""
        size = memoryview(data).nbytes
        if self._gone:
            return size
        try:
            return super().write(data)
        except BrokenPipeError:
            self._gone = True
        except OSError as error:
            self._gone, self.fault = True, error.strerror or str(error)
        return size


def guard_streams() -> None:
    """Make standard output and standard error safe to print to, for the rest of the process.

    A closed one becomes ``/dev/null``, so that no file that is opened later gets its number. One
    whose reader went away takes what is printed and drops it. Characters that it cannot show, such
    as the bytes of a file name that is not UTF-8, are shown as escapes.
    """
    for handle in range(3):
        try:
            os.fstat(handle)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != handle:
                os.dup2(null, handle)
                os.close(null)
            os.set_inheritable(handle, True)
    sys.stdout = _guarded(sys.stdout, sys.__stdout__, 1)
    sys.stderr = _guarded(sys.stderr, sys.__stderr__, 2)


def _guarded(stream: TextIO | None, original: TextIO | None, handle: int) -> TextIO:
    if stream is not None and stream is not original:
        # somebody put another one there on purpose
        return stream
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Stream(handle)),
        encoding=stream.encoding if stream is not None else "utf-8",
        errors="backslashreplace",
        line_buffering=handle == 2 or os.isatty(handle),
    )


def lost_output() -> str:
    """Why something that was printed did not arrive on standard output.

    Returns:
        The reason, such as a full disk; empty if all did, or if the reader went away.
    """
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.fault if isinstance(raw, _Stream) else ""


def size(count: float) -> str:
    """A number of bytes for people, in decimal units: ``517.3 MB``.

    Args:
        count: Bytes.
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """A time span for people: ``4.2 s``, ``3 min 05 s``.

    Args:
        seconds: The span.
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def error_console() -> Console:
    """A console on standard error."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def visible(text: str) -> str:
    """A text whose control characters are seen and not obeyed.

    A file name, an argument or what a server answers may hold codes that move a terminal's cursor
    or rewrite what stands there.

    Args:
        text: Any text.

    Returns:
        The same text; each control character but tabs and ends of lines as a backslash, x and its
        number.
    """
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _shown(text: str) -> str:
    return escape(visible(text))


def print_error(verb: str, error: ForgeError) -> None:
    """Show an error: what was found, what was expected, what mends it.

    Args:
        verb: The verb that failed.
        error: The error.
    """
    console = error_console()
    console.print(f"[bold red]{verb}: {_shown(error.found)}[/]")
    if error.expected:
        console.print(f"  expected: {_shown(error.expected)}")
    if error.mend:
        console.print(f"  mend:     [bold]{_shown(error.mend)}[/]")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Show a table on standard output.

    On a terminal it fits the width. Elsewhere a row is one line and no cell is cut, for ``grep``.

    Args:
        columns: The headings.
        rows: The cells, one sequence per row, as many as there are headings.
        title: A line above the table.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        lines = [[visible(" ".join(cell.split("\n"))) for cell in row] for row in (columns, *rows)]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        print(*[title] if title else [], *(_line(line, widths) for line in lines), sep="\n")
        return
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_shown(cell) for cell in row))
    console.print(table)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (set_cell_size(cell, width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip()


class Progress:
    """The progress display of one verb.

    Args:
        verb: The verb, shown before each step.
        quiet: Show nothing (for ``--json`` on a terminal that is read by a machine).
    """

    def __init__(self, verb: str, *, quiet: bool = False) -> None:
        self._verb = verb
        self._quiet = quiet
        self._console = error_console()
        self._live = self._console.is_terminal and not quiet
        self._lock = threading.Lock()
        self._step = ""
        self._done = 0.0
        self._total: float | None = None
        self._detail = ""
        self._started = self._spoke = time.monotonic()
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._ticker.join()
        self._wipe()

    @contextmanager
    def step(self, name: str, total: float | None = None) -> Iterator[None]:
        """Show one step of the verb from its start to its end.

        Args:
            name: What is being done, such as ``downloading torch``.
            total: Bytes to do, if known; :meth:`advance` then gives a share.

        Yields:
            Nothing.
        """
        with self._lock:
            self._step, self._done, self._total, self._detail = name, 0.0, total, ""
            self._started = self._spoke = time.monotonic()
        if not self._live:
            self._say(f"{name} …")
        try:
            yield
        finally:
            spent = time.monotonic() - self._started
            amount = f", {size(self._done)}" if self._done else ""
            with self._lock:
                self._step = ""
            if spent > 2 or self._done:
                self._say(f"{name}: {duration(spent)}{amount}")

    def advance(self, count: float) -> None:
        """Count bytes of the running step.

        Args:
            count: Bytes done since the last call.
        """
        self._done += count

    def detail(self, text: str) -> None:
        """Show a word on what the running step is doing right now.

        Args:
            text: One line, such as the last line of a subprocess.
        """
        self._detail = text

    def note(self, text: str, *, loud: bool = False, always: bool = False) -> None:
        """Say something that stays on the screen.

        Args:
            text: One line.
            loud: Something the reader must not miss.
            always: Say it with ``quiet`` as well, such as what a silent run is waiting for.
        """
        self._say(text, style="bold yellow" if loud else "", always=always)

    def _say(self, text: str, style: str = "", *, always: bool = False) -> None:
        if self._quiet and not always:
            return
        self._wipe()
        shown = f"{self._verb}: {_shown(text)}"
        self._console.print(f"[{style}]{shown}[/]" if style else shown)
        sys.stderr.flush()

    def _wipe(self) -> None:
        if self._live:
            self._console.file.write("\r\x1b[2K")
            self._console.file.flush()

    def _status(self) -> str:
        spent = duration(time.monotonic() - self._started)
        if self._total:
            share = min(1.0, self._done / self._total)
            filled = round(share * 20)
            amount = f"{size(self._done)} of {size(self._total)}"
            return f"{self._step} [{'#' * filled}{'.' * (20 - filled)}] {amount}, {spent}"
        amount = f", {size(self._done)}" if self._done else ""
        return f"{self._step}{amount}, {spent}" + (f"  {self._detail}" if self._detail else "")

    def _tick(self) -> None:
        while not self._stop.wait(0.2):
            with self._lock:
                if not self._step or self._quiet:
                    continue
                status = self._status()
            if self._live:
                width = max(20, self._console.width - 1)
                self._console.file.write(f"\r\x1b[2K{f'{self._verb}: {visible(status)}'[:width]}")
                self._console.file.flush()
            elif time.monotonic() - self._spoke > _PLAIN_EVERY_S:
                self._spoke = time.monotonic()
                self._say(status)
