"""The small requests to a registry: manifests, whether a blob is there, and single blobs.

What takes long, the copying of whole images, is skopeo's (:mod:`tpuforge.registry`). This
speaks the OCI distribution API for what no version of skopeo does byte for byte: it puts a manifest
under a tag exactly as it is, and takes one blob by its digest. Where there is no skopeo, it sends
and takes all blobs, one after the other. Only the standard library is used.

Errors come in two kinds: :class:`TransientError` is worth another try, a ``ForgeError`` is not.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import os
import re
import socket
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import home, parse_json, scratch_dir, sha256_file
from tpuforge.process import clean_env, redact, run

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
_ACCEPTED = (
    MANIFEST,
    INDEX,
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_CONNECT_S = 10.0
_READ_S = 60.0
# a whole request may last this long, and longer by what a slow line takes, in bytes per second
_ASK_S = 120.0
_SLOWEST = 100_000
_HELPER_S = 60.0
_CHUNK = 1 << 18
# the specification lets a registry refuse larger ones
_LARGEST_MANIFEST = 4 << 20
_LARGEST_ANSWER = 1 << 20
_FULL = (413, 507)
# what may stand in a header (RFC 6750)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
_SECONDS = re.compile(r"[0-9]{1,9}")
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


class TransientError(Exception):
    """What may be gone at the next try: a dropped connection, an answer of 500; says what."""


class NotThereError(ForgeError):
    """The registry has no such manifest or blob."""


@dataclass(frozen=True)
class Access:
    """How a registry is reached.

    Attributes:
        authfile: A file of credentials in the form of Docker and containers; where those look if
            None.
        ca: Certificate authorities in PEM, beside those of the machine.
        plain_http: Speak HTTP without TLS. On the loopback it is found out.
    """

    authfile: Path | None = None
    ca: Path | None = None
    plain_http: bool = False


@dataclass(frozen=True)
class Credentials:
    """Who one is at a registry. Never printed.

    Attributes:
        user: Name; may be empty with a token.
        password: Password.
        identity: A token that stands for both.
        file: The file that holds them, if they stand in one as they are.
    """

    user: str
    password: str
    identity: str = ""
    file: Path | None = None

    def __repr__(self) -> str:
        return "Credentials(…)"

    @property
    def basic(self) -> str:
        """As the header of a request wants them."""
        return base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def auth_files(access: Access) -> list[Path]:
    """The files that may hold credentials, the first that has some for a registry counts.

    Args:
        access: How a registry is reached.
    """
    if access.authfile is not None:
        return [access.authfile]
    found = []
    if os.environ.get("REGISTRY_AUTH_FILE"):
        found.append(Path(os.environ["REGISTRY_AUTH_FILE"]))
    if os.environ.get("XDG_RUNTIME_DIR"):
        found.append(Path(os.environ["XDG_RUNTIME_DIR"], "containers", "auth.json"))
    own = home()
    settings = os.environ.get("XDG_CONFIG_HOME") or (own / ".config" if own else None)
    if settings is not None:
        found.append(Path(settings, "containers", "auth.json"))
    if os.environ.get("DOCKER_CONFIG"):
        found.append(Path(os.environ["DOCKER_CONFIG"], "config.json"))
    elif own is not None:
        found.append(own / ".docker" / "config.json")
    return found


def credentials(host: str, name: str, access: Access) -> Credentials | None:
    """The user's credentials for a repository.

    Args:
        host: The registry, with its port if it has one.
        name: The repository in it.
        access: How it is reached.

    Returns:
        None if there are none: one is nobody there.

    Raises:
        ForgeError: If a file that was named cannot be read, or a helper fails.
    """
    wanted = [f"{host}/{name}".rsplit("/", cut)[0] for cut in range(name.count("/") + 2)]
    wanted += ["index.docker.io"] if host == "docker.io" else []
    for path in auth_files(access):
        try:
            # written by hand or by another program: any JSON may stand there
            content = json.loads(path.read_bytes())
            entries, helpers = content.get("auths") or {}, content.get("credHelpers") or {}
            store = content.get("credsStore") or ""
            auths = {_plain(key): value for key, value in entries.items()}
        except FileNotFoundError as error:
            if path == access.authfile:
                raise _bad_authfile(path, "is not there") from error
            continue
        except (OSError, ValueError, AttributeError) as error:
            # its content must not be shown
            raise _bad_authfile(path, f"cannot be read ({type(error).__name__})") from error
        for key in wanted:
            if key in helpers:
                return _from_helper(str(helpers[key]), key)
            entry = auths.get(key)
            if isinstance(entry, dict) and (entry.get("auth") or entry.get("identitytoken")):
                return _from_entry(entry, path)
        if store and any(key in auths for key in wanted):
            server = "https://index.docker.io/v1/" if host == "docker.io" else host
            return _from_helper(str(store), server)
    return None


def _plain(key: str) -> str:
    """A key of a file of credentials, without the scheme and path of older clients."""
    bare = key.partition("://")[2] or key
    return re.sub(r"/v[12]/?$", "", bare).rstrip("/")


def _from_entry(entry: dict[str, Any], path: Path) -> Credentials:
    identity = str(entry.get("identitytoken") or "")
    try:
        word = base64.b64decode(entry.get("auth") or "", validate=True).decode()
    except ValueError as error:
        raise _bad_authfile(path, "has an entry that is not base64") from error
    user, _, password = word.partition(":")
    return Credentials(user, password.rstrip("\0"), identity, path)


def _from_helper(helper: str, server: str) -> Credentials | None:
    """Ask one of Docker's credential helpers; its answer goes by no log."""
    program = f"docker-credential-{helper}"
    with scratch_dir() as folder:
        answer = folder / "answer"
        reading, writing = os.pipe()
        with os.fdopen(reading) as stdin:
            with os.fdopen(writing, "w") as asked:
                asked.write(server)
            line = ["sh", "-c", 'exec "$0" get >"$1"', program, str(answer)]
            # helpers find their own store by the session's variables
            env = clean_env(**{k: v for k, v in os.environ.items() if k.startswith("XDG_")})
            done = run(line, timeout=_HELPER_S, env=env, stdin=stdin.fileno(), check=False)
        said = answer.read_text(encoding="utf-8") if answer.exists() else ""
    if done.code != 0 and "not found in native keychain" in said:
        return None
    try:
        found = json.loads(said)
        user, secret = str(found["Username"]), str(found["Secret"])
    except (ValueError, KeyError, TypeError) as error:
        raise ForgeError(
            f"{program}, which keeps your credentials for {server}, gave none",
            expected="credentials, or the word that there are none",
            mend=f"docker login {server}",
        ) from error
    return Credentials("", "", secret) if user == "<token>" else Credentials(user, secret)


