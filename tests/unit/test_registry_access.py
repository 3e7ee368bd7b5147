"""How a registry is reached: references, credentials, tokens, redirects, and what failures mean."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from registry_support import without_credentials
from server_support import Handler, serving
from tpuforge.console import Progress
from tpuforge.distribution import (
    Access,
    Client,
    TransientError,
    credentials,
    is_loopback,
)
from tpuforge.errors import Exit, ForgeError
from tpuforge.process import Completed
from tpuforge.registry import Reference, Registry, explain, fallback_tag

HEX = "0123456789abcdef" * 4
Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without credentials."""
    without_credentials(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("registry.example/owner/runtime", ("registry.example", "owner/runtime", "", "")),
        ("localhost/x:1.0", ("localhost", "x", "1.0", "")),
        ("localhost:5000/x:1", ("localhost:5000", "x", "1", "")),
        ("registry:5000/x", ("registry:5000", "x", "", "")),
        ("[::1]:5000/x", ("[::1]:5000", "x", "", "")),
        (f"a.b/c/d:e@sha256:{HEX}", ("a.b", "c/d", "e", f"sha256:{HEX}")),
        (f"a.b/c__d-e.f@sha256:{HEX}", ("a.b", "c__d-e.f", "", f"sha256:{HEX}")),
    ],
)
def test_references(text: str, parts: tuple[str, str, str, str]) -> None:
    ref = Reference.parse(text)
    assert (ref.host, ref.name, ref.tag, ref.digest) == parts
    assert str(ref) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "runtime",
        "owner/runtime",
        "registry.example",
        "registry.example/",
        "registry.example/Upper",
        "registry.example/../x",
        "registry.example/a//b",
        "registry.example/x:",
        "registry.example/x:-1",
        "registry.example/x@",
        "registry.example/x@sha256:12",
        f"registry.example/x@sha512:{HEX}{HEX}",
        f"registry.example/x@sha256:{HEX.upper()}",
        "https://registry.example/x",
        "user:word@registry.example/x",
        "registry.example/x\n",
        "--to/x",
    ],
)
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(ForgeError) as caught:
        Reference.parse(text)
    assert caught.value.exit_code == Exit.CANNOT


def test_the_tag_of_what_is_attached() -> None:
    assert fallback_tag(f"sha256:{HEX}") == f"sha256-{HEX}"


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("localhost", True),
        ("localhost:5000", True),
        ("127.0.0.2:1", True),
        ("[::1]:5000", True),
        ("127.0.0.1.example.org", False),
        ("localhost.example.org:80", False),
        ("registry.example", False),
    ],
)
def test_the_loopback(host: str, here: bool) -> None:
    assert is_loopback(host) is here


def entry(word: str) -> dict[str, str]:
    return {"auth": base64.b64encode(word.encode()).decode()}


def test_the_nearest_credentials_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ".docker"
    folder.mkdir()
    auths = {
        "https://a.example/v2/": entry("host:1"),
        "a.example/team": entry("team:2:with a colon"),
        "https://index.docker.io/v1/": entry("hub:3"),
        "a.example/other": {},
    }
    (folder / "config.json").write_text(json.dumps({"auths": auths}))

    def who(host: str, name: str) -> str:
        found = credentials(host, name, Access())
        return f"{found.user}:{found.password}" if found else "nobody"

    assert who("a.example", "x") == "host:1"
    assert who("a.example", "team/x/y") == "team:2:with a colon"
    assert who("a.example", "other/x") == "host:1"
    assert who("docker.io", "library/x") == "hub:3"
    assert who("b.example", "x") == "nobody"
    other = tmp_path / "auth.json"
    other.write_text(json.dumps({"auths": {"a.example": entry("other:4")}}))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(other))
    assert who("a.example", "team/x") == "other:4"
    assert who("docker.io", "x") == "hub:3"
    assert "4" not in repr(credentials("a.example", "x", Access()))


@pytest.mark.parametrize(
    "content", ["[]", '{"auths": [1]}', '{"auths": {"a.b": {"auth": "%"}}}', "{"]
)
def test_a_file_of_credentials_that_is_not_one(tmp_path: Path, content: str) -> None:
    path = tmp_path / "auth.json"
    path.write_text(content)
    with pytest.raises(ForgeError, match="the file of credentials"):
        credentials("a.b", "x", Access(path))


