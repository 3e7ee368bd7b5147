"""A real registry for tests, a proxy that misbehaves, and images of almost nothing.

The registry is Debian's docker-registry on a free port of the loopback. It can ask for a password
and speak TLS, and it can be killed and started again. It is installed without its service when it
is missing and the tests run as root.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import http.client
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from build_support import free_port
from reproduce_support import KIND, Layout
from server_support import Handler, serving
from tpuforge import host
from tpuforge.console import Progress

USER, PASSWORD = "forge", "open sesame"
# bcrypt of the password above, the one kind that the registry takes
_HTPASSWD = f"{USER}:$2b$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n"


def program() -> str:
    """The registry's program, installed if it has to be."""
    if not host.which("docker-registry"):
        assert host.can_install(), (
            "these tests need docker-registry: apt-get install docker-registry"
        )
        with Progress("tests", quiet=True) as progress:
            host.apt_install(["docker-registry"], progress)
    return host.which("docker-registry")


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """A certificate authority, and a certificate and key for the loopback signed by it."""
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl(
        "req",
        "-x509",
        *kind,
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
        "-days",
        "2",
        "-subj",
        "/CN=ca",
    )
    openssl("req", *kind, "-keyout", "own.key", "-out", "own.csr", "-subj", "/CN=localhost")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    by = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"]
    openssl(
        "x509", "-req", "-in", "own.csr", *by, "-out", "own.crt", "-days", "2", "-extfile", "names"
    )
    return folder / "ca.crt", folder / "own.crt", folder / "own.key"


