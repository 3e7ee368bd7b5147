"""One view of the package index for everything that a run resolves.

pip-compile and uv do not ask the index themselves: they ask a server on loopback
(:mod:`tpuforge.lock.index_server`) that shows what a target may take before the cutoff. So both see
the same, each page is fetched once per run, and the metadata of a file once ever. pip knows no
cutoff of a single package; the view does (``resolver.later`` in the pins).

The digests in a lock come from pages that were fetched, or confirmed by the index, in this run. Of
earlier runs only metadata is kept, under the digest of its wheel: it can make a resolution fail or
differ, but it holds no digest, and a file that is new to a lock is downloaded and compared.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import threading
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from tpuforge.errors import Exit, ForgeError
from tpuforge.lock.provenance import Listed
from tpuforge.lock.sources import WRONG, Source
from tpuforge.lockfile import Locked
from tpuforge.paths import ROOT, out_dir
from tpuforge.pins import Pins
from tpuforge.process import clean_env, redact, run
from tpuforge.target import platforms

_START_S = 60.0
_ALIVE_S = 24 * 3600.0
_ANSWER_S = 300.0
_MANY = ("Requires-Dist", "Provides-Extra", "Classifier")
_ONE = ("Name", "Version", "License", "License-Expression", "Requires-Python")


@dataclass(frozen=True)
class Chosen:
    """The one file of a release that a target takes.

    Attributes:
        name: Canonical name of the package.
        version: As in the lock.
        sha256: Its digest, as the index lists it.
        listed: What else the index lists about it.
        metadata: What it says about itself, in the JSON form of PEP 566.
    """

    name: str
    version: str
    sha256: str
    listed: Listed
    metadata: Mapping[str, Any]


class View:
    """The running view.

    Args:
        source: The index behind it.
        address: Where it answers, with its token.
    """

    def __init__(self, source: Source, address: str) -> None:
        self._source = source
        self._address = address
        # without the proxies of the environment: this is loopback
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def env(self, who: str, python: str) -> dict[str, str]:
        """The whole environment of a resolver: clean, with the view as its one index.

        Args:
            who: For whom it resolves; see :meth:`refuse`.
            python: ``X.Y`` of the target.
        """
        index = f"{self._address}/{who}/{python}/simple"
        extra = {"PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "300"}
        extra |= {"UV_NO_CACHE": "1", "UV_HTTP_RETRIES": "1", "UV_HTTP_TIMEOUT": "300"}
        extra |= {"PIP_INDEX_URL": index, "UV_DEFAULT_INDEX": index}
        clean = clean_env(**extra)
        return {name: value for name, value in clean.items() if "proxy" not in name.lower()}

    def choose(self, who: str, python: str, versions: Mapping[str, str]) -> list[Chosen]:
        """One file for each release: the best tag wins, then the highest build, as in pip.

        Args:
            who: For whom.
            python: ``X.Y`` of the target.
            versions: Versions by canonical name.

        Raises:
            ForgeError: If the index has no file that fits, or an answer cannot be used.
        """
        return [self._choose(who, python, name, versions[name]) for name in sorted(versions)]

    def _choose(self, who: str, python: str, name: str, version: str) -> Chosen:
        page = json.loads(self._get(who, f"{python}/simple/{name}/"))
        wanted = Version(version)
        fitting = [e for e in page["files"] if _version(e["filename"].split("-")[1]) == wanted]
        if not fitting:
            raise ForgeError(
                f"{self._source.name} has no wheel of {name} {version} for Python {python}",
                expected="the release that the resolver found",
                mend="run it again; the index changed in between",
            )
        best = min(fitting, key=_preference)
        if best.get("yanked"):
            raise ForgeError(
                f"{name} {version} was yanked: those who made it say not to use it",
                expected="a release that is not yanked",
                mend="see what demands it, and give that, or it, another range in lock/*.in",
                exit_code=Exit.FAULT,
            )
        digest = best["hashes"]["sha256"]
        text = self._get(
            who, f"{python}/files/{name}/{digest}/{best['filename']}.metadata"
        ).decode()
        metadata = _metadata(text)
        said = metadata.get("name", ""), metadata.get("version", "")
        if (canonicalize_name(said[0]), _version(said[1])) != (name, wanted):
            raise ForgeError(
                f"the metadata of {best['filename']} is of {' '.join(said)}",
                expected=f"{name} {version}",
                mend="rm -r out/lock/cache; if it stays so, the index is wrong",
                exit_code=Exit.FAULT,
            )
        return Chosen(name, version, digest, _listed(best), metadata)

    def listed(self, packages: Sequence[Locked]) -> dict[str, Listed]:
        """What the index itself lists about locked files, whatever the target may take.

        Args:
            packages: Which files.

        Returns:
            What is listed, by SHA-256; a file without an entry if the index does not list it.

        Raises:
            UnreachableError: If the index does not answer.
            ForgeError: If an answer cannot be used.
        """
        found = {}
        for package in packages:
            for entry in json.loads(self._get("listed", f"listed/{package.name}")):
                if entry["hashes"].get("sha256") == package.sha256:
                    found[package.sha256] = _listed(entry)
        return found

    def probe(self, python: str, name: str) -> None:
        """See whether the index answers, before the resolvers wait for it.

        Args:
            python: ``X.Y`` of a target.
            name: The package that the view asks for first, with a time limit of seconds.

        Raises:
            UnreachableError: If it does not answer.
            ForgeError: If it does not say when its files were uploaded, or has no such pages.
        """
        # a package that is not there is for the resolver to explain
        with contextlib.suppress(OSError):
            self._open(f"probe/{python}/simple/{name}/")
        try:
            self.refuse("probe")
        except ForgeError as error:
            # a fault of the lock that asks for this package: found again, and named, with it
            if error.exit_code != Exit.FAULT:
                raise

    def _get(self, who: str, path: str) -> bytes:
        try:
            return self._open(f"{who}/{path}")
        except OSError as error:
            self.refuse(who)
            raise self._silent(error) from error

    def _open(self, path: str) -> bytes:
        with self._opener.open(f"{self._address}/{path}", timeout=_ANSWER_S) as answer:
            data: bytes = answer.read()
            return data

    def _silent(self, error: OSError) -> ForgeError:
        return ForgeError(
            f"the view of {self._source.name} does not answer: {error}",
            expected="an answer within seconds",
            mend="run it again",
        )

    def refuse(self, who: str) -> None:
        """Raise if the index gave an answer that cannot be used.

        Args:
            who: In answers to whom.

        Raises:
            UnreachableError: If it did not answer.
            ForgeError: If what it answered is wrong.
        """
        try:
            faults: dict[str, str] = json.loads(self._open(f"{who}/faults"))
        except OSError as error:
            raise self._silent(error) from error
        for kind in WRONG:
            lines = [redact(what)[:300] for what, of in sorted(faults.items()) if of == kind]
            if lines:
                # an index that is not there says the same of every page
                shown = lines[:1] if kind == "unreachable" else lines[:15]
                raise self._source.wrong(kind, "\n".join(shown))


@contextmanager
def open_view(
    pins: Pins, source: Source, python: Path, expect: Iterable[str], first: str
) -> Iterator[View]:
    """Run a view of what the pins allow, for the length of a block.

    Args:
        pins: The pins: the moments from which on uploads do not exist, and the target.
        source: The index.
        python: A Python with pip.
        expect: Packages that will be asked for: their pages are fetched ahead.
        first: The one that is asked for before them, without patience; see :meth:`View.probe`.

    Yields:
        The view.

    Raises:
        ForgeError: If it does not start.
    """
    if source.forbidden:
        raise source.no_index()
    cache = out_dir() / "lock" / "cache"
    config = {
        "cache": str(cache),
        "cutoff": pins.cutoff.isoformat(),
        "later": {name: moment.isoformat() for name, moment in pins.later.items()},
        "platforms": platforms(pins.glibc),
        "expect": sorted(set(expect)),
        "first": first,
    }
    env = source.env() | {"PYTHONPATH": str(ROOT / "src"), "PIP_CACHE_DIR": str(cache / "pip")}
    # pages are kept between runs where the index says how to ask whether they still hold
    del env["PIP_NO_CACHE_DIR"]
    words: list[str | Path] = [python, "-m", "tpuforge.lock.index_server", json.dumps(config)]
    token = secrets.token_urlsafe(16)
    said: list[str] = []
    ready = threading.Event()
    reader, writer = os.pipe()

    def hear(line: str) -> None:
        said.append(line)
        ready.set()

    def live() -> None:
        try:
            run(words, timeout=_ALIVE_S, env=env, stdin=reader, check=False, on_line=hear)
        finally:
            ready.set()

    child = threading.Thread(target=live, daemon=True)
    try:
        os.write(writer, f"{token}\n".encode())
        child.start()
        ready.wait(_START_S)
        if not said or not said[0].isdigit():
            raise ForgeError(
                f"the view of {source.name} did not start:\n{chr(10).join(said[-15:])}".rstrip(),
                expected="a server on loopback",
                mend="as the lines above say; then run it again",
            )
        yield View(source, f"http://127.0.0.1:{said[0]}/{token}")
    finally:
        # the child ends with its standard input
        os.close(writer)
        child.join()
        os.close(reader)


@functools.lru_cache(maxsize=100_000)
def _version(text: str) -> Version | None:
    try:
        return Version(text.replace("_", "+"))
    except InvalidVersion:
        return None


def _listed(entry: Mapping[str, Any]) -> Listed:
    uploaded = entry.get("upload-time")
    moment = str(uploaded)[:19] + "Z" if uploaded else None
    return Listed(entry.get("size"), moment, entry["filename"], entry.get("_url", ""))


def _preference(entry: Mapping[str, Any]) -> tuple[bool, int, int, str]:
    """The sorting key of pip's finder, least first: not yanked, best tag, highest build."""
    _, _, build, _ = parse_wheel_filename(entry["filename"])
    return bool(entry.get("yanked")), int(entry["_rank"]), -build[0] if build else 0, entry["url"]


def _metadata(text: str) -> dict[str, Any]:
    message = HeaderParser().parsestr(text)
    found: dict[str, Any] = {}
    for field in _ONE:
        value = message.get(field)
        if value is not None:
            found[field.lower().replace("-", "_")] = str(value)
    for field in _MANY:
        values = message.get_all(field)
        if values:
            found[field.lower().replace("-", "_")] = [str(value) for value in values]
    return found
