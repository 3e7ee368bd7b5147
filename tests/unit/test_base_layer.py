"""The base layer: the same bytes from any tar of the same files, and only what an image needs."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tpuforge.console import Progress
from tpuforge.errors import ForgeError
from tpuforge.images import base as recipe
from tpuforge.images import oci
from tpuforge.images.base import keep, named_base
from tpuforge.pins import Suite

EPOCH = 1795996800


def make_tar(path: Path, entries: list[tuple[str, bytes]], *, mtime: float, owner: str) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in entries:
            entry = tarfile.TarInfo(name)
            entry.mtime, entry.uname, entry.gname = mtime, owner, owner
            if data == b"DIR":
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            elif data.startswith(b"HARD "):
                entry.type, entry.linkname = tarfile.LNKTYPE, data[5:].decode()
            else:
                entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


ENTRIES = [
    ("./", b"DIR"),
    ("./etc/", b"DIR"),
    ("./etc/passwd", b"root\n"),
    ("./etc/hostname", b"machine\n"),
    ("./usr/zz", b"body"),
    ("./usr/aa", b"HARD ./usr/zz"),
    ("./usr/Főtanúsítvány.crt", b"x"),
    ("./var/log/dpkg.log", b"now"),
]


def layer(source: Path, target: Path) -> oci.Layer:
    return oci.write_layer(
        source,
        target,
        epoch=EPOCH,
        keep=keep,
        edits={"etc/passwd": lambda old: old + b"tpu\n"},
        folders=[oci.Folder("home/tpu", 1000)],
    )


def test_order_times_and_owners_names_of_the_tar_do_not_matter(tmp_path: Path) -> None:
    one = make_tar(tmp_path / "1.tar", ENTRIES, mtime=1.5, owner="root")
    shuffled = [*ENTRIES[4:5], *reversed(ENTRIES[:4]), *ENTRIES[5:]]
    two = make_tar(tmp_path / "2.tar", shuffled, mtime=2e9, owner="wheel")
    first, second = layer(one, tmp_path / "1"), layer(two, tmp_path / "2")
    assert first == second
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_a_layer_holds_one_time_and_not_what_the_machine_left(tmp_path: Path) -> None:
    source = make_tar(tmp_path / "1.tar", ENTRIES, mtime=1.5, owner="root")
    made = layer(source, tmp_path / "layer")
    with tarfile.open(tmp_path / "layer") as tar:
        members = {member.name: member for member in tar}
        assert {member.mtime for member in members.values()} == {EPOCH}
        assert {member.uname for member in members.values()} == {""}
        passwd = tar.extractfile("etc/passwd")
        assert passwd is not None
        assert passwd.read() == b"root\ntpu\n"
        assert members["home/tpu"].uid == 1000
        assert tar.extractfile("usr/aa").read() == b"body"  # type: ignore[union-attr]
    assert "etc/hostname" not in made.names
    assert "var/log/dpkg.log" not in made.names
    assert made.unpacked == len(b"root\ntpu\n" + b"body" + b"x")


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("usr/share/doc/bash/copyright", True),
        ("usr/share/doc/bash/changelog.gz", False),
        ("usr/share/doc/libfoo", True),
        ("usr/share/man/man1/bash.1.gz", False),
        ("tmp", True),
        ("tmp/left", False),
        ("dev/null", False),
        ("etc/resolv.conf", False),
        ("etc/ssl/certs/ca-certificates.crt", True),
        ("var/cache/ldconfig/aux-cache", False),
    ],
)
def test_what_is_kept(name: str, kept: bool) -> None:
    assert keep(name, False) is kept


def test_a_file_to_edit_that_is_missing_is_an_error(tmp_path: Path) -> None:
    source = make_tar(tmp_path / "1.tar", ENTRIES[4:5], mtime=1, owner="")
    with pytest.raises(ForgeError, match="has no etc/passwd"):
        layer(source, tmp_path / "layer")


def test_a_hard_link_without_its_file_is_an_error(tmp_path: Path) -> None:
    entries = [*ENTRIES, ("./usr/link", b"HARD ./var/log/dpkg.log")]
    source = make_tar(tmp_path / "1.tar", entries, mtime=1, owner="")
    with pytest.raises(ForgeError, match="hard link"):
        layer(source, tmp_path / "layer")


def layout(tmp_path: Path) -> tuple[Path, str]:
    source = make_tar(tmp_path / "1.tar", ENTRIES, mtime=1, owner="")
    made = layer(source, tmp_path / "layer")
    folder = tmp_path / "layout"
    folder.mkdir()
    return folder, oci.write_layout(folder, tmp_path / "layer", made, epoch=EPOCH, title="base")


def test_a_layout_names_its_layer_by_digest(tmp_path: Path) -> None:
    folder, digest = layout(tmp_path)
    assert oci.check_layout(folder, digest) == ""
    blobs = folder / "blobs" / "sha256"
    manifest = json.loads((blobs / digest.removeprefix("sha256:")).read_bytes())
    config = json.loads((blobs / manifest["config"]["digest"].removeprefix("sha256:")).read_bytes())
    assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]
    assert config["created"] == "2026-11-30T00:00:00Z"


def test_every_flipped_blob_of_a_layout_is_noticed(tmp_path: Path) -> None:
    folder, digest = layout(tmp_path)
    blobs = sorted((folder / "blobs" / "sha256").iterdir())
    assert len(blobs) == 3
    for blob in blobs:
        good = blob.read_bytes()
        blob.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        assert "has the digest" in oci.check_layout(folder, digest)
        blob.write_bytes(good)
    assert oci.check_layout(folder, digest) == ""
    blobs[0].unlink()
    assert "not a complete OCI layout" in oci.check_layout(folder, digest)


def test_another_base_is_taken_by_digest_only() -> None:
    good = f"docker-image://registry.example/debian@sha256:{'a' * 64}"
    assert named_base(good) == good
    for bad in (
        "docker-image://debian:bookworm",
        "debian",
        good[:-1],
        f"oci-layout://x{good[14:]}",
    ):
        with pytest.raises(ForgeError, match="by digest"):
            named_base(bad)


WHOLE: dict[str, Any] = {
    "schema": recipe.SCHEMA,
    "key": "1",
    "layout": "base/x",
    "manifest_digest": "sha256:1",
    "tar_sha256": "2",
    "unpacked_bytes": 3,
    "packages": [],
    "drift": [],
}


@pytest.mark.parametrize(
    ("value", "whole"),
    [
        (WHOLE, True),
        (WHOLE | {"drift": ["bash: 1 -> 2"], "lock_sha256": "4"}, True),
        *(
            ({name: value for name, value in WHOLE.items() if name != gone}, False)
            for gone in WHOLE
        ),
        ([], False),
        (WHOLE | {"schema": "tpuforge.base/0"}, False),
        (WHOLE | {"layout": None}, False),
        (WHOLE | {"drift": "bash"}, False),
        (WHOLE | {"drift": [1]}, False),
    ],
)
def test_a_record_that_is_not_whole_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object, whole: bool
) -> None:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path))
    path = recipe.record_path("bookworm")
    path.parent.mkdir()
    path.write_text(json.dumps(value))
    assert recipe._read("bookworm") == (value if whole else None)
    with Progress("base", quiet=True) as progress:
        suite = Suite("bookworm", ())
        # there is no layout, so even a whole record has nothing ready
        assert recipe._ready(suite, "1", progress, release=True, verify=True) is None
