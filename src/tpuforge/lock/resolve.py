"""``./forge lock``: resolve the inputs in ``lock/`` and write the locks.

A lock changes only when what it was made from changed. Where the inputs are the same and the
index now answers differently, or shows another file under the same release, nothing is written
without ``--renew``: an index that was swapped or tampered with looks just like that.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from tpuforge.console import Progress, duration
from tpuforge.errors import Exit, ForgeError
from tpuforge.lock.changes import check_names, held, pull_request, with_moments
from tpuforge.lock.compatibility import PAGE, UNGUARDED, UNGUARDED_SCHEMA, with_torch, write_page
from tpuforge.lock.inputs import (
    base_packages,
    check_flavour,
    constraints,
    cpu_wheels,
    existing,
    flavours,
    held_wheel,
    inputs_key,
    lock_path,
    read_head,
    render,
    requirements,
)
from tpuforge.lock.names import LOCK_DIR, is_cuda
from tpuforge.lock.pool import Board, together
from tpuforge.lock.provenance import Listed, as_moment, document, path_of, read
from tpuforge.lock.resolver import (
    WAYS,
    Job,
    Resolved,
    resolve,
    resolve_unguarded,
    sweep,
    verify,
    workspace,
)
from tpuforge.lock.sources import Source, read_source
from tpuforge.lock.view import Chosen
from tpuforge.lockfile import Locked, read_lock, read_text
from tpuforge.paths import exclusive, out_dir, write_atomic, write_json
from tpuforge.pins import PINS_FILE, Pins, load
from tpuforge.verb import Outcome, parser, run_verb

_VERB = "lock"
_DAY = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb.

    Args:
        argv: Its arguments; the process's own if not given.

    Returns:
        The exit code.
    """
    arguments = parser(_VERB, "Resolve the inputs in lock/ and write the locks.")
    arguments.add_argument(
        "--flavour", metavar="NAME", help="an input in lock/, or all (default: every lock)"
    )
    arguments.add_argument(
        "--python", metavar="X.Y", help="one Python, or all (default: every lock)"
    )
    arguments.add_argument(
        "--renew", action="store_true", help="take the index's word where it contradicts a lock"
    )
    arguments.add_argument(
        "--way",
        choices=WAYS,
        default="auto",
        help="the resolver (default: auto, pip-tools where possible)",
    )
    arguments.add_argument(
        "--upgrade",
        nargs="?",
        const="today",
        action="append",
        metavar="PACKAGE or DAY",
        help="let a package (or several: a,b) take releases up to the beginning of a day, "
        "YYYY-MM-DD in UTC (default: today), or all packages if none is named; resolve every lock "
        "and print what changed as the text of a pull request",
    )
    arguments.add_argument(
        "--unguarded",
        action="store_true",
        help="only measure what the closures would be with torch's CUDA build, for the docs",
    )
    return run_verb(_VERB, arguments, _lock, argv)


def targets(pins: Pins, flavour: str | None, python: str | None) -> list[tuple[str, str]]:
    """Which locks a command line means.

    Args:
        pins: The pins.
        flavour: A flavour, ``all``, or None.
        python: ``X.Y``, ``all``, or None.

    Returns:
        Flavours and Pythons: every lock that stands in ``lock/`` if neither is named, or the
        default one if there is none yet.

    Raises:
        ForgeError: For a flavour or a Python that does not exist, or not together.
    """
    if flavour is None and python is None:
        return existing(pins) or [(pins.default_flavour, pins.default_python)]
    names = flavours(pins) if flavour in (None, "all") else [check_flavour(pins, str(flavour))]
    pythons = list(pins.pythons) if python == "all" else [pins.python(python)]
    found = [
        (name, number)
        for name in names
        for number in pythons
        if number in pins.flavours[name].pythons
    ]
    if not found:
        raise ForgeError(
            f"{', '.join(names)} is not locked for Python {', '.join(pythons)}",
            expected=f"one of {', '.join(pins.flavours[names[0]].pythons)}",
            mend=f"see [flavour.{names[0]}] in lock/pins.toml, and docs/compatibility.md",
        )
    return found


def _lock(options: argparse.Namespace, progress: Progress) -> Outcome:
    # the pins too are read inside: another run may be moving their cutoff, or putting it back
    with exclusive("lock", lambda who: progress.note(f"waiting for {who}, which is locking")):
        pins = load()
        if options.unguarded:
            return _unguarded(pins, progress)
        if options.upgrade:
            return _upgrade(pins, options, progress)
        return _resolve_all(pins, options, progress)


