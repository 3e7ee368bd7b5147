"""The base of every image: a Debian root file system, bit for bit the same from one lock.

The locked packages (name, version, digest) are fetched, verified and put into a flat repository;
mmdebstrap installs exactly them, offline; the result is written again as a one-layer OCI layout.
So the layer's digest is a function of the lock, the epoch and this recipe, and of nothing on the
machine. ``docs/base.md`` tells more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tpuforge import mirrors
from tpuforge.console import Progress, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.host import apt_install, can_install, remove_tree, which
from tpuforge.images import debian, oci, standalone
from tpuforge.paths import (
    exclusive,
    out_dir,
    sha256_file,
    sha256_text,
    sha256_tree,
    write_json,
)
from tpuforge.pins import Pins, Standalone, Suite, load
from tpuforge.process import Completed, clean_env, run
from tpuforge.records import read_record
from tpuforge.verb import Outcome, parser, run_verb

SCHEMA = "tpuforge.base/1"
USER = "tpu"
UID = 1000
PRELOAD = "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
"""The allocator that images preload; the package ``libtcmalloc-minimal4`` brings it."""

# what is read back from a base's record, here and by the bake
_FORM = {
    "key": str,
    "layout": str,
    "manifest_digest": str,
    "tar_sha256": str,
    "unpacked_bytes": int,
    "packages": list,
    "drift": [str],
}
_BUILD_S = 900.0
_MEMORY = Path("/dev/shm")  # noqa: S108 - folders there are made by mkdtemp
_TREE_BYTES = 1_000_000_000
# 34 to 60 MB of packages, up to 190 MB each of mmdebstrap's tar and the layer, and apt's lists
_ROOM_BYTES = 500_000_000
_PROVIDER = re.compile(r"docker-image://[a-z0-9][A-Za-z0-9._:/-]*@sha256:[0-9a-f]{64}")
_MERGE = 'for d in bin sbin lib lib64; do mkdir -p "$1/usr/$d"; ln -s "usr/$d" "$1/$d"; done'
_SOURCE = (
    "printf 'deb [trusted=yes] copy:%s/repository ./\\n' "
    '"$(printf %s "$1" | sed \'s/%/%25/g; s/ /%20/g\')" >"$1/etc/apt/sources.list"'
)
# content that the container engine gives, or that only this machine's build left behind
_DROPPED_BELOW = (
    *("dev", "proc", "sys", "run", "tmp", "var/tmp", "var/log", "var/lib/apt", "var/cache/apt"),
    *("var/cache/ldconfig", "usr/share/man", "usr/share/info", "usr/share/locale"),
    *("usr/share/lintian", "usr/share/bug", "usr/share/doc-base", "usr/share/menu"),
)
_DROPPED = frozenset(
    {
        *("etc/hostname", "etc/resolv.conf", "etc/machine-id", "var/lib/dbus/machine-id"),
        *(
            "etc/apt/sources.list",
            "etc/dpkg/dpkg.cfg.d/99mmdebstrap",
            "etc/.pwd.lock",
            "etc/passwd-",
            "etc/group-",
        ),
        *("etc/shadow-", "etc/gshadow-", "etc/subuid-", "etc/subgid-"),
        *("var/lib/dpkg/lock", "var/lib/dpkg/lock-frontend", "var/lib/dpkg/triggers/Lock"),
        *("var/lib/dpkg/status-old", "var/lib/dpkg/available-old", "var/lib/dpkg/diversions-old"),
        *("var/lib/dpkg/statoverride-old", "var/cache/debconf/config.dat-old"),
        *("var/cache/debconf/templates.dat-old", "var/cache/debconf/passwords.dat"),
    }
)
_DOC = "usr/share/doc/"


def keep(name: str, folder: bool) -> bool:
    """Whether an entry of the root file system belongs into the base.

    Args:
        name: Its name, such as ``etc/passwd``.
        folder: Whether it is a folder.
    """
    if name in _DROPPED or any(name.startswith(f"{top}/") for top in _DROPPED_BELOW):
        return False
    if name.startswith(_DOC) and not folder:
        # licences stay with what they license; a whole folder may be a link to another's
        return name.endswith("/copyright") or name.count("/") == _DOC.count("/")
    return True


def named_base(value: str) -> str:
    """Check another provider of the base: an image in a registry, named by digest.

    Args:
        value: ``docker-image://NAME@sha256:…``, a named context of buildx.

    Returns:
        The same text.

    Raises:
        ForgeError: If it has another form; a tag alone can move.
    """
    if _PROVIDER.fullmatch(value):
        return value
    raise ForgeError(
        f"{value!r} does not name a base image by digest",
        expected="docker-image://NAME@sha256:<64 hex digits>",
        mend="docker buildx imagetools inspect NAME shows the digest",
    )


def record_path(label: str) -> Path:
    """Where the record of a base stands.

    Args:
        label: Its set of packages, such as ``bookworm`` or ``bookworm-builder``.
    """
    return out_dir() / "base" / f"{label}.json"


def base_key(lock_sha256: str, suite: Suite, pins: Pins) -> str:
    """The hash of all that the base depends on.

    Args:
        lock_sha256: Digest of the lock.
        suite: The suite and its packages.
        pins: The pins; the epoch and the standalone Python count.
    """
    here = Path(__file__).parent
    recipe = sha256_tree(*(here / name for name in ("base.py", "oci.py", "standalone.py")))
    python = _python_of(suite, pins)
    own = [python.version, python.sha256] if python is not None else []
    given = [SCHEMA, lock_sha256, suite.name, *suite.packages, *own, str(pins.epoch), recipe]
    return sha256_text(*given)


def _python_of(suite: Suite, pins: Pins) -> Standalone | None:
    """The standalone build of CPython that a base carries, if it does."""
    return pins.standalone[suite.python] if suite.python else None


def damage(record: dict[str, Any]) -> str:
    """Check the layout of a record, every byte of it (0.2 to 0.5 s).

    Args:
        record: The content of ``out/base/<set>.json``.

    Returns:
        Empty if all is well, else what is wrong.
    """
    return oci.check_layout(out_dir() / record["layout"], record["manifest_digest"])


def ensure_base(
    suite: Suite, pins: Pins, progress: Progress, *, release: bool, verify: bool = True
) -> dict[str, Any]:
    """Have the base of a set of packages: make it, or say that it is there.

    Args:
        suite: The set.
        pins: The pins; the epoch counts.
        progress: Told what happens.
        release: Refuse packages that are not exactly the locked ones.
        verify: Check every byte of a base that is there; else only that its files are there.

    Returns:
        The record, as in ``out/base/<set>.json`` (format: docs/base.md); ``layout`` is relative
        to the out folder.

    Raises:
        ForgeError: If the lock is bad or stale, packages cannot be had, or the build fails.
    """
    path = debian.lock_path(suite.label)
    lock = debian.read_deb_lock(path)
    debian.check_asked(lock, suite, path)
    _check_python(lock.debs, suite, pins)
    key = base_key(lock.sha256, suite, pins)
    ready = _ready(suite, key, progress, release=release, verify=verify)
    if ready is not None:
        return ready
    with exclusive("base", lambda who: progress.note(f"waiting for {who}, which makes the base")):
        ready = _ready(suite, key, progress, release=release, verify=verify)
        if ready is not None:
            return ready
        _ensure_tools(progress)
        return _make(suite, pins, lock, key, progress, release=release)


def _check_python(debs: Sequence[debian.Deb], suite: Suite, pins: Pins) -> None:
    """Refuse packages with another Python than the pins say the suite has."""
    found = next((deb.version for deb in debs if deb.name == "python3"), "")
    if suite.python and found:
        raise ForgeError(
            f"the packages of {suite.label} bring Debian's python3 {found} along",
            expected=f"one Python in a base, here the standalone build of {suite.python}",
            mend="see with what: apt-get install --simulate, and edit lock/pins.toml",
            exit_code=Exit.FAULT,
        )
    for python, label in pins.suites.items():
        if label == suite.name and found and not re.match(rf"{re.escape(python)}\b", found):
            raise ForgeError(
                f"python3 of {suite.name} is {found}, not {python}",
                expected=f"the suite whose own python3 is {python}",
                mend="set python.suite in lock/pins.toml to what the suites have today"
                + _moves(suite),
                exit_code=Exit.FAULT,
            )


def _moves(suite: Suite) -> str:
    """A word on a suite that is never the same for long; empty for the others."""
    if not suite.rolling:
        return ""
    return (
        f"; {suite.name} is Debian's testing, which moves every day: renew its lock often, and "
        "keep the snapshot archive within reach"
    )


def _read(label: str) -> dict[str, Any] | None:
    """The record of a base; one that is not whole counts as missing."""
    return read_record(record_path(label), SCHEMA, _FORM)


def _ready(
    suite: Suite, key: str, progress: Progress, *, release: bool, verify: bool
) -> dict[str, Any] | None:
    record = _read(suite.label)
    if record is None or record["key"] != key:
        return None
    if release and record["drift"]:
        return None
    layout = out_dir() / record["layout"]
    layer = layout / "blobs" / "sha256" / record["tar_sha256"]
    if not layer.is_file() or not (layout / "index.json").is_file():
        wrong = f"{record['layout']} is not complete"
    else:
        wrong = damage(record) if verify else ""
    if wrong:
        progress.note(f"the base is damaged, making it again: {wrong}", loud=True)
        return None
    return record


def _ensure_tools(progress: Progress) -> None:
    """Have mmdebstrap and Debian's keyring, or say how to get them."""
    missing = [name for name in ("mmdebstrap",) if not which(name)]
    try:
        mirrors.keyring()
    except ForgeError:
        missing.append("debian-archive-keyring")
    if missing and can_install():
        progress.note(f"not installed: {' and '.join(missing)}; taken from this distribution")
        apt_install(missing, progress)
    elif missing:
        raise ForgeError(
            f"not installed: {' and '.join(missing)}",
            expected="what makes a Debian root file system",
            mend=f"sudo apt-get install {' '.join(missing)}   (or take a base from a registry: "
            "./forge bake --base docker-image://NAME@sha256:…)",
        )
    if os.geteuid() != 0 and not which("newuidmap"):
        raise ForgeError(
            "a user who is not root needs newuidmap for mmdebstrap, and it is not installed",
            expected="user namespaces with a range of ids",
            mend="sudo apt-get install uidmap   (or take a base from a registry: "
            "./forge bake --base docker-image://NAME@sha256:…)",
        )


