"""What the static tier asks of an image's files and environment, as functions of a place."""

from __future__ import annotations

import hashlib
import pwd
import re
from pathlib import Path
from typing import Any

from smoke import installed
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
