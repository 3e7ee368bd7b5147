"""``images``: the set of images as a table, with what is baked here, and why the rest is not.

``--write`` writes what does not depend on the machine into README.md and docs/images.md, between
two marks; a test keeps both current.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuforge.console import Progress, print_table, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.images.bake import damage, read_finished
from tpuforge.images.choice import Member, lacks, member_target, members
from tpuforge.images.context import Target, base_set
from tpuforge.paths import ROOT, out_dir, read_json, write_atomic
from tpuforge.pins import Pins, load
from tpuforge.verb import Outcome, main_of, parser

VERB = "images"
SHORT, WHOLE = ROOT / "README.md", ROOT / "docs" / "images.md"
_BEGIN = "<!-- images: written by ./forge images --write -->"
_END = "<!-- images: end -->"
_BETWEEN = re.compile(f"{re.escape(_BEGIN)}\n.*?{re.escape(_END)}", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One image of the set.

    Attributes:
        member: Which it is.
        target: Its name and places; None where the pins or locks do not have it.
        suite: The Debian that it stands on; empty for none.
        why: Why it cannot be had; empty if nothing is in the way.
        damaged: What is wrong with the one that was baked here, and what mends it.
        unfetched: What of its wheels is not fetched, and how to; empty if it is baked, or all are.
        record: Its record, if it was baked here and is whole.
        health: The verdict of the health suite on this very image; empty if it was not judged.
    """

    member: Member
    target: Target | None
    suite: str
    why: str
    damaged: str
    unfetched: str
    record: dict[str, Any] | None
    health: str

    @property
    def data(self) -> dict[str, Any]:
        """The row for machines."""
        record = self.record or {}
        return {
            "image": self.member.image.name,
            "python": self.member.python,
            "slug": self.member.slug,
            "description": self.member.image.description,
            "suite": self.suite,
            "name": self.target.name if self.target is not None else None,
            "budget": {
                "compressed_bytes": self.member.image.compressed,
                "unpacked_bytes": self.member.image.unpacked,
            },
            "baked": self.record is not None,
            **{
                key: record.get(key)
                for key in ("manifest_digest", "compressed_bytes", "unpacked_bytes", "gzip")
            },
            "health": self.health or None,
            "why_not": self.why or self.damaged or self.unfetched or None,
            "wheels_fetched": not self.unfetched if self.target is not None else None,
        }


def rows(pins: Pins, *, here: bool = True) -> list[Row]:
    """The set.

    Args:
        pins: The pins.
        here: Look also at what this machine has.
    """
    return [_row(member, pins, here=here) for member in members(pins)]


def _row(member: Member, pins: Pins, *, here: bool) -> Row:
    target, record = None, None
    why, damaged, unfetched, health, suite = "", "", "", "", ""
    try:
        target = member_target(member, pins)
        suite = base_set(target, pins).name
        if here:
            record = read_finished(target)
            if record is not None and (found := damage(target, record)):
                record, damaged = None, f"{found}; mend: ./forge bake {_words(target)}"
            health = _health(target, record) if record is not None else ""
            unfetched = lacks(target, pins) if record is None and not damaged else ""
    except ForgeError as error:
        why = error.found.splitlines()[0]
    if member.image.name == "simulator":
        # it stands on nothing
        suite = ""
    return Row(member, target, suite, why, damaged, unfetched, record, health)


def _words(target: Target) -> str:
    """The arguments that name an image."""
    python = f" --python {target.python}" if target.python else ""
    return f"--image {target.image}{python}"


def _health(target: Target, record: dict[str, Any]) -> str:
    """What the health suite said of this very image; empty if it was another, or none."""
    folder = out_dir() / "health" / target.slug
    ran, said = read_json(folder / "run.json"), read_json(folder / "health.json")
    if not isinstance(ran, dict) or not isinstance(said, dict):
        return ""
    if ran.get("manifest_digest") != record["manifest_digest"]:
        return ""
    return str(said.get("verdict") or "")


