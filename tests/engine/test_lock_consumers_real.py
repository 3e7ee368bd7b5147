"""The real lock outside these images: each command of ``docs/export.md``, with the real wheels.

Two indexes on loopback serve the wheels of the lock: one the CPU builds, as the PyTorch index does;
the other everything else, and torch's CUDA build, as the main index does. The commands are run as
the page has them. One of them installs for real, ``uv pip sync pylock.toml``; the others would
unpack a gigabyte each and stop before that (``--dry-run``): pip has then compared every digest with
the bytes, uv with what the indexes list. ``tests/faults`` has other bytes for each way, and small.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lock_support import ROOT, Index
from process_support import call
from tpuforge.lock.inputs import lock_path, wheel_metadata
from tpuforge.lockfile import Locked, read_lock
from tpuforge.pins import load

pytestmark = pytest.mark.network

PYTHON = load().default_python
LOCK = lock_path("runtime", PYTHON)
TIME_LIMIT_S = 300


def documented() -> list[str]:
    """The commands of the page's last chapter, each in one line."""
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    text = page.partition("\n## Using a lock\n")[2].replace("\\\n", " ")
    lines = re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)
    return [" ".join(line.partition("  #")[0].split()) for line in lines]


@dataclass
class Served:
    """The wheels of the lock on two indexes, and its exports.

    Attributes:
        folder: A folder for environments and uv's cache.
        main: The index of everything but the CPU builds.
        cpu: The index of the CPU builds.
        env: A clean environment that names the main index.
    """

    folder: Path
    main: Index
    cpu: Index
    env: dict[str, str]

    @property
    def made(self) -> Path:
        """Where the exports are."""
        return self.folder / "out" / "export" / LOCK.stem

    def environment(self, name: str) -> Path:
        """An empty environment of the lock's Python; its interpreter."""
        place = self.folder / name
        if place.exists():
            return place / "bin" / "python"
        words = ["venv", "--quiet", "--no-config", "--no-python-downloads", "--python", PYTHON]
        done = self.run([sys.executable, "-m", "uv", *words, str(place)])
        if "No interpreter found" in done.stderr:
            pytest.skip(f"this machine has no Python {PYTHON}")
        assert done.returncode == 0, done.stderr
        return place / "bin" / "python"

    def run(self, words: list[str], python: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command as in a shell in which that environment is active."""
        env = dict(self.env)
        if python is not None:
            env |= {"VIRTUAL_ENV": str(python.parents[1]), "PIP_PYTHON": str(python)}
        return call(words, cwd=self.folder, env=env, timeout=TIME_LIMIT_S)

    def words(self, command: str) -> list[str]:
        """A command of the page, with the addresses and paths of this test in it."""
        places = {
            "INDEX": self.cpu.url,
            "lock/runtime-py312.txt": str(LOCK),
            "out/export/runtime-py312/": f"{self.made}/",
        }
        for here, there in places.items():
            command = command.replace(here, there)
        return shlex.split(command)


def _wheels(folder: Path) -> dict[str, Path]:
    """The wheels of the lock by digest; they come from the wheelhouse wherever it holds them."""
    have = ROOT / "out" / "wheelhouse"
    house = have
    packages = read_lock(LOCK)
    if not all((have / package.sha256).is_dir() for package in packages):
        words = [sys.executable, "-m", "tpuforge.build.wheelhouse"]
        words += ["--flavour", "runtime", "--python", PYTHON]
        words += ["--source", str(have)] if have.is_dir() else []
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TPUFORGE_OUT": str(folder / "out")}
        subprocess.run(words, env=env, cwd=ROOT, check=True, timeout=TIME_LIMIT_S)
        house = folder / "out" / "wheelhouse"
    return {p.sha256: next((house / p.sha256).glob("*.whl")) for p in packages}


def _offer(index: Index, package: Locked, wheel: Path) -> None:
    """Offer a real wheel, read from the disk as it is asked for, and its metadata apart."""
    with wheel.open("rb") as file:
        index.files[wheel.name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    index.files[f"{wheel.name}.metadata"] = wheel_metadata(wheel).encode()
    index.pages[package.name] = [
        {
            "filename": wheel.name,
            "url": f"/files/{wheel.name}",
            "hashes": {"sha256": package.sha256},
            "core-metadata": True,
            "upload-time": "2026-01-01T00:00:00Z",
            "size": wheel.stat().st_size,
        }
    ]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """The indexes and the exports; the folder goes afterwards, for it grows to gigabytes."""
    with tempfile.TemporaryDirectory() as name, Index() as main, Index() as cpu:
        folder = Path(name)
        for package, wheel in zip(read_lock(LOCK), _wheels(folder).values(), strict=True):
            _offer(cpu if package.version.endswith("+cpu") else main, package, wheel)
        tag = f"cp{PYTHON.replace('.', '')}-cp{PYTHON.replace('.', '')}-manylinux_2_28_x86_64"
        main.add("torch", load().torch.version, tag, requires=("nvidia-nccl",))
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_", "PYTHON"))}
        env |= {
            "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": main.url,
            "PIP_NO_CACHE_DIR": "1",
            "UV_NO_CONFIG": "1",
            "UV_DEFAULT_INDEX": main.url,
            "UV_CACHE_DIR": str(folder / "cache"),
            "PYTHONPATH": str(ROOT / "src"),
            "TPUFORGE_OUT": str(folder / "out"),
        }
        own = Served(folder, main, cpu, env)
        words = ["--flavour", "runtime", "--python", PYTHON]
        done = own.run([sys.executable, "-m", "tpuforge.lock.export", *words])
        assert done.returncode == 0, done.stderr
        del own.env["PYTHONPATH"]
        pylock = own.made / "pylock.toml"
        text = pylock.read_text(encoding="utf-8")
        assert text.count(load().torch.index) == 1
        # the one address that is not on loopback: that of the PyTorch index in the pins
        files = cpu.url.removesuffix("simple") + "files"
        pylock.write_text(text.replace(load().torch.index, files), encoding="utf-8")
        yield own


def locked() -> dict[str, str]:
    """Version by name, as locked."""
    return {package.name: package.version for package in read_lock(LOCK)}


def installed(served: Served, python: Path) -> dict[str, str]:
    """Version by name, as the environment's own metadata say."""
    done = served.run(["uv", "pip", "list", "--format", "json"], python)
    assert done.returncode == 0, done.stderr
    return {one["name"]: one["version"] for one in json.loads(done.stdout)}


def test_page_has_each_way() -> None:
    commands = documented()
    for words in (
        "pip install --require-hashes",
        "uv pip install --require-hashes",
        "uv pip sync --require-hashes",
        "uv pip sync out/export/runtime-py312/pylock.toml",
        "pip install -r out/export/runtime-py312/pylock.toml",
    ):
        assert sum(command.startswith(words) for command in commands) == 1, words
    for tool in ("pip install", "uv pip install"):
        ways = [one for one in commands if one.startswith(tool) and "constraints.txt" in one]
        assert len(ways) == 1


@pytest.mark.parametrize("command", [one for one in documented() if one.startswith("uv ")])
def test_uv_installs_exactly_the_lock(served: Served, command: str) -> None:
    words = served.words(command)
    if "pylock.toml" not in command:
        done = served.run([*words, "--dry-run"], served.environment("for uv"))
        assert done.returncode == 0, done.stderr
        assert dict(re.findall(r"^ \+ (\S+)==(\S+)$", done.stderr, re.MULTILINE)) == locked()
        return
    python = served.environment("installed")
    done = served.run(words, python)
    assert done.returncode == 0, done.stderr
    assert installed(served, python) == locked()
    assert served.run(["uv", "pip", "check"], python).returncode == 0
    code = "import torch; print(torch.__version__, int(torch.ones(7).sum()))"
    done = served.run([str(python), "-c", code])
    assert done.stdout.split() == [locked()["torch"], "7"], done.stderr


@pytest.mark.parametrize("command", [one for one in documented() if one.startswith("pip install")])
def test_pip_would_install_exactly_the_lock(served: Served, command: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = [*served.words(command), "--quiet", "--dry-run", "--report", str(report)]
    done = served.run(words, served.environment("for pip"))
    assert done.returncode == 0, done.stderr
    items = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = {
        Locked(
            one["metadata"]["name"].lower().replace("_", "-"),
            one["metadata"]["version"],
            one["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for one in items
    }
    assert found == set(read_lock(LOCK))
