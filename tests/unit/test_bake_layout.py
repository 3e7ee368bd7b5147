"""Reading, publishing and comparing OCI layouts, on small ones made here."""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from tpuforge import layout as oci
from tpuforge.errors import Exit, ForgeError
from tpuforge.images import bake
from tpuforge.images.reproduce import differences
from tpuforge.paths import ROOT
from tpuforge.process import clean_env
from tpuforge.zstd import Reader

NAME = "tpuforge/runtime:1-torch2-py311"


def zstd(data: bytes) -> bytes:
    """Compress with the system's library."""
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_compressBound.restype = library.ZSTD_compress.restype = ctypes.c_size_t
    room = ctypes.create_string_buffer(library.ZSTD_compressBound(ctypes.c_size_t(len(data))))
    size = library.ZSTD_compress(
        room, ctypes.c_size_t(len(room)), data, ctypes.c_size_t(len(data)), 3
    )
    return room.raw[:size]


def tar(files: dict[str, bytes], *, mode: int = 0o644, mtime: int = 1) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), mode, mtime
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def make(
    folder: Path, *layers: bytes, labels: dict[str, str] | None = None, machine: str = "amd64"
) -> Path:
    """A layout with one image of zstd layers."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data), "mediaType": media_type}

    kind = "application/vnd.oci.image"
    config = {"architecture": machine, "config": {"Labels": labels or {}}, "rootfs": {}}
    manifest = {
        "config": put(json.dumps(config).encode(), f"{kind}.config.v1+json"),
        "layers": [put(zstd(layer), f"{kind}.layer.v1.tar+zstd") for layer in layers],
    }
    entry = put(json.dumps(manifest).encode(), f"{kind}.manifest.v1+json")
    (folder / "index.json").write_text(json.dumps({"manifests": [entry]}))
    return folder


def test_zstd_gives_back_what_was_compressed() -> None:
    data = bytes(range(256)) * 40_000
    assert Reader(io.BytesIO(zstd(data))).read() == data
    reader = Reader(io.BytesIO(zstd(data)))
    assert reader.read(10) + reader.read(7) == data[:17]


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_cut_or_foreign_stream_is_refused(cut: int) -> None:
    data = zstd(b"x" * 100_000 + bytes(range(256)) * 100)
    with pytest.raises(ForgeError, match="ends too early"):
        Reader(io.BytesIO(data[: -min(cut, len(data) // 2)])).read()
    with pytest.raises(ForgeError, match="zstd stream is damaged"):
        Reader(io.BytesIO(b"not zstd at all")).read()


def test_sizes_and_names_of_layers(tmp_path: Path) -> None:
    site = "opt/venv/lib/python3.11/site-packages"
    layout = make(
        tmp_path / "a",
        tar({"var/lib/dpkg/status": b"12345"}),
        tar({f"{site}/torch-2.13.0+cpu.dist-info/METADATA": b"", f"{site}/torch/x.py": b"123"}),
        tar(
            {
                f"{site}/setuptools-1.dist-info/METADATA": b"",
                f"{site}/setuptools/_vendor/inner-1.dist-info/METADATA": b"",
                f"{site}/numpy-2.dist-info/METADATA": b"",
            }
        ),
        tar({"opt/tpuforge/smoke/cli.py": b"1", "opt/tpuforge/smoke/bench/run.py": b"1"}),
        tar({}),
    )
    image = oci.read_image(layout)
    contents = [oci.content(layout, layer) for layer in image.layers]
    assert [content.unpacked for content in contents] == [5, 3, 0, 2, 0]
    assert [content.what for content in contents] == [
        "Debian base",
        "torch 2.13.0+cpu",
        "2 packages: numpy, setuptools, …",
        "files in opt/tpuforge/smoke",
        "an empty layer",
    ]
    assert {content.newest[0] for content in contents[:-1]} == {1}
    assert image.compressed == sum(blob.path(layout).stat().st_size for blob in image.blobs)


def test_missing_short_and_changed_blobs_are_found(tmp_path: Path) -> None:
    layout = make(tmp_path / "a", tar({"a": b"1"}), tar({"b": b"2"}))
    image = oci.read_image(layout)
    assert oci.missing(layout, image) == ""
    assert oci.wrong(layout, image) == []
    first, second = (layer.path(layout) for layer in image.layers)
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    assert oci.missing(layout, image) == ""
    assert oci.wrong(layout, image) == [image.layers[0]]
    # a look that reads nothing old tells as much as the times do
    written = first.stat().st_mtime_ns
    assert oci.damaged_since(layout, image, written) == ""
    assert "was written to" in oci.damaged_since(layout, image, written - 1)
    first.write_bytes(data[:-1])
    assert "bytes instead of" in oci.missing(layout, image)
    second.unlink()
    assert oci.wrong(layout, image) == list(image.layers)


def test_a_blob_is_known_by_its_name_alone(tmp_path: Path) -> None:
    layout = make(tmp_path / "a", tar({"a": b"1"}), tar({"b": b"22"}))
    image = oci.read_image(layout)
    first, second = image.layers
    (layout / "blobs" / "sha256" / "half.tmp").write_bytes(b"x")
    assert oci.digests(tmp_path / "none") == []
    assert oci.digests(layout) == sorted(blob.digest for blob in image.blobs)
    for blob in image.layers:
        assert oci.examine(layout, blob.digest) == (True, oci.content(layout, blob))
    assert oci.examine(layout, first.digest, inside=False) == (True, None)
    assert oci.examine(layout, image.config.digest) == (True, None)
    # in the midst of the stream, behind its end, and no stream at all
    whole = second.path(layout).read_bytes()
    for data in (whole[:-3] + b"xyz", whole + b"x", b"", b"x" * len(whole)):
        second.path(layout).write_bytes(data)
        assert not oci.examine(layout, second.digest)[0]
    # of the right digest, but no tar
    data = zstd(b"x" * 2000)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    (layout / "blobs" / "sha256" / digest.removeprefix("sha256:")).write_bytes(data)
    assert oci.examine(layout, digest) == (True, None)


def test_each_blob_is_read_once_while_the_others_are_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = make(tmp_path / "a", tar({"a": b"1"}), tar({"b": b"22"}), tar({"c": b"3"}))
    image = oci.read_image(done)
    first, second, third = image.layers
    layout = tmp_path / "written"
    known = {second.digest: oci.Content(7, "known")}
    read: dict[str, bool] = {}
    seen = threading.Event()
    examine = oci.examine

    def counted(layout: Path, digest: str, *, inside: bool) -> tuple[bool, oci.Content | None]:
        assert digest not in read
        read[digest] = inside
        seen.set()
        return examine(layout, digest, inside=inside)

    monkeypatch.setattr(oci, "examine", counted)
    with bake.Readings(layout, known) as readings:
        oci.seed(done, layout, [first.digest])
        assert seen.wait(30), "nobody read it before all were written"
        oci.seed(done, layout, [second.digest])
        found = readings.of(image.layers)
    assert read == {first.digest: True, second.digest: False}
    assert found[first.digest] == (True, oci.content(done, first))
    assert found[second.digest] == (True, known[second.digest])
    assert not found[third.digest][0]


def test_an_image_for_another_machine_or_a_list_of_images_is_refused(tmp_path: Path) -> None:
    """Whole, of its digest, and nothing that was baked: from a copy of somebody else's layout."""
    with pytest.raises(ForgeError, match="its image is for linux/arm64 instead of linux/amd64"):
        oci.read_image(make(tmp_path / "a", tar({"a": b"1"}), machine="arm64"))
    layout = make(tmp_path / "b", tar({"a": b"1"}))
    listed = (layout / "index.json").read_bytes()
    digest = hashlib.sha256(listed).hexdigest()
    (layout / "blobs" / "sha256" / digest).write_bytes(listed)
    kind = "application/vnd.oci.image.index.v1+json"
    entry = {"digest": f"sha256:{digest}", "size": len(listed), "mediaType": kind}
    (layout / "index.json").write_text(json.dumps({"manifests": [entry]}))
    with pytest.raises(ForgeError, match="names a list of images instead of one") as caught:
        oci.read_image(layout)
    assert caught.value.exit_code == Exit.FAULT


