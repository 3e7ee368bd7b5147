"""The measurement's small parts: the next wheel, bytes pulled again, the table, pip's settings."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from process_support import call
from reproduce_support import image, layer
from tpuforge import layout as oci
from tpuforge.errors import ForgeError
from tpuforge.images import measure, plain, reproduce
from tpuforge.images.loopback import Loopback
from tpuforge.pip_settings import PipSettings


def wheel(folder: Path) -> Path:
    folder.mkdir(parents=True)
    path = folder / "torch_tpu-0.2.0-cp311-cp311-manylinux_2_31_x86_64.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("torch_tpu/__init__.py", "a = '0.2.0'\n")
        file.writestr("torch_tpu-0.2.0.dist-info/METADATA", "Name: torch_tpu\nVersion: 0.2.0\n")
        file.writestr("torch_tpu-0.2.0.dist-info/RECORD", "")
    return path


def test_the_next_wheel_differs_in_its_metadata_alone(tmp_path: Path) -> None:
    made = measure.bumped(wheel(tmp_path / "a"), tmp_path / "b")
    assert made.name == "torch_tpu-0.2.1-cp311-cp311-manylinux_2_31_x86_64.whl"
    with zipfile.ZipFile(made) as file:
        assert file.read("torch_tpu/__init__.py") == b"a = '0.2.0'\n"
        text = file.read("torch_tpu-0.2.1.dist-info/METADATA")
        assert text == b"Name: torch_tpu\nVersion: 0.2.1\n"
        record = file.read("torch_tpu-0.2.1.dist-info/RECORD").decode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).decode().rstrip("=")
    assert f"torch_tpu-0.2.1.dist-info/METADATA,sha256={digest},{len(text)}\n" in record
    assert record.splitlines()[-1] == "torch_tpu-0.2.1.dist-info/RECORD,,"
    again = measure.bumped(wheel(tmp_path / "c"), tmp_path / "d")
    assert again.read_bytes() == made.read_bytes()


def test_processor_time_is_that_of_the_engine_and_of_children_that_ended() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\n"
    below = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    wait = f"{below}; print(flush=True); sys.stdin.read()"
    # there is no such engine: what has ended here so far
    before = measure.processor_time(-1)
    with subprocess.Popen(
        [sys.executable, "-c", wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        # what it started has ended, and it has not
        spent = measure.processor_time(engine.pid) - before
        assert 0.3 <= spent + 0.02 < 5
        # this process is not below it, but above
        assert measure.processor_time(os.getpid()) - before > spent
        engine.communicate()
    assert measure.processor_time(-1) - before >= 0.28


def test_only_what_is_not_there_is_pulled_again(tmp_path: Path) -> None:
    shared, new = layer({"a": b"1"}), layer({"b": b"2" * 100})
    before = oci.read_image(image(tmp_path / "1", shared, layer({"b": b"1"})))
    after = oci.read_image(image(tmp_path / "2", shared, new))
    wanted = after.manifest.size + after.config.size + len(new)
    assert measure.pulled_again(before, after) == wanted
    assert measure.pulled_again(after, after) == 0


def test_a_registry_counts_what_it_sends() -> None:
    registry = Loopback("127.0.0.1:1")
    line = '127.0.0.1 - - [30/Nov/2026:19:50:01 +0000] "{}" {} {} "" "docker/26"'
    for asked, code, count in (
        ("GET /v2/a/blobs/sha256:00 HTTP/1.1", 200, 100),
        ("GET /v2/a/b/manifests/sha256:00 HTTP/1.1", 200, 20),
        ("HEAD /v2/a/manifests/x HTTP/1.1", 200, 1000),
        ("GET /v2/a/blobs/sha256:01 HTTP/1.1", 404, 1000),
        ("GET /v2/ HTTP/1.1", 200, 2),
        ("PUT /v2/a/manifests/x HTTP/1.1", 201, 1000),
    ):
        registry.take(line.format(asked, code, count))
    assert registry.sent() == 120


def test_the_table_shows_medians_shares_and_what_was_not_run() -> None:
    rows = measure.rows()
    rows["bake.cold"].ours.samples = [40.0]
    rows["bake.cold"].plain.samples = [100.0]
    rows["pull.full"].ours.samples = [3.0, 1.0, 2.0]
    rows["pull.full"].plain.not_run = "no registry"
    rows["size.compressed"].ours.samples = [517_000_000]
    rows["size.compressed"].plain.samples = [678_000_000]
    rows["equal"].ours.samples = [10, 10]
    rows["equal"].plain.samples = [0, 1]
    document = {
        "rows": [
            {
                "what": r.what,
                "unit": r.unit,
                "tpuforge": r.ours.as_dict(),
                "plain": r.plain.as_dict(),
            }
            for r in rows.values()
        ]
    }
    lines = {line[0]: line[1:] for line in measure.table(document)}
    assert lines[rows["bake.cold"].what] == ("40.0 s", "1 min 40 s", "40%")
    assert lines[rows["pull.full"].what] == ("2.0 s (1.0 to 3.0)", "not run", "")
    assert lines[rows["size.compressed"].what] == ("517.0 MB", "678.0 MB", "76%")
    assert lines[rows["equal"].what] == ("10 of 10", "0 of 1", "")
    assert lines[rows["bake.bump"].what] == ("", "", "")


def settings(**more: object) -> PipSettings:
    values: dict[str, object] = {
        "index_url": "https://me:word@index.invalid/simple",
        "extra_index_urls": ("file:///srv/simple", "https://more.invalid/simple"),
        "find_links": ("/srv/wheels", "https://links.invalid/"),
        "no_index": False,
        "cert": None,
        "client_cert": None,
        "proxy": None,
        "trusted_hosts": (),
        "meddling": (),
    }
    return PipSettings(**(values | more))  # type: ignore[arg-type]


def test_the_plain_build_gets_pips_settings_without_folders_of_this_machine(tmp_path: Path) -> None:
    text = plain.pip_conf(settings(proxy="http://proxy.invalid:1"))
    assert "srv" not in text
    (tmp_path / "pip.conf").write_text(text)
    shown = call(
        [sys.executable, "-m", "pip", "config", "list"],
        env={"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "HOME": str(tmp_path)},
        check=True,
    ).stdout
    for wanted in (
        "global.index-url='\\nhttps://me:word@index.invalid/simple'",
        "global.extra-index-url='\\nhttps://more.invalid/simple'",
        "global.find-links='\\nhttps://links.invalid/'",
        "global.proxy='\\nhttp://proxy.invalid:1'",
    ):
        assert wanted in shown
    assert "no-index" not in shown


def test_a_file_that_is_not_there_is_said_before_anything_is_built(tmp_path: Path) -> None:
    way = plain.Plain({}, tmp_path / "work", "", "host")
    (tmp_path / "pip.whl").write_bytes(b"")
    with pytest.raises(ForgeError, match=r"gone\.conf cannot be read") as caught:
        way.settle(tmp_path / "pip.whl", str(tmp_path / "gone.conf"), str(tmp_path / "pip.whl"))
    assert caught.value.exit_code == 2
    assert "--no-plain" in caught.value.mend


def test_the_verb_says_what_it_cannot_do(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    done = call(
        [sys.executable, "-m", "tpuforge.images.measure", "--image", "builder"],
        env={
            "PYTHONPATH": str(root / "src"),
            "TPUFORGE_OUT": str(tmp_path),
            "PATH": "/usr/bin:/bin",
        },
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "holds no wheels, so the plain way has nothing to install" in done.stderr
    assert "mend:     ./forge measure --image runtime" in done.stderr


@pytest.mark.parametrize(
    ("verb", "words", "said"),
    [
        (measure, ("--times", "1"), "leaves nothing to compare"),
        (measure, (), "is not in the wheelhouse"),
        (reproduce, ("--times", "1"), "leaves nothing to compare"),
        (reproduce, ("--all",), "no image was baked here yet"),
        (reproduce, ("--all", "--image", "runtime"), "--all is every image"),
        (reproduce, ("--finished",), "--finished says nothing without --against"),
        (reproduce, ("--against", "localhost:1/x:tag"), "is not named by its digest"),
        (reproduce, ("--against", "x", "--image", "runtime"), "says itself which one it is"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: ModuleType,
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path))
    assert verb.main([*words, "--json"]) == 2
    error = json.loads((tmp_path / "results" / f"{verb.VERB}.json").read_text())["error"]
    assert said in error["found"] + error["expected"]
    assert error["mend"]
