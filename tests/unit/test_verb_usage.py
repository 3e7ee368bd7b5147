"""What every verb does with a command line that is wrong: one message, exit code 2, and a mend."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import smoke_host_support as support
from tpuforge.errors import ForgeError
from tpuforge.paths import ROOT
from verb_support import MODULES, PARSED, parser

SOURCE = ROOT / "src" / "tpuforge"


NEEDED = {
    "model": [f"{__file__}:build"],
    "pull": ["registry.invalid/name"],
    "push": ["--to", "registry.invalid/name"],
}
"""What a verb has to be given before it looks at anything else."""


def main(verb: str) -> Callable[[Sequence[str]], int]:
    return importlib.import_module(MODULES[verb]).main  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TPUFORGE_OUT", str(tmp_path / "out"))
    # nothing here may need an engine, so none is to be found
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    return tmp_path / "out"


def refused(verb: str, words: Sequence[str], capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run a verb that is to refuse its arguments, and hold its two ways of saying so together."""
    assert main(verb)(words) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert main(verb)([*words, "--json"]) == 2
    told = capfd.readouterr()
    record: dict[str, Any] = json.loads(told.out)
    error: dict[str, Any] = record["error"]
    assert record["verb"] == verb
    assert record["status"] == "failed"
    assert record["exit_code"] == error["exit_code"] == 2
    assert error["found"] and error["expected"] and error["mend"]
    for err in (shown.err, told.err):
        assert f"{verb}: {error['found']}" in err
        assert f"  mend:     {error['mend']}" in err
        assert "Traceback" not in err
    return error


@pytest.mark.parametrize("verb", PARSED)
def test_an_option_that_does_not_exist(
    verb: str, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    error = refused(verb, [*NEEDED.get(verb, []), "--no-such-option"], capfd)
    assert "--no-such-option" in error["found"] or "required" in error["found"]
    assert error["expected"].startswith(f"./forge {verb} ")
    assert error["mend"] == f"./forge {verb} --help"
    # nothing was begun: what the run before this one left is not touched
    assert not out.exists()


def test_what_is_no_verb_is_named_by_what_starts_it(capfd: pytest.CaptureFixture[str]) -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    modules = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        for path, text in sources.items()
        if "__main__" in text and re.search(r"^from tpuforge.verb import", text, re.MULTILINE)
    }
    others = sorted(modules - set(MODULES.values()))
    assert others == ["tpuforge.build.bazelisk", "tpuforge.smoke.simulator"]
    for name in others:
        assert importlib.import_module(name).main(["--no-such-option"]) == 2
        assert f"mend:     .venv/bin/python -m {name} --help\n" in capfd.readouterr().err


