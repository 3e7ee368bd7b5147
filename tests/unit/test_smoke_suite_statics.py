"""Every static check of the image's files and environment must be able to fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from smoke import statics
from smoke.place import Place

from smoke_suite_support import COMMIT, image_home, lock_of, torch_tpu

PRELOAD = "/usr/lib/libtcmalloc_minimal.so.4"
CONSTRAINT = "/opt/tpuforge/constraints.txt"


@pytest.fixture
def image(tmp_path: Path) -> Place:
    """A healthy image, as far as its files go."""
    root = tmp_path / "root"
    home = root / "opt/tpuforge"
    lock = lock_of(torch="2.13.0+cpu", torch_tpu="0.2.0", libtpu="0.0.52")
    image_home(home, lock)
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/sh\ntpu:x:1000:1000::/home/tpu:/bin/sh\n"
    )
    (root / "etc/pip.conf").write_text(f"[global]\nconstraint = {CONSTRAINT}\n")
    (root / "home/tpu").mkdir(parents=True)
    (root / "usr/lib").mkdir(parents=True)
    library = root / PRELOAD.lstrip("/")
    library.write_bytes(b"")
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 fe:00 1 {library}\n")
    environ = {
        "LD_PRELOAD": PRELOAD,
        "PIP_CONSTRAINT": CONSTRAINT,
        "UV_CONSTRAINT": CONSTRAINT,
    }
    return Place(tmp_path / "site", root, home, environ, 1000, maps)


def _facts(place: Place) -> dict[str, Any]:
    facts = place.facts
    assert facts is not None
    return facts


def _with(place: Place, **environ: str) -> Place:
    merged = {**place.environ, **environ}
    return Place(place.site, place.root, place.home, merged, place.uid, place.maps)


def test_a_healthy_image_has_no_problem(image: Place) -> None:
    facts = _facts(image)
    torch_tpu(image.site)
    assert statics.lock_problems(image, facts) == []
    assert statics.torch_tpu_problems(image.site, COMMIT) == []
    assert statics.account_problems(image, facts) == []
    assert statics.preload_problems(image) == []
    assert statics.guard_problems(image, facts) == []
    assert statics.guard_env_problems(image, facts) == []
    assert statics.leftovers(image) == []


def test_a_lock_that_was_edited_or_lost(image: Place) -> None:
    facts = _facts(image)
    lock = image.home / "lock.txt"
    lock.write_text(lock.read_text().replace("0.0.52", "0.0.51"))
    problems = statics.lock_problems(image, facts)
    assert "lock.txt has the digest" in problems[0]
    assert problems[1] == "image.json says libtpu 0.0.52, the lock 0.0.51"
    lock.unlink()
    assert "is not there" in statics.lock_problems(image, facts)[0]


def test_facts_that_are_damaged(image: Place) -> None:
    (image.home / "image.json").write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object"):
        _ = image.facts


def test_torch_tpu_is_missing(image: Place) -> None:
    assert statics.torch_tpu_problems(image.site, COMMIT) == ["torch_tpu is not installed"]


def test_another_xla_commit(image: Place) -> None:
    torch_tpu(image.site)
    other = "0" * 40
    problems = statics.torch_tpu_problems(image.site, other)
    assert problems == [f"it was built from XLA {COMMIT}, the image says {other}"]
    (image.site / "torch_tpu/include/XLA_COMMIT").write_text("unknown")
    assert "instead of a commit" in statics.torch_tpu_problems(image.site, COMMIT)[0]
    (image.site / "torch_tpu/include/XLA_COMMIT").unlink()
    assert "instead of a commit" in statics.torch_tpu_problems(image.site, None)[0]


def test_two_xla_and_a_bundled_torch(image: Place) -> None:
    torch_tpu(image.site)
    (image.site / "torch_tpu/lib").mkdir()
    (image.site / "torch_tpu/lib/libxla_base.so").write_bytes(b"")
    (image.site / "torch_tpu/lib/libtorch_cpu.so").write_bytes(b"")
    (image.site / "torch_tpu/lib/libc10.so").write_bytes(b"")
    problems = statics.torch_tpu_problems(image.site, COMMIT)
    assert "it has 2 libxla_base.so instead of one" in problems[0]
    assert problems[1:] == [
        "it brings its own torch_tpu/lib/libc10.so",
        "it brings its own torch_tpu/lib/libtorch_cpu.so",
    ]


def test_no_xla(image: Place) -> None:
    torch_tpu(image.site)
    (image.site / "torch_tpu/csrc/common/libxla_base.so").unlink()
    assert "it has 0 libxla_base.so" in statics.torch_tpu_problems(image.site, COMMIT)[0]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"uid": 0}, "the image's own user is root"),
        ({"user": "root", "uid": 0}, "the image's own user is root"),
        ({"user": "nobody"}, "/etc/passwd has no user nobody"),
        ({"uid": 1001}, "gives tpu the number 1000, not 1001"),
    ],
)
def test_an_account_that_is_wrong(image: Place, facts: dict[str, Any], said: str) -> None:
    assert said in "; ".join(statics.account_problems(image, _facts(image) | facts))


def test_an_account_without_a_home(image: Place) -> None:
    (image.root / "home/tpu").rmdir()
    problems = statics.account_problems(image, _facts(image))
    assert problems == ["the home of tpu, /home/tpu, is not there"]


def test_a_preload_that_is_missing_or_not_loaded(image: Place) -> None:
    wrong = _with(image, LD_PRELOAD=f"{PRELOAD}:/usr/lib/gone.so")
    assert statics.preload_problems(wrong) == [
        "LD_PRELOAD names /usr/lib/gone.so, which is not there"
    ]
    image.maps.write_text("")
    assert "which is not loaded" in statics.preload_problems(image)[0]
    assert statics.preload_problems(_with(image, LD_PRELOAD="")) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("numpy==2\n", "says nothing about torch"),
        ("torch==2.13.0\n", "not to a +cpu build"),
        ("torch==2.12.0+cpu\n", "the image has 2.13.0+cpu"),
        ("", "says nothing about torch"),
    ],
)
def test_a_constraint_that_holds_nothing(image: Place, text: str, said: str) -> None:
    (image.home / "constraints.txt").write_text(text)
    assert said in statics.guard_problems(image, _facts(image))[0]


def test_no_constraint_and_no_pip_conf(image: Place) -> None:
    (image.home / "constraints.txt").unlink()
    (image.root / "etc/pip.conf").unlink()
    problems = statics.guard_problems(image, _facts(image))
    assert "is not there" in problems[0]
    assert problems[1] == f"/etc/pip.conf does not name {CONSTRAINT}"


def test_a_users_own_constraint_is_noticed(image: Place) -> None:
    (image.root / "mine.txt").write_text("numpy<3\n")
    problems = statics.guard_env_problems(_with(image, PIP_CONSTRAINT="/mine.txt"), _facts(image))
    assert len(problems) == 1
    assert problems[0].startswith("PIP_CONSTRAINT was replaced")
    both = _with(image, PIP_CONSTRAINT=f"/mine.txt {CONSTRAINT}")
    assert statics.guard_env_problems(both, _facts(image)) == []
    unset = _with(image, UV_CONSTRAINT="")
    assert statics.guard_env_problems(unset, _facts(image)) == ["UV_CONSTRAINT is not set"]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("etc/machine-id", "0123456789abcdef0123456789abcdef\n"),
        ("var/lib/dbus/machine-id", "0123456789abcdef0123456789abcdef\n"),
        ("var/lib/apt/lists/mirror_InRelease", "x"),
        ("var/cache/apt/pkgcache.bin", "x"),
        ("var/log/dpkg.log", "x"),
        ("var/cache/ldconfig/aux-cache", "x"),
        ("root/.cache/pip/http/a", "x"),
        ("home/tpu/.cache/pip/http/a", "x"),
    ],
)
def test_a_leftover_is_named(image: Place, path: str, content: str) -> None:
    (image.root / path).parent.mkdir(parents=True, exist_ok=True)
    (image.root / path).write_text(content)
    assert len(statics.leftovers(image)) == 1


def test_an_empty_machine_id_and_a_lock_are_no_leftovers(image: Place) -> None:
    (image.root / "etc/machine-id").write_text("\n")
    (image.root / "var/lib/apt/lists").mkdir(parents=True)
    (image.root / "var/lib/apt/lists/lock").write_text("")
    assert statics.leftovers(image) == []
