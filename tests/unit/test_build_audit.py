"""The rules of the audit: a good wheel passes all, and each spoiled one is caught by one rule."""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elf_support import (
    AARCH64,
    COMMIT,
    GLIBC,
    PYBIND,
    TORCH,
    XLA_BASE,
    WheelFixture,
    common,
    libtpu_wheel,
    make_elf,
    module,
    torch_tpu_wheel,
    xla_base,
)
from smoke_host_support import forge
from tpuforge.build import audit, contents
from tpuforge.build.findings import Severity
from tpuforge.build.rules import RULES
from tpuforge.console import Progress

ROOT = Path(__file__).resolve().parents[2]
INFO = "torch_tpu-0.2.0.dist-info"
METADATA, WHEEL, ENTRY = f"{INFO}/METADATA", f"{INFO}/WHEEL", f"{INFO}/entry_points.txt"
ENV = "torch_tpu/_internal/env_2_13_0.so"
COMMON = "torch_tpu/csrc/common/glue_2_13_0/libpywrap_2_13_0_common.so"


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "out"))
    return tmp_path / "out"


def judge(made: WheelFixture, folder: Path) -> audit.Report:
    return audit.audit(made.write(folder), torch=TORCH, xla_commit=COMMIT)


@pytest.mark.parametrize("made", [torch_tpu_wheel(), libtpu_wheel()], ids=lambda one: one.name)
def test_a_good_wheel_has_no_finding(made: WheelFixture, tmp_path: Path) -> None:
    report = judge(made, tmp_path)
    assert report.findings == ()
    assert report.ok
    assert report.verdict == "no error"
    assert {one.status for one in report.rulings if one.rule != "pjrt"} == {"passed"}


# --- spoiling ----------------------------------------------------------------------------------

Spoil = Callable[[WheelFixture], None]


def put(name: str, content: bytes) -> Spoil:
    return lambda made: made.files.update({name: content})


def base(**settings: object) -> Spoil:
    """Another libxla_base.so."""
    return put(XLA_BASE, xla_base(**settings))


def env(**settings: Any) -> Spoil:
    """Another extension module for torch 2.13.0."""
    return put(ENV, module("env", "2_13_0", **settings))


def drop(*names: str) -> Spoil:
    def spoil(made: WheelFixture) -> None:
        for name in names:
            del made.files[name]

    return spoil


def change(file: str, old: str, new: str) -> Spoil:
    return lambda made: made.change(file, old, new)


def record(old: str, new: str) -> Spoil:
    def spoil(made: WheelFixture) -> None:
        lines = "\n".join(made.record_lines())
        assert old in lines
        made.record = [line for line in lines.replace(old, new).split("\n") if line]

    return spoil


def set_to(**values: object) -> Spoil:
    def spoil(made: WheelFixture) -> None:
        for name, value in values.items():
            setattr(made, name, value)

    return spoil


def retag(tags: str) -> Spoil:
    def spoil(made: WheelFixture) -> None:
        made.change(WHEEL, made.tags, tags)
        made.tags = tags

    return spoil


def every_elf(**settings: object) -> Spoil:
    """Make every library anew: the bare ones of an aarch64 build, say."""

    def spoil(made: WheelFixture) -> None:
        for name in list(made.files):
            torch = "_".join(name.split("_")[-3:]).removesuffix(".so")
            if name.endswith("_common.so"):
                made.files[name] = common(name.split("glue_")[1].split("/")[0], **settings)
            elif name == XLA_BASE:
                made.files[name] = xla_base(**settings)
            elif name.endswith(".so"):
                made.files[name] = module(contents.module_of(name), torch, **settings)

    return spoil


def rename_folder(made: WheelFixture) -> None:
    """Let the .dist-info folder be that of another release."""
    made.file = f"{made.name}-{made.version}-{made.tags}.whl"
    old, made.version = made.dist_info, "0.2.1"
    made.files = {name.replace(old, made.dist_info): data for name, data in made.files.items()}


def also(*spoils: Spoil) -> Spoil:
    def spoil(made: WheelFixture) -> None:
        for one in spoils:
            one(made)

    return spoil


