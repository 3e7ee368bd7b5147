"""A real registry for tests: Debian's docker-registry on a free port of the loopback.

It can ask for a password and speak TLS, and it can be killed and started again. It is installed
without its service when it is missing and the tests run as root.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tpuforge.console import Progress
from tpuforge.images import host

USER, PASSWORD = "forge", "open sesame"
# bcrypt of the password above, the one kind that the registry takes
_HTPASSWD = f"{USER}:$2b$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n"


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def write_authfile(path: Path, address: str, user: str = USER, password: str = PASSWORD) -> Path:
    """A file of credentials as ``docker login`` writes it."""
    word = base64.b64encode(f"{user}:{password}".encode()).decode()
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
    settings = {
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
