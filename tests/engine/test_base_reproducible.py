"""Two builds of the base agree in every byte, whatever the folder, umask, zone, locale and host."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from base_support import DEAD, base, borrow_debs, environment
from process_support import call
from tpuforge.paths import ROOT, out_dir


@pytest.mark.slow
def test_a_second_build_elsewhere_has_the_same_digest(tmp_path: Path) -> None:
    real = Path(os.environ.get("TPUFORGE_OUT") or out_dir())
    code, output = base(environment(ROOT, real), timeout=900)
    assert code == 0, output
    first = json.loads((real / "base" / "bookworm.json").read_text(encoding="utf-8"))
    if first["drift"]:
        pytest.fail(f"the base is not the locked one: {first['drift']}")

    out = tmp_path / "ein Ordner, größer"
    borrow_debs(real, out)
    # every package is there, so no mirror is needed: the build itself is offline
    env = environment(ROOT, out, TPUFORGE_DEBIAN_MIRROR=DEAD)
    env |= {"TZ": "Asia/Tokyo", "LC_ALL": "C", "HOME": str(tmp_path), "SOURCE_DATE_EPOCH": "1"}
    # another host name as well, for those who may have one
    uts = ["unshare", "--uts"] if os.geteuid() == 0 else []
    rename = "hostname elsewhere; " if uts else ""
    verb = (sys.executable, "-m", "tpuforge.images.base")
    done = call(
        [*uts, "sh", "-c", f'{rename}umask 077; exec "$@"', "sh", *verb],
        env=env,
        cwd=tmp_path,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    second = json.loads((out / "base" / "bookworm.json").read_text(encoding="utf-8"))
    assert second == first
    assert first["unpacked_bytes"] < 200e6
