"""``forge lock_check``: prove the locks fresh, complete, free of CUDA and in step with the pins.

Everything but freshness is judged from files, for every lock, in milliseconds. Freshness is a
resolution that gives the same bytes. Since the cutoff hides later uploads, it is proven once: a
stamp under ``out/lock`` keeps the proof, with the number of everything it depends on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.version import Version

from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.lock.inputs import (
    LOCK_DIR,
    TORCH_METADATA,
    check_flavour,
    constraints,
    existing,
    flavours,
    inputs_key,
    is_cuda,
    lock_path,
    metadata_fields,
    read_head,
    read_input,
    render,
    torch_wheel,
    wheel_metadata,
)
from tpuforge.lock.resolve import describe_changes, say_ignored, targets
from tpuforge.lock.resolver import RUNNING, Job, resolve, sweep
from tpuforge.lock.sources import UnreachableError, read_source
from tpuforge.lockfile import Locked, read_lock
from tpuforge.paths import (
    exclusive,
    out_dir,
    read_json,
    sha256_file,
    sha256_text,
    sha256_tree,
    write_json,
)
from tpuforge.pins import Pins, load
from tpuforge.verb import Outcome, parser, run_verb

_VERB = "lock_check"
_STAMP_SCHEMA = "tpuforge.lock-proofs/1"
_BESIDE = ("smoke", "simulator")


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        file: The file it stands in, such as ``lock/runtime-py311.txt``.
        package: The package, if it is about one.
        rule: ``input``, ``format``, ``edited``, ``stale``, ``pins``, ``cuda``, ``table`` or
            ``fresh``.
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb.

    Args:
        argv: Its arguments; the process's own if not given.

    Returns:
        The exit code.
    """
    arguments = parser(_VERB, "Prove the locks fresh, complete and free of CUDA.")
    arguments.add_argument(
        "--flavour", help="whose freshness to prove, with smoke and simulator; or all"
    )
    arguments.add_argument("--python", help="for this Python, X.Y; or all")
    arguments.add_argument("--image", help="taken and not needed here")
    arguments.add_argument(
        "--again", action="store_true", help="prove freshness anew even where a stamp proves it"
    )
    return run_verb(_VERB, arguments, _check, argv)


def _check(options: argparse.Namespace, progress: Progress) -> Outcome:
    pins = load()
    chosen = _chosen(pins, options.flavour, options.python)
    faults: list[Fault] = []
    everything = list(dict.fromkeys([*chosen, *existing()]))
    sound = set()
    for target in everything:
        found = judge(pins, *target)
        faults += found
        if not found:
            sound.add(target)
    for python in pins.pythons:
        faults += _table(pins, python)
    faults += _orphans()
    proofs = _Proofs(pins)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    with exclusive("lock", lambda who: progress.note(f"waiting for {who}")):
        due = [t for t in chosen if t in sound and (options.again or not proofs.of(*t))]
        unjudged = _prove(pins, due, proofs, faults, progress)
    faults = list(dict.fromkeys(faults))
    for flavour, python in everything:
        proof = proofs.of(flavour, python)
        rows.append(
            {
                "flavour": flavour,
                "python": python,
                "file": f"lock/{lock_path(flavour, python).name}",
                "packages": _count(flavour, python) if (flavour, python) in sound else None,
                "sound": (flavour, python) in sound,
                "fresh": bool(proof),
                "proof": proof,
            }
        )
    data: dict[str, Any] = {"locks": rows, "faults": [asdict(fault) for fault in faults]}
    lines = [fault.line for fault in faults]
    if unjudged:
        data["not_judged"] = unjudged
        notes.append(f"lock freshness not judged: {unjudged}")
        lines.append(f"freshness not judged: {unjudged}")
    text = "\n".join(lines)
    if faults:
        files = len({fault.file for fault in faults})
        summary = f"{len(faults)} fault(s) in {files} file(s)"
        return Outcome("done", summary, data, notes, Exit.FAULT, text)
    if unjudged:
        summary = "complete, clean and in step with the pins; freshness not judged"
        return Outcome("done", summary, data, notes, Exit.CANNOT, text)
    names = ", ".join(lock_path(*target).stem for target in chosen)
    if due:
        return Outcome("done", f"{names}: fresh, complete and free of CUDA", data, notes)
    oldest = min(str(proofs.of(*target)["proven"]) for target in chosen)
    summary = f"{names}: no input, pin or lock changed since the proof of {oldest}"
    return Outcome("unchanged", summary, data, notes)


