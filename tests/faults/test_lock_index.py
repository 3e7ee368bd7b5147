"""What an index, and a user's pip configuration, may and may not do to a lock."""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import time
from pathlib import Path

import pytest

from lock_support import Checkout, Index, checkout, copy_of, good_index, wheel_bytes
from tpuforge.lockfile import read_digests, read_lock
from tpuforge.pins import load

RUNTIME = ("--flavour", "runtime")
UV = ("--way", "uv")
"""Where both ways do the same: uv starts sooner."""
WAYS = ["auto", "uv"]
"""auto is pip-tools wherever Python 3.11 is at hand."""


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout whose runtime lock was written from the good index."""
    made = checkout(tmp_path_factory.mktemp("locked"), small=True)
    with good_index() as index:
        done = made.run("resolve", *RUNTIME, PIP_INDEX_URL=index.url)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture
def own(locked: Checkout, tmp_path: Path) -> Checkout:
    """A copy of that checkout, without its proofs."""
    return copy_of(locked, tmp_path)


def test_lock_holds_one_file_for_the_target_and_names_no_host(locked: Checkout) -> None:
    text = locked.runtime.read_text(encoding="utf-8")
    packages = {p.name: p for p in read_lock(locked.runtime)}
    assert {name: p.version for name, p in packages.items()} == {
        "alpha": "1.0",  # 1.1 is yanked, 1.2 was uploaded after the cutoff
        "filelock": "3.0",
        "libtpu": "0.0.52",  # the pins', not the newest
        "torch": "2.13.0+cpu",
        "torch-tpu": "0.2.0",
    }
    with good_index() as index:
        best = next(e for e in index.pages["alpha"] if "311-manylinux_2_28" in e["filename"])
    assert packages["alpha"].sha256 == best["hashes"]["sha256"]
    table = read_digests(locked.lock / "torch-cpu.sha256")
    assert (
        packages["torch"].sha256 == table["torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"]
    )
    assert "127.0.0.1" not in text
    assert "Zoë" not in text


def test_provenance_says_why_and_names_no_host(locked: Checkout) -> None:
    text = locked.runtime.with_suffix(".json").read_text(encoding="utf-8")
    entries = {entry["name"]: entry for entry in json.loads(text)["packages"]}
    assert entries["alpha"]["why"] == ["torch-tpu", "alpha"]
    assert entries["filelock"]["why"] == ["torch", "filelock"]
    assert entries["alpha"]["uploaded"] == "2026-01-01T00:00:00Z"
    assert {name for name, e in entries.items() if e["index"] == "PyTorch index"} == {"torch"}
    assert entries.keys() == {package.name for package in read_lock(locked.runtime)}
    assert "127.0.0.1" not in text


def test_flavour_on_top_holds_the_lock_below_line_for_line(own: Checkout) -> None:
    (own.lock / "dev.in").write_text("beta\n", encoding="utf-8")
    with good_index() as index:
        index.add("alpha", "1.5")  # newer than what runtime is locked at
        index.add("beta", "1.0", requires=("alpha", "gamma[more]"))
        index.add("gamma", "1.0", requires=("delta; extra == 'more'", "epsilon; extra == 'less'"))
        index.add("delta", "1.0")
        for way in ("auto", "uv"):
            done = own.run("resolve", "--flavour", "dev", "--way", way, PIP_INDEX_URL=index.url)
            assert done.returncode == 0, done.stderr
        index.add("beta", "2.0", requires=("alpha>=1.5",))
        (own.lock / "dev.in").write_text("beta>=2\n", encoding="utf-8")
        refused = own.run("resolve", "--flavour", "dev", *UV, PIP_INDEX_URL=index.url)
    assert refused.returncode == 1, refused.stderr
    assert "found no solution of dev for Python 3.11" in refused.stderr
    lock = own.lock / "dev-py311.txt"
    above, below = read_lock(lock), read_lock(own.runtime)
    assert set(below) < set(above)
    assert {p.name for p in above} - {p.name for p in below} == {"beta", "delta", "gamma"}
    why = json.loads(lock.with_suffix(".json").read_text(encoding="utf-8"))["packages"]
    chain = next(entry["why"] for entry in why if entry["name"] == "delta")
    assert chain == ["beta", "gamma", "delta"]


@pytest.mark.parametrize("way", ["auto", "uv"])  # auto is pip-tools where Python 3.11 is at hand
def test_index_with_a_cpu_torch_of_its_own_changes_no_byte(own: Checkout, way: str) -> None:
    before = own.runtime.read_bytes()
    with good_index() as index:
        tag = "cp311-cp311-manylinux_2_28_x86_64"
        for version in ("2.13.0+cpu", "2.13.0+cu130", "2.99.0+cpu"):
            index.add("torch", version, tag, requires=("beta",))
        index.add("beta", "1.0")
        done = own.run("resolve", *RUNTIME, "--way", way, PIP_INDEX_URL=index.url)
    # the right lock or a refusal, never another lock
    assert done.returncode in (0, 1), done.stderr
    assert own.runtime.read_bytes() == before


@pytest.mark.parametrize("way", ["auto", "uv"])
def test_local_version_beside_its_release_gets_its_own_digest(own: Checkout, way: str) -> None:
    own.runtime.unlink()
    with good_index() as index:
        digest = index.add("alpha", "1.0+cpu", "cp311-cp311-manylinux_2_28_x86_64")
        done = own.run("resolve", *RUNTIME, "--way", way, PIP_INDEX_URL=index.url)
    assert done.returncode == 0, done.stderr
    alpha = next(p for p in read_lock(own.runtime) if p.name == "alpha")
    assert (alpha.version, alpha.sha256) == ("1.0+cpu", digest)


def test_upgrade_moves_the_cutoff_and_says_what_changed_or_changes_nothing(own: Checkout) -> None:
    (own.lock / "tools.in").unlink()  # the real tools are not on this index
    pins = own.lock / "pins.toml"
    text = pins.read_text(encoding="utf-8")
    pins.write_text(text.replace("2026-11-30T00:00:00Z", "2026-05-01T00:00:00Z"), encoding="utf-8")
    with good_index() as index:
        assert own.run("resolve", *UV, PIP_INDEX_URL=index.url).returncode == 0
        before = {path: path.read_bytes() for path in own.lock.iterdir()}
        index.add("alpha", "1.3", uploaded="2026-06-01T00:00:00Z", requires=("nvidia-nccl",))
        index.add("nvidia-nccl", "1.0", uploaded="2026-06-01T00:00:00Z")
        upgrade = ("--upgrade", "2026-11-29", *UV)
        refused = own.run("resolve", *upgrade, PIP_INDEX_URL=index.url)
        assert refused.returncode == 1, refused.stderr
        assert {path: path.read_bytes() for path in own.lock.iterdir()} == before
        index.pages["alpha"].pop()
        index.add("alpha", "1.3", uploaded="2026-06-01T00:00:00Z", mark="beta")
        index.add("beta", "1.0", uploaded="2026-06-01T00:00:00Z")
        done = own.run("resolve", *upgrade, PIP_INDEX_URL=index.url)
        assert done.returncode == 0, done.stderr
        nothing = own.run("resolve", *upgrade, PIP_INDEX_URL=index.url)
    assert "alpha | 1.0 | 1.3 | ? → ? | torch-tpu > alpha | runtime-py311 |" in done.stdout
    assert "beta | new | 1.0 | 0 → ? | torch-tpu > alpha > beta | runtime-py311 |" in done.stdout
    assert "2 packages changed in 1 locks" in done.stdout
    assert 'cutoff = "2026-11-29T00:00:00Z"' in pins.read_text(encoding="utf-8")
    assert "alpha==1.3" in own.runtime.read_text(encoding="utf-8")
    assert nothing.returncode == 2
    assert "is not before" in nothing.stderr


def test_poisoned_settings_change_no_byte(own: Checkout, tmp_path: Path) -> None:
    before = own.runtime.read_bytes()
    links = tmp_path / "links"
    links.mkdir()
    (links / "alpha-99.0-py3-none-any.whl").write_bytes(
        wheel_bytes("alpha", "99.0", "py3-none-any")
    )
    (tmp_path / "cap").write_text("alpha<0.5\nfilelock<1\n", encoding="utf-8")
    poison = Index()
    poison.add("alpha", "99.0")
    with good_index() as index, poison:
        env = {
            "PIP_INDEX_URL": index.url,
            "PIP_EXTRA_INDEX_URL": poison.url,
            "PIP_FIND_LINKS": str(links),
            "PIP_CONSTRAINT": str(tmp_path / "cap"),
            "PIP_PRE": "1",
            "UV_INDEX": poison.url,
            "UV_EXTRA_INDEX_URL": poison.url,
            "UV_CONSTRAINT": str(tmp_path / "cap"),
        }
        for way in ("auto", "uv"):  # auto is pip-tools wherever Python 3.11 is at hand
            done = own.run("resolve", *RUNTIME, "--way", way, **env)
            assert done.returncode == 0, done.stderr
            assert "constraint, extra-index-url, find-links" in done.stderr
            assert own.runtime.read_bytes() == before
        assert poison.asked == []


@pytest.mark.parametrize("way", WAYS)
def test_same_release_on_two_indexes_gets_the_file_of_the_main_one(
    own: Checkout, tmp_path: Path, way: str
) -> None:
    before = own.runtime.read_bytes()
    own.runtime.unlink()  # nothing to compare with: the digests are learnt anew
    links = tmp_path / "links"
    links.mkdir()
    with good_index() as index, Index() as other:
        for name, entries in index.pages.items():
            for entry in entries:
                release, tag = entry["filename"].removesuffix(".whl").split("-", 2)[1:]
                digest = other.add(name, release, tag, mark="never; sys_platform == 'never'")
                assert digest != entry["hashes"]["sha256"]
        assert other.files.keys() == index.files.keys()
        for file, data in other.files.items():
            (links / file).write_bytes(data)
        pip = tmp_path / "pip.conf"
        pip.write_text(
            f"[global]\nindex-url = {index.url}\nextra-index-url = {other.url}\n"
            f"find-links = {links}\n",
            encoding="utf-8",
        )
        uv = tmp_path / "uv.toml"
        uv.write_text(
            f'find-links = ["{links}"]\n[[index]]\nname = "other"\nurl = "{other.url}"\n',
            encoding="utf-8",
        )
        env = {"PIP_CONFIG_FILE": str(pip), "UV_CONFIG_FILE": str(uv)}
        env |= dict.fromkeys(("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"), other.url)
        env |= dict.fromkeys(("PIP_FIND_LINKS", "UV_FIND_LINKS"), str(links))
        env |= {"UV_DEFAULT_INDEX": other.url, "UV_INDEX_STRATEGY": "unsafe-best-match"}
        done = own.run("resolve", *RUNTIME, "--way", way, **env)
    assert done.returncode == 0, done.stderr
    assert own.runtime.read_bytes() == before
    assert other.asked == []
    result = json.loads((own.root / "out" / "results" / "lock.json").read_text(encoding="utf-8"))
    if way == "uv" or sys.version_info[:2] == (3, 11):
        assert result["data"]["locks"][0]["way"] == ("uv" if way == "uv" else "pip-tools")


@pytest.mark.parametrize("way", WAYS)
def test_each_odd_release_gets_its_right_file(own: Checkout, way: str) -> None:
    own.runtime.unlink()
    here = "sys_platform == 'linux' and platform_machine == 'x86_64' and os_name == 'posix'"
    markers = {
        "here": f"{here} and implementation_name == 'cpython'",
        "now": "python_version >= '3.11' and python_full_version < '3.12'",
        "mac": "sys_platform == 'darwin'",
        "windows": "os_name == 'nt' or platform_system == 'Windows'",
        "arm": "platform_machine == 'aarch64'",
        "pypy": "platform_python_implementation == 'PyPy'",
        "later": "python_version >= '3.12'",
        "extra": "extra == 'never'",
    }
    inputs = ("built", "libtpu", "lower", "odd", "partly", "torch", "torch-tpu")
    (own.lock / "runtime.in").write_text("\n".join(inputs) + "\n", encoding="utf-8")
    cp311 = "cp311-cp311-manylinux_2_28_x86_64"
    never = "sys_platform == 'never'"
    with good_index() as index:
        builds = {
            # the mark makes the bytes of each build its own
            number: index.add("built", "1.0", f"{number}-py3-none-any", mark=f"b{number}; {never}")
            for number in ("2", "10", "9")
        }
        index.add("built", "1.0")
        right = {"built": ("1.0", builds["10"]), "lower": ("1.5", index.add("lower", "1.5"))}
        index.add("lower", "1.4")
        index.add("lower", "2.0", yanked=True)
        index.add("partly", "1.0", cp311, yanked=True)
        right["partly"] = ("1.0", index.add("partly", "1.0"))
        index.add("odd", "1.0", requires=tuple(f"{n}; {m}" for n, m in markers.items()))
        for name in markers:
            index.add(name, "1.0")
        done = own.run("resolve", *RUNTIME, "--way", way, PIP_INDEX_URL=index.url)
    assert done.returncode == 0, done.stderr
    locked = {p.name: (p.version, p.sha256) for p in read_lock(own.runtime)}
    assert {name: locked[name] for name in right} == right
    assert locked.keys() & markers.keys() == {"here", "now"}


def test_markers_are_read_for_a_python_that_is_not_there(own: Checkout) -> None:
    (own.lock / "smoke.in").write_text("odd\n", encoding="utf-8")
    with good_index() as index:
        needs = ("now; python_version >= '3.14'", "then; python_version < '3.14'")
        index.add("odd", "1.0", "cp311-cp311-manylinux_2_28_x86_64", requires=("then",))
        digest = index.add("odd", "1.0", "cp314-cp314-manylinux_2_28_x86_64", requires=needs)
        index.add("now", "1.0")
        index.add("then", "1.0")
        words = ("--flavour", "smoke", "--python", "3.14", "--way", "uv")
        done = own.run("resolve", *words, PIP_INDEX_URL=index.url)
    assert done.returncode == 0, done.stderr
    locked = {p.name: p.sha256 for p in read_lock(own.lock / "smoke-py314.txt")}
    assert locked.keys() == {"odd", "now"}
    assert locked["odd"] == digest


@pytest.mark.parametrize("way", WAYS)
def test_local_version_never_stands_for_a_release_of_the_pins(own: Checkout, way: str) -> None:
    before = own.runtime.read_bytes()
    own.runtime.unlink()
    with good_index() as index:
        # by PEP 440 it satisfies the pin, and is higher
        index.add("libtpu", f"{load().libtpu}+other", "cp311-cp311-manylinux_2_31_x86_64")
        done = own.run("resolve", *RUNTIME, "--way", way, PIP_INDEX_URL=index.url)
    if done.returncode == 0:
        assert own.runtime.read_bytes() == before
    else:
        assert done.returncode == 1, done.stderr
        assert "libtpu" in done.stderr
        assert f"{load().libtpu}+other" in done.stderr
        assert not own.runtime.exists()


@pytest.mark.parametrize("way", WAYS)
def test_yanked_release_is_refused_even_if_a_package_demands_it(own: Checkout, way: str) -> None:
    own.runtime.unlink()
    (own.lock / "runtime.in").write_text("beta\nlibtpu\ntorch\ntorch-tpu\n", encoding="utf-8")
    with good_index() as index:
        index.add("beta", "1.0", requires=("alpha==1.1",))
        done = own.run("resolve", *RUNTIME, "--way", way, PIP_INDEX_URL=index.url)
    assert done.returncode == 1, done.stderr
    assert "alpha" in done.stderr
    assert "yanked" in done.stderr
    assert not own.runtime.exists()


@pytest.mark.parametrize("kind", ["md5", "sha512"])
def test_digest_of_another_kind_alone_is_refused(own: Checkout, kind: str) -> None:
    own.runtime.unlink()
    with good_index() as index:
        (entry,) = index.pages["filelock"]
        data = index.files[entry["filename"]]
        entry["hashes"] = {kind: hashlib.new(kind, data).hexdigest()}
        done = own.run("resolve", *RUNTIME, *UV, PIP_INDEX_URL=index.url)
    assert done.returncode == 1, done.stderr
    assert "no SHA-256" in done.stderr
    assert "filelock" in done.stderr
    assert not own.runtime.exists()


def test_wrong_digest_of_another_kind_makes_no_wrong_lock(own: Checkout) -> None:
    before = own.runtime.read_bytes()
    own.runtime.unlink()
    with good_index() as index:
        index.pages["filelock"][0]["hashes"] |= {"sha512": "ab" * 64, "md5": "cd" * 16}
        done = own.run("resolve", *RUNTIME, *UV, PIP_INDEX_URL=index.url)
    assert done.returncode in (0, 1), done.stderr
    if done.returncode == 0:
        assert own.runtime.read_bytes() == before
    else:
        assert not own.runtime.exists()


def test_another_index_cannot_rewrite_a_lock(own: Checkout) -> None:
    before = own.runtime.read_bytes()
    confusing, tampering = good_index(), good_index()
    confusing.add("alpha", "99.0")
    for page in tampering.pages.pop("filelock"):
        tampering.add("filelock", "3.0", mark="typing-extensions; sys_platform == 'never'")
        assert tampering.pages["filelock"][0]["hashes"] != page["hashes"]
    for index, words in (
        (confusing, "alpha is locked at 1.0, the index gives 99.0"),
        (tampering, "filelock has another digest"),
    ):
        with index:
            done = own.run("resolve", *RUNTIME, *UV, PIP_INDEX_URL=index.url)
            assert done.returncode == 1
            assert words in done.stderr
            assert "--renew" in done.stderr
            assert own.runtime.read_bytes() == before
    # another file under a known release is refused even when an input did change
    (own.lock / "runtime.in").write_text("alpha\nlibtpu\ntorch\ntorch-tpu\n", encoding="utf-8")
    with tampering:
        done = own.run("resolve", *RUNTIME, *UV, PIP_INDEX_URL=tampering.url)
    assert done.returncode == 1
    assert "filelock 3.0 has another file" in done.stderr
    with confusing:
        done = own.run("resolve", *RUNTIME, *UV, "--renew", PIP_INDEX_URL=confusing.url)
    assert done.returncode == 0, done.stderr
    assert "alpha==99.0" in own.runtime.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("apart", "way"),
    [(True, "auto"), (True, "uv"), (False, "uv")],
    ids=["metadata apart", "metadata apart, uv", "metadata in the wheel"],
)
def test_listed_file_that_is_missing_or_other_never_enters_a_lock(
    own: Checkout, apart: bool, way: str
) -> None:
    own.runtime.unlink()
    with good_index() as index:
        file = "filelock-3.0-py3-none-any.whl"
        if apart:
            # nothing but the verification ever reads the wheel itself
            index.pages["filelock"][0]["core-metadata"] = True
            metadata = b"Metadata-Version: 2.1\nName: filelock\nVersion: 3.0\n"
            index.files[f"{file}.metadata"] = metadata
        right = index.files.pop(file)
        done = own.run("resolve", *RUNTIME, "--way", way, PIP_INDEX_URL=index.url)
        assert done.returncode == 2, done.stderr
        assert "lists a file that is not there" in done.stderr
        assert file in done.stderr
        assert not own.runtime.exists()
        index.files[file] = right + b" "
        done = own.run("resolve", *RUNTIME, "--way", way, PIP_INDEX_URL=index.url)
        assert done.returncode == 1, done.stderr
        assert "serves other bytes than it lists" in done.stderr
        assert not own.runtime.exists()


def test_killed_lock_leaves_the_old_one_and_nothing_in_the_way(own: Checkout) -> None:
    before = own.runtime.read_bytes()
    with good_index() as index:
        index.hold.set()
        running = own.start("resolve", *RUNTIME, *UV, PIP_INDEX_URL=index.url)
        while not list(own.root.glob("out/lock/work-*")):
            assert running.poll() is None
            time.sleep(0.02)
        running.kill()
        running.wait()
        index.hold.clear()
        assert own.runtime.read_bytes() == before
        done = own.run("resolve", *RUNTIME, *UV, PIP_INDEX_URL=index.url)
    assert done.returncode == 0, done.stderr
    assert own.runtime.read_bytes() == before
    assert not list(own.root.glob("out/lock/work-*"))


def test_package_that_brings_cuda_is_refused(own: Checkout) -> None:
    with good_index() as index:
        index.pages["alpha"].clear()
        index.add("alpha", "1.0", requires=("nvidia-nccl",))
        index.add("nvidia-nccl", "2.0")
        for way in ("auto", "uv"):  # auto is pip-tools wherever Python 3.11 is at hand
            done = own.run("resolve", *RUNTIME, "--renew", "--way", way, PIP_INDEX_URL=index.url)
            assert done.returncode == 1
            assert "nvidia-nccl" in done.stderr
            assert "a closure without CUDA" in done.stderr


def test_index_without_upload_times_cannot_be_used(own: Checkout) -> None:
    with good_index(upload_times=False) as index:
        done = own.run("resolve", *RUNTIME, PIP_INDEX_URL=index.url)
    assert done.returncode == 2, done.stderr
    assert "does not say when its files were uploaded" in done.stderr


def test_set_without_a_solution_is_explained(own: Checkout) -> None:
    (own.lock / "runtime.in").write_text("beta\nlibtpu\ntorch\ntorch-tpu\n", encoding="utf-8")
    with good_index() as index:
        index.add("beta", "1.0", requires=("alpha<1",))
        done = own.run("resolve", *RUNTIME, PIP_INDEX_URL=index.url)
    assert done.returncode == 1, done.stderr
    assert "found no solution of runtime for Python 3.11" in done.stderr
    assert "all versions of beta depend on alpha<1" in done.stderr
    assert "Traceback" not in done.stderr


def test_unreachable_index_is_named_within_seconds(own: Checkout) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can answer there
        url = f"http://someone:secret@127.0.0.1:{taken.getsockname()[1]}/simple"
        started = time.monotonic()
        done = own.run("resolve", *RUNTIME, PIP_INDEX_URL=url)
        assert time.monotonic() - started < 30
        assert done.returncode == 2
        assert "127.0.0.1" in done.stderr
        assert "cannot be reached" in done.stderr
        assert "secret" not in done.stdout + done.stderr
        check = own.run("check", "--json", PIP_INDEX_URL=url)
        assert check.returncode == 2, check.stdout
        assert "secret" not in check.stdout + check.stderr
        result = json.loads(check.stdout)
        assert "cannot be reached" in result["data"]["not_judged"]
        assert result["data"]["faults"] == []


def test_proof_is_kept_until_something_changes(own: Checkout) -> None:
    with good_index() as index:
        first = own.run("check", PIP_INDEX_URL=index.url)
        assert first.returncode == 0, first.stdout + first.stderr
    # the index is gone now
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    started = time.monotonic()
    again = own.run("check", **nowhere)
    assert time.monotonic() - started < 5
    assert again.returncode == 0
    assert "nothing to do" in again.stdout
    assert "no input, pin or lock changed since the proof" in again.stdout
    pins = own.lock / "pins.toml"
    text = pins.read_text(encoding="utf-8").replace("2026-11-30T00:00:00Z", "2026-11-29T00:00:00Z")
    pins.write_text(text, encoding="utf-8")
    stale = own.run("check", **nowhere)
    assert stale.returncode == 1
    assert "runtime-py311.txt: [stale]" in stale.stdout


def test_check_finds_what_the_index_has_and_the_lock_has_not(own: Checkout) -> None:
    with good_index() as index:
        index.add("alpha", "1.5")
        done = own.run("check", PIP_INDEX_URL=index.url)
    assert done.returncode == 1
    assert "alpha is locked at 1.0, the index gives 1.5" in done.stdout
    assert "[fresh]" in done.stdout


def test_index_without_digests_cannot_be_used(own: Checkout) -> None:
    before = own.runtime.read_bytes()
    with good_index(digests=False) as index:
        done = own.run("resolve", *RUNTIME, PIP_INDEX_URL=index.url)
    assert done.returncode == 1, done.stderr
    assert "an index that lists digests" in done.stderr
    assert own.runtime.read_bytes() == before
