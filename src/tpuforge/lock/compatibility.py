"""``docs/compatibility.md``: what goes together, what does not, and what the CUDA guard saves.

The page is made from files alone: the pins, the locks and their provenance, the conflicts, and the
measured closures without the guard. ``./forge lock`` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpuforge.lock import provenance
from tpuforge.lock.conflicts import Conflict, load_conflicts, locked_version
from tpuforge.lock.inputs import existing, lock_path
from tpuforge.lock.names import LOCK_DIR, is_cuda, load_names
from tpuforge.lockfile import read_lock
from tpuforge.paths import ROOT, read_json, write_atomic
from tpuforge.pins import Pins

UNGUARDED = LOCK_DIR / "unguarded.json"
UNGUARDED_SCHEMA = "tpuforge.unguarded/2"
PAGE = ROOT / "docs" / "compatibility.md"
_SHOWN = ("torch", "torch-tpu", "libtpu", "jax")
_HEAD = """# Compatibility: what goes together

`./forge lock` writes this page; a test sees that it is current. A flavour with an "on" holds that
flavour's lock line for line. MB are 10⁶ bytes of wheels; "+ torch" where the size of a CPU build
is not known, since its index lists none and the wheel was not at hand.
"""
_LEFT_OUT = """A package of the lock requires these, and the lock does not hold them. What is
installed from it has none of them, and `pip check` names each. `lock/names.toml` decides it, until
the day in the table; [lock.md](lock.md) says what was proven.
"""


def page(pins: Pins) -> str:
    """The text of the page.

    Args:
        pins: The pins.

    Raises:
        ForgeError: If a lock or the list of conflicts is bad.
    """
    parts = [_HEAD, "## Locked\n", _locked(pins), "## Left out\n", _left_out(pins)]
    parts += ["## Not to be had\n"]
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


def megabytes(sizes: Mapping[str, int | None]) -> str:
    """The sum of sizes for people.

    Args:
        sizes: Bytes by package; None for a CPU build whose wheel was not at hand.
    """
    total = f"{sum(size or 0 for size in sizes.values()) / 1e6:.0f}"
    return " + ".join([total, *(name for name, size in sizes.items() if size is None)])


def _sizes(flavour: str, python: str) -> dict[str, int | None]:
    held = provenance.read(flavour, python).packages
    return {name: one["bytes"] for name, one in held.items()}


def _locked(pins: Pins) -> str:
    rows = []
    for flavour, python in existing(pins):
        versions = {p.name: p.version for p in read_lock(lock_path(flavour, python))}
        shown = [versions.get(name, "") for name in _SHOWN]
        on = pins.flavours[flavour].on
        size = megabytes(_sizes(flavour, python))
        rows.append([flavour, on, python, *shown, str(len(versions)), size])
    return table(["flavour", "on", "Python", *_SHOWN, "packages", "MB"], rows)


def _left_out(pins: Pins) -> str:
    names = load_names()
    rows = []
    for flavour, python in existing(pins):
        until = {one.name: f"{one.until}" for one in names.left_out_of(flavour)}
        for name, one in provenance.read(flavour, python).left_out.items():
            size = "?" if one["bytes"] is None else megabytes({name: one["bytes"]})
            chain, day = " > ".join(one["why"]), until.get(name, "")
            package = f"{name} {one['version']}"
            rows.append([flavour, python, package, size, chain, day, one["reason"]])
    if not rows:
        return "Nothing.\n"
    head = ["flavour", "Python", "package", "MB", "required by", "until", "why"]
    return f"{_LEFT_OUT}\n{table(head, rows)}"


def with_torch(pins: Pins) -> list[tuple[str, str]]:
    """The flavours whose lock holds torch, each with the one Python that it is measured for.

    Args:
        pins: The pins.

    Returns:
        Flavours with the default Python, or their first one where they are not locked for that.
    """
    found: dict[str, str] = {}
    for flavour, python in existing(pins):
        has_torch = any(p.name == "torch" for p in read_lock(lock_path(flavour, python)))
        if has_torch and (python == pins.default_python or flavour not in found):
            found[flavour] = python
    return list(found.items())


def _saved(pins: Pins) -> str:
    held = read_json(UNGUARDED)
    if not isinstance(held, dict) or held.get("schema") != UNGUARDED_SCHEMA:
        return "Not measured: `./forge lock --unguarded`.\n"
    rows = []
    for flavour, one in held["flavours"].items():
        python = one["python"]
        sizes = _sizes(flavour, python)
        bad = f"{one['cuda_packages']}, {one['cuda_bytes'] / 1e6:.0f}"
        plain = f"{one['packages']}, {one['bytes'] / 1e6:.0f}"
        rows.append([flavour, python, f"{len(sizes)}, {megabytes(sizes)}", plain, bad])
    head = [
        "flavour",
        "Python",
        "locked: packages, MB",
        "without the guard",
        "of these CUDA by name",
    ]
    text = (
        "The same inputs and pins, but torch and torchvision as the main index has them, and\n"
        "nothing refused or left out. `./forge lock --unguarded` measures it. Their own wheels\n"
        "are CUDA builds there, and not counted in the last column.\n"
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
