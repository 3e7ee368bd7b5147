"""The Debian lock: its form, its staleness, and what the verb says of a bad one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from base_support import LOCK, base, checkout, environment
from tpuforge import mirrors
from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.images import base as recipe
from tpuforge.images.debian import (
    Apt,
    Deb,
    check_asked,
    parse_deb,
    read_deb_lock,
    unreachable,
    write_deb_lock,
)
from tpuforge.mirrors import Mirror as DebianMirror
from tpuforge.mirrors import pick_mirror, snapshot_of
from tpuforge.pins import Suite, load

ZERO = "0" * 64


def test_the_committed_lock_is_the_one_of_the_pins() -> None:
    lock = read_deb_lock(LOCK)
    check_asked(lock, load().debian["bookworm"], LOCK)
    assert {deb.name for deb in lock.debs} >= {"libc6", "python3", "usr-is-merged"}


def test_every_set_of_the_pins_has_its_lock_and_a_further_set_holds_the_suites_own() -> None:
    pins = load()
    locks = {}
    for label, suite in pins.debian.items():
        path = LOCK.with_name(f"{label}.lock")
        locks[label] = read_deb_lock(path)
        check_asked(locks[label], suite, path)
    assert {path.stem for path in LOCK.parent.glob("*.lock")} == set(pins.debian)
    assert pins.debian["bookworm-builder"].name == "bookworm"
    # one state of Debian in both: what is built in one is at home in the other
    assert set(locks["bookworm"].debs) < set(locks["bookworm-builder"].debs)
    assert "git" in {deb.name for deb in locks["bookworm-builder"].debs}
    assert "git" not in {deb.name for deb in locks["bookworm"].debs}
    # the same Debian, without its Python and what only that needs
    assert set(locks["trixie-py312"].debs) < set(locks["trixie"].debs)
    assert not {deb.name for deb in locks["trixie-py312"].debs if "python" in deb.name}
    assert all("tini" in {deb.name for deb in lock.debs} for lock in locks.values())


def test_every_python_has_a_base_with_that_python_and_no_other() -> None:
    pins = load()
    assert set(pins.suites) == set(pins.pythons)
    for python, label in pins.suites.items():
        suite = pins.debian[label]
        lock = read_deb_lock(LOCK.with_name(f"{label}.lock"))
        own = [deb.version for deb in lock.debs if deb.name == "python3"]
        if suite.python:
            assert (suite.python, own) == (python, [])
            assert pins.standalone[python].version.startswith(f"{python}.")
        else:
            assert [version.rsplit(".", 1)[0] for version in own] == [python]


@pytest.mark.parametrize("suite", ["bookworm", "forky"])
def test_a_suite_with_another_python_than_the_pins_say_is_refused(
    tmp_path: Path, suite: str
) -> None:
    lock = LOCK.with_name(f"{suite}.lock").read_text(encoding="utf-8")
    root = checkout(tmp_path / "tree")
    changed = re.sub(r"  python3_[^_]+_", "  python3_3.15.1-1_", lock)
    (root / "lock" / "debian" / f"{suite}.lock").write_text(changed, encoding="utf-8")
    code, output = base(environment(root, tmp_path / "out"), "--suite", suite)
    assert code == 1
    assert f"python3 of {suite} is 3.15.1-1, not 3.1" in output
    # only testing moves by itself
    assert ("moves every day" in output) is (suite == "forky")


def test_the_lock_of_testing_says_that_it_moves(tmp_path: Path) -> None:
    deb = Deb("login", "1:4.16", "amd64", ZERO)
    for suite in (Suite("forky", ("login",), rolling=True), Suite("trixie", ("login",))):
        write_deb_lock(tmp_path / "x.lock", suite, [deb])
        assert ("moves every day" in (tmp_path / "x.lock").read_text("utf-8")) is suite.rolling
        assert read_deb_lock(tmp_path / "x.lock").debs == (deb,)
    assert "moves every day" in LOCK.with_name("forky.lock").read_text(encoding="utf-8")


def test_a_version_that_left_testing_is_told_with_a_word_on_testing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path))
    monkeypatch.setattr(recipe, "_ensure_tools", lambda progress: None)
    monkeypatch.setattr(recipe.debian, "fetch", lambda lock, progress: list(lock.debs[:1]))
    pins = load()
    for label, said in (("forky", True), ("trixie", False)):
        with Progress("base", quiet=True) as progress, pytest.raises(ForgeError) as caught:
            recipe.ensure_base(pins.debian[label], pins, progress, release=True)
        assert "can no longer be had: base-files" in caught.value.found
        assert ("keep the snapshot archive within reach" in caught.value.mend) is said


BUILDER = "[debian.bookworm.builder]\n"
OWN = '[debian.trixie.py312]\nwithout = ["python3"]\n'
BUILD = '[python.standalone."3.12"]\nversion = "3.12'


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (f"{BUILDER}packages = [", f'{BUILDER}packages = ["python3", ', "has not already"),
        (f"{BUILDER}packages = [", f"{BUILDER}package = [", "packages is missing"),
        (BUILDER, f"{BUILDER}colour = 1\n", "debian.bookworm.builder.colour is an unknown key"),
        (BUILDER, f"colour = 1\n{BUILDER}", "debian.bookworm.colour is 1"),
        ('"3.11" = "bookworm"', '"3.11" = "bookworm-builder"', "a table [debian.bookworm-builder]"),
        ('"3.11" = "bookworm"', '"3.11" = "trixie"', "not that of 3.13 too"),
        ('"3.12" = "trixie-py312", "3.13" = "trixie"', '"3.13" = "trixie-py312"', "not 3.12"),
        (f'{OWN}python = "3.12"', f'{OWN}python = "3.13"', "is trixie-py312"),
        (f'{OWN}python = "3.12"', OWN, "debian.trixie.py312.packages is missing"),
        (OWN, "[debian.trixie.py312]\n", "one Python in a base, not two"),
        (OWN, OWN.replace("python3", "perl"), "packages that the suite asks for"),
        (f"{BUILD}.14", f"{BUILD}.13", "the address of 3.12.13"),
        (f"{BUILD}.14", BUILD.replace('= "3.12', '= "3.11') + ".14", "of the form 3"),
        ('[python.standalone."3.12"]', '[python.standalone."3.10"]', "of the form 3"),
        ("rolling = true", 'rolling = "daily"', "true or false"),
    ],
)
def test_a_set_that_makes_no_sense_is_refused(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    text = (LOCK.parents[1] / "pins.toml").read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tmp_path / "pins.toml").write_text(text.replace(old, new))
    with pytest.raises(ForgeError) as caught:
        load(tmp_path / "pins.toml")
    assert said in f"{caught.value.found} {caught.value.expected}"
    assert caught.value.exit_code == Exit.FAULT


def test_the_lock_of_a_further_set_is_stale_on_its_own(tmp_path: Path) -> None:
    pins = (LOCK.parents[1] / "pins.toml").read_text(encoding="utf-8")
    root = checkout(tmp_path / "tree", pins=pins.replace('["git", "patch", ', '["git", "file", '))
    code, output = base(environment(root, tmp_path / "out"), "--suite", "bookworm-builder")
    assert code == 1
    assert "bookworm-builder.lock is stale" in output
    assert "(+file -patch)" in output


def test_a_lock_reads_back_as_it_was_written(tmp_path: Path) -> None:
    debs = [Deb("login", "1:4.13+dfsg1-1", "amd64", ZERO), Deb("debconf", "1.5.82", "all", ZERO)]
    write_deb_lock(tmp_path / "x.lock", Suite("bookworm", ("login",)), debs)
    lock = read_deb_lock(tmp_path / "x.lock")
    assert lock.debs == tuple(sorted(debs))
    assert lock.asked == ("login",)
    assert "login_1%3a4.13+dfsg1-1_amd64.deb" in (tmp_path / "x.lock").read_text()


def test_a_package_for_another_machine_has_no_place_in_a_lock() -> None:
    assert parse_deb("libc6_2.36-9_arm64.deb", ZERO) is None
    assert parse_deb("libc6_2.36-9_amd64.deb", ZERO) == Deb("libc6", "2.36-9", "amd64", ZERO)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("_amd64.deb", "_arm64.deb"), "is not name_version_arch.deb"),
        (lambda text: text.replace("# snapshot: ", "# moment: "), "no line '# snapshot: …'"),
        (lambda text: text.replace("# suite: bookworm", "# suite: trixie"), "the lock of trixie"),
        (lambda text: text.replace("python3 tini\n", "perl tini\n"), "(+python3 -perl)"),
        (lambda text: text[:-80], "is not a line of sha256sum"),
        (lambda text: text.replace("  bash_", "  dash_"), "dash stands there twice"),
        (lambda text: "\n".join(ln for ln in text.splitlines() if "  python3_" not in ln),
         "does not hold python3"),
    ],
)  # fmt: skip
def test_a_bad_lock_is_refused_with_exit_code_1(tmp_path: Path, change, said: str) -> None:  # type: ignore[no-untyped-def]
    root = checkout(tmp_path / "tree", lock=change(LOCK.read_text(encoding="utf-8")))
    code, output = base(environment(root, tmp_path / "out"))
    assert code == 1
    assert said in output
    assert "mend:" in output
    assert not (tmp_path / "out" / "base").exists()


def test_a_missing_lock_names_the_command_that_writes_it(tmp_path: Path) -> None:
    root = checkout(tmp_path / "tree")
    (root / "lock" / "debian" / "bookworm.lock").unlink()
    code, output = base(environment(root, tmp_path / "out"))
    assert code == 2
    assert "./forge base --relock" in output


def test_an_unknown_suite_is_refused(tmp_path: Path) -> None:
    code, output = base(environment(LOCK.parents[2], tmp_path / "out"), "--suite", "sarge")
    assert code == 2
    assert "no suite 'sarge'" in output
    assert "bookworm" in output


ONE_LINE = """
# deb http://wrong.example/debian bookworm main
deb cdrom:[Debian]/ bookworm main
deb [arch=amd64 signed-by=/k.gpg] http://a.example/debian/ bookworm main contrib
deb-src http://b.example/debian bookworm main
deb http://c.example/debian-security bookworm-security main
"""
DEB822 = """
Types: deb
Enabled: no
URIs: http://off.example/debian
Suites: bookworm
Components: main