def _make(
    suite: Suite, pins: Pins, lock: debian.DebLock, key: str, progress: Progress, *, release: bool
) -> dict[str, Any]:
    _check_room()
    python = _python_of(suite, pins)
    # first: where it cannot be had, nothing else is needed
    build = standalone.have(python, progress) if python is not None else None
    gone = debian.fetch(lock, progress)
    debs = list(lock.debs)
    drift: list[str] = []
    if gone:
        names = ", ".join(f"{deb.name} {deb.version}" for deb in gone)
        if release:
            raise ForgeError(
                f"locked packages can no longer be had: {names}",
                expected=f"every package of lock/debian/{suite.label}.lock on the mirror or in the "
                "snapshot archive",
                mend=f"let the snapshot archive be reached (TPUFORGE_DEBIAN_SNAPSHOT), or: "
                f"{debian.RELOCK}{_moves(suite)}",
                exit_code=Exit.FAULT,
            )
        debs, drift = _drifted(suite, pins, lock, progress)
    base = out_dir() / "base"
    for old in [*base.glob(".work-*"), *_MEMORY.glob(f"{_memory_prefix()}*")]:
        # a killed run's mmdebstrap may still be writing there; the next run clears it then
        with contextlib.suppress(OSError):
            remove_tree(old)
    base.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".work-", dir=base))
    try:
        record = _build(suite, pins, debs, work, progress, build=build)
        record |= {"key": key, "drift": drift, "lock_sha256": lock.sha256}
        layout = base / f"{suite.label}-{record['manifest_digest'].removeprefix('sha256:')[:12]}"
        record["layout"] = layout.relative_to(out_dir()).as_posix()
        if oci.check_layout(layout, record["manifest_digest"]):
            # the record first: a layout that no record names cannot be taken for finished
            record_path(suite.label).unlink(missing_ok=True)
            remove_tree(layout)
            (work / "layout").rename(layout)
        # else it is there already, and a bake may be reading it
        write_json(record_path(suite.label), record)
    finally:
        remove_tree(work)
    # twelve digits after the label: another set's base may begin with the same label
    for old in base.glob(f"{suite.label}-{'[0-9a-f]' * 12}"):
        if old != layout:
            remove_tree(old)
    return record


