"""Where a wheel may come from: pip's own settings, directories, and package indexes.

A source says *where* to look and never *what* to take: every offer is judged by the digest in the
lock. That is why the user's extra indexes are welcome here, although a resolver must not see them.
The formats are the simple repository API (HTML and JSON) and pip's find-links.
"""

from __future__ import annotations

import json
import os
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from tpuforge import pip_settings
from tpuforge.download import Access, Page, Web
from tpuforge.errors import ForgeError
from tpuforge.paths import user_path
from tpuforge.process import redact

Kind = Literal["directory", "index", "torch index"]

_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"


@dataclass(frozen=True)
class Offer:
    """A wheel that a source claims to have.

    Attributes:
        file: Its file name.
        place: A path on this machine, or an address.
        sha256: The digest that the source claims, if it claims one.
    """

    file: str
    place: Path | str
    sha256: str | None


@dataclass(frozen=True)
class Source:
    """One place to look.

    Attributes:
        kind: ``directory`` for what is on this machine, ``index`` and ``torch index`` for the web.
        form: ``directory`` holds wheels, ``index`` a page per project, ``page`` links to wheels.
        place: A path, or an address.
    """

    kind: Kind
    form: Literal["directory", "index", "page"]
    place: Path | str

    @property
    def label(self) -> str:
        """The place for people."""
        return shown(self.place)


@dataclass(frozen=True)
class Sources:
    """All places, in the order they are asked.

    Attributes:
        general: For every package.
        torch: For packages with a local version label such as ``+cpu``: no general index, since
            the builds on the main index under that number carry CUDA.
        access: How the web is reached.
    """

    general: tuple[Source, ...]
    torch: tuple[Source, ...]
    access: Access

    def for_version(self, version: str) -> tuple[Source, ...]:
        """The places for a package of a certain version.

        Args:
            version: As it stands in the lock.
        """
        return self.torch if Version(version).local else self.general


def shown(place: Path | str) -> str:
    """A place for people: no credentials, and no query, which may be a signed permission.

    Args:
        place: A path, or an address.
    """
    if isinstance(place, Path):
        return str(place)
    return redact(urllib.parse.urlunsplit(urllib.parse.urlsplit(place)._replace(query="")))


def configured(extra: Sequence[str], torch_index: str, *, offline: bool) -> Sources:
    """The places that the user configured for pip, and those named on the command line.

    Args:
        extra: Directories or addresses of indexes, asked before all others.
        torch_index: The index that carries the CPU builds of PyTorch.
        offline: Leave out everything that is not on this machine.

    Returns:
        The places: those named here first, then directories, then indexes.

    Raises:
        ForgeError: If a named directory is not there, or pip cannot read its own settings.
    """
    named = [_named(text) for text in extra]
    pip = pip_settings.read()
    links = [_link(text) for text in pip.find_links]
    indexes: list[Source] = []
    torch: list[Source] = []
    if not pip.no_index:
        indexes = [_index(text) for text in (pip.index_url, *pip.extra_index_urls)]
        torch = [Source("torch index", "index", torch_index)]
    local = [source for source in (*links, *indexes) if source.kind == "directory"]
    remote = [source for source in (*links, *indexes) if source.kind != "directory"]
    if offline:
        named = [source for source in named if source.kind == "directory"]
        remote, torch = [], []
    return Sources(
        general=tuple(dict.fromkeys((*named, *local, *remote))),
        torch=tuple(dict.fromkeys((*named, *local, *torch))),
        access=Access(
            certificates=pip.cert
            or os.environ.get("REQUESTS_CA_BUNDLE")
            or os.environ.get("CURL_CA_BUNDLE"),
            client_certificate=pip.client_cert,
            proxy=pip.proxy,
            unverified_hosts=frozenset(pip.trusted_hosts),
        ),
    )


