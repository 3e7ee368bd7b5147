"""Images over their budget, blobs of siblings, and the script that judges the environment."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import uv

from tpuforge import layout as oci
from tpuforge.errors import ForgeError
from tpuforge.images import budget
from tpuforge.paths import ROOT

MB = 1_000_000
SITE = "opt/venv/lib/python3.11/site-packages"


def layer(layout: Path, files: dict[str, int]) -> oci.Blob:
    """A layer of files of some sizes."""
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as tar:
        for name, length in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = length
            tar.addfile(entry, io.BytesIO(b"\0" * length))
    data = body.getvalue()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    blob = oci.Blob(digest, len(data), "application/vnd.oci.image.layer.v1.tar")
    blob.path(layout).parent.mkdir(parents=True, exist_ok=True)
    blob.path(layout).write_bytes(data)
    return blob


def image(*layers: oci.Blob, compressed: str = "4MB", unpacked: str = "9MB") -> oci.Image:
    """An image with a budget."""
    small = oci.Blob("sha256:0", 100, "application/json")
    labels = {
        "io.tpuforge.budget.compressed": compressed,
        "io.tpuforge.budget.unpacked": unpacked,
    }
    return oci.Image(small, small, layers, labels, {})


def test_an_image_over_its_budget_comes_with_what_is_new(tmp_path: Path) -> None:
    old = layer(tmp_path, {f"{SITE}/torch/lib.so": 2 * MB})
    new = layer(
        tmp_path,
        {
            f"{SITE}/jax/a.py": MB,
            f"{SITE}/jax/b.py": MB,
            f"{SITE}/scipy/c.so": MB,
            "usr/share/doc/x": 1000,
        },
    )
    made = image(old, new)
    with pytest.raises(ForgeError) as caught:
        budget.check(tmp_path, made, 5 * MB, {old.digest}, "tpuforge/pallas:1")
    text = caught.value.found
    assert "tpuforge/pallas:1 is over its budget: 5.0 MB compressed, the budget is 4.0 MB" in text
    assert "unpacked, the budget" not in text
    rows = [line.split() for line in text.splitlines()[2:]]
    assert rows == [
        ["2.0", "MB", "jax"],
        ["1.0", "MB", "scipy"],
        ["0.0", "MB", "/usr/share"],
    ]
    assert caught.value.exit_code == 1
    # without an image of before, all of it
    with pytest.raises(ForgeError, match=r"2\.0 MB +torch"):
        budget.check(tmp_path, made, 5 * MB, set(), "tpuforge/pallas:1")


def test_unpacked_counts_too_and_within_is_well(tmp_path: Path) -> None:
    one = layer(tmp_path, {f"{SITE}/torch/lib.so": MB})
    budget.check(tmp_path, image(one), 9 * MB, set(), "a:1")
    with pytest.raises(ForgeError, match=r"unpacked, the budget is 9\.0 MB"):
        budget.check(tmp_path, image(one), 9 * MB + 1, set(), "a:1")


def test_blobs_of_a_sibling_are_linked_and_others_left_alone(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    one, two = layer(there, {"a": 10}), layer(there, {"b": 20})
    two.path(here).parent.mkdir(parents=True)
    two.path(here).write_bytes(b"being written")
    oci.seed(there, here, [one.digest, two.digest, "sha256:9"])
    assert one.path(here).samefile(one.path(there))
    assert two.path(here).read_bytes() == b"being written"
    assert len(list(two.path(here).parent.iterdir())) == 2


def script(name: str) -> ModuleType:
    """A script that runs inside the bake, as a module."""
    path = ROOT / "images" / "files" / "build" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script of the bake, on folders of the test."""
    module = script("check_environment")
    for name in ("OUT", "SITE", "APART", "FACTS"):
        monkeypatch.setattr(module, name, tmp_path / name.lower())
    monkeypatch.setattr(module, "LEFT_OUT", tmp_path / "facts" / "left-out")
    (tmp_path / "facts" / "opt" / "tpuforge").mkdir(parents=True)
    (tmp_path / "facts" / "left-out").write_text("xgrammar triton\n")
    return module


def said(monkeypatch: pytest.MonkeyPatch, judge: ModuleType, output: str) -> None:
    class Done:
        returncode = 1
        stdout = output

        def check_returncode(self) -> None:
            """As of a command that went well."""

    monkeypatch.setattr(judge, "pip", lambda *_: Done())