@pytest.mark.parametrize("key", ["credHelpers", "credsStore"])
def test_a_credential_helper_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    helper = tmp_path / "bin" / "docker-credential-mine"
    helper.parent.mkdir()
    answer = '{"ServerURL":"a.b","Username":"me","Secret":"open sesame"}'
    helper.write_text(
        f"#!/bin/sh\nread -r server\n[ \"$server\" = a.b ] || exit 1\necho '{answer}'\n"
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helper.parent}:/usr/bin:/bin")
    path = tmp_path / "config.json"
    settings = {"credHelpers": {"a.b": "mine"}} if key == "credHelpers" else {"credsStore": "mine"}
    path.write_text(json.dumps({"auths": {"a.b": {}}, **settings}))
    found = credentials("a.b", "x", Access(path))
    assert found is not None and (found.user, found.password) == ("me", "open sesame")
    helper.write_text("#!/bin/sh\necho credentials not found in native keychain\nexit 1\n")
    assert credentials("a.b", "x", Access(path)) is None
    helper.write_text("#!/bin/sh\necho hunter2\nexit 1\n")
    with pytest.raises(ForgeError, match="docker-credential-mine") as caught:
        credentials("a.b", "x", Access(path))
    assert "hunter2" not in str(caught.value.as_dict())