SPOILED: list[tuple[str, str, Spoil]] = [
    ("archive", "is there twice", set_to(twice="torch_tpu/__init__.py")),
    ("archive", "leaves the folder", put("torch_tpu/../../evil.py", b"")),
    ("archive", "absolute path", put("/etc/evil", b"")),
    ("archive", "absolute path", put("C:/evil", b"")),
    ("archive", "absolute path", put("torch_tpu\\evil", b"")),
    ("archive", "is a link", set_to(links=("torch_tpu/__init__.py",))),
    ("metadata", "METADATA is missing", drop(METADATA)),
    ("metadata", "WHEEL is missing", drop(WHEEL)),
    ("metadata", "Requires-Dist is 'numpy>>2'", change(METADATA, "numpy>=2", "numpy>>2")),
    ("metadata", "Requires-Python is 'what'", change(METADATA, ">=3.11", "what")),
    ("metadata", "no Metadata-Version", change(METADATA, "Metadata-Version: 2.1\n", "")),
    ("metadata", "folders *.dist-info", put("other-1.dist-info/METADATA", b"")),
    ("record", "is sha256=", record(",sha256=", ",sha256=A")),
    ("record", "has 0 bytes", record("FU,0", "FU,1")),
    ("record", "which is not in the wheel", record("torch_tpu/_loader", "torch_tpu/_other")),
    ("record", "does not list", record(f"{INFO}/WHEEL", f"{INFO}/RECORD.jws")),
    ("record", "RECORD twice", record("RECORD,,", f"RECORD,,\n{INFO}/RECORD,,")),
    ("record", "the line", record("RECORD,,", "RECORD")),
    ("name", "METADATA says torch_tpu 0.2.1", change(METADATA, "Version: 0.2.0", "Version: 0.2.1")),
    ("name", "the folder is torch_tpu-0.2.1.dist-info", rename_folder),
    ("name", "the file is called", set_to(file="torch_tpu.whl")),
    ("tags", "WHEEL has the tags", change(WHEEL, "cp311-cp311", "cp312-cp312")),
    ("tags", "WHEEL has the tags none", change(WHEEL, "Tag: ", "Mark: ")),
    ("tags", "Root-Is-Purelib is true", change(WHEEL, "false", "true")),
    ("tags", "Wheel-Version is 2.0", change(WHEEL, "Wheel-Version: 1.0", "Wheel-Version: 2.0")),
    ("python", "Requires-Python is >=3.12", change(METADATA, ">=3.11", ">=3.12")),
    ("python", "compiled for Python 3.12", env(python="3.12")),
    ("elf", "for aarch64", env(machine=AARCH64)),
    ("elf", "for x86_64", retag("cp311-cp311-manylinux_2_31_aarch64")),
    (
        "elf",
        "extra.so cannot be read",
        put("torch_tpu/extra.so", make_elf(data=bytes(5000))[:-4000]),
    ),
    ("elf", "is not an ELF file", put("torch_tpu/extra.so", b"words")),
    ("symbols", "needs GLIBC_2.32", base(wants={**GLIBC, "libm.so.6": ["GLIBC_2.32"]})),
    ("symbols", "needs GLIBCXX_3.4.29", base(wants={"libstdc++.so.6": ["GLIBCXX_3.4.29"]})),
    ("symbols", "needs CXXABI_1.3.13", base(wants={"libstdc++.so.6": ["CXXABI_1.3.13"]})),
    ("symbols", "needs GCC_12.0.0", base(wants={"libgcc_s.so.1": ["GCC_12.0.0"]})),
    ("symbols", "needs GLIBC_ABI_DT_RELR", base(wants={"libc.so.6": ["GLIBC_ABI_DT_RELR"]})),
    ("symbols", "at most GLIBC_2.28", retag("cp311-cp311-manylinux_2_28_x86_64")),
    ("libraries", "needs libssl.so.3", base(needed=("libssl.so.3",))),
    ("libraries", "needs libpython3", base(needed=("libpython3.11.so.1.0",))),
    ("libraries", "does not look where it is", base(runpath="$ORIGIN")),
    ("libraries", "does not look where it is", env(runpath="$ORIGIN")),
    (
        "runpath",
        "looks for libraries in '/opt/torch/lib'",
        base(runpath="$ORIGIN/../../../torch/lib:/opt/torch/lib"),
    ),
    ("runpath", "in 'the current folder'", base(runpath="$ORIGIN/../../../torch/lib:")),
    ("runpath", "'/old'", base(rpath="/old")),
    (
        "paths",
        "/home/me/torch_tpu/x.py",
        put("torch_tpu/x.py", b"# made by /home/me/torch_tpu/x.py"),
    ),
    ("paths", "/root/.cache/x", put("torch_tpu/x.json", b'{"at": "/root/.cache/x"}')),
    ("paths", "libxla_base.so: holds /home/me/x.cc", base(data=b"x/k8-opt/bin/a\0/home/me/x.cc\0")),
    ("paths", "execroot/_main", put("torch_tpu/x.py", b"AT = '/tmp/execroot/_main/x'")),
    (
        "paths",
        "/x/execroot/_main/y.cc",
        base(data=b"bazel-out/k8-opt/bin/a.h\0\0/x/execroot/_main/y.cc\0"),
    ),
    ("paths", "_bazel_me/0123", base(data=b"x/k8-opt/bin/a\0/var/_bazel_me/0123/external\0")),
    ("debug", "100 B of debugging sections", base(debug=100)),
    ("licence", "its text is not in the wheel", drop(f"{INFO}/licenses/LICENSE")),
    (
        "licence",
        "no licence is stated",
        also(drop(f"{INFO}/licenses/LICENSE"), change(METADATA, "License: Apache 2.0\n", "")),
    ),
    (
        "licence",
        "names the licence files COPYING",
        change(METADATA, "License: Apache 2.0", "License-File: COPYING"),
    ),
    ("xla-base", "2 files libxla_base.so", put("torch_tpu/csrc/other/libxla_base.so", xla_base())),
    ("glue", "the set of torch 2.13.0 has no", drop(ENV)),
    ("glue", "no env_X_Y_Z.so for any torch", drop(ENV, "torch_tpu/_internal/env_2_12_0.so")),
    ("glue", "does not export PyInit_env", env(exports=())),
    (
        "glue",
        "needs libpywrap_2_12_0_common.so",
        env(
            needed=("libxla_base.so", "libpywrap_2_12_0_common.so"),
            runpath="$ORIGIN/../csrc/common:$ORIGIN/../csrc/common/glue_2_12_0",
        ),
    ),
    ("glue", "needs libc.so.6", put(COMMON, common("2_13_0", needed=("libc.so.6",)))),
    ("torch", "Requires-Dist names no torch", change(METADATA, "torch>=2.12.0,<=2.15.0", "wood")),
    ("torch", "admits torch 2.11.0", change(METADATA, "torch>=2.12.0", "torch>=2.11.0")),
    ("torch", "Requires-Dist is torch", change(METADATA, "<=2.15.0", "<=2.12.0")),
    ("bundled", "it brings torch_tpu/lib/libc10.so", put("torch_tpu/lib/libc10.so", make_elf())),
    (
        "bundled",
        "it brings torch_tpu/libcudart.so.12",
        put("torch_tpu/libcudart.so.12", make_elf()),
    ),
    ("bundled", "it requires triton", change(METADATA, "numpy>=2", "triton")),
    ("xla-commit", "is missing", drop("torch_tpu/include/XLA_COMMIT")),
    ("xla-commit", "holds 'main'", put("torch_tpu/include/XLA_COMMIT", b"main")),
    ("xla-commit", "holds ffff", put("torch_tpu/include/XLA_COMMIT", b"f" * 40)),
    ("optimised", "compiled in dbg mode", base(data=b"bazel-out/k8-dbg-ST-0123456789ab/bin/a.h\0")),
    (
        "optimised",
        "compiled in fastbuild mode",
        base(runpath="$ORIGIN/../../../torch/lib:$ORIGIN/x/k8-fastbuild/bin/_solib", data=b""),
    ),
    ("optimised", "cannot be told", every_elf(data=PYBIND + b"3.11\0")),
    ("entry-point", "torch_tpu is missing", drop(ENTRY)),
    ("entry-point", "is torch_tpu:load", change(ENTRY, "torch_tpu._loader", "torch_tpu")),
    ("entry-point", "cannot be read", put(ENTRY, b"torch_tpu")),
    ("entry-point", "has no function load", put("torch_tpu/_loader.py", b"x = 1\n")),
]
LIBTPU: list[tuple[str, str, Spoil]] = [
    ("libtpu", "is missing", drop("libtpu/libtpu.so")),
    ("elf", "libtpu/libtpu.so is not an ELF file", put("libtpu/libtpu.so", b"empty")),
    ("libtpu", "does not export GetPjrtApi", put("libtpu/libtpu.so", make_elf())),
    (
        "libraries",
        "needs libc10.so",
        put("libtpu/libtpu.so", make_elf(needed=("libc10.so",), exports=("GetPjrtApi",))),
    ),
]
# what the fixtures below expect to be milder than an error
MILD = {
    "its text is not in",
    "debugging sections",
    "cannot be told",
    "x.py: holds /home",
    "x.json: holds /root",
}


