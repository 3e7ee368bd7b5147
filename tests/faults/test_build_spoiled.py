"""The wheelhouse under kill, corruption and starvation: message, exit code, and what is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_support import (
    Checkout,
    Index,
    free_port,
    kill,
    make_checkout,
    make_wheel,
    serve,
    sha256,
    use_torch_index,
)
from process_support import call, own_mounts, wait_for


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return make_checkout(tmp_path / "checkout", payload=400_000)


@pytest.fixture
def full(checkout: Checkout) -> Checkout:
    """A checkout with a complete wheelhouse."""
    done = checkout.run("--offline", "--source", str(checkout.wheels))
    assert done.returncode == 0, done.stderr
    return checkout


@pytest.fixture
def slow(checkout: Checkout) -> Iterator[Index]:
    """An index that brings each wheel in twenty pieces, with pauses: a second a wheel."""
    with serve(Index(stall=0.05, pieces=20)) as running:
        running.add(*checkout.all_wheels())
        yield running


def local_torch(checkout: Checkout, index: Index) -> dict[str, str]:
    """Settings of pip: an index, and a directory with torch alone."""
    links = checkout.root / "links"
    links.mkdir(exist_ok=True)
    torch = checkout.locks["runtime"][2]
    shutil.copy(torch, links)
    return {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": index.simple, "PIP_FIND_LINKS": str(links)}


def flip(path: Path) -> None:
    """Change one bit in the middle, and nothing that a directory listing shows."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)[0]
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_flipped_byte_is_found_named_and_mended(full: Checkout) -> None:
    wheel = full.locks["runtime"][1]
    place = full.place(wheel)
    flip(place)
    before = place.stat().st_mtime_ns
    done = full.run("--offline", "--source", str(full.wheels))
    assert done.returncode == 0
    assert f"{wheel.name} does not have its digest any more; moved to .bad" in done.stderr
    assert place.read_bytes() == wheel.read_bytes()
    assert place.stat().st_mtime_ns != before
    assert (full.house / ".bad" / sha256(wheel) / wheel.name).exists()
    record = json.loads((full.out / "results" / "fetch_wheel.json").read_text())
    assert record["data"]["quarantined"] == [wheel.name]
    assert wheel.name in record["notes"][0]


def test_a_flipped_byte_that_nobody_can_mend(full: Checkout) -> None:
    wheel = full.locks["runtime"][1]
    flip(full.place(wheel))
    done = full.run("--offline")
    assert done.returncode == 1
    assert "since the digest was wrong" in done.stderr
    # from now on it is not a bad wheel, only a missing one
    again = full.run("--offline")
    assert again.returncode == 2
    for ended in (done, again):
        assert "1 of 6 wheels are missing" in ended.stderr
        assert sha256(wheel) in ended.stderr
    assert not full.place(wheel).exists()


def test_what_is_not_the_wheel_does_not_pass(full: Checkout) -> None:
    cut, renamed, link, folder, second, gone = (full.place(w) for w in full.all_wheels())
    os.truncate(cut, 1000)
    renamed.rename(renamed.with_name("beta-2.1-py3-none-any.whl"))
    link.rename(full.root / "elsewhere.whl")
    link.symlink_to(full.root / "elsewhere.whl")
    folder.unlink()
    folder.mkdir()
    (second.parent / "delta-4.0-1-py3-none-any.whl").write_bytes(b"x")
    gone.unlink()
    done = full.run("--offline", "--source", str(full.wheels))
    assert done.returncode == 0, done.stderr
    for wheel in full.all_wheels():
        place = full.place(wheel)
        assert list(place.parent.iterdir()) == [place]
        assert place.is_file()
        assert not place.is_symlink()
        assert place.read_bytes() == wheel.read_bytes()


