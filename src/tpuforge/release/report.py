"""The verb ``report``: join what the verbs left behind into a page for each image.

It reads files and runs nothing. What is missing is called missing, and a health report or a
benchmark of another image than the one in ``out/`` is called stale and not counted.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, Literal

from tpuforge import health_report
from tpuforge.baked import names, read_baked
from tpuforge.console import Progress, duration, print_table, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.health_report import TIERS
from tpuforge.paths import ROOT, out_dir, read_json, sha256_file, write_atomic, write_json
from tpuforge.pins import load
from tpuforge.records import Form
from tpuforge.verb import Outcome, add_image, main_of, parser

REPORT_SCHEMA = "tpuforge.report/1"
BENCH_SCHEMA = "tpuforge.bench/1"
RESULT_SCHEMA = "tpuforge.result/1"
MAIN_JOB = ("lock_check", "fetch_wheel", "bake", "smoke", "bench")
OF_AN_IMAGE = ("bake", "smoke", "bench")
"""Verbs that leave one result per image."""
STAGES = (*MAIN_JOB, "reproduce")
"""Verbs whose last run the page shows, in the order of the main job."""

# what is read of an image's record, of which some may be missing
_IMAGE: dict[str, Form] = {
    "name": str,
    "manifest_digest": str,
    "compressed_bytes": int,
    "unpacked_bytes": int,
    "run_line": str,
    "notes": (list, NoneType),
    "layers": (list, NoneType),
    "labels": (dict, NoneType),
    "local_run_line": (str, NoneType),
    "save_line": (str, NoneType),
}
_OFFERS = ("run_line", "save_line")
# what needs somebody comes first on the front page
_FIRST = (Exit.FAULT, Exit.DEVICE, Exit.CANNOT, Exit.OK)
_TONES = {"passed": "ok", "failed": "bad", "not run": "none"}
_FRONT_STYLE = """
h1{margin:1rem 0}
.tiers{grid-template-columns:repeat(auto-fit,minmax(min(20rem,100%),1fr))}
.card .pairs{display:block;border:0;padding:.5rem 0 0}
.card .pairs>div{grid-template-columns:6.5rem 1fr;padding:.2rem 0}
.card dd{white-space:normal}
"""
_MOST_FAILED = 8


@dataclass(frozen=True)
class Part:
    """Health or bench of an image.

    Attributes:
        data: The document; None if there is none to count.
        state: ``fresh``, ``stale`` (of another image) or ``missing``.
        why: One sentence for ``stale`` and ``missing``.
    """

    data: dict[str, Any] | None
    state: Literal["fresh", "stale", "missing"]
    why: str = ""


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "report",
        "Join the image, its health, its benchmarks and the verbs' results into a page. Exit "
        "codes: 0 healthy, 1 unhealthy, 2 not judged (no health report of this image), 3 a TPU "
        "is unusable.",
    )
    add_image(made)
    return made


@dataclass(frozen=True)
class Judged:
    """An image with all that is known of it.

    Attributes:
        slug: Its folder name, such as ``runtime-py311``.
        image: Its record.
        health: Its health.
        bench: Its benchmarks.
        stages: The verbs' results.
        notes: What the reader must not miss.
        verdict: ``{"word": …, "why": …}``.
    """

    slug: str
    image: dict[str, Any]
    health: Part
    bench: Part
    stages: list[dict[str, Any]]
    notes: list[dict[str, str]]
    verdict: dict[str, str]

    @property
    def exit_code(self) -> Exit:
        """The verb's exit code for it."""
        codes = {"healthy": Exit.OK, "unhealthy": Exit.FAULT, "device": Exit.DEVICE}
        return codes.get(str((self.health.data or {}).get("verdict")), Exit.CANNOT)

    @property
    def unhealthy(self) -> bool:
        """Whether it is known to be bad."""
        return self.exit_code == Exit.FAULT