def test_readings_that_nobody_ends_keep_no_process_alive(tmp_path: Path) -> None:
    begin = f"Readings(Path({str(tmp_path)!r}), {{}}).__enter__()"
    lines = ["from pathlib import Path", "from tpuforge.images.bake import Readings", begin]
    words = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(
        words, env=clean_env(PYTHONPATH=str(ROOT / "src")), timeout=60, check=False
    )
    assert done.returncode == 0


def test_a_changed_manifest_or_config_is_refused(tmp_path: Path) -> None:
    layout = make(tmp_path / "a", tar({"a": b"1"}))
    image = oci.read_image(layout)
    for blob in (image.config, image.manifest):
        path = blob.path(layout)
        kept = path.read_bytes()
        path.write_bytes(kept + b" ")
        with pytest.raises(ForgeError, match="has another digest") as caught:
            oci.read_image(layout)
        assert caught.value.exit_code == 1
        path.write_bytes(kept)
    (layout / "index.json").unlink()
    with pytest.raises(ForgeError, match="is not whole"):
        oci.read_image(layout)


def test_publishing_keeps_the_old_image_whole_until_the_index_changes(tmp_path: Path) -> None:
    shared = tar({"base": b"1"})
    old, new = make(tmp_path / "old", shared, tar({"a": b"1"})), make(tmp_path / "new", shared)
    target = tmp_path / "target"
    first, second = oci.read_image(old), oci.read_image(new)
    oci.publish(old, target, first, NAME)
    assert oci.read_image(target).manifest == first.manifest
    oci.publish(new, target, second, NAME)
    assert oci.read_image(target).manifest == second.manifest
    assert oci.wrong(target, first) == []
    oci.prune(target, second)
    assert oci.wrong(target, second) == []
    assert len(list((target / "blobs" / "sha256").iterdir())) == 3


