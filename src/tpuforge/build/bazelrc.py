"""The source's ``.bazelrc``, read before Bazel is: are the configurations there, and do they hold?

A mistake here costs hours otherwise: without ``--//:wheel_build=True`` the build is refused late,
and where ``no_rbe`` does not have the last word on the remote executor, Bazel waits for a service
that it has no credentials for.

Facts: Bazel's user manual, "Write bazelrc configuration files" (syntax, imports, expansion of
configurations), and TorchTPU's own ``.bazelrc`` (``wheel_common`` sets the flag, the remote cache
and the remote executor; ``no_rbe`` clears the latter two).
"""

from __future__ import annotations

import difflib
import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import read_regular

RC_FILE = ".bazelrc"
WHEEL_FLAG = "//:wheel_build"
"""The build setting without which no wheel that works is made."""

# what "bazel build" reads, in the order in which Bazel expands a configuration; "startup" lines
# have no configurations
_COMMANDS = ("always", "common", "build")
_TRUE = ("true", "1", "yes")
_REMOTE = ("remote_executor", "remote_cache")


# bounds for files that a stranger wrote: all of them together take less than 2 s
_FILE_MOST = 1 << 17
_FILES_MOST = 32
_DEEP_MOST = 16
_WORDS_MOST = 20_000
_NEAR_MOST = 1000


@dataclass(frozen=True)
class _Line:
    """One line: ``command:config words``, and where it stands."""

    command: str
    config: str
    words: tuple[str, ...]
    where: str


@dataclass(frozen=True)
class Setting:
    """What an option is in the end.

    Attributes:
        value: Its value; ``true`` for an option without one.
        where: The file and line that had the last word.
    """

    value: str
    where: str


@dataclass(frozen=True)
class Rc:
    """A ``.bazelrc`` with all that it imports.

    Attributes:
        lines: Its lines in the order in which Bazel reads them.
        files: The files that were read.
        faults: What is wrong with the files themselves, one line each.
    """

    lines: tuple[_Line, ...]
    files: tuple[Path, ...]
    faults: tuple[str, ...]

    def configs(self) -> list[str]:
        """The names of all configurations that ``bazel build`` knows here."""
        return sorted({line.config for line in self.lines if line.config and self._read(line)})

    def settings(self, configs: Sequence[str]) -> dict[str, Setting]:
        """What every option is once some configurations are named on the command line.

        Args:
            configs: Their names, in the order of the command line.

        Returns:
            Option name, without dashes, to its last setting. ``--nofoo`` and ``--foo`` are two.
        """
        made: dict[str, Setting] = {}
        budget = itertools.count()
        for config in ("", *configs):
            for word, where in self._expand(config, (), budget):
                _set(made, word, where)
        return made

    @cached_property
    def _by_name(self) -> dict[tuple[str, str], list[_Line]]:
        found: dict[tuple[str, str], list[_Line]] = {}
        for line in self.lines:
            found.setdefault((line.command, line.config), []).append(line)
        return found

    def _expand(
        self, config: str, within: tuple[str, ...], budget: Iterator[int]
    ) -> Iterator[tuple[str, str]]:
        """The options of a configuration, those of the ones it names in their place."""
        if config and config in within:
            return
        if len(within) > _DEEP_MOST:
            raise _boundless(f"configurations name each other more than {_DEEP_MOST} deep")
        for command in _COMMANDS:
            for line in self._by_name.get((command, config), ()):
                words = iter(line.words)
                for word in words:
                    if next(budget) > _WORDS_MOST:
                        raise _boundless(f"more than {_WORDS_MOST} options in the end")
                    inner = next(words, "") if word == "--config" else _after(word, "--config=")
                    if inner:
                        yield from self._expand(inner, (*within, config), budget)
                    else:
                        yield word, line.where

    @staticmethod
    def _read(line: _Line) -> bool:
        return line.command in _COMMANDS


def read(source: Path) -> Rc:
    """Read the ``.bazelrc`` of a source, and what it imports.

    Args:
        source: The workspace.

    Returns:
        What it says. A missing file is a fault in it, not an error.
    """
    lines: list[_Line] = []
    files: list[Path] = []
    faults: list[str] = []
    try:
        _read_file((source / RC_FILE,), source, lines, files, faults)
    except ForgeError as error:
        faults.append(error.found)
    return Rc(tuple(lines), tuple(files), tuple(faults))


