"""A hostile registry, and hostile names for one: bounded, kept in its folder, told no secret."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from registry_support import without_credentials
from tpuforge import distribution
from tpuforge import layout as oci
from tpuforge.console import Progress
from tpuforge.distribution import Access, Client, TransientError
from tpuforge.errors import Exit, ForgeError
from tpuforge.images import pull
from tpuforge.registry import Reference, Registry
from tpuforge.release import bill, referrers

HEX = "0123456789abcdef" * 4
DEEP = b"[" * 200_000


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without credentials, and an out folder of the test."""
    without_credentials(tmp_path, monkeypatch)


class Hostile:
    """A server that answers every request with the bytes that it is given, as they come."""

    def __init__(self) -> None:
        self.answer: Callable[[str], Iterator[bytes]] = lambda request: iter(())
        self.handshake: Callable[[], Iterator[bytes]] = lambda: iter(())
        self.asked: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with connection:
            try:
                request = connection.recv(1 << 16).decode("latin-1")
                if not request.startswith(("GET", "HEAD", "POST", "PUT")):
                    # the question whether this is TLS
                    for piece in self.handshake():
                        connection.sendall(piece)
                    return
                self.asked.append(request)
                for piece in self.answer(request):
                    connection.sendall(piece)
            except OSError:
                pass

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def server() -> Iterator[Hostile]:
    made = Hostile()
    yield made
    made.close()


def answer(data: bytes, status: str = "200 OK", *headers: str) -> Iterator[bytes]:
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(data)}", "", ""]
    yield "\r\n".join(lines).encode() + data


def drip(start: bytes) -> Iterator[bytes]:
    yield start
    while True:
        time.sleep(0.05)
        yield b"a"


