"""One self-contained HTML page from health, image and bench data.

The page needs nothing beside itself: no font, script, style or picture from elsewhere, and its
own content policy forbids any. In the image it shows a health report alone; on the host
``./forge report`` hands it everything that is known. Only the standard library is used.

Text never becomes markup by accident: :func:`tag` escapes every child that is not an
:class:`Html` already, and every attribute.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Data = Mapping[str, Any]

TIERS = ("static", "import", "compile", "simulate", "device")
TIER_ASKS = {
    "static": "Are the files in the image the ones that were locked?",
    "import": "Do torch and torch_tpu load together?",
    "compile": "Does the real TPU compiler accept real programs?",
    "simulate": "Does the real wheel run programs, on a simulated chip?",
    "device": "Do the same programs run on a TPU?",
}
VERDICTS = {
    "healthy": ("passed", "Healthy"),
    "unhealthy": ("failed", "Unhealthy"),
    "unjudged": ("not run", "Not judged"),
    "device": ("failed", "Device unusable"),
    "stale": ("not run", "Not judged"),
    "missing": ("not run", "Not judged"),
}
_MARKS = {
    "passed": "ok",
    "failed": "bad",
    "warning": "warn",
    "incomplete": "warn",
    "not run": "none",
}
_NOTHING = "-"


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | Html | Iterable["Child"] | None

_VOID = {"meta", "input"}
# they stand in the page itself, after a line break
_STYLE, _SCRIPT = (
    Html("\n" + Path(__file__).with_name(name).read_text(encoding="utf-8"))
    for name in ("page.css", "page.js")
)


def tag(element: str, /, *children: Child, **attributes: object) -> Html:
    """One element; whatever is not :class:`Html` is escaped.

    Args:
        element: The element's name.
        *children: Texts, elements, or nested sequences of them; None is left out.
        **attributes: Attributes; ``class_`` means ``class``, ``_`` in a name means ``-``; None
            and False are left out, True stands alone.

    Returns:
        The element.
    """
    parts = [f"<{element}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        shown = key.rstrip("_").replace("_", "-")
        parts.append(f" {shown}" if value is True else f' {shown}="{html.escape(str(value))}"')
    parts.append(">")
    if element not in _VOID:
        parts += [join(children), f"</{element}>"]
    return Html("".join(parts))


def join(children: Iterable[Child]) -> Html:
    """Texts (escaped) and elements, one after the other.

    Args:
        children: Texts, elements, or nested sequences of them; None is left out.

    Returns:
        Their markup.
    """
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(html.escape(child))
        else:
            parts.append(join(child))
    return Html("".join(parts))


def size(count: object) -> str:
    """Bytes for people, in decimal units.

    Args:
        count: A number of bytes; anything else shows as a hyphen.

    Returns:
        Such as ``517.3 MB``.
    """
    if not isinstance(count, int | float) or isinstance(count, bool):
        return _NOTHING
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def seconds(span: object) -> str:
    """A time span for people.

    Args:
        span: Seconds; anything that is no number shows as a hyphen.

    Returns:
        Such as ``41 ms``, ``4.2 s`` or ``3 min 05 s``.
    """
    if not isinstance(span, int | float) or isinstance(span, bool):
        return _NOTHING
    if span < 0.0995:
        return f"{span * 1000:.3g} ms"
    if span < 10:
        return f"{span:.2f} s"
    if span < 60:
        return f"{span:.1f} s"
    minutes, rest = divmod(round(span), 60)
    return f"{minutes} min {rest:02d} s"


def quantity(value: object, unit: str) -> str:
    """A measured value with its unit.

    Args:
        value: The number; None shows as a hyphen.
        unit: ``s``, ``MB``, or any other word.

    Returns:
        Text for people.
    """
    if unit == "s":
        return seconds(value)
    return f"{number(value)} {unit}".strip()


def number(value: object) -> str:
    """A figure of a check, short.

    Args:
        value: Anything that JSON can hold.

    Returns:
        Numbers with at most four significant digits and thousands apart; other values as text.
    """
    if value is None:
        return _NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(number(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {number(item)}" for key, item in value.items())
    return str(value)


def mark(status: str, word: str | None = None) -> Html:
    """A status: a shape, a colour and a word, so that none of them stands alone.

    Args:
        status: ``passed``, ``failed``, ``warning``, ``incomplete`` (a tier) or ``not run``.
        word: The word shown; the status itself if not given.

    Returns:
        The element.
    """
    kind = _MARKS.get(status, "none")
    return tag("span", _shape(kind), word or status, class_=f"mark {kind}")


def _shape(kind: str) -> Html:
    body = {
        "ok": '<circle cx="8" cy="8" r="7.5" fill="currentColor"/>'
        '<path d="M4.4 8.3l2.4 2.5 4.8-5.4" fill="none" stroke="var(--on)" stroke-width="1.9"/>',
        "bad": '<path d="M8 .6l7.6 14.2H.4z" fill="currentColor"/>'
        '<path d="M8 5.4v4.4M8 11.4v1.8" stroke="var(--on)" stroke-width="1.9"/>',
        "warn": '<path d="M8 .7l7.3 7.3L8 15.3.7 8z" fill="currentColor"/>'
        '<path d="M8 4.2v4.6M8 10.4v1.8" stroke="var(--on)" stroke-width="1.9"/>',
        "none": '<circle cx="8" cy="8" r="6.6" fill="none" stroke="currentColor" '
        'stroke-width="1.6" stroke-dasharray="3 2.2"/><path d="M5 8h6" stroke="currentColor" '
        'stroke-width="1.6"/>',
    }[kind]
    return Html(f'<svg viewBox="0 0 16 16" aria-hidden="true">{body}</svg>')


def render(
    health: Data | None,
    *,
    image: Data | None = None,
    bench: Data | None = None,
    stages: Sequence[Data] = (),
    notes: Sequence[Data] = (),
    system: Sequence[Data] = (),
    verdict: Data | None = None,
    made: str = "",
) -> str:
    """The whole page.

    Args:
        health: A ``tpuforge.health/1`` report; None when the suite has not run.
        image: A ``tpuforge.image/1`` record (host only).
        bench: A ``tpuforge.bench/1`` record (host only).
        stages: ``tpuforge.result/1`` records in the order of the main job (host only).
        notes: What must not be missed: ``{"from": who says it, "text": one sentence}``.
        system: The base's packages, each with ``name`` and ``version`` (host only).
        verdict: ``{"word": a key of VERDICTS, "why": one sentence}``; from ``health`` if not
            given.
        made: When the page was made, for its foot.

    Returns:
        An HTML document.
    """
    health = health or {}
    verdict = verdict or judge(health)
    name = _name(health, image)
    checks = _dicts(health.get("checks"))
    sections = [
        ("tiers", "Tiers", _tiers(health, "" if health else str(verdict.get("why") or ""))),
        ("image", "Image", _image(image) if image else _facts(health)),
        ("run", "Run it", _run(image)),
        ("checks", "Checks", _checks(checks)),
        ("bench", "Bench", _bench(bench) if bench else None),
        ("stages", "Stages", _stages(stages)),
        ("packages", "Packages", _packages(_dicts(health.get("packages")), system)),
    ]
    shown = [(key, title, body) for key, title, body in sections if body]
    bar, parts = outline(shown)
    body = tag(
        "body",
        tag("a", "Skip to the checks", href="#checks", class_="skip") if checks else None,
        tag("header", bar, _banner(name, health, verdict, image)),
        tag("main", _notes(notes), parts),
        tag("footer", tag("p", _foot(health, made))),
        tag("script", _SCRIPT),
    )
    return document(f"{_word(verdict)}: {name}", body)


def outline(sections: Sequence[tuple[str, str, Html]]) -> tuple[Html, Html]:
    """The bar that leads to the sections of a page, and the sections.

    Args:
        sections: The name in links, the title and the body of each.

    Returns:
        Both elements.
    """
    links = [tag("a", title, href=f"#{key}") for key, title, _ in sections]
    bar = tag(
        "div",
        tag("span", "tpuforge", class_="brand"),
        tag("nav", links, aria_label="On this page"),
        class_="bar",
    )
    parts = [
        tag(
            "section",
            tag("h2", title, id_=f"{key}-title"),
            body,
            id_=key,
            aria_labelledby=f"{key}-title",
        )
        for key, title, body in sections
    ]
    return bar, join(parts)


def document(title: str, body: Html, *, style: str = "") -> str:
    """A whole page around a body: the head, the style, and the policy that nothing is loaded.

    Args:
        title: For the window.
        body: The element ``body``.
        style: More rules than the common ones.

    Returns:
        An HTML document.
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'",
        ),
        tag("title", title),
        tag("style", Html(_STYLE + style)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def judge(health: Data) -> dict[str, str]:
    """The verdict of a health report, in a word and a sentence.

    Args:
        health: A ``tpuforge.health/1`` report, or an empty mapping when there is none.

    Returns:
        ``{"word": a key of VERDICTS, "why": one sentence}``.
    """
    if not health:
        return {"word": "missing", "why": "The health suite has not run."}
    word = str(health.get("verdict", "unjudged"))
    word = word if word in VERDICTS else "unjudged"
    checks = _dicts(health.get("checks"))
    failed = [check for check in checks if _standing(check) == "failed"]
    warned = sum(_standing(check) == "warning" for check in checks)
    highest = health.get("highest_tier")
    reached = f"Highest tier reached: {highest}." if highest else "No tier was reached."
    if word == "healthy":
        passed = sum(check.get("status") == "passed" for check in checks)
        warnings = f", {_count(warned, 'warning')}" if warned else ""
        return {"word": word, "why": f"{_count(passed, 'check')} passed{warnings}. {reached}"}
    if failed:
        names = ", ".join(str(check.get("id", "?")) for check in failed[:3])
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        return {"word": word, "why": f"{_count(len(failed), 'check')} failed: {names}{more}."}
    whys = [
        f"{key}: {tier.get('why')}"
        for key, tier in _tier_list(health)
        if tier.get("status") != "passed" and tier.get("why")
    ]
    return {"word": word, "why": f"{reached} {'; '.join(whys[:2])}".strip()}


def _count(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def _standing(check: Data) -> str:
    """A check's status, where the failure of one that only warns is a ``warning``."""
    status = str(check.get("status") or "not run")
    return "warning" if status == "failed" and check.get("severity") == "warning" else status


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tier_list(health: Data) -> list[tuple[str, dict[str, Any]]]:
    tiers = _dict(health.get("tiers"))
    return [(key, _dict(tiers.get(key))) for key in TIERS]


def _word(verdict: Data) -> str:
    return VERDICTS.get(str(verdict.get("word")), VERDICTS["unjudged"])[1]


def _name(health: Data, image: Data | None) -> str:
    if image and image.get("name"):
        return str(image["name"])
    facts = _dict(health.get("image"))
    if facts:
        return f"{facts.get('image', '?')}, Python {facts.get('python', '?')}"
    return "an environment that is no tpuforge image"


def _banner(name: str, health: Data, verdict: Data, image: Data | None) -> Html:
    status, word = VERDICTS.get(str(verdict.get("word")), VERDICTS["unjudged"])
    kind = _MARKS[status]
    digest = (image or {}).get("manifest_digest")
    return tag(
        "div",
        tag("div", _shape(kind), class_=f"seal {kind}"),
        tag(
            "div",
            tag("p", name, class_="name"),
            tag("h1", word),
            tag("p", str(verdict.get("why") or ""), class_="why"),
            tag("p", tag("code", str(digest)), class_="digest") if digest else None,
        ),
        tag("dl", _headline(health, image), class_="headline"),
        class_=f"banner {kind}",
    )


def _headline(health: Data, image: Data | None) -> list[Html]:
    pairs: list[tuple[str, str]] = []
    if image:
        pairs.append(("compressed", size(image.get("compressed_bytes"))))
        pairs.append(("unpacked", size(image.get("unpacked_bytes"))))
    if health:
        peak = [
            check["peak_memory_bytes"]
            for check in _dicts(health.get("checks"))
            if isinstance(check.get("peak_memory_bytes"), int)
        ]
        pairs.append(("health suite", seconds(health.get("seconds"))))
        if peak:
            pairs.append(("peak memory", size(max(peak))))
    return [tag("div", tag("dt", key), tag("dd", value)) for key, value in pairs]


def _notes(notes: Sequence[Data]) -> Html | None:
    if not notes:
        return None
    items = [
        tag("li", tag("b", str(note.get("from") or "note")), " ", str(note.get("text") or ""))
        for note in notes
    ]
    return tag("aside", tag("h2", "Do not miss"), tag("ul", items), class_="notes")


def _tiers(health: Data, missing: str) -> Html:
    """A card per tier; without a health report each says why it did not run."""
    checks = _dicts(health.get("checks"))
    cards = []
    for position, (key, tier) in enumerate(_tier_list(health), 1):
        status = str(tier.get("status") or "not run")
        standings = [_standing(check) for check in checks if check.get("tier") == key]
        counts = [
            f"{standings.count(word)} {word}"
            for word in ("passed", "failed", "warning", "not run")
            if word in standings
        ]
        why = str(tier.get("why") or missing)
        measured = tier.get("seconds") is not None and status != "not run"
        cards.append(
            tag(
                "li",
                tag("p", tag("span", str(position), class_="step"), key, class_="tier-name"),
                mark(status),
                tag("p", TIER_ASKS[key], class_="ask"),
                tag("p", why, class_="reason") if why else None,
                tag("p", ", ".join(counts), class_="counts") if counts else None,
                tag(
                    "dl",
                    tag("div", tag("dt", "time"), tag("dd", seconds(tier.get("seconds")))),
                    tag(
                        "div",
                        tag("dt", "peak memory"),
                        tag("dd", size(tier.get("peak_memory_bytes"))),
                    ),
                )
                if measured
                else None,
                class_=f"card {_MARKS.get(status, 'none')}",
            )
        )
    return tag("ol", cards, class_="tiers")


def _pairs(pairs: Iterable[tuple[str, object]], class_: str = "pairs") -> Html:
    return tag(
        "dl",
        [
            tag("div", tag("dt", key), tag("dd", value if isinstance(value, Html) else str(value)))
            for key, value in pairs
            if value not in (None, "")
        ],
        class_=class_,
    )


def _facts(health: Data) -> Html | None:
    facts = _dict(health.get("image"))
    if not facts:
        return None
    first = ("image", "flavour", "python", "torch", "torch_tpu", "libtpu", "xla_commit")
    keys = [key for key in first if key in facts]
    keys += sorted(key for key in facts if key not in (*first, "schema"))
    return _pairs([(key, tag("code", number(facts[key]))) for key in keys])


def _image(image: Data) -> Html:
    facts = _pairs(
        [
            ("name", tag("code", str(image.get("name") or _NOTHING))),
            ("manifest digest", tag("code", str(image.get("manifest_digest") or _NOTHING))),
            ("config digest", tag("code", str(image.get("config_digest") or _NOTHING))),
            ("flavour", image.get("flavour")),
            ("Python", image.get("python")),
            ("compressed", size(image.get("compressed_bytes"))),
            ("unpacked", size(image.get("unpacked_bytes"))),
            ("lock", tag("code", str(image["lock_sha256"])) if image.get("lock_sha256") else None),
            (
                "suite",
                tag("code", str(image["suite_sha256"])) if image.get("suite_sha256") else None,
            ),
        ]
    )
    labels = _dict(image.get("labels"))
    more = (
        tag(
            "details",
            tag("summary", f"Labels ({len(labels)})"),
            _pairs([(key, tag("code", str(value))) for key, value in sorted(labels.items())]),
        )
        if labels
        else None
    )
    return join([facts, _layers(_dicts(image.get("layers"))), more])


def _layers(layers: list[dict[str, Any]]) -> Html | None:
    sizes = [layer.get("compressed_bytes") for layer in layers]
    total = sum(value for value in sizes if isinstance(value, int))
    if not total:
        return None
    bars, rows = [], []
    for position, layer in enumerate(layers, 1):
        compressed = layer.get("compressed_bytes")
        share = 100 * compressed / total if isinstance(compressed, int) else 0
        tone = f"t{(position - 1) % 6}"
        what = str(layer.get("what") or "layer")
        bars.append(
            tag(
                "span",
                str(position) if share > 3 else "",
                class_=tone,
                style=f"flex:{max(share, 0.4):.2f} 0 0",
                title=f"{what}: {size(compressed)}",
            )
        )
        rows.append(
            tag(
                "tr",
                tag("td", tag("span", str(position), class_=f"key {tone}")),
                tag("td", what),
                tag("td", size(compressed), class_="n"),
                tag("td", size(layer.get("unpacked_bytes")), class_="n"),
                tag(
                    "td",
                    tag("code", str(layer.get("digest") or _NOTHING)[:19] + "…"),
                    class_="wide",
                    title=str(layer.get("digest") or ""),
                ),
            )
        )
    head = tag(
        "tr",
        tag("th", "", scope="col"),
        tag("th", "layer", scope="col"),
        tag("th", "compressed", class_="n", scope="col"),
        tag("th", "unpacked", class_="n", scope="col"),
        tag("th", "digest", class_="wide", scope="col"),
    )
    return tag(
        "figure",
        tag(
            "figcaption",
            "Layers, by compressed size: what a pull transfers. Only a layer whose "
            "digest changed is pulled again.",
        ),
        tag(
            "div",
            bars,
            class_="layers",
            role="img",
            aria_label="Share of each layer, given in the table below",
        ),
        tag(
            "div",
            tag("table", tag("thead", head), tag("tbody", rows)),
            class_="scroll",
            tabindex=0,
            role="region",
            aria_label="Layers",
        ),
    )


def _run(image: Data | None) -> Html | None:
    lines = (
        ("run_line", "On a TPU VM, with this image pulled or loaded:"),
        ("local_run_line", "Here, with the private engine that baked it:"),
        ("save_line", "From the private engine into an engine of your own:"),
    )
    parts = [
        (
            tag("p", title),
            tag(
                "div",
                tag("pre", tag("code", str((image or {})[key]))),
                tag("button", "Copy", type_="button", class_="copy", hidden=True),
                class_="shell",
            ),
        )
        for key, title in lines
        if (image or {}).get(key)
    ]
    return join(parts) if parts else None


def _checks(checks: list[dict[str, Any]]) -> Html | None:
    if not checks:
        return None
    tiers = [tier for tier in TIERS if any(check.get("tier") == tier for check in checks)]
    statuses = [
        status
        for status in ("failed", "warning", "not run", "passed")
        if any(_standing(check) == status for check in checks)
    ]
    choices = [
        choice(name, name, values) for name, values in (("status", statuses), ("tier", tiers))
    ]
    tools = search("name, purpose, detail, remedy", choices, _count(len(checks), "check"))
    order = {"failed": 0, "warning": 1, "passed": 2, "not run": 3}
    ranked = sorted(checks, key=lambda check: order.get(_standing(check), 3))
    return join([tools, tag("div", [_check(check) for check in ranked], class_="checks")])


def search(hint: str, choices: Sequence[Html], shown: str) -> Html:
    """The form that narrows a list down; a page without scripts does not show it.

    Args:
        hint: What is searched.
        choices: Groups of buttons, see :func:`choice`.
        shown: How much is shown, at the beginning.

    Returns:
        The form.
    """
    field = tag("input", type_="search", id_="search", autocomplete="off", placeholder=hint)
    return tag(
        "form",
        tag("label", "Search ", field),
        choices,
        tag("output", shown, id_="shown"),
        id_="tools",
        role="search",
        hidden=True,
    )


def choice(name: str, title: str, values: Sequence[str]) -> Html:
    """A group of buttons of which one is pressed, at the beginning the one for all.

    Args:
        name: The group, for the script.
        title: The group, for people.
        values: What can be chosen.

    Returns:
        The group.
    """
    options = [
        tag(
            "label",
            tag("input", type_="radio", name=name, value=value, checked=not value),
            tag("span", value or "all"),
        )
        for value in ("", *values)
    ]
    return tag("fieldset", tag("legend", title), options)


def _check(check: dict[str, Any]) -> Html:
    status = _standing(check)
    figures = _dict(check.get("figures"))
    detail = str(check.get("detail") or "")
    remedy = str(check.get("remedy") or "")
    purpose = str(check.get("purpose") or "")
    wrong = status in ("failed", "warning")
    words = " ".join(
        str(check.get(key) or "") for key in ("id", "purpose", "detail", "remedy", "tier")
    )
    return tag(
        "details",
        tag(
            "summary",
            mark(status),
            tag(
                "span",
                tag("code", str(check.get("id") or "?")),
                # of what is wrong, the heading says what is so and not what should be
                tag(
                    "span",
                    (detail.strip().splitlines() or [purpose])[0] if wrong else purpose,
                    class_="purpose",
                ),
                class_="what",
            ),
            tag("span", str(check.get("tier") or ""), class_="tier"),
            tag(
                "span",
                seconds(check.get("seconds")) if status != "not run" else "",
                class_="n time",
            ),
            tag(
                "span",
                size(check["peak_memory_bytes"])
                if check.get("peak_memory_bytes") is not None
                else "",
                class_="n memory",
            ),
        ),
        tag(
            "div",
            tag("pre", detail) if detail else None,
            _pairs(
                [(key.replace("_", " "), number(value)) for key, value in figures.items()],
                "figures",
            )
            if figures
            else None,
            tag("p", tag("b", "Expected "), purpose) if purpose and wrong else None,
            tag("p", tag("b", "Remedy "), remedy, class_="remedy") if remedy and wrong else None,
            tag("p", tag("b", "If it fails "), remedy, class_="remedy quiet")
            if remedy and status not in ("failed", "warning")
            else None,
            class_="inside",
        ),
        class_=f"check {_MARKS.get(status, 'none')}",
        open_=status in ("failed", "warning"),
        data_status=status,
        data_tier=str(check.get("tier") or ""),
        data_words=words.lower(),
    )


def _bench(bench: Data) -> Html | None:
    measured = _dicts(bench.get("measurements"))
    if not measured:
        return None
    groups: dict[str, list[dict[str, Any]]] = {}
    for item in measured:
        groups.setdefault(str(item.get("id") or "?").partition(".")[0], []).append(item)
    figures = [_bench_group(name, items) for name, items in groups.items()]
    host = _dict(bench.get("host"))
    where = f" on {host['cores']} cores" if host.get("cores") else ""
    legend = tag(
        "p",
        f"Measured{where}. A bar runs from the fastest to the slowest sample, its tick is the "
        "median; each group has its own scale from zero.",
        class_="legend",
    )
    return join([legend, figures])


def _bench_group(name: str, items: list[dict[str, Any]]) -> Html:
    tops: dict[str, float] = {}
    for item in items:
        if isinstance(item.get("max"), int | float):
            unit = str(item.get("unit") or "")
            tops[unit] = max(tops.get(unit, 0.0), float(item["max"]))
    rows = []
    for item in items:
        unit = str(item.get("unit") or "")
        label = tag(
            "th",
            tag("code", str(item.get("id") or "?")),
            tag("span", str(item.get("what") or ""), class_="purpose"),
            scope="row",
        )
        if item.get("not_run") or not isinstance(item.get("median"), int | float):
            why = str(item.get("not_run") or "no sample")
            rows.append(tag("tr", label, tag("td", mark("not run", f"not run: {why}"), colspan=3)))
            continue
        low, middle, high = (float(item.get(key) or 0.0) for key in ("min", "median", "max"))
        samples = item.get("samples")
        count = len(samples) if isinstance(samples, list) else 0
        rows.append(
            tag(
                "tr",
                label,
                tag("td", _spread(low, middle, high, tops.get(unit, 0.0)), class_="plot"),
                tag("td", tag("b", quantity(middle, unit)), class_="n"),
                tag(
                    "td",
                    f"{quantity(low, unit)} to {quantity(high, unit)}, {count} samples"
                    if count > 1
                    else "one sample",
                    class_="n spread",
                ),
            )
        )
    return tag("table", tag("caption", name), tag("tbody", rows), class_="bench")


def _spread(low: float, middle: float, high: float, top: float) -> Html:
    scale = 196 / top if top > 0 else 0.0
    left, tick, right = (2 + value * scale for value in (low, middle, high))
    return tag(
        "svg",
        tag("line", x1=2, x2=198, y1=10, y2=10, class_="axis"),
        tag("line", x1=2, x2=f"{tick:.1f}", y1=10, y2=10, class_="reach"),
        tag(
            "rect",
            x=f"{left:.1f}",
            y=5,
            width=f"{max(right - left, 2):.1f}",
            height=10,
            rx=2,
            class_="range",
        ),
        tag("line", x1=f"{tick:.1f}", x2=f"{tick:.1f}", y1=1, y2=19, class_="tick"),
        viewBox="0 0 200 20",
        preserveAspectRatio="none",
        role="img",
        aria_label="spread, given in the next columns",
    )


def _stages(stages: Sequence[Data]) -> Html | None:
    if not stages:
        return None
    top = max((float(stage.get("seconds") or 0) for stage in stages), default=0.0)
    words = {"done": "passed", "unchanged": "passed", "failed": "failed"}
    rows = []
    for stage in stages:
        status = str(stage.get("status") or "not run")
        shown = "passed" if status in words and not stage.get("exit_code") else "failed"
        if status == "not run":
            shown = "not run"
        spent = stage.get("seconds")
        share = 100 * float(spent) / top if isinstance(spent, int | float) and top else 0.0
        error = _dict(stage.get("error"))
        says = str(stage.get("summary") or error.get("found") or stage.get("why") or "")
        rows.append(
            tag(
                "tr",
                tag("th", tag("code", str(stage.get("verb") or "?")), scope="row"),
                tag("td", mark(shown, status)),
                tag(
                    "td",
                    tag("span", style=f"width:{max(share, 0.5):.1f}%")
                    if spent is not None
                    else None,
                    class_="meter",
                ),
                tag("td", seconds(spent), class_="n"),
                tag("td", says, class_="says"),
            )
        )
    note = tag(
        "p",
        "Each verb's last run. Unchanged means that its inputs were the same as before "
        "and its earlier result stands.",
        class_="legend",
    )
    return join([note, tag("table", tag("tbody", rows), class_="stages")])


def _packages(packages: Sequence[Data], system: Sequence[Data]) -> Html | None:
    groups = [
        tag(
            "details",
            tag("summary", f"{_count(len(group), 'package')} {where}"),
            tag(
                "ul",
                [
                    tag(
                        "li",
                        tag("span", str(package.get("name") or "?")),
                        tag("code", str(package.get("version") or "?")),
                    )
                    for package in group
                ],
                class_="packages",
            ),
            open_=len(group) <= 60,
        )
        for group, where in ((packages, "in the environment"), (system, "in the base"))
        if group
    ]
    return join(groups) if groups else None


def _foot(health: Data, made: str) -> str:
    host = _dict(health.get("host"))
    parts = []
    if health.get("started"):
        parts.append(f"Health suite started {health['started']}")
    if host:
        parts.append(
            f"{host.get('machine', '?')}, {host.get('cores', '?')} cores, "
            f"{size(host.get('memory_bytes'))} memory, kernel {host.get('kernel', '?')}"
        )
    if made:
        parts.append(f"page made {made}")
    return " · ".join(parts)
