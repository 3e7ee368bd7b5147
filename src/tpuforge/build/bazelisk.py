"""Bazelisk and the Bazel it runs: which ones, proven by digest; their environment; their end.

Bazel gets a scrubbed environment. Its server, which outlives its client and is in a session of its
own, is ended after every run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpuforge import pins as pins_module
from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import atomic_file, exclusive, out_dir, sha256_file
from tpuforge.pins import Bazelisk
from tpuforge.process import clean_env, run
from tpuforge.verb import Outcome, parser, run_verb

_NPM_TIMEOUT_S = 300.0
_SHUTDOWN_TIMEOUT_S = 20.0
_ELF = b"\x7fELF"
# how npm reaches its registry, beside its files under HOME
_NPM_ACCESS = ("NODE_EXTRA_CA_CERTS",)


@dataclass(frozen=True)
class Tool:
    """A Bazelisk that can be run.

    Attributes:
        path: The native binary.
        origin: ``given``, ``PATH`` or ``npm``.
        sha256: Its digest.
    """

    path: Path
    origin: str
    sha256: str


def find_bazelisk(given: str | None, pin: Bazelisk, work: Path) -> Tool:
    """The Bazelisk to run: the one given, else the one on PATH, else the pinned one from npm.

    Args:
        given: A path from the command line.
        pin: The pinned one.
        work: Folder that keeps the fetched one.

    Returns:
        A native binary. The fetched one has the pinned digest, checked now.

    Raises:
        ForgeError: If there is none, or its digest is wrong.
    """
    if given is not None:
        path = Path(given).expanduser().absolute()
        if not _native(path):
            raise ForgeError(
                f"--bazelisk {given}: not a native program",
                expected="Bazelisk's binary: its npm script does not pass signals on",
                mend=f"give the file {pin.file} of the npm package {pin.npm}",
            )
        return Tool(path, "given", sha256_file(path))
    on_path = shutil.which("bazelisk")
    if on_path is not None and _native(Path(on_path)):
        return Tool(Path(on_path), "PATH", sha256_file(Path(on_path)))
    return pinned_bazelisk(pin, work)


def pinned_bazelisk(pin: Bazelisk, work: Path) -> Tool:
    """The pinned Bazelisk, fetched from npm if it is not there yet.

    Args:
        pin: The pinned one.
        work: Folder that keeps it.

    Returns:
        A native binary that has the pinned digest, checked now.

    Raises:
        ForgeError: If it cannot be had, or its digest is wrong.
    """
    path = work / "bazelisk" / pin.sha256 / pin.file
    if not path.exists():
        _fetch_bazelisk(pin, path)
    found = sha256_file(path)
    if found != pin.sha256:
        raise ForgeError(
            f"{path} has SHA-256 {found}",
            expected=f"{pin.sha256}, as lock/pins.toml says",
            mend=f"rm {shlex.quote(str(path))}, then run the same command again",
            exit_code=Exit.FAULT,
        )
    return Tool(path, "npm", found)


def environment(work: Path, bazel: str | None = None, url: str | None = None) -> dict[str, str]:
    """Bazel's whole environment: nothing of the user's own Bazel settings, unless a flag says.

    Args:
        work: Folder for everything that Bazel and Bazelisk keep.
        bazel: The Bazel that Bazelisk is to run: a version, or the path of a binary.
        url: Where Bazelisk gets Bazel instead of its own default.

    Returns:
        A fresh dictionary.
    """
    extra = {"BAZELISK_HOME": str(work / "bazelisk-home")}
    if bazel:
        given = Path(bazel).expanduser()
        extra["USE_BAZEL_VERSION"] = str(given.absolute()) if given.is_file() else bazel
    if url:
        extra["BAZELISK_BASE_URL"] = url
    return clean_env(**extra)


def end_server(startup: Sequence[str], source: Path, work: Path, env: Mapping[str, str]) -> None:
    """Ask Bazel's server to go; end it by its process id if it does not.

    Ending the client leaves the server, which is in a session of its own, with the build.

    Args:
        startup: Bazelisk and its startup options, as the build had them.
        source: The workspace.
        work: Folder for everything that Bazel keeps.
        env: Bazel's environment.
    """
    servers = list((work / "root").glob("*/server/server.pid.txt"))
    if not servers:
        return
    with contextlib.suppress(ForgeError):
        run(
            [startup[0], "--noblock_for_lock", *startup[1:], "shutdown"],
            timeout=_SHUTDOWN_TIMEOUT_S,
            env=env,
            cwd=source,
            check=False,
        )
    for file in servers:
        for number in (signal.SIGTERM, signal.SIGKILL):
            process = _server(file)
            if process is None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
            deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S / 4
            while _server(file) is not None and time.monotonic() < deadline:
                time.sleep(0.05)


def _server(file: Path) -> int | None:
    """The running server that a pid file speaks of, if its command line names its folder."""
    base = str(file.parent.parent)
    try:
        process = int(file.read_text().strip())
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return process if any(os.fsencode(base) in word for word in words) else None


def _native(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == _ELF and os.access(path, os.X_OK)
    except OSError:
        return False


def _fetch_bazelisk(pin: Bazelisk, path: Path) -> None:
    """Get the pinned binary out of its npm package; nothing stays unless the digest agrees."""
    if shutil.which("npm") is None:
        raise ForgeError(
            "there is no Bazelisk, and no npm to get it with",
            expected=f"bazelisk on PATH, or npm, which has it as {pin.npm}@{pin.version}",
            mend="install npm or Bazelisk, or: forge build_wheel --bazelisk PATH",
        )
    env = clean_env()
    env |= {
        key: value
        for key, value in os.environ.items()
        if key in _NPM_ACCESS or key.lower().startswith("npm_config_")
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".npm-", dir=path.parent) as name:
        run(
            ["npm", "pack", "--silent", "--ignore-scripts", f"{pin.npm}@{pin.version}"],
            timeout=_NPM_TIMEOUT_S,
            env=env,
            cwd=Path(name),
            doing=f"getting {pin.npm}@{pin.version} with npm",
            mend="check the network and npm config list, or: forge build_wheel --bazelisk PATH",
        )
        try:
            (package,) = Path(name).glob("*.tgz")
            with (
                tarfile.open(package) as tar,
                atomic_file(path, mode=0o755) as temporary,
            ):
                member = tar.extractfile(f"package/{pin.file}")
                if member is None:
                    raise KeyError(pin.file)
                with temporary.open("wb") as target:
                    shutil.copyfileobj(member, target)
                found = sha256_file(temporary)
                if found != pin.sha256:
                    raise ForgeError(
                        f"{pin.file} of {pin.npm}@{pin.version} has SHA-256 {found}",
                        expected=f"{pin.sha256}, as lock/pins.toml says",
                        mend="do not use it; look at who changed what: the package or the pin",
                        exit_code=Exit.FAULT,
                    )
        except (KeyError, ValueError, tarfile.TarError) as error:
            raise ForgeError(
                f"the npm package {pin.npm}@{pin.version} has no {pin.file}: {error}",
                expected="the package that lock/pins.toml names",
                mend="forge build_wheel --bazelisk PATH",
            ) from error


def _fetch(options: argparse.Namespace, progress: Progress) -> Outcome:
    del options
    pin = pins_module.load().bazelisk
    work = out_dir() / "bazel"
    with exclusive("bazelisk", on_wait=lambda who: progress.note(f"waiting for {who}")):
        there = (work / "bazelisk" / pin.sha256 / pin.file).is_file()
        with progress.step(f"having Bazelisk {pin.version}"):
            tool = pinned_bazelisk(pin, work)
    data = {"version": pin.version, "path": str(tool.path), "sha256": tool.sha256}
    said = f"Bazelisk {pin.version}, sha256 {tool.sha256}"
    return Outcome("unchanged" if there else "done", said, data)


def main(argv: Sequence[str] | None = None) -> int:
    """Have the pinned Bazelisk: what the builder image is made with.

    Args:
        argv: Arguments; the process's own if not given.

    Returns:
        The exit code.
    """
    arguments = parser("bazelisk", "Fetch the pinned Bazelisk, and check its digest.")
    return run_verb("bazelisk", arguments, _fetch, argv)


if __name__ == "__main__":
    raise SystemExit(main())
