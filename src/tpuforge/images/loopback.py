"""A registry of one's own on the loopback, for as long as something is measured with it.

It is Debian's package ``docker-registry``: no service is started, its data lie in a folder that is
given, and it counts the bytes that it sends.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tpuforge.console import Progress
from tpuforge.errors import ForgeError
from tpuforge.host import apt_install, can_install, which
from tpuforge.paths import json_text
from tpuforge.process import run

_PACKAGE = "docker-registry"
_START_S = 30.0
_LIFE_S = 7200.0
_SETTLE_S = 0.5
# one line of its access log, as Apache's combined format has it
_SENT = re.compile(r'"GET /v2/\S+/(?:blobs|manifests)/\S+ HTTP/[\d.]+" 200 (\d+)')


class Loopback:
    """A running registry.

    Args:
        address: Its host and port.

    Attributes:
        address: The same.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._sent = 0

    def take(self, line: str) -> None:
        """Read a line of its log.

        Args:
            line: The line.
        """
        found = _SENT.search(line)
        if found is not None:
            self._sent += int(found[1])

    def sent(self) -> int:
        """Bytes of blobs and manifests that it has sent so far."""
        # it writes its log when an answer has gone out, a moment after the reader has all of it
        time.sleep(_SETTLE_S)
        return self._sent


@contextlib.contextmanager
def loopback(folder: Path, progress: Progress) -> Iterator[Loopback]:
    """Have a registry on the loopback, with no data in it.

    Args:
        folder: A new folder for its data.
        progress: Told what happens.

    Yields:
        The registry; it ends with the block.

    Raises:
        ForgeError: If there is none and none can be installed, or it does not answer.
    """
    program = which(_PACKAGE)
    if not program and can_install():
        apt_install([_PACKAGE], progress)
        program = which(_PACKAGE)
    if not program:
        raise ForgeError(
            f"{_PACKAGE} is not on PATH",
            expected="a registry to push to and pull from",
            mend=f"sudo apt-get install {_PACKAGE}",
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    registry = Loopback(f"127.0.0.1:{port}")
    folder.mkdir(parents=True)
    config = folder / "config.yml"
    # YAML takes JSON as it is
    settings = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": registry.address},
    }
    config.write_text(json_text(settings), encoding="utf-8")
    stop, ended = threading.Event(), list[str]()

    def serve() -> None:
        try:
            done = run(
                [program, "serve", config],
                timeout=_LIFE_S,
                check=False,
                stop=stop,
                on_line=registry.take,
                doing=_PACKAGE,
            )
            ended.append(done.tail)
        except ForgeError as error:
            ended.append(error.found)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        deadline = time.monotonic() + _START_S
        while not _answers(port):
            if ended or time.monotonic() > deadline:
                raise ForgeError(
                    f"{_PACKAGE} does not answer at {registry.address}\n{''.join(ended)}",
                    expected=f"an answer within {_START_S:.0f} s",
                    mend=f"try by hand: {program} serve {config}",
                )
            time.sleep(0.1)
        yield registry
    finally:
        stop.set()
        thread.join()


def _answers(port: int) -> bool:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        client.request("GET", "/v2/")
        return client.getresponse().status == 200
    except OSError:
        return False
    finally:
        client.close()
