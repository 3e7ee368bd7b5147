"""The source of TorchTPU that a wheel is built from: fetched by git, or a folder of the user's own.

git runs in a scrubbed environment: without the user's configuration, hooks, filters or prompts.
What is fetched appears under its commit by one rename, so a killed fetch leaves nothing that looks
like a source, and a commit that is there is not fetched again.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpuforge.build import bazelrc
from tpuforge.build.address import require_public, split
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import sha256_tree, user_path
from tpuforge.pins import Upstream
from tpuforge.process import Completed, clean_env, run

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
    # nor has it a say in what counts as a file of the source, or in how names are written
    *("-c", f"core.excludesFile={os.devnull}"),
    *("-c", f"core.attributesFile={os.devnull}"),
    *("-c", "core.untrackedCache=false"),
    *("-c", "core.ignoreCase=false"),
    *("-c", "core.quotePath=true"),
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
# what git's trees call them
_PROGRAM, _LINK, _SUBMODULE = "100755", "120000", "160000"


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
    source = user_path(given)
    clone = f"git clone --branch {upstream.ref} {upstream.repository} SOURCE"
    mend = f"{clone}, then: ./forge build_wheel --source SOURCE"
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
    require_repository(address)
    if "://" not in address and user_path(address).exists():
        # a path would be taken relative to the new folder
        address = str(user_path(address))
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


def require_repository(address: str) -> None:
    """Refuse a repository whose address holds a password.

    Args:
        address: An address or a path.

    Raises:
        ForgeError: If it does.
    """
    mend = "clone it yourself, then: ./forge build_wheel --source DIR"
    require_public("--repository", address, mend)


def prune(folder: Path) -> None:
    """Remove what killed fetches left.

    Args:
        folder: Folder that keeps sources; nobody else may be fetching into it.
    """
    for left in folder.glob(".git-*"):
        shutil.rmtree(left, ignore_errors=True)


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
    protocols: str = "none",
) -> Completed:
    """Run git; unless protocols are named it may reach no other repository, not even by itself."""
    return run(
        ["git", *_SETTINGS, *words],
        timeout=timeout,
        env=environment(protocols),
        cwd=cwd,
        check=check,
        doing=doing,
        mend=mend,
    )


def environment(protocols: str = _PROTOCOLS) -> dict[str, str]:
    """Git's whole environment: no configuration of the user's, and no question to anybody.

    Args:
        protocols: By which it may reach other repositories.
    """
    env = clean_env(
        GIT_CONFIG_NOSYSTEM="1",
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_TERMINAL_PROMPT="0",
        GIT_ASKPASS="",
        GIT_SSH_COMMAND="ssh -o BatchMode=yes",
        GIT_ALLOW_PROTOCOL=protocols,
        # a partial clone would fetch what it lacks, by programs that its configuration names
        GIT_NO_LAZY_FETCH="1",
        # a commit is what its digits say, whatever the repository would rather show
        GIT_NO_REPLACE_OBJECTS="1",
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
    # a checkout runs filters, so one that has learned any is fetched again
    filters = _git(["config", "--get-regexp", r"^filter\."], cwd=folder, check=False)
    if filters.code == 1 and _changes(folder) == (f" M {_BAZELS_OWN}",):
        _git(["checkout", "-q", "HEAD", "--", _BAZELS_OWN], cwd=folder)
    return not _changes(folder)


def _digest_of(folder: Path) -> str:
    """A digest of all files but git's own, Bazel's lock and what Bazel's links show."""
    links = {path for path in folder.glob("bazel-*") if path.is_symlink()}
    others = {folder / ".git", folder / _BAZELS_OWN}
    return sha256_tree(*sorted(set(folder.iterdir()) - links - others))


def _time_of(folder: Path) -> int:
    """When the HEAD was committed; read off the commit itself, since "show" may run gpg."""
    header = _git(["cat-file", "commit", "HEAD"], cwd=folder).output.partition("\n\n")[0]
    found = re.search(r"^committer .* (\d+) [+-]\d{4}$", header, re.MULTILINE)
    return int(found[1]) if found else 0


