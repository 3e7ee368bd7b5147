"""The source of TorchTPU that a wheel is built from: fetched by git, or a folder of the user's own.

git runs in a scrubbed environment: without the user's configuration, hooks, filters or prompts.
What is fetched appears under its commit by one rename, so a killed fetch leaves nothing that looks
like a source, and a commit that is there is not fetched again.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
import tempfile
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpuforge.build import bazelrc
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import sha256_tree
from tpuforge.pins import Upstream
from tpuforge.process import Completed, clean_env, redact, run

TARGET = "//ci/wheel:torch_tpu_wheel"
"""The wheel's target in the source of TorchTPU."""

FETCH_LIMIT_S = 1800.0
"""Seconds that one fetch may take."""

_GIT_LIMIT_S = 120.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MARKS = ("MODULE.bazel", "WORKSPACE.bazel", "WORKSPACE")
# protocols that a repository's address may use; "ext::" for one would run any program
_PROTOCOLS = "file:git:http:https:ssh"
_SETTINGS = (
    # nothing that a repository's own configuration names is run
    *("-c", f"core.hooksPath={os.devnull}"),
    *("-c", "core.fsmonitor=false"),
    # a checkout may belong to another user, as mounted folders do
    *("-c", "safe.directory=*"),
    *("-c", "advice.detachedHead=false"),
    *("-c", "transfer.fsckObjects=true"),
    # under 1 kB/s for a minute is no transfer any more
    *("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60"),
)
_SHOWN = 5
# Bazel writes it into the workspace that it builds, as a record of what it resolved
_BAZELS_OWN = "MODULE.bazel.lock"


@dataclass(frozen=True)
class Checkout:
    """A source that can be built from.

    Attributes:
        path: The workspace, absolute.
        commit: Its commit, 40 hex digits; None for a folder that is no git checkout.
        dirty: Whether files differ from that commit; False where there is no commit to ask.
        ref: The tag, branch or commit that was asked for; None for a folder of the user's own.
        repository: The git address that it was fetched from; None for a folder.
        verified: Whether the commit is the one that the pins or the user named by its digits, and
            nothing was changed since.
        epoch: Time of the commit, seconds since 1970; None where there is no commit.
        changes: What differs from the commit, as ``git status`` says it.
        tree_sha256: Digest of the files themselves where no commit tells them; else None.
    """

    path: Path
    commit: str | None
    dirty: bool
    ref: str | None
    repository: str | None
    verified: bool
    epoch: int | None
    changes: tuple[str, ...] = ()
    tree_sha256: str | None = None

    @property
    def described(self) -> str:
        """One line for people: which source, and how sure that is."""
        if self.commit is None:
            return f"{self.path}: no git checkout, so nothing says which source it is"
        name = f"{self.ref}, " if self.ref and self.ref != self.commit else ""
        if self.dirty:
            return f"commit {self.commit} with {len(self.changes)} changes: unverified"
        sure = "verified" if self.verified else "unverified: lock/pins.toml does not name it"
        return f"{name}commit {self.commit}, {sure}"


def local(given: str, upstream: Upstream, *, allow_dirty: bool = False) -> Checkout:
    """A source folder that the user named.

    Args:
        given: The folder.
        upstream: The pinned source.
        allow_dirty: Take it although files differ from its commit.

    Raises:
        ForgeError: If it is no checkout of TorchTPU, or has changes that were not allowed.
    """
    source = Path(given).expanduser().absolute()
    clone = f"git clone --branch {upstream.ref} {upstream.repository} SOURCE"
    mend = f"{clone}, then: forge build_wheel --source SOURCE"
    if not source.is_dir():
        raise ForgeError(f"{source}: no such folder", expected="a checkout of TorchTPU", mend=mend)
    if " " in str(source):
        raise ForgeError(
            f"Bazel cannot work in {source}: there is a space in it",
            expected="a folder without one",
            mend="rename or move it",
        )
    _require_target(source, mend)
    commit = _commit_of(source)
    if commit is None:
        return Checkout(
            source, None, False, None, None, False, None, tree_sha256=_digest_of(source)
        )
    changes = _changes(source)
    if changes and not allow_dirty:
        more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        raise ForgeError(
            f"{source} differs from its commit: {', '.join(changes[:_SHOWN])}{more}",
            expected="a clean checkout, so that the commit tells what the wheel was made from",
            mend="commit or remove the changes, or build with them: --allow-dirty",
        )
    return Checkout(
        source,
        commit,
        bool(changes),
        None,
        None,
        commit == upstream.commit and not changes,
        _time_of(source),
        changes,
        _digest_of(source) if changes else None,
    )


def is_unchanged(source: Checkout) -> bool:
    """Whether a source still is what it was when it was looked at: a build may take hours.

    Args:
        source: The source.
    """
    if source.tree_sha256 is not None and _digest_of(source.path) != source.tree_sha256:
        return False
    if source.commit is None:
        return True
    now = {entry for entry in _changes(source.path) if not entry.endswith(f" {_BAZELS_OWN}")}
    return _commit_of(source.path) == source.commit and now <= set(source.changes)


