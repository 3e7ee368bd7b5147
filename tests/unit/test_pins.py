"""The reader of the pins: what it gives, and what it refuses by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpuforge.errors import Exit, ForgeError
from tpuforge.pins import PINS_FILE, load

TEXT = PINS_FILE.read_text(encoding="utf-8")


def test_real_pins_go_together() -> None:
    pins = load()
    assert pins.torch.full == f"{pins.torch.version}+cpu"
    assert {name: build.full for name, build in pins.cpu_builds.items()} == {
        "torch": pins.torch.full,
        "torchvision": f"{pins.torchvision.version}+cpu",
    }
    assert pins.default_python in pins.pythons
    assert pins.python(None) == pins.default_python
    assert pins.suites[pins.default_python] in pins.debian


def test_flavours_of_the_pins_are_the_inputs_and_their_locks_are_there() -> None:
    pins = load()
    folder = PINS_FILE.parent
    assert set(pins.flavours) == {path.stem for path in folder.glob("*.in")}
    locks = {
        f"{flavour.name}-py{python.replace('.', '')}.txt"
        for flavour in pins.flavours.values()
        for python in flavour.pythons
    }
    assert locks == {path.name for path in folder.glob("*-py3*.txt")}
    names = list(pins.flavours)
    assert all(names.index(f.on) < names.index(f.name) for f in pins.flavours.values() if f.on)


def test_unsupported_python_is_refused() -> None:
    with pytest.raises(ForgeError, match=r"Python 3\.9 is not supported") as caught:
        load().python("3.9")
    assert caught.value.exit_code == Exit.CANNOT


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('cpu"\n# The one', 'cpu"\ncolour = 1\n# The one', "torch.colour is an unknown key"),
        ("schema = 1", "schema = 1\nsurprise = 2", "surprise is an unknown key"),
        ("schema = 1", "schema = 9", "schema is 9"),
        ('cpu"\n# The one', 'cu130"\n# The one', "torch.local is cu130"),
        ('"0.28.0"\nlocal = "cpu"', '"0.28.0"\nlocal = "cu130"', "torchvision.local is cu130"),
        ('version = "0.28.0"', 'version = "0.28.0+cpu"', "torchvision.version is 0.28.0+cpu"),
        (
            'version = "0.28.0"',
            'version = "0.28.0"\nindex = "a"',
            "torchvision.index is an unknown",
        ),
        ('version = "2.13.0"', 'version = "2.99.0"', "torch.version is 2.99.0"),
        ('version = "2.13.0"', 'version = "2.13.0+cpu"', "torch.version is 2.13.0+cpu"),
        ('version = "2.13.0"', 'version = "two"', "torch.version is 'two'"),
        ('version = "0.0.52"', 'version = "0.0.1"', "libtpu.version is 0.0.1"),
        ('"3.12" = "0.0.50"', '"3.12" = "0.0.1"', 'libtpu.python."3.12" is 0.0.1'),
        ('"3.12" = "0.0.50"', '"3.9" = "0.0.50"', 'libtpu.python."3.9" is 3.9'),
        ('"3.12" = "0.0.50"', '"3.12" = "new"', "libtpu.python.3.12 is 'new'"),
        ('sha256 = "22e7', 'sha256 = "XXe7', "bazelisk.sha256 is"),
        ("epoch = 1795996800", 'epoch = "yesterday"', "epoch is 'yesterday'"),
        ("epoch = 1795996800", "epoch = -1", "epoch is -1"),
        ('2026-11-30T00:00:00Z"\nplatform', '2926-11-30T00:00:00Z"\nplatform', "cutoff is 2926"),
        ('2026-11-30T00:00:00Z"\nplatform', '2026-11-30"\nplatform', "resolver.cutoff is"),
        ('platform = "manylinux_2_31_x86_64"', 'platform = "win_amd64"', "resolver.platform is"),
        ('"3.11" = "bookworm"', '"3.11" = "trixie"', "is trixie"),
        ('"3.11" = "bookworm"', '"3.8" = "bookworm"', "is 3.8"),
        ('version = "0.0.52"', "", "libtpu.version is missing"),
        ('torch = ">=2.11.0,<=2.15.0"', 'torch = "about 2"', "torch_tpu.torch is"),
        ("[torch]", "[torch", "is not TOML"),
        ('flavour = "runtime"', 'flavour = "ghost"', "default.flavour is ghost"),
        ("[flavour.smoke]", '[flavour.smoke]\non = "ghost"', "flavour.smoke.on is ghost"),
        ("[flavour.smoke]", '[flavour.smoke]\non = "train"', "flavour.smoke.on is train"),
        ("[flavour.smoke]", "[flavour.smoke]\napart = true", "flavour.smoke.apart is true"),
        ("apart = true", 'apart = "yes"', "flavour.serve.apart is 'yes'"),
        ("[flavour.smoke]", "[flavour.smoke]\nof = 1", "flavour.smoke.of is an unknown key"),
        (
            '[flavour.smoke]\npythons = ["3.11"',
            '[flavour.smoke]\npythons = ["3.10"',
            "flavour.smoke.pythons is 3.10",
        ),
        (
            '[flavour.runtime]\npythons = ["3.11", ',
            "[flavour.runtime]\npythons = [",
            "flavour.dev.pythons is 3.11",
        ),
    ],
)
def test_bad_pin_is_refused_by_name(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert TEXT.count(old) == 1
    path = tmp_path / "pins.toml"
    path.write_text(TEXT.replace(old, new), encoding="utf-8")
    with pytest.raises(ForgeError) as caught:
        load(path)
    assert words in caught.value.found
    assert caught.value.expected
    assert caught.value.exit_code == Exit.FAULT


def test_missing_pins_are_named(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="is not there") as caught:
        load(tmp_path / "pins.toml")
    assert caught.value.exit_code == Exit.CANNOT