def _resolve_all(pins: Pins, options: argparse.Namespace, progress: Progress) -> Outcome:
    chosen = targets(pins, options.flavour, options.python)
    # every input is read before the first package is asked for
    for flavour, python in chosen:
        requirements(pins, flavour, python)
        cpu_wheels(pins, python)
    source = read_source(Path(sys.executable))
    say_ignored(source, progress)
    sweep()
    title = f"resolving {len(chosen)} lock(s)"

    def one(job: Job, board: Board) -> dict[str, object]:
        return _one(job, options, board)

    results = together(pins, chosen, source, progress, title=title, one=one)
    write_page(pins)
    written = [result["file"] for result in results if result["changed"]]
    summary = (
        f"wrote {', '.join(map(str, written))}; review it: git diff lock/"
        if written
        else f"{len(results)} lock(s) resolved anew, each the same to the byte"
    )
    data = {"index": source.name, "ignored": list(source.ignored), "locks": results}
    return Outcome("done" if written else "unchanged", summary, data=data)


def _asked_for(
    pins: Pins, options: argparse.Namespace, locked: Collection[str]
) -> tuple[list[str], datetime]:
    """Which packages to upgrade, all of them if none is named, and up to when."""
    words = [word.strip() for item in options.upgrade for word in item.split(",")]
    if not all(words):
        # an empty variable of a script must not come to mean every package
        raise ForgeError(
            "a package or a day to upgrade is empty",
            expected="names of packages, a day, or --upgrade alone for all packages",
            mend="./forge lock --upgrade",
        )
    days = sorted({word for word in words if word == "today" or _DAY.fullmatch(word)})
    if len(days) > 1:
        raise ForgeError(
            f"{' and '.join(days)} are two days",
            expected="one day for all packages that are named",
            mend=f"./forge lock --upgrade {days[-1]}",
        )
    until = _midnight(days[0] if days else "today")
    if options.flavour or options.python:
        raise ForgeError(
            "an upgrade is of every lock, since flavours share packages",
            expected="--upgrade without --flavour and --python",
            mend="./forge lock --upgrade",
        )
    names = check_names(pins, [word for word in words if word not in days], locked)
    late = [name for name in names if pins.later.get(name, pins.cutoff) >= until]
    if late or (not names and until <= pins.cutoff):
        whose = f"of {', '.join(late)} " if late else ""
        held_at = max((pins.later.get(name, pins.cutoff) for name in late), default=pins.cutoff)
        raise ForgeError(
            f"the cutoff {whose}{as_moment(held_at)} is not before {as_moment(until)}",
            expected="a later day: a cutoff that goes back would hide releases that are locked",
            mend="edit [resolver] in lock/pins.toml by hand if you mean it",
        )
    return names, until


def _upgrade(pins: Pins, options: argparse.Namespace, progress: Progress) -> Outcome:
    """Move the cutoff of all packages, or of some, and resolve every lock; or change nothing."""
    before = held(existing(pins))
    locked = {name for packages in before.values() for name in packages}
    names, until = _asked_for(pins, options, locked)
    if names:
        cutoff, later = pins.cutoff, {**pins.later, **dict.fromkeys(names, until)}
        title = f"Upgrade {', '.join(names)}"
        means = (
            f"For {', '.join(names)}, releases uploaded before {as_moment(until)} count; for the "
            f"other packages the cutoff is the one before, {as_moment(cutoff)}."
        )
    else:
        # who was upgraded alone waits no longer for the others
        cutoff, later = until, {n: when for n, when in pins.later.items() if when > until}
        title = f"Move the locks from {as_moment(pins.cutoff)} to {as_moment(until)}"
        means = f"Releases uploaded before {as_moment(until)} count."
    kept = {path: path.read_bytes() for path in (*LOCK_DIR.iterdir(), PAGE) if path.is_file()}
    try:
        write_atomic(PINS_FILE, with_moments(PINS_FILE.read_text(encoding="utf-8"), cutoff, later))
        outcome = _resolve_all(load(), options, progress)
    except ForgeError as error:
        _restore(pins, kept)
        raise _what_else_moves(pins, names, locked, error) from error
    except BaseException:
        # a cutoff without its locks would be worse than none: also when a person stops it
        _restore(pins, kept)
        raise
    after = held(existing(pins))
    if names and after == before:
        # a moment that changes nothing would only have to be read by everyone
        _restore(pins, kept)
        summary = f"{', '.join(names)} had no newer release that fits before {as_moment(until)}"
        return Outcome("unchanged", summary, data=outcome.data)
    text = pull_request(before, after, title, means)
    place = out_dir() / "lock" / "upgrade.md"
    write_atomic(place, text)
    summary = f"{title[0].lower()}{title[1:]}: the text above is in {place}"
    return Outcome("done", summary, data=outcome.data | {"pull_request": text}, text=text)


