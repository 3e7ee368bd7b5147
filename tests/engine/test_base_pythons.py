"""A base that carries a standalone CPython, made by the real mmdebstrap of real packages.

The build is one of the Python that runs the tests (``tests/standalone_support.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tarfile
from pathlib import Path

import pytest

from base_support import LOCK, borrow_debs, checkout, environment
from process_support import call
from standalone_support import SHORT, VERSION, make_build, pins_with
from tpuforge.paths import out_dir


@pytest.mark.slow
def test_a_base_of_another_python_holds_that_one_alone_and_it_works(tmp_path: Path) -> None:
    build = make_build(tmp_path)
    sha256 = hashlib.sha256(build.read_bytes()).hexdigest()
    pins = (LOCK.parents[1] / "pins.toml").read_text(encoding="utf-8")
    root = checkout(tmp_path / "tree", pins=pins_with(pins, sha256))
    out = tmp_path / "out"
    borrow_debs(Path(os.environ.get("TPUFORGE_OUT") or out_dir()), out)
    env = environment(root, out, TPUFORGE_PYTHON_STANDALONE=str(tmp_path))
    done = call(
        [sys.executable, "-m", "tpuforge.images.base", "--suite", "trixie-py312"],
        env=env,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((out / "base" / "trixie-py312.json").read_text(encoding="utf-8"))
    if record["drift"]:
        pytest.fail(f"the base is not the locked one: {record['drift']}")
    assert (record["standalone"]["version"], record["standalone"]["sha256"]) == (VERSION, sha256)
    assert not any("python" in package["name"] for package in record["packages"])
    layer = out / record["layout"] / "blobs" / "sha256" / record["tar_sha256"]
    with tarfile.open(layer) as tar:
        members = {member.name: member for member in tar}
        library = f"usr/local/lib/python{SHORT}"
        cached = f"{library}/__pycache__/os.cpython-{SHORT.replace('.', '')}.pyc"
        byte_code = tar.extractfile(cached)
        source = tar.extractfile(f"{library}/os.py")
        assert byte_code is not None
        assert source is not None
        # by hash and never checked: no time of this build is in it
        assert byte_code.read(8)[4:] == (1).to_bytes(4, "little")
        assert source.read() == Path(os.__file__).read_bytes()
    assert members["usr/local/bin/python3"].linkname == f"python{SHORT}"
    assert "usr/bin/tini" in members
    gone = (f"{library}/site-packages/", f"{library}/test/", "usr/local/include/P", "usr/bin/py")
    assert not [name for name in members if name.startswith(gone)]
    # the name of the set has not become that of any other
    assert {path.name for path in (out / "base").glob("*.json")} == {"trixie-py312.json"}