def _changes(folder: Path) -> tuple[str, ...]:
    """What differs from the commit, and imported settings of Bazel that are no part of it.

    The bytes of the files are compared, here and not by git: "git status" believes its index, which
    can be told to look away, and runs the filters that the checkout's own configuration names.
    """
    doing = f"asking git what was changed in {folder}"
    listed = _git(["ls-tree", "-r", "--full-tree", "HEAD"], cwd=folder, doing=doing).output
    tree: dict[str, tuple[str, str]] = {}
    for line in listed.splitlines():
        mode, _, rest = line.partition(" ")
        digest, _, name = rest.partition(" ")[2].partition("\t")
        tree[_unquoted(name)] = (mode, digest)
    changed = _differences(folder, tree)
    asked = ["--work-tree=.", "ls-files"]
    staged = _git([*asked, "--cached"], cwd=folder, doing=doing).output.splitlines()
    changed += [f"A  {name}" for name in map(_unquoted, staged) if name not in tree]
    # what .git/info/exclude hides is a file of the source all the same
    others = ["--others", "--directory", "--no-empty-directory", "--exclude-per-directory"]
    new = _git([*asked, *others, ".gitignore"], cwd=folder, doing=doing).output.splitlines()
    untracked = [name for name in map(_unquoted, new) if name not in (*tree, _BAZELS_OWN)]
    changed += [f"?? {name}" for name in untracked]
    for path in bazelrc.read(folder).files:
        inside = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
        # such a file is often ignored by git, and changes the build all the same
        if inside not in tree and inside not in untracked:
            changed.append(f"!! {inside}")
    # a name may hold any byte, and goes to screens and into files
    return tuple(entry if entry.isprintable() else ascii(entry)[1:-1] for entry in changed)


def _unquoted(name: str) -> str:
    """A name as git prints it; one with unusual characters is in quotes, as in C."""
    try:
        return os.fsdecode(ast.literal_eval(f"b{name}")) if name.startswith('"') else name
    except (SyntaxError, ValueError):
        # it held what looks like a password, and was redacted: no such file will be found
        return name


def _differences(folder: Path, tree: Mapping[str, tuple[str, str]]) -> list[str]:
    """The files of a commit that are others in a folder, or not there."""
    changed: list[str] = []
    parents = {parent for name in tree for parent in Path(name).parents}
    links = {parent for parent in parents if (folder / parent).is_symlink()} - {Path()}
    for name, (mode, digest) in tree.items():
        path = folder / name
        try:
            found = path.lstat().st_mode
        except OSError:
            found = 0
        if not found or not links.isdisjoint(Path(name).parents):
            changed.append(f" D {name}")
        elif mode == _SUBMODULE:
            changed += _changes_of_submodule(path, name, digest)
        elif mode == _LINK:
            same = stat.S_ISLNK(found) and _blob(os.fsencode(path.readlink())) == digest
            changed += [] if same else [f" M {name}"]
        elif (
            not stat.S_ISREG(found)
            or (mode == _PROGRAM) != bool(found & stat.S_IXUSR)
            or not _is_content(folder, name, path.read_bytes(), digest)
        ):
            changed.append(f" M {name}")
    return changed


def _blob(content: bytes) -> str:
    """The name that git gives to the content of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _is_content(folder: Path, name: str, content: bytes, digest: str) -> bool:
    """Whether a file is what a commit holds, or what that stands for."""
    if _blob(content) == digest:
        return True
    # git-lfs keeps large files elsewhere, and a note with their SHA-256 in the commit
    sha256 = hashlib.sha256(content).hexdigest()
    note = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n"
    if _blob(note.encode()) == digest:
        return True
    # the commit's own .gitattributes may ask for the line ends of another system
    if _blob(content.replace(b"\r\n", b"\n")) != digest or _own_attributes(folder):
        return False
    asked = _git(["check-attr", "eol", "--", name], cwd=folder)
    return asked.output.endswith(": eol: crlf")


def _own_attributes(folder: Path) -> bool:
    """Whether a checkout has attributes that stand in no commit."""
    said = _git(["rev-parse", "--git-path", "info/attributes"], cwd=folder).output.strip()
    return (folder / said).exists()


def _changes_of_submodule(path: Path, name: str, digest: str) -> list[str]:
    """What differs in a submodule; one that was never fetched is an empty folder."""
    if not path.is_dir() or path.is_symlink():
        return [f" M {name}"]
    if not any(path.iterdir()):
        return []
    if _commit_of(path) != digest or _changes(path):
        return [f" M {name}"]
    return []


def _resolve(address: str, name: str) -> tuple[str, str]:
    """The full name and the commit of a tag or branch; a tag goes before a branch."""
    done = _git(
        ["ls-remote", "--tags", "--heads", "--", address],
        check=False,
        protocols=_PROTOCOLS,
        doing=f"asking {address} for its refs",
    )
    if done.code != 0:
        raise ForgeError(
            f"{address} does not answer\n{done.tail}",
            expected="a git repository that can be read without a password",
            mend="check the network and --repository; or clone it yourself, then: "
            "./forge build_wheel --source DIR",
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
            protocols=_PROTOCOLS,
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
                "./forge build_wheel --source DIR",
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
    if "://" in address:
        parts = split(address)
        if parts is None or parts.hostname is None or parts.scheme not in ports:
            # git will say what is wrong
            return None
        return parts.hostname, parts.port or ports[parts.scheme]
    remote = re.fullmatch(r"(?:[\w.-]+@)?([\w.-]+):(?!/).*", address)
    return (remote[1], 22) if remote else None
