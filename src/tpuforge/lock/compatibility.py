"""``docs/compatibility.md``: what goes together, what does not, and what the CUDA guard saves.

The page is made from files alone: the pins, the locks and their provenance, the conflicts, and the
measured closures without the guard. ``./forge lock`` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpuforge.lock import provenance
from tpuforge.lock.conflicts import Conflict, load_conflicts, locked_version
from tpuforge.lock.inputs import LOCK_DIR, existing, is_cuda, lock_path
from tpuforge.lockfile import read_lock
from tpuforge.paths import ROOT, read_json, write_atomic
from tpuforge.pins import Pins

UNGUARDED = LOCK_DIR / "unguarded.json"
UNGUARDED_SCHEMA = "tpuforge.unguarded/1"
PAGE = ROOT / "docs" / "compatibility.md"
_SHOWN = ("torch", "torch-tpu", "libtpu", "jax")
_HEAD = """# Compatibility: what goes together

`./forge lock` writes this page; a test sees that it is current. A flavour with an "on" holds that
flavour's lock line for line. MB are 10⁶ bytes of wheels; "+ torch" where the size of torch's CPU
wheel is not known, since its index lists none and the wheel was not at hand.
"""


def page(pins: Pins) -> str:
    """The text of the page.

    Args:
        pins: The pins.

    Raises:
        ForgeError: If a lock or the list of conflicts is bad.
    """
    parts = [_HEAD, "## Locked\n", _locked(pins), "## Not to be had\n"]
    parts += [_refused(load_conflicts(pins)), "## What the guard against CUDA saves\n"]
    parts += [_saved(pins)]
    return "\n".join(parts)


def write_page(pins: Pins) -> None:
    """Write the page, where it is not current.

    Args:
        pins: The pins.

    Raises:
        ForgeError: If a lock or the list of conflicts is bad.
    """
    text = page(pins)
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        write_atomic(PAGE, text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown.

    Args:
        head: Names of the columns.
        rows: The cells.
    """
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def megabytes(sizes: Sequence[int | None]) -> str:
    """The sum of sizes for people.

    Args:
        sizes: Bytes; None for torch's wheel where it was not at hand.
    """
    total = f"{sum(size or 0 for size in sizes) / 1e6:.0f}"
    return f"{total} + torch" if None in sizes else total


def _locked(pins: Pins) -> str:
    rows = []
    for flavour, python in existing(pins):
        versions = {p.name: p.version for p in read_lock(lock_path(flavour, python))}
        sizes = [entry["bytes"] for entry in provenance.read(flavour, python).values()]
        shown = [versions.get(name, "") for name in _SHOWN]
        on = pins.flavours[flavour].on
        rows.append([flavour, on, python, *shown, str(len(versions)), megabytes(sizes)])
    return table(["flavour", "on", "Python", *_SHOWN, "packages", "MB"], rows)


def with_torch(pins: Pins, python: str) -> list[str]:
    """The flavours whose lock holds torch.

    Args:
        pins: The pins.
        python: ``X.Y``.
    """
    return [
        flavour
        for flavour, number in existing(pins)
        if number == python
        and any(package.name == "torch" for package in read_lock(lock_path(flavour, number)))
    ]


def _saved(pins: Pins) -> str:
    held = read_json(UNGUARDED)
    if not isinstance(held, dict) or held.get("schema") != UNGUARDED_SCHEMA:
        return "Not measured: `./forge lock --unguarded`.\n"
    python = held["python"]
    rows = []
    for flavour, one in held["flavours"].items():
        entries = provenance.read(flavour, python)
        locked = [entry["bytes"] for entry in entries.values()]
        bad = f"{one['cuda_packages']}, {one['cuda_bytes'] / 1e6:.0f}"
        plain = f"{one['packages']}, {one['bytes'] / 1e6:.0f}"
        rows.append([flavour, f"{len(entries)}, {megabytes(locked)}", plain, bad])
    head = ["flavour", "locked: packages, MB", "without the guard", "of these CUDA by name"]
    text = (
        f"Python {python}; the same inputs and pins, but torch as the main index has it, and\n"
        "nothing refused. `./forge lock --unguarded` measures it. torch's own wheel is a CUDA\n"
        "build there, and not counted in the last column.\n"
    )
    return f"{text}\n{table(head, rows)}"


def _refused(conflicts: Sequence[Conflict]) -> str:
    rows = []
    for one in conflicts:
        held = f"{one.line.name} {locked_version(one)} in {one.against}"
        if is_cuda(one.line.name):
            held = "a CUDA package"
        states = f"`{one.states}`"
        rows.append([one.flavour, f"{one.name} {one.version}", one.python, states, held, one.why])
    return table(["wanted", "package", "Python", "it states", "against", "why"], rows)