LEFT = "xgrammar 0.1.25 requires triton, which is not installed.\n"


def test_a_name_left_out_on_purpose_is_let_through(
    judge: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said(monkeypatch, judge, LEFT)
    judge.complete()
    assert capsys.readouterr().out == f"left out on purpose: {LEFT}"


@pytest.mark.parametrize(
    "line",
    [
        "other 1.0 requires triton, which is not installed.\n",
        "xgrammar 0.1.25 requires numpy, which is not installed.\n",
        "xgrammar 0.1.25 has requirement triton>=3, but you have triton 2.\n",
        "xgrammar 0.1.25 is not supported on this platform\n",
    ],
)
def test_nothing_else_is(judge: Any, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    said(monkeypatch, judge, LEFT + line)
    with pytest.raises(SystemExit, match="not complete"):
        judge.complete()


@pytest.mark.parametrize("site", ["site", "apart"])
def test_a_file_that_two_packages_bring_is_refused(judge: Any, tmp_path: Path, site: str) -> None:
    """As two wheels with a folder of tests at their top; the later one wins."""
    for name, digest in (("one-1", "sha256=aa"), ("two-2", "sha256=aa")):
        folder = tmp_path / site / f"{name}.dist-info"
        folder.mkdir(parents=True)
        record = f'tests/__init__.py,{digest},1\n"a,b.py",sha256=bb,1\n{name}.dist-info/RECORD,,\n'
        (folder / "RECORD").write_text(record)
    # the same bytes are no matter
    judge.owned()
    (folder / "RECORD").write_text("tests/__init__.py,,\n")
    with pytest.raises(SystemExit, match=r"two packages differ in .*tests/__init__\.py"):
        judge.owned()
    (folder / "RECORD").write_text(f"../{site}/../x,sha256=b,1\n./tests/__init__.py,sha256=c,1\n")
    with pytest.raises(SystemExit, match=r"differ in .*tests/__init__.py: one-1.dist-info and two"):
        judge.owned()


def test_what_tells_of_the_image_has_final_modes_and_times(
    judge: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(monkeypatch, judge, "torch==2.13.0+cpu\n")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000")
    facts = tmp_path / "facts" / "opt" / "tpuforge" / "lock.txt"
    facts.write_text("a lock\n")
    facts.chmod(0o600)
    judge.gather(judge.pip("list"))
    made = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")}
    assert made == {"opt", "opt/tpuforge", "opt/tpuforge/lock.txt", "opt/tpuforge/packages.txt"}
    for path in (tmp_path / "out").rglob("*"):
        assert path.stat().st_mtime == 1000
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644)


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that installs a group of wheels, on folders of the test."""
    module = script("install_wheels")
    monkeypatch.setattr(module, "WHEELS", tmp_path / "wheels")
    monkeypatch.setattr(module, "UV", uv.find_uv_bin())
    monkeypatch.setattr(module, "TOP", tmp_path / "opt")
    monkeypatch.setattr(module, "CACHE", tmp_path / "opt" / ".uv")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000")
    return module


BROKEN = b"def (:\n"
# str.splitlines would make two lines of it
ODD = "one/a\u2028z.txt"


def wheels(folder: Path, more: dict[str, bytes], moment: int = 5000) -> Path:
    """One wheel, whose file has a time, and what asks for it."""
    folder.mkdir()
    files = {
        "one/__init__.py": b"a = 'text'\n",
        "one/later.py": BROKEN,
        "one/tests/t.py": b"b = 1\n",
        ODD: b"",
        **more,
    }
    info = "one-1.0.dist-info"
    files[f"{info}/METADATA"] = b"Metadata-Version: 2.1\nName: one\nVersion: 1.0\n"
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    listed = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD")).encode()
    files = {f"{info}/RECORD": listed} | files
    path = folder / "one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    os.utime(path, (moment, moment))
    ask(path)
    return path


def ask(wheel: Path) -> None:
    """Name the digest that a wheel has now."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (wheel.parent / "requirements.txt").write_text(f"one==1.0 --hash=sha256:{digest}\n")


def installed(installer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What the script leaves, by name; each of the one time."""
    site = tmp_path / "opt" / "site"
    monkeypatch.setattr(sys, "argv", ["install_wheels.py", "--target", str(site)])
    installer.main()
    found = sorted((tmp_path / "opt").rglob("*"))
    assert {path.stat().st_mtime for path in (tmp_path / "opt", *found)} == {1000}
    files = {path.relative_to(site).as_posix(): path for path in found if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items()}


def test_wheels_are_installed_the_same_whatever_the_time_of_their_file(
    installer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    wheels(tmp_path / "wheels", {})
    first = installed(installer, tmp_path, monkeypatch)
    assert f"no byte code for {tmp_path}/opt/site/one/later.py" in capfd.readouterr().out
    tag = sys.implementation.cache_tag
    code = {name for name in first if name.endswith(".pyc")}
    # neither for what is not of this syntax, nor for tests
    assert code == {f"one/__pycache__/__init__.{tag}.pyc"}
    # hash-based and unchecked, PEP 552
    assert first[code.pop()][4:8] == b"\1\0\0\0"
    assert not [name for name in first if "uv_cache" in name or ".lock" in name]
    record = first["one-1.0.dist-info/RECORD"].decode()
    assert "uv_cache" not in record
    assert f"{ODD},," in record.split("\n")
    for name in ("opt", "wheels"):
        shutil.rmtree(tmp_path / name)
    wheels(tmp_path / "wheels", {}, 6000)
    assert installed(installer, tmp_path, monkeypatch) == first


def test_a_wheel_of_other_bytes_and_one_that_is_there_are_refused(
    installer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = wheels(tmp_path / "wheels", {})
    sound = wheel.read_bytes()
    installed(installer, tmp_path, monkeypatch)
    with pytest.raises(SystemExit, match="0 of 1 packages came"):
        installer.main()
    shutil.rmtree(tmp_path / "opt")
    # uv reads before it compares, so most say nothing of a digest
    for other in (sound[:300], sound.replace(b"text", b"tExt")):
        wheel.write_bytes(other)
        # what the bake looks for
        with pytest.raises(SystemExit, match=r"one-1\.0.* other bytes than the lock names"):
            installer.main()
    # the right bytes, and yet no wheel: to send it again would not help
    wheel.write_bytes(sound[:300])
    ask(wheel)
    with pytest.raises(SystemExit, match="uv failed, and every wheel holds the bytes"):
        installer.main()


@pytest.fixture
def frame(installer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that the script runs in, as in an image."""
    frame = tmp_path / "opt" / "venv"
    venv.create(frame, symlinks=True)
    site = next(frame.glob("lib/*/site-packages"))
    monkeypatch.setattr(sys, "argv", ["install_wheels.py"])
    monkeypatch.setattr(sys, "prefix", str(frame))
    monkeypatch.setattr(sys, "executable", str(frame / "bin" / "python"))
    monkeypatch.setattr(installer.sysconfig, "get_path", lambda _: str(site))
    return frame


def test_neither_what_lies_below_nor_commands_show_in_byte_code(
    installer: Any, frame: Path, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    pth = next(frame.glob("lib/*/site-packages")) / "below.pth"
    pth.write_text(f"import sys; 'compileall' in sys.orig_argv and open({str(said)!r}, 'w')\n")
    wheels(tmp_path / "wheels", {"one-1.0.data/scripts/tool.py": b"#!python\n"})
    installer.main()
    assert (frame / "bin" / "tool.py").exists()
    assert not (frame / "bin" / "__pycache__").exists()
    assert list(frame.glob("lib/*/site-packages/one/__pycache__/__init__.*.pyc"))
    assert not said.exists()


@pytest.mark.parametrize("name", ["data/pyvenv.cfg", "scripts/activate"])
def test_a_wheel_that_writes_over_the_frame_is_refused(
    installer: Any, frame: Path, tmp_path: Path, name: str
) -> None:
    wheels(tmp_path / "wheels", {f"one-1.0.data/{name}": b"x\n"})
    with pytest.raises(
        SystemExit, match=r"one-1\.0\.dist-info writes over what is there: .*/venv/"
    ):
        installer.main()


def test_a_module_that_breaks_the_compiler_is_named(installer: Any, tmp_path: Path) -> None:
    source = tmp_path / "deep.py"
    source.write_text("a = " + "+".join(["1"] * 60_000))
    with pytest.raises(SystemExit, match=r"deep\.py cannot be compiled: \w+Error"):
        installer.compile_all([source])
