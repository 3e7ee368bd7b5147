"""What the tests of all verbs share: their modules and parsers."""

from __future__ import annotations

import argparse
import ast
import importlib

import pytest

from tpuforge import verb as verb_module
from tpuforge.paths import ROOT


def _modules() -> dict[str, str]:
    found = {}
    for node in ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            call = next(part for part in ast.walk(node) if isinstance(part, ast.Call))
            found[node.name] = str(ast.literal_eval(call.args[1]))
    return found


MODULES = _modules()
"""The module of each verb, as noxfile.py runs it."""
PARSED = sorted(MODULES.keys() - {"tests"})
"""The verbs with arguments of their own; ``tests`` hands them to pytest."""


def parser(verb: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The verb's parser, caught on its way."""
    caught: list[argparse.ArgumentParser] = []
    module = importlib.import_module(MODULES[verb])
    with monkeypatch.context() as patch:
        for place in (module, verb_module):
            if hasattr(place, "run_verb"):
                patch.setattr(
                    place, "run_verb", lambda _, made, *__, **___: caught.append(made) or 0
                )
        module.main([])
    return caught[0]