def test_the_archive_for_docker_load_names_everything(tmp_path: Path) -> None:
    layout = make(tmp_path / "a", tar({"a": b"1"}), tar({"b": b"2"}))
    image = oci.read_image(layout)
    buffer = io.BytesIO()
    oci.write_archive(layout, image, NAME, buffer)
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as archive:
        files = {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
    (legacy,) = json.loads(files["manifest.json"])
    assert legacy["RepoTags"] == [NAME]
    assert [files[name] for name in legacy["Layers"]] == [
        layer.path(layout).read_bytes() for layer in image.layers
    ]
    (entry,) = json.loads(files["index.json"])["manifests"]
    assert entry["digest"] == image.manifest.digest
    assert entry["annotations"]["io.containerd.image.name"] == f"docker.io/{NAME}"


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (tar({"etc/a": b"2"}), "layer 1 (files in etc): etc/a: content"),
        (tar({"etc/a": b"1"}, mode=0o600), "etc/a: mode 0644 and 0600"),
        (tar({"etc/a": b"1"}, mtime=2), "etc/a: time 1 and 2"),
        (tar({"etc/a": b"1", "etc/b": b""}), "etc/b: only in the second"),
    ],
)
def test_differences_are_named(tmp_path: Path, second: bytes, said: str) -> None:
    one, two = make(tmp_path / "1", tar({"etc/a": b"1"})), make(tmp_path / "2", second)
    found = list(differences(one, two))
    assert any(said in line for line in found), found


def test_labels_that_differ_are_named_and_equal_images_are_not(tmp_path: Path) -> None:
    same = tar({"a": b"1"})
    one, two = make(tmp_path / "1", same), make(tmp_path / "2", same, labels={"x": "y"})
    assert list(differences(one, make(tmp_path / "3", same))) == []
    (line,) = differences(one, two)
    assert line.startswith("config: config: ")


def test_another_order_is_named(tmp_path: Path) -> None:
    one = make(tmp_path / "1", tar({"a": b"1", "b": b"2"}))
    two = make(tmp_path / "2", tar({"b": b"2", "a": b"1"}))
    assert list(differences(one, two)) == ["layer 1 (files in /): the same files in another order"]
