"""Servers on the loopback, for the length of a block."""

from __future__ import annotations

import contextlib
import functools
import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path


class Handler(http.server.BaseHTTPRequestHandler):
    """Says nothing, and answers in one call."""

    protocol_version = "HTTP/1.1"
    # a body that waits for the acknowledgement of its head costs 40 ms an answer
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest shows what matters."""

    def answer(self, status: int, body: bytes = b"", kind: str = "", **headers: str) -> None:
        """Answer; ``Www_Authenticate="Basic"`` is a header. A HEAD gets no body."""
        self.send_response(status)
        for name, value in {"Content-Type": kind, **headers}.items():
            if value:
                self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def serving(
    handler: Callable[..., http.server.BaseHTTPRequestHandler],
    wrap: Callable[[socket.socket], socket.socket] | None = None,
) -> Iterator[int]:
    """Serve; the port. ``wrap`` makes the socket speak TLS."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    if wrap is not None:
        server.socket = wrap(server.socket)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def files_of(path: Path) -> Callable[..., http.server.BaseHTTPRequestHandler]:
    """What serves the files of a folder."""
    return functools.partial(_Files, directory=str(path))