def short_table(made: Iterable[Row]) -> list[str]:
    """The table of README.md: one line per image."""
    lines = ["| image | Python | what is in it | compressed, at most |", "|---|---|---|---|"]
    pythons: dict[str, list[str]] = {}
    images = {}
    for row in made:
        images[row.member.image.name] = row.member.image
        pythons.setdefault(row.member.image.name, []).append(row.member.python)
    for name, image in images.items():
        listed = ", ".join(one for one in pythons[name] if one) or "any"
        most = size(image.compressed)
        lines.append(f"| `{name}` | {listed} | {image.description} | {most} |")
    return lines


def whole_table(made: Iterable[Row]) -> list[str]:
    """The table of docs/images.md: one line per image and Python."""
    lines = [
        "| image | Python | Debian | name | budget: compressed, unpacked |",
        "|---|---|---|---|---|",
    ]
    for row in made:
        image = row.member.image
        name = f"`{row.target.name}`" if row.target is not None else f"none: {row.why}"
        most = f"{size(image.compressed)}, {size(image.unpacked)}"
        lines.append(
            f"| {image.name} | {row.member.python or 'any'} | {row.suite or 'none'} | {name} "
            f"| {most} |"
        )
    return lines


def written(text: str, table: Sequence[str], where: str) -> str:
    """A page with its table made new.

    Args:
        text: The page.
        table: The lines of the table.
        where: The page's name, for messages.

    Raises:
        ForgeError: If the page does not have the two marks, once; exit code 1.
    """
    if len(_BETWEEN.findall(text)) != 1:
        raise ForgeError(
            f"{where} has no place for the table of images",
            expected=f"a line {_BEGIN} and, below it, a line {_END}",
            mend=f"git diff {where}",
            exit_code=Exit.FAULT,
        )
    body = "\n".join((_BEGIN, *table, _END))
    return _BETWEEN.sub(lambda _: body, text)


def pages(pins: Pins) -> dict[Path, str]:
    """The pages that hold a table, as they should be.

    Args:
        pins: The pins.
    """
    made = rows(pins, here=False)
    tables = {SHORT: short_table(made), WHOLE: whole_table(made)}
    return {
        path: written(path.read_text(encoding="utf-8"), table, path.name)
        for path, table in tables.items()
    }


def _act(options: argparse.Namespace, progress: Progress) -> Outcome:
    pins = load()
    if options.write:
        stale = [
            path for path, text in pages(pins).items() if path.read_text(encoding="utf-8") != text
        ]
        for path, text in pages(pins).items():
            if path in stale:
                write_atomic(path, text)
        names = ", ".join(path.name for path in stale)
        done = f"wrote the table of images in {names}" if stale else "the tables are current"
        return Outcome("done" if stale else "unchanged", done, {"written": [*map(str, stale)]})
    with progress.step("looking at what is here"):
        made = rows(pins)
    if not options.json:
        print_table(
            ("image", "Debian", "digest", "pull", "unpacked", "health"),
            [_cells(row) for row in made],
        )
    there = [row for row in made if row.record is not None]
    return Outcome(
        "done",
        f"{len(there)} of {len(made)} images are baked here",
        data={"images": [row.data for row in made]},
        text="\n".join(
            f"  {row.member.slug}: {why}" for row in made if (why := row.data["why_not"])
        ),
    )


def _cells(row: Row) -> tuple[str, ...]:
    if row.record is None:
        states = {
            "cannot be had": row.why,
            "damaged": row.damaged,
            "wheels not fetched": row.unfetched,
            "not baked": True,
        }
        state = next(state for state, so in states.items() if so)
        end: tuple[str, ...] = (state, "", "", "")
    else:
        end = (
            row.record["manifest_digest"][:19],
            size(row.record["compressed_bytes"]),
            size(row.record["unpacked_bytes"]),
            row.health or "not judged",
        )
    return (row.member.slug, row.suite or "none", *end)


def arguments() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = parser(VERB, "Show the set of images: what is baked here, and why the rest is not.")
    made.add_argument(
        "--write", action="store_true", help="write the tables in README.md and docs/images.md"
    )
    return made


main = main_of(VERB, arguments, _act)


if __name__ == "__main__":
    raise SystemExit(main())