def check(source: Path, configs: Sequence[str]) -> list[str]:
    """Say what would go wrong with some configurations, before Bazel runs.

    Args:
        source: The workspace.
        configs: The configurations of the command line, in its order.

    Returns:
        One line for each fault; empty where all is well.
    """
    rc = read(source)
    faults = list(rc.faults)
    known = rc.configs()
    for config in configs:
        if config in known:
            continue
        near = difflib.get_close_matches(config, known[:_NEAR_MOST], n=1)
        hint = f"; the nearest name there is {near[0]}" if near else ""
        faults.append(f"{RC_FILE} defines no configuration {config}{hint}")
    if faults:
        return faults
    settings = rc.settings(configs)
    if "wheel_common" in configs:
        flag = settings.get(WHEEL_FLAG)
        if flag is None:
            faults.append(f"wheel_common does not set --{WHEEL_FLAG}=True in {RC_FILE}")
        elif flag.value.lower() not in _TRUE:
            faults.append(
                f"--{WHEEL_FLAG} is {flag.value} in the end, not True: {flag.where} has the last"
                " word"
            )
    if "no_rbe" in configs:
        cleared = _REMOTE if configs[-1] == "no_rbe" else _REMOTE[:1]
        for option in cleared:
            last = settings.get(option)
            if last is None or not last.value:
                continue
            wrong = "no_rbe stands before it" if _sets(rc, option) else "no_rbe does not clear it"
            faults.append(f"--{option} is {last.value} in the end ({last.where}): {wrong}")
    return faults


def _boundless(what: str) -> ForgeError:
    return ForgeError(
        f"{RC_FILE}: {what}",
        expected="settings such as TorchTPU's",
        mend="mend it in a checkout of your own: --source DIR",
        exit_code=Exit.FAULT,
    )


def _sets(rc: Rc, option: str) -> bool:
    """Whether ``no_rbe`` clears an option at all."""
    before = rc.settings(())
    alone = rc.settings(("no_rbe",)).get(option)
    return alone is not None and not alone.value and alone != before.get(option)


def _after(word: str, start: str) -> str:
    return word.removeprefix(start) if word.startswith(start) else ""


def _set(made: dict[str, Setting], word: str, where: str) -> None:
    if not word.startswith("--"):
        return
    name, equals, value = word.removeprefix("--").partition("=")
    # labels of the main repository have three spellings
    name = name.removeprefix("@@").removeprefix("@") if "//" in name else name
    if name == f"no{WHEEL_FLAG}":
        name, equals, value = WHEEL_FLAG, "=", "False"
    made[name] = Setting(value if equals else "true", where)


def _read_file(
    chain: tuple[Path, ...],
    source: Path,
    lines: list[_Line],
    files: list[Path],
    faults: list[str],
) -> None:
    """Read the last file of a chain of imports."""
    *above, path = chain
    name = path.relative_to(source).as_posix() if path.is_relative_to(source) else str(path)
    # a name may hold anything, and comes to a screen
    name = name if name.isprintable() else ascii(name)
    if path in above:
        faults.append(f"{name} imports itself")
        return
    if len(above) > _DEEP_MOST:
        raise _boundless(f"files import each other more than {_DEEP_MOST} deep")
    if len(files) >= _FILES_MOST:
        raise _boundless(f"more than {_FILES_MOST} files are imported")
    try:
        text = read_regular(path, _FILE_MOST).decode("utf-8")
    except (OSError, ValueError) as error:
        known = error.strerror if isinstance(error, OSError) else ""
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else known or str(error)
        faults.append(f"{name} cannot be read: {why}")
        return
    files.append(path)
    number, rest = 0, ""
    for raw in text.splitlines():
        number += 1
        joined = rest + raw
        if joined.endswith("\\"):
            rest = joined[:-1]
            continue
        rest = ""
        where = f"{name}, line {number}"
        try:
            words = shlex.split(joined, comments=True)
        except ValueError as error:
            faults.append(f"{where}: {error}")
            continue
        if not words:
            continue
        if words[0] in ("import", "try-import") and len(words) == 2:
            inner = Path(words[1].replace("%workspace%", str(source)))
            if words[0] == "import" or _is_there(inner):
                _read_file((*chain, inner), source, lines, files, faults)
            continue
        command, _, config = words[0].partition(":")
        lines.append(_Line(command, config, tuple(words[1:]), where))


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        # a name that cannot be that of a file
        return False
