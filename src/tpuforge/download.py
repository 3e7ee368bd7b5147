"""Reads over HTTP that end: bounded, resumable, and checked by digest while they stream.

Only the standard library is used. How a machine reaches the web (certificates, proxy, credentials)
comes in as :class:`Access`; what is taken is decided by a digest alone, so nothing here has to
trust a server.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import netrc
import os
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CHUNK = 1 << 18
_LARGEST_PAGE = 64 << 20
_AGENT = "tpuforge"
_BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def certificates() -> str | None:
    """The bundle of certificate authorities that the environment names; None for the system's."""
    return next((os.environ[name] for name in _BUNDLES if os.environ.get(name)), None)


class UnreachableError(Exception):
    """A server could not be reached, or broke off every time; says why."""


class RefusedError(Exception):
    """A server answered that it will not give this file; says how."""


class WrongBytesError(Exception):
    """A whole file came, and its digest is not the expected one; says which it is."""


@dataclass(frozen=True)
class Access:
    """How this machine reaches the web.

    Attributes:
        certificates: A bundle of certificate authorities; the system's if None.
        client_certificate: A client certificate with its key, in PEM.
        proxy: The proxy for everything; what the environment says if None.
        unverified_hosts: ``host`` or ``host:port`` whose certificates are not checked.
    """

    certificates: str | None = None
    client_certificate: str | None = None
    proxy: str | None = None
    unverified_hosts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Patience:
    """When to give up.

    Attributes:
        connect_s: Seconds for a connection, its TLS handshake included.
        read_s: Seconds without a single byte.
        page_tries: Attempts for a page.
        fruitless_tries: Attempts in a row that bring next to nothing of a file.
        all_tries: Attempts for a file, however much each of them brings.
        pause_s: Seconds before the second attempt; doubled before each one after it.
        slow_s: Seconds after which an attempt is held to :attr:`slow_rate`.
        slow_rate: Bytes per second below which an attempt is given up.
    """

    connect_s: float = 5.0
    read_s: float = 30.0
    page_tries: int = 2
    fruitless_tries: int = 3
    all_tries: int = 40
    pause_s: float = 0.5
    slow_s: float = 30.0
    slow_rate: float = 1024.0


@dataclass(frozen=True)
class Page:
    """An answered page.

    Attributes:
        url: Where it was in the end, after redirects: the base of its links.
        kind: Its media type, without parameters.
        text: Its text.
    """

    url: str
    kind: str
    text: str


@dataclass
class _Partial:
    """A file that is being filled, with the digest of what it holds."""

    path: Path
    have: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def load(self) -> None:
        """Take up what an earlier run left."""
        self.have, self.digest = 0, hashlib.sha256()
        with contextlib.suppress(FileNotFoundError), self.path.open("rb", buffering=0) as file:
            while chunk := file.read(1 << 20):
                self.digest.update(chunk)
                self.have += len(chunk)

    def clear(self) -> None:
        """Start over."""
        self.path.write_bytes(b"")
        self.have, self.digest = 0, hashlib.sha256()