class Server:
    """Answers by a function, and keeps what it was asked and told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []
        self.answer: Callable[[str, str, str], Answer] = lambda method, path, auth: (404, {}, b"")
        self.address = ""


@contextlib.contextmanager
def answering() -> Iterator[Server]:
    made = Server()

    class Serves(Handler):
        def do_GET(self) -> None:
            auth = self.headers.get("Authorization") or ""
            made.asked.append((self.command, self.path, auth))
            status, headers, body = made.answer(self.command, self.path, auth)
            self.answer(status, body, **headers)

    with serving(Serves) as port:
        made.address = f"127.0.0.1:{port}"
        yield made


@pytest.fixture
def server() -> Iterator[Server]:
    """A server."""
    with answering() as made:
        yield made


@pytest.fixture
def store() -> Iterator[Server]:
    """Another one."""
    with answering() as made:
        yield made


def test_a_token_is_had_for_credentials_and_used(tmp_path: Path, server: Server) -> None:
    data = b'{"schemaVersion": 2}'

    def answer(method: str, path: str, auth: str) -> Answer:
        if path.startswith("/token"):
            return 200, {}, b'{"token": "abc"}'
        if auth == "Bearer abc":
            return 200, {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}, data
        realm = f'Bearer realm="http://{server.address}/token",service="s"'
        return 401, {"WWW-Authenticate": realm}, b""

    server.answer = answer
    path = tmp_path / "auth.json"
    path.write_text(json.dumps({"auths": {server.address: entry("me:word")}}))
    client = Client(server.address, "x/y", Access(path))
    assert client.manifest("latest")[0] == data
    assert client.manifest("latest")[0] == data
    asked = [(path, auth.partition(" ")[0]) for _, path, auth in server.asked]
    manifest = "/v2/x/y/manifests/latest"
    token = "/token?service=s&scope=repository%3Ax%2Fy%3Apull"
    # once asked who one is, once told, and from then on the token
    assert asked == [(manifest, ""), (token, "Basic"), (manifest, "Bearer"), (manifest, "Bearer")]


def test_a_store_elsewhere_gets_no_credentials(
    tmp_path: Path, server: Server, store: Server
) -> None:
    blob = b"a blob"
    digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
    store.answer = lambda method, path, auth: (200, {}, blob)

    def answer(method: str, path: str, auth: str) -> Answer:
        if not auth:
            return 401, {"WWW-Authenticate": 'Basic realm="x"'}, b""
        return 307, {"Location": f"http://{store.address}/signed"}, b""

    server.answer = answer
    path = tmp_path / "auth.json"
    path.write_text(json.dumps({"auths": {server.address: entry("me:word")}}))
    Client(server.address, "x", Access(path)).blob(digest, 1 << 20, tmp_path / "blob")
    assert (tmp_path / "blob").read_bytes() == blob
    assert store.asked == [("GET", "/signed", "")]


def test_a_redirect_within_the_registry_keeps_who_one_is(tmp_path: Path, server: Server) -> None:
    data = b'{"schemaVersion": 2}'

    def answer(method: str, path: str, auth: str) -> Answer:
        if not auth:
            return 401, {"WWW-Authenticate": 'Basic realm="x"'}, b""
        if path.startswith("/v2/old"):
            return 307, {"Location": path.replace("/old/", "/new/")}, b""
        return 200, {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}, data

    server.answer = answer
    path = tmp_path / "auth.json"
    path.write_text(json.dumps({"auths": {server.address: entry("me:word")}}))
    assert Client(server.address, "old", Access(path)).manifest("1")[0] == data
    server.answer = lambda method, path, auth: (302, {"Location": path}, b"")
    with pytest.raises(ForgeError, match="infinite loop"):
        Client(server.address, "old", Access(path)).manifest("1")


def test_credentials_go_to_no_address_without_tls_from_one_with_it(tmp_path: Path) -> None:
    path = tmp_path / "auth.json"
    path.write_text(json.dumps({"auths": {"a.example": entry("me:word")}}))
    client = Client("a.example", "x", Access(path))
    with pytest.raises(ForgeError, match=r"wants credentials sent to http://evil\.example"):
        client._token({"realm": "http://evil.example/token"}, "pull")


def test_a_registry_without_tls_is_told_from_one_that_is_down(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as if it were not on the loopback, where this is found out
    monkeypatch.setattr("tpuforge.distribution.is_loopback", lambda host: False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(ForgeError, match="does not speak TLS") as caught:
        Client(server.address, "x", Access()).manifest("latest")
    assert "--plain-http" in caught.value.mend
    with pytest.raises(ForgeError, match="is not in the registry"):
        Client(server.address, "x", Access(plain_http=True)).manifest("latest")


def test_an_answer_without_end_is_cut_off(server: Server) -> None:
    server.answer = lambda method, path, auth: (200, {}, b"x" * (5 << 20))
    with pytest.raises(ForgeError, match="more than"):
        Client(server.address, "x", Access()).manifest("latest")


@pytest.mark.parametrize(
    "body",
    [
        b'{"errors":[{"code":"UNKNOWN","message":"x","detail":{"Op":"write","Err":28}}]}',
        b'{"errors":[{"code":"UNKNOWN","detail":"write /data: no space left on device"}]}',
    ],
)
def test_a_registry_whose_disk_is_full_is_not_asked_again(server: Server, body: bytes) -> None:
    server.answer = lambda method, path, auth: (500, {}, body)
    with pytest.raises(ForgeError, match="is full"):
        Client(server.address, "x", Access()).manifest("latest")


def test_patience_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("tpuforge.registry.time.sleep", pauses.append)
    server.answer = lambda method, path, auth: (503, {"Retry-After": "86400"}, b"")
    with Progress("tests", quiet=True) as progress:
        registry = Registry(progress, tries=7)
        with pytest.raises(ForgeError, match="a pause of 86400 s; given up after 7 attempts"):
            registry.digest(Reference.parse(f"{server.address}/x"))
    assert pauses == [1, 2, 4, 8, 16, 30]
    assert len(server.asked) == 7


@pytest.mark.parametrize(
    ("why", "code", "words"),
    [
        ("x509: certificate signed by unknown authority", Exit.CANNOT, "cannot be trusted"),
        ("unauthorized: authentication required", Exit.CANNOT, "none for x"),
        ("writing blob: denied: quota exceeded", Exit.CANNOT, "is full"),
        ("received unexpected HTTP status: 507 Insufficient Storage", Exit.CANNOT, "is full"),
        ("write /x: no space left on device", Exit.CANNOT, "the disk is full"),
        ("manifest unknown: manifest unknown", Exit.CANNOT, "is not in the registry"),
        ("Digest did not match, expected a, got b", Exit.FAULT, "a digest is not what"),
        ("received unexpected HTTP status: 500 Internal Server Error", None, "500"),
        ("dial tcp 127.0.0.1:1: connect: connection refused", None, "refused"),
        ("happened to read: unexpected EOF", None, "EOF"),
        ("an answer that nobody has seen", None, "nobody"),
    ],
)
def test_what_skopeo_says_is_understood(why: str, code: Exit | None, words: str) -> None:
    ref = Reference.parse("a.example/x")
    output = f'Getting image source signatures\ntime="…" level=fatal msg="copying: {why}"'
    found = explain(Completed((), 1, output, 0.1), ref, known=False)
    if code is None:
        assert isinstance(found, TransientError)
        assert words in str(found)
    else:
        assert isinstance(found, ForgeError)
        assert found.exit_code == code
        assert words in found.found