def _bad_authfile(path: Path, what: str) -> ForgeError:
    return ForgeError(
        f"the file of credentials {path} {what}",
        expected="JSON as docker login and skopeo login write it",
        mend="log in again, or name another file with --authfile",
    )


def is_loopback(host: str) -> bool:
    """Whether a registry is on this very machine.

    Args:
        host: The registry, with its port if it has one.
    """
    name = urllib.parse.urlsplit(f"//{host}").hostname or ""
    return name in {"localhost", "::1"} or re.fullmatch(r"127(\.\d+){3}", name) is not None


def speaks_tls(host: str) -> bool:
    """Whether TLS is spoken at an address, with whatever certificate.

    Args:
        host: The registry, with its port if it has one.
    """
    at = urllib.parse.urlsplit(f"//{host}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # nothing is sent here: this only asks which of the two it is
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((at.hostname or "", at.port or 443), _CONNECT_S) as plain,
            context.wrap_socket(
                plain, server_hostname=at.hostname, do_handshake_on_connect=False
            ) as tls,
            _Watch(_CONNECT_S) as watch,
        ):
            watch.note(tls)
            tls.do_handshake()
            return True
    except ssl.SSLError as error:
        # an alert of the other side is TLS as well
        return "ALERT" in str(error).upper()
    except OSError:
        return False