def assert_only(report: audit.Report, rule: str, text: str) -> None:
    assert {one.rule for one in report.findings} == {rule}, report.findings
    assert any(text in one.what or text in one.expected for one in report.findings)
    assert all(one.expected and one.remedy for one in report.findings)
    mild = any(words in one.what for words in MILD for one in report.findings)
    worst = Severity.WARNING if mild else Severity.ERROR
    assert report.findings[0].severity is worst
    assert report.ok is mild
    (ruling,) = [one for one in report.rulings if one.rule == rule]
    assert ruling.status == worst


@pytest.mark.parametrize(
    ("rule", "text", "spoil"),
    [*SPOILED, *LIBTPU],
    ids=[f"{one[0]}: {one[1]}" for one in (*SPOILED, *LIBTPU)],
)
def test_exactly_one_rule_speaks(rule: str, text: str, spoil: Spoil, tmp_path: Path) -> None:
    made = libtpu_wheel() if (rule, text, spoil) in LIBTPU else torch_tpu_wheel()
    spoil(made)
    assert_only(judge(made, tmp_path), rule, text)


def test_every_rule_has_a_wheel_that_it_speaks_of() -> None:
    # the one for pjrt stands below: it loads a library
    assert {one.id for one in RULES} == {one[0] for one in (*SPOILED, *LIBTPU)} | {"pjrt"}


