"""Downloads that resume, end, and believe nothing but the digest."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_support import Index, free_port, make_certificate, serve
from tpuforge.download import (
    Access,
    Patience,
    RefusedError,
    UnreachableError,
    Web,
    WrongBytesError,
)

CONTENT = bytes(range(256)) * 8000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
HASTY = Patience(connect_s=2.0, read_s=0.5, pause_s=0.01)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture
def index() -> Iterator[Index]:
    with serve(Index(files={"a.whl": CONTENT})) as running:
        yield running


class Taker:
    """One download and its bookkeeping."""

    def __init__(self, folder: Path) -> None:
        self.partial = folder / "partial"
        self.counted = 0
        self.stop = threading.Event()

    def count(self, number: int) -> None:
        self.counted += number

    def take(self, url: str, patience: Patience = HASTY, access: Access | None = None) -> int:
        web = Web(access or Access(), patience)
        return web.download(url, self.partial, DIGEST, on_bytes=self.count, stop=self.stop)


@pytest.fixture
def taker(tmp_path: Path) -> Taker:
    return Taker(tmp_path)


def test_a_whole_file(index: Index, taker: Taker) -> None:
    assert taker.take(f"{index.url}/files/a.whl") == len(CONTENT)
    assert taker.partial.read_bytes() == CONTENT
    assert taker.counted == len(CONTENT)


def test_goes_on_where_it_was_cut(index: Index, taker: Taker) -> None:
    index.cut["a.whl"] = 2
    assert taker.take(f"{index.url}/files/a.whl") == len(CONTENT)
    assert taker.partial.read_bytes() == CONTENT
    half = len(CONTENT) // 2
    assert [asked for _, asked in index.seen] == [
        None,
        f"bytes={half}-",
        f"bytes={half + half // 2}-",
    ]


def test_takes_up_what_a_dead_run_left(index: Index, taker: Taker) -> None:
    taker.partial.write_bytes(CONTENT[:1000])
    assert taker.take(f"{index.url}/files/a.whl") == len(CONTENT) - 1000
    assert taker.partial.read_bytes() == CONTENT


def test_starts_over_where_a_server_knows_no_ranges(index: Index, taker: Taker) -> None:
    index.ranges = False
    taker.partial.write_bytes(CONTENT[:1000])
    assert taker.take(f"{index.url}/files/a.whl") == len(CONTENT)
    assert taker.partial.read_bytes() == CONTENT
    assert taker.counted == len(CONTENT)


@pytest.mark.parametrize("left", [b"x" * 1000, CONTENT + b"more", b"x" * len(CONTENT)])
def test_starts_over_when_the_left_part_was_of_another_file(
    index: Index, taker: Taker, left: bytes
) -> None:
    taker.partial.write_bytes(left)
    taker.take(f"{index.url}/files/a.whl")
    assert taker.partial.read_bytes() == CONTENT
    assert taker.counted == len(CONTENT)


def test_a_whole_left_file_costs_no_bytes(index: Index, taker: Taker) -> None:
    taker.partial.write_bytes(CONTENT)
    assert taker.take(f"{index.url}/files/a.whl") == 0


def test_wrong_bytes_do_not_stay(index: Index, taker: Taker) -> None:
    index.files["a.whl"] = b"evil" * 1000
    with pytest.raises(WrongBytesError, match=hashlib.sha256(b"evil" * 1000).hexdigest()):
        taker.take(f"{index.url}/files/a.whl")
    assert not taker.partial.exists()
    assert taker.counted == 0


def test_not_found_is_not_tried_again(index: Index, taker: Taker) -> None:
    with pytest.raises(RefusedError, match="HTTP 404"):
        taker.take(f"{index.url}/files/b.whl")
    assert len(index.seen) == 1


def test_nobody_there_ends_soon_and_is_remembered(taker: Taker) -> None:
    url = f"http://127.0.0.1:{free_port()}/files/a.whl"
    web = Web(Access(), HASTY)
    started = time.monotonic()
    for _ in range(20):
        with pytest.raises(UnreachableError, match="refused"):
            web.download(url, taker.partial, DIGEST, on_bytes=taker.count, stop=taker.stop)
    assert time.monotonic() - started < 5


def test_a_server_that_falls_silent_is_given_up(index: Index, taker: Taker) -> None:
    index.stall = 3.0
    index.ranges = False
    with pytest.raises(UnreachableError, match="no answer in time"):
        taker.take(f"{index.url}/files/a.whl", Patience(read_s=0.2, pause_s=0.01, all_tries=2))


def test_a_trickle_is_given_up(index: Index, taker: Taker) -> None:
    index.files["a.whl"] = CONTENT[:2000]
    index.stall, index.pieces = 0.1, 20
    patience = Patience(pause_s=0.01, slow_s=0.2, slow_rate=1e6)
    with pytest.raises(UnreachableError, match=r"bytes in .* \(3 attempts\)"):
        taker.take(f"{index.url}/files/a.whl", patience)


def test_a_pause_of_a_slow_server_is_borne(index: Index, taker: Taker) -> None:
    index.stall = 0.3
    assert taker.take(f"{index.url}/files/a.whl") == len(CONTENT)


def test_stops_when_told(index: Index, taker: Taker) -> None:
    taker.stop.set()
    with pytest.raises(InterruptedError):
        taker.take(f"{index.url}/files/a.whl")


def test_credentials_go_to_their_server_and_no_further(
    index: Index, taker: Taker, tmp_path: Path
) -> None:
    address = index.url.replace("http://", "http://me:se%40cret@")
    taker.take(f"{address}/files/a.whl")
    assert index.headers[-1]["Authorization"] == "Basic bWU6c2VAY3JldA=="
    other = Taker(tmp_path / "other")
    other.partial.parent.mkdir()
    other.take(f"{index.url}/files/a.whl")
    assert "Authorization" not in index.headers[-1]


def test_a_proxy_is_used(index: Index, taker: Taker) -> None:
    with pytest.raises(RefusedError, match="404"):
        taker.take("http://files.example/files/a.whl", access=Access(proxy=index.url))
    assert index.seen[-1][0] == "http://files.example/files/a.whl"


def test_certificates(tmp_path: Path, taker: Taker) -> None:
    certificate, secure = make_certificate(tmp_path)
    with serve(Index(files={"a.whl": CONTENT}), secure) as index:
        url = f"{index.url}/files/a.whl"
        with pytest.raises(UnreachableError, match="certificate is not trusted"):
            taker.take(url)
        assert taker.take(url, access=Access(certificates=str(certificate))) == len(CONTENT)
        taker.partial.unlink()
        hosts = frozenset({"127.0.0.1"})
        assert taker.take(url, access=Access(unverified_hosts=hosts)) == len(CONTENT)


def test_a_page_of_another_scheme_is_refused() -> None:
    with pytest.raises(RefusedError, match="not a web address"):
        Web(Access(), HASTY).page("file:///etc/passwd", "text/html")


def test_a_page_is_asked_for_twice(index: Index) -> None:
    index.status = 503
    with pytest.raises(UnreachableError, match="HTTP 503"):
        Web(Access(), HASTY).page(f"{index.url}/simple/a/", "text/html")
    assert len(index.seen) == 2
