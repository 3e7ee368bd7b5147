"""Which images there are, what a child shares with the runtime, and what is told of the set."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import shutil
from pathlib import Path

import pytest

from bake_support import RUNTIME, checkout, lock
from tpuforge import pins as pins_module
from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.images import bake, catalogue, choice, context, oci
from tpuforge.images.context import Target
from tpuforge.paths import sha256_file, write_json
from tpuforge.revision import Revision

__all__ = ["checkout"]

PINS = pins_module.load()
CHILD = {**RUNTIME, "jax==0.10.2": b"jax", "scipy==1.17": b"scipy"}


def child() -> Target:
    return Target("pallas", "3.11", "pallas", context.image_name("pallas", "3.11", PINS))


def chosen(**named: str) -> Target:
    options = argparse.Namespace(**{"image": None, "python": None, "flavour": None} | named)
    return choice.choose(options, PINS)


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ({"image": "nope"}, "there is no image 'nope'"),
        ({"image": "simulator", "python": "3.11"}, "is the same for every Python"),
        ({"image": "builder", "flavour": "runtime"}, "is the same for every Python"),
        ({"image": "base", "flavour": "runtime"}, "the image base holds no wheels"),
        (
            {"image": "pallas", "flavour": "train"},
            "is made from the flavour pallas, not",
        ),
        ({"image": "serve", "python": "3.11"}, "there is no flavour 'serve' for Python 3.11"),
    ],
)
def test_what_cannot_be_meant_is_refused(named: dict[str, str], found: str) -> None:
    with pytest.raises(ForgeError) as caught:
        chosen(**named)
    assert found in caught.value.found
    assert caught.value.exit_code == 2
    assert caught.value.mend


def test_every_image_of_the_tree_can_be_named() -> None:
    made = list(choice.members(PINS))
    names = [choice.member_target(one, PINS).name for one in made]
    assert len(set(names)) == len(names) == len({one.slug for one in made})
    slugs = {one.slug for one in made}
    assert {"base-py311", "runtime-py313", "pallas-py311", "serve-py312", "builder"} <= slugs
    assert "serve-py311" not in slugs
    for one in made:
        target = choice.member_target(one, PINS)
        assert target.slug == one.slug
        assert bake.recipe(target).run_line(target.name)


def test_a_child_has_the_groups_of_the_runtime_and_one_more(checkout: Path) -> None:
    lock(checkout, "pallas", CHILD)
    runtime = context.read_inputs(dataclasses.replace(child(), flavour="runtime"), PINS)
    inputs = context.read_inputs(child(), PINS)
    assert context.MORE not in runtime.groups
    assert {name: inputs.groups[name] for name in runtime.groups} == runtime.groups
    assert [one.name for one in inputs.groups[context.MORE]] == ["jax", "scipy"]
    with Progress("bake", quiet=True) as progress:
        context.prepare(child(), inputs, PINS, progress)
        folders = {path.name for path in (child().work / "wheels").iterdir()}
        assert folders == set(inputs.groups)
        # the same image without its further packages leaves nothing of them to BuildKit
        context.prepare(child(), runtime, PINS, progress)
    assert not (child().work / "wheels" / context.MORE).exists()


@pytest.mark.parametrize("changed", ["numpy==2.4.7", "numpy==2.4.6"])
def test_a_child_that_changes_the_runtime_is_refused(checkout: Path, changed: str) -> None:
    packages = {name: data for name, data in CHILD.items() if not name.startswith("numpy")}
    lock(checkout, "pallas", {**packages, changed: b"other bytes"})
    with pytest.raises(ForgeError) as caught:
        context.read_inputs(child(), PINS)
    assert "pallas-py311.txt does not hold runtime-py311.txt unchanged: numpy" in caught.value.found
    assert caught.value.exit_code == 1


NAMES = """[[left_out]]
name = "triton"
flavour = "{flavour}"
by = "xgrammar"
until = {until}
why = "tested"
"""


def test_a_name_is_left_out_of_its_flavour_until_its_day(checkout: Path) -> None:
    lock(checkout, "pallas", CHILD)
    names = checkout / "lock" / "names.toml"
    before = context.read_inputs(child(), PINS).key("b")
    names.write_text(NAMES.format(flavour="serve", until="2999-01-01"))
    assert context.read_inputs(child(), PINS).key("b") == before
    names.write_text(NAMES.format(flavour="pallas", until="2999-01-01"))
    inputs = context.read_inputs(child(), PINS)
    assert inputs.left_out == (("xgrammar", "triton"),)
    assert inputs.key("b") != before
    with Progress("bake", quiet=True) as progress:
        context.prepare(child(), inputs, PINS, progress)
    assert (child().work / "facts" / "left-out").read_text() == "xgrammar triton\n"
    names.write_text(NAMES.format(flavour="pallas", until="2026-01-01"))
    with pytest.raises(ForgeError) as caught:
        context.read_inputs(child(), PINS)
    assert "triton was left out of pallas until 2026-01-01, and that is over" in caught.value.found
    assert caught.value.exit_code == 1


def test_what_is_no_part_of_an_image_does_not_count(checkout: Path) -> None:
    (checkout / "images" / "files" / "build").mkdir(parents=True)
    (checkout / "images" / "files" / "build" / "x.sh").write_text("true\n")
    before = context.recipe_digest("Dockerfile")
    (checkout / "images" / "tpu-vm").mkdir()
    (checkout / "images" / "tpu-vm" / "tpu-run").write_text("x")
    (checkout / "images" / "Dockerfile.builder").write_text("x")
    assert context.recipe_digest("Dockerfile") == before
    (checkout / "images" / "files" / "build" / "x.sh").write_text("false\n")
    assert context.recipe_digest("Dockerfile") != before


def test_what_a_machine_lacks_is_named_torch_first(checkout: Path) -> None:
    lock(checkout, "pallas", CHILD)
    assert choice.lacks(child(), PINS) == ""
    for name in (b"torch", b"scipy"):
        folder = checkout / "out" / "wheelhouse" / hashlib.sha256(name).hexdigest()
        next(folder.glob("*.whl")).unlink()
    assert choice.lacks(child(), PINS) == (
        "no wheel of torch 2.13.0+cpu and 1 more for Python 3.11 in the wheelhouse: "
        "./forge fetch_wheel --python 3.11 --flavour pallas"
    )


def test_the_labels_are_complete_and_hold_nothing_of_the_checkout(checkout: Path) -> None:
    target = Target("runtime", "3.11", "runtime", context.image_name("runtime", "3.11", PINS))
    base = bake.Base("oci-layout://x@sha256:1", "sha256:1", "tpuforge/debian:bookworm", ())
    with Progress("bake", quiet=True) as progress:
        inputs = context.read_inputs(target, PINS)
        job = bake.Job(target, PINS, inputs, {}, base, progress, False, Revision(None))
        labels = bake._described(job)
    kept = {name: labels[f"org.opencontainers.image.{name}"] for name in ("source", "revision")}
    assert kept == {
        "source": PINS.upstream.repository,
        "revision": PINS.upstream.commit or PINS.upstream.ref,
    }
    assert labels["org.opencontainers.image.created"] == "2026-11-30T00:00:00Z"
    assert labels["org.opencontainers.image.base.name"] == "tpuforge/debian:bookworm"
    assert labels["org.opencontainers.image.base.digest"] == "sha256:1"
    assert labels["org.opencontainers.image.version"] == target.name.rpartition(":")[2]
    assert not any(str(checkout) in value for value in labels.values())


def test_the_tables_in_the_pages_are_current() -> None:
    """``./forge images --write`` makes them so."""
    for path, text in catalogue.pages(PINS).items():
        assert path.read_text(encoding="utf-8") == text, path.name


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ForgeError, match="has no place for the table"):
        catalogue.written("# A page\n", ["| a |"], "README.md")


def test_the_set_tells_what_is_baked_and_how_it_was_judged(checkout: Path) -> None:
    lock(checkout, "pallas", CHILD)
    folder = checkout / "out" / "images" / "runtime-py311"
    (folder / "oci").mkdir(parents=True)
    tar = checkout / "layer.tar"
    tar.write_bytes(b"a layer")
    layer = oci.Layer(sha256_file(tar), 7, 7, frozenset())
    digest = oci.write_layout(folder / "oci", tar, layer, epoch=0, title="a layer")
    record = {
        "schema": bake.SCHEMA,
        "image": "runtime",
        "name": "tpuforge/runtime:1",
        "manifest_digest": digest,
        "config_digest": "sha256:2",
        "compressed_bytes": 1,
        "unpacked_bytes": 2,
        "layers": [],
        "key": "1",
        "inputs": {},
        "source": {"commit": None, "dirty": False, "why": "no git"},
        "notes": [],
        "run_line": "docker run",
    }
    write_json(folder / "image.json", record)
    health = checkout / "out" / "health" / "runtime-py311"
    write_json(health / "health.json", {"verdict": "healthy"})
    write_json(health / "run.json", {"manifest_digest": "sha256:0"})

    def row(slug: str) -> dict[str, object]:
        return next(one.data for one in catalogue.rows(PINS) if one.member.slug == slug)

    assert row("runtime-py311")["baked"] is True
    # it was another image that was judged
    assert row("runtime-py311")["health"] is None
    write_json(health / "run.json", {"manifest_digest": digest})
    assert row("runtime-py311")["health"] == "healthy"
    assert (row("pallas-py311")["baked"], row("pallas-py311")["why_not"]) == (False, None)
    why = "there is no flavour 'train' for Python 3.11"
    assert row("train-py311")["why_not"] == why

    def state(slug: str) -> str:
        rows = catalogue.rows(PINS)
        return next(catalogue._cells(one)[2] for one in rows if one.member.slug == slug)

    assert state("pallas-py311") == "not baked"
    assert row("pallas-py311")["wheels_fetched"] is True
    assert state("train-py311") == "cannot be had"
    assert row("train-py311")["wheels_fetched"] is None
    scipy = checkout / "out" / "wheelhouse" / hashlib.sha256(b"scipy").hexdigest()
    next(scipy.glob("*.whl")).unlink()
    assert state("pallas-py311") == "wheels not fetched"
    assert row("pallas-py311")["wheels_fetched"] is False
    assert "./forge fetch_wheel --python 3.11 --flavour pallas" in str(
        row("pallas-py311")["why_not"]
    )

    # written to after the record, which is what a moment's look can tell; and with no layout at all
    blob = folder / "oci" / "blobs" / "sha256" / layer.sha256
    blob.write_bytes(b"A layer")
    later = (folder / "image.json").stat().st_mtime_ns + 1
    os.utime(blob, ns=(later, later))
    assert (row("runtime-py311")["baked"], state("runtime-py311")) == (False, "damaged")
    assert row("runtime-py311")["why_not"] == (
        f"sha256:{layer.sha256} was written to, and has another digest now; mend: ./forge bake "
        "--image runtime --python 3.11"
    )
    blob.write_bytes(b"a layer")
    assert state("runtime-py311") == digest[:19]
    shutil.rmtree(folder / "oci")
    assert state("runtime-py311") == "damaged"
    # a folder in the place of a record is none
    (folder / "image.json").unlink()
    (folder / "image.json").mkdir()
    assert state("runtime-py311") == "not baked"


def test_a_table_of_all_keeps_what_was_found_and_the_mend(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(target: Target, *_: object, **__: object) -> object:
        if target.image == "base":
            raise ForgeError(
                "it is over its budget\n  a table\n  of what is new",
                expected="less",
                mend="leave something out",
                exit_code=Exit.FAULT,
            )
        raise ForgeError("a disk is full\nand which", mend="free some space")

    monkeypatch.setattr(bake, "bake", fail)
    monkeypatch.setattr(bake, "ensure_engine", lambda _: {})
    monkeypatch.setattr(bake, "lacks", lambda *_: "")
    options = bake.arguments().parse_args(["--all", "--python", "3.11"])
    with Progress("bake") as progress:
        outcome = bake._bake_all(options, PINS, progress)
    assert outcome.exit_code == 1
    rows = {row["image"]: row for row in outcome.data["images"]}
    assert rows["base"]["why"] == "it is over its budget; leave something out"
    assert rows["base"]["error"] == {
        "found": "it is over its budget\n  a table\n  of what is new",
        "expected": "less",
        "mend": "leave something out",
        "exit_code": 1,
    }
    assert (rows["base"]["status"], rows["runtime"]["status"]) == ("refused", "cannot be had")
    assert rows["runtime"]["error"]["mend"] == "free some space"
    # there is no lock for it in this checkout, and that is an error as well
    assert rows["train"]["error"]["found"].startswith(rows["train"]["why"])
    shown = capsys.readouterr().err
    for part in ("  of what is new", "expected: less", "leave something out", "and which"):
        assert part in shown
    # a line that has nothing to say is left out
    assert "expected: \n" not in shown
