"""The image ``simulator``: what lets torch_tpu run without a TPU, to be mounted beside an image.

The smoke stage makes the simulator, in ``out/simulator/<key>``; here its files go into an image of
one layer and nothing else. Each file is checked by the digest in its ``simulator.json``.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.images.context import Inputs, Target, recipe_digest
from tpuforge.lockfile import Locked, read_lock
from tpuforge.paths import ROOT, out_dir, python_path, read_json, sha256_file, sha256_text
from tpuforge.pins import Pins
from tpuforge.process import clean_env, run

NAME = "simulator"
MOUNTED = "/opt/simulator"
"""Where an image of TorchTPU looks for it."""

_MAKE_S = 900.0
_MAKE = "tpuforge.smoke.simulator"
_PLUGIN = "xla-cpu-pjrt"


def target(pins: Pins) -> Target:
    """The simulator's image, under its name and tag.

    Args:
        pins: The pins.

    Raises:
        ForgeError: If its lock is missing or lacks the plugin.
    """
    return Target(NAME, "", "", f"tpuforge/{NAME}:{_PLUGIN}{_locked(pins, _PLUGIN).version}")


def _locked(pins: Pins, name: str) -> Locked:
    path = ROOT / "lock" / f"simulator-py{pins.default_python.replace('.', '')}.txt"
    for package in read_lock(path):
        if package.name == name:
            return package
    raise ForgeError(
        f"{path.name} has no {name}",
        expected="the simulator's CPU plugin in its lock",
        mend="./forge lock",
        exit_code=Exit.FAULT,
    )


def read_inputs(target: Target, pins: Pins) -> Inputs:
    """Everything that the image is made of.

    Args:
        target: The image.
        pins: The pins.
    """
    here = Path(__file__).parent
    path = ROOT / "lock" / f"simulator-py{pins.default_python.replace('.', '')}.txt"
    sources = sorted((ROOT / "smoke" / "simulator").glob("*.c"))
    parts = {
        "the image's name": target.name,
        "the lock": sha256_file(path),
        "the simulator": sha256_text(
            *(sha256_file(one) for one in sources),
            sha256_file(ROOT / "src" / "tpuforge" / "smoke" / "simulator.py"),
        ),
        "the pins": str(pins.epoch),
        "images/": recipe_digest("Dockerfile.simulator"),
        "the bake itself": sha256_text(
            *(sha256_file(here / name) for name in ("bake.py", "context.py", "simulation.py"))
        ),
    }
    return Inputs({}, sha256_file(path), "", parts)


def labels(target: Target, inputs: Inputs, pins: Pins) -> dict[str, str]:
    """What the image says of itself, beside what the tree says.

    Args:
        target: The image.
        inputs: What it is made of.
        pins: The pins.
    """
    del target
    return {
        "io.tpuforge.lock.sha256": inputs.lock_sha256,
        "io.tpuforge.simulator.mount": MOUNTED,
        "io.tpuforge.simulator.plugin.version": _locked(pins, _PLUGIN).version,
        "io.tpuforge.simulator.plugin.wheel.sha256": _locked(pins, _PLUGIN).sha256,
    }


def prepare(target: Target, inputs: Inputs, pins: Pins, progress: Progress) -> None:
    """Copy the simulator to where BuildKit reads it; every file is verified by digest.

    Args:
        target: The image.
        inputs: What it is made of.
        pins: The pins.
        progress: Told what happens.

    Raises:
        ForgeError: If it cannot be made (exit code 2), or a file has another digest (1).
    """
    del inputs
    made = _made(pins, progress)
    folder = target.work / "simulator"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(made, folder, symlinks=True)
    files = read_json(folder / "simulator.json")["files"]
    for name, digest in files.items():
        if sha256_file(folder / name) != digest:
            raise ForgeError(
                f"{made / name} has another digest than its simulator.json says",
                expected=digest,
                mend=f"rm -r {shlex.quote(str(made))}, then run the same command again",
                exit_code=Exit.FAULT,
            )


def _made(pins: Pins, progress: Progress) -> Path:
    """The folder of the simulator; the smoke stage makes it if it is not there."""
    words = ["--json", "--python", pins.default_python]
    with progress.step("making the simulator"):
        done = run(
            [sys.executable, "-m", _MAKE, *words],
            timeout=_MAKE_S,
            env=clean_env(PYTHONPATH=python_path(), TPUFORGE_OUT=str(out_dir())),
            check=False,
            doing="making the simulator",
        )
    record = _result(done.output) if done.code == 0 else None
    if record is None:
        raise ForgeError(
            f"the simulator cannot be had\n{done.tail}",
            expected="its folder in out/simulator",
            mend="./forge fetch_wheel; then ./forge bake --image simulator",
            exit_code=Exit(done.code) if done.code in set(Exit) and done.code else Exit.CANNOT,
        )
    return Path(str(record["folder"]))


def _result(output: str) -> dict[str, Any] | None:
    """The data of a verb that was run with --json; None if it printed none."""
    start = output.find("{")
    try:
        data = json.loads(output[start:])["data"] if start >= 0 else None
    except (ValueError, KeyError, TypeError):
        return None
    return data if isinstance(data, dict) and "folder" in data else None


def run_line(name: str) -> str:
    """The line that hands the simulator to an image, which then runs without a TPU.

    Args:
        name: Name and tag.
    """
    # "docker cp" into a folder refuses the chip's link, which leads nowhere; as a tar it does not
    words = f"docker create --name simulator {name} none && mkdir simulator"
    return f"{words} && docker cp simulator:/. - | tar -x -C simulator"