def _check_room() -> None:
    """Refuse to begin on a full disk: apt does not fail there, it tries until its time is up."""
    room = os.statvfs(out_dir())
    free = room.f_bavail * room.f_frsize
    if free < _ROOM_BYTES:
        raise debian.no_space(out_dir(), f"{size(free)} are free")


def _drifted(
    suite: Suite, pins: Pins, lock: debian.DebLock, progress: Progress
) -> tuple[list[debian.Deb], list[str]]:
    """Take today's packages instead of the locked ones, into out/, and say so loudly."""
    debs = debian.resolve(suite, progress)
    _check_python(debs, suite, pins)
    before = {deb.name: deb for deb in lock.debs}
    after = {deb.name: deb for deb in debs}
    drift = []
    for name in sorted(set(before) | set(after)):
        old = before[name].version if name in before else "not locked"
        new = after[name].version if name in after else "not installed"
        if before.get(name) != after.get(name):
            drift.append(f"{name}: {old} -> {new}")
    path = out_dir() / "base" / f"{suite.label}.lock"
    debian.write_deb_lock(path, suite, debs)
    progress.note(
        f"THE BASE IS NOT THE LOCKED ONE: {len(drift)} packages differ ({'; '.join(drift[:5])}"
        f"{' …' if len(drift) > 5 else ''}); renew the lock with: {debian.RELOCK}"
        f"{_moves(suite)}",
        loud=True,
    )
    left = debian.fetch(debian.read_deb_lock(path), progress)
    if left:
        raise ForgeError(
            f"the mirror lists packages that it does not serve: {', '.join(d.file for d in left)}",
            expected="a mirror that is not being changed right now",
            mend="run it again in a few minutes, or set TPUFORGE_DEBIAN_MIRROR",
        )
    return debs, drift


