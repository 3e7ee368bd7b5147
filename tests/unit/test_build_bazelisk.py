"""Bazelisk and Bazel before they run: which ones, proven by digest, in which environment."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from build_support import Index, serve
from tpuforge import pins as pins_module
from tpuforge.build.bazelisk import (
    Bazel,
    environment,
    find_bazelisk,
    prepare_bazel,
    verify_bazel,
    wanted_bazel,
)
from tpuforge.errors import Exit, ForgeError

PINS = pins_module.load()
UNREACHABLE = replace(PINS.bazelisk, release="https://127.0.0.1:1/bazelisk")


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def test_a_script_is_not_bazelisk(path: Path, tmp_path: Path) -> None:
    script = path / "bazelisk"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    with pytest.raises(ForgeError, match="not a native program"):
        find_bazelisk(str(script), PINS.bazelisk, tmp_path)
    # and the one on PATH is passed over, which leaves npm and the release
    with pytest.raises(ForgeError, match="npm is not installed; https://"):
        find_bazelisk(None, UNREACHABLE, tmp_path)


def test_one_on_path_is_taken_only_if_it_is_the_pinned_one(path: Path, tmp_path: Path) -> None:
    program = path / "bazelisk"
    shutil.copy(Path("/bin/true").resolve(), program)
    with pytest.raises(ForgeError, match="it cannot be had"):
        find_bazelisk(None, UNREACHABLE, tmp_path)
    digest = hashlib.sha256(program.read_bytes()).hexdigest()
    pin = replace(UNREACHABLE, sha256=digest)
    assert find_bazelisk(None, pin, tmp_path).origin == "PATH"
    given = find_bazelisk(str(program), PINS.bazelisk, tmp_path)
    assert (given.origin, given.sha256) == ("given", digest)


def test_a_tampered_fetched_one_is_refused_every_time(tmp_path: Path) -> None:
    pin = PINS.bazelisk
    place = tmp_path / "bazelisk" / pin.sha256 / pin.file
    place.parent.mkdir(parents=True)
    shutil.copy(Path("/bin/true").resolve(), place)
    for _ in range(2):
        with pytest.raises(ForgeError, match="has SHA-256") as caught:
            find_bazelisk(None, pin, tmp_path)
        assert caught.value.exit_code == Exit.FAULT
        assert pin.sha256 in caught.value.expected


def test_without_npm_it_comes_from_its_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    index = Index(files={"bazelisk": b"\x7fELF of Bazelisk"})
    digest = hashlib.sha256(index.files["bazelisk"]).hexdigest()
    with serve(index) as running:
        pin = replace(PINS.bazelisk, sha256=digest, release=f"{running.url}/files/bazelisk")
        tool = find_bazelisk(None, pin, tmp_path / "work")
        assert tool.path.read_bytes() == index.files["bazelisk"]
        assert tool.path.stat().st_mode & 0o111
        wrong = replace(pin, sha256="0" * 64)
        with pytest.raises(ForgeError, match="has") as caught:
            find_bazelisk(None, wrong, tmp_path / "other")
        assert caught.value.exit_code == Exit.FAULT
        gone = replace(pin, release=f"{running.url}/files/gone")
        with pytest.raises(ForgeError, match=r"npm is not installed; http.*404") as caught:
            find_bazelisk(None, gone, tmp_path / "other")
        assert caught.value.exit_code == Exit.CANNOT
    assert [one for one in (tmp_path / "other").rglob("*") if one.is_file()] == []


def test_an_npm_package_with_another_binary_leaves_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an npm that packs whatever it likes
    real = shutil.which("tar", path="/usr/bin:/bin")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / PINS.bazelisk.file).write_bytes(b"\x7fELF of somebody else")
    npm = path / "npm"
    npm.write_text(f"#!/bin/sh\nexec {real} -C '{tmp_path}' -czf ./x.tgz package\n")
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    with pytest.raises(ForgeError, match="has SHA-256") as caught:
        find_bazelisk(None, PINS.bazelisk, tmp_path / "work")
    assert caught.value.exit_code == Exit.FAULT
    assert [one for one in (tmp_path / "work").rglob("*") if one.is_file()] == []


def test_the_source_names_its_bazel(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="does not say which Bazel"):
        wanted_bazel(tmp_path, None)
    (tmp_path / ".bazelversion").write_text("# ours\n\n8.4.2\n")
    assert wanted_bazel(tmp_path, None) == "8.4.2"
    (tmp_path / ".bazeliskrc").write_text("BAZELISK_X=1\nUSE_BAZEL_VERSION=7.7.1\n")
    assert wanted_bazel(tmp_path, None) == "7.7.1"
    assert wanted_bazel(tmp_path, "9.0.0rc1") == "9.0.0rc1"
    assert wanted_bazel(tmp_path, str(tmp_path / ".bazelversion")) == str(
        tmp_path / ".bazelversion"
    )


@pytest.mark.parametrize("vague", ["latest", "7.x", "last_green", "fork/7.7.1", "/no/such/bazel"])
def test_a_bazel_of_the_day_is_refused(tmp_path: Path, vague: str) -> None:
    (tmp_path / ".bazelversion").write_text(vague)
    for given, where in ((None, ".bazelversion"), (vague, "--bazel")):
        with pytest.raises(ForgeError, match=f"{where} names Bazel '{vague}'"):
            wanted_bazel(tmp_path, given)


def test_the_environment_of_bazel_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *("BAZELISK_BASE_URL", "USE_BAZEL_VERSION", "BAZELISK_HOME", "JAVA_TOOL_OPTIONS"),
        *("HOME", "CC", "AWS_SECRET_ACCESS_KEY", "PIP_INDEX_URL"),
    ):
        monkeypatch.setenv(name, "/poison")
    made = environment(tmp_path)
    assert "/poison" not in made.values()
    assert not [name for name in made if name.startswith(("PIP_", "UV_"))]
    assert made["HOME"] == str(tmp_path / "home")
    # the source's tools/bazel would run in the place of the Bazel whose digest was checked
    assert made["BAZELISK_SKIP_WRAPPER"] == "1"
    made = environment(tmp_path, "7.7.1", "http://127.0.0.1:1")
    assert made["USE_BAZEL_VERSION"] == "7.7.1"
    assert made["BAZELISK_BASE_URL"] == "http://127.0.0.1:1"


class Cache:
    """Bazelisk's cache as Bazelisk lays it out, and a Bazelisk that fills it."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.downloads = work / "bazelisk-home" / "downloads"
        self.program = b"#!/bin/sh\necho bazel 7.7.1\n"

    def binary(self, digest: str) -> Path:
        return self.downloads / "sha256" / digest / "bin" / "bazel"

    def fill(self) -> str:
        digest = hashlib.sha256(self.program).hexdigest()
        record = self.downloads / "metadata" / "origin" / "bazel-7.7.1-linux-x86_64"
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(digest)
        self.binary(digest).parent.mkdir(parents=True, exist_ok=True)
        self.binary(digest).write_bytes(self.program)
        return digest

    def prepare(self, known: dict[str, str], script: str = "echo bazel 7.7.1") -> Bazel:
        line = ["/bin/sh", "-c", script]
        return prepare_bazel(line, "7.7.1", known, self.work, {}, cwd=self.work, timeout=30)


