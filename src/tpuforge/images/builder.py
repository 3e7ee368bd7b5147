"""The image ``builder``: what it is made of, and the folder that BuildKit reads for it.

Bazelisk comes from ``out/bazel/bazelisk/<sha256>``, where the build stage keeps it, and is checked
by digest here and once more inside the bake. One builder serves every Python: a build brings the
Python that it is for.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.images.context import Inputs, Target, base_set, recipe_digest
from tpuforge.images.debian import lock_path
from tpuforge.paths import ROOT, out_dir, sha256_file, sha256_text, write_atomic
from tpuforge.pins import Bazelisk, Pins
from tpuforge.process import clean_env, run

NAME = "builder"
_FETCH_S = 600.0
_FETCH = "tpuforge.build.bazelisk"
# how npm reaches its registry, and where the project's own folders are
_PASSED_ON = ("NODE_EXTRA_CA_CERTS", "TPUFORGE_OUT")


def target(pins: Pins) -> Target:
    """The builder, under its name and tag.

    Args:
        pins: The pins.

    Raises:
        ForgeError: If the pins name no packages for it.
    """
    suite = f"{pins.suites[pins.default_python]}-{NAME}"
    if suite not in pins.debian:
        raise ForgeError(
            f"the pins name no Debian packages for the image {NAME}",
            expected=f"a table [debian.{suite.replace('-', '.')}]",
            mend="git checkout -- lock/pins.toml",
            exit_code=Exit.FAULT,
        )
    tag = f"bazelisk{pins.bazelisk.version}-{pins.debian[suite].name}"
    return Target(NAME, "", "", f"tpuforge/{NAME}:{tag}")


def read_inputs(target: Target, pins: Pins) -> Inputs:
    """Everything that the builder is made of, apart from its base.

    Args:
        target: The builder.
        pins: The pins.
    """
    here = Path(__file__).parent
    lock = lock_path(base_set(target, pins).label)
    code = ("bake.py", "context.py", "builder.py")
    parts = {
        "the image's name": target.name,
        "Bazelisk": pins.bazelisk.sha256,
        "the pins": str(pins.epoch),
        "images/": recipe_digest("Dockerfile.builder"),
        "the bake itself": sha256_text(*(sha256_file(here / name) for name in code)),
    }
    return Inputs({}, sha256_file(lock) if lock.is_file() else "", "", parts)


def labels(target: Target, inputs: Inputs, pins: Pins) -> dict[str, str]:
    """What the builder says of itself, beside what the tree says.

    Args:
        target: The builder.
        inputs: What it is made of.
        pins: The pins.
    """
    return {
        "io.tpuforge.lock.sha256": inputs.lock_sha256,
        "io.tpuforge.base.suite": base_set(target, pins).label,
        "io.tpuforge.bazelisk.version": pins.bazelisk.version,
        "io.tpuforge.bazelisk.sha256": pins.bazelisk.sha256,
    }


def prepare(target: Target, inputs: Inputs, pins: Pins, progress: Progress) -> None:
    """Fill the folder that BuildKit reads.

    Args:
        target: The builder.
        inputs: What it is made of.
        pins: The pins.
        progress: Told what happens.

    Raises:
        ForgeError: If Bazelisk cannot be had (exit code 2) or has another digest (exit code 1).
    """
    del inputs
    path = _bazelisk(pins.bazelisk, progress)
    folder = target.work / "tools"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    copy = folder / "bazelisk"
    shutil.copyfile(path, copy)
    digest = sha256_file(copy)
    if digest != pins.bazelisk.sha256:
        raise ForgeError(
            f"{path} has SHA-256 {digest}",
            expected=f"{pins.bazelisk.sha256}, as lock/pins.toml says",
            mend=f"rm {shlex.quote(str(path))}, then run the same command again",
            exit_code=Exit.FAULT,
        )
    write_atomic(folder / "SHA256SUMS", f"{digest}  {copy.name}\n")


def _bazelisk(pin: Bazelisk, progress: Progress) -> Path:
    """Where the build stage keeps the pinned Bazelisk; that stage fetches it if it is not there."""
    path = out_dir() / "bazel" / "bazelisk" / pin.sha256 / pin.file
    if path.is_file():
        return path
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_ON or name.lower().startswith("npm_config_")
    }
    with progress.step(f"fetching Bazelisk {pin.version}"):
        done = run(
            [sys.executable, "-m", _FETCH],
            timeout=_FETCH_S,
            env=clean_env(PYTHONPATH=str(ROOT / "src"), **passed),
            check=False,
            on_line=progress.detail,
            doing="fetching Bazelisk",
        )
    if done.code != 0 or not path.is_file():
        raise ForgeError(
            f"the pinned Bazelisk cannot be had\n{done.tail}",
            expected=f"{pin.file} of {pin.npm}@{pin.version} in {path.parent}",
            mend=f".venv/bin/python -m {_FETCH}, or put the file there by hand",
            exit_code=Exit(done.code) if done.code in set(Exit) and done.code else Exit.CANNOT,
        )
    return path


def run_line(name: str) -> str:
    """The line that opens a shell in the builder, on the source in the current folder.

    Args:
        name: Name and tag.
    """
    return f'docker run --rm -it --init --user "$(id -u):$(id -g)" -v "$PWD:/workspace" {name}'