def _build(
    suite: Suite,
    pins: Pins,
    debs: Sequence[debian.Deb],
    work: Path,
    progress: Progress,
    *,
    build: Path | None,
) -> dict[str, Any]:
    """Install the packages and wrap the result as a layout in ``work/layout``."""
    epoch, python, hooks = pins.epoch, _python_of(suite, pins), []
    if python is not None and build is not None:
        unpacked = work / "python.tar"
        standalone.write_tar(build, unpacked, python.version, epoch)
        compiled = shlex.join(standalone.compile_command(python.version))
        hooks = [f"tar-in {shlex.quote(str(unpacked))} /", f'chroot "$1" {compiled}']
    repository = work / "repository"
    repository.mkdir()
    debian.flat_repository(debs, repository)
    with progress.step(f"installing {len(debs)} packages into the base of {suite.label}"):
        log = out_dir() / "base" / f"{suite.label}.log"
        raw = _mmdebstrap(repository, debs, work, epoch, progress, hooks=hooks, log=log)
    with progress.step("writing the base layer"):
        _check_installed(raw, debs)
        tar = work / "layer.tar"
        layer = oci.write_layer(
            raw,
            tar,
            epoch=epoch,
            keep=keep,
            edits={
                # no password can match '*'; without the package passwd there is no etc/shadow
                "etc/passwd": _line(f"{USER}:*:{UID}:{UID}:{USER}:/home/{USER}:/bin/bash"),
                "etc/group": _line(f"{USER}:*:{UID}:"),
            },
            folders=[oci.Folder(f"home/{USER}", UID)],
        )
        asked = any(package.startswith("libtcmalloc-minimal4") for package in suite.packages)
        if asked and not _has(layer, PRELOAD):
            raise ForgeError(
                f"the base has no {PRELOAD}",
                expected="the allocator of libtcmalloc-minimal4, which images preload",
                mend="see what the package ships today: dpkg -L libtcmalloc-minimal4",
                exit_code=Exit.FAULT,
            )
        own = f", and CPython {python.version}" if python is not None else ""
        title = f"Debian {suite.name}: {' '.join(suite.packages)}{own}"
        digest = oci.write_layout(work / "layout", tar, layer, epoch=epoch, title=title)
    return {
        "schema": SCHEMA,
        "suite": suite.name,
        "manifest_digest": digest,
        "tar_sha256": layer.sha256,
        "tar_bytes": layer.size,
        "unpacked_bytes": layer.unpacked,
        "preload": PRELOAD if _has(layer, PRELOAD) else None,
        "user": USER,
        "uid": UID,
        "packages": [deb.as_dict() for deb in sorted(debs)],
        "standalone": None
        if python is None
        else {
            "name": "cpython",
            "version": python.version,
            "file": python.file,
            "url": python.url,
            "sha256": python.sha256,
        },
    }