def test_the_digest_of_bazel_is_pinned_or_recorded(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert verify_bazel("7.7.1", {}, tmp_path) is None
    digest = cache.fill()
    assert cache.prepare({"7.7.1": digest}) == Bazel("7.7.1", digest, "pinned")
    assert cache.prepare({}) == Bazel("7.7.1", digest, "new")
    assert json.loads((tmp_path / "bazel.json").read_text()) == {"7.7.1": digest}
    assert cache.prepare({}) == Bazel("7.7.1", digest, "recorded")


def test_a_bazel_that_was_changed_in_the_cache_does_not_run(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    digest = cache.fill()
    cache.prepare({})
    # its place still says what it was
    cache.binary(digest).write_bytes(b"changed")
    mark = tmp_path / "ran"
    for known in ({}, {"7.7.1": digest}):
        with pytest.raises(ForgeError, match="in the cache of Bazelisk has SHA-256") as caught:
            cache.prepare(known, f"touch {mark}; echo bazel 7.7.1")
        assert caught.value.exit_code == Exit.FAULT
        assert digest in caught.value.expected
        assert f"rm -r {cache.downloads}" in caught.value.mend
    assert not mark.exists()
    # and so does one that was put there with a place of its own
    cache.program = b"#!/bin/sh\necho bazel 7.7.1; evil\n"
    cache.fill()
    with pytest.raises(ForgeError, match="has SHA-256") as caught:
        cache.prepare({}, f"touch {mark}; echo bazel 7.7.1")
    assert "as on the first run with this cache" in caught.value.expected
    with pytest.raises(ForgeError, match="has SHA-256") as caught:
        cache.prepare({"7.7.1": digest}, f"touch {mark}; echo bazel 7.7.1")
    assert "as lock/pins.toml says" in caught.value.expected
    assert not mark.exists()


def test_a_bazel_that_cannot_be_had(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    with pytest.raises(ForgeError, match=r"there is no Bazel 7\.7\.1") as caught:
        cache.prepare({}, "echo could not download Bazel; exit 1")
    assert caught.value.exit_code == Exit.CANNOT
    assert "could not download Bazel" in caught.value.found
    with pytest.raises(ForgeError, match="is another one") as caught:
        cache.prepare({"7.7.1": "a" * 64}, "echo has sha256=1 but need sha256=2; exit 1")
    assert caught.value.exit_code == Exit.FAULT


def test_a_bazel_of_the_users_own(tmp_path: Path) -> None:
    program = tmp_path / "bazel"
    program.write_bytes(b"mine")
    line = ["/bin/sh", "-c", "echo bazel 6.0.0"]
    made = prepare_bazel(line, str(program), {}, tmp_path, {}, cwd=tmp_path, timeout=30)
    assert made == Bazel("6.0.0", hashlib.sha256(b"mine").hexdigest(), "given")
    assert not (tmp_path / "bazel.json").exists()


@pytest.mark.timeout(20)
def test_files_that_are_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ForgeError, match="not a native program"):
        find_bazelisk(str(tmp_path / "pipe"), PINS.bazelisk, tmp_path)
    for name in (".bazelversion", ".bazeliskrc"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ForgeError, match="not a regular file") as caught:
            wanted_bazel(tmp_path, None)
        assert caught.value.exit_code == Exit.FAULT
        (tmp_path / name).unlink()
    (tmp_path / ".bazelversion").write_text("7" * 100_000)
    with pytest.raises(ForgeError, match="more than 65,536 bytes"):
        wanted_bazel(tmp_path, None)