def test_a_wheel_for_another_python(checkout: Checkout) -> None:
    foreign = make_wheel(checkout.wheels, "beta", "2.0", "cp312-cp312-manylinux_2_17_x86_64")
    alpha, _, torch = checkout.locks["runtime"]
    checkout.lock("runtime", alpha, foreign, torch)
    done = checkout.run("--offline", "--source", str(checkout.wheels))
    assert done.returncode == 1
    assert f"wheels that do not fit Python 3.11: {foreign.name}" in done.stderr
    assert "expected: a lock made for Python 3.11" in done.stderr
    assert "./forge lock --python 3.11" in done.stderr
    assert not checkout.place(foreign).exists()
    # torch is refused before anything is read: the digest table tells its name
    table = checkout.root / "lock" / "torch-cpu.sha256"
    table.write_text(table.read_text().replace("cp311-cp311", "cp312-cp312"))
    done = checkout.run("--offline")
    assert done.returncode == 1
    assert "torch-2.13.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl" in done.stderr
    table.unlink()
    # the same where it is in the wheelhouse already, for that other Python
    checkout.place(foreign).parent.mkdir()
    shutil.copy(foreign, checkout.place(foreign))
    done = checkout.run("--offline", "--source", str(checkout.wheels))
    assert done.returncode == 1
    assert foreign.name in done.stderr


def test_a_local_file_with_wrong_bytes(checkout: Checkout) -> None:
    wheel = checkout.locks["runtime"][2]
    flip(wheel)
    found = sha256(wheel)
    done = checkout.run("--offline", "--source", str(checkout.wheels))
    assert done.returncode == 1
    assert f"{wheel}: has SHA-256 {found}" in done.stderr
    assert not list(checkout.house.rglob("torch*.whl"))


def test_killed_while_fetching_then_again(checkout: Checkout, slow: Index) -> None:
    env = local_torch(checkout, slow)
    child = checkout.start(env=env)
    begun = [checkout.house / ".partial" / sha256(w) for w in checkout.locks["runtime"][:2]]
    wait_for(lambda: all(path.exists() and path.stat().st_size > 50_000 for path in begun))
    kill(child)
    left = {path.name: path.stat().st_size for path in checkout.house.glob(".partial/*")}
    assert left
    for path in checkout.house.glob("*/*.whl"):
        assert sha256(path) == path.parent.name
    (checkout.house / ".partial" / "of-another-time").write_bytes(b"x" * 1000)
    slow.stall, slow.seen = 0.0, []
    done = checkout.run(env=env)
    assert done.returncode == 0, done.stderr
    assert any(asked for _, asked in slow.seen), "nothing was taken up where it was left"
    for wheel in checkout.all_wheels():
        assert checkout.place(wheel).read_bytes() == wheel.read_bytes()
    assert list((checkout.house / ".partial").iterdir()) == []


def test_interrupted_while_fetching(checkout: Checkout, slow: Index) -> None:
    slow.pieces, slow.stall = 2, 20.0
    child = checkout.start(env=local_torch(checkout, slow))
    wait_for(lambda: len(slow.seen) >= 8)
    started = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert time.monotonic() - started < 5
    assert "interrupted; what was finished is kept" in err


def test_two_at_once(checkout: Checkout, slow: Index) -> None:
    env = local_torch(checkout, slow)
    first = checkout.start("--json", env=env)
    wait_for(lambda: len(slow.seen) > 0)
    second = checkout.start(env=env)
    out, err = second.communicate(timeout=60)
    record = json.loads(first.communicate(timeout=60)[0])
    assert (first.returncode, second.returncode) == (0, 0)
    assert record["status"] == "done"
    assert f"waiting for process {first.pid}" in err
    assert "nothing to do" in out
    downloads = [path for path, _ in slow.seen if path.startswith("/files/")]
    assert len(downloads) == len(set(downloads)) == 5


