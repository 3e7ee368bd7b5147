"""``./forge lock_check``: prove the locks fresh, complete, free of CUDA and in step with the pins.

Everything but freshness is judged from files, for every lock, in milliseconds. Freshness is a
resolution that gives the same bytes. Since the cutoff hides later uploads, it is proven once: a
stamp under ``out/lock`` keeps the proof, with the number of everything it depends on.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from tpuforge import tree
from tpuforge.console import Progress, duration
from tpuforge.errors import Exit, ForgeError
from tpuforge.lock import provenance
from tpuforge.lock.conflicts import CONFLICTS_FILE, Conflict, load_conflicts, moved, over
from tpuforge.lock.inputs import (
    CPU_DIGESTS,
    CpuWheel,
    Head,
    base_packages,
    constraints,
    cpu_wheel,
    cpu_wheels,
    existing,
    flavours,
    held_wheel,
    inputs_key,
    lock_path,
    metadata_fields,
    metadata_path,
    read_head,
    render,
    requirements,
    wheel_metadata,
)
from tpuforge.lock.names import LOCK_DIR, NAMES_FILE, ended, is_cuda, load_names
from tpuforge.lock.pool import Board, together
from tpuforge.lock.resolve import describe_changes, provenance_of, say_ignored, targets
from tpuforge.lock.resolver import RUNNING, Job, resolve, sweep, workspace
from tpuforge.lock.sources import UnreachableError, read_source
from tpuforge.lockfile import Locked, parse_lock, read_text
from tpuforge.paths import (
    ROOT,
    exclusive,
    out_dir,
    read_json,
    sha256_text,
    sha256_tree,
    write_json,
)
from tpuforge.pins import Pins, load
from tpuforge.verb import Outcome, parser, run_verb

_VERB = "lock_check"
_STAMP_SCHEMA = "tpuforge.lock-proofs/1"
_BESIDE = ("smoke", "simulator")
_APART = "tools"
_NAMED = 6


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        file: The file it stands in, such as ``lock/runtime-py311.txt``.
        package: The package, if it is about one.
        rule: ``input``, ``format``, ``edited``, ``stale``, ``layer``, ``consistent``, ``why``,
            ``pins``, ``cuda``, ``name``, ``table``, ``compatible`` or ``fresh``.
        found: What was found, in one sentence.
        mend: The command or act that mends it.
    """

    file: str
    package: str
    rule: str
    found: str
    mend: str

    @property
    def line(self) -> str:
        """The fault for people."""
        about = f" {self.package}:" if self.package else ""
        found = " ".join(self.found.split())
        return f"{self.file}:{about} [{self.rule}] {found}; mend: {self.mend}"