def _report(options: argparse.Namespace, progress: Progress) -> Outcome:
    del progress
    pins = load()
    python = pins.python(options.python)
    slug = f"{options.image or pins.default_image}-py{python.replace('.', '')}"
    page, out = page_module(), out_dir()
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    one = judged(slug, page, options.flavour)
    target = _write(one, page, made)
    known, unread = [one], []
    for other in _others(slug):
        try:
            known.append(judged(other, page, None))
        except ForgeError as error:
            # as on every page: where it was made is nobody's business
            unread.append(_sentence(error.found.replace(f"{out}/", "out/")))
        else:
            _write(known[-1], page, made)
    front = out / "report" / "index.html"
    write_atomic(front, front_page(known, unread, page, made))
    tiers = _tiers(one.health)
    word = page.VERDICTS[one.verdict["word"]][1]
    if not options.json:
        if one.health.data is not None:
            print_table(("tier", "verdict", "time", "peak memory", ""), tiers)
            print()
        _show(one, f"{word}. {one.verdict['why']}", target, front if len(known) > 1 else None)
    image = one.image
    return Outcome(
        "done",
        f"{image['name']}: {word.lower()}; {target}",
        data={
            "report": str(target),
            "front": str(front),
            "image": image["name"],
            "manifest_digest": image["manifest_digest"],
            "compressed_bytes": image["compressed_bytes"],
            "unpacked_bytes": image["unpacked_bytes"],
            "verdict": one.verdict,
            "tiers": {name: status for name, status, *_ in tiers},
            "run_line": image["run_line"],
            "health": one.health.state,
            "bench": one.bench.state,
        },
        exit_code=one.exit_code,
    )


def judged(slug: str, page: ModuleType, flavour: str | None) -> Judged:
    """Gather all that is known of an image.

    Args:
        slug: Its folder name.
        page: The page generator.
        flavour: The flavour it must have; any if None.

    Raises:
        ForgeError: If it was not baked, is damaged or has another flavour.
    """
    out = out_dir()
    image = read_baked(slug, _IMAGE, flavour)
    health = read_part(out / "health" / slug, "health.json", health_report.SCHEMA, image)
    bench = read_part(out / "bench" / slug, "bench.json", BENCH_SCHEMA, image)
    stages = read_stages(out / "results", slug, str(image["manifest_digest"]))
    notes = gather_notes(image, health, bench, stages, _baked_at(out / "images" / slug))
    return Judged(slug, image, health, bench, stages, notes, judge(page, health))


def _others(slug: str) -> list[str]:
    """The other baked images that a health suite has run in."""
    out = out_dir()
    return [
        name for name in names() if name != slug and (out / "health" / name / "run.json").is_file()
    ]


def _write(one: Judged, page: ModuleType, made: str) -> Path:
    """Write an image's page, and the same for machines; the page's path."""
    folder = out_dir() / "report" / one.slug
    text = page.render(
        one.health.data,
        # nobody is led to hand on what is known to be bad
        image={k: v for k, v in one.image.items() if not (one.unhealthy and k in _OFFERS)},
        bench=one.bench.data,
        stages=one.stages,
        notes=one.notes,
        system=base_packages(out_dir() / "base", one.image),
        verdict=one.verdict,
        made=made,
    )
    write_atomic(folder / "index.html", text)
    write_json(
        folder / "report.json",
        {
            "schema": REPORT_SCHEMA,
            "made": made,
            "verdict": one.verdict,
            "exit_code": int(one.exit_code),
            "image": one.image,
            "health": {
                "state": one.health.state,
                "why": one.health.why,
                "data": one.health.data,
            },
            "bench": {"state": one.bench.state, "why": one.bench.why, "data": one.bench.data},
            "stages": one.stages,
            "notes": one.notes,
        },
    )
    return folder / "index.html"


