"""The pytest plugin of the suite: the ``check`` marker and fixture, results, progress."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TextIO

import pytest

from smoke import isolate
from smoke.verdict import TIERS

_SEVERITIES = ("critical", "warning")
_KEY = pytest.StashKey["Check"]()
REBAKE = "pull the image again by its digest, or bake it again"
"""The remedy for an image whose own files are wrong."""

_PLAIN_AFTER_S = 2.0
_PLAIN_EVERY_S = 10.0


@dataclass
class Check:
    """One check while it runs: what it is, and what it found.

    Attributes:
        id: Its name, ``tier.what`` and ``@target`` where it runs once per target.
        tier: One of the five tiers.
        purpose: What it proves.
        severity: ``critical``, or ``warning``: reported, and never makes an image unhealthy.
        remedy: What a person does when it fails.
        detail: One sentence on what was found, set by the check.
        figures: Numbers and short texts for machines, set by the check.
        peak_memory_bytes: Largest process that it started, None if it started none.
    """

    id: str
    tier: str
    purpose: str
    severity: str
    remedy: str
    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    peak_memory_bytes: int | None = None

    def isolated(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float,
        env: Mapping[str, str | None] | None = None,
    ) -> isolate.Ended:
        """Run a function in its own process and keep the memory figure.

        A process that was killed from outside says nothing, and leaves the check not run.

        Args:
            function: A module-level function, see :func:`smoke.isolate.run`.
            *arguments: JSON values.
            timeout: Seconds.
            env: Variables to set or (None) to remove.

        Returns:
            How it ended.
        """
        return self._spoke(isolate.run(function, *arguments, timeout=timeout, env=env))

    def value(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float,
        env: Mapping[str, str | None] | None = None,
    ) -> Any:
        """The same, for a function that must end well.

        Args:
            function: A module-level function.
            *arguments: JSON values.
            timeout: Seconds.
            env: Variables to set or (None) to remove.

        Returns:
            What the function returned.

        Raises:
            AssertionError: If it did not end well; the message says how.
        """
        return self.took(self.isolated(function, *arguments, timeout=timeout, env=env))

    def took(self, ended: isolate.Ended) -> Any:
        """Take over a process that must have ended well, and its memory figure.

        Args:
            ended: How it ended.

        Returns:
            What its function returned.

        Raises:
            AssertionError: If it did not end well; the message says how. A process that was
                killed from outside leaves the check not run instead.
        """
        if self._spoke(ended).error is not None:
            raise AssertionError(ended.story)
        return ended.value

    def _spoke(self, ended: isolate.Ended) -> isolate.Ended:
        self.peak_memory_bytes = max(self.peak_memory_bytes or 0, ended.peak_memory_bytes)
        if ended.kind == "killed":
            self.cannot(ended.story)
        return ended

    def cannot(self, why: str) -> NoReturn:
        """Say that this check cannot be made here; it is then *not run*, never a pass.

        Args:
            why: The reason, for people.
        """
        pytest.skip(why)

    def elsewhere(self, why: str) -> NoReturn:
        """Say that this check is for another kind of image: not run, and nothing is missing here.

        A critical check that was not run leaves its tier incomplete, so it is none any more.

        Args:
            why: The reason, for people.
        """
        self.severity = "warning"
        pytest.skip(why)


def check_of(item: pytest.Item) -> Check:
    """The check that a test is, from its marker.

    Args:
        item: A collected test.

    Raises:
        pytest.UsageError: If the marker is missing, incomplete or of an unknown tier.
    """
    marker = item.get_closest_marker("check")
    if marker is None:
        raise pytest.UsageError(f"{item.nodeid} has no check marker")
    given = marker.kwargs
    if set(given) != {"id", "purpose", "severity", "remedy"} or not all(given.values()):
        raise pytest.UsageError(f"{item.nodeid}: a check has id, purpose, severity and remedy")
    tier = str(given["id"]).partition(".")[0]
    if tier not in TIERS or given["severity"] not in _SEVERITIES:
        raise pytest.UsageError(f"{item.nodeid}: unknown tier or severity")
    name = given["id"]
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "target" in callspec.params:
        name = f"{name}@{callspec.params['target']}"
    return Check(name, tier, given["purpose"], given["severity"], given["remedy"])


class Suite:
    """What a run of the suite knows: registered with pytest as a plugin.

    Args:
        targets: Topologies of the compile tier.
        chosen: Whether a person named them.
        closed: Tier to why it cannot run here.
        progress: Where progress is shown; nothing is shown if None.
        full: Whether checks with the marker ``full``, the slow ones, are run as well.
    """

    def __init__(
        self,
        targets: Sequence[str],
        chosen: bool,
        closed: Mapping[str, str],
        progress: TextIO | None,
        full: bool = False,
    ) -> None:
        self.targets = tuple(targets)
        self.chosen = chosen
        self.results: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = dict.fromkeys(TIERS, 0.0)
        self.collected: set[str] = set()
        self.deselected: set[str] = set()
        self.interrupted = False
        self._closed = dict(closed)
        self._full = full
        self._progress = Progress(progress) if progress is not None else None
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._chosen = 0

    def pytest_configure(self, config: pytest.Config) -> None:
        """Make the markers known."""
        config.addinivalue_line("markers", "check(id, purpose, severity, remedy): a health check")
        config.addinivalue_line("markers", "program(theme, name): what a check waits for")
        config.addinivalue_line("markers", "full: slow, and run only when it is asked for")
        for name in (*TIERS, *_SEVERITIES):
            config.addinivalue_line("markers", f"{name}: every check has its tier and its severity")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give every test that takes a ``target`` one run per target."""
        if "target" in metafunc.fixturenames:
            metafunc.parametrize("target", self.targets)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Read the markers; close the tiers that cannot run; leave out what was not asked for."""
        if not self._full:
            items[:] = [item for item in items if item.get_closest_marker("full") is None]
        for item in items:
            check = check_of(item)
            item.stash[_KEY] = check
            self.collected.add(check.tier)
            # -k then takes the names that people see in the report
            item.extra_keyword_matches.add(check.id)
            for name in (check.tier, check.severity):
                item.add_marker(getattr(pytest.mark, name))
            if check.tier in self._closed:
                item.add_marker(pytest.mark.skip(reason=self._closed[check.tier]))
        items.sort(key=lambda item: TIERS.index(item.stash[_KEY].tier))
        names = [item.stash[_KEY].id for item in items]
        for name in names:
            if names.count(name) > 1:
                raise pytest.UsageError(f"two checks are called {name}")

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Remember which tiers a selection took checks from."""
        self.deselected |= {item.stash[_KEY].tier for item in items if _KEY in item.stash}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count what is left after every selection."""
        self._chosen = len(session.items)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Tell an interruption from files that cannot be read, which pytest stops for as well."""
        self.interrupted = not isinstance(excinfo.value, pytest.Session.Interrupted)

    @pytest.fixture
    def check(self, request: pytest.FixtureRequest) -> Check:
        """The running check."""
        running: Check = request.node.stash[_KEY]
        return running

    @pytest.fixture
    def targets_chosen(self) -> bool:
        """Whether a person named the targets."""
        return self.chosen

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Time a check, show it, and keep its result."""
        check = item.stash[_KEY]
        self._reports[item.nodeid] = []
        started = time.monotonic()
        name = f"{len(self.results)} of {self._chosen} checks done; {check.id}"
        with self._progress.step(name) if self._progress else contextlib.nullcontext():
            result = yield
        seconds = time.monotonic() - started
        self.seconds[check.tier] += seconds
        self.results.append(self._result(check, self._reports.pop(item.nodeid), seconds))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the reports of a check's phases."""
        self._reports.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Put the figures into the JUnit file as well."""
        figures = item.stash[_KEY].figures
        item.user_properties += [(name, str(value)) for name, value in figures.items()]

    def _result(
        self, check: Check, reports: Sequence[pytest.TestReport], seconds: float
    ) -> dict[str, Any]:
        status, detail = "passed", check.detail
        for report in reports:
            if report.failed:
                status, detail = "failed", _message(report)
                break
            if report.skipped:
                status, detail = "not run", _reason(report)
        if not any(report.when == "call" for report in reports) and status == "passed":
            status, detail = "failed", "the check was never called"
        return {
            "id": check.id,
            "tier": check.tier,
            "purpose": check.purpose,
            "severity": check.severity,
            "remedy": check.remedy,
            "status": status,
            "detail": detail,
            "seconds": round(seconds, 3),
            "peak_memory_bytes": check.peak_memory_bytes,
            "figures": check.figures,
        }


def _message(report: pytest.TestReport) -> str:
    """The words of a failure, without pytest's own."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    for prefix in ("AssertionError: ", "Failed: "):
        text = text.removeprefix(prefix)
    return text.strip() or "it failed without a word"


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)


class Progress:
    """What is running right now: a live line on a terminal, plain lines elsewhere.

    Args:
        stream: Where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        # pytest captures file descriptors 1 and 2 while a test runs
        self._stream = os.fdopen(os.dup(stream.fileno()), "w", encoding="utf-8")
        self._live = stream.isatty()

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Show one check from its start to its end.

        Args:
            name: The check, and how far the run is.
        """
        done = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(name, done), daemon=True)
        ticker.start()
        try:
            yield
        finally:
            done.set()
            ticker.join()

    def _tick(self, name: str, done: threading.Event) -> None:
        started = spoke = time.monotonic()
        said = False
        while not done.wait(0.2):
            now = time.monotonic()
            if self._live:
                self._write(f"\r\x1b[2K{name}  {now - started:.0f} s")
            elif now - spoke > (_PLAIN_EVERY_S if said else _PLAIN_AFTER_S):
                spoke, said = now, True
                self._write(f"health: {name} … {now - started:.0f} s\n")
        if self._live:
            self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()


def progress_stream() -> TextIO | None:
    """Where progress goes: standard error, so that standard output stays for results."""
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return None
    return sys.stderr
