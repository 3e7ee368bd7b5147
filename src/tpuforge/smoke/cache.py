"""Health results that were had before: one folder for each image, suite, simulator and choice.

An entry is believed only while every byte of it is what was put there: its record names the digest
of every file and carries a digest of itself, its key is worked out again from the inputs it names,
and its report is judged again by the suite's own rules. That guards against damage, an editor and
a mix-up of folders. It is no signature: who can write to ``out/`` can also write a whole entry.

Only verdicts on an image are kept (exit codes 0 and 1). What could not be judged, what met a busy
TPU and what was interrupted is asked again the next time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuforge import health_report
from tpuforge.errors import Exit
from tpuforge.paths import out_dir, read_json, sha256_file, sha256_text, write_atomic, write_json
from tpuforge.smoke import container

SCHEMA = "tpuforge.health-cache/1"
REPORT = "health.json"
FILES = (REPORT, "health.xml", "health.html")
JUDGED = (Exit.OK, Exit.FAULT)
"""Exit codes that say something about the image, and not about this machine at this moment."""
_RECORD = "entry.json"
_KEPT = 100
"""Entries that stay; the ones that were not asked for longest go first."""


@dataclass(frozen=True)
class Entry:
    """A result that was had before.

    Attributes:
        folder: Where its files stand.
        record: Facts of its run, as they were given to :func:`keep`.
        health: Its report.
    """

    folder: Path
    record: dict[str, Any]
    health: dict[str, Any]


def recall(key: str) -> tuple[Entry | None, str]:
    """The result of a key, if there is one that can be believed.

    Args:
        key: From :func:`tpuforge.smoke.container.key_of`.

    Returns:
        The result or None, and what is wrong with an entry that is there and not believed.
    """
    folder = _folder() / key
    if not folder.exists():
        return None, ""
    record, health = read_json(folder / _RECORD), read_json(folder / REPORT)
    try:
        wrong = _flaw(folder, key, record, health)
    except OSError as error:
        wrong = f"{Path(error.filename or folder).name} cannot be read"
    if wrong:
        return None, wrong
    (folder / _RECORD).touch()
    return Entry(folder, dict(record["run"]), dict(health)), ""


def keep(key: str, files: Mapping[str, Path], record: Mapping[str, Any]) -> None:
    """Keep a result, if it is a verdict on the image.

    Args:
        key: From :func:`tpuforge.smoke.container.key_of`.
        files: Every name of :data:`FILES` to the path where it stands.
        record: Facts of the run, with ``inputs``, ``exit_code``, ``manifest_digest``, ``seconds``
            and ``notes``.
    """
    if record["exit_code"] not in JUDGED:
        return
    folder = _folder() / key
    # an entry without its record is none: the record goes first and comes last
    (folder / _RECORD).unlink(missing_ok=True)
    for name in FILES:
        write_atomic(folder / name, files[name].read_bytes())
    whole = {
        "schema": SCHEMA,
        "key": key,
        "files": {name: sha256_file(folder / name) for name in FILES},
        "run": dict(record),
    }
    write_json(folder / _RECORD, {**whole, "seal": _seal(whole)})
    _prune()


def show(entry: Entry, folder: Path, key: str) -> None:
    """Put an earlier result where the latest one of its image stands.

    Args:
        entry: The result.
        folder: The image's folder, such as ``out/health/runtime-py311``.
        key: Its key.
    """
    whole = container.earlier(folder, FILES, key) is not None and all(
        sha256_file(folder / name) == sha256_file(entry.folder / name) for name in FILES
    )
    if not whole:
        container.publish(folder, {name: entry.folder / name for name in FILES}, entry.record)


def _folder() -> Path:
    return out_dir() / "cache" / "health"


def _seal(record: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in record.items() if name != "seal"}
    return sha256_text(SCHEMA, json.dumps(rest, sort_keys=True))


def _flaw(folder: Path, key: str, record: Any, health: Any) -> str:
    """What keeps an entry from being believed; empty if nothing does."""
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        return "it has no record"
    if record.get("seal") != _seal(record):
        return "its record was changed"
    run = record.get("run")
    if record.get("key") != key or not isinstance(run, dict) or run.get("key") != key:
        return "its record is of another run"
    if container.key_of(run["inputs"]) != key:
        return "its record names other inputs"
    for name in FILES:
        if sha256_file(folder / name) != record["files"].get(name):
            return f"{name} was changed"
    if wrong := health_report.flaw(health):
        return f"its report is not whole: {wrong}"
    if health["exit_code"] != run["exit_code"] or run["exit_code"] not in JUDGED:
        return "its report and its record say different things"
    return ""


def _prune() -> None:
    """Remove the entries that were not asked for longest."""
    entries: Sequence[Path] = sorted(_folder().glob(f"*/{_RECORD}"), key=_asked, reverse=True)
    for path in entries[_KEPT:]:
        path.unlink(missing_ok=True)
        shutil.rmtree(path.parent, ignore_errors=True)


def _asked(path: Path) -> float:
    return path.stat().st_mtime
