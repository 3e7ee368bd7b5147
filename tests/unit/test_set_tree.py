"""The tree of images as the bake file declares it, and what its lint finds."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from process_support import call
from tpuforge import tree
from tpuforge.errors import ForgeError
from tpuforge.paths import ROOT

SMALL = """# a comment with "quotes" and a brace {
variable "PYTHON" {
  default = "3.11" // said once
}

target "_any" {
  args = { PYTHON = PYTHON, KIND = "plain" }
  contexts = {
    base = "x"
  }
  labels = {
    "org.opencontainers.image.title"       = "A title"
    "org.opencontainers.image.description" = "what it is for"
    "io.tpuforge.budget.compressed"        = "20MB"
    "io.tpuforge.budget.unpacked"          = "40MB"
  }
}

target "one" {
  inherits = ["_any",]
  args = { KIND = "other" }
  labels = { "org.opencontainers.image.title" = "One" }
}
"""
DOCKERFILE = "ARG PYTHON=3.11\nFROM base AS made\nARG KIND\nFROM made AS image\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small tree that is in order."""
    (tmp_path / tree.FILE).write_text(SMALL)
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    return tmp_path


def edit(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))


def test_what_is_inherited_is_merged(folder: Path) -> None:
    assert tree.targets(folder) == {
        "one": {
            "args": {"PYTHON": "PYTHON", "KIND": "other"},
            "contexts": {"base": "x"},
            "labels": {
                "org.opencontainers.image.title": "One",
                "org.opencontainers.image.description": "what it is for",
                "io.tpuforge.budget.compressed": "20MB",
                "io.tpuforge.budget.unpacked": "40MB",
            },
        }
    }
    (one,) = tree.images(folder).values()
    assert (one.title, one.compressed, one.unpacked) == ("One", 20_000_000, 40_000_000)


@pytest.mark.parametrize(
    ("name", "old", "new", "found"),
    [
        (
            "Dockerfile",
            "ARG KIND\n",
            "ARG KIND MORE=x\n",
            "Dockerfile: the build argument MORE is not in the target one of docker-bake.hcl",
        ),
        (
            "Dockerfile",
            "ARG KIND\n",
            "# ARG KIND\n",
            "docker-bake.hcl: the target one gives the build argument KIND, which Dockerfile does "
            "not have",
        ),
        (
            "Dockerfile",
            "FROM made AS image\n",
            "FROM made AS image\nRUN \\\n    --mount=type=bind,from=wheels,target=/w x\n",
            "Dockerfile: wheels is neither a stage nor a context of docker-bake.hcl",
        ),
        (
            "Dockerfile",
            "FROM base AS",
            "FROM scratch AS",
            "docker-bake.hcl: the target one has the context base, which Dockerfile does not use",
        ),
    ],
)
def test_what_only_one_side_knows_is_a_fault(
    folder: Path, name: str, old: str, new: str, found: str
) -> None:
    assert tree.faults(folder) == []
    edit(folder, name, old, new)
    assert tree.faults(folder) == [found]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('inherits = ["_any",]', 'inherits = ["_none"]', "one → _none cannot be inherited"),
        ('inherits = ["_any",]', 'inherits = ["one"]', "one → one cannot be inherited"),
        ('"20MB"', '"20 MB"', "is '20 MB' instead of a size such as 520MB"),
        ('"io.tpuforge.budget.unpacked"', '"x"', "lacks a label: 'io.tpuforge.budget.unpacked'"),
        ("= PYTHON,", "= upper(PYTHON),", "line 7: '(PYTHON), KIND = \"pl' is more than"),
        ('default = "3.11"', "default =", "where { or [ or"),
    ],
)
def test_a_bad_bake_file_is_refused_with_its_place(
    folder: Path, old: str, new: str, found: str
) -> None:
    edit(folder, tree.FILE, old, new)
    with pytest.raises(ForgeError) as caught:
        tree.images(folder)
    if "where" not in found:
        assert found in caught.value.found
    assert caught.value.found.startswith(tree.FILE)
    assert caught.value.exit_code == 1


def test_the_real_tree_is_in_order() -> None:
    assert tree.faults(ROOT / "images") == []
    images = tree.images(ROOT / "images")
    children = [one.name for one in images.values() if one.flavour and one.flavour == one.name]
    assert children == ["pallas", "train", "serve", "dev"]
    assert all(one.compressed < one.unpacked for one in images.values())


def test_the_lint_ends_with_a_fault(tmp_path: Path) -> None:
    """The module as the lint runs it, over a checkout with an argument that nobody declares."""
    for name in ("images", "src"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skip, symlinks=True)
    command = [sys.executable, "-m", "tpuforge.tree"]
    env = {"PYTHONPATH": str(tmp_path / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = call(command, env=env)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
    edit(tmp_path / "images", "Dockerfile", "ARG STACK=runtime\n", "ARG STACK=runtime\nARG MORE\n")
    done = call(command, env=env)
    assert done.returncode == 1
    assert "the build argument MORE is not in the target runtime" in done.stdout
