"""Bazelisk and the Bazel it runs: which ones, proven by digest; their environment; their end.

Both are hashed before every run: Bazelisk itself compares a digest only when it downloads, and runs
whatever lies in its cache afterwards. Bazel gets a scrubbed environment and a home folder of its
own. Its server, which outlives its client and is in a session of its own, is ended after every run.

Facts, read off Bazelisk 1.28.1: its cache names the digest of a version in
``downloads/metadata/<origin>/bazel-<version>-linux-x86_64`` and keeps the binary as
``downloads/sha256/<digest>/bin/bazel``; a workspace's ``tools/bazel`` runs in Bazel's place unless
``BAZELISK_SKIP_WRAPPER`` is set.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpuforge import pins as pins_module
from tpuforge.build.leftovers import end_all, servers
from tpuforge.console import Progress
from tpuforge.download import (
    Access,
    RefusedError,
    UnreachableError,
    Web,
    WrongBytesError,
    certificates,
)
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import (
    atomic_file,
    exclusive,
    out_dir,
    read_json,
    read_regular,
    sha256_file,
    user_path,
    write_json,
)
from tpuforge.pins import Bazelisk
from tpuforge.process import clean_env, run, undisturbed
from tpuforge.verb import Outcome, parser, run_verb

_NPM_TIMEOUT_S = 300.0
_SHUTDOWN_TIMEOUT_S = 20.0
_ELF = b"\x7fELF"
_RECORD = "bazel.json"
_EXAMPLE = "7.7.1"
_VERSION_FILE_MOST = 1 << 16
_HEX64 = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"\d+\.\d+\.\d+(?:rc\d+)?")
# what Bazelisk reads in a workspace, in its order
_VERSION_FILES = {
    ".bazeliskrc": re.compile(r"^\s*USE_BAZEL_VERSION\s*=\s*(\S+)", re.MULTILINE),
    ".bazelversion": re.compile(r"^\s*([^#\s]\S*)", re.MULTILINE),
}
_SAID = re.compile(r"^bazel (\S+)", re.MULTILINE)
# how npm reaches its registry, beside its files under HOME
_NPM_ACCESS = ("NODE_EXTRA_CA_CERTS",)


@dataclass(frozen=True)
class Tool:
    """A Bazelisk that can be run.

    Attributes:
        path: The native binary.
        origin: ``given``, ``PATH``, ``npm`` or ``builder``: the one in the builder image.
        sha256: Its digest.
    """

    path: Path
    origin: str
    sha256: str


def find_bazelisk(given: str | None, pin: Bazelisk, work: Path) -> Tool:
    """The Bazelisk to run: the one given, else the pinned one, from PATH or from npm.

    Args:
        given: A path from the command line.
        pin: The pinned one.
        work: Folder that keeps the fetched one.

    Returns:
        A native binary. Unless it was given, it has the pinned digest, checked now.

    Raises:
        ForgeError: If there is none, or its digest is wrong.
    """
    if given is not None:
        path = user_path(given)
        if not _native(path):
            raise ForgeError(
                f"--bazelisk {given}: not a native program",
                expected="Bazelisk's binary: its npm script does not pass signals on",
                mend=f"give the file {pin.file} of the npm package {pin.npm}",
            )
        return Tool(path, "given", sha256_file(path))
    on_path = shutil.which("bazelisk")
    if on_path is not None and sha256_file(Path(on_path)) == pin.sha256:
        return Tool(Path(on_path), "PATH", pin.sha256)
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


@dataclass(frozen=True)
class Bazel:
    """The Bazel that Bazelisk runs.

    Attributes:
        version: Its release, as it says itself.
        sha256: Digest of its binary.
        known: How sure that digest is: ``pinned``, ``recorded`` (the same as on the first run with
            this cache), ``new`` (this is that first run) or ``given`` (a path of the user's own).
    """

    version: str
    sha256: str
    known: str


def wanted_bazel(source: Path, given: str | None) -> str:
    """The Bazel that a source is built with.

    Args:
        source: The workspace.
        given: A version or the path of a binary, from the command line.

    Returns:
        An absolute path, or an exact version.

    Raises:
        ForgeError: If nothing names one, or what names it leaves the choice to the day.
    """
    if given is not None and user_path(given).is_file():
        return str(user_path(given))
    wanted, where = given, "--bazel"
    if wanted is None:
        wanted, where = _named_by(source)
    if wanted is None:
        raise ForgeError(
            f"{source} does not say which Bazel it is built with",
            expected="its .bazelversion: the newest Bazel of the day makes another wheel every day",
            mend=f"./forge build_wheel --bazel {_EXAMPLE}",
        )
    if not _VERSION.fullmatch(wanted):
        raise ForgeError(
            f"{where} names Bazel {wanted[:80]!r}",
            expected=f"an exact release, such as {_EXAMPLE}, or the path of a Bazel",
            mend=f"./forge build_wheel --bazel {_EXAMPLE}",
        )
    return wanted


def _named_by(source: Path) -> tuple[str | None, str]:
    """The version that the source itself names, and the file that does."""
    for name, pattern in _VERSION_FILES.items():
        if not (source / name).exists():
            continue
        try:
            text = read_regular(source / name, _VERSION_FILE_MOST).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ForgeError(
                f"{source / name} cannot be read: {error}",
                expected="a small text file that names a Bazel",
                mend=f"mend it, or name one: ./forge build_wheel --bazel {_EXAMPLE}",
                exit_code=Exit.FAULT,
            ) from error
        found = pattern.search(text)
        if found:
            return found[1], name
    return None, ""


def environment(work: Path, bazel: str | None = None, url: str | None = None) -> dict[str, str]:
    """Bazel's whole environment: nothing of the user's own Bazel settings, unless a flag says.

    Args:
        work: Folder for everything that Bazel and Bazelisk keep.
        bazel: The Bazel that Bazelisk is to run: a version, or the path of a binary.
        url: Where Bazelisk gets Bazel instead of its own default.

    Returns:
        A fresh dictionary. The home folder is an empty one: whatever else is in the user's own is
        kept from the build, settings of Bazelisk, Bazel, pip and git among them.
    """
    extra = {
        "BAZELISK_HOME": str(work / "bazelisk-home"),
        "BAZELISK_SKIP_WRAPPER": "1",
        "HOME": str(work / "home"),
    }
    if bazel:
        extra["USE_BAZEL_VERSION"] = bazel
    if url:
        extra["BAZELISK_BASE_URL"] = url
    env = clean_env(**extra)
    # pip's own settings of clean_env mean nothing to Bazel, and every variable is part of a build
    return {name: value for name, value in env.items() if not name.startswith(("PIP_", "UV_"))}


def verify_bazel(wanted: str, known: Mapping[str, str], work: Path) -> str | None:
    """Hash the Bazel that is about to run, if it is there already.

    Args:
        wanted: A path, or a version.
        known: Version to pinned digest.
        work: Folder for everything that Bazel and Bazelisk keep.

    Returns:
        Its digest; None where Bazelisk has still to download it.

    Raises:
        ForgeError: If its digest is not the pinned one, the one of an earlier run, or the one
            that its place in the cache states.
    """
    if Path(wanted).is_absolute():
        return sha256_file(Path(wanted))
    downloads = work / "bazelisk-home" / "downloads"
    found = None
    for record in sorted(downloads.glob(f"metadata/*/bazel-{wanted}-linux-x86_64")):
        stated = record.read_text(encoding="utf-8", errors="replace").strip()
        binary = downloads / "sha256" / stated / "bin" / "bazel"
        if not _HEX64.fullmatch(stated) or not binary.is_file():
            # Bazelisk downloads it again
            continue
        found = sha256_file(binary)
        expected = known.get(wanted) or _recorded(work).get(wanted) or stated
        if found != stated or found != expected:
            raise ForgeError(
                f"Bazel {wanted} in the cache of Bazelisk has SHA-256 {found}",
                expected=f"{expected}, {_said_by(wanted, known, work)}",
                mend=f"do not run it; rm -r {shlex.quote(str(downloads))}, then run the same"
                " command again",
                exit_code=Exit.FAULT,
            )
    return found


def prepare_bazel(
    line: Sequence[str],
    wanted: str,
    known: Mapping[str, str],
    work: Path,
    env: Mapping[str, str],
    *,
    cwd: Path,
    timeout: float,
) -> Bazel:
    """Have the Bazel that is wanted: downloaded if need be, hashed, and able to start.

    Args:
        line: The words that run Bazelisk here with the one argument ``--version``.
        wanted: A path, or a version.
        known: Version to pinned digest.
        work: Folder for everything that Bazel and Bazelisk keep.
        env: The environment of the line.
        cwd: The workspace.
        timeout: Seconds for the download.

    Returns:
        Which one it is.

    Raises:
        ForgeError: If it cannot be had, does not start, or its digest is wrong.
    """
    verify_bazel(wanted, known, work)
    done = run(line, timeout=timeout, env=env, cwd=cwd, check=False, doing=f"having Bazel {wanted}")
    found = verify_bazel(wanted, known, work)
    said = _SAID.search(done.output)
    if "need sha256=" in done.output:
        raise ForgeError(
            f"the Bazel {wanted} that Bazelisk downloaded is another one\n{done.tail}",
            expected=f"{known.get(wanted)}, as lock/pins.toml says",
            mend="do not use that source of Bazel (--bazel-url)",
            exit_code=Exit.FAULT,
        )
    if done.code != 0 or said is None or found is None:
        raise ForgeError(
            f"there is no Bazel {wanted}: exit code {done.code}\n{done.tail}".rstrip(),
            expected="a Bazel that Bazelisk can download and start",
            mend="check the network and the version; or name another source (--bazel-url URL) or a"
            " Bazel of your own (--bazel PATH)",
        )
    if Path(wanted).is_absolute():
        return Bazel(said[1], found, "given")
    recorded = _recorded(work)
    how = "pinned" if wanted in known else "recorded" if wanted in recorded else "new"
    if how == "new":
        write_json(work / _RECORD, recorded | {wanted: found})
    return Bazel(said[1], found, how)


def _recorded(work: Path) -> dict[str, str]:
    """The digests of the Bazels that ran with this cache and stand in no pin."""
    value = read_json(work / _RECORD)
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}


def _said_by(version: str, known: Mapping[str, str], work: Path) -> str:
    if version in known:
        return "as lock/pins.toml says"
    if version in _recorded(work):
        return "as on the first run with this cache"
    return "as its place in the cache says"


def end_server(startup: Sequence[str], source: Path, work: Path, env: Mapping[str, str]) -> None:
    """Ask Bazel's server to go; end it and what it runs if it does not.

    Ending the client leaves the server, which is in a session of its own, with the build.

    Args:
        startup: Bazelisk and its startup options, as the build had them; empty to end servers by
            their process ids alone, where this host has no Bazelisk that may be run.
        source: The workspace.
        work: Folder for everything that Bazel keeps.
        env: Bazel's environment.
    """
    with undisturbed():
        if startup and servers(work):
            with contextlib.suppress(ForgeError):
                run(
                    [startup[0], "--noblock_for_lock", *startup[1:], "shutdown"],
                    timeout=_SHUTDOWN_TIMEOUT_S,
                    env=env,
                    cwd=source,
                    check=False,
                )
        end_all(work)


def _native(path: Path) -> bool:
    try:
        # the open of a pipe would wait for its other end
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(4) == _ELF and os.access(path, os.X_OK)
    except OSError:
        return False


def _fetch_bazelisk(pin: Bazelisk, path: Path) -> None:
    """Get the pinned binary, from npm or from its project; nothing stays but the right bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tried = []
    for way in (_from_npm, _from_release):
        try:
            with atomic_file(path, mode=0o755) as temporary:
                way(pin, temporary)
                found = sha256_file(temporary)
                if found != pin.sha256:
                    raise ForgeError(
                        f"{pin.file} of {pin.npm}@{pin.version} has SHA-256 {found}",
                        expected=f"{pin.sha256}, as lock/pins.toml says",
                        mend="do not use it; look at who changed what: the package or the pin",
                        exit_code=Exit.FAULT,
                    )
        except ForgeError as error:
            if error.exit_code == Exit.FAULT:
                raise
            tried.append(error.found)
        else:
            return
    raise ForgeError(
        "there is no Bazelisk, and it cannot be had: " + "; ".join(tried),
        expected=f"Bazelisk {pin.version} with the digest in lock/pins.toml",
        mend=f"put that file at {path}; or check the network and npm config list; or name another"
        " Bazelisk: ./forge build_wheel --bazelisk PATH",
    )


def _from_npm(pin: Bazelisk, target: Path) -> None:
    """The binary out of its npm package, from the registry that npm is set up for."""
    if shutil.which("npm") is None:
        raise ForgeError("npm is not installed")
    env = clean_env()
    env |= {
        key: value
        for key, value in os.environ.items()
        if key in _NPM_ACCESS or key.lower().startswith("npm_config_")
    }
    with tempfile.TemporaryDirectory(prefix=".npm-", dir=target.parent) as name:
        run(
            ["npm", "pack", "--silent", "--ignore-scripts", f"{pin.npm}@{pin.version}"],
            timeout=_NPM_TIMEOUT_S,
            env=env,
            cwd=Path(name),
            doing=f"getting {pin.npm}@{pin.version} with npm",
        )
        try:
            (package,) = Path(name).glob("*.tgz")
            with tarfile.open(package) as tar:
                member = tar.extractfile(f"package/{pin.file}")
                if member is None:
                    raise KeyError(pin.file)
                with target.open("wb") as file:
                    shutil.copyfileobj(member, file)
        except (KeyError, ValueError, tarfile.TarError) as error:
            raise ForgeError(f"{pin.npm}@{pin.version} has no {pin.file}: {error}") from error


def _from_release(pin: Bazelisk, target: Path) -> None:
    """The binary as its project releases it."""
    try:
        Web(Access(certificates=certificates())).download(
            pin.release, target, pin.sha256, on_bytes=lambda _: None, stop=threading.Event()
        )
    except (UnreachableError, RefusedError) as error:
        raise ForgeError(f"{pin.release}: {error}") from error
    except WrongBytesError as error:
        raise ForgeError(
            f"{pin.release} has {error}",
            expected=f"SHA-256 {pin.sha256}, as lock/pins.toml says",
            mend="do not use it; look at who changed what: the release or the pin",
            exit_code=Exit.FAULT,
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
    arguments = parser(
        "bazelisk",
        "Fetch the pinned Bazelisk, and check its digest.",
        module="tpuforge.build.bazelisk",
    )
    return run_verb("bazelisk", arguments, _fetch, argv)


if __name__ == "__main__":
    raise SystemExit(main())
