"""The simulator: what lets the untouched torch_tpu wheel run in an image on a machine without TPU.

It is a folder that is mounted into a container and never part of an image: a CPU plugin for PJRT,
the small wrapper around it (``smoke/simulator/wrapper.c``), a tree that looks like one TPU chip on
the PCI bus, one such tree for each generation, and a library that shows one of those to a process
(``smoke/simulator/bus.c``). Both sources are compiled by the C compiler of the ``ziglang`` wheel,
so the host needs none; both wheels come out of the wheelhouse by digest. ``docs/simulator.md`` has
the why.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuforge.console import Progress, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.lockfile import read_lock
from tpuforge.paths import ROOT, exclusive, out_dir, read_json, sha256_file, sha256_text, write_json
from tpuforge.pins import load
from tpuforge.process import clean_env, run
from tpuforge.verb import Outcome, parser, run_verb

SCHEMA = "tpuforge.simulator/2"
LOCKS = ROOT / "lock"
WRAPPER = ROOT / "smoke" / "simulator" / "wrapper.c"
BUS = ROOT / "smoke" / "simulator" / "bus.c"
GENERATIONS = {
    "v4": "0x005e",
    "v5e": "0x0063",
    "v5p": "0x0062",
    "v6e": "0x006f",
    "v7": "0x0076",
}
"""TPU generation to PCI device number, as in torch_tpu's ``hardware.py``."""

DEFAULT_GENERATION = "v6e"
_VENDOR = "0x1ae0"
_CLASS = "0x120000"  # "processing accelerator"; without the file gloo aborts
_ADDRESS = "0000:00:05.0"
_GROUP = "../../../../kernel/iommu_groups/7"
_PLUGIN = "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"
_HEADER = "xla_plugins/xla_cpu_pjrt/include/pjrt_c_api.h"
_COMPILE = (
    "cc",
    "-target",
    "x86_64-linux-gnu.2.31",
    "-shared",
    "-fPIC",
    "-O2",
    "-g0",
    "-s",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fvisibility=hidden",
    "-Wl,--build-id=none",
    "-I.",
)
_OTHER_SYSTEMS = re.compile(
    r"ziglang/lib/(libcxx|libcxxabi|libtsan|libunwind|docs)/"
    r"|ziglang/lib/libc/(mingw|musl|wasi|darwin|freebsd|netbsd|openbsd)/"
    r"|ziglang/lib/libc/include/(?!x86_64-linux-gnu/|x86-linux|generic-glibc/|any-linux-any/)"
)
"""Nine tenths of the compiler's files: headers and sources for targets that are not ours."""

_LIMIT_S = 600.0
_KEPT_S = 86_400.0
"""No run lasts longer: a simulator of another key that was not asked for since is in no use."""


@dataclass(frozen=True)
class _Wheels:
    """The two wheels of the simulator: their versions and digests."""

    plugin_version: str
    plugin: str
    compiler_version: str
    compiler: str


def _wheels(python: str | None) -> _Wheels:
    lock = LOCKS / f"simulator-py{load().python(python).replace('.', '')}.txt"
    pins = {one.name: one for one in read_lock(lock)}
    for name in ("xla-cpu-pjrt", "ziglang"):
        if name not in pins:
            raise ForgeError(
                f"{lock.name} has no {name}",
                expected="the simulator's CPU plugin and its compiler in the lock",
                mend="./forge lock",
                exit_code=Exit.FAULT,
            )
    plugin, compiler = pins["xla-cpu-pjrt"], pins["ziglang"]
    return _Wheels(plugin.version, plugin.sha256, compiler.version, compiler.sha256)


def _generation(name: str) -> str:
    if name not in GENERATIONS:
        raise ForgeError(
            f"there is no TPU generation {name} to simulate",
            expected=f"one of {', '.join(GENERATIONS)}",
            mend=f"use {DEFAULT_GENERATION}",
        )
    return name


