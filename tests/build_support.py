"""What the tests of the build stage share: small wheels, a checkout of their own, a loopback index.

A verb reads ``lock/`` beside its own ``src/``, so a test gives it a checkout: a copy of ``src``
with locks that name wheels made here. Nothing in these tests leaves the machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from urllib.parse import unquote

from process_support import call
from server_support import Handler, serving

SRC = Path(__file__).resolve().parents[1] / "src"
LOCK = SRC.parent / "lock"
TORCH = "2.13.0+cpu"


def make_wheel(
    folder: Path, name: str, version: str, tags: str = "py3-none-any", payload: int = 2000
) -> Path:
    """A wheel that is a zip of random bytes, the same ones for the same name every time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{tags}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo(f"{name}/data.bin")
        archive.writestr(info, Random(path.name).randbytes(payload))
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def plain_env(**extra: str) -> dict[str, str]:
    """This process's environment without the user's settings of pip, Bazel or npm."""
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PIP_", "BAZEL", "USE_BAZEL", "TPUFORGE_"))
        and not key.lower().endswith("_proxy")
    }
    # no file, and an index that answers nothing: a test that wants one names it
    return env | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "NO_COLOR": "1"} | extra


@dataclass
class Checkout:
    """A copy of ``src`` with locks of its own."""

    root: Path
    wheels: Path
    python: str = "3.11"
    locks: dict[str, list[Path]] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def house(self) -> Path:
        return self.out / "wheelhouse"

    def lock(self, name: str, *wheels: Path) -> None:
        """Write a lock that names these wheels."""
        self.locks[name] = list(wheels)
        lines = []
        for wheel in wheels:
            project, version = wheel.name.split("-")[:2]
            lines.append(f"{project}=={version} \\\n    --hash=sha256:{sha256(wheel)}\n")
        path = self.root / "lock" / f"{name}-py{self.python.replace('.', '')}.txt"
        path.write_text("".join(lines))

    def all_wheels(self) -> list[Path]:
        return [wheel for wheels in self.locks.values() for wheel in wheels]

    def place(self, wheel: Path) -> Path:
        """Where a wheel belongs in the wheelhouse."""
        return self.house / sha256(wheel) / wheel.name

    def command(self, *arguments: str, module: str = "tpuforge.build.wheelhouse") -> list[str]:
        return [sys.executable, "-m", module, *arguments]

    def run(
        self,
        *arguments: str,
        module: str = "tpuforge.build.wheelhouse",
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a verb to its end, as a person would."""
        return call(
            self.command(*arguments, module=module),
            env=self.env(env),
            cwd=self.root,
            timeout=timeout,
        )

    def start(
        self,
        *arguments: str,
        module: str = "tpuforge.build.wheelhouse",
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a verb and leave it running."""
        return subprocess.Popen(
            self.command(*arguments, module=module),
            env=self.env(env),
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        return plain_env(PYTHONPATH=str(self.root / "src"), TPUFORGE_OUT=str(self.out)) | dict(
            extra or {}
        )


def make_checkout(root: Path, payload: int = 2000) -> Checkout:
    """A checkout whose locks name six small wheels, all of them in ``root/wheels``."""
    shutil.copytree(
        SRC / "tpuforge", root / "src" / "tpuforge", ignore=shutil.ignore_patterns("__pycache__")
    )
    (root / "lock").mkdir()
    shutil.copy(LOCK / "pins.toml", root / "lock")
    wheels = root / "wheels"
    made = Checkout(root, wheels)
    torch = make_wheel(
        wheels, "torch", TORCH, "cp311-cp311-manylinux_2_28_x86_64", payload=2 * payload
    )
    made.lock(
        "runtime",
        make_wheel(wheels, "alpha", "1.0", payload=payload),
        make_wheel(wheels, "beta", "2.0", "cp311-cp311-manylinux_2_17_x86_64", payload=payload),
        torch,
    )
    made.lock("smoke", make_wheel(wheels, "gamma", "3.0", payload=payload))
    made.lock("simulator", make_wheel(wheels, "delta", "4.0", payload=payload))
    made.lock("tools", make_wheel(wheels, "pip", "26.3", payload=payload))
    table = f"{sha256(torch)}  {torch.name}\n"
    (root / "lock" / "torch-cpu.sha256").write_text(table)
    return made


def use_torch_index(checkout: Checkout, index: str) -> None:
    """Let the pins of a checkout name another PyTorch index."""
    pins = checkout.root / "lock" / "pins.toml"
    lines = [
        f'index = "{index}"' if line.startswith("index = ") else line
        for line in pins.read_text().splitlines()
    ]
    pins.write_text("\n".join(lines) + "\n")


@dataclass
class Index:
    """A package index on the loopback, which can be told to misbehave.

    Attributes:
        files: File name to content.
        digests: Whether its pages state digests.
        as_json: Whether its pages are JSON.
        ranges: Whether it answers range requests.
        cut: File name to how many more answers break off after their first piece.
        pieces: Into how many pieces each file is cut.
        stall: Seconds to wait between two of them.
        status: A status that every page is answered with, instead of the page.
        stated: File name to a digest that its page states, true or not.
        seen: Path and Range header of every request.
        headers: All headers of every request.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    digests: bool = True
    as_json: bool = False
    ranges: bool = True
    cut: dict[str, int] = field(default_factory=dict)
    stall: float = 0.0
    pieces: int = 2
    status: int = 0
    stated: dict[str, str] = field(default_factory=dict)
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    @property
    def simple(self) -> str:
        return f"{self.url}/simple"

    def add(self, *wheels: Path) -> None:
        self.files |= {wheel.name: wheel.read_bytes() for wheel in wheels}

    def page(self, project: str) -> tuple[str, bytes]:
        names = [n for n in self.files if n.split("-")[0].lower().replace("_", "-") == project]
        digests = {
            n: self.stated.get(n) or hashlib.sha256(self.files[n]).hexdigest() for n in names
        }
        if self.as_json:
            files = [
                {
                    "filename": n,
                    "url": f"../../files/{n.replace('+', '%2B')}",
                    "hashes": {"sha256": digests[n]} if self.digests else {},
                }
                for n in names
            ]
            body = json.dumps({"files": files, "meta": {"api-version": "1.1"}})
            return "application/vnd.pypi.simple.v1+json", body.encode()
        links = [
            f'<a href="../../files/{n.replace("+", "%2B")}'
            + (f"#sha256={digests[n]}" if self.digests else "")
            + f'">{n}</a><br>'
            for n in names
        ]
        return "text/html; charset=utf-8", "\n".join(links).encode()


def _handler(index: Index) -> type[Handler]:
    class Serves(Handler):
        def do_GET(self) -> None:
            path = unquote(self.path)
            index.seen.append((path, self.headers.get("Range")))
            index.headers.append(dict(self.headers.items()))
            parts = path.strip("/").split("/")
            if parts[0] == "simple" and len(parts) == 2:
                if index.status:
                    return self.answer(index.status, b"no")
                kind, body = index.page(parts[1])
                return self.answer(200 if body else 404, body, kind)
            content = index.files.get(parts[-1]) if parts[0] == "files" else None
            if content is None:
                return self.answer(404, b"nothing here")
            return self.file(parts[-1], content)

        def file(self, name: str, content: bytes) -> None:
            start = 0
            asked = self.headers.get("Range")
            if asked and index.ranges:
                start = int(asked.removeprefix("bytes=").rstrip("-"))
                if start >= len(content):
                    return self.answer(416)
                self.send_response(206)
                last = len(content) - 1
                self.send_header("Content-Range", f"bytes {start}-{last}/{len(content)}")
            else:
                self.send_response(200)
            rest = content[start:]
            self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            size = max(1, len(rest) // index.pieces)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for first in range(0, len(rest), size):
                    if first and index.cut.get(name, 0) > 0:
                        index.cut[name] -= 1
                        self.close_connection = True
                        return
                    if first and index.stall:
                        time.sleep(index.stall)
                    self.wfile.write(rest[first : first + size])
                    self.wfile.flush()

    return Serves


@contextlib.contextmanager
def serve(
    index: Index, wrap: Callable[[socket.socket], socket.socket] | None = None
) -> Iterator[Index]:
    """Run an index on a free port of the loopback."""
    with serving(_handler(index), wrap) as port:
        index.url = f"http{'s' if wrap else ''}://127.0.0.1:{port}"
        yield index


def make_certificate(folder: Path) -> tuple[Path, Callable[[socket.socket], socket.socket]]:
    """A certificate for the loopback that nobody has signed, and what makes a socket use it."""
    path, key = folder / "loopback.pem", folder / "key.pem"
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
    name = "-subj /CN=loopback -addext subjectAltName=IP:127.0.0.1"
    command = ["openssl", *request.split(), *name.split(), "-keyout", str(key), "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key)
    return path, lambda plain: context.wrap_socket(plain, server_side=True)


def kill(child: subprocess.Popen[str]) -> None:
    """kill -9 for a verb and everything in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