def front_page(known: Sequence[Judged], unread: Sequence[str], page: ModuleType, made: str) -> str:
    """The page that leads to the others: a card for each image, the worst first.

    Args:
        known: The images.
        unread: Of further ones, why they are not shown, one sentence each.
        page: The page generator.
        made: When the page was made, for its foot.

    Returns:
        An HTML document.
    """
    tag = page.tag
    healthy = sum(one.exit_code == Exit.OK for one in known)
    head = f"{healthy} of {len(known)} image{'s' * (len(known) > 1)} healthy"
    cards = [_card(one, page) for one in sorted(known, key=lambda one: _FIRST.index(one.exit_code))]
    body = tag(
        "body",
        tag("header", tag("div", tag("span", "tpuforge", class_="brand"), class_="bar")),
        tag(
            "main",
            tag("h1", head),
            tag("p", "A name leads to the image's own page, with every check.", class_="quiet"),
            tag("ol", cards, class_="tiers"),
            [tag("p", text, class_="why") for text in unread],
        ),
        tag("footer", tag("p", f"page made {made}")),
    )
    return str(page.document(head, body, style=_FRONT_STYLE))


def _card(one: Judged, page: ModuleType) -> Any:
    """The card of an image on the front page, with a link to its own page."""
    tag, image = page.tag, one.image
    status, word = page.VERDICTS[one.verdict["word"]]
    pairs = [
        *((name, page.mark(status)) for name, status, *_ in _tiers(one.health)),
        ("compressed", size(image["compressed_bytes"])),
        ("unpacked", size(image["unpacked_bytes"])),
        ("digest", tag("code", image["manifest_digest"])),
    ]
    return tag(
        "li",
        tag("p", tag("a", image["name"], href=f"{one.slug}/index.html"), class_="tier-name"),
        page.mark(status, word),
        tag("p", one.verdict["why"], class_="reason"),
        tag("dl", [tag("div", tag("dt", k), tag("dd", v)) for k, v in pairs], class_="pairs"),
        class_=f"card {_TONES[status]}",
    )


def read_part(folder: Path, name: str, schema: str, image: dict[str, Any]) -> Part:
    """Health or bench of an image, if it is whole and of exactly this image.

    Args:
        folder: Where the run left it, with its ``run.json``.
        name: File name of the document.
        schema: The schema it must have.
        image: The image's record.

    Returns:
        What can be counted, and why nothing can.
    """
    what = name.partition(".")[0]
    verb = "smoke" if what == "health" else what
    record, data = read_json(folder / "run.json"), read_json(folder / name)
    if data is None:
        return Part(None, "missing", f"the verb {verb} has not run for this image")
    if not isinstance(data, dict) or data.get("schema") != schema or not isinstance(record, dict):
        return Part(None, "missing", f"what the last run of {verb} left is not whole")
    if sha256_file(folder / name) != record.get("sha256"):
        return Part(None, "missing", f"the file {name} was changed after the run that made it")
    wrong = health_report.flaw(data) if what == "health" else _bench_flaw(data)
    if wrong:
        return Part(None, "missing", f"what the last run of {verb} left is not whole: {wrong}")
    ran = str(record.get("manifest_digest"))
    if ran != image["manifest_digest"]:
        return Part(
            None,
            "stale",
            f"the last run of {verb} was of another image, {ran[:19]}, and does not count",
        )
    if what == "health" and data.get("selection"):
        return Part(
            None,
            "missing",
            f"the last run of smoke was of some checks only ({data['selection']}), so it judged no "
            "image",
        )
    if what == "health" and data["verdict"] == "healthy" and not data["tiers"]["static"]["passed"]:
        return Part(
            None, "missing", "the last run of smoke left out the tier static, so it judged no image"
        )
    return Part(data, "fresh")


def _bench_flaw(bench: dict[str, Any]) -> str:
    """What keeps benchmarks from being shown; empty if nothing does."""
    items = bench.get("measurements")
    if not isinstance(items, list) or not items:
        return "it has no measurements"
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get("id"), str):
            return "a measurement has no id"
        figures = [item.get(key) for key in ("min", "median", "max")]
        samples = item.get("samples")
        if not isinstance(samples, list) or not isinstance(item.get("unit"), str):
            return f"{item['id']} has no samples or no unit"
        if any(figure is not None and type(figure) not in (int, float) for figure in figures):
            return f"a figure of {item['id']} is no number"
    return ""


