"""The release gate: one verdict over several images, for people and for a pipeline.

What :mod:`tpuforge.smoke.health` finds in each image becomes one file
(``out/health/verdict.json``), one exit code (the worst), one table, and on GitHub annotations and a
job summary. Here is also how several images are judged side by side.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tpuforge.console import Progress, duration
from tpuforge.errors import Exit
from tpuforge.health_report import TIERS
from tpuforge.process import undisturbed

SCHEMA = "tpuforge.verdict/1"
VERDICTS = {
    Exit.OK: "healthy",
    Exit.FAULT: "unhealthy",
    Exit.CANNOT: "unjudged",
    Exit.DEVICE: "device",
}
_FROM_THE_WORST = (Exit.FAULT, Exit.CANNOT, Exit.DEVICE)
_NEEDED_BYTES = 3_000_000_000
"""Free memory for one image: its largest check takes 0.7 GB, and its files in /tmp count too."""
_SUMMARY_BYTES = 900_000
"""GitHub takes 1 MiB of one step's summary."""
_SHOWN_LINES = 12
_MARKS = {"passed": "✅", "failed": "❌"}
"""What GitHub's page shows for a tier; any other word is shown as it is."""
_UNKNOWN = ("incomplete", "not run")


def worst(codes: Sequence[int]) -> Exit:
    """The exit code of several images: unhealthy, then not judged, then a busy TPU.

    Args:
        codes: Their exit codes; none at all is not judged.
    """
    if not codes:
        return Exit.CANNOT
    for code in _FROM_THE_WORST:
        if code in codes:
            return code
    return Exit.OK if all(code == Exit.OK for code in codes) else Exit.CANNOT