def key(generation: str = DEFAULT_GENERATION, python: str | None = None) -> str:
    """The digest of everything that the simulator is made from.

    Args:
        generation: The simulated chip.
        python: The Python whose lock names the wheels, ``X.Y``; the pins' own if not given.

    Returns:
        64 hex digits; the name of the simulator's folder.

    Raises:
        ForgeError: If the lock is missing or bad, or the generation or Python is unknown.
    """
    wheels = _wheels(python)
    chip = (_generation(generation), *GENERATIONS.items(), _VENDOR, _CLASS, _ADDRESS, _GROUP)
    sources = [path.read_text(encoding="utf-8") for path in (WRAPPER, BUS)]
    return sha256_text(SCHEMA, *sources, wheels.plugin, wheels.compiler, *_COMPILE, *map(str, chip))


def ensure_simulator(
    progress: Progress, generation: str = DEFAULT_GENERATION, python: str | None = None
) -> Path:
    """The simulator's folder, made if it is not there or was damaged.

    Those of other sources or wheels go once nobody has asked for them for a day.

    Args:
        progress: Where work is shown.
        generation: The simulated chip.
        python: The Python whose lock names the wheels, ``X.Y``; the pins' own if not given.

    Returns:
        ``out/simulator/<key>``, with ``wrapper.so``, ``plugin.so``, ``bus.so``, ``pci/``,
        ``generations/``, ``vfio`` and ``simulator.json``.

    Raises:
        ForgeError: If a wheel is missing or bad, or a source cannot be compiled.
    """
    name = key(generation, python)
    folder = out_dir() / "simulator" / name
    with exclusive(
        "simulator",
        lambda who: progress.note(f"waiting for {who}: the simulator", always=True),
    ):
        _prune(folder)
        if _intact(folder, name):
            os.utime(folder)
            return folder
        wheels = _wheels(python)
        with progress.step("building the simulator"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            # what a killed run left behind; nobody else can be at work under the lock
            for old in folder.parent.glob(".new-*"):
                shutil.rmtree(old, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as scratch:
                made = _build(Path(scratch), wheels, generation, name)
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
    return folder


def _prune(wanted: Path) -> None:
    """Remove the simulators, 250 MB each, that nobody has asked for lately."""
    for old in wanted.parent.glob("[0-9a-f]" * 64):
        if old != wanted and time.time() - old.stat().st_mtime > _KEPT_S:
            shutil.rmtree(old, ignore_errors=True)


def _intact(folder: Path, name: str) -> bool:
    """Whether a finished simulator is there, every byte of it."""
    record = read_json(folder / "simulator.json")
    if not isinstance(record, dict) or record.get("key") != name:
        return False
    plugin, files = record.get("plugin"), record.get("files")
    if not isinstance(plugin, dict) or not isinstance(plugin.get("wheel"), str):
        return False
    if not isinstance(files, dict) or not {"wrapper.so", "plugin.so", "bus.so"} <= files.keys():
        return False
    trees = [folder / "pci", *(folder / "generations" / name for name in GENERATIONS)]
    try:
        whole = all(sha256_file(folder / file) == digest for file, digest in files.items())
        # the links lead nowhere on purpose, so they are looked at and not followed
        return whole and all((tree / _ADDRESS / "iommu_group").is_symlink() for tree in trees)
    except OSError:
        return False


def _wheel(digest: str, title: str) -> Path:
    """A wheel of the wheelhouse, its digest proven again."""
    found = sorted((out_dir() / "wheelhouse" / digest).glob("*.whl"))
    if not found:
        raise ForgeError(
            f"{title} is not in the wheelhouse",
            expected=f"the wheel with the digest {digest[:16]}…",
            mend="./forge fetch_wheel",
        )
    if (actual := sha256_file(found[0])) != digest:
        raise ForgeError(
            f"{found[0].name} in the wheelhouse has the digest {actual[:16]}…",
            expected=f"{digest[:16]}…, as the lock says",
            mend="./forge fetch_wheel",
            exit_code=Exit.FAULT,
        )
    return found[0]


def _build(scratch: Path, wheels: _Wheels, generation: str, name: str) -> Path:
    work, made = scratch / "work", scratch / "simulator"
    work.mkdir()
    made.mkdir()
    plugin_wheel = _wheel(wheels.plugin, f"xla-cpu-pjrt {wheels.plugin_version}")
    compiler_wheel = _wheel(wheels.compiler, f"ziglang {wheels.compiler_version}")
    try:
        with zipfile.ZipFile(plugin_wheel) as wheel:
            _take(wheel, _PLUGIN, made / "plugin.so")
            _take(wheel, _HEADER, work / "pjrt_c_api.h")
        with zipfile.ZipFile(compiler_wheel) as wheel:
            names = [name for name in wheel.namelist() if not _OTHER_SYSTEMS.match(name)]
            wheel.extractall(work, names)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ForgeError(
            f"a wheel of the simulator has another content than expected: {error}",
            expected=f"{_PLUGIN}, {_HEADER} and a ziglang wheel",
            mend="go back to the versions that lock/simulator.in had",
            exit_code=Exit.FAULT,
        ) from error
    compiler = work / "ziglang" / "zig"
    compiler.chmod(0o755)
    caches = {
        "ZIG_GLOBAL_CACHE_DIR": str(work / "cache"),
        "ZIG_LOCAL_CACHE_DIR": str(work / "cache"),
    }
    for source in (WRAPPER, BUS):
        shutil.copyfile(source, work / source.name)
        library = f"{source.stem}.so"
        run(
            [compiler, *_COMPILE, source.name, "-o", library, "-ldl"],
            timeout=_LIMIT_S,
            env=clean_env(**caches),
            cwd=work,
            doing=f"compiling the simulator's {source.name}",
            mend="./forge fetch_wheel, then the same command again",
        )
        (work / library).rename(made / library)
    _chip(made / "pci" / _ADDRESS, GENERATIONS[generation])
    for each, device in GENERATIONS.items():
        _chip(made / "generations" / each / _ADDRESS, device)
    (made / "vfio").touch()
    files = sorted(path for path in made.rglob("*") if path.is_file())
    for path in [made, *made.rglob("*")]:
        # any user of a container must be able to read it
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.suffix == ".so" else 0o644)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "key": name,
        "generation": generation,
        "plugin": {"wheel": plugin_wheel.name, "sha256": wheels.plugin},
        "compiler": {"wheel": compiler_wheel.name, "sha256": wheels.compiler},
        "files": {path.relative_to(made).as_posix(): sha256_file(path) for path in files},
    }
    write_json(made / "simulator.json", record)
    return made