def read_stages(folder: Path, slug: str, digest: str) -> list[dict[str, Any]]:
    """The last results of the verbs, in the order of the main job.

    Args:
        folder: ``out/results``.
        slug: The image, such as ``runtime-py311``.
        digest: Its manifest digest: a proof that another one is reproducible is left out.

    Returns:
        ``tpuforge.result/1`` records; for a verb of the main job without one, its status is
        ``not run``.
    """
    stages = []
    for verb in STAGES:
        name = f"{verb}-{slug}" if verb in OF_AN_IMAGE else verb
        record = _result(read_json(folder / f"{name}.json"), verb)
        if record is None:
            if verb in MAIN_JOB:
                stages.append({"verb": verb, "status": "not run", "why": "it left no result"})
            continue
        if verb == "reproduce" and digest not in str(record.get("data")):
            continue
        if record.get("summary"):
            # the page is handed on: where it was made is nobody's business
            record["summary"] = record["summary"].replace(f"{folder.parent}/", "out/")
        stages.append(record)
    return stages


def _result(record: Any, verb: str) -> dict[str, Any] | None:
    """A verb's result, or None for a document that is none."""
    if not isinstance(record, dict) or record.get("schema") != RESULT_SCHEMA:
        return None
    shape = {
        "verb": str,
        "status": str,
        "seconds": int | float,
        "exit_code": int,
        "started": str | None,
        "summary": str | None,
        "notes": list | None,
        "error": dict | None,
    }
    fits = all(isinstance(record.get(key), kind) for key, kind in shape.items())
    return dict(record) if fits and record["verb"] == verb else None


def _baked_at(folder: Path) -> datetime:
    """When an image was finished: its record is what a bake writes last."""
    return datetime.fromtimestamp((folder / "image.json").stat().st_mtime, UTC)


def base_packages(folder: Path, image: dict[str, Any]) -> list[dict[str, Any]]:
    """The OS packages of an image's base, if that very base is still there.

    Args:
        folder: ``out/base``.
        image: The image's record.

    Returns:
        Each with ``name`` and ``version``; empty if the base is another one by now.
    """
    for path in sorted(folder.glob("*.json")):
        record = read_json(path)
        if isinstance(record, dict) and record.get("manifest_digest") == image.get("base_digest"):
            return list(record.get("packages") or [])
    return []


def gather_notes(
    image: dict[str, Any],
    health: Part,
    bench: Part,
    stages: Sequence[dict[str, Any]],
    baked_at: datetime,
) -> list[dict[str, str]]:
    """What the reader must not miss, each sentence once; what makes an image unhealthy first.

    A verb's failure counts if it came after the bake and is about this image. One that only says
    that the verb could not work (exit code 2), such as a mistyped command, is about the image only
    where it explains why there is no health or benchmark of it.

    Args:
        image: The image's record.
        health: Its health.
        bench: Its benchmarks.
        stages: The verbs' results.
        baked_at: When the image was finished.

    Returns:
        ``{"from": who says it, "text": one sentence}``.
    """
    notes: dict[str, str] = {}
    failed = health_report.failures(health.data) if health.data is not None else []
    for text in failed[:_MOST_FAILED]:
        notes.setdefault(_sentence(f"failed: {text.splitlines()[0]}"), "health")
    if len(failed) > _MOST_FAILED:
        notes[f"And {len(failed) - _MOST_FAILED} more critical checks failed."] = "health"
    for source, part in (("health", health), ("bench", bench)):
        if part.state != "fresh":
            notes[_sentence(part.why)] = source
    for text in image.get("notes") or []:
        notes.setdefault(_sentence(str(text)), "image")
    for stage in stages:
        verb = str(stage["verb"])
        if verb not in MAIN_JOB:
            continue
        for text in stage.get("notes") or []:
            notes.setdefault(_sentence(str(text)), verb)
        if not _ended_after(stage, baked_at):
            continue
        if stage["status"] == "failed":
            left = {"smoke": health, "bench": bench}.get(verb)
            wanting = left is not None and left.state != "fresh"
            if stage["exit_code"] != Exit.CANNOT or wanting:
                found = str((stage.get("error") or {}).get("found") or "it failed")
                notes.setdefault(_sentence(found.splitlines()[0]), verb)
        elif stage["status"] == "interrupted":
            notes.setdefault("Its last run was interrupted.", verb)
    return [{"from": source, "text": text} for text, source in notes.items()]