def test_glue_that_is_too_new_for_the_torch_of_the_lock(tmp_path: Path) -> None:
    made = torch_tpu_wheel()
    made.change(METADATA, "torch>=2.12.0,<=2.15.0", "torch!=9")
    path = made.write(tmp_path)
    assert audit.audit(path, torch="2.12.1+cpu").ok
    assert audit.audit(path, torch=None).ok
    report = audit.audit(path, torch="2.11.0+cpu")
    assert [one.what for one in report.findings] == ["the oldest glue is for torch 2.12.0"]


def test_private_symbols_and_folders_outside_are_mild(tmp_path: Path) -> None:
    made = torch_tpu_wheel()
    made.files[XLA_BASE] = xla_base(
        wants={"libc.so.6": ["GLIBC_PRIVATE"]},
        runpath="$ORIGIN/../../../torch/lib:$ORIGIN/../../../../x",
    )
    report = judge(made, tmp_path)
    assert [(one.rule, one.severity) for one in report.findings] == [
        ("symbols", Severity.WARNING),
        ("runpath", Severity.NOTE),
    ]
    assert report.ok
    assert report.verdict == "no error, 1 warning, 1 note"


def test_another_package_is_judged_by_the_general_rules(tmp_path: Path) -> None:
    made = WheelFixture(name="words", version="1", tags="py3-none-any")
    made.files = {
        "words.py": b"",
        "words-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: words\nVersion: 1\n"
        b"License-Expression: MIT\n",
        "words-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
        "words-1.dist-info/licenses/LICENSE": b"text",
    }
    report = judge(made, tmp_path)
    assert report.findings == ()
    assert {one.rule for one in report.rulings} == {one.id for one in RULES if not one.kind}
    assert [one.rule for one in report.rulings if one.status == "not judged"] == ["symbols"]


