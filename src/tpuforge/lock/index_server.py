"""The child process behind :mod:`tpuforge.lock.view`: a view of one package index, on loopback.

It runs apart because it fetches with pip's own session, which knows the user's certificates,
proxy, netrc and keyring, and reads them from its environment. It ends when its standard input
does, so it never outlives the run that started it.

What it serves, under ``/<token>/<who>/<python>/``:

- ``simple/<name>/``: the index's page, without what no resolver for this target may take: source
  distributions, wheels for other platforms or Pythons, files uploaded after the cutoff. Each page
  is asked for once per run. ``_rank`` is the place of the wheel's best tag, 0 the best.
- ``files/<name>/<sha256>/<file>.metadata``: the wheel's metadata (PEP 658), whether or not the
  index serves it apart. What a digest names never changes, so it is kept from run to run.

``/<token>/<who>/listed/<name>`` is what the index itself lists of a package's wheels, and where
they are. ``/<token>/<who>/faults`` is what went wrong in answers to ``who``. A resolver may take a
page that failed for one that is empty, and come to another end: whoever asks must look there
afterwards.
"""

from __future__ import annotations

import hashlib
import http.server
import importlib
import itertools
import json
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import datetime
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urljoin

from tpuforge.paths import write_atomic
from tpuforge.target import tags

KIND = "application/vnd.pypi.simple.v1+json"
_WORKERS = 8
_CHUNK = 1 << 20
_FIRST_S = 5