def _restore(pins: Pins, kept: Mapping[Path, bytes]) -> None:
    """Put every file back as it was, and remove locks that were not there."""
    for path, data in kept.items():
        if not path.is_file() or path.read_bytes() != data:
            write_atomic(path, data)
    for flavour in flavours(pins):
        for python in pins.pythons:
            for path in (lock_path(flavour, python), path_of(flavour, python)):
                if path not in kept:
                    path.unlink(missing_ok=True)


def _what_else_moves(
    pins: Pins, names: Sequence[str], locked: Collection[str], error: ForgeError
) -> ForgeError:
    """An upgrade of single packages that has no solution: name what stands in its way."""
    if not names or "no solution" not in error.found:
        return error
    said = {canonicalize_name(word) for word in re.findall(r"[A-Za-z0-9][\w.-]*\w", error.found)}
    others = sorted(
        (said & set(locked)) - set(names) - constraints(pins, pins.default_python).keys()
    )
    if not others:
        return error
    return ForgeError(
        error.found,
        expected=f"releases of {', '.join(names)} that go with all others as they are locked",
        mend=f"let what stands in the way move too: ./forge lock --upgrade "
        f"{','.join(sorted({*names, *others}))}",
        exit_code=error.exit_code,
    )


def _midnight(day: str) -> datetime:
    """The beginning of a day in UTC."""
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if day == "today":
        return today
    try:
        found = datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError as error:
        raise ForgeError(
            f"{day!r} is no day", expected="YYYY-MM-DD", mend="./forge lock --upgrade"
        ) from error
    if found > today:
        raise ForgeError(
            f"{day} has not begun", expected="a day in the past", mend="./forge lock --upgrade"
        )
    return found


def _unguarded(pins: Pins, progress: Progress) -> Outcome:
    """Measure each flavour with torch as a plain resolver would bring it."""
    source = read_source(Path(sys.executable))
    measured = {}
    sweep()
    for flavour, python in with_torch(pins):
        job = Job(pins, flavour, python, source)
        with progress.step(f"resolving {job.what} without the guard"):
            sizes = {one.name: _size(one, source) for one in resolve_unguarded(job)}
        cuda = [name for name in sizes if is_cuda(name)]
        measured[flavour] = {
            "python": python,
            "packages": len(sizes),
            "bytes": sum(sizes.values()),
            "cuda_packages": len(cuda),
            "cuda_bytes": sum(sizes[name] for name in cuda),
        }
    write_json(UNGUARDED, {"schema": UNGUARDED_SCHEMA, "flavours": measured})
    write_page(pins)
    summary = f"measured {', '.join(measured)}: docs/compatibility.md"
    return Outcome("done", summary, data=measured)


def _size(one: Chosen, source: Source) -> int:
    if one.listed.size is None:
        raise ForgeError(
            f"{source.name} does not list the size of {one.name} {one.version}",
            expected="sizes (PEP 700): a sum without one would be too small",
            mend="measure it with another index: pip config list",
        )
    return one.listed.size


def say_ignored(source: Source, progress: Progress) -> None:
    """Tell the user which settings of pip are left out.

    Args:
        source: Where packages come from.
        progress: The display.
    """
    if source.ignored:
        progress.note(
            f"left out of pip's settings, since it could change what is resolved: "
            f"{', '.join(source.ignored)}"
        )


def _one(job: Job, options: argparse.Namespace, board: Board) -> dict[str, object]:
    started = time.monotonic()
    path = lock_path(job.flavour, job.python)
    board.show(job, "resolving")
    fresh = resolve(job, way=options.way)
    text = render(fresh.packages, _key(job, fresh.packages), job.python)
    before = _before(path)
    verified = 0
    if text != before:
        verified = _verify_new(job, before, fresh.packages, renew=options.renew, board=board)
    why = provenance_of(job, fresh)
    if job.stop.is_set():
        raise ForgeError(f"{job.what}: stopped", exit_code=Exit.INTERRUPTED)
    # before the lock: whoever sees the new lock sees its provenance too
    changed = text != before
    if why != read(job.flavour, job.python).document:
        write_json(path_of(job.flavour, job.python), why)
        changed = True
    if text != before:
        write_atomic(path, text)
    seconds = time.monotonic() - started
    said = "written" if changed else "the same to the byte"
    board.end(job, f"{len(fresh.packages)} packages, {said} ({duration(seconds)}, {fresh.way})")
    return {
        "flavour": job.flavour,
        "python": job.python,
        "file": f"lock/{path.name}",
        "packages": len(fresh.packages),
        "way": fresh.way,
        "changed": changed,
        "bytes_verified": verified,
        "seconds": round(seconds, 1),
    }