@pytest.mark.parametrize("verb", PARSED)
def test_an_option_whose_name_is_cut_short(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = parser(verb, monkeypatch)
    needed = NEEDED.get(verb, [])
    for option in made._option_string_actions.keys() - {"-h"}:
        short = option[:-1]
        if len(short) > 2 and not {short, option} & set(needed):
            with pytest.raises(ForgeError, match=f"unrecognized arguments: {short}$"):
                made.parse_args([*needed, short])


def test_no_program_takes_an_option_whose_name_is_cut_short() -> None:
    """Those that are no verbs too: in an image, and on a TPU host."""
    images = ROOT / "images"
    programs = [images / "tpu-vm" / name for name in ("gke-manifest", "tpu-run")]
    for folder in (SOURCE, ROOT / "smoke", images / "files" / "root"):
        programs += folder.rglob("*.py")
    texts = {path: path.read_text(encoding="utf-8") for path in programs}
    made = {
        f"{path.relative_to(ROOT)}:{node.lineno}": {word.arg for word in node.keywords}
        for path, text in texts.items()
        if "import argparse" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("argparse.ArgumentParser", "_Parser")
    }
    assert len(made) > 8
    assert [place for place, words in made.items() if "allow_abbrev" not in words] == []


@pytest.mark.parametrize("verb", PARSED)
def test_an_option_without_its_value(
    verb: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for action in parser(verb, monkeypatch)._actions:
        if action.option_strings and action.nargs in (None, "+"):
            error = refused(verb, [*NEEDED.get(verb, []), action.option_strings[-1]], capfd)
            assert "expected" in error["found"]
            assert error["mend"] == f"./forge {verb} --help"


@pytest.mark.parametrize("verb", PARSED)
def test_an_image_a_python_or_a_flavour_that_does_not_exist(
    verb: str, out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if "image-ref" in str(parser(verb, monkeypatch).format_help()) or verb == "report":
        support.fill(out)
    options = parser(verb, monkeypatch)._option_string_actions
    for option, value in (("--image", "nonsense"), ("--python", "9.9"), ("--flavour", "nonsense")):
        if option in options:
            error = refused(verb, [*NEEDED.get(verb, []), option, value], capfd)
            unbaked = option == "--flavour" and "was not baked here" in error["found"]
            assert unbaked or value in f"{error['found']}, {error['expected']}"


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("audit_wheel", ["no/x.whl"]),
        ("bake", ["--wheel", "no/x.whl"]),
        ("bake", ["--base", "nonsense"]),
        ("base", ["--suite", "nonsense"]),
        ("bench", ["--samples", "0"]),
        ("build_wheel", ["--source", "no"]),
        ("export", ["--form", "nonsense"]),
        ("fetch_wheel", ["--offline", "--source", "no"]),
        ("lock", ["--upgrade", "nonsense"]),
        ("model", ["no.py:build"]),
        ("model", ["--config", "no"]),
        ("operators", ["--compare", "no"]),
        ("pull", ["nonsense"]),
        ("pull", [f"localhost:9/x@sha256:{'0' * 64}", "--ca", "no"]),
        ("reproduce", ["--times", "0"]),
        ("reproduce", ["--against", "nonsense"]),
        ("scan", ["--accepted", "."]),
        ("scan", ["--accepted", "no"]),
        ("smoke", ["--tier", "nonsense"]),
        ("smoke", ["--jobs", "0"]),
        ("verify", ["nonsense"]),
    ],
)
def test_a_value_that_names_nothing(
    verb: str, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    refused(verb, words, capfd)


OTHERWISE = re.compile(rf"(?<![./\w-])(?:forge|nox -s) (?:{'|'.join(MODULES)})\b")


def spoken() -> list[tuple[str, str]]:
    """Every text in the programs that a person may be shown, with its place; and the pages."""
    programs = [ROOT / "forge", ROOT / "noxfile.py", *SOURCE.rglob("*.py")]
    found = [
        (f"{path.name}:{node.lineno}", node.value)
        for path in programs
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    return found + [(path.name, path.read_text(encoding="utf-8")) for path in pages]


def test_the_launcher_is_named_one_way() -> None:
    texts = spoken()
    assert sum("./forge " in text for _, text in texts) > 200
    said = [(place, found) for place, text in texts for found in OTHERWISE.findall(text)]
    # the first line of a lock says what wrote it; the page of all pages, how nox is given words
    known = {("inputs.py", "forge lock"), ("README.md", "nox -s bake")}
    assert {(place.partition(":")[0], found) for place, found in said} == known


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("build_wheel", ["--dry-run"]),
        ("engine", ["--stop"]),
        ("export", ["--form", "constraints"]),
        ("images", []),
        ("report", []),
        ("smoke", ["--image", "runtime"]),
    ],
)
def test_json_stands_alone_on_standard_output(
    verb: str, words: list[str], out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of runs that begin, however they end: a good one, one without a verdict, one that fails."""
    support.fill(out, health_data=support.health())
    code = main(verb)([*words, "--json"])
    record = json.loads(capfd.readouterr().out)
    assert record["verb"] == verb
    assert record["exit_code"] == code
