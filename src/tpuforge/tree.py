"""The tree of images as ``images/docker-bake.hcl`` declares it, read without Docker.

``docker buildx bake --print`` gives the same, but takes a Docker client, and the table of images
has to be written where there is none. What is read is the part of HCL that the file uses: blocks
of attributes whose values are texts, names of variables, lists of texts and maps of them.

Format: the Bake file reference of Docker, and the native syntax of HCL 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import ROOT

FILE = "docker-bake.hcl"
# BuildKit knows it whether a Dockerfile names it or not
_BUILT_IN = frozenset({"SOURCE_DATE_EPOCH"})
_TOKEN = re.compile(
    r'(?P<space>\s+|#[^\n]*|//[^\n]*)|(?P<text>"(?:[^"\\\n]|\\.)*")'
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_-]*)|(?P<mark>[{}\[\]=,])"
)
_SIZE = re.compile(r"(?P<number>\d+)MB")
_ARG = re.compile(r"^\s*ARG\s+(?P<rest>.+)$", re.MULTILINE | re.IGNORECASE)
_STAGE = re.compile(r"^\s*FROM\s+\S+\s+AS\s+(\S+)\s*$", re.MULTILINE | re.IGNORECASE)
_USED = re.compile(
    r"^\s*FROM\s+(?P<stage>\S+)|--from=(?P<copy>\S+)|[,=]from=(?P<mount>[^,\s]+)",
    re.MULTILINE | re.IGNORECASE,
)


@dataclass(frozen=True)
class Image:
    """One image of the tree.

    Attributes:
        name: Its name, such as ``pallas``.
        title: Its title, for people.
        description: What it is for, in one line.
        flavour: The lock that it is made from; empty if the bake chooses it, or there is none.
        wheels: Whether it holds wheels.
        compressed: The most that its blobs may come to, in bytes.
        unpacked: The most that its files may come to, in bytes.
    """

    name: str
    title: str
    description: str
    flavour: str
    wheels: bool
    compressed: int
    unpacked: int


def images(folder: Path) -> dict[str, Image]:
    """The images of the tree, by name, in the order of the file.

    Args:
        folder: With ``docker-bake.hcl``.

    Raises:
        ForgeError: If the file cannot be read or an image lacks what the others have; exit code 1.
    """
    path = folder / FILE
    found = {}
    for name, target in targets(folder).items():
        labels = target.get("labels", {})
        stack = target.get("args", {}).get("STACK")
        flavour = labels.get("io.tpuforge.flavour", "")
        try:
            found[name] = Image(
                name,
                labels["org.opencontainers.image.title"],
                labels["org.opencontainers.image.description"],
                "" if flavour == "FLAVOUR" else flavour,
                stack is not None,
                budget(labels, "compressed"),
                budget(labels, "unpacked"),
            )
        except (KeyError, ValueError) as error:
            raise _bad(path, f"the image {name} lacks a label: {error}") from error
    return found


def image(folder: Path, name: str) -> Image:
    """One image of the tree.

    Args:
        folder: With ``docker-bake.hcl``.
        name: Its name, as a person gave it.

    Raises:
        ForgeError: If there is none of that name.
    """
    declared = images(folder)
    if name not in declared:
        raise ForgeError(
            f"there is no image {name!r}",
            expected=f"one of {', '.join(declared)}",
            mend="name one of them; docs/images.md says how to add one",
        )
    return declared[name]


def budget(labels: Mapping[str, str], what: str) -> int:
    """A size budget, in bytes.

    Args:
        labels: Of an image.
        what: ``compressed`` or ``unpacked``.

    Raises:
        KeyError: If there is none.
        ValueError: If it is not of the form ``520MB``.
    """
    name = f"io.tpuforge.budget.{what}"
    found = _SIZE.fullmatch(labels[name])
    if found is None:
        raise ValueError(f"{name} is {labels[name]!r} instead of a size such as 520MB")
    return int(found["number"]) * 1_000_000


def targets(folder: Path) -> dict[str, dict[str, Any]]:
    """The targets that are images, each with what it inherits.

    Args:
        folder: With ``docker-bake.hcl``.

    Returns:
        Name to attributes; a variable stands as its name, without quotes.

    Raises:
        ForgeError: If the file cannot be read; exit code 1.
    """
    path = folder / FILE
    blocks = _Reader(path).blocks()
    raw = {name: body for kind, name, body in blocks if kind == "target"}

    def whole(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
        if name not in raw or name in above:
            raise _bad(path, f"{' → '.join((*above, name))} cannot be inherited")
        made: dict[str, Any] = {}
        for parent in raw[name].get("inherits", []):
            _merge(made, whole(parent, (*above, name)))
        _merge(made, {key: value for key, value in raw[name].items() if key != "inherits"})
        return made

    return {name: whole(name) for name in raw if not name.startswith("_")}


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        into[key] = {**into.get(key, {}), **value} if isinstance(value, dict) else value


def faults(folder: Path) -> list[str]:
    """What the bake file and the Dockerfiles do not agree on.

    A build argument that only one of them knows is silently empty, or silently without effect; a
    stage that nobody declares is taken for an image of a registry.

    Args:
        folder: With ``docker-bake.hcl`` and the Dockerfiles.

    Returns:
        One line per fault.
    """
    found = []
    for name, target in targets(folder).items():
        file = str(target.get("dockerfile", "Dockerfile"))
        text = (folder / file).read_text(encoding="utf-8")
        # continued lines are one, and a comment declares nothing
        text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
        declared = {
            word.partition("=")[0] for one in _ARG.finditer(text) for word in one["rest"].split()
        }
        given = set(target.get("args", {}))
        found += [
            f"{file}: the build argument {one} is not in the target {name} of {FILE}"
            for one in sorted(declared - given)
        ]
        found += [
            f"{FILE}: the target {name} gives the build argument {one}, which {file} does not have"
            for one in sorted(given - declared - _BUILT_IN)
        ]
        known = {*_STAGE.findall(text), "scratch"}
        used = {one[one.lastgroup or ""] for one in _USED.finditer(text)}
        contexts = set(target.get("contexts", {}))
        everywhere = set().union(*(one.get("contexts", {}) for one in targets(folder).values()))
        found += [
            f"{file}: {one} is neither a stage nor a context of {FILE}"
            for one in sorted(used - known - everywhere)
            if "$" not in one
        ]
        found += [
            f"{FILE}: the target {name} has the context {one}, which {file} does not use"
            for one in sorted(contexts - used)
        ]
    return list(dict.fromkeys(found))


def main() -> int:
    """Print what the bake file and the Dockerfiles do not agree on.

    Returns:
        0 when they agree, 1 when they do not.
    """
    try:
        found = faults(ROOT / "images")
    except ForgeError as error:
        found = [error.found]
    print("\n".join(found))
    return int(Exit.FAULT if found else Exit.OK)


class _Reader:
    """A reader of the part of HCL that the bake file uses."""

    def __init__(self, path: Path) -> None:
        """Read a file.

        Args:
            path: The file.
        """
        self._path = path
        self._text = path.read_text(encoding="utf-8")
        self._tokens = list(self._scan())
        self._next = 0

    def _scan(self) -> Iterator[tuple[str, str, int]]:
        at = 0
        while at < len(self._text):
            found = _TOKEN.match(self._text, at)
            if found is None:
                self._fail(at, f"{self._text[at : at + 20]!r} is more than this reader knows")
            if found.lastgroup != "space":
                yield str(found.lastgroup), found[0], at
            at = found.end()

    def _fail(self, at: int, what: str) -> NoReturn:
        line = self._text.count("\n", 0, at) + 1
        raise _bad(self._path, f"line {line}: {what}")

    def _take(self, *wanted: str) -> tuple[str, str]:
        """The next token, if it is of a wanted kind, or is a wanted mark."""
        if self._next == len(self._tokens):
            self._fail(len(self._text), f"the file ends where {' or '.join(wanted)} should be")
        kind, text, at = self._tokens[self._next]
        if kind not in wanted and text not in wanted:
            self._fail(at, f"{text} where {' or '.join(wanted)} should be")
        self._next += 1
        return kind, text

    def _peek(self) -> str:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else ""

    def blocks(self) -> list[tuple[str, str, dict[str, Any]]]:
        """The blocks: kind, name, attributes."""
        found = []
        while self._next < len(self._tokens):
            _, kind = self._take("name")
            _, name = self._take("text")
            found.append((kind, name[1:-1], self._map()))
        return found

    def _map(self) -> dict[str, Any]:
        self._take("{")
        made: dict[str, Any] = {}
        while self._peek() != "}":
            kind, key = self._take("name", "text")
            self._take("=")
            made[key[1:-1] if kind == "text" else key] = self._value()
            if self._peek() == ",":
                self._take(",")
        self._take("}")
        return made

    def _value(self) -> Any:
        if self._peek() == "{":
            return self._map()
        if self._peek() != "[":
            kind, text = self._take("text", "name")
            return text[1:-1] if kind == "text" else text
        self._take("[")
        made = []
        while self._peek() != "]":
            made.append(self._value())
            if self._peek() == ",":
                self._take(",")
        self._take("]")
        return made


def _bad(path: Path, what: str) -> ForgeError:
    return ForgeError(
        f"{path.name}: {what}",
        expected="the tree of images, as docs/images.md describes it",
        mend=f"git diff images/{path.name}",
        exit_code=Exit.FAULT,
    )


if __name__ == "__main__":
    raise SystemExit(main())