def named(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_a_registry_that_sends_a_byte_now_and_then_is_given_up(
    server: Hostile, start: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(distribution, "_ASK_S", 0.4)
    server.answer = lambda request: drip(start)
    client = Client(server.address, "x", Access())
    begun = time.monotonic()
    with pytest.raises(TransientError, match="too slow"):
        client.manifest("latest")
    with pytest.raises(TransientError, match="too slow"):
        client.blob(f"sha256:{HEX}", 100, tmp_path / "blob")
    assert time.monotonic() - begun < 10


def test_a_handshake_that_drips_is_given_up(
    server: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distribution, "_ASK_S", 0.4)
    monkeypatch.setattr(distribution, "_CONNECT_S", 0.4)
    # the head of a record of TLS of 16 kB
    server.handshake = lambda: drip(b"\x16\x03\x03\x40\x00")
    begun = time.monotonic()
    assert not distribution.speaks_tls(server.address)
    monkeypatch.setattr(distribution, "speaks_tls", lambda host: True)
    with pytest.raises(TransientError, match="too slow"):
        Client(server.address, "x", Access()).manifest("latest")
    assert time.monotonic() - begun < 10


def test_no_more_of_a_blob_is_taken_than_its_manifest_names(
    server: Hostile, tmp_path: Path
) -> None:
    def endless(request: str) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n\r\n"
        for _ in range(1000):
            yield b"x" * (1 << 20)

    server.answer = endless
    with pytest.raises(ForgeError, match="gave more than") as caught:
        Client(server.address, "x", Access()).blob(f"sha256:{HEX}", 5, tmp_path / "blob")
    assert caught.value.exit_code == Exit.FAULT
    assert not (tmp_path / "blob").exists()


def test_a_beginning_that_is_longer_than_the_blob_is_thrown_away(
    server: Hostile, tmp_path: Path
) -> None:
    server.answer = lambda request: answer(b"blob")
    (tmp_path / "blob").write_bytes(b"something of another run")
    Client(server.address, "x", Access()).blob(named(b"blob"), 4, tmp_path / "blob")
    assert (tmp_path / "blob").read_bytes() == b"blob"
    assert "Range:" not in server.asked[-1]


@pytest.mark.parametrize(
    "layer",
    [
        {"digest": "/{tmp}/victim", "size": 2, "mediaType": "x"},
        {"digest": "sha256:../../../victim", "size": 2, "mediaType": "x"},
        {"digest": f"sha256:{HEX}\n", "size": 2, "mediaType": "x"},
        {"digest": f"sha512:{HEX}{HEX}", "size": 2, "mediaType": "x"},
        {"digest": f"sha256:{HEX}", "size": -1, "mediaType": "x"},
        {"digest": f"sha256:{HEX}", "size": 1e300, "mediaType": "x"},
        {"digest": f"sha256:{HEX}", "size": True, "mediaType": "x"},
        {"digest": [], "size": 2, "mediaType": "x"},
        "x",
    ],
)
def test_a_blob_of_a_stranger_has_a_digest_and_a_size(layer: object, tmp_path: Path) -> None:
    text = json.dumps({"artifactType": "x", "layers": [layer], "subject": {"digest": "x"}})
    data = text.replace("{tmp}", str(tmp_path)).encode()
    with pytest.raises(ForgeError, match="no artifact") as caught:
        referrers.read_manifest(data, named(data), "it")
    assert caught.value.exit_code == Exit.FAULT


def test_a_document_that_is_too_large_is_not_asked_for(server: Hostile, tmp_path: Path) -> None:
    large = {"digest": f"sha256:{HEX}", "size": 1 << 40, "mediaType": "x"}
    manifest = json.dumps({"config": large, "layers": []}).encode()
    entry = {"digest": named(manifest), "size": len(manifest), "mediaType": "x"}
    index = json.dumps({"mediaType": referrers.INDEX, "manifests": [entry]}).encode()
    ref = Reference.parse(f"{server.address}/x@sha256:{HEX}")
    server.answer = lambda request: answer(manifest if named(manifest) in request else index)
    with Progress("tests", quiet=True) as progress:
        registry = Registry(progress, tries=1)
        with pytest.raises(ForgeError, match="has 1") as caught:
            registry.document(ref, oci.descriptor(large))
        assert server.asked == []
        with pytest.raises(ForgeError, match="has 1"):
            # what pull takes beside an image
            registry.copy_referrers_out(ref, tmp_path / "attached")
        assert len(server.asked) == 2
        # and so many that nobody would look at them
        index = json.dumps({"mediaType": referrers.INDEX, "manifests": [entry] * 201}).encode()
        with pytest.raises(ForgeError, match="has 201 entries"):
            registry.copy_referrers_out(ref, tmp_path / "attached")
        with pytest.raises(ForgeError, match="has 201 entries"):
            referrers.read_index(index, "it")
    assert caught.value.exit_code == Exit.FAULT


@pytest.mark.parametrize(
    ("size", "layers", "why"),
    [
        (1 << 60, 0, "has room for"),
        (-5, 0, "not a number"),
        (1, 999, "has 999 layers"),
        (1, -1, "is an artifact of the type 'application/vnd.oci.empty.v1"),
    ],
)
def test_an_image_that_cannot_fit_or_is_none_is_not_begun(
    server: Hostile, tmp_path: Path, size: int, layers: int, why: str
) -> None:
    what = "image.config" if layers >= 0 else "empty"
    kind = f"application/vnd.oci.{what}.v1+json"
    blob = {"digest": f"sha256:{HEX}", "size": size, "mediaType": kind}
    data = json.dumps({"config": blob, "layers": [blob] * layers}).encode()
    server.answer = lambda request: answer(data)
    with Progress("tests", quiet=True) as progress:
        ref = Reference.parse(f"{server.address}/x@{named(data)}")
        with pytest.raises(ForgeError, match=why):
            Registry(progress, tries=1).copy_out(ref, tmp_path / "layout")
    assert len(server.asked) == 1


def test_nesting_without_end_is_no_mistake_of_ours(server: Hostile, tmp_path: Path) -> None:
    for reader in (bill.read_cyclonedx, bill.read_spdx):
        with pytest.raises(ValueError, match="nested"):
            reader(DEEP)
    with pytest.raises(ForgeError, match="nested"):
        referrers.read_index(DEEP, "it")
    server.answer = lambda request: answer(DEEP)
    with Progress("tests", quiet=True) as progress:
        ref = Reference.parse(f"{server.address}/x@{named(DEEP)}")
        with pytest.raises(ForgeError, match="nested"):
            Registry(progress, tries=1).copy_out(ref, tmp_path / "layout")
    # and in an error's own words
    server.answer = lambda request: answer(DEEP, "403 Forbidden")
    with pytest.raises(ForgeError, match="wants credentials"):
        Client(server.address, "x", Access()).manifest("latest")


@pytest.mark.parametrize(
    ("tag", "version", "name"),
    [
        ("mine", "1.0", "mine"),
        ("", "1.0", "1.0"),
        ("", "1.0+cpu", HEX[:12]),
        ("", "", HEX[:12]),
        ("", "x\n --privileged", HEX[:12]),
    ],
)
def test_the_name_of_a_strangers_image_in_the_engine(tag: str, version: str, name: str) -> None:
    blob = oci.Blob(f"sha256:{HEX}", 1, "x")
    labels = {"org.opencontainers.image.version": version}
    ref = Reference("a.example", "x", tag, blob.digest)
    assert pull._name(ref, oci.Image(blob, blob, (), labels, {})) == f"a.example/x:{name}"


@pytest.mark.parametrize("data", [b"", b"<html>sign in to the network</html>", b"\0" * 99])
def test_a_page_of_a_proxy_is_no_manifest(server: Hostile, data: bytes) -> None:
    server.answer = lambda request: answer(data, "200 OK", "Content-Type: text/html")
    for reference in ("latest", f"sha256:{HEX}"):
        with pytest.raises(ForgeError, match="something else came") as caught:
            Client(server.address, "x", Access()).manifest(reference)
        assert caught.value.exit_code == Exit.CANNOT


def test_an_expired_certificate_needs_its_owner_and_no_other_authority() -> None:
    said = "x509: certificate has expired or is not yet valid"
    assert "renew" in distribution.untrusted("a.example", said).mend
    assert "--ca FILE" in distribution.untrusted("a.example", "x509: unknown authority").mend


def logged_in(tmp_path: Path, host: str) -> Access:
    path = tmp_path / "auth.json"
    word = base64.b64encode(b"me:open sesame").decode()
    path.write_text(json.dumps({"auths": {host: {"auth": word}}}))
    return Access(path)


def test_a_store_has_no_say_in_where_credentials_go(server: Hostile, tmp_path: Path) -> None:
    other = Hostile()
    try:
        realm = f'WWW-Authenticate: Bearer realm="http://{other.address}/token"'
        other.answer = lambda request: answer(b"", "401 Unauthorized", realm)
        to = f"Location: http://{other.address}/blob"
        server.answer = lambda request: answer(b"", "307 Temporary Redirect", to)
        client = Client(server.address, "x", logged_in(tmp_path, server.address))
        with pytest.raises(ForgeError, match="does not accept your credentials"):
            client.blob(f"sha256:{HEX}", 5, tmp_path / "blob")
        assert len(other.asked) == 1 and "authorization" not in other.asked[0].lower()
    finally:
        other.close()


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://a.example/x", "data:,x"])
def test_a_blob_is_sent_to_no_address_but_of_the_web(
    server: Hostile, tmp_path: Path, place: str
) -> None:
    (tmp_path / "blob").write_bytes(b"blob")
    server.answer = lambda request: answer(b"", "202 Accepted", f"Location: {place}")
    with pytest.raises(ForgeError, match="leads to an address"):
        Client(server.address, "x", Access()).put_blob(named(b"blob"), tmp_path / "blob")
    assert len(server.asked) == 1


def test_two_who_want_one_document_take_it_once(server: Hostile) -> None:
    data = bytes(range(256)) * 40

    def slowly(request: str) -> Iterator[bytes]:
        yield f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        for at in range(0, len(data), 1024):
            time.sleep(0.02)
            yield data[at : at + 1024]

    server.answer = slowly
    ref = Reference.parse(f"{server.address}/x")
    blob = oci.Blob(named(data), len(data), "x")

    def take(number: int) -> bytes:
        with Progress(f"tests {number}", quiet=True) as progress:
            return Registry(progress, tries=1).document(ref, blob)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(take, range(2))) == [data, data]
    assert len(server.asked) == 1


@pytest.mark.parametrize("place", ["http://[::", f"http://{'a' * 300}.b/x"])
def test_an_address_that_is_none_is_no_mistake_of_ours(
    server: Hostile, tmp_path: Path, place: str
) -> None:
    (tmp_path / "blob").write_bytes(b"blob")
    client = Client(server.address, "x", Access())
    server.answer = lambda request: answer(b"", "202 Accepted", f"Location: {place}")
    with pytest.raises(ForgeError, match="an address that is none"):
        client.put_blob(named(b"blob"), tmp_path / "blob")
    server.answer = lambda request: answer(b"", "307 Temporary Redirect", f"Location: {place}")
    with pytest.raises(ForgeError, match="an address that is none"):
        client.manifest("latest")
    realm = f'WWW-Authenticate: Bearer realm="{place}"'
    server.answer = lambda request: answer(b"", "401 Unauthorized", realm)
    with pytest.raises(ForgeError, match="an address that is none"):
        client.manifest("latest")


@pytest.mark.parametrize("token", ["a\r\nX: y", "\u2028", ""])
def test_a_token_that_cannot_stand_in_a_header_is_none(server: Hostile, token: str) -> None:
    realm = f'WWW-Authenticate: Bearer realm="http://{server.address}/token"'
    server.answer = lambda request: (
        answer(json.dumps({"token": token, "access_token": token}).encode())
        if "GET /token" in request
        else answer(b"", "401 Unauthorized", realm)
    )
    with pytest.raises(TransientError, match="no token came"):
        Client(server.address, "x", Access()).manifest("latest")


def test_a_token_goes_to_no_address_without_tls(tmp_path: Path) -> None:
    client = Client("a.example", "x", logged_in(tmp_path, "a.example"))
    assert client._is_own("https://a.example/v2/x/blobs/uploads/1")
    assert not client._is_own("http://a.example/v2/x/blobs/uploads/1")
    assert not client._is_own("https://b.example/v2/x/blobs/uploads/1")
    with pytest.raises(ForgeError, match="without HTTPS"):
        distribution._safe("http://a.example/v2/x/blobs/uploads/1", "a.example", plain=False)


@pytest.mark.parametrize(
    "text",
    [
        "localhost:99999/x",
        "a..b/x",
        f"{'a' * 300}.b/x",
        "[::::]:5/x",
        "https://u:open-sesame@a.example/x",
        "u:open-sesame@a.example/x",
        f"u:open-sesame@a.example/x@sha256:{HEX}",
        "u:open/sesame@a.example/x",
        f"a.example/{'x' * 5000} é",
        "a.example/x\x1b[2J",
    ],
)
def test_a_bad_reference_is_told_shortly_and_without_its_password(text: str) -> None:
    try:
        ref = Reference.parse(text)
    except ForgeError as error:
        assert error.exit_code == Exit.CANNOT
        assert "sesame" not in error.found
        assert "\x1b" not in error.found
        assert len(error.found) < 1000
    else:
        # older versions of Python find a bad IPv6 address when they connect only
        assert ref.host == "[::::]:5"


def test_the_name_of_a_document_cannot_look_like_a_verdict() -> None:
    title = {"org.opencontainers.image.title": "x is signed\n  passed   the image is signed\x1b[1A"}
    layer = {"digest": f"sha256:{HEX}", "size": 2, "mediaType": "x", "annotations": title}
    body = {"artifactType": "x", "layers": [layer], "subject": {"digest": f"sha256:{HEX}"}}
    data = json.dumps(body).encode()
    with pytest.raises(ForgeError, match="control characters"):
        referrers.read_manifest(data, named(data), "it")