def _chosen(pins: Pins, flavour: str | None, python: str | None) -> list[tuple[str, str]]:
    """The locks whose freshness is proven: what was asked for, and what every image needs."""
    if flavour == "all" or python == "all":
        names = flavours() if flavour in (None, "all") else [check_flavour(str(flavour))]
        pythons = pins.pythons if python in (None, "all") else [pins.python(python)]
        found = [target for target in existing() if target[0] in names and target[1] in pythons]
        if not found:
            raise ForgeError(
                "there is no such lock",
                expected=f"a lock of {', '.join(names)} for Python {', '.join(pythons)}",
                mend=f"./forge lock --flavour {flavour or 'all'} --python {python or 'all'}",
            )
        return found
    asked = targets(pins, flavour or pins.default_flavour, python or pins.default_python)
    beside = [(name, asked[0][1]) for name in _BESIDE if name in flavours()]
    return list(dict.fromkeys([*asked, *beside]))


def _orphans() -> list[Fault]:
    """Locks that no input can renew."""
    known = {lock_path(*target) for target in existing()}
    return [
        Fault(f"lock/{path.name}", "", "input", "no .in file has its name", f"rm lock/{path.name}")
        for path in sorted(LOCK_DIR.glob("*.txt"))
        if path not in known
    ]


def _count(flavour: str, python: str) -> int:
    return len(read_lock(lock_path(flavour, python)))


def judge(pins: Pins, flavour: str, python: str) -> list[Fault]:
    """Judge one lock from files alone.

    Args:
        pins: The pins.
        flavour: Such as ``runtime``.
        python: ``X.Y``.

    Returns:
        What is wrong with it; nothing if it is sound.

    Raises:
        ForgeError: If there is no such lock.
    """
    path = lock_path(flavour, python)
    file = f"lock/{path.name}"
    again = f"./forge lock --flavour {flavour} --python {python}"
    if not path.exists():
        raise ForgeError(
            f"{file}: there is no such lock",
            expected=f"a lock of {flavour} for Python {python}",
            mend=again,
        )
    try:
        read_input(LOCK_DIR / f"{flavour}.in", constraints(pins))
    except ForgeError as error:
        where, _, what = error.found.partition(", ")
        return [Fault(f"lock/{where}", "", "input", what, error.mend)]
    try:
        packages = read_lock(path)
    except ForgeError as error:
        return [Fault(file, "", "format", error.found.removeprefix(f"{path.name}, "), again)]
    try:
        key = inputs_key(pins, flavour, python, [package.name for package in packages])
    except ForgeError as error:
        return [Fault(file, "torch", "table", error.found, error.mend)]
    head = read_head(path.read_text(encoding="utf-8"))
    faults = []
    if not head.intact:
        what = "its content is not what ./forge lock wrote: it was edited by hand"
        faults.append(Fault(file, "", "edited", what, again))
    if head.inputs != key:
        what = f"lock/{flavour}.in, the pins or the table of torch changed since it was written"
        faults.append(Fault(file, "", "stale", what, again))
    return faults + _contents(pins, python, file, packages, again)


def _contents(
    pins: Pins, python: str, file: str, packages: Sequence[Locked], again: str
) -> list[Fault]:
    faults = []
    pinned = constraints(pins)
    for package in packages:
        name, number = package.name, package.version
        if is_cuda(name):
            faults.append(Fault(file, name, "cuda", f"{number} is a CUDA package", again))
        if name == "torch" and Version(number).local != pins.torch.local:
            what = f"{number} without +{pins.torch.local} is a CUDA build"
            faults.append(Fault(file, name, "cuda", what, again))
        if name in pinned and number != pinned[name]:
            what = f"{number} is locked, the pins say {pinned[name]}"
            faults.append(Fault(file, name, "pins", what, again))
        if name == "torch" and package.sha256 != torch_wheel(pins, python).sha256:
            what = "its digest is not the one of lock/torch-cpu.sha256"
            faults.append(Fault(file, name, "table", what, again))
    return faults