def lanes(count: int, meminfo: Path = Path("/proc/meminfo")) -> int:
    """How many images are judged at once: one for each core, as far as free memory goes.

    Args:
        count: How many there are.
        meminfo: Where the kernel says how much memory is free.
    """
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable:" in line)
    except (OSError, StopIteration, ValueError, IndexError):
        free = _NEEDED_BYTES
    return max(1, min(count, len(os.sched_getaffinity(0)), free // _NEEDED_BYTES))


class Lane(Progress):
    """The progress of one of several images: plain lines that begin with its name.

    Args:
        whole: The display of the verb.
        name: The image.
    """

    def __init__(self, whole: Progress, name: str) -> None:
        super().__init__("smoke", quiet=True)
        self._whole = whole
        self._name = name

    @contextmanager
    def step(self, name: str, total: float | None = None) -> Iterator[None]:
        """Say that a step begins, and how long it took.

        Args:
            name: What is being done.
            total: Not shown.

        Yields:
            Nothing.
        """
        del total
        self.note(f"{name} …")
        started = time.monotonic()
        try:
            yield
        finally:
            self.note(f"{name}: {duration(time.monotonic() - started)}")

    def detail(self, text: str) -> None:
        """Show a word on what is being done right now.

        Args:
            text: One line.
        """
        self._whole.detail(f"{self._name}: {text}")

    def note(self, text: str, *, loud: bool = False, always: bool = False) -> None:
        """Say something that stays on the screen.

        Args:
            text: One line.
            loud: Something the reader must not miss.
            always: Say it with ``quiet`` as well.
        """
        self._whole.note(f"{self._name}: {text}", loud=loud, always=always)


def side_by_side(tasks: Sequence[Callable[[threading.Event], None]], at_once: int) -> None:
    """Run tasks in threads; when this process is told to stop, end them all.

    Args:
        tasks: Each is given the event that tells it to stop.
        at_once: How many run at a time.

    Raises:
        BaseException: What a task or a signal raised, after every task has ended.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(at_once) as pool:
        running = [pool.submit(task, stop) for task in tasks]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
            for one in running:
                if one.done():
                    one.result()
        except BaseException:
            stop.set()
            for one in running:
                one.cancel()
            with undisturbed():
                wait(running)
            raise


def document(
    images: Sequence[dict[str, Any]], chosen: dict[str, Any], started: str, seconds: float
) -> dict[str, Any]:
    """The verdict file (schema in ``docs/smoke.md``).

    Args:
        images: From :func:`of_image`, in the order of the command line.
        chosen: ``tiers``, ``targets``, ``keywords`` and ``markers``.
        started: ISO 8601, UTC.
        seconds: Wall time of the whole run.
    """
    code = worst([image["exit_code"] for image in images])
    return {
        "schema": SCHEMA,
        "started": started,
        "seconds": round(seconds, 3),
        "chosen": chosen,
        "verdict": VERDICTS[code],
        "exit_code": int(code),
        "images": list(images),
    }


def of_image(
    facts: dict[str, Any],
    health: dict[str, Any] | None,
    error: dict[str, Any] | None,
    *,
    cached: bool,
) -> dict[str, Any]:
    """What the verdict file says about one image.

    Args:
        facts: ``image``, ``reference``, ``manifest_digest``, ``suite_sha256``, ``key``,
            ``seconds``, ``notes``, ``report``.
        health: Its report, if there is one.
        error: Why there is none.
        cached: Whether the report is of an earlier run.
    """
    code = Exit(health["exit_code"] if health else int((error or {}).get("exit_code", 2)))
    checks = health["checks"] if health else []
    tiers = health["tiers"] if health else {}
    wanted = ("id", "tier", "severity", "purpose", "detail", "remedy")
    return {
        **facts,
        "cached": cached,
        "verdict": VERDICTS.get(code, "unjudged"),
        "exit_code": int(code),
        "highest_tier": health["highest_tier"] if health else None,
        "tiers": {
            name: {"status": one["status"], "why": one["why"]}
            for name, one in ((name, tiers[name]) for name in TIERS if name in tiers)
        },
        "failed": [{k: c[k] for k in wanted} for c in checks if c["status"] == "failed"],
        "trouble": health["trouble"] if health else None,
        "error": error,
    }


def rows(verdict: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The verdict as a table: headings and cells.

    Args:
        verdict: From :func:`document`.
    """
    lines = []
    for image in verdict["images"]:
        states = [image["tiers"].get(name, {}).get("status", "not run") for name in TIERS]
        spent = "cached" if image["cached"] else duration(image["seconds"])
        lines.append([image["image"], image["verdict"], *states, spent])
    return ["image", "verdict", *TIERS, "time"], lines


def trouble_of(image: dict[str, Any]) -> str:
    """Why an image has no verdict on itself; empty if it has one.

    Args:
        image: From :func:`of_image`.
    """
    if image["error"]:
        return str(image["error"].get("found", "it could not be judged"))
    if image["verdict"] != "unjudged":
        return ""
    if image["trouble"]:
        return str(image["trouble"])
    missing = [f"{n}: {t['why']}" for n, t in image["tiers"].items() if t["status"] in _UNKNOWN]
    return "; ".join(missing) or "a critical check did not run"


def on_github() -> bool:
    """Whether this runs in a job of GitHub Actions."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


@contextmanager
def muted(stream: TextIO) -> Iterator[None]:
    """Keep GitHub from obeying what an image prints: no word of it is a workflow command.

    Args:
        stream: Where the job's log comes from.

    Yields:
        Nothing.
    """
    if not on_github():
        yield
        return
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}", file=stream, flush=True)
    try:
        yield
    finally:
        print(f"::{token}::", file=stream, flush=True)


def notices(verdict: dict[str, Any]) -> list[str]:
    """GitHub's annotations: an error for each critical check that failed, a warning for others.

    Args:
        verdict: From :func:`document`.
    """
    lines = []
    for image in verdict["images"]:
        if why := trouble_of(image):
            mend = (image["error"] or {}).get("mend")
            text = f"{why}\nmend: {mend}" if mend else why
            lines.append(_annotation("error", f"{image['image']}: not judged", text))
        for check in image["failed"]:
            level = "error" if check["severity"] == "critical" else "warning"
            detail = "\n".join(check["detail"].splitlines()[:_SHOWN_LINES])
            text = f"{detail}\nexpected: {check['purpose']}\nmend: {check['remedy']}"
            lines.append(_annotation(level, f"{image['image']}: {check['id']}", text))
    return lines


def _annotation(level: str, title: str, text: str) -> str:
    def escaped(value: str) -> str:
        return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    name = escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={name}::{escaped(text)}"


def summary(verdict: dict[str, Any]) -> str:
    """The verdict as Markdown, for the page of a GitHub job.

    Args:
        verdict: From :func:`document`.
    """
    head, body = rows(verdict)
    lines = [
        f"## smoke: {verdict['verdict']}",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for cells in body:
        lines.append(f"| {' | '.join(_plain(_MARKS.get(cell, cell)) for cell in cells)} |")
    for image in verdict["images"]:
        lines += ["", f"**{_plain(image['image'])}** {_plain(image['reference'])}, "]
        lines[-1] += f"`{_plain(image['manifest_digest'])}`"
        if why := trouble_of(image):
            lines.append(f"- not judged: {_plain(why)}")
        for check in image["failed"]:
            word = "failed" if check["severity"] == "critical" else "warning"
            first = (check["detail"].splitlines() or [""])[0]
            lines.append(
                f"- {word}: `{_plain(check['id'])}` {_plain(first)} "
                f"Expected: {_plain(check['purpose'])}. Mend: {_plain(check['remedy'])}"
            )
        for name, tier in image["tiers"].items():
            if tier["status"] in _UNKNOWN:
                lines.append(f"- {tier['status']}: {name}: {_plain(tier['why'])}")
        lines += [f"- note: {_plain(note)}" for note in image["notes"]]
    text = "\n".join(lines) + "\n\n"
    return text.encode()[:_SUMMARY_BYTES].decode("utf-8", "ignore")


def _plain(text: str) -> str:
    """A text in which Markdown and HTML find nothing."""
    for sign, instead in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("|", "\\|"),
        ("`", "'"),
        ("[", "\\["),
        ("\r", " "),
        ("\n", " "),
    ):
        text = text.replace(sign, instead)
    return text


def announce(verdict: dict[str, Any] | None, code: int, stream: TextIO) -> None:
    """Tell GitHub: annotations in the log, a summary on the job's page. Elsewhere nothing.

    Args:
        verdict: From :func:`document`; None if the run did not come to one.
        code: The exit code.
        stream: Where the job's log comes from.
    """
    if not on_github():
        return
    if verdict is None:
        text = f"nothing was judged (exit code {code}); the lines above say why"
        print(_annotation("error", "smoke", text), file=stream, flush=True)
        return
    for line in notices(verdict):
        print(line, file=stream, flush=True)
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        try:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(summary(verdict))
        except OSError as error:
            print(f"smoke: the job summary could not be written: {error}", file=sys.stderr)