class Web:
    """The web, as one run sees it: a server found dead stays dead until the end of the run.

    Args:
        access: How this machine reaches it.
        patience: When to give up.
    """

    def __init__(self, access: Access, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self._dead: dict[str, str] = {}
        self._credentials: dict[str, str] = {}
        proxy = {"http": access.proxy, "https": access.proxy} if access.proxy else None
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler(proxy),
            _Http(self.patience.read_s),
            _Https(access, self.patience.read_s),
        )

    def page(self, url: str, accept: str) -> Page:
        """Read a whole page.

        Args:
            url: Its address, http or https.
            accept: Media types, as in an ``Accept`` header.

        Returns:
            The page.

        Raises:
            UnreachableError: If the server does not answer.
            RefusedError: If it answers with an error.
        """
        tries = 0
        while True:
            tries += 1
            try:
                with self._open(url, {"Accept": accept}) as answer:
                    data = answer.read(_LARGEST_PAGE + 1)
                    kind = str(answer.headers.get_content_type())
                    final = str(answer.geturl())
                break
            except _AgainError as error:
                problem, answered = str(error), error.answered
            except (OSError, http.client.HTTPException) as error:
                problem, answered = _reason(error), True
            if tries >= self.patience.page_tries:
                if not answered:
                    self._give_up_on(url, problem)
                raise UnreachableError(problem)
            time.sleep(self.patience.pause_s)
        if len(data) > _LARGEST_PAGE:
            raise RefusedError(f"a page of more than {_LARGEST_PAGE} bytes")
        return Page(final, kind, data.decode("utf-8", "replace"))

    def download(
        self,
        url: str,
        partial: Path,
        sha256: str,
        *,
        on_bytes: Callable[[int], None],
        stop: threading.Event,
    ) -> int:
        """Read a file to its end, going on where an earlier run stopped.

        Args:
            url: Its address, http or https.
            partial: The file that is filled; what it holds already counts if the digest agrees.
            sha256: The digest that the whole file must have, 64 hex digits.
            on_bytes: Called with the number of bytes after each chunk, and with a negative number
                when bytes turn out to be worthless.
            stop: Set by somebody else to end this early.

        Returns:
            The number of bytes that came over the network.

        Raises:
            UnreachableError: If the server does not answer, or keeps breaking off.
            RefusedError: If it answers with an error.
            WrongBytesError: If the file is not the expected one; ``partial`` is then gone.
            InterruptedError: If ``stop`` was set.
            OSError: If ``partial`` cannot be written, a full disk included.
        """
        state = _Partial(partial)
        state.load()
        on_bytes(state.have)
        came, tries, fruitless, resumed = 0, 0, 0, state.have > 0
        while True:
            tries += 1
            before = came
            problem, answered = "", True
            try:
                came += self._attempt(url, state, on_bytes, stop)
            except _BrokenOffError as error:
                came += error.came
                problem, answered = str(error), error.answered
            if not problem:
                if state.digest.hexdigest() == sha256:
                    return came
                found = state.digest.hexdigest()
                on_bytes(-state.have)
                if not resumed:
                    partial.unlink()
                    raise WrongBytesError(found)
                # the earlier part may have been of another file: once more, from nothing
                state.clear()
                resumed = False
                continue
            fruitless = fruitless + 1 if came - before < _CHUNK else 0
            if fruitless >= self.patience.fruitless_tries or tries >= self.patience.all_tries:
                if not answered:
                    self._give_up_on(url, problem)
                raise UnreachableError(f"{problem} ({tries} attempts)")
            pause = self.patience.pause_s * 2 ** max(0, fruitless - 1)
            if stop.wait(pause):
                raise InterruptedError("stopped")

    def _attempt(
        self,
        url: str,
        state: _Partial,
        on_bytes: Callable[[int], None],
        stop: threading.Event,
    ) -> int:
        """One request for the rest of a file; how many bytes it brought.

        Raises:
            _BrokenOffError: If the file is not whole afterwards.
        """
        came = 0
        started = time.monotonic()
        headers = {"Accept-Encoding": "identity"}
        if state.have:
            headers["Range"] = f"bytes={state.have}-"
        try:
            answer = self._open(url, headers)
        except _AgainError as error:
            raise _BrokenOffError(str(error), came, answered=error.answered) from error
        except _NoSuchRangeError:
            # nothing is left to read: whole, and the digest will tell, or of another file
            return came
        with answer:
            total = _total(answer)
            if answer.status != http.HTTPStatus.PARTIAL_CONTENT or _start(answer) != state.have:
                if answer.status == http.HTTPStatus.PARTIAL_CONTENT and _start(answer) != 0:
                    raise RefusedError(f"a range that was not asked for: {_start(answer)}")
                on_bytes(-state.have)
                state.clear()
            with state.path.open("ab", buffering=0) as file:
                while True:
                    if stop.is_set():
                        raise InterruptedError("stopped")
                    try:
                        chunk = answer.read1(_CHUNK)
                    except (OSError, http.client.HTTPException) as error:
                        raise _BrokenOffError(_reason(error), came) from error
                    if not chunk:
                        break
                    _write_all(file.fileno(), chunk)
                    state.digest.update(chunk)
                    state.have += len(chunk)
                    came += len(chunk)
                    on_bytes(len(chunk))
                    spent = time.monotonic() - started
                    if spent > self.patience.slow_s and came / spent < self.patience.slow_rate:
                        raise _BrokenOffError(f"{came} bytes in {spent:.0f} s", came)
                os.fsync(file.fileno())
        if total is not None and state.have < total:
            raise _BrokenOffError(f"broke off after {state.have} of {total} bytes", came)
        return came

    def _open(self, url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RefusedError(f"not a web address ({parts.scheme or 'no scheme'})")
        where = parts.netloc.rpartition("@")[2]
        if where in self._dead:
            raise UnreachableError(self._dead[where])
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked above
            urllib.parse.urlunsplit(parts._replace(netloc=where, fragment="")),
            headers={"User-Agent": _AGENT, **headers},
        )
        if authorization := self._authorization(parts, where):
            # not handed on to wherever the server redirects
            request.add_unredirected_header("Authorization", authorization)
        try:
            answer: http.client.HTTPResponse = self._opener.open(
                request, timeout=self.patience.connect_s
            )
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise _NoSuchRangeError from error
            said = f"HTTP {error.code} {error.reason}".rstrip()
            if error.code >= 500 or error.code in (408, 425, 429):
                raise _AgainError(said, answered=True) from error
            raise RefusedError(said) from error
        except (OSError, http.client.HTTPException) as error:
            reason = _reason(error)
            if _hopeless(error):
                self._dead[where] = reason
                raise UnreachableError(reason) from error
            raise _AgainError(reason, answered=False) from error
        return answer

    def _give_up_on(self, url: str, reason: str) -> None:
        """Ask a server for nothing more in this run."""
        self._dead[urllib.parse.urlsplit(url).netloc.rpartition("@")[2]] = reason

    def _authorization(self, parts: urllib.parse.SplitResult, where: str) -> str | None:
        """The Basic credentials for a server: from its address, or from ``~/.netrc``."""
        if parts.username is not None:
            pair = (parts.username, parts.password or "")
            self._credentials[where] = ":".join(urllib.parse.unquote(part) for part in pair)
        elif where not in self._credentials:
            self._credentials[where] = _netrc(parts.hostname or "")
        pair_text = self._credentials[where]
        if not pair_text:
            return None
        return "Basic " + base64.b64encode(pair_text.encode()).decode("ascii")