def fetch(
    ref: str | None, upstream: Upstream, folder: Path, *, repository: str | None = None
) -> Checkout:
    """A source of the pinned repository, fetched unless its commit is there already.

    Args:
        ref: Tag, branch or 40-digit commit; the pinned ref if None.
        upstream: The pinned source.
        folder: Folder that keeps sources, each under its commit.
        repository: Another address of the same repository, such as a mirror.

    Returns:
        The source, at the commit that the ref names now.

    Raises:
        ForgeError: If the repository does not answer, has no such ref, the pinned ref names
            another commit than the pins say, or the source has not the wheel's target.
    """
    name = ref or upstream.ref
    address = repository or upstream.repository
    _require_public(address)
    if "://" not in address and Path(address).expanduser().exists():
        # a path would be taken relative to the new folder
        address = str(Path(address).expanduser().absolute())
    pinned = upstream.commit if name == upstream.ref else None
    exact = name if _COMMIT.fullmatch(name) else pinned
    if exact is not None and _holds(folder / exact, exact):
        # there is nothing to ask the repository
        commit = exact
    else:
        full_name, commit = (name, name) if name == exact else _resolve(address, name)
        if exact is not None and commit != exact:
            raise ForgeError(
                f"{name} names commit {commit} in {address}",
                expected=f"{exact}, as lock/pins.toml says",
                mend="find out who moved it; then mend upstream.commit in lock/pins.toml",
                exit_code=Exit.FAULT,
            )
        if not _holds(folder / commit, commit):
            _clone(address, full_name, commit, folder / commit)
    place = folder / commit
    _require_target(place, f"name a ref of TorchTPU that has {TARGET}, such as {upstream.ref}")
    return Checkout(place, commit, False, name, address, exact == commit, _time_of(place))


def prune(folder: Path) -> None:
    """Remove what killed fetches left.

    Args:
        folder: Folder that keeps sources; nobody else may be fetching into it.
    """
    for left in folder.glob(".git-*"):
        shutil.rmtree(left, ignore_errors=True)


def _require_public(address: str) -> None:
    """Refuse an address with a password: it would stand in the process list and in our files."""
    if redact(address) != address:
        raise ForgeError(
            f"--repository {redact(address)} holds credentials",
            expected="an address without user, password and query",
            mend="clone it yourself, then: forge build_wheel --source DIR",
        )


def _require_target(source: Path, mend: str) -> None:
    package = TARGET.removeprefix("//").partition(":")[0]
    if not any((source / mark).is_file() for mark in _MARKS) or not any(
        (source / package / name).is_file() for name in ("BUILD.bazel", "BUILD")
    ):
        raise ForgeError(
            f"{source} is not a checkout of TorchTPU",
            expected=f"a Bazel workspace with the target {TARGET}",
            mend=mend,
        )


def _git(
    words: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    timeout: float = _GIT_LIMIT_S,
    check: bool = True,
    doing: str = "",
    mend: str = "",
) -> Completed:
    return run(
        ["git", *_SETTINGS, *words],
        timeout=timeout,
        env=environment(),
        cwd=cwd,
        check=check,
        doing=doing,
        mend=mend,
    )


