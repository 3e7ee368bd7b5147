"""The baked image, looked at from outside and from inside."""

from __future__ import annotations

import hashlib
import json

import pytest

from bake_support import HARDENED, ROOT, Image, verb


def test_an_unchanged_bake_does_nothing_and_says_why(image: Image) -> None:
    done = verb("tpuforge.images.bake")
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert "no input of it has changed" in done.stdout
    assert image.record["run_line"] in done.stdout


def test_every_blob_has_its_digest_and_nothing_else_is_there(image: Image) -> None:
    blobs = {
        f"sha256:{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (image.layout / "blobs" / "sha256").iterdir()
    }
    assert all(name == f"sha256:{digest}" for name, digest in blobs.items())
    manifest = json.loads(
        (image.layout / "blobs/sha256" / image.record["manifest_digest"][7:]).read_bytes()
    )
    named = {
        image.record["manifest_digest"],
        manifest["config"]["digest"],
        *(layer["digest"] for layer in manifest["layers"]),
    }
    assert set(blobs) == named
    assert image.record["config_digest"] == manifest["config"]["digest"]
    assert image.record["compressed_bytes"] == sum(
        p.stat().st_size for p in (image.layout / "blobs" / "sha256").iterdir()
    )
    # annotations say the same as labels
    assert manifest["annotations"]["io.tpuforge.libtpu.wheel.sha256"] in (
        ROOT / "lock" / "runtime-py311.txt"
    ).read_text(encoding="utf-8")


def test_the_engine_has_the_very_same_image(image: Image) -> None:
    done = image.engine.run("image", "inspect", "--format", "{{.Id}}", image.name)
    assert done.stdout.strip() in (image.record["manifest_digest"], image.record["config_digest"])


def test_the_labels_tell_what_is_in_it(image: Image) -> None:
    done = image.engine.run("image", "inspect", "--format", "{{json .Config.Labels}}", image.name)
    labels = json.loads(done.stdout)
    lock = (ROOT / "lock" / "runtime-py311.txt").read_bytes()
    assert labels["io.tpuforge.lock.sha256"] == hashlib.sha256(lock).hexdigest()
    for name in ("torch", "torch-tpu", "libtpu"):
        digest = labels[f"io.tpuforge.{name}.wheel.sha256"]
        assert f"--hash=sha256:{digest}".encode() in lock
    assert len(labels["io.tpuforge.xla.commit"]) == 40
    assert labels["io.tpuforge.image"] == "runtime"
    assert labels["org.opencontainers.image.title"] == "TorchTPU runtime"
    assert str(ROOT) not in done.stdout


@pytest.mark.parametrize("user", ["1000:1000", "4321:4321", "0:0"])
def test_it_works_locked_down_as_any_user(image: Image, user: str) -> None:
    done = image.run("versions", options=(*HARDENED, f"--user={user}"))
    assert done.returncode == 0, done.stderr
    assert "torch       2.13.0+cpu" in done.stdout
    assert done.stderr == ""


def test_it_is_not_root_and_torch_computes(image: Image) -> None:
    program = (
        "import os, torch; assert torch.ones(2, 2).sum() == 4; "
        "print(os.getuid(), os.environ['LD_PRELOAD'], 'tcmalloc' in open('/proc/self/maps').read())"
    )
    done = image.run("python", "-c", program, options=HARDENED)
    assert done.stdout.split() == [
        "1000",
        "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
        "True",
    ], done.stderr


def test_the_environment_is_the_lock_and_pip_check_agrees(image: Image) -> None:
    assert image.run("python", "-m", "pip", "check", options=HARDENED).returncode == 0
    done = image.run("versions", "--all", options=HARDENED)
    names = {line.partition("==")[0].lower().replace("_", "-") for line in done.stdout.split()}
    lock = (ROOT / "lock" / "runtime-py311.txt").read_text(encoding="utf-8")
    locked = {line.partition("==")[0] for line in lock.splitlines() if "==" in line}
    assert names == locked | {"pip"}


def test_nothing_is_left_over(image: Image) -> None:
    program = (
        "find / -xdev \\( "
        "-path '/var/log/*' -o -path '/var/lib/apt/lists/*_*' -o -path '/var/cache/apt/*.bin' "
        "-o -path '/root/?*/*' -o -path '/tmp/?*' -o -name .cache -o -name pip-selfcheck.json "
        "-o -name '*.whl' -o -name direct_url.json -o -path '/var/cache/ldconfig/*' "
        "\\) -type f -print; cat /etc/machine-id 2>/dev/null; "
        "find / -xdev -newermt @1795996801 -type f -print"
    )
    done = image.run("sh", "-c", program, options=("--network=none", "--user=0:0"))
    # the engine itself writes these three into every container
    written = {"/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/.dockerenv"}
    assert set(done.stdout.split()) - written == set(), done.stdout


def test_byte_code_is_never_stale(image: Image) -> None:
    program = (
        "import pathlib, torch; p = pathlib.Path(torch.__file__); "
        "c = p.parent / '__pycache__' / '__init__.cpython-311.pyc'; "
        "print(int.from_bytes(c.read_bytes()[4:8], 'little'))"
    )
    done = image.run("python", "-c", program, options=HARDENED)
    # PEP 552: 1 is hash-based and unchecked
    assert done.stdout.strip() == "1", done.stderr


def test_pip_cannot_bring_cuda_back(image: Image) -> None:
    """A loopback index that offers a newer torch, as the main index would."""
    program = r"""
set -e
mkdir -p /tmp/index && cd /tmp/index
python - <<'P'
import zipfile
for version in ("2.13.0", "2.14.0"):
    with zipfile.ZipFile(f"torch-{version}-py3-none-any.whl", "w") as z:
        info = f"torch-{version}.dist-info/"
        meta = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        z.writestr(info + "METADATA", meta)
        z.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(info + "RECORD", "")
with zipfile.ZipFile("wantsnew-1-py3-none-any.whl", "w") as z:
    info = "wantsnew-1.dist-info/"
    meta = "Metadata-Version: 2.1\nName: wantsnew\nVersion: 1\nRequires-Dist: torch>=2.14\n"
    z.writestr(info + "METADATA", meta)
    z.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    z.writestr(info + "RECORD", "")
P
pip="python -m pip install --no-cache-dir --no-index --find-links /tmp/index"
$pip torch
$pip -U torch
$pip --isolated -U torch
env -u PIP_CONSTRAINT $pip -U torch
if $pip wantsnew; then echo "a newer torch came in"; exit 1; fi
python -c "from importlib.metadata import version; print('kept', version('torch'))"
"""
    done = image.run("bash", "-c", program, options=("--network=none", "--user=0:0"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kept 2.13.0+cpu" in done.stdout
    assert "constraint" in done.stdout + done.stderr


def test_unpacked_it_is_little_more_than_its_wheels(image: Image) -> None:
    import zipfile

    digests = {
        line.strip().removeprefix("--hash=sha256:").removesuffix(" \\")
        for line in (ROOT / "lock" / "runtime-py311.txt").read_text(encoding="utf-8").splitlines()
        if "--hash" in line
    }
    wheels = 0
    for digest in digests:
        (path,) = (image.out / "wheelhouse" / digest).glob("*.whl")
        with zipfile.ZipFile(path) as file:
            wheels += sum(entry.file_size for entry in file.infolist())
    assert image.record["unpacked_bytes"] - wheels < 250e6
