"""The page: no data becomes markup, nothing is loaded, and the verdict comes first."""

from __future__ import annotations

import importlib.util
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import smoke_host_support as support

PAGE = Path(__file__).resolve().parents[2] / "smoke" / "page.py"
HOSTILE = "</script></style>\"'><img src=x onerror=alert(1)><script>alert(2)</script>&lt;b&amp;"
VOID = {"meta", "input"}


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page_under_test", PAGE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Reader(HTMLParser):
    """Collects elements, attributes and text, and insists that elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def of(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]


def whole(page: ModuleType, **replaced: Any) -> str:
    arguments: dict[str, Any] = {
        "image": support.IMAGE,
        "bench": support.bench(),
        "stages": [{"verb": "bake", "status": "done", "seconds": 3.0, "summary": "baked"}],
        "notes": [{"from": "bake", "text": "The base drifted."}],
        **replaced,
    }
    text: str = page.render(support.health(), **arguments)
    return text


def poison(value: Any) -> Any:
    """The same shape with hostile text for every text, and in every key of free-form tables."""
    if isinstance(value, dict):
        free = {"labels", "figures"}
        return {
            key: {HOSTILE + name: poison(item) for name, item in inner.items()}
            if key in free and isinstance(inner, dict)
            else poison(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [poison(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def test_hostile_text_stays_text(page: ModuleType) -> None:
    bad = poison(support.health())
    for item, tier in zip(bad["checks"], ("static", "import", "device"), strict=True):
        item["status"] = "failed"
        item["tier"] = tier
    text = page.render(
        bad,
        image=poison(support.IMAGE),
        bench=poison(support.bench()),
        stages=[poison({"verb": "x", "status": "y", "seconds": 1.0, "summary": "z"})],
        notes=[{"from": HOSTILE, "text": HOSTILE}],
        system=[{"name": HOSTILE, "version": HOSTILE}],
        verdict={"word": "healthy", "why": HOSTILE},
        made=HOSTILE,
    )
    reader = Reader(text)
    assert [name for name, _ in reader.elements if name in ("script", "style")] == [
        "style",
        "script",
    ]
    assert reader.of("img") == []
    assert not [a for _, attributes in reader.elements for a in attributes if a.startswith("on")]
    assert HOSTILE in "".join(reader.text)


def test_nothing_is_loaded_from_anywhere(page: ModuleType) -> None:
    reader = Reader(whole(page))
    for name, attributes in reader.elements:
        assert name not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    policy = [a["content"] for a in reader.of("meta") if a.get("http-equiv")]
    assert len(policy) == 1
    assert (policy[0] or "").startswith("default-src 'none';")
    style = whole(page).partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_every_link_leads_to_a_section(page: ModuleType) -> None:
    reader = Reader(whole(page))
    targets = {a.get("id") for _, a in reader.elements}
    links = [(a["href"] or "")[1:] for a in reader.of("a")]
    assert "checks" in links
    assert set(links) <= targets


def test_the_verdict_comes_first_and_everything_is_there(page: ModuleType) -> None:
    reader = Reader(whole(page))
    text = " ".join(reader.text)
    for word in (
        "Healthy",
        support.DIGEST,
        "517.3 MB",
        "2.06 GB",
        "no TPU found",
        "static.closure",
        "The base drifted.",
        support.IMAGE["run_line"],
        "import.cold",
        "not run: in use",
        "libtpu 0.0.52",
        "2.13.0+cpu",
        "baked",
    ):
        assert word in text
    assert text.index("Healthy") < text.index("static.closure")


def test_a_status_is_never_colour_alone(page: ModuleType) -> None:
    for status in ("passed", "failed", "warning", "not run"):
        shown = page.mark(status)
        assert status in shown
        assert "<svg" in shown
    assert len({page.mark(s).partition("</svg>")[0] for s in ("passed", "failed", "warning")}) == 3


def test_a_failed_check_is_open_and_comes_first(page: ModuleType) -> None:
    reader = Reader(page.render(support.health("unhealthy", 1)))
    checks = [a for a in reader.of("details") if "data-status" in a]
    assert checks[0]["data-status"] == "failed"
    assert "open" in checks[0]
    assert all("open" not in a for a in checks[1:])
    assert "Unhealthy" in " ".join(reader.text)
    assert "1 check failed: import.torch." in " ".join(reader.text)
    # its heading says what is so, and below stands what should be
    words = " ".join(" ".join(reader.text).split())
    assert "import.torch undefined symbol: x import" in words
    assert "Expected import.torch holds Remedy ./forge bake" in words
    assert "static.closure static.closure holds" in words


def test_a_warning_is_no_failure(page: ModuleType) -> None:
    data = support.health()
    data["checks"].append(support.check("static.pip", "static", "failed", severity="warning"))
    assert page.judge(data) == {
        "word": "healthy",
        "why": "2 checks passed, 1 warning. Highest tier reached: import.",
    }


def test_health_alone_and_no_health_at_all(page: ModuleType) -> None:
    alone = " ".join(Reader(page.render(support.health())).text)
    assert "Healthy" in alone
    assert "Run it" not in alone
    nothing = page.render(None, image=support.IMAGE).partition("<main>")[2].partition("<script>")[0]
    assert nothing.count("</svg>not run") == 5
    assert nothing.count("The health suite has not run.") == 5
    assert "passed" not in nothing


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0.0412, "41.2 ms"), (4.25, "4.25 s"), (59.94, "59.9 s"), (185, "3 min 05 s")],
)
def test_times_for_people(page: ModuleType, value: object, shown: str) -> None:
    assert page.seconds(value) == shown


def test_damaged_data_still_makes_a_page(page: ModuleType) -> None:
    odd = {"checks": [{}, "x", None], "tiers": [], "packages": [{}], "host": 3}
    strange = {"verdict": "splendid"}
    for text in (
        page.render(odd),
        page.render(strange, bench={"measurements": [{}]}, image={"layers": 1}),
    ):
        assert "Not judged: an environment that is no tpuforge image" in Reader(text).text