def _ended_after(stage: dict[str, Any], moment: datetime) -> bool:
    try:
        started = datetime.fromisoformat(stage.get("started") or "")
        # the start is written in whole seconds
        return started + timedelta(seconds=stage["seconds"] + 1) > moment
    except (ValueError, TypeError, OverflowError):
        return False


def _sentence(text: str) -> str:
    text = text.strip() or "it says nothing"
    first = text.split()[0]
    # the name of a file or a package stays as it is written
    if first.rstrip(",:;").isalpha():
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def page_module() -> ModuleType:
    """``smoke/page.py``, the one generator of pages, loaded as a file: it travels in images."""
    path = ROOT / "smoke" / "page.py"
    spec = importlib.util.spec_from_file_location("tpuforge_page", path)
    if spec is None or spec.loader is None:
        raise ForgeError(f"{path} cannot be loaded", expected="the page generator")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judge(page: ModuleType, health: Part) -> dict[str, str]:
    """The verdict of the page: the suite's, or why there is none.

    Args:
        page: The page generator.
        health: The image's health.

    Returns:
        ``{"word": …, "why": …}``.
    """
    if health.data is None:
        return {"word": health.state, "why": _sentence(health.why)}
    verdict: dict[str, str] = page.judge(health.data)
    return verdict


def _tiers(health: Part) -> list[tuple[str, str, str, str, str]]:
    rows = []
    tiers = (health.data or {}).get("tiers") or {}
    for name in TIERS:
        tier = tiers.get(name) or {"status": "not run", "why": health.why}
        ran = tier["status"] != "not run"
        spent, peak = tier.get("seconds"), tier.get("peak_memory_bytes")
        rows.append(
            (
                name,
                str(tier["status"]),
                duration(spent) if ran and spent is not None else "",
                size(peak) if ran and peak else "",
                str(tier.get("why") or ""),
            )
        )
    return rows


def _show(one: Judged, verdict: str, target: Path, front: Path | None) -> None:
    image = one.image
    lines = [
        ("image", image["name"]),
        ("digest", image["manifest_digest"]),
        (
            "size",
            f"{size(image['compressed_bytes'])} compressed, "
            f"{size(image['unpacked_bytes'])} unpacked",
        ),
        ("health", verdict),
        ("report", str(target)),
        *([("all", str(front))] if front is not None else []),
    ]
    for key, value in lines:
        print(f"{key + ':':<8} {value}")
    for note in one.notes:
        print(f"{'note:':<8} {note['from']}: {note['text']}")
    if one.unhealthy:
        print(
            "\nnot for a TPU VM, and for nobody else: the image is unhealthy, see the notes above"
        )
    else:
        print(f"\non a TPU VM, with this image pulled or loaded:\n  {image['run_line']}")
        print("with no more rights than it needs, once it is pushed (docs/tpu-vm.md):")
        print(f"  tpu-run HOST/NAME@{image['manifest_digest']} python")
    if image.get("local_run_line"):
        print(f"here (private engine):\n  {image['local_run_line']}")
    if image.get("save_line") and not one.unhealthy:
        print(f"into an engine of your own:\n  {image['save_line']}")
    print()


main = main_of("report", _parser, _report)


if __name__ == "__main__":
    raise SystemExit(main())
