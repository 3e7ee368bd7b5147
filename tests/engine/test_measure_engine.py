"""The measurement's real parts: an engine of its own, pulls from the loopback, the plain build."""

from __future__ import annotations

import os
import socket
import zipfile
from pathlib import Path

import pytest

from bake_support import ROOT, Engine, result
from reproduce_support import image as small_image
from reproduce_support import layer
from tpuforge import layout as oci
from tpuforge.console import Progress
from tpuforge.host import remove_tree, unmount_below
from tpuforge.images import daemon, measure
from tpuforge.images.loopback import loopback
from tpuforge.images.plain import Plain
from tpuforge.lockfile import Locked, read_lock
from tpuforge.paths import out_dir


def test_pulls_are_timed_and_counted_in_an_engine_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0 or not daemon.usable_dockerd():
        pytest.skip("an engine of one's own needs root and dockerd; measure says so too")
    if any(name == "docker0" for _, name in socket.if_nameindex()):
        pytest.skip("with another engine's docker0 there is no loopback in it; measure says so too")
    # twice: the second time shows that nothing was left of the first
    monkeypatch.setattr(measure, "_PULLS", 2)
    shared = layer({"a": os.urandom(200_000)})
    layouts = (
        small_image(tmp_path / "old", shared, layer({"b": b"1"})),
        small_image(tmp_path / "new", shared, layer({"b": os.urandom(50_000)})),
    )
    target = measure._target(measure.argparse.Namespace(image=None, python=None, flavour=None))
    out = tmp_path / "out"
    try:
        with Progress("tests", quiet=True) as progress, measure.own_engine(out, progress) as engine:
            assert engine["private"]
            bench = measure.Bench(target, out, engine, progress, measure.rows(), [])
            with loopback(out / "registry", progress) as registry:
                measure.pulls(bench, registry, lambda row: row.ours, "small", layouts)
    finally:
        unmount_below(out)
        remove_tree(out)
    images = [oci.read_image(layout) for layout in layouts]
    assert bench.notes == []
    full, bump = (bench.rows[f"pulled.{kind}"].ours.samples for kind in ("full", "bump"))
    # an engine may ask for a manifest twice
    assert all(images[0].compressed <= sent < images[0].compressed + 5000 for sent in full), full
    least = measure.pulled_again(*images)
    assert 50_000 < least < 60_000
    assert all(least <= sent < least + 5000 for sent in bump), bump
    assert len(bench.rows["pull.full"].ours.samples) == 2
    assert len(bench.rows["push.bump"].ours.samples) == 1


def test_the_plain_build_leaves_no_setting_behind(engine: Engine, tmp_path: Path) -> None:
    """pip's settings and certificates go in as secrets; what is asked for comes out installed."""
    name = "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as file:
        file.writestr("tiny.py", "")
        file.writestr(
            "tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
        )
        file.writestr(
            "tiny-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr("tiny-1.0.dist-info/RECORD", "")
    (tmp_path / "pip.conf").write_text("[global]\nno-index = true\n# secret-of-mine\n")
    (tmp_path / "ca.pem").write_text("secret-of-mine\n")
    (pip,) = (p for p in read_lock(ROOT / "lock" / "tools-py311.txt") if p.name == "pip")
    result("tpuforge.build.wheelhouse")
    base = result("tpuforge.images.base")
    (wheel,) = (out_dir() / "wheelhouse" / pip.sha256).glob("*.whl")
    named = f"oci-layout://{out_dir() / base['layout']}@{base['manifest_digest']}"
    way = Plain(engine.record, tmp_path / "work", named, "host")
    way.settle(wheel, str(tmp_path / "pip.conf"), str(tmp_path / "ca.pem"))
    # pip itself is asked for by the Dockerfile: it is at hand, as the next torch_tpu would be
    way.ask_for([Locked("tiny", "1.0", "")], [tmp_path / name, wheel])
    layout = tmp_path / "oci"
    assert way.build([f"--output=type=oci,tar=false,dest={layout}"]) > 0
    found = oci.read_image(layout)
    paths: dict[str, int] = {}
    with oci.open_layer(layout, found.layers[-1]) as tar:
        for entry in tar:
            paths[entry.name] = entry.size
            body = tar.extractfile(entry) if entry.isreg() else None
            assert body is None or b"secret-of-mine" not in body.read()
    assert any(path.endswith("site-packages/tiny.py") for path in paths)
    assert b"secret-of-mine" not in found.config.path(layout).read_bytes()
    assert paths.get("etc/pip.conf", 0) == 0

    # the next version takes its place, as the next torch_tpu does
    newer = measure.bumped(tmp_path / name, tmp_path / "next")
    way.ask_for([Locked("tiny", "1.0.1", "")], [newer, wheel])
    again = tmp_path / "again"
    way.build([f"--output=type=oci,tar=false,dest={again}"])
    after = oci.read_image(again)
    with oci.open_layer(again, after.layers[-1]) as tar:
        # read as a stream: the names are not kept
        names = [entry.name for entry in tar]
    assert any(path.endswith("tiny-1.0.1.dist-info/METADATA") for path in names)
    assert not any("tiny-1.0.dist-info" in path for path in names)
    # all that was installed is in one layer, so all of it is pulled again
    assert measure.pulled_again(found, after) >= after.layers[-1].size