def offers(source: Source, name: str, version: str, web: Web) -> list[Offer]:
    """What a source has of one release of a project.

    Args:
        source: The place.
        name: Canonical project name.
        version: The release.
        web: Reads pages.

    Returns:
        The wheels of that release, whatever Python they are for; empty if there are none.

    Raises:
        UnreachableError: If a server does not answer.
        RefusedError: If it answers with an error.
        OSError: If a directory cannot be read.
    """
    if source.form == "directory":
        found = [
            Offer(path.name, path, None)
            for path in sorted(_wheels_in(Path(source.place)))
            if path.is_file()
        ]
    elif isinstance(source.place, Path):
        page = source.place / name / "index.html" if source.form == "index" else source.place
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        found = _links(Page(page.as_uri(), "text/html", text))
    else:
        address = source.place
        if source.form == "index":
            address = f"{source.place.rstrip('/')}/{name}/"
        page_read = web.page(address, _ACCEPT)
        found = _json(page_read) if page_read.kind.endswith("json") else _links(page_read)
    return [offer for offer in found if is_release(offer.file, name, version)]


def _wheels_in(folder: Path) -> list[Path]:
    """The wheels in a directory, or in one that is itself a wheelhouse."""
    return [*folder.glob("*.whl"), *folder.glob(f"{'[0-9a-f]' * 64}/*.whl")]


def is_release(file: str, name: str, version: str) -> bool:
    """Whether a file name is that of a wheel of one release of a project.

    Args:
        file: A file name.
        name: Canonical project name.
        version: The release.
    """
    if "/" in file or "\0" in file:
        return False
    try:
        found, release, _, _ = parse_wheel_filename(file)
        return found == canonicalize_name(name) and release == Version(version)
    except (InvalidWheelFilename, InvalidVersion):
        return False


def _named(text: str) -> Source:
    """A place from the command line: a directory, or the address of an index."""
    if text.startswith(("http://", "https://")):
        return Source("index", "index", text)
    path = _local(text)
    if not path.is_dir():
        raise ForgeError(
            f"--source {redact(text)}: there is no such directory",
            expected="a directory with wheels, or the http(s) address of a package index",
            mend="check the path",
        )
    return Source("directory", "directory", path)


def _link(text: str) -> Source:
    """One of pip's find-links: a directory, a page on disk, or an address."""
    if text.startswith(("http://", "https://")):
        return Source("index", "page", text)
    path = _local(text)
    form: Literal["directory", "page"] = (
        "page" if path.suffix in (".html", ".htm") and path.is_file() else "directory"
    )
    return Source("directory", form, path)


def _index(text: str) -> Source:
    """One of pip's indexes: an address, or a tree of pages on disk."""
    if text.startswith(("http://", "https://")):
        return Source("index", "index", text)
    return Source("directory", "index", _local(text))


def _local(text: str) -> Path:
    if text.startswith("file:"):
        text = urllib.request.url2pathname(urllib.parse.urlsplit(text).path)
    return user_path(text)


class _Anchors(HTMLParser):
    """Collects where a page's anchors lead."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for key, value in attrs if key == "href" and value]


def _links(page: Page) -> list[Offer]:
    """The wheels that an HTML page links to; a fragment ``#sha256=…`` is a claimed digest."""
    anchors = _Anchors()
    anchors.feed(page.text)
    found = []
    for href in anchors.found:
        parts = urllib.parse.urlsplit(urllib.parse.urljoin(page.url, href))
        file = urllib.parse.unquote(parts.path.rpartition("/")[2])
        if not file.endswith(".whl"):
            continue
        algorithm, _, value = parts.fragment.partition("=")
        place: Path | str = urllib.parse.urlunsplit(parts._replace(fragment=""))
        if parts.scheme == "file":
            if not page.url.startswith("file:"):
                continue  # a page from the web has no say over this machine's files
            place = Path(urllib.request.url2pathname(parts.path))
        found.append(Offer(file, place, value.lower() if algorithm == "sha256" else None))
    return found


def _json(page: Page) -> list[Offer]:
    """The wheels in the JSON form of the simple repository API."""
    try:
        files = json.loads(page.text)["files"]
        return [
            Offer(
                file["filename"],
                urllib.parse.urljoin(page.url, file["url"]),
                file.get("hashes", {}).get("sha256"),
            )
            for file in files
            if file["filename"].endswith(".whl")
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