def test_a_full_disk_then_a_larger_one(checkout: Checkout) -> None:
    checkout.out.mkdir()
    script = (
        'mount -t tmpfs -o size=1m none "$1" || exit 99\n'
        'shift; "$@"; code=$?\n'
        'find "$TPUFORGE_OUT/wheelhouse" -name "*.whl" -exec sha256sum {} +\n'
        'mount -o remount,size=20m none "$TPUFORGE_OUT"; "$@" >&2 && exit $code'
    )
    verb = checkout.command("--offline", "--source", str(checkout.wheels))
    done = call(
        [*own_mounts(), "sh", "-c", script, "sh", str(checkout.out), *verb],
        env=checkout.env(),
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert f"no space left in {checkout.house}" in done.stderr
    assert "set TPUFORGE_OUT to a larger disk" in done.stderr
    for line in done.stdout.splitlines():
        digest, path = line.split("  ")
        assert Path(path).parent.name == digest
    assert "6 wheels, 2.8 MB, all digests verified" in done.stderr


def test_an_unreachable_torch_index_costs_nothing_when_torch_is_local(
    checkout: Checkout, slow: Index
) -> None:
    slow.stall = 0.0
    with serve(Index()) as torch_index:
        use_torch_index(checkout, torch_index.simple.replace("http:", "https:"))
        done = checkout.run(env=local_torch(checkout, slow))
        assert done.returncode == 0, done.stderr
        assert torch_index.seen == []
    warm = checkout.run(env={"PIP_NO_INDEX": "0"})
    assert warm.returncode == 0
    assert "nothing to do" in warm.stdout


def test_an_unreachable_torch_index_and_no_torch(checkout: Checkout) -> None:
    # a port that nobody listens on, and an address of a network kept for documentation, whose
    # packets go nowhere: refused at once, or no answer at all
    torch = checkout.locks["runtime"][2]
    torch_bytes = torch.read_bytes()
    torch.unlink()
    for host in (f"127.0.0.1:{free_port()}", "192.0.2.1"):
        use_torch_index(checkout, f"https://{host}/whl/cpu")
        started = time.monotonic()
        done = checkout.run(
            "--source", str(checkout.wheels), env={"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "file:///"}
        )
        assert time.monotonic() - started < 20
        assert done.returncode == 2
        assert torch.name in done.stderr
        assert f"https://{host}/whl/cpu: " in done.stderr
        assert "put each file into a directory DIR" in done.stderr
    # and the command that the message names mends it
    torch.write_bytes(torch_bytes)
    done = checkout.run("--source", str(checkout.wheels))
    assert done.returncode == 0, done.stderr


def test_a_home_and_a_checkout_with_spaces_and_umlauts(tmp_path: Path) -> None:
    home = tmp_path / "Zoë Müller 家"
    made = make_checkout(home / "my forge")
    done = made.run("--offline", "--source", str(made.wheels), env={"HOME": str(home)})
    assert done.returncode == 0, done.stderr
    again = made.run(env={"HOME": str(home), "LC_ALL": "C", "PYTHONUTF8": "0"})
    assert again.returncode == 0, again.stderr


def test_an_out_folder_that_cannot_be_written(checkout: Checkout) -> None:
    checkout.out.mkdir()
    (checkout.out / "wheelhouse").write_text("a file where a folder has to be")
    done = checkout.run("--offline", "--source", str(checkout.wheels))
    assert done.returncode == 2
    assert "expected:" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_pip_to_ask(checkout: Checkout, tmp_path: Path) -> None:
    # an environment without pip, which sees this one's packages but for pip
    site = tmp_path / "site"
    site.mkdir()
    import elftools
    import packaging
    import rich

    for package in (elftools, packaging, rich):
        folder = Path(package.__file__).parent
        (site / folder.name).symlink_to(folder)
    for name in ("pygments", "markdown_it", "mdurl"):
        (site / name).symlink_to(Path(rich.__file__).parents[1] / name)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True
    )
    python = str(tmp_path / "bare" / "bin" / "python")
    command = [python, *checkout.command()[1:], "--source", str(checkout.wheels)]
    env = checkout.env({"PYTHONPATH": f"{checkout.root / 'src'}:{site}"})
    done = call(command, env=env)
    assert done.returncode == 2
    assert "asking pip for its settings" in done.stderr
