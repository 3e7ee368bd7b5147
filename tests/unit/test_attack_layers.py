"""Layers that somebody made to harm who looks into them: refused, and soon."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from tpuforge import layout as oci
from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.release import inventory

KIND = "application/vnd.oci.image.layer.v1.tar"


def layer(tmp_path: Path, data: bytes, kind: str = KIND) -> oci.Blob:
    blob = oci.Blob(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data), kind)
    blob.path(tmp_path).parent.mkdir(parents=True)
    blob.path(tmp_path).write_bytes(data)
    return blob


def packed(name: str, data: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    return made.getvalue()


def header(size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header alone, which promises more than there is."""
    entry = tarfile.TarInfo("etc/os-release")
    entry.type = kind
    data = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    # a number that is no octal one has its first bit set
    data[124:136] = b"\x80" + size.to_bytes(11, "big", signed=True)
    if size < 0:
        data[124] = 0xFF
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    return bytes(data) + b"x" * 1024


def test_a_folder_in_the_place_of_a_blob_is_taken_away(tmp_path: Path) -> None:
    made = layer(tmp_path / "new", b"blob")
    at = made.path(tmp_path / "old")
    (at / "inside").mkdir(parents=True)
    (at.parent / "stray" / "inside").mkdir(parents=True)
    image = oci.Image(made, made, (made,), {}, {})
    oci.publish(tmp_path / "new", tmp_path / "old", image, "x:y")
    oci.prune(tmp_path / "old", image)
    assert [path.read_bytes() for path in at.parent.iterdir()] == [b"blob"]


GOOD = packed("etc/os-release", b"ID=x")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"no tar at all" * 100, KIND),
        (b"", KIND),
        (GOOD[:700], KIND),
        (b"no gzip", f"{KIND}+gzip"),
        (gzip.compress(GOOD, mtime=0)[:-12], f"{KIND}+gzip"),
        (b"no zstd", f"{KIND}+zstd"),
        (GOOD, "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"),
        # a reader that skips as far as it is told would not come back
        (header(1 << 62), KIND),
        (header(-1), KIND),
        (header(1 << 32, tarfile.XHDTYPE), KIND),
        (header(1 << 32, tarfile.GNUTYPE_LONGNAME), KIND),
    ],
)
def test_a_layer_that_is_none_is_damaged(tmp_path: Path, data: bytes, kind: str) -> None:
    blob = layer(tmp_path, data, kind)
    with pytest.raises(ForgeError, match=r"is not whole|is damaged") as caught:
        oci.content(tmp_path, blob)
    assert caught.value.exit_code == Exit.FAULT


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["+gzip", "+zstd"])
def test_a_layer_unpacks_to_what_one_of_its_size_may(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci, "_MOST_SMALL", 1 << 16)
    plain = packed("etc/zeros", b"\0" * (1 << 24))
    data = gzip.compress(plain) if kind == "+gzip" else zstd(plain)
    blob = layer(tmp_path, data, f"{KIND}{kind}")
    with pytest.raises(ForgeError, match="it unpacks to more than") as caught:
        oci.content(tmp_path, blob)
    assert caught.value.exit_code == Exit.FAULT
    monkeypatch.setattr(oci, "_MOST_SMALL", 1 << 25)
    assert oci.content(tmp_path, blob).unpacked == 1 << 24


def zstd(data: bytes) -> bytes:
    """Compressed in the coarsest way: blocks that repeat one byte, or are as they are."""
    made = bytearray(b"\x28\xb5\x2f\xfd\x00\x58")
    step = 1 << 17
    for at in range(0, len(data), step):
        piece = data[at : at + step]
        same = piece == piece[:1] * len(piece)
        last = at + step >= len(data)
        made += (len(piece) << 3 | (2 if same else 0) | last).to_bytes(3, "little")
        made += piece[:1] if same else piece
    return bytes(made)


def test_a_layer_has_so_many_files_and_none_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tarfile.TarInfo("x").tobuf() * 100 + bytes(1024)
    blob = layer(tmp_path, data)
    with oci.open_layer(tmp_path, blob) as tar:
        assert sum(1 for _ in tar) == 100
        assert tar.getmembers() == []
    monkeypatch.setattr(oci._Stream, "_left", 99)
    with pytest.raises(ForgeError, match="more than 1,000,000 files"):
        oci.content(tmp_path, blob)


def test_metadata_of_a_layer_is_read_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "_MOST_TEXTS", 1000)
    blob = layer(tmp_path, packed("var/lib/dpkg/status", b"x" * 1001))
    image = oci.Image(blob, blob, (blob,), {inventory.SYSTEM_LABEL: "x"}, {})
    with (
        Progress("tests", quiet=True) as progress,
        pytest.raises(ForgeError, match="metadata has more than 1,000 bytes"),
    ):
        inventory.read(tmp_path, image, progress)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("etc/os-release", b"A='never closed\nID=x\n"),
        ("opt/tpuforge/image.json", b"[" * 200_000),
        ("../../etc/os-release", b"ID=outside"),
    ],
)
def test_a_file_of_nonsense_is_no_mistake_of_ours(tmp_path: Path, name: str, data: bytes) -> None:
    blob = layer(tmp_path, packed(name, data))
    image = oci.Image(blob, blob, (blob,), {inventory.SYSTEM_LABEL: "x"}, {})
    with Progress("tests", quiet=True) as progress:
        found = inventory.read(tmp_path, image, progress)
    assert found.release == ({"ID": "x"} if name == "etc/os-release" else {})
    assert found.facts == {}
