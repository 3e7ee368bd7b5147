"""The settings of pip and uv that an image is baked with, and the scripts in it."""

from __future__ import annotations

import configparser
import re
import stat
import tomllib

import pytest

from bake_support import ROOT
from tpuforge.images import context, guard
from tpuforge.pins import load

PINS = load()
MADE = guard.files("2.13.0+cpu", PINS)
FILES = ROOT / "images" / "files" / "root"


def constraints() -> list[str]:
    return [line for line in MADE[guard.CONSTRAINTS].splitlines() if not line.startswith("#")]


def test_torch_and_its_kin_are_held_to_cpu_builds() -> None:
    assert constraints()[0] == "torch==2.13.0+cpu"
    assert len(constraints()) == len(PINS.cpu_builds)
    assert all(line.endswith("+cpu") for line in constraints())


def test_the_image_s_own_torch_counts_not_the_pins() -> None:
    text = guard.files("2.14.0+cpu", PINS)[guard.CONSTRAINTS]
    assert "torch==2.14.0+cpu\n" in text
    assert "torch==2.13.0" not in text


def test_pip_is_told_the_constraint_and_the_index() -> None:
    settings = configparser.ConfigParser()
    settings.read_string(MADE["/etc/pip.conf"])
    assert settings["global"]["constraint"] == guard.CONSTRAINTS
    # beside the main index, which a user's own setting may name
    assert settings["global"]["extra-index-url"] == PINS.torch.index
    assert "index-url" not in settings["global"]


def test_uv_is_told_the_same() -> None:
    settings = tomllib.loads(MADE["/etc/uv/uv.toml"])
    assert settings["constraint-dependencies"] == constraints()
    assert settings["pip"]["torch-backend"] == "cpu"


def test_the_index_stands_in_the_pins_alone() -> None:
    host = re.sub(r"https://|/.*", "", PINS.torch.index)
    for path in context.tree(ROOT / "images"):
        if "tpu-vm" not in path.parts and path.name != "plain.Dockerfile":
            assert host not in path.read_text(encoding="utf-8"), path


def test_an_edit_of_the_guard_bakes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    target = context.Target("runtime", "3.11", "runtime", "tpuforge/runtime:1")
    before = context.read_inputs(target, PINS).parts["the bake itself"]
    digest = context.sha256_file
    monkeypatch.setattr(
        context,
        "sha256_file",
        lambda path, *more: "edited" if path.name == "guard.py" else digest(path, *more),
    )
    assert context.read_inputs(target, PINS).parts["the bake itself"] != before


@pytest.mark.parametrize("name", ["entrypoint", "health", "bench", "versions"])
def test_commands_can_be_run(name: str) -> None:
    mode = (FILES / "usr/local/bin" / name).stat().st_mode
    assert mode & stat.S_IXUSR


def test_what_the_dockerfile_ends_with() -> None:
    text = (ROOT / "images" / "Dockerfile").read_text(encoding="utf-8")
    tail = text[text.rindex("\nFROM ") :]
    assert 'ENTRYPOINT ["/usr/bin/tini", "-s", "-g", "--", "/usr/local/bin/entrypoint"]' in tail
    assert "USER 1000:1000" in tail
    for name in ("PIP_CONSTRAINT", "UV_CONSTRAINT"):
        assert f"{name}={guard.CONSTRAINTS}" in tail
    assert f"UV_TORCH_BACKEND={PINS.torch.local}" in tail
    # one for each container would be left behind
    assert "VOLUME" not in re.sub(r"^#.*", "", tail, flags=re.MULTILINE)
