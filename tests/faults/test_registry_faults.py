"""Registries that refuse, lie, break off or are full, and people who get something wrong.

The registry is a real one; a proxy before it does what a real one does only on a bad day.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bake_support import verb
from process_support import disk_of
from registry_support import (
    PASSWORD,
    Proxy,
    RealRegistry,
    attach,
    proxy,
    registry,
    small_image,
    without_credentials,
    write_authfile,
)
from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.registry import Reference, Registry

PUSH, PULL = "tpuforge.images.push", "tpuforge.images.pull"
SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An out folder of its own, and a user without credentials."""
    return without_credentials(tmp_path, monkeypatch)


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[RealRegistry]:
    """A registry that lets everybody in."""
    with registry(tmp_path) as made:
        yield made


@pytest.fixture
def liar(plain: RealRegistry) -> Iterator[Proxy]:
    """A proxy before it."""
    with proxy(plain.address) as made:
        yield made


def said(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def pushed(to: str, *options: str) -> dict[str, object]:
    """Push, which must succeed; the verb's data."""
    done = verb(PUSH, "--to", to, "--json", *options)
    assert done.returncode == 0, said(done)
    data: dict[str, object] = json.loads(done.stdout)["data"]
    return data


def test_wrong_and_missing_credentials_are_refused_without_a_word_of_them(
    tmp_path: Path, out: Path
) -> None:
    small_image(out)
    with registry(tmp_path, auth=True) as real:
        wrong = write_authfile(tmp_path / "wrong.json", real.address, password="hunter2-hunter2")
        denied = verb(PUSH, "--to", f"{real.address}/x/y", "--authfile", str(wrong))
        nobody = verb(PUSH, "--to", f"{real.address}/x/y")
        sent = real.log.count('"POST ')
    assert denied.returncode == nobody.returncode == 2
    assert "does not accept your credentials" in denied.stderr
    assert "wants credentials, and there are none" in nobody.stderr
    assert f"docker login {real.address}" in nobody.stderr
    assert sent == 0
    secret = json.loads(wrong.read_text())["auths"][real.address]["auth"]
    kept = "".join(path.read_text() for path in (out / "results").iterdir())
    for word in ("hunter2", secret):
        assert word not in said(denied) + kept


def test_the_users_own_files_give_credentials_that_appear_nowhere(
    tmp_path: Path, out: Path
) -> None:
    digest = small_image(out)
    folder = tmp_path / ".docker"
    folder.mkdir()
    with registry(tmp_path, auth=True, tls=True) as real:
        assert real.authfile is not None and real.ca is not None
        real.authfile.rename(folder / "config.json")
        to = f"{real.address}/x/y"
        done = verb(PUSH, "--to", to, "--ca", str(real.ca), "--json")
        taken = verb(PULL, f"{to}@{digest}", "--ca", str(real.ca))
    assert done.returncode == taken.returncode == 0, said(done) + said(taken)
    secret = json.loads((folder / "config.json").read_text())["auths"][real.address]["auth"]
    kept = "".join(p.read_text(errors="replace") for p in out.rglob("*") if p.is_file())
    for word in (PASSWORD, secret):
        assert word not in said(done) + said(taken) + kept + real.log


def test_a_file_of_credentials_that_is_not_one_is_not_shown(tmp_path: Path, out: Path) -> None:
    small_image(out)
    bad = tmp_path / "auth.json"
    bad.write_text('{"auths": hunter2')
    done = verb(PUSH, "--to", "127.0.0.1:1/x/y", "--authfile", str(bad))
    assert done.returncode == 2
    assert f"the file of credentials {bad} cannot be read" in done.stderr
    assert "hunter2" not in said(done)


def test_an_unknown_authority_is_refused(tmp_path: Path, out: Path) -> None:
    digest = small_image(out)
    with registry(tmp_path, tls=True) as real:
        pushing = verb(PUSH, "--to", f"{real.address}/x/y")
        pulling = verb(PULL, f"{real.address}/x/y@{digest}")
        plain = verb(PUSH, "--to", f"{real.address}/x/y", "--plain-http", "--tries", "1")
        log = real.log
    for done in (pushing, pulling):
        assert done.returncode == 2
        assert f"the certificate of the registry {real.address} cannot be trusted" in done.stderr
        assert "--ca FILE" in done.stderr
    # HTTP is not quietly made HTTPS without a look at its certificate
    assert plain.returncode == 2, said(plain)
    assert '"POST ' not in log and '"PUT ' not in log


def test_a_flipped_byte_is_found_before_anything_is_sent(out: Path, plain: RealRegistry) -> None:
    small_image(out)
    layer = max((out / "images").rglob("blobs/sha256/*"), key=lambda path: path.stat().st_size)
    data = bytearray(layer.read_bytes())
    data[7] ^= 1
    layer.write_bytes(data)
    done = verb(PUSH, "--to", f"{plain.address}/x/y")
    assert done.returncode == 1
    assert layer.name in done.stderr and "nothing was sent" in done.stderr
    assert '"POST ' not in plain.log and '"PUT ' not in plain.log


@pytest.mark.parametrize("where", ["record", "manifest", "bytes"])
def test_what_belongs_to_another_image_is_not_attached(
    out: Path, plain: RealRegistry, where: str
) -> None:
    digest = small_image(out)
    other = f"sha256:{'0' * 64}"
    attach(out, digest, to=other if where == "manifest" else "")
    folder = out / "images" / "runtime-py311"
    if where == "record":
        (folder / "attestations.json").write_text(json.dumps({"subject": other}))
    if where == "bytes":
        for path in (folder / "referrers" / "blobs").rglob("*"):
            if path.is_file() and b"about" in path.read_bytes():
                path.write_bytes(path.read_bytes().replace(b"about", b"abouT"))
    done = verb(PUSH, "--to", f"{plain.address}/x/y")
    assert done.returncode == 1, said(done)
    assert "./forge sbom" in done.stderr
    assert '"PUT ' not in plain.log


def test_a_tag_of_another_image_is_moved_only_when_told(out: Path, plain: RealRegistry) -> None:
    to = f"{plain.address}/x/y"
    small_image(out, "pallas-py311")
    first = pushed(to, "--image", "pallas")
    small_image(out)
    before = plain.log.count('"PUT ')
    done = verb(PUSH, "--to", to)
    assert done.returncode == 1
    assert f"{to}:1-py311 names another image: {first['digest']}" in done.stderr
    assert plain.log.count('"PUT ') == before
    second = pushed(to, "--move")
    assert second["digest"] != first["digest"]
    # whoever named the first by its digest still gets it
    held = verb(PULL, f"{to}:1-py311@{first['digest']}", "--json")
    assert held.returncode == 0, said(held)
    assert str(second["digest"]) in json.loads(held.stdout)["notes"][0]


def test_a_tag_that_somebody_moves_meanwhile_is_noticed(
    out: Path, plain: RealRegistry, liar: Proxy
) -> None:
    small_image(out, "pallas-py311")
    other = pushed(f"{plain.address}/x/y", "--image", "pallas", "--tag", "theirs")["digest"]
    manifest = (out / "images/pallas-py311/oci/blobs/sha256" / str(other)[7:]).read_bytes()
    small_image(out)

    def after(method: str, path: str, body: bytes) -> bytes:
        moved = method == "GET" and path.endswith("/mine") and liar.count("PUT", "/mine")
        return manifest if moved else body

    liar.after = after
    # a header that tells the truth would give the game away: registries without one exist
    done = verb(PUSH, "--to", f"{liar.address}/x/y", "--tag", "mine", "--move")
    assert done.returncode == 1, said(done)
    assert str(other) in done.stderr


def test_a_registry_that_lies_about_a_manifest_or_a_blob(
    out: Path, plain: RealRegistry, liar: Proxy
) -> None:
    digest = small_image(out)
    attach(out, digest)
    pushed(f"{plain.address}/x/y")
    for path in (out / "images").rglob("*"):
        if path.is_file():
            # nothing here may stand in for what the registry gives
            path.unlink()
    liar.after = lambda method, path, body: body.replace(b"sha256", b"sha25A")
    manifest = verb(PULL, f"{liar.address}/x/y@{digest}")
    liar.after = lambda method, path, body: (
        body.replace(b"file0", b"fileX") if "/blobs/" in path else body
    )
    blob = verb(PULL, f"{liar.address}/x/y@{digest}", "--tries", "2")
    liar.after = lambda method, path, body: body.replace(b'"about"', b'"aBout"')
    attached = verb(PULL, f"{liar.address}/x/y@{digest}", "--tries", "2")
    for done in (manifest, blob, attached):
        assert done.returncode == 1, said(done)
        assert "digest" in done.stderr
    assert not list((out / "pulled").rglob("pulled.json"))
    liar.after = lambda method, path, body: body
    honest = verb(PULL, f"{liar.address}/x/y@{digest}")
    assert honest.returncode == 0, said(honest)


def test_skopeo_writes_no_more_than_the_manifest_names(
    out: Path, plain: RealRegistry, liar: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = small_image(out)
    pushed(f"{plain.address}/x/y")
    # the rest is skopeo's own files
    monkeypatch.setattr("tpuforge.registry._SLACK", 1 << 20)
    liar.after = lambda method, path, body: (
        body + b"x" * (4 << 20) if b"file0" in body and "/blobs/" in path else body
    )
    with Progress("tests", quiet=True) as progress:
        ref = Reference.parse(f"{liar.address}/x/y@{digest}")
        with pytest.raises(ForgeError, match="gave more than the manifest names") as caught:
            Registry(progress, tries=2).copy_out(ref, out / "taken")
    assert caught.value.exit_code == Exit.FAULT


def test_a_registry_that_keeps_other_bytes_is_found_by_reading_back(
    out: Path, plain: RealRegistry
) -> None:
    small_image(out, layers=[b"q" * 5000])
    pushed(f"{plain.address}/x/y")
    largest = max(plain.blobs.rglob("data"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes().replace(b"qqqq", b"qqqr"))
    # it says that it has the blob, so nothing is sent
    pushed(f"{plain.address}/x/y")
    done = verb(PUSH, "--to", f"{plain.address}/x/y", "--read-back")
    assert done.returncode == 1, said(done)
    assert "gave a blob with the digest" in done.stderr


def test_500_for_a_while_is_waited_for_and_for_ever_given_up(out: Path, liar: Proxy) -> None:
    small_image(out)
    answers = iter([500])
    liar.before = lambda method, path: next(answers, None)
    done = verb(PUSH, "--to", f"{liar.address}/x/y")
    assert done.returncode == 0, said(done)
    assert "500 UNKNOWN: the proxy says so; attempt 2 of 5 in 1 s" in done.stderr
    # uploads alone fail: this is skopeo's part
    small_image(out, "pallas-py311")
    liar.before = lambda method, path: 500 if method in {"POST", "PATCH"} else None
    done = verb(PUSH, "--image", "pallas", "--to", f"{liar.address}/x/z", "--tries", "2")
    assert done.returncode == 2, said(done)
    assert "given up after 2 attempts" in done.stderr
    assert "run the same command again" in done.stderr


def test_a_dropped_connection_is_taken_up_again(out: Path, plain: RealRegistry) -> None:
    digest = small_image(out, layers=[os.urandom(3_000_000), b"small"])
    with proxy(plain.address) as liar:
        drops = iter([-1_000_000, -1_000_000])
        liar.before = lambda method, path: next(drops, None) if method == "PATCH" else None
        data = pushed(f"{liar.address}/x/y")
    assert data["digest"] == digest
    assert data["new_blobs"] == 3


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (507, b'{"errors":[{"code":"UNKNOWN","message":"no room"}]}'),
        (403, b'{"errors":[{"code":"DENIED","message":"storage quota exceeded"}]}'),
    ],
)
def test_a_full_registry_is_not_asked_again(
    out: Path, liar: Proxy, status: int, body: bytes
) -> None:
    small_image(out)
    liar.body = body
    liar.before = lambda method, path: status if method in {"POST", "PATCH", "PUT"} else None
    done = verb(PUSH, "--to", f"{liar.address}/x/y")
    assert done.returncode == 2, said(done)
    assert "is full, or its quota is used up" in done.stderr
    assert "attempt" not in done.stderr


def test_full_disks_on_either_side(tmp_path: Path, out: Path, plain: RealRegistry) -> None:
    digest = small_image(out, layers=[os.urandom(600_000)])
    with disk_of(tmp_path / "small", "300k", lazy=True) as small:
        with registry(small) as full:
            there = verb(PUSH, "--to", f"{full.address}/x/y", "--tries", "2")
        pushed(f"{plain.address}/x/y")
        here = verb(PULL, f"{plain.address}/x/y@{digest}", TPUFORGE_OUT=str(small / "out"))
    assert there.returncode == here.returncode == 2
    assert "has room" in there.stderr or "is full" in there.stderr, there.stderr
    assert "the disk is full" in here.stderr, here.stderr


def test_a_registry_killed_in_the_midst_comes_back_and_the_push_goes_on(
    out: Path, plain: RealRegistry, liar: Proxy
) -> None:
    layers = [os.urandom(200_000) for _ in range(4)]
    digest = small_image(out, layers=layers)
    restarted = threading.Event()

    def again() -> None:
        time.sleep(0.5)
        plain.start()
        restarted.set()

    def before(method: str, path: str) -> int | None:
        if method == "PUT" and "/uploads/" in path and liar.count("PUT", "/uploads/") == 3:
            plain.kill()
            threading.Thread(target=again).start()
        return None

    liar.before = before
    data = pushed(f"{liar.address}/x/y")
    assert restarted.wait(10)
    assert data["digest"] == digest
    again_too = pushed(f"{plain.address}/x/y", "--read-back")
    assert (again_too["new_blobs"], again_too["known_blobs"]) == (0, 5)


def test_a_push_that_was_killed_sends_only_the_rest(
    out: Path, plain: RealRegistry, liar: Proxy
) -> None:
    small_image(out, layers=[os.urandom(200_000) for _ in range(4)])
    stuck = threading.Event()

    def before(method: str, path: str) -> int | None:
        if method == "PUT" and "/uploads/" in path and liar.count("PUT", "/uploads/") > 2:
            stuck.set()
            time.sleep(20)
        return None

    liar.before = before
    command = [sys.executable, "-m", PUSH, "--to", f"{liar.address}/x/y"]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    running = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, start_new_session=True)
    assert stuck.wait(20)
    running.send_signal(signal.SIGTERM)
    assert running.wait(15) == 130
    liar.before = lambda method, path: None
    data = pushed(f"{liar.address}/x/y")
    known = data["known_blobs"]
    assert isinstance(known, int) and 2 <= known < 5
    assert data["new_blobs"] == 5 - known


def test_nobody_listens(out: Path) -> None:
    digest = small_image(out)
    done = verb(PUSH, "--to", "127.0.0.1:1/x/y", "--tries", "2")
    assert done.returncode == 2
    assert "refused; attempt 2 of 2" in done.stderr
    done = verb(PULL, f"127.0.0.1:1/x/y@{digest}", "--tries", "1")
    assert done.returncode == 2
    assert "given up after 1 attempts" in done.stderr
