"""Runs inside an image: two indexes on the loopback, and installations that could bring CUDA in.

The main index serves CUDA builds of torch, of the locked number and of a higher one, and what they
need. The index of CPU builds answers under its real name, with a certificate that the container
was told to trust. What each command came to is printed as JSON.

    python guard_indexes.py INDEX TORCH FOLDER < commands.json

FOLDER holds ca.pem, own.pem and own-key.pem.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import ssl
import subprocess
import sys
import threading
import urllib.parse
import zipfile
from pathlib import Path
from typing import Any

ROOM = Path("/tmp/indexes")
NEWER = "2.99.0"


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """Put an empty wheel into an index."""
    shelf = folder / name
    shelf.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {one}\n" for one in needs)
    with zipfile.ZipFile(shelf / f"{stem}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        file.writestr(f"{info}/WHEEL", tags)
        names = ("METADATA", "WHEEL", "RECORD")
        file.writestr(f"{info}/RECORD", "".join(f"{info}/{one},,\n" for one in names))
    links = "".join(
        f'<a href="{urllib.parse.quote(one.name)}">{one.name}</a>\n'
        for one in sorted(shelf.glob("*.whl"))
    )
    (shelf / "index.html").write_text(f"<!DOCTYPE html><html><body>\n{links}</body></html>\n")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def serve(folder: Path, port: int, certificate: tuple[str, str] | None = None) -> None:
    """Serve a folder, until the process ends."""
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def installed(python: str) -> dict[str, str]:
    """The packages of an environment, by name."""
    lines = "import json; from importlib.metadata import distributions as d; "
    lines += "print(json.dumps({one.name.lower(): one.version for one in d()}))"
    done = subprocess.run([python, "-I", "-c", lines], capture_output=True, check=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> None:
    """Serve, run the commands, tell."""
    index, torch, keys = sys.argv[1:]
    commands: dict[str, dict[str, Any]] = json.load(sys.stdin)
    public = torch.partition("+")[0]
    pages = ROOM / "main" / "simple"
    for version in (public, NEWER):
        wheel(pages, "torch", version, "nvidia-cublas")
    wheel(pages, "nvidia-cublas", "13.0")
    wheel(pages, "wants-torch", "1.0", "torch")
    wheel(pages, "wants-new-torch", "1.0", f"torch>={NEWER}")
    builds = ROOM / "cpu" / urllib.parse.urlsplit(index).path.strip("/")
    for version in (torch, f"{NEWER}+cpu"):
        wheel(builds, "torch", version)
    serve(ROOM / "main", 8000)
    serve(ROOM / "cpu", 443, (f"{keys}/own.pem", f"{keys}/own-key.pem"))
    with Path("/etc/ssl/certs/ca-certificates.crt").open("a", encoding="utf-8") as bundle:
        bundle.write(Path(keys, "ca.pem").read_text(encoding="utf-8"))
    told = {}
    for name, one in commands.items():
        env = {key: value for key, value in os.environ.items() if key not in one["without"]}
        done = subprocess.run(
            ["sh", "-c", one["command"]],
            env={**env, **one["with"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=120,
        )
        packages = installed(one["python"])
        told[name] = {
            "code": done.returncode,
            "said": done.stdout,
            "torch": packages.get("torch"),
            "nvidia": [found for found in packages if re.match("nvidia", found)],
            "wants": [found for found in packages if found.startswith("wants")],
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