@dataclass(frozen=True)
class _Lock:
    """A lock as it stands in ``lock/``, read once for all that is asked of it.

    Attributes:
        text: Its text; empty if it is none.
        packages: What it holds; nothing if it is not of the form.
        head: Its head.
        wrong: What is wrong with its form; empty if nothing is.
        why: What stands beside it.
    """

    text: str
    packages: Sequence[Locked]
    head: Head
    wrong: str
    why: provenance.Provenance


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb.

    Args:
        argv: Its arguments; the process's own if not given.

    Returns:
        The exit code.
    """
    arguments = parser(_VERB, "Prove the locks fresh, complete and free of CUDA.")
    arguments.add_argument(
        "--flavour",
        metavar="NAME",
        help="whose freshness to prove, with smoke and simulator; or all",
    )
    arguments.add_argument("--python", metavar="X.Y", help="for this Python; or all")
    arguments.add_argument(
        "--image", metavar="NAME", help="only looked up here: ./forge gives it to each of its verbs"
    )
    arguments.add_argument(
        "--again", action="store_true", help="prove freshness anew even where a stamp proves it"
    )
    return run_verb(_VERB, arguments, _check, argv)


def _check(options: argparse.Namespace, progress: Progress) -> Outcome:
    # files are judged inside as well: an upgrade has the pins moved before the locks
    with exclusive("lock", lambda who: progress.note(f"waiting for {who}")):
        return _judge_all(options, progress)


def _judge_all(options: argparse.Namespace, progress: Progress) -> Outcome:
    pins = load()
    if options.image:
        # what the verbs after this one refuse is refused at once
        tree.image(ROOT / "images", options.image)
    chosen = _chosen(pins, options.flavour, options.python)
    locks = {target: _read(*target) for target in dict.fromkeys([*chosen, *existing(pins)])}
    conflicts = load_conflicts(pins)
    sound, faults = _from_files(pins, locks, conflicts)
    proofs = _Proofs(pins, sound)
    due = {t: sound[t] for t in chosen if t in sound and (options.again or not proofs.of(*t))}
    unjudged = _prove(pins, due, proofs, faults, progress)
    if options.flavour == "all" and not unjudged:
        unjudged = _ask_conflicts(pins, conflicts, proofs, faults, progress, again=options.again)
    faults = list(dict.fromkeys(faults))
    data: dict[str, Any] = {
        "locks": [_row(target, sound.get(target), proofs.of(*target)) for target in locks],
        "faults": [asdict(fault) for fault in faults],
    }
    lines, notes = [fault.line for fault in faults], []
    if unjudged:
        data["not_judged"] = unjudged
        notes.append(f"lock freshness not judged: {unjudged}")
        lines.append(f"freshness not judged: {unjudged}")
    names, code, unchanged = _names(chosen), Exit.OK, False
    if faults:
        summary = f"{len(faults)} fault(s) in {len({fault.file for fault in faults})} file(s)"
        code = Exit.FAULT
    elif unjudged:
        summary = "complete, clean and in step with the pins; freshness not judged"
        code = Exit.CANNOT
    elif due:
        summary = f"{names}: fresh, complete and free of CUDA"
    else:
        oldest = min(str(proofs.of(*target)["proven"]) for target in chosen)
        summary = f"{names}: no input, pin or lock changed since the proof of {oldest}"
        unchanged = True
    return Outcome(
        "unchanged" if unchanged else "done", summary, data, notes, code, "\n".join(lines)
    )


def _from_files(
    pins: Pins, locks: Mapping[tuple[str, str], _Lock], conflicts: Sequence[Conflict]
) -> tuple[dict[tuple[str, str], _Lock], list[Fault]]:
    """Judge everything but freshness: the locks that are sound, and the faults."""
    faults: list[Fault] = []
    sound = {}
    for target, lock in locks.items():
        found = _judge(pins, *target, locks)
        faults += found
        if not found:
            sound[target] = lock
    faults += _consistent(pins, sound)
    for python in pins.pythons:
        faults += _table(pins, python, locks)
    faults += _orphans(pins)
    for conflict in conflicts:
        # nothing is over where the lock in question is not there, or has faults of its own
        why = over(conflict) if (conflict.against, conflict.python) in sound else ""
        faults += [_compatible(conflict, why)] if why else []
    return sound, faults + _exceptions(sound)


def _row(target: tuple[str, str], lock: _Lock | None, proof: Mapping[str, Any]) -> dict[str, Any]:
    """What the result says of a lock."""
    flavour, python = target
    return {
        "flavour": flavour,
        "python": python,
        "file": f"lock/{lock_path(flavour, python).name}",
        "packages": None if lock is None else len(lock.packages),
        "sound": lock is not None,
        "fresh": bool(proof),
        "proof": proof,
    }


def _chosen(pins: Pins, flavour: str | None, python: str | None) -> list[tuple[str, str]]:
    """The locks whose freshness is proven: what was asked for, and what every image needs."""
    if flavour == "all" or python == "all":
        return targets(pins, flavour or "all", python or "all")
    asked = targets(pins, flavour or pins.default_flavour, python or pins.default_python)
    beside = [(name, asked[0][1]) for name in _BESIDE if name in flavours(pins)]
    return list(dict.fromkeys([*asked, *beside]))


def _compatible(conflict: Conflict, why: str) -> Fault:
    mend = f"see whether {conflict.flavour} can be locked now; if not, mend the entry"
    return Fault(f"lock/{CONFLICTS_FILE.name}", conflict.name, "compatible", why, mend)


def _ask_conflicts(
    pins: Pins,
    conflicts: Sequence[Conflict],
    proofs: _Proofs,
    faults: list[Fault],
    progress: Progress,
    *,
    again: bool,
) -> str:
    """Ask the index about each package that stands in a conflict, once.

    Returns:
        Why it could not be judged; empty if it was.
    """
    source = None
    for name in dict.fromkeys(conflict.name for conflict in conflicts):
        mine = [conflict for conflict in conflicts if conflict.name == name]
        key = sha256_text(pins.cutoff.isoformat(), *map(repr, mine))
        if not again and proofs.held(f"conflict {name}", key):
            continue
        source = source or read_source(Path(sys.executable))
        job = Job(pins, mine[0].against, mine[0].python, source)
        started = time.monotonic()
        try:
            with progress.step(f"asking whether {name} still conflicts"), workspace() as work:
                why = moved(job, mine, work)
        except UnreachableError as error:
            return error.found
        if why:
            faults.append(_compatible(mine[0], why))
        else:
            seconds = time.monotonic() - started
            proofs.keep(f"conflict {name}", key, "pip", source.name, seconds)
    return ""


def _orphans(pins: Pins) -> list[Fault]:
    """Locks that no input can renew."""
    known = {lock_path(*target) for target in existing(pins)}
    what = "no .in file has its name, or the pins do not lock it for this Python"
    return [
        Fault(f"lock/{path.name}", "", "input", what, f"rm lock/{path.name}")
        for path in sorted(LOCK_DIR.glob("*.txt"))
        if path not in known
    ]


def _names(locks: Collection[tuple[str, str]]) -> str:
    """Locks for people: by name, unless they are many."""
    if len(locks) > _NAMED:
        return f"{len(locks)} locks"
    return ", ".join(lock_path(*target).stem for target in locks)


def _read(flavour: str, python: str) -> _Lock:
    """A lock as it stands in ``lock/``; an edited one is read like any other, to judge it all.

    Raises:
        ForgeError: If there is no such lock.
    """
    path, wrong, text = lock_path(flavour, python), "", ""
    packages: list[Locked] = []
    try:
        text = read_text(path)
        packages = parse_lock(path, text)
    except FileNotFoundError as error:
        raise ForgeError(
            f"lock/{path.name}: there is no such lock",
            expected=f"a lock of {flavour} for Python {python}",
            mend=_again(flavour, python),
        ) from error
    except ForgeError as error:
        wrong = error.found.removeprefix(f"{path.name}, ")
    return _Lock(text, packages, read_head(text), wrong, provenance.read(flavour, python))


def _again(flavour: str, python: str) -> str:
    return f"./forge lock --flavour {flavour} --python {python}"


def _judge(
    pins: Pins, flavour: str, python: str, locks: Mapping[tuple[str, str], _Lock]
) -> list[Fault]:
    """Judge one lock from files alone.

    Returns:
        What is wrong with it; nothing if it is sound.
    """
    lock, again = locks[flavour, python], _again(flavour, python)
    file = f"lock/{lock_path(flavour, python).name}"
    try:
        asked = requirements(pins, flavour, python)
        names = [canonicalize_name(one.name) for one in asked]
    except ForgeError as error:
        where, _, what = error.found.partition(", ")
        return [Fault(f"lock/{where}", "", "input", what, error.mend)]
    if lock.wrong:
        return [Fault(file, "", "format", lock.wrong, again)]
    below = locks.get((pins.flavours[flavour].on, python))
    try:
        # one that is not as written is read again, for what it then says
        base = (
            below.packages
            if below is not None and below.head.intact and not below.wrong
            else base_packages(pins, flavour, python)
        )
    except ForgeError as error:
        what = f"the lock it builds on cannot be read: {error.found}"
        return [Fault(file, "", "layer", what, again)]
    try:
        reached = [package.name for package in lock.packages]
        key = inputs_key(pins, flavour, python, reached, base)
    except ForgeError as error:
        return [Fault(file, "", "table", error.found, error.mend)]
    faults = []
    if not lock.head.intact:
        what = "its content is not what ./forge lock wrote: it was edited by hand"
        faults.append(Fault(file, "", "edited", what, again))
    if lock.head.inputs != key:
        what = f"lock/{flavour}.in, the pins or the table of torch changed since it was written"
        faults.append(Fault(file, "", "stale", what, again))
    faults += [
        Fault(file, p.name, "layer", f"{p.version} of the lock it builds on is not in it", again)
        for p in base
        if p not in lock.packages
    ]
    faults += _why(pins, flavour, python, lock, inputs=names, again=again)
    return faults + _contents(pins, flavour, python, lock.packages, again)


def _why(
    pins: Pins,
    flavour: str,
    python: str,
    lock: _Lock,
    *,
    inputs: Collection[str],
    again: str,
) -> list[Fault]:
    """Judge the file beside a lock that says where each package comes from and why."""
    file = f"lock/{provenance.path_of(flavour, python).name}"
    if lock.why.wrong:
        return [Fault(file, "", "why", lock.why.wrong, again)]
    entries = lock.why.packages
    faults = _left_out(flavour, file, lock.why.left_out, again)
    for name in sorted(entries.keys() - {package.name for package in lock.packages}):
        faults.append(Fault(file, name, "why", "it is not in the lock", again))
    for package in lock.packages:
        name, entry = package.name, entries.get(package.name)
        if entry is None:
            faults.append(Fault(file, name, "why", "nothing says why it is in the lock", again))
            continue
        chain = entry["why"]
        if (entry["version"], entry["sha256"]) != (package.version, package.sha256):
            faults.append(Fault(file, name, "why", f"it is about {entry['version']}", again))
        if chain[-1:] != [name] or chain[0] not in inputs or not set(chain) <= entries.keys():
            what = f"the chain {' > '.join(chain)} does not lead from an input to it"
            faults.append(Fault(file, name, "why", what, again))
        if entry["index"] != provenance.index_of(pins, name):
            builds = " and ".join(pins.cpu_builds)
            what = f"it comes from the {entry['index']}; from the PyTorch index come {builds} alone"
            faults.append(Fault(file, name, "why", what, again))
    return faults


def _left_out(
    flavour: str, file: str, recorded: Mapping[str, Mapping[str, Any]], again: str
) -> list[Fault]:
    """Judge what a lock does not hold although it is required: the file must say what rules it."""
    rules = {one.name: one for one in load_names().left_out_of(flavour)}
    faults: list[Fault] = []
    for name, entry in recorded.items():
        chain, reason = entry["why"], entry["reason"]
        rule = rules.get(name)
        if rule is not None:
            if chain[-2:-1] != [rule.by] or reason != rule.why:
                what = f"it is left out of {' > '.join(chain)} for another reason than names.toml's"
                faults.append(Fault(file, name, "why", what, again))
        elif reason != provenance.FOLLOWS or not rules.keys() & recorded.keys() & set(chain):
            what = "it is left out, and lock/names.toml does not say so"
            faults.append(Fault(file, name, "why", what, again))
    return faults


def _consistent(pins: Pins, sound: Mapping[tuple[str, str], _Lock]) -> list[Fault]:
    """One release of a package for all flavours of a Python, or what runs together may not agree.

    The tools never share an environment with a flavour. A flavour that stands apart may differ from
    others that build on something, and from nothing else.
    """
    locks = sorted(target for target in sound if target[0] != _APART)
    together = [target for target in locks if not pins.flavours[target[0]].apart]
    alone = [target for target in locks if not pins.flavours[target[0]].on]
    faults = _differing(sound, together)
    for target in locks:
        if pins.flavours[target[0]].apart:
            faults += _differing(sound, [*alone, target])
    return faults


def _differing(
    sound: Mapping[tuple[str, str], _Lock], locks: Sequence[tuple[str, str]]
) -> list[Fault]:
    """Packages that two locks of one Python hold in different releases."""
    seen: dict[tuple[str, str], tuple[str, Locked]] = {}
    faults = []
    for flavour, python in locks:
        name = f"lock/{lock_path(flavour, python).name}"
        for package in sound[flavour, python].packages:
            first, other = seen.setdefault((python, package.name), (name, package))
            if other != package:
                what = f"{package.version}, and {first} has {other.version}, or another file of it"
                mend = f"./forge lock --flavour all --python {python}"
                faults.append(Fault(name, package.name, "consistent", what, mend))
    return faults


def _contents(
    pins: Pins, flavour: str, python: str, packages: Sequence[Locked], again: str
) -> list[Fault]:
    faults = []
    file = f"lock/{lock_path(flavour, python).name}"
    pinned = constraints(pins, python)
    wheels = cpu_wheels(pins, python)
    names = load_names()
    for package in packages:
        name, number = package.name, package.version
        why = names.refusal(name, flavour)
        if why:
            rule = "cuda" if is_cuda(name) else "name"
            faults.append(Fault(file, name, rule, f"{number} may not be there: {why}", again))
        build = pins.cpu_builds.get(name)
        if build is not None and Version(number).local != build.local:
            what = f"{number} without +{build.local} is a CUDA build"
            faults.append(Fault(file, name, "cuda", what, again))
        if name in pinned and number != pinned[name]:
            what = f"{number} is locked, the pins say {pinned[name]}"
            faults.append(Fault(file, name, "pins", what, again))
        wheel = wheels.get(name)
        if wheel is not None and package.sha256 != wheel.sha256:
            what = f"its digest is not the one of lock/{CPU_DIGESTS.name}"
            faults.append(Fault(file, name, "table", what, again))
    return faults


def _exceptions(sound: Mapping[tuple[str, str], _Lock]) -> list[Fault]:
    """Judge the exceptions themselves: one that nothing needs would let CUDA in unseen later on."""
    names = load_names()
    file, mend = f"lock/{NAMES_FILE.name}", "remove the entry"
    held = {
        (package.name, flavour) for (flavour, _), lock in sound.items() for package in lock.packages
    }
    faults = [
        Fault(file, one.name, "name", f"{one.flavour} has none of it", mend)
        for one in names.allowed
        if (one.name, one.flavour) not in held
    ]
    left_out = {
        (name, flavour, entry["why"][-2])
        for (flavour, _), lock in sound.items()
        for name, entry in lock.why.left_out.items()
    }
    for one in names.left_out:
        over = ended(one)
        if over:
            what = "prove anew that imports do without it, then give it another day: docs/lock.md"
            faults.append(Fault(file, one.name, "name", f"left out of {one.flavour}: {over}", what))
        # a lock that is not sound has faults of its own, and may need the entry
        judged = any(flavour == one.flavour for flavour, _ in sound)
        if judged and (one.name, one.flavour, one.by) not in left_out:
            what = f"no longer needed: {one.by} brings none of it into {one.flavour}"
            faults.append(Fault(file, one.name, "name", what, mend))
    return faults


def _table(
    pins: Pins,
    python: str,
    locks: Mapping[tuple[str, str], _Lock],
    folders: Sequence[Path] = (),
) -> list[Fault]:
    """Judge digests and metadata of the CPU builds that the locks of a Python hold."""
    held = {p.name for target, lock in locks.items() if target[1] == python for p in lock.packages}
    faults = []
    for name in sorted(held & pins.cpu_builds.keys()):
        try:
            faults += _beside(cpu_wheel(pins, name, python), folders)
        except ForgeError as error:
            faults.append(Fault(f"lock/{CPU_DIGESTS.name}", name, "table", error.found, error.mend))
    return faults


def _beside(wheel: CpuWheel, folders: Sequence[Path]) -> list[Fault]:
    """Compare the metadata of a CPU build with its real wheel, where that is held."""
    held = held_wheel(wheel, folders)
    if held is None:
        return []
    stated, real = metadata_fields(wheel.metadata), metadata_fields(wheel_metadata(held))
    if real == stated:
        return []
    which = ", ".join(field for field in real if real[field] != stated[field])
    what = f"{which} is not what {wheel.file} says"
    mend = "take it from the wheel as docs/lock.md says, then: ./forge lock"
    return [Fault(f"lock/{metadata_path(wheel.name).name}", wheel.name, "table", what, mend)]


class _Proofs:
    """The stamp file: which locks were proven fresh, and from what.

    Args:
        pins: The pins.
        sound: The locks that can have a proof: their heads name the inputs as they are.
    """

    def __init__(self, pins: Pins, sound: Mapping[tuple[str, str], _Lock]) -> None:
        self._pins = pins
        self._sound = sound
        self._path = out_dir() / "lock" / "proofs.json"
        # another resolver, or other code around it, may come to another result
        tools = lock_path("tools", RUNNING)
        self._machinery = sha256_text(
            sha256_tree(Path(__file__).parent),
            read_text(tools) if tools.is_file() else "",
        )
        held = read_json(self._path)
        fits = isinstance(held, dict) and held.get("schema") == _STAMP_SCHEMA
        proofs = held.get("proofs") if fits else None
        self._held: dict[str, Any] = proofs if isinstance(proofs, dict) else {}
        self._guard = threading.Lock()

    def _key(self, flavour: str, python: str) -> str:
        lock = self._sound[flavour, python]
        # a pin or a moment of a package that is not in the lock may bring it in
        around = repr((constraints(self._pins, python), self._pins.later))
        return sha256_text(self._machinery, around, lock.text, repr(lock.why.document))

    def of(self, flavour: str, python: str) -> dict[str, Any]:
        """The proof of a lock, if there is one and nothing that it depends on changed."""
        if (flavour, python) not in self._sound:
            return {}
        return self.held(lock_path(flavour, python).stem, self._key(flavour, python))

    def held(self, name: str, key: str) -> dict[str, Any]:
        """The proof of this name, if it was made from this key."""
        held = self._held.get(name)
        fits = isinstance(held, dict) and held.get("key") == key
        return dict(held) if fits and held is not None else {}

    def add(self, flavour: str, python: str, way: str, index: str, seconds: float) -> None:
        """Keep the proof of a lock."""
        key = self._key(flavour, python)
        self.keep(lock_path(flavour, python).stem, key, way, index, seconds)

    def keep(self, name: str, key: str, way: str, index: str, seconds: float) -> None:
        """Keep a proof."""
        proof = {
            "key": key,
            "proven": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "way": way,
            "index": index,
            "seconds": round(seconds, 1),
        }
        with self._guard:
            self._held[name] = proof
            write_json(self._path, {"schema": _STAMP_SCHEMA, "proofs": self._held})


def _prove(
    pins: Pins,
    due: Mapping[tuple[str, str], _Lock],
    proofs: _Proofs,
    faults: list[Fault],
    progress: Progress,
) -> str:
    """Resolve what has no proof yet.

    Returns:
        Why freshness could not be judged; empty if it was.
    """
    if not due:
        return ""
    sweep()
    source = read_source(Path(sys.executable))
    say_ignored(source, progress)
    for python in dict.fromkeys(python for _, python in due):
        faults += _table(pins, python, due, source.folders)
    found: dict[tuple[str, str], list[Fault]] = {}

    def one(job: Job, board: Board) -> None:
        target, started = (job.flavour, job.python), time.monotonic()
        board.show(job, "resolving")
        found[target], way = _anew(job, due[target])
        seconds = time.monotonic() - started
        if not found[target]:
            proofs.add(*target, way, source.name, seconds)
        board.end(job, f"{'not fresh' if found[target] else 'fresh'} ({duration(seconds)})")

    title = f"resolving {_names(due)} anew"
    try:
        together(pins, list(due), source, progress, title=title, one=one)
    except ForgeError as error:
        if error.exit_code in (Exit.FAULT, Exit.INTERRUPTED):
            raise
        return error.found
    finally:
        # also what was found before the index went away
        faults += [fault for target in due for fault in found.get(target, [])]
    return ""


def _anew(job: Job, lock: _Lock) -> tuple[list[Fault], str]:
    """Resolve a lock anew and compare.

    Returns:
        What is not fresh about it, and the way it was resolved, if it was.
    """
    file = f"lock/{lock_path(job.flavour, job.python).name}"
    try:
        fresh = resolve(job)
    except ForgeError as error:
        if error.exit_code != Exit.FAULT:
            raise
        return [Fault(file, "", "fresh", error.found, error.mend)], ""
    changes = describe_changes(lock.packages, fresh.packages)
    names = [package.name for package in fresh.packages]
    text = render(fresh.packages, inputs_key(job.pins, job.flavour, job.python, names), job.python)
    if not changes and text != lock.text:
        changes = ["it names the right packages in other bytes than ./forge lock writes"]
    mend = f"check the index {job.source.name}; if right: ./forge lock --renew, git diff lock/"
    faults = [Fault(file, "", "fresh", what, mend) for what in changes]
    if not changes:
        other = provenance.differences(lock.why.document, provenance_of(job, fresh))
        file = f"lock/{provenance.path_of(job.flavour, job.python).name}"
        faults += [Fault(file, name, "fresh", what, mend) for name, what in other]
    return faults, fresh.way


if __name__ == "__main__":
    raise SystemExit(main())