def _table(pins: Pins, python: str, folders: Sequence[Path] = ()) -> list[Fault]:
    """Judge torch's digest and metadata for a Python, against the real wheel where it is held."""
    try:
        torch = torch_wheel(pins, python)
    except ForgeError as error:
        return [Fault("lock/torch-cpu.sha256", "torch", "table", error.found, error.mend)]
    # the wheelhouse holds a file only once its digest was verified; elsewhere it is verified here
    held = out_dir() / "wheelhouse" / torch.sha256 / torch.file
    wheels = [held] if held.is_file() else []
    wheels += [
        folder / torch.file
        for folder in folders
        if (folder / torch.file).is_file() and sha256_file(folder / torch.file) == torch.sha256
    ]
    stated = metadata_fields(torch.metadata)
    for wheel in wheels[:1]:
        real = metadata_fields(wheel_metadata(wheel))
        if real != stated:
            which = ", ".join(field for field in real if real[field] != stated[field])
            what = f"{which} is not what {torch.file} says"
            mend = "take it from the wheel as docs/lock.md says, then: ./forge lock"
            return [Fault(f"lock/{TORCH_METADATA.name}", "torch", "table", what, mend)]
    return []


class _Proofs:
    """The stamp file: which locks were proven fresh, and from what.

    Args:
        pins: The pins.
    """

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._path = out_dir() / "lock" / "proofs.json"
        # another resolver, or other code around it, may come to another result
        tools = lock_path("tools", RUNNING)
        self._machinery = sha256_text(
            sha256_tree(Path(__file__).parent),
            tools.read_text(encoding="utf-8") if tools.exists() else "",
        )
        held = read_json(self._path)
        fits = isinstance(held, dict) and held.get("schema") == _STAMP_SCHEMA
        self._held: dict[str, Any] = held["proofs"] if fits else {}

    def _key(self, flavour: str, python: str) -> str:
        path = lock_path(flavour, python)
        text = path.read_text(encoding="utf-8")
        inputs = inputs_key(self._pins, flavour, python, constraints(self._pins))
        return sha256_text(self._machinery, inputs, text)

    def of(self, flavour: str, python: str) -> dict[str, Any]:
        """The proof of a lock, if there is one and nothing that it depends on changed."""
        held = self._held.get(lock_path(flavour, python).stem)
        try:
            fits = isinstance(held, dict) and held.get("key") == self._key(flavour, python)
        except (ForgeError, OSError):
            return {}
        return dict(held) if fits and held is not None else {}

    def add(self, flavour: str, python: str, way: str, index: str, seconds: float) -> None:
        """Keep a proof."""
        self._held[lock_path(flavour, python).stem] = {
            "key": self._key(flavour, python),
            "proven": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "way": way,
            "index": index,
            "seconds": round(seconds, 1),
        }
        write_json(self._path, {"schema": _STAMP_SCHEMA, "proofs": self._held})


def _prove(
    pins: Pins,
    due: Sequence[tuple[str, str]],
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
    faults += [f for _, python in due[:1] for f in _table(pins, python, source.folders)]
    for number, (flavour, python) in enumerate(due):
        job = Job(pins, flavour, python, source)
        started = time.monotonic()
        path = lock_path(flavour, python)
        try:
            with progress.step(f"resolving {job.what} anew"):
                if number == 0:
                    job.probe()
                fresh = resolve(job)
        except UnreachableError as error:
            return error.found
        except ForgeError as error:
            if error.exit_code != Exit.FAULT:
                return error.found
            faults.append(Fault(f"lock/{path.name}", "", "fresh", error.found, error.mend))
            continue
        changes = describe_changes(read_lock(path), fresh.packages)
        names = [package.name for package in fresh.packages]
        text = render(fresh.packages, inputs_key(pins, flavour, python, names), python)
        if not changes and text != path.read_text(encoding="utf-8"):
            changes = ["it names the right packages in other bytes than ./forge lock writes"]
        mend = f"check the index {source.name}; if right: ./forge lock --renew, git diff lock/"
        faults += [Fault(f"lock/{path.name}", "", "fresh", what, mend) for what in changes]
        if not changes:
            proofs.add(flavour, python, fresh.way, source.name, time.monotonic() - started)
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