Types: deb deb-src
# a comment
URIs: http://a.example/debian/
Suites: bookworm
 bookworm-updates
Components: main

Types: deb
URIs: http://c.example/debian-security
Suites: bookworm-security
Components: main
"""


@pytest.mark.parametrize("text", [ONE_LINE, DEB822])
def test_the_mirror_of_the_machine_is_found_in_both_formats(text: str) -> None:
    found = pick_mirror(text, ("bookworm", "stable"), "here")
    assert found is not None
    assert found.main == "http://a.example/debian"
    assert found.security == "http://c.example/debian-security"


def test_sources_of_another_distribution_name_no_mirror() -> None:
    text = "deb http://archive.example/ubuntu noble main\n"
    assert pick_mirror(text, ("bookworm", "stable"), "here") is None


def test_the_snapshot_archive_is_named_by_setting_or_domain(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv("TPUFORGE_DEBIAN_SNAPSHOT", raising=False)
    stamp = "20261130T000000Z"
    found = snapshot_of(DebianMirror("http://ftp.xx.example.org/debian", "", ""), stamp)
    assert found is not None
    assert found.main == f"http://snapshot.example.org/archive/debian/{stamp}"
    assert "check-valid-until=no" in found.options
    assert snapshot_of(DebianMirror("http://192.0.2.1/debian", "", ""), stamp) is None
    assert snapshot_of(DebianMirror("file:///srv/debian", "", ""), stamp) is None
    monkeypatch.setenv("TPUFORGE_DEBIAN_SNAPSHOT", "http://old.example/")
    found = snapshot_of(DebianMirror("file:///srv/debian", "", ""), stamp)
    assert found is not None
    assert found.security == f"http://old.example/archive/debian-security/{stamp}"


def test_an_error_of_a_lock_carries_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "x.lock").write_text("# suite: bookworm\n", encoding="utf-8")
    with pytest.raises(ForgeError) as caught:
        read_deb_lock(tmp_path / "x.lock")
    assert caught.value.exit_code is Exit.FAULT
    assert "holds no package" in caught.value.found


def test_a_machine_without_security_sources_still_gives_images_the_fixes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_main = mirrors.Mirror("http://m.example/debian", "", "this machine's apt sources")
    default = mirrors.Mirror("http://d.example/debian", "http://d.example/security", "default")
    monkeypatch.delenv("TPUFORGE_DEBIAN_MIRROR", raising=False)
    monkeypatch.setattr(mirrors, "os_release", lambda: {"ID": "debian"})
    monkeypatch.setattr(mirrors, "pick_mirror", lambda *_: only_main)
    monkeypatch.setattr(mirrors, "_default_mirror", lambda: default)
    assert mirrors.find_mirror() == only_main
    found = mirrors.image_mirror()
    assert (found.main, found.security) == (only_main.main, default.security)
    # whoever sets a mirror without a security archive means it
    monkeypatch.setenv("TPUFORGE_DEBIAN_MIRROR", "http://own.example/debian")
    monkeypatch.setenv("TPUFORGE_DEBIAN_SECURITY_MIRROR", "")
    assert mirrors.image_mirror().security == ""


@pytest.mark.parametrize(
    ("problem", "said", "mend"),
    [
        ("E: Release file for http://m/InRelease is expired", "this machine's clock", "set the"),
        ("E: Release file for http://m/x is not valid yet (invalid for", "clock", "set the clock"),
        ("W: GPG error: EXPKEYSIG 6ED0E7B82643E131 Debian", "clock (2", "debian-archive-keyring"),
        ("W: GPG error: NO_PUBKEY 6ED0E7B82643E131", "keyring here is too old", "--only-upgrade"),
        ("E: Failed to fetch: Could not connect", "does not answer", "check the network"),
    ],
)
def test_a_mirror_that_cannot_be_used_is_told_by_its_reason(
    problem: str, said: str, mend: str
) -> None:
    error = unreachable(DebianMirror("http://m", "", "a test"), problem, ["libc6"])
    assert said in error.found
    assert problem in error.found
    assert mend in error.mend
    assert error.exit_code == Exit.CANNOT


@pytest.mark.skipif(shutil.which("apt-config") is None, reason="there is no apt here")
def test_a_password_of_a_mirror_is_never_in_the_out_folder(tmp_path: Path) -> None:
    folder = tmp_path / "apt"
    apt = Apt(folder, DebianMirror("http://u:hunter2@127.0.0.1:9/d", "", "a test").sources("x"))
    private = apt._sources.parent
    assert "hunter2" in apt._sources.read_text(encoding="utf-8")
    assert private.stat().st_mode & 0o077 == 0
    assert "hunter2" not in apt.update(timeout=30)
    for path in folder.rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes(), path
    del apt
    assert not private.exists()