def certificate_folders(host: str) -> list[Path]:
    """The folders where Docker and containers keep a registry's certificates.

    Args:
        host: The registry, with its port if it has one.
    """
    own = home()
    mine = [own / ".config" / "containers" / "certs.d"] if own else []
    roots = [*mine, Path("/etc/containers/certs.d"), Path("/etc/docker/certs.d")]
    return [root / host for root in roots if (root / host).is_dir()]


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow to where a blob is stored; never from HTTPS to HTTP, and elsewhere as nobody."""

    def redirect_request(  # noqa: PLR0917 - urllib calls it so
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        _safe(newurl, req.host, plain=req.type != "https")
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        who = req.get_header("Authorization")
        if made is not None and who is not None and _origin(newurl) == _origin(req.full_url):
            made.add_unredirected_header("Authorization", who)
        return made


def _origin(url: str) -> tuple[str, str]:
    """Who answers at an address: nobody else is told who one is."""
    at = urllib.parse.urlsplit(url)
    return at.scheme, at.netloc


def _safe(url: str, host: str, *, plain: bool) -> None:
    """Follow a registry over HTTPS alone, or over HTTP where that was spoken already."""
    if not url.startswith(("https://", "http://") if plain else "https://"):
        raise ForgeError(
            f"the registry {host} leads to an address without HTTPS",
            expected="HTTPS all the way",
            mend="ask who runs the registry; one behind a proxy has to be told of the HTTPS there",
        )


class _Watch:
    """Breaks a request off that is not done in time, wherever it hangs.

    The limit of a socket counts from byte to byte: a registry that sends one now and then would
    hold a run for ever.

    Args:
        limit: Seconds.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.over = False
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(limit, self._end)
        self._timer.daemon = True

    def __enter__(self) -> _Watch:
        self._timer.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._timer.cancel()

    def note(self, connected: socket.socket) -> None:
        """The connection that is used from now on, such as after a redirect."""
        self._socket = connected
        if self.over:
            self._end()

    def _end(self) -> None:
        self.over = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # not the method of a TLS socket, which would take its state from under the reader
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class _Http(urllib.request.HTTPHandler):
    def __init__(self, note: Callable[[socket.socket], None]) -> None:
        super().__init__()
        self._note = note

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        note = self._note

        class Connection(http.client.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                note(self.sock)

        return self.do_open(Connection, req)


def _noted(context: ssl.SSLContext, note: Callable[[socket.socket], None]) -> ssl.SSLContext:
    """A context whose connections are told of before their handshake, which may hang too."""

    class Noted(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            note(self)
            super().do_handshake(block)

    context.sslsocket_class = Noted
    return context


class Client:
    """One repository of a registry.

    Args:
        host: The registry, with its port if it has one.
        name: The repository in it.
        access: How it is reached.

    Raises:
        ForgeError: If the credentials or the certificates cannot be read.
    """

    def __init__(self, host: str, name: str, access: Access) -> None:
        self.host = host
        self.name = name
        self.access = access
        self.credentials = credentials(host, name, access)
        self._bearer = ""
        self._basic = False
        self._scheme = ""
        self._watch: _Watch | None = None
        handlers: list[urllib.request.BaseHandler] = [
            _Redirects(),
            _Http(self._note),
            urllib.request.HTTPSHandler(context=_noted(self._context(), self._note)),
        ]
        if is_loopback(host):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def _note(self, connected: socket.socket) -> None:
        if self._watch is not None:
            self._watch.note(connected)

    @property
    def plain(self) -> bool:
        """Whether HTTP without TLS is spoken: told to, or found on the loopback."""
        if self.access.plain_http:
            return True
        if not self._scheme:
            loopback = is_loopback(self.host) and self.access.ca is None
            self._scheme = "http" if loopback and not speaks_tls(self.host) else "https"
        return self._scheme == "http"

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        try:
            if self.access.ca is not None:
                context.load_verify_locations(self.access.ca)
            for folder in certificate_folders(self.host):
                for path in sorted(folder.glob("*.crt")):
                    context.load_verify_locations(path)
                for path in sorted(folder.glob("*.cert")):
                    context.load_cert_chain(path, path.with_suffix(".key"))
        except (OSError, ssl.SSLError) as error:
            where = self.access.ca or f"the folders certs.d of {self.host}"
            raise ForgeError(
                f"{where}: the certificates cannot be read: {error}",
                expected="certificates in PEM",
                mend="name a readable file with --ca",
            ) from error
        return context

    def ping(self) -> None:
        """See whether a registry answers, and takes who one is.

        Raises:
            TransientError: If it does not answer now.
            ForgeError: If it refuses.
        """
        with self._ask("GET", f"{self._root}/v2/", scope="pull,push"):
            pass

    def manifest(self, reference: str) -> tuple[bytes, str]:
        """A manifest or index, as it is.

        Args:
            reference: A tag, or ``sha256:…``.

        Returns:
            Its bytes and its media type.

        Raises:
            NotThereError: If there is none.
            TransientError: If the registry does not answer now.
            ForgeError: If it refuses, or gives other bytes than the digest says; exit code 1.
        """
        url = f"{self._url}/manifests/{reference}"
        with self._ask("GET", url, {"Accept": ", ".join(_ACCEPTED)}) as answer:
            data = _read(answer, _LARGEST_MANIFEST)
            kind = answer.headers.get_content_type()
            told = answer.headers.get("Docker-Content-Digest") or ""
        if data.lstrip()[:1] not in (b"{", b"["):
            # a proxy or a portal answers everything with a page of its own
            raise ForgeError(
                f"{self.host}/{self.name}: asked for the manifest {reference}, something else came "
                f"({kind}, {len(data):,} bytes)",
                expected="a manifest in JSON",
                mend="see whether that is the registry's address, and what stands before it",
            )
        found = f"sha256:{hashlib.sha256(data).hexdigest()}"
        expected = reference if ":" in reference else told
        if expected.startswith("sha256:") and found != expected:
            raise ForgeError(
                f"{self.host}/{self.name}: asked for {reference}, the registry gave a manifest "
                f"with the digest {found}",
                expected=expected,
                mend="do not trust it: ask who runs the registry, and push the image again",
                exit_code=Exit.FAULT,
            )
        return data, kind

    def put_manifest(self, reference: str, data: bytes, kind: str) -> None:
        """Put a manifest or index, as it is.

        Args:
            reference: A tag, or ``sha256:…``.
            data: Its bytes.
            kind: Its media type.

        Raises:
            TransientError: If the registry does not answer now.
            ForgeError: If it refuses.
        """
        url = f"{self._url}/manifests/{reference}"
        with self._ask("PUT", url, {"Content-Type": kind}, data, scope="pull,push"):
            pass

    def has_blob(self, digest: str) -> bool:
        """Whether a blob is there, or has to be sent.

        Args:
            digest: ``sha256:…``.

        Raises:
            TransientError: If the registry does not answer now.
            ForgeError: If it refuses.
        """
        try:
            with self._ask("HEAD", f"{self._url}/blobs/{digest}", scope="pull,push"):
                return True
        except NotThereError:
            return False

    def blob(
        self, digest: str, most: int, target: Path, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        """Take a blob; one that was begun goes on where it ended.

        Args:
            digest: ``sha256:…``.
            most: Its size; a registry that sends more is not listened to.
            target: The file; what is there counts as the blob's beginning.
            on_bytes: Told how many bytes came.

        Raises:
            NotThereError: If there is none.
            TransientError: If the registry does not answer now; what came is kept.
            ForgeError: If it refuses, or the whole has another digest; exit code 1.
        """
        begun = came = target.stat().st_size if target.exists() else 0
        if begun and f"sha256:{sha256_file(target)}" == digest:
            return
        if begun > most:
            target.unlink()
            begun = came = 0
        headers = {"Range": f"bytes={begun}-"} if begun else {}
        url = f"{self._url}/blobs/{digest}"
        try:
            with self._ask("GET", url, headers, size=most) as answer:
                goes_on = answer.status == http.client.PARTIAL_CONTENT
                came = begun if goes_on else 0
                with target.open("ab" if goes_on else "wb") as f:
                    while chunk := _read_some(answer):
                        came += len(chunk)
                        if came > most:
                            break
                        f.write(chunk)
                        if on_bytes is not None:
                            on_bytes(len(chunk))
        except _RangeError:
            # what was here is longer than the blob
            pass
        found = f"sha256:{sha256_file(target)}"
        if found != digest:
            target.unlink()
            if came > most:
                raise too_much(f"{self.host}/{self.name}@{digest}")
            if begun:
                raise TransientError("the beginning of the blob that was here is not its beginning")
            raise ForgeError(
                f"{self.host}/{self.name}: the registry gave a blob with the digest {found}",
                expected=digest,
                mend="do not trust it: ask who runs the registry, and push the image again",
                exit_code=Exit.FAULT,
            )

    def put_blob(
        self, digest: str, source: Path, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        """Send a blob in one go.

        Args:
            digest: ``sha256:…``; the registry checks it.
            source: The file.
            on_bytes: Told how many bytes went.

        Raises:
            TransientError: If the registry does not answer now.
            ForgeError: If it refuses.
        """
        url = f"{self._url}/blobs/uploads/"
        with self._ask("POST", url, {"Content-Length": "0"}, b"", scope="pull,push") as answer:
            place = self._led(url, answer.headers.get("Location") or "")
        _safe(place, self.host, plain=self.plain)
        place += f"{'&' if '?' in place else '?'}{urllib.parse.urlencode({'digest': digest})}"
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(source.stat().st_size),
        }
        with source.open("rb") as file:
            body = _Counted(file, on_bytes)
            length = source.stat().st_size
            with self._ask("PUT", place, headers, body, scope="pull,push", size=length):
                pass

    def _led(self, url: str, told: str) -> str:
        """Where a registry leads to from an address, once that is one."""
        try:
            place = urllib.parse.urljoin(url, told)
            _origin(place)
        except ValueError as error:
            raise self._unreachable(error) from error
        return place

    def _is_own(self, url: str) -> bool:
        """Whether an address is the registry's own."""
        return _origin(url) == _origin(self._root)

    @property
    def _root(self) -> str:
        server = "registry-1.docker.io" if self.host == "docker.io" else self.host
        return f"{'http' if self.plain else 'https'}://{server}"

    @property
    def _url(self) -> str:
        return f"{self._root}/v2/{self.name}"

    @contextlib.contextmanager
    def _ask(
        self,
        method: str,
        url: str,
        headers: dict[str, str] | None = None,
        data: bytes | _Counted | None = None,
        *,
        scope: str = "pull",
        size: int = 0,
    ) -> Iterator[http.client.HTTPResponse]:
        """One request; when the registry asks who one is, it is told, once.

        The size is that of what is taken or sent: the more, the longer it may last.
        """
        with _Watch(_ASK_S + size / _SLOWEST) as self._watch:
            watch = self._watch
            try:
                with self._answered(method, url, headers, data, scope) as answer:
                    yield answer
            except (TransientError, ForgeError, OSError):
                # what a connection that was broken off looks like is of no use
                if not watch.over:
                    raise
            if watch.over:
                raise TransientError(
                    f"{self.host} is too slow: not done after {watch.limit:.0f} s"
                ) from None

    @contextlib.contextmanager
    def _answered(
        self,
        method: str,
        url: str,
        headers: dict[str, str] | None,
        data: bytes | _Counted | None,
        scope: str,
    ) -> Iterator[http.client.HTTPResponse]:
        told = False
        while True:
            if isinstance(data, _Counted):
                data.rewind()
            request = urllib.request.Request(url, data, headers or {}, method=method)  # noqa: S310
            request.add_header("User-Agent", "tpuforge")
            # these stay behind when the registry leads to where it stores its blobs
            if not self._is_own(url):
                pass
            elif self._bearer:
                request.add_unredirected_header("Authorization", f"Bearer {self._bearer}")
            elif self._basic and self.credentials is not None:
                request.add_unredirected_header("Authorization", f"Basic {self.credentials.basic}")
            try:
                with self._open(request) as answer:
                    yield answer
                return
            except _ChallengeError as challenge:
                # the place where it stores its blobs has no say in where credentials go
                if told or not self._is_own(challenge.url):
                    raise self._refused(challenge.status, challenge.why) from None
                told = True
                self._answer(challenge, scope)

    @contextlib.contextmanager
    def _open(self, request: urllib.request.Request) -> Iterator[http.client.HTTPResponse]:
        try:
            answer = self._opener.open(request, timeout=_READ_S)
        except urllib.error.HTTPError as error:
            with error:
                raise self._judge(error) from error
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            raise self._unreachable(error) from error
        with answer:
            yield answer

    def _judge(self, error: urllib.error.HTTPError) -> Exception:
        """The error that an answer other than a success stands for."""
        status, why = error.code, _why(error)
        if status == 401:
            lines = error.headers.get_all("WWW-Authenticate") or []
            return _ChallengeError(status, why, lines, error.geturl())
        if status == 404:
            return not_there(f"{self.host}/{self.name}", why)
        if status == 416:
            return _RangeError()
        quota = status in (403, 429) and "quota" in why.lower()
        if status in _FULL or quota or "no space left" in why:
            return full(self.host, f"{status} {why}")
        if status == 403:
            return self._refused(status, why)
        if status == 429 or status >= 500:
            later = error.headers.get("Retry-After") or ""
            wait = f" and asks for a pause of {later} s" if _SECONDS.fullmatch(later) else ""
            return TransientError(f"{self.host} answered {status} {why}{wait}")
        return ForgeError(
            f"{self.host}/{self.name} answered {status} {why}",
            expected="a registry that takes OCI images",
            mend="ask who runs the registry",
        )

    def _unreachable(self, error: Exception) -> Exception:
        reason: object = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            return untrusted(self.host, reason.verify_message)
        if isinstance(reason, ssl.SSLError) and reason.reason == "WRONG_VERSION_NUMBER":
            return ForgeError(
                f"the registry {self.host} does not speak TLS",
                expected="HTTPS",
                mend="say --plain-http if everybody on the way may read and change what is sent",
            )
        if isinstance(reason, ForgeError):
            return reason
        if isinstance(reason, ValueError) and not isinstance(reason, OSError):
            # an address or a header out of what it said itself
            return ForgeError(
                f"the registry {self.host} leads to an address that is none ({reason})",
                expected="an address of the web",
                mend="ask who runs the registry",
            )
        return TransientError(f"{self.host}: {redact(str(reason) or type(reason).__name__)}")

    def _refused(self, status: int, why: str) -> ForgeError:
        return refused(self.host, self.name, f"{status} {why}", known=self.credentials is not None)

    def _answer(self, challenge: _ChallengeError, scope: str) -> None:
        """Say who one is: in each request, or once where tokens are given."""
        for line in challenge.lines:
            kind, _, rest = line.partition(" ")
            if kind.lower() == "basic" and self.credentials is not None:
                self._bearer, self._basic = "", True
                return
            if kind.lower() == "bearer":
                self._bearer = self._token(dict(_PARAMETER.findall(rest)), scope)
                return
        raise self._refused(challenge.status, challenge.why)

    def _token(self, asked: dict[str, str], scope: str) -> str:
        realm = self._led("", asked.get("realm", ""))
        if not realm.startswith(("https://", "http://") if self.plain else "https://"):
            raise ForgeError(
                f"the registry {self.host} wants credentials sent to {redact(realm) or '?'}",
                expected="an address with HTTPS",
                mend="ask who runs the registry",
            )
        fields = {"service": asked.get("service", "")}
        fields["scope"] = asked.get("scope") or f"repository:{self.name}:{scope}"
        known = self.credentials
        if known is not None and known.identity:
            fields |= {"grant_type": "refresh_token", "refresh_token": known.identity}
            fields["client_id"] = "tpuforge"
            body = urllib.parse.urlencode(fields).encode()
            request = urllib.request.Request(realm, body)  # noqa: S310 - the scheme was looked at
        else:
            mark = "&" if "?" in realm else "?"
            url = f"{realm}{mark}{urllib.parse.urlencode(fields)}"
            request = urllib.request.Request(url)  # noqa: S310 - the scheme was looked at
            if known is not None:
                request.add_unredirected_header("Authorization", f"Basic {known.basic}")
        try:
            with self._open(request) as answer:
                given = parse_json(_read(answer, _LARGEST_ANSWER))
            token = str(given.get("token") or given["access_token"])
            if not _TOKEN.fullmatch(token):
                raise ValueError("it is none")
            return token
        except _ChallengeError as error:
            raise self._refused(error.status, error.why) from None
        except (ValueError, KeyError, AttributeError) as error:
            raise TransientError(f"{self.host}: no token came: {type(error).__name__}") from error


class _Counted:
    """A file that tells how much of it was read."""

    def __init__(self, file: IO[bytes], on_bytes: Callable[[int], None] | None) -> None:
        self._file = file
        self._on_bytes = on_bytes

    def rewind(self) -> None:
        """Begin again."""
        self._file.seek(0)

    def read(self, most: int = -1) -> bytes:
        """The next bytes."""
        data = self._file.read(most)
        if self._on_bytes is not None:
            self._on_bytes(len(data))
        return data


class _ChallengeError(Exception):
    """The registry asks who one is."""

    def __init__(self, status: int, why: str, lines: list[str], url: str) -> None:
        super().__init__(why)
        self.status, self.why, self.lines, self.url = status, why, lines, url


class _RangeError(Exception):
    """Nothing comes after what is here."""


def _read(answer: http.client.HTTPResponse, most: int) -> bytes:
    data = b""
    while chunk := _read_some(answer):
        data += chunk
        if len(data) > most:
            raise ForgeError(
                f"the registry sent more than {most:,} bytes for one answer",
                expected="a manifest",
                mend="ask who runs the registry",
                exit_code=Exit.FAULT,
            )
    return data


def _read_some(answer: http.client.HTTPResponse) -> bytes:
    try:
        chunk = answer.read(_CHUNK)
    except (http.client.HTTPException, OSError) as error:
        raise TransientError(f"the connection broke off: {type(error).__name__}") from error
    # http.client takes a connection that ends early for the end of the answer
    if not chunk and answer.length:
        raise TransientError(f"the connection broke off, {answer.length:,} bytes before the end")
    return chunk


def _why(error: urllib.error.HTTPError) -> str:
    """What a registry says of its refusal, in one line."""
    try:
        said = error.read(_LARGEST_ANSWER)
        found = [f"{one.get('code', '')}: {one.get('message', '')}" for one in _errors(said)]
    except (OSError, ValueError, http.client.HTTPException):
        return redact(str(error.reason))[:500]
    # Debian's registry says it in words or as the number of the error, in a detail only
    if b"no space left on device" in said or b'"Err":28' in said:
        found.append("no space left on device")
    return redact("; ".join(found) or str(error.reason))[:500]


def _errors(body: bytes) -> list[dict[str, Any]]:
    try:
        listed = parse_json(body)["errors"]
        return [one for one in listed if isinstance(one, dict)]
    except (ValueError, KeyError, TypeError):
        return []


def not_there(what: str, why: str) -> NotThereError:
    """The error of something that a registry does not have.

    Args:
        what: The reference.
        why: What the registry said.
    """
    return NotThereError(
        f"{what} is not in the registry: {why}",
        expected="an image that was pushed there",
        mend="look at its name and digest, or push it: ./forge push",
    )


def too_much(what: str) -> ForgeError:
    """The error of a registry that sends more than there is.

    Args:
        what: The reference.
    """
    return ForgeError(
        f"{what}: the registry gave more than the manifest names",
        expected="blobs of the sizes in the manifest",
        mend="do not trust it: ask who runs the registry, and push the image again",
        exit_code=Exit.FAULT,
    )


def full(host: str, why: str) -> ForgeError:
    """The error of a registry without room.

    Args:
        host: The registry.
        why: What it said.
    """
    return ForgeError(
        f"the registry {host} is full, or its quota is used up: {why}",
        expected="room for the image",
        mend="make room there, then run the same command again: what has arrived is not sent twice",
    )


def refused(host: str, name: str, why: str, *, known: bool) -> ForgeError:
    """The error of a registry that does not let one in.

    Args:
        host: The registry.
        name: The repository.
        why: What it said.
        known: Whether it was told who one is.
    """
    how = "does not accept your credentials" if known else "wants credentials, and there are none"
    return ForgeError(
        f"the registry {host} {how} for {name}: {why}",
        expected="a user who may do this",
        mend=f"docker login {host} (or skopeo login {host}); --authfile names another file",
    )


def untrusted(host: str, why: str) -> ForgeError:
    """The error of a certificate that nobody vouches for.

    Args:
        host: The registry.
        why: What is wrong with it.
    """
    return ForgeError(
        f"the certificate of the registry {host} cannot be trusted: {why}",
        expected="a certificate of an authority that this machine knows",
        mend="ask who runs the registry to renew it, and see that the clock here is right"
        if "expired" in why
        else f"name its authority: --ca FILE, or put it into /etc/containers/certs.d/{host}/ca.crt",
    )