class _AgainError(Exception):
    """A failure that may pass; ``answered`` tells whether the server said anything at all."""

    def __init__(self, why: str, *, answered: bool) -> None:
        super().__init__(why)
        self.answered = answered


class _NoSuchRangeError(Exception):
    """The server has nothing at or after the asked position."""


class _BrokenOffError(Exception):
    """A file that did not come to its end; ``came`` counts the bytes of this attempt."""

    def __init__(self, why: str, came: int, *, answered: bool = True) -> None:
        super().__init__(why)
        self.came = came
        self.answered = answered


class _Http(urllib.request.HTTPHandler):
    def __init__(self, read_s: float) -> None:
        super().__init__()
        self._read_s = read_s

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        read_s = self._read_s

        class Connection(http.client.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                self.sock.settimeout(read_s)

        return self.do_open(Connection, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, access: Access, read_s: float) -> None:
        self._checked = ssl.create_default_context(cafile=access.certificates)
        self._unchecked = ssl.create_default_context()
        self._unchecked.check_hostname = False
        self._unchecked.verify_mode = ssl.CERT_NONE
        if access.client_certificate:
            for context in (self._checked, self._unchecked):
                context.load_cert_chain(access.client_certificate)
        self._unverified = access.unverified_hosts
        self._read_s = read_s
        super().__init__(context=self._checked)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        read_s = self._read_s

        class Connection(http.client.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                self.sock.settimeout(read_s)

        parts = urllib.parse.urlsplit(req.full_url)
        trusted = {parts.netloc, parts.hostname} & self._unverified
        return self.do_open(Connection, req, context=self._unchecked if trusted else self._checked)


def _netrc(host: str) -> str:
    """``user:password`` for a host from ``~/.netrc``; empty where there is none."""
    try:
        entry = netrc.netrc().authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return ""
    return f"{entry[0]}:{entry[2]}" if entry else ""


def _reason(error: BaseException) -> str:
    """Why a connection failed, without the class names around it."""
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inner, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {inner.verify_message}"
    if isinstance(inner, TimeoutError):
        return "no answer in time"
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return str(inner) or type(inner).__name__


def _hopeless(error: BaseException) -> bool:
    """Whether another attempt in this run cannot help."""
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(inner, ssl.SSLCertVerificationError)


def _start(answer: http.client.HTTPResponse) -> int | None:
    """The first byte of a partial answer, from ``Content-Range: bytes FIRST-LAST/TOTAL``."""
    unit, _, rest = (answer.headers.get("Content-Range") or "").partition(" ")
    first = rest.partition("-")[0]
    return int(first) if unit == "bytes" and first.isdigit() else None


def _total(answer: http.client.HTTPResponse) -> int | None:
    """The size of the whole file, where the server says it."""
    if answer.status == http.HTTPStatus.PARTIAL_CONTENT:
        total = (answer.headers.get("Content-Range") or "").rpartition("/")[2]
    else:
        total = answer.headers.get("Content-Length") or ""
    return int(total) if total.isdigit() else None


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