def _take(wheel: zipfile.ZipFile, member: str, target: Path) -> None:
    with wheel.open(member) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)


def _chip(folder: Path, device: str) -> None:
    """One chip as the kernel shows it: TorchTPU reads the numbers and the link's last part."""
    folder.mkdir(parents=True)
    for name, value in (("vendor", _VENDOR), ("device", device), ("class", _CLASS)):
        (folder / name).write_text(f"{value}\n", encoding="ascii")
    (folder / "iommu_group").symlink_to(_GROUP)


def _action(options: argparse.Namespace, progress: Progress) -> Outcome:
    name = key(options.generation, options.python)
    was_there = (out_dir() / "simulator" / name / "simulator.json").is_file()
    folder = ensure_simulator(progress, options.generation, options.python)
    record = read_json(folder / "simulator.json")
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    words = f"a simulated TPU {options.generation} on {record['plugin']['wheel']}, {size(total)}"
    return Outcome(
        "unchanged" if was_there else "done",
        f"{words}; {folder}",
        data={"folder": str(folder), "bytes": total, **record},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Build the simulator, or say that it is there.

    Args:
        argv: Arguments; the process's own if not given.

    Returns:
        The exit code.
    """
    made = parser(
        "simulator",
        "Build the simulator that the health suite and the bench mount.",
        module="tpuforge.smoke.simulator",
    )
    made.add_argument(
        "--generation",
        default=DEFAULT_GENERATION,
        metavar="TPU",
        help=f"one of {', '.join(GENERATIONS)} (default {DEFAULT_GENERATION})",
    )
    made.add_argument("--python", metavar="X.Y", help="Python (default: from the pins)")
    return run_verb("simulator", made, _action, argv)


if __name__ == "__main__":
    raise SystemExit(main())