def _has(layer: oci.Layer, path: str) -> bool:
    return path.lstrip("/") in layer.names


def _line(text: str) -> oci.Edit:
    return lambda old: old + text.encode() + b"\n"


def _mmdebstrap(
    repository: Path,
    debs: Sequence[debian.Deb],
    work: Path,
    epoch: int,
    progress: Progress,
    *,
    hooks: Sequence[str],
    log: Path,
) -> Path:
    """Install packages from a flat repository into a tar below a folder; hooks come last."""
    target = work / "raw.tar"
    root = os.geteuid() == 0
    env = clean_env(SOURCE_DATE_EPOCH=str(epoch))
    env["PATH"] += ":/usr/sbin:/sbin"
    tree = work
    if root:
        # a killed run leaves its tree where the next one clears it away
        if _room_in_memory():
            tree = Path(tempfile.mkdtemp(prefix=_memory_prefix(), dir=_MEMORY))
        env["TMPDIR"] = str(tree)
    elif _room_in_memory():
        # the tree belongs to other ids of this user, who may not enter this user's folders
        env.setdefault("TMPDIR", str(_MEMORY))
    argv = [
        "mmdebstrap",
        f"--mode={'root' if root else 'unshare'}",
        "--variant=essential",
        f"--architectures={debian.ARCH}",
        f"--include={','.join(sorted(deb.name for deb in debs))}",
        '--aptopt=APT::Sandbox::User "root"',
        # no fsync per file: a half-made tree is thrown away, never taken for finished
        "--dpkgopt=force-unsafe-io",
        f"--setup-hook={_MERGE}",
        # copied in, because another user's ids may not read this user's folders
        f"--setup-hook=copy-in {shlex.quote(str(repository))} /",
        f"--setup-hook={_SOURCE}",
        f'--customize-hook=rm -r "$1/{repository.name}"',
        *(f"--customize-hook={hook}" for hook in hooks),
        "--format=tar",
        "",
        str(target),
        # replaced by the hook: the folder's name is known only then
        "deb [trusted=yes] copy:/repository ./",
    ]
    try:
        done = run(
            argv,
            timeout=_BUILD_S,
            env=env,
            check=False,
            on_line=progress.detail,
            log=log,
            doing="mmdebstrap",
        )
    finally:
        if tree != work:
            remove_tree(tree)
    if done.code != 0 and debian.FULL in done.output:
        raise debian.no_space(target.parent, done.tail)
    if done.code != 0:
        raise ForgeError(
            f"mmdebstrap failed with exit code {done.code}: {_reason(done)}\n{done.tail}",
            expected="the locked packages, installed",
            mend=f"read {log}"
            + (
                ""
                if root
                else "; a user needs user namespaces, and lines of their own in /etc/subuid and "
                "/etc/subgid: run it as root, or bake with --base docker-image://NAME@sha256:…"
            ),
        )
    return target


def _reason(done: Completed) -> str:
    """What went wrong, in one line: a table of many bases has room for no more."""
    # the first error, since those after it follow from it
    marks = ("E: ", "dpkg: error", "dpkg-deb: error", "tar: ", "cp: ", "sh: ")
    lines = [line.strip() for line in done.output.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith(marks)), "".join(lines[-1:]))


def _memory_prefix() -> str:
    """The names of this out folder's trees in memory begin with this."""
    return f"tpuforge-{sha256_text(str(out_dir()))[:12]}-"


def _room_in_memory() -> bool:
    """Whether mmdebstrap can unpack in memory: dpkg syncs its database often.

    On a busy disk that is most of the build's time (32 against 84 s at a load of 8).
    """
    try:
        room = os.statvfs(_MEMORY)
    except OSError:
        return False
    return not room.f_flag & os.ST_NOEXEC and room.f_bavail * room.f_frsize >= _TREE_BYTES