def _verify_new(
    job: Job, before: str, packages: Sequence[Locked], *, renew: bool, board: Board
) -> int:
    """Refuse what contradicts the present lock, and verify the files that are new to it.

    Returns:
        Bytes downloaded.
    """
    path = lock_path(job.flavour, job.python)
    known = _trusted(path, before)
    if known and not renew:
        same_inputs = read_head(before).inputs == _key(job, known)
        _refuse_contradiction(
            path, known, packages, same_inputs, index=job.source.name, tabled=job.pins.cpu_builds
        )
    # what the lock below holds was verified when it entered there
    verified = [*known, *base_packages(job.pins, job.flavour, job.python)]
    builds = job.pins.cpu_builds  # their digests are those of the table
    new = [p for p in packages if p not in verified and p.name not in builds and not _held(p)]
    if not new:
        return 0
    board.show(job, f"verifying {len(new)} new files")
    with workspace() as work:
        count = verify(job, new, work)
    board.count(count)
    return count


def _before(path: Path) -> str:
    """The text of the present lock; nothing if it is missing, or of a form that none has."""
    try:
        return read_text(path)
    except (ForgeError, FileNotFoundError):
        return ""


def provenance_of(job: Job, fresh: Resolved) -> dict[str, Any]:
    """The provenance of a lock, where the index has the last word on what it lists.

    Args:
        job: The lock.
        fresh: Its resolution. What the index does not list of a file is taken from what
            ``lock/`` tells of the same file.

    Raises:
        ForgeError: If no input leads to a package; exit code 1.
    """
    known: dict[str, Listed] = {}
    for flavour in filter(None, (job.pins.flavours[job.flavour].on, job.flavour)):
        for entry in read(flavour, job.python).packages.values():
            known[entry["sha256"]] = Listed(entry["bytes"], entry["uploaded"])
    nothing = Listed(None, None)
    for digest, one in fresh.files.items():
        held = known.get(digest, nothing)
        size = held.size if one.size is None else one.size
        known[digest] = Listed(size, one.uploaded or held.uploaded)
    builds = cpu_wheels(job.pins, job.python)
    for build in builds.values():
        wheel = held_wheel(build, job.source.folders)
        if wheel is not None:
            # the PyTorch index lists no upload times
            known[build.sha256] = Listed(wheel.stat().st_size, None)
    return document(
        job.pins,
        job.flavour,
        job.python,
        packages=fresh.packages,
        left_out=fresh.left_out,
        metadata=fresh.metadata,
        files=known,
    )


def _key(job: Job, packages: Sequence[Locked]) -> str:
    return inputs_key(job.pins, job.flavour, job.python, [p.name for p in packages])


def _trusted(path: Path, text: str) -> list[Locked]:
    """The packages of the present lock; none if it is missing or was edited by hand."""
    return read_lock(path) if text and read_head(text).intact else []


def _held(package: Locked) -> bool:
    """Whether the wheelhouse holds the file, which it does only once its digest was verified."""
    folder = out_dir() / "wheelhouse" / package.sha256
    return folder.is_dir() and any(folder.glob("*.whl"))


def _refuse_contradiction(
    path: Path,
    known: Sequence[Locked],
    fresh: Sequence[Locked],
    same_inputs: bool,
    *,
    index: str,
    tabled: Collection[str],
) -> None:
    """Refuse what no honest index would say; the digests of CPU builds are those of a table.

    Raises:
        ForgeError: If the inputs are the same and the result is not, or a release that the lock
            has now shows another file; exit code 1.
    """
    changes = describe_changes(known, fresh)
    if not same_inputs:
        old = {(p.name, p.version): p.sha256 for p in known}
        changes = [
            f"{p.name} {p.version} has another file"
            for p in fresh
            if old.get((p.name, p.version), p.sha256) != p.sha256 and p.name not in tabled
        ]
    if changes:
        raise ForgeError(
            f"{index} contradicts {path.name}: {'; '.join(changes)}",
            expected="the same result, since neither the inputs nor these releases changed",
            mend="check which index pip is set to (pip config list); "
            f"if it is right: ./forge lock --renew, then git diff lock/{path.name}",
            exit_code=Exit.FAULT,
        )


def describe_changes(known: Sequence[Locked], fresh: Sequence[Locked]) -> list[str]:
    """What differs between a lock and a new resolution, one short sentence per package.

    Args:
        known: The lock.
        fresh: The resolution.
    """
    old = {package.name: package for package in known}
    new = {package.name: package for package in fresh}
    found = []
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name), new.get(name)
        if was is None and now is not None:
            found.append(f"{name} {now.version} is missing from the lock")
        elif was is not None and now is None:
            found.append(f"{name} {was.version} is in the lock and not needed")
        elif was is not None and now is not None and was.version != now.version:
            found.append(f"{name} is locked at {was.version}, the index gives {now.version}")
        elif was != now:
            found.append(f"{name} has another digest than the index lists")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