def without_credentials(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be a user with this home and no credentials; the out folder, which is in it."""
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TPUFORGE_OUT", str(home / "out"))
    return home / "out"


def write_authfile(path: Path, address: str, password: str = PASSWORD) -> Path:
    """A file of credentials as ``docker login`` writes it."""
    word = base64.b64encode(f"{USER}:{password}".encode()).decode()
    path.write_text(json.dumps({"auths": {address: {"auth": word}}}))
    path.chmod(0o600)
    return path


@dataclass
class RealRegistry:
    """A running registry.

    Attributes:
        folder: Its data, settings and log.
        address: ``127.0.0.1:PORT``.
        ca: Its certificate authority; None without TLS.
        authfile: Credentials that it accepts; None without passwords.
    """

    folder: Path
    address: str
    ca: Path | None = None
    authfile: Path | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def log(self) -> str:
        """What it said."""
        return (self.folder / "log").read_text(errors="replace")

    @property
    def blobs(self) -> Path:
        """Where it keeps the blobs: ``sha256/<2 digits>/<digest>/data``."""
        return self.folder / "data" / "docker" / "registry" / "v2" / "blobs"

    def options(self) -> list[str]:
        """The options by which a verb reaches it."""
        ca = ["--ca", str(self.ca)] if self.ca else []
        return [*ca, *(["--authfile", str(self.authfile)] if self.authfile else [])]

    def start(self) -> None:
        """Start it, and wait until it listens."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [program(), "serve", str(self.folder / "config.yml")],
                stdout=log,
                stderr=log,
                # it has settings of its own by variables of this name
                env={
                    k: v for k, v in os.environ.items() if not k.startswith(("REGISTRY_", "OTEL_"))
                },
            )
        port = int(self.address.rpartition(":")[2])
        for _ in range(200):
            assert self.process.poll() is None, self.log
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.02)
        raise AssertionError(f"the registry does not listen: {self.log}")

    def kill(self) -> None:
        """Kill it, as a power cut would."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def registry(tmp_path: Path, auth: bool = False, tls: bool = False) -> Iterator[RealRegistry]:
    """A registry for the length of a block.

    Args:
        tmp_path: Where it keeps everything, below a folder of its own; its data is removed.
        auth: Ask for a password.
        tls: Speak TLS, with a certificate of an authority that nobody knows.
    """
    folder = tmp_path / f"registry-{free_port()}"
    (folder / "data").mkdir(parents=True)
    port = free_port()
    made = RealRegistry(folder, f"127.0.0.1:{port}")
    settings: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "info", "accesslog": {"disabled": False}},
        "storage": {
            "filesystem": {"rootdirectory": str(folder / "data")},
            "delete": {"enabled": True},
        },
        "http": {"addr": made.address},
    }
    if tls:
        made.ca, certificate, key = certificates(folder / "certs")
        settings["http"]["tls"] = {"certificate": str(certificate), "key": str(key)}
    if auth:
        (folder / "htpasswd").write_text(_HTPASSWD)
        settings["auth"] = {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}}
        made.authfile = write_authfile(folder / "auth.json", made.address)
    # JSON is YAML
    (folder / "config.yml").write_text(json.dumps(settings))
    made.start()
    try:
        yield made
    finally:
        made.kill()
        shutil.rmtree(folder / "data", ignore_errors=True)


@dataclass
class Proxy:
    """Stands before a registry and misbehaves.

    Attributes:
        target: The registry's address.
        before: Given method and path: None lets the request through, a number is answered instead,
            a negative one drops the connection after that many bytes of the request's body.
        after: Given method, path and the answer's body: the body that is handed on.
        asked: Method and path of every request.
        body: What is said with a number.
        address: ``127.0.0.1:PORT``.
    """

    target: str
    before: Callable[[str, str], int | None] = lambda method, path: None
    after: Callable[[str, str, bytes], bytes] = lambda method, path, body: body
    asked: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b'{"errors":[{"code":"UNKNOWN","message":"the proxy says so"}]}'
    address: str = ""

    def count(self, method: str, part: str) -> int:
        """How many requests of a method had something in their path."""
        return sum(verb == method and part in path for verb, path in self.asked)


class _Handler(Handler):
    proxy: Proxy

    def _pieces(self) -> Iterator[bytes]:
        """The request's body, as it comes."""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while length := int(self.rfile.readline(), 16):
                yield self.rfile.read(length)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left and (piece := self.rfile.read(min(left, 1 << 16))):
            left -= len(piece)
            yield piece

    def handle_any(self) -> None:
        proxy, method = self.proxy, self.command
        proxy.asked.append((method, self.path))
        said = proxy.before(method, self.path)
        body = bytearray()
        for piece in self._pieces():
            body += piece
            if said is not None and said < 0 and len(body) > -said:
                break
        if said is not None and said < 0:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if said is not None:
            self.answer(said, proxy.body, "application/json")
            return
        there = http.client.HTTPConnection(proxy.target, timeout=60)
        dropped = ("transfer-encoding", "content-length", "connection")
        try:
            # a client may send one header several times
            there.putrequest(method, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in dropped:
                    there.putheader(name, value)
            there.putheader("Content-Length", str(len(body)))
            there.endheaders(bytes(body))
            answer = there.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        finally:
            there.close()
        kept = [(k, v) for k, v in answer.getheaders() if k.lower() != "connection"]
        if method != "HEAD":
            data = proxy.after(method, self.path, data)
            kept = [(k, v) for k, v in kept if k.lower() not in dropped]
        self.send_response_only(answer.status)
        for name, value in kept:
            self.send_header(name, value)
        if method != "HEAD":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if method != "HEAD":
            self.wfile.write(data)


for _method in ("GET", "HEAD", "PUT", "POST", "PATCH", "DELETE"):
    # the names that http.server looks for
    setattr(_Handler, f"do_{_method}", _Handler.handle_any)


@contextlib.contextmanager
def proxy(target: str) -> Iterator[Proxy]:
    """A proxy before a registry that speaks HTTP; it is honest until it is told otherwise."""
    made = Proxy(target)
    handler = type("Handler", (_Handler,), {"proxy": made})
    with serving(handler) as port:
        made.address = f"127.0.0.1:{port}"
        yield made


def small_image(
    out: Path, slug: str = "runtime-py311", *, layers: Sequence[bytes] = (), twin: str = ""
) -> str:
    """A baked image of almost nothing in an out folder; its digest.

    Args:
        out: The out folder.
        slug: Its folder.
        layers: What is in the file of each layer; two small ones if none are given.
        twin: Write only a layout of this name beside the first.
    """
    folder = out / "images" / slug
    layout = Layout(folder / (twin or "oci"))
    made, ids = [], []
    for number, data in enumerate(layers or (b"one", slug.encode())):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            entry = tarfile.TarInfo(f"file{number}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        ids.append(f"sha256:{hashlib.sha256(packed.getvalue()).hexdigest()}")
        if twin:
            compressed = gzip.compress(packed.getvalue(), mtime=0)
            made.append(layout.blob(compressed, f"{KIND}.layer.v1.tar+gzip"))
        else:
            made.append(layout.blob(packed.getvalue(), f"{KIND}.layer.v1.tar"))
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": {"org.opencontainers.image.version": "1-py311"}},
        "rootfs": {"type": "layers", "diff_ids": ids},
    }
    manifest = layout.manifest(config, made)
    layout.finish(manifest)
    if not twin:
        record = {
            "schema": "tpuforge.image/1",
            "image": slug.partition("-py")[0],
            "python": "3.11",
            "flavour": "",
            "name": f"tpuforge/{slug.partition('-py')[0]}:1-py311",
            "manifest_digest": manifest["digest"],
            "labels": {},
            "inputs": {},
            "engine": {},
        }
        (folder / "image.json").write_text(json.dumps(record))
    return str(manifest["digest"])


def attach(
    out: Path,
    subject: str,
    slug: str = "runtime-py311",
    *,
    to: str = "",
    kinds: Sequence[str] = ("application/vnd.cyclonedx+json", "application/spdx+json"),
) -> list[str]:
    """Attach documents to an image, as sbom does; the digests of their manifests.

    Args:
        out: The out folder.
        subject: The image's digest.
        slug: Its folder.
        to: Say in the manifests that they are attached to another image.
        kinds: Their types.
    """
    folder = out / "images" / slug
    layout = Layout(folder / "referrers")
    about = {"mediaType": f"{KIND}.manifest.v1+json", "digest": to or subject, "size": 1}
    empty = layout.blob(b"{}", "application/vnd.oci.empty.v1+json")
    found = []
    for kind in kinds:
        body = {
            "schemaVersion": 2,
            "mediaType": f"{KIND}.manifest.v1+json",
            "artifactType": kind,
            "config": empty,
            "layers": [layout.json({"about": kind}, kind)],
            "subject": about,
        }
        found.append(layout.json(body, f"{KIND}.manifest.v1+json", artifactType=kind))
    kind = f"{KIND}.index.v1+json"
    index = layout.json({"schemaVersion": 2, "mediaType": kind, "manifests": found}, kind)
    tag = subject.replace(":", "-")
    layout.finish({**index, "annotations": {"org.opencontainers.image.ref.name": tag}})
    (folder / "attestations.json").write_text(json.dumps({"subject": subject}))
    return [str(entry["digest"]) for entry in found]