# --- bad archives ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [lambda data: b"<html>Not found</html>", lambda data: data[:-200]],
    ids=["no", "cut"],
)
def test_bytes_that_are_no_archive(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    path = torch_tpu_wheel().write(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    assert_only(audit.audit(path, torch=TORCH), "archive", "cannot be read")


def test_every_flipped_byte_of_a_file_is_found(tmp_path: Path) -> None:
    path = torch_tpu_wheel().write(tmp_path)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(XLA_BASE)
    middle = info.header_offset + 30 + len(XLA_BASE) + info.compress_size // 2
    data = bytearray(path.read_bytes())
    data[middle] ^= 1
    path.write_bytes(bytes(data))
    assert_only(audit.audit(path, torch=TORCH), "archive", "cannot be read")


def test_an_archive_that_claims_to_unpack_to_more_than_any_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_LARGEST", 1000)
    assert_only(judge(torch_tpu_wheel(), tmp_path), "archive", "claims to unpack to")


# --- searching ---------------------------------------------------------------------------------


def test_traces_are_found_wherever_the_chunks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        b"\0/home/me/x.cc\0 k8-dbg/bin/a /x/k8-dbg/bin/b\0google/internal/home/foyer\0"
        b"$ORIGIN/root/x\0" + PYBIND + b"\0003.14\0a/execroot/b\0"
    )
    made = torch_tpu_wheel()
    made.files["torch_tpu/x.bin"] = bytes(3000) + words + bytes(2000)
    path = made.write(tmp_path)
    for chunk in (600, 700, 1024, 2999, 3010, 3100, 1 << 20):
        monkeypatch.setattr(contents, "_CHUNK", chunk)
        (member,) = [
            one
            for one in contents.read(path, tmp_path).members.values()
            if one.name == "torch_tpu/x.bin"
        ]
        assert member.build_paths == {"/home/me/x.cc", "a/execroot/b"}, chunk
        assert member.modes == {"dbg"}
        assert member.pythons == {"3.14"}


# --- remembering -------------------------------------------------------------------------------


def test_an_audit_is_remembered_by_digest_and_by_what_it_was_judged_against(
    out: Path, tmp_path: Path
) -> None:
    path = torch_tpu_wheel().write(tmp_path)
    digest = audit.audit(path, torch=TORCH).sha256

    def ask(torch: str | None = TORCH, commit: str | None = None) -> tuple[audit.Report, bool]:
        with Progress("test", quiet=True) as progress:
            return audit.remembered(path, digest, torch=torch, xla_commit=commit, progress=progress)

    first, fresh = ask()
    assert fresh
    second, fresh = ask()
    assert not fresh
    assert second == first
    assert ask(torch="2.15.0+cpu")[1]
    assert not ask(torch="2.15.0+cpu")[1]
    report, fresh = ask(commit="f" * 40)
    assert fresh
    assert not report.ok
    place = out / "audit" / f"{digest}.json"
    record = json.loads(place.read_text())
    assert record["schema"] == "tpuforge.audit/1"
    del record["findings"]
    place.write_text(json.dumps(record))
    again, fresh = ask(commit="f" * 40)
    assert fresh
    assert again == report


# --- the verb ----------------------------------------------------------------------------------


def test_the_verb_ends_by_severity(out: Path, tmp_path: Path) -> None:
    good = torch_tpu_wheel().write(tmp_path / "good")
    mild = torch_tpu_wheel()
    del mild.files[f"{INFO}/licenses/LICENSE"]
    warned = mild.write(tmp_path / "mild")
    bad = torch_tpu_wheel()
    del bad.files[ENTRY]
    refused = bad.write(tmp_path / "bad")

    done = forge("build.audit", str(good), "--strict", out=out)
    assert done.returncode == 0, done.stderr
    assert "passed" in done.stdout

    assert forge("build.audit", str(warned), out=out).returncode == 0
    done = forge("build.audit", str(warned), "--strict", out=out)
    assert done.returncode == 1
    assert "warning licence: METADATA states 'Apache 2.0'" in done.stderr

    done = forge("build.audit", str(good), str(refused), "--json", out=out)
    assert done.returncode == 1
    printed = json.loads(done.stdout)
    assert [one["ok"] for one in printed["data"]["wheels"]] == [True, False]
    (finding,) = printed["data"]["wheels"][1]["findings"]
    assert finding["rule"] == "entry-point"
    assert finding["severity"] == "error"
    assert json.loads((out / "results" / "audit_wheel.json").read_text()) == printed


def test_the_verb_cannot_judge_what_is_not_there(out: Path, tmp_path: Path) -> None:
    done = forge("build.audit", str(tmp_path / "no.whl"), out=out)
    assert done.returncode == 2
    assert "no.whl is not a file" in done.stderr
    whole = str(torch_tpu_wheel().write(tmp_path))
    done = forge("build.audit", "--torch", "what", whole, out=out)
    assert done.returncode == 2
    assert "--torch what is not a version" in done.stderr
    done = forge("build.audit", out=out)
    assert done.returncode == 2
    assert "is not in the wheelhouse" in done.stderr
    assert "./forge fetch_wheel" in done.stderr


def test_a_plugin_that_does_not_load_is_an_error_and_leaves_nothing(
    out: Path, tmp_path: Path
) -> None:
    # it is a whole ELF file by every header, and its pages hold no code
    report = audit.audit(libtpu_wheel().write(tmp_path), torch=None, load=True)
    assert_only(report, "pjrt", "does not load")
    assert list(out.iterdir()) == []


def test_random_damage_to_the_archive_is_a_finding_and_nothing_else(tmp_path: Path) -> None:
    good = torch_tpu_wheel().write(tmp_path).read_bytes()
    chance = random.Random(5)
    path = tmp_path / "damaged.whl"
    bad = 0
    for _ in range(60):
        data = bytearray(good)
        for _ in range(3):
            # most of them in the central directory, at the end
            first = len(data) - 2500 if chance.random() < 0.7 else 0
            data[chance.randrange(first, len(data))] = chance.randrange(256)
        path.write_bytes(bytes(data))
        bad += bool(contents.read(path, tmp_path).faults)
    assert bad > 35


def test_a_record_that_is_no_table(tmp_path: Path) -> None:
    made = torch_tpu_wheel()
    made.record = ["a" * 200_000]
    assert_only(judge(made, tmp_path), "record", "RECORD cannot be read")


def test_the_page_tells_of_every_rule() -> None:
    page = (ROOT / "docs" / "audit_wheel.md").read_text(encoding="utf-8")
    assert [one.id for one in RULES if f"| `{one.id}` |" not in page] == []


def _zip(folder: Path, entries: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "data",
    [
        b"/execroot/" * 1_000_000,
        b"/execroot/same " * 300_000,
        (b"/" + b"a-opt" * 49 + b"/bin/") * 30_000,
        b"\x003." * 1_000_000,
    ],
    ids=["run", "same", "bin", "python"],
)
def test_traces_without_an_end(data: bytes, tmp_path: Path) -> None:
    report = audit.audit(_zip(tmp_path, {"a/b.so": data}), torch=None)
    assert not report.ok
    named = any(one.rule == "paths" and "/execroot/" in one.what for one in report.findings)
    assert named == (b"/execroot/" in data)


def test_five_paths_are_enough_and_all_are_different(tmp_path: Path) -> None:
    data = b"".join(b"/execroot/%d " % (number // 2) for number in range(100))
    found = contents.read(_zip(tmp_path, {"a": data}), tmp_path).members["a"].build_paths
    assert found == {f"/execroot/{number}" for number in range(5)}


@pytest.mark.parametrize(
    ("bound", "value", "said"),
    [
        ("_MEMBERS_MOST", 2, "it has 3 files, more than 2"),
        ("_KEPT_ALL", 1000, "its metadata and Python files have over"),
        ("_SUSPECT", 1000, "it claims to unpack to"),
    ],
)
def test_a_wheel_without_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int, said: str
) -> None:
    path = _zip(tmp_path, {f"a/{number}.py": bytes(200_000) for number in range(3)})
    assert contents.read(path, tmp_path).faults == []
    monkeypatch.setattr(contents, bound, value)
    assert said in contents.read(path, tmp_path).faults[0]


@pytest.mark.parametrize(
    "line",
    [
        ".".join(map(str, range(3000))) + "-none-" + ".".join(map(str, range(3000))),
        "\nTag: ".join(f"py{number}-none-any" for number in range(3000)),
    ],
    ids=["product", "lines"],
)
def test_tags_without_an_end(tmp_path: Path, line: str) -> None:
    made = torch_tpu_wheel()
    made.files[WHEEL] += f"Tag: {line}\n".encode()
    found = [one for one in judge(made, tmp_path).findings if one.rule == "tags"]
    assert [one.what for one in found] == ["WHEEL has more than 1000 tags"]


def test_a_wheel_that_is_all_faults(tmp_path: Path) -> None:
    made = torch_tpu_wheel()
    made.record = [*made.record_lines(), *("x" * 5000 for _ in range(500))]
    found = [one for one in judge(made, tmp_path).findings if one.rule == "record"]
    assert len(found) == 200
    assert max(len(one.what) for one in found) < 1100


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_member_is_a_fault_of_the_wheel(tmp_path: Path, method: int) -> None:
    path = _zip(tmp_path, {"a": random.Random(1).randbytes(3000)}, method)
    data = bytearray(path.read_bytes())
    data[40:80] = b"\xff" * 40
    path.write_bytes(data)
    report = audit.audit(path, torch=None)
    assert any("the archive cannot be read" in one.what for one in report.findings)
