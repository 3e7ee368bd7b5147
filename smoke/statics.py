"""What the static tier asks of an image's files and environment, as functions of a place."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pwd
import re
import tempfile
from pathlib import Path
from typing import Any

from smoke import elf, installed
from smoke.place import Place

_NOT_EMPTY = ("etc/machine-id", "var/lib/dbus/machine-id")
_NO_FILES_IN = (
    "root/.cache",
    "var/lib/apt/lists",
    "var/cache/apt",
    "var/cache/ldconfig",
    "var/log",
)
_GUARDS = ("PIP_CONSTRAINT", "UV_CONSTRAINT")
CONSTRAINT = "/opt/tpuforge/constraints.txt"
CACHES = (
    "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TMPDIR",
)
"""Variables that name a folder without which torch or torch_tpu does not work."""

LOCK_FILE = "/tmp/libtpu_lockfile"
"""The file by which libtpu lets one process in at a time."""

_ENTRY = b"GetPjrtApi"


def lock_problems(place: Place, facts: dict[str, Any]) -> list[str]:
    """Where the image's lock differs from the facts.

    Args:
        place: The installation.
        facts: Its ``image.json``.
    """
    lock = place.home / "lock.txt"
    if not lock.is_file():
        return [f"{lock} is not there"]
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    problems = []
    if digest != facts.get("lock_sha256"):
        problems.append(f"lock.txt has the digest {digest}, not {facts.get('lock_sha256')}")
    pins = installed.read_lock(lock)
    for key, name in (("torch", "torch"), ("torch_tpu", "torch-tpu"), ("libtpu", "libtpu")):
        if pins.get(name) != facts.get(key):
            problems.append(f"image.json says {key} {facts.get(key)}, the lock {pins.get(name)}")
    return problems


def torch_tpu_problems(site: Path, commit: str | None) -> list[str]:
    """What is wrong with the files of torch_tpu: its XLA commit, its one XLA, no second torch.

    Args:
        site: The site-packages folder.
        commit: The XLA commit that it must have been built from; None if nothing says so.
    """
    folder = site / "torch_tpu"
    if not folder.is_dir():
        return ["torch_tpu is not installed"]
    problems = []
    recorded = folder / "include" / "XLA_COMMIT"
    found = recorded.read_text(encoding="ascii").strip() if recorded.is_file() else "nothing"
    if not re.fullmatch(r"[0-9a-f]{40}", found):
        problems.append(f"include/XLA_COMMIT holds {found[:60]!r} instead of a commit")
    elif commit is not None and found != commit:
        problems.append(f"it was built from XLA {found}, the image says {commit}")
    bases = sorted(path.relative_to(site) for path in folder.rglob("libxla_base.so*"))
    if len(bases) != 1:
        names = ", ".join(map(str, bases)) or "none"
        problems.append(f"it has {len(bases)} libxla_base.so instead of one: {names}")
    torches = sorted(
        p for p in folder.rglob("lib*.so*") if re.match(r"lib(torch|c10)\b|libtorch_", p.name)
    )
    problems += [f"it brings its own {path.relative_to(site)}" for path in torches]
    return problems


def account_problems(place: Place, facts: dict[str, Any]) -> list[str]:
    """What is wrong with the image's own user.

    Args:
        place: The installation.
        facts: Its ``image.json``.
    """
    uid, user = facts.get("uid"), facts.get("user")
    problems = []
    if uid == 0 or user == "root":
        problems.append("the image's own user is root")
    entries = {}
    passwd = place.under("/etc/passwd")
    if passwd.is_file():
        rows = [line.split(":") for line in passwd.read_text(encoding="utf-8").splitlines()]
        entries = {row[0]: row for row in rows if len(row) == 7}
    if user not in entries:
        return [*problems, f"/etc/passwd has no user {user}"]
    row = entries[str(user)]
    if row[2] != str(uid):
        problems.append(f"/etc/passwd gives {user} the number {row[2]}, not {uid}")
    if not place.under(row[5]).is_dir():
        problems.append(f"the home of {user}, {row[5]}, is not there")
    return problems


def user_words(uid: int) -> str:
    """How to call a user in a message.

    Args:
        uid: Its number.
    """
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}, which has no passwd entry"


def preload_problems(place: Place) -> list[str]:
    """Files that LD_PRELOAD names and that are not there, or not in memory.

    Args:
        place: The installation.
    """
    problems = []
    mapped = place.maps.read_text(encoding="utf-8")
    for name in re.split(r"[:\s]+", place.environ.get("LD_PRELOAD", "")):
        if not name:
            continue
        path = place.under(name)
        if not path.is_file():
            problems.append(f"LD_PRELOAD names {name}, which is not there")
        elif str(path.resolve()) not in mapped and name not in mapped:
            problems.append(f"LD_PRELOAD names {name}, which is not loaded")
    return problems


def libtpu_problems(site: Path) -> list[str]:
    """What is wrong with libtpu's own library, as a file.

    Args:
        site: The site-packages folder.
    """
    library = site / "libtpu" / "libtpu.so"
    if not library.is_file():
        return ["libtpu is installed without libtpu.so"]
    try:
        if elf.missing(library, {_ENTRY}):
            return ["libtpu.so does not define GetPjrtApi, so it is no PJRT plugin"]
    except (elf.NotElfError, OSError) as error:
        return [f"libtpu.so cannot be read: {error}"]
    return []


def owned_by_tcmalloc() -> bool:
    """Whether memory that this process takes from ``malloc`` is tcmalloc's.

    A library that is only in memory proves nothing, so tcmalloc is asked about a piece of memory.
    """
    own = ctypes.CDLL(None)
    # gperftools' C interface: 1 means that the memory is its own
    if not hasattr(own, "MallocExtension_GetOwnership"):
        return False
    own.malloc.restype = ctypes.c_void_p
    own.malloc.argtypes = (ctypes.c_size_t,)
    own.free.argtypes = own.MallocExtension_GetOwnership.argtypes = (ctypes.c_void_p,)
    memory = own.malloc(1000)
    try:
        return bool(own.MallocExtension_GetOwnership(memory) == 1)
    finally:
        own.free(memory)


def cache_problems(place: Place) -> tuple[list[str], list[str]]:
    """Folders for caches that the environment names and this user cannot write to.

    Measured: torch_tpu ends the process at the first program it cannot keep, and torch cannot even
    be imported without its own.

    Args:
        place: The installation.

    Returns:
        One sentence per folder, and the variables that were set.
    """
    problems = []
    named = [name for name in CACHES if place.environ.get(name)]
    for name in named:
        path = place.under(place.environ[name])
        # torch makes the folder itself; trying it leaves nothing behind
        nearest = next(one for one in (path, *path.parents) if one.exists())
        try:
            with tempfile.TemporaryFile(dir=nearest):
                pass
        except OSError as error:
            problems.append(
                f"{name} names {place.environ[name]}, which cannot be written: {error.strerror}"
            )
    return problems, named


def setting_problems(place: Place) -> list[str]:
    """Settings that keep a plain ``import torch`` from finding this image's torch_tpu and libtpu.

    Args:
        place: The installation.
    """
    problems = []
    if place.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        problems.append("TORCH_DEVICE_BACKEND_AUTOLOAD=0: import torch does not load torch_tpu")
    library = place.environ.get("TPU_LIBRARY_PATH")
    if library and not place.under(library).is_file():
        problems.append(f"TPU_LIBRARY_PATH names {library}, which is not there")
    for entry in place.environ.get("PYTHONPATH", "").split(":"):
        for name in ("torch", "torch_tpu", "libtpu", "numpy"):
            if entry and (place.under(entry) / name / "__init__.py").is_file():
                problems.append(f"PYTHONPATH puts the {name} in {entry} before the image's")
    return problems


def lock_file_problems(place: Place) -> tuple[list[str], str]:
    """Whether libtpu's lock file keeps this user out.

    libtpu lets one process of a machine in at a time, by a lock on a file in the temporary folder.
    The lock ends with its process, the file stays, and is refused if it is another user's: libtpu
    then says that the TPU is in use.

    Args:
        place: The installation.

    Returns:
        A sentence if it does, and what is there.
    """
    path = place.under(LOCK_FILE)
    try:
        stat = path.stat()
    except OSError:
        return [], f"{LOCK_FILE} is not there"
    if not os.access(path, os.R_OK | os.W_OK):
        return [
            f"{LOCK_FILE} was left by {user_words(stat.st_uid)}, and this user cannot open it: "
            f"libtpu would say that the TPU is in use"
        ], ""
    locks = place.under("/proc/locks")
    rows = locks.read_text(encoding="ascii").splitlines() if locks.is_file() else []
    holders = [row.split()[4] for row in rows if f":{stat.st_ino} " in row and "WRITE" in row]
    if holders:
        return [], f"process {holders[0]} holds {LOCK_FILE}"
    return [], f"{LOCK_FILE} is there, nobody holds it, and this user can open it"


def constraint_problems(path: Path, torch: str | None) -> list[str]:
    """What keeps a constraint file from holding torch to its CPU build.

    Args:
        path: The file.
        torch: The version it must name; any CPU build if None.
    """
    if not path.is_file():
        return [f"{path} is not there"]
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.split("#")[0].split(";")[0].replace(" ", "")
        if words.lower().startswith("torch=="):
            version = words.partition("==")[2]
            if not version.endswith("+cpu"):
                return [f"{path} holds torch to {version}, not to a +cpu build"]
            if torch is not None and version != torch:
                return [f"{path} holds torch to {version}, the image has {torch}"]
            return []
    return [f"{path} says nothing about torch"]


def guard_problems(place: Place, facts: dict[str, Any]) -> list[str]:
    """What is wrong with the image's own guard: its constraint file and ``/etc/pip.conf``.

    Args:
        place: The installation.
        facts: Its ``image.json``.
    """
    constraint = str(facts.get("constraint") or CONSTRAINT)
    problems = constraint_problems(place.under(constraint), facts.get("torch"))
    conf = place.under("/etc/pip.conf")
    text = conf.read_text(encoding="utf-8") if conf.is_file() else ""
    if not re.search(rf"^\s*constraint\s*=.*{re.escape(constraint)}", text, re.MULTILINE):
        problems.append(f"/etc/pip.conf does not name {constraint}")
    return problems


def guard_env_problems(place: Place, facts: dict[str, Any]) -> list[str]:
    """Constraints of the environment that do not keep torch on its CPU build.

    A user's own ``PIP_CONSTRAINT`` replaces the image's and the one in ``/etc/pip.conf``.

    Args:
        place: The installation.
        facts: Its ``image.json``.
    """
    problems = []
    for name in _GUARDS:
        value = place.environ.get(name, "")
        if not value.split():
            problems.append(f"{name} is not set")
            continue
        found = [
            constraint_problems(place.under(path), facts.get("torch")) for path in value.split()
        ]
        if all(found):
            problems.append(f"{name} was replaced: {found[0][0]}")
    return problems


def leftovers(place: Place) -> list[str]:
    """What a build leaves behind and an image must not have: identities, caches, logs.

    Args:
        place: The installation.
    """
    problems = []
    for name in _NOT_EMPTY:
        path = place.root / name
        if path.is_file() and path.read_bytes().strip() not in (b"", b"uninitialized"):
            problems.append(f"/{name} holds an identity")
    for name in _NO_FILES_IN:
        folder = place.root / name
        try:
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        except PermissionError:
            continue
        full = [path for path in files if path.stat().st_size and path.name != "lock"]
        if full:
            problems.append(f"/{full[0].relative_to(place.root)} was left behind")
    for home in sorted((place.root / "home").glob("*")):
        if (home / ".cache" / "pip").exists():
            problems.append(f"/{home.relative_to(place.root)}/.cache/pip was left behind")
    return problems