def environment() -> dict[str, str]:
    """Git's whole environment: no configuration of the user's, and no question to anybody."""
    env = clean_env(
        GIT_CONFIG_NOSYSTEM="1",
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_TERMINAL_PROMPT="0",
        GIT_ASKPASS="",
        GIT_SSH_COMMAND="ssh -o BatchMode=yes",
        GIT_ALLOW_PROTOCOL=_PROTOCOLS,
        GIT_OPTIONAL_LOCKS="0",
        # the message that tells an unknown ref from an unreachable host is read
        LC_ALL="C",
    )
    for name in ("SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        if name in env:
            env["GIT_SSL_CAINFO"] = env[name]
            break
    return env


def _commit_of(folder: Path) -> str | None:
    """The commit of a folder that is the top of a git checkout, else None."""
    if not (folder / ".git").exists():
        return None
    done = _git(["rev-parse", "--show-prefix", "HEAD"], cwd=folder, check=False)
    lines = done.output.splitlines()
    # the prefix of the top is empty: a folder inside some other checkout is not one
    whole = done.code == 0 and len(lines) == 2 and not lines[0]
    return lines[1] if whole and _COMMIT.fullmatch(lines[1]) else None


def _holds(folder: Path, commit: str) -> bool:
    """Whether a fetched folder is a checkout of a commit; what Bazel changed is put right."""
    if _commit_of(folder) != commit:
        return False
    if _changes(folder) == (f" M {_BAZELS_OWN}",):
        _git(["checkout", "-q", "HEAD", "--", _BAZELS_OWN], cwd=folder)
    return not _changes(folder)


def _digest_of(folder: Path) -> str:
    """A digest of all files but git's own, Bazel's lock and what Bazel's links show."""
    links = {path for path in folder.glob("bazel-*") if path.is_symlink()}
    others = {folder / ".git", folder / _BAZELS_OWN}
    return sha256_tree(*sorted(set(folder.iterdir()) - links - others))


def _time_of(folder: Path) -> int:
    return int(_git(["show", "-s", "--format=%ct", "HEAD"], cwd=folder).output.strip())


def _changes(folder: Path) -> tuple[str, ...]:
    """What differs from the commit, and imported settings of Bazel that are no part of it."""
    done = _git(
        ["status", "--porcelain=v1", "-z", "--untracked-files=normal", "--ignore-submodules=none"],
        cwd=folder,
        doing=f"asking git what was changed in {folder}",
    )
    changed = [
        entry for entry in done.output.split("\0") if entry.strip() and entry != f"?? {_BAZELS_OWN}"
    ]
    known = set(_git(["ls-files", "-z"], cwd=folder).output.split("\0"))
    for path in bazelrc.read(folder).files:
        inside = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
        # such a file is often ignored by git, and changes the build all the same
        if inside not in known and f"?? {inside}" not in changed:
            changed.append(f"!! {inside}")
    return tuple(changed)


def _resolve(address: str, name: str) -> tuple[str, str]:
    """The full name and the commit of a tag or branch; a tag goes before a branch."""
    done = _git(
        ["ls-remote", "--tags", "--heads", "--", address],
        check=False,
        doing=f"asking {address} for its refs",
    )
    if done.code != 0:
        raise ForgeError(
            f"{address} does not answer\n{done.tail}",
            expected="a git repository that can be read without a password",
            mend="check the network and --repository; or clone it yourself, then: "
            "forge build_wheel --source DIR",
        )
    refs: dict[str, str] = {}
    for line in done.output.splitlines():
        commit, _, full = line.partition("\t")
        if _COMMIT.fullmatch(commit):
            refs[full] = commit
    for full in (f"refs/tags/{name}", f"refs/heads/{name}"):
        if full in refs:
            # "^{}" is what an annotated tag points to
            return full, refs.get(f"{full}^{{}}", refs[full])
    short = [full.split("/", 2)[2] for full in refs if not full.endswith("^{}")]
    near = ", ".join(difflib.get_close_matches(name, short, n=3))
    raise ForgeError(
        f"{address} has no tag or branch {name}",
        expected="a tag, a branch, or a commit of 40 hex digits"
        + (f"; near are {near}" if near else ""),
        mend=f"git ls-remote --tags --heads {shlex.quote(address)}",
    )


def _clone(address: str, full_name: str, commit: str, place: Path) -> None:
    """Fetch one commit into a folder beside its place, check it, and rename it there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".git-", dir=place.parent) as name:
        new = Path(name) / "source"
        _git(["init", "-q", "--", new])
        done = _git(
            ["fetch", "-q", "--depth=1", "--no-tags", "--", address, full_name],
            cwd=new,
            timeout=FETCH_LIMIT_S,
            check=False,
            doing=f"fetching {full_name} from {address}",
            mend="run the same command again, or clone it yourself and give --source DIR",
        )
        if done.code != 0:
            unknown = _COMMIT.fullmatch(full_name) and (
                "not our ref" in done.output or "unadvertised object" in done.output
            )
            raise ForgeError(
                f"{address} has no commit {full_name}"
                if unknown
                else f"{address}: {full_name} could not be fetched\n{done.tail}",
                expected="a commit that this repository has",
                mend="check --ref, the network and --repository; or clone it yourself, then: "
                "forge build_wheel --source DIR",
            )
        _git(["checkout", "-q", "--detach", "FETCH_HEAD"], cwd=new, timeout=FETCH_LIMIT_S)
        found = _commit_of(new)
        if found != commit:
            raise ForgeError(
                f"{address} sent commit {found} for {full_name}",
                expected=commit,
                mend="run the same command again: the ref was moved meanwhile",
                exit_code=Exit.FAULT,
            )
        if place.exists():
            shutil.rmtree(place)
        new.rename(place)


def host_of(address: str) -> tuple[str, int] | None:
    """Host and port of a git address; None for a path on this machine.

    Args:
        address: A URL, ``user@host:path``, or a path.
    """
    ports: Mapping[str, int] = {"https": 443, "http": 80, "git": 9418, "ssh": 22}
    try:
        parts = urllib.parse.urlsplit(address)
        if parts.scheme in ports and parts.hostname:
            return parts.hostname, parts.port or ports[parts.scheme]
    except ValueError:
        # a port that is no number: git will say so
        return None
    remote = re.fullmatch(r"(?:[\w.-]+@)?([\w.-]+):(?!/).*", address)
    return (remote[1], 22) if remote else None
