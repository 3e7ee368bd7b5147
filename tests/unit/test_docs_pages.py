"""The pages: what they tell people to type is there, and so is what they link to."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from tpuforge.paths import ROOT
from verb_support import MODULES, PARSED, parser

DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
_COMMAND = re.compile(r"\./forge (\w+)((?:[^`\n]|\\?\n(?= {8,}))*)")
_OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]*|-[a-zA-Z])\b")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
# what is no verb, and stands where one does
_FOREIGN = {"help", "VERB"}


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parsers() -> dict[str, argparse.ArgumentParser]:
    with pytest.MonkeyPatch.context() as patch:
        return {verb: parser(verb, patch) for verb in PARSED}


@pytest.fixture(scope="module")
def options(parsers: dict[str, argparse.ArgumentParser]) -> dict[str, set[str]]:
    """The options of each verb."""
    return {verb: set(made._option_string_actions) for verb, made in parsers.items()}


def test_the_help_of_a_verb_names_its_page(parsers: dict[str, argparse.ArgumentParser]) -> None:
    bare = {verb for verb, made in parsers.items() if f"docs/{verb}.md" not in made.format_help()}
    assert bare == {"lint"}


@pytest.mark.parametrize("what", [_COMMAND, _OPTION, _HEADING, _LINK])
def test_what_is_looked_for_is_found(what: re.Pattern[str]) -> None:
    # or the tests below would prove nothing: a page may have none
    assert sum(len(what.findall(read(path))) for path in PAGES) > 100


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_commands_of_a_page_can_be_typed(path: Path, options: dict[str, set[str]]) -> None:
    for verb, rest in _COMMAND.findall(read(path)):
        assert verb in MODULES.keys() | _FOREIGN, f"{path.name}: ./forge {verb}"
        if verb in options:
            words = re.split(r"[|;#&]|, | \(", rest)[0]
            unknown = set(_OPTION.findall(words)) - options[verb]
            assert not unknown, f"{path.name}: ./forge {verb}{rest}"


@pytest.mark.parametrize("verb", PARSED)
def test_every_option_of_a_verb_is_on_its_page(verb: str, options: dict[str, set[str]]) -> None:
    text = read(DOCS / f"{verb}.md") if verb != "lint" else read(ROOT / "CONTRIBUTING.md")
    told = set(_OPTION.findall(text))
    # what all have is told once, on the page of all pages
    assert not options[verb] - told - {"-h", "--help", "--json"}


def test_every_verb_is_in_both_tables() -> None:
    for verb in MODULES:
        assert f"`{verb}`" in read(ROOT / "README.md")
        assert f"`{verb}`" in read(DOCS / "README.md")


def anchors(text: str) -> set[str]:
    """The places of a page that a link can name, as GitHub calls them."""
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", one) for one in _HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in plain}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_links_of_a_page_lead_somewhere(path: Path) -> None:
    for link in _LINK.findall(read(path)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        there = path.parent / name if name else path
        assert there.exists(), f"{path.name}: {link}"
        if anchor:
            assert anchor in anchors(read(there)), f"{path.name}: {link}"


def test_every_page_is_in_the_table_of_pages() -> None:
    linked = {link.partition("#")[0] for link in _LINK.findall(read(DOCS / "README.md"))}
    assert {path.name for path in DOCS.glob("*.md")} - linked == {"README.md"}