class BadAnswerError(Exception):
    """An answer of the index that cannot be used.

    Attributes:
        kind: A key of :data:`tpuforge.lock.sources.WRONG`.
        what: One line for people; not yet redacted.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind
        self.what = what


def rank(file: str, places: Mapping[str, int]) -> int | None:
    """The place of a wheel's best tag; None for a file that the target cannot take.

    Args:
        file: A file name.
        places: Tag to its place, 0 the best.
    """
    parts = file.removesuffix(".whl").split("-")
    if not file.endswith(".whl") or len(parts) not in (5, 6):
        return None
    named = ("-".join(one) for one in itertools.product(*(part.split(".") for part in parts[-3:])))
    return min((places[tag] for tag in named if tag in places), default=None)


class Upstream:
    """The index itself, asked with pip's session.

    Args:
        config: ``cache`` (a folder), ``cutoff``, ``later`` (name to moment), ``platforms``,
            ``first`` (a package: whether the index answers is seen by its page, in seconds).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._command = importlib.import_module("pip._internal.commands").create_command("download")
        self._options, _ = self._command.parse_args([])
        self._cache = Path(config["cache"])
        self._cutoff = datetime.fromisoformat(config["cutoff"])
        self._later = {k: datetime.fromisoformat(v) for k, v in config["later"].items()}
        self._platforms = config["platforms"]
        self._first = config["first"]
        self._tags: dict[str, dict[str, int]] = {}
        self._pool = ThreadPoolExecutor(_WORKERS)
        self._own = threading.local()
        self._guard = threading.Lock()
        self._shown: dict[tuple[str, str], bytes] = {}
        self._pages: dict[str, Future[list[dict[str, Any]] | None]] = {}
        self._metadata: dict[str, Future[bytes]] = {}

    def page(self, name: str) -> Future[list[dict[str, Any]] | None]:
        """The wheels of a package, of all targets; None if the index has no such package."""
        with self._guard:
            if name not in self._pages:
                self._pages[name] = self._pool.submit(self._page, name)
            return self._pages[name]

    def shown(self, name: str, python: str) -> bytes:
        """The page of a package as a resolver for a Python sees it; empty if there is none."""
        entries = self.page(name).result()
        if entries is None:
            return b""
        with self._guard:
            if (name, python) not in self._shown:
                self._shown[name, python] = self._show(name, python, entries)
            return self._shown[name, python]

    def _show(self, name: str, python: str, entries: Sequence[Mapping[str, Any]]) -> bytes:
        if python not in self._tags:
            found = reversed(list(enumerate(tags(python, self._platforms))))
            # the best place of a tag that stands there twice
            self._tags[python] = {str(tag): place for place, tag in found}
        until = self._later.get(name, self._cutoff)
        files = []
        for entry in entries:
            place = rank(entry["filename"], self._tags[python])
            if place is None:
                continue
            digest = entry["hashes"].get("sha256")
            if not digest:
                release = entry["filename"].split("-")[1]
                raise BadAnswerError("no digests", f"no SHA-256 of {name} {release}")
            if not entry.get("upload-time"):
                raise BadAnswerError("no upload times", f"{entry['filename']} has none")
            if datetime.fromisoformat(entry["upload-time"]) >= until:
                continue
            shown = {key: value for key, value in entry.items() if key not in ("_url", "_apart")}
            shown |= {"hashes": {"sha256": digest}, "core-metadata": True, "_rank": place}
            shown["url"] = f"../../files/{name}/{digest}/{entry['filename']}"
            files.append(shown)
        page = {"meta": {"api-version": "1.1"}, "name": name, "versions": [], "files": files}
        return json.dumps(page).encode()

    def metadata(self, name: str, digest: str, file: str) -> bytes:
        """The METADATA of a wheel that the page of its package lists."""
        entries = self.page(name).result() or []
        entry = next(
            (e for e in entries if e["filename"] == file and e["hashes"].get("sha256") == digest),
            None,
        )
        if entry is None:
            raise BadAnswerError("missing", f"{file} is not listed")
        with self._guard:
            if digest not in self._metadata:
                self._metadata[digest] = self._pool.submit(self._read, name, digest, entry)
            future = self._metadata[digest]
        return future.result()

    def _session(self) -> Any:
        if not hasattr(self._own, "session"):
            self._own.session = self._command._build_session(self._options)
        return self._own.session

    def _impatient(self) -> Any:
        return self._command._build_session(self._options, retries=0, timeout=_FIRST_S)

    def _get(self, url: str, session: Any = None, **headers: str) -> Any:
        """An answer with status 200, 404 or 410."""
        kept = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            answer = (session or self._session()).get(url, headers=kept, stream=True)
            if answer.status_code not in (404, 410):
                answer.raise_for_status()
        except Exception as error:
            # pip's session raises its own errors, those of requests and those of urllib3
            raise _unreachable(error) from error
        return answer

    def _page(self, name: str) -> list[dict[str, Any]] | None:
        url = f"{self._options.index_url.rstrip('/')}/{name}/"
        # asked anew in every run: a kept answer counts only if the index says that it still holds
        session = self._impatient() if name == self._first else None
        answer = self._get(url, session, Accept=KIND, Cache_Control="max-age=0")
        if answer.status_code != 200:
            return None
        if KIND not in answer.headers.get("Content-Type", ""):
            raise BadAnswerError("no pages", f"{name}: {answer.headers.get('Content-Type')}")
        try:
            files = answer.json()["files"]
        except Exception as error:
            raise BadAnswerError(
                "unreachable", f"{name}: {type(error).__name__}: {error}"
            ) from error
        kept = ("filename", "hashes", "requires-python", "size", "upload-time", "yanked")
        try:
            return [
                {
                    **{key: entry[key] for key in kept if entry.get(key) is not None},
                    "_url": urljoin(answer.url, entry["url"]),
                    "_apart": entry.get("core-metadata", entry.get("dist-info-metadata")),
                }
                for entry in files
                if entry["filename"].endswith(".whl")
            ]
        except (AttributeError, KeyError, TypeError) as error:
            raise BadAnswerError("no pages", f"{name}: {type(error).__name__}: {error}") from error

    def _read(self, name: str, digest: str, entry: Mapping[str, Any]) -> bytes:
        apart = entry["_apart"]
        listed = apart.get("sha256") if isinstance(apart, dict) else None
        place = self._cache / "metadata" / digest[:2] / digest
        held = _kept(place)
        if held is not None and listed in (None, hashlib.sha256(held).hexdigest()):
            return held
        data = self._apart(entry, listed) if apart else self._inside(name, digest, entry)
        # a damaged entry is seen by its first line, and fetched anew
        write_atomic(place, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
        return data

    def _apart(self, entry: Mapping[str, Any], listed: str | None) -> bytes:
        answer = self._get(f"{entry['_url']}.metadata", Accept_Encoding="identity")
        if answer.status_code != 200:
            raise BadAnswerError("missing", f"404 Not Found: {entry['filename']}.metadata")
        data: bytes = answer.content
        if listed not in (None, hashlib.sha256(data).hexdigest()):
            raise BadAnswerError("other bytes", f"{entry['filename']}.metadata")
        return data

    def _inside(self, name: str, digest: str, entry: Mapping[str, Any]) -> bytes:
        """Read the metadata out of a wheel: by range requests, or out of the whole of it."""
        url = entry["_url"]
        try:
            lazy = importlib.import_module("pip._internal.network.lazy_wheel")
            wheel = lazy.dist_from_wheel_url(name, url, self._session())
            return str(wheel.read_text("METADATA")).encode()
        except Exception:
            # no ranges, not there, not reachable, not a wheel: the whole file tells which it is
            return self._whole(name, url, digest, entry["filename"])

    def _whole(self, name: str, url: str, digest: str, file: str) -> bytes:
        answer = self._get(url, Accept_Encoding="identity", Cache_Control="no-store")
        if answer.status_code != 200:
            raise BadAnswerError("missing", f"404 Not Found: {file}")
        found = hashlib.sha256()
        with tempfile.TemporaryDirectory(dir=self._cache) as folder:
            wheel = Path(folder) / file
            with wheel.open("wb") as sink:
                try:
                    for chunk in answer.iter_content(_CHUNK):
                        found.update(chunk)
                        sink.write(chunk)
                except Exception as error:
                    raise BadAnswerError(
                        "unreachable", f"{type(error).__name__}: {error}"
                    ) from error
            if found.hexdigest() != digest:
                raise BadAnswerError(
                    "other bytes", f"{file} has SHA-256 {found.hexdigest()}, not {digest}"
                )
            backend = importlib.import_module("pip._internal.metadata")
            held = backend.get_wheel_distribution(backend.FilesystemWheel(str(wheel)), name)
            return str(held.read_text("METADATA")).encode()


def _unreachable(error: Exception) -> BadAnswerError:
    return BadAnswerError("unreachable", f"{type(error).__name__}: {error}")


def _kept(place: Path) -> bytes | None:
    """What a cache entry holds, if it is what was written."""
    try:
        first, _, data = place.read_bytes().partition(b"\n")
    except OSError:
        return None
    return data if first.decode("ascii", "replace") == hashlib.sha256(data).hexdigest() else None


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, upstream: Upstream, token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.token = token
        self.faults: dict[str, dict[str, str]] = {}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # head and body in one packet: a client that waits for the second costs 40 ms an answer
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        parts = unquote(self.path).strip("/").split("/")
        try:
            match parts:
                case [token, *_] if token != self.server.token:
                    self._answer(404, b"", "text/plain")
                case [_, who, "faults"]:
                    found = self.server.faults.get(who, {})
                    self._answer(200, json.dumps(found).encode(), "application/json")
                case [_, who, "listed", name]:
                    entries = self.server.upstream.page(name).result() or []
                    self._answer(200, json.dumps(entries).encode(), "application/json")
                case [_, who, python, "simple", name]:
                    page = self.server.upstream.shown(name, python)
                    self._answer(200 if page else 404, page, KIND)
                case [_, who, _, "files", name, digest, file] if file.endswith(".metadata"):
                    file = file.removesuffix(".metadata")
                    data = self.server.upstream.metadata(name, digest, file)
                    self._answer(200, data, "application/octet-stream")
                case _:
                    self._answer(404, b"only pages and metadata are served here", "text/plain")
        except BadAnswerError as error:
            self.server.faults.setdefault(who, {})[error.what] = error.kind
            # not 5xx: nothing here gets better by asking again
            self._answer(400, error.what.encode(), "text/plain")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, code: int, data: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(config: Mapping[str, Any], orders: IO[str]) -> None:
    """Serve until the orders end; the first line of output is the port.

    Args:
        config: As for :class:`Upstream`, and ``expect``: packages that will be asked for.
        orders: Its first line is the token; it is held open as long as the server shall live.
    """
    token = orders.readline().strip()
    Path(config["cache"]).mkdir(parents=True, exist_ok=True)
    upstream = Upstream(config)
    server = _Server(upstream, token)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    if config["first"]:
        wait([upstream.page(config["first"])])
    # a resolver asks for one after the other; the answers can be there by then
    for name in config["expect"]:
        upstream.page(name)
    orders.read()


if __name__ == "__main__":
    import os

    serve(json.loads(sys.argv[1]), sys.stdin)
    # requests to the index may hang for seconds, and nobody waits for their answers
    os._exit(0)