def _check_installed(tar: Path, debs: Sequence[debian.Deb]) -> None:
    """Compare what dpkg says is installed with what was to be: not one more, not one less."""
    with tarfile.open(tar) as file:
        status = file.extractfile("./var/lib/dpkg/status")
        text = status.read().decode("utf-8", "replace") if status else ""
    found = set()
    for block in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Status): (.*)$", block, re.MULTILINE))
        if fields.get("Status") == "install ok installed":
            found.add((fields["Package"], fields["Version"]))
    wanted = {(deb.name, deb.version) for deb in debs}
    if found != wanted:
        less = " ".join(sorted(f"-{name}={version}" for name, version in wanted - found))
        more = " ".join(sorted(f"+{name}={version}" for name, version in found - wanted))
        raise ForgeError(
            f"the base does not hold exactly the locked packages: {less} {more}".rstrip(),
            expected="every locked package installed, and no other",
            mend=debian.RELOCK,
            exit_code=Exit.FAULT,
        )


def _relock(suites: Sequence[Suite], pins: Pins, progress: Progress) -> Outcome:
    """Write the locks of some sets from what the mirror offers today."""
    _ensure_tools(progress)
    rows: list[str] = []
    summaries: list[str] = []
    locks: dict[str, Any] = {}
    with exclusive("base", lambda who: progress.note(f"waiting for {who}, which makes the base")):
        for suite in suites:
            path = debian.lock_path(suite.label)
            before = debian.read_deb_lock(path) if path.is_file() else None
            debs = debian.resolve(suite, progress)
            _check_python(debs, suite, pins)
            known = set(before.debs) if before is not None else set()
            old = {deb.name: deb.version for deb in known}
            new = {deb.name: deb.version for deb in debs}
            changed = sorted(deb.name for deb in set(debs) - known)
            gone = sorted(set(old) - set(new))
            if before is not None and known == set(debs) and before.asked == suite.packages:
                summaries.append(f"{path.name} already holds what the mirror offers today")
                continue
            debian.write_deb_lock(path, suite, debs)
            rows += [f"  {path.name}:"] * (len(suites) > 1)
            rows += [f"  {name} {old.get(name, '(new)')} -> {new[name]}" for name in changed]
            rows += [f"  {name} {old[name]} -> (gone)" for name in gone]
            counts = f"{len(changed)} new or changed, {len(gone)} gone"
            summaries.append(f"{path.name}: {len(debs)} packages, {counts}")
            locks[suite.label] = {
                "lock": str(path),
                "sha256": sha256_file(path),
                "changed": changed,
                "gone": gone,
            }
    status: Literal["done", "unchanged"] = "done" if locks else "unchanged"
    return Outcome(status, "; ".join(summaries), {"locks": locks}, text="\n".join(rows))


def _act(options: argparse.Namespace, progress: Progress) -> Outcome:
    pins = load()
    name = options.suite or pins.suites[pins.default_python]
    if name not in pins.debian:
        raise ForgeError(
            f"there is no suite {name!r} in the pins",
            expected=f"one of {', '.join(pins.debian)}",
            mend="add a table [debian.<suite>] or [debian.<suite>.<set>] to lock/pins.toml",
        )
    suite = pins.debian[name]
    if options.relock:
        suites = [suite] if options.suite else list(pins.debian.values())
        return _relock(suites, pins, progress)
    before = _written(name)
    record = ensure_base(suite, pins, progress, release=options.release)
    summary = (
        f"{name}: {len(record['packages'])} packages, {size(record['unpacked_bytes'])} unpacked, "
        f"{record['manifest_digest']}"
    )
    notes = [f"the base differs from its lock: {'; '.join(record['drift'])}"] * bool(
        record["drift"]
    )
    return Outcome("unchanged" if _written(name) == before else "done", summary, record, notes)


def _written(label: str) -> int | None:
    """When the record of a base was written: one that is made again may hold the same."""
    try:
        return record_path(label).stat().st_mtime_ns
    except FileNotFoundError:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Make the base of a set of packages, or write its lock.

    Args:
        argv: Arguments; the process's own if not given.

    Returns:
        The exit code.
    """
    arguments = parser("base", "Make the Debian base of the images from its lock.")
    arguments.add_argument(
        "--suite",
        metavar="NAME",
        help="a suite of the pins, or a further set of one, such as bookworm-builder",
    )
    arguments.add_argument(
        "--relock",
        action="store_true",
        help="write the locks in lock/debian from the mirror; with --suite that one alone",
    )
    arguments.add_argument(
        "--release", action="store_true", help="refuse anything but the locked packages"
    )
    return run_verb("base", arguments, _act, argv)


if __name__ == "__main__":
    raise SystemExit(main())
