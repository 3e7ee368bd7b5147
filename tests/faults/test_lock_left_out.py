"""What ``lock`` leaves out, and CPU builds beside torch, against an index on loopback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lock_support import Checkout, Index, checkout, copy_of, good_index
from tpuforge.lockfile import read_lock

WAYS = ("auto", "uv")
"""auto is pip-tools wherever Python 3.11 is at hand."""
RULE = """
[[left_out]]
name = "triton"
flavour = "runtime"
by = "alpha"
until = 2999-12-31
why = "alpha imports without it"
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout that leaves triton out of alpha, without a lock."""
    own = checkout(tmp_path_factory.mktemp("made"), small=True)
    _names(own, RULE)
    return own


@pytest.fixture
def own(made: Checkout, tmp_path: Path) -> Checkout:
    return copy_of(made, tmp_path)


def _names(own: Checkout, rule: str) -> None:
    (own.lock / "names.toml").write_text(rule, encoding="utf-8")


def _index(*, others: tuple[str, ...] = ()) -> Index:
    """alpha requires triton, and triton a package that nothing else requires."""
    index = good_index()
    index.pages["alpha"].clear()
    index.add("alpha", "1.0", requires=("triton", *others))
    index.add("triton", "3.0", requires=("iota", "filelock"))
    index.add("iota", "1.0")
    index.add("beta", "1.0", requires=("triton; extra == 'fast'",))
    return index


def test_left_out_package_and_what_only_it_needs_are_not_in_the_lock(own: Checkout) -> None:
    found = []
    with _index() as index:
        for way in WAYS:
            own.runtime.unlink(missing_ok=True)
            done = own.run("resolve", "--flavour", "runtime", "--way", way, PIP_INDEX_URL=index.url)
            assert done.returncode == 0, done.stderr
            why = own.runtime.with_suffix(".json")
            found.append((own.runtime.read_bytes(), why.read_bytes()))
        checked = own.run("check", PIP_INDEX_URL=index.url)
    assert found[0] == found[1]
    assert checked.returncode == 0, checked.stdout + checked.stderr
    names = {package.name for package in read_lock(own.runtime)}
    assert names == {"alpha", "filelock", "libtpu", "torch", "torch-tpu"}
    left_out = json.loads(found[0][1])["left_out"]
    assert [(one["name"], one["why"], one["reason"]) for one in left_out] == [
        ("iota", ["torch-tpu", "alpha", "triton", "iota"], "nothing else requires it"),
        ("triton", ["torch-tpu", "alpha", "triton"], "alpha imports without it"),
    ]
    page = (own.root / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert "| runtime | 3.11 | triton 3.0 |" in page
    assert "| torch-tpu > alpha > triton | 2999-12-31 | alpha imports without it |" in page


@pytest.mark.parametrize(
    ("others", "rule", "words"),
    [
        # an extra is a requirement like any other
        (("beta[fast]",), RULE, "beta requires it; it is left out for alpha alone"),
        ((), RULE.replace("alpha", "beta"), "alpha requires it; it is left out for beta alone"),
        ((), RULE.replace("2999", "2020"), "its exception ended on 2020-12-31"),
        ((), RULE.replace("runtime", "train"), "it is a CUDA package"),
        (("nvidia-nccl",), RULE, "nvidia-nccl"),
    ],
)
def test_package_is_left_out_of_what_the_rule_says_alone(
    own: Checkout, others: tuple[str, ...], rule: str, words: str
) -> None:
    _names(own, rule)
    with _index(others=others) as index:
        index.add("nvidia-nccl", "1.0")
        # what is left out is decided after either resolver, from what it found
        done = own.run("resolve", "--flavour", "runtime", "--way", "uv", PIP_INDEX_URL=index.url)
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in done.stderr
    assert not own.runtime.exists()


def test_rule_that_is_no_longer_needed_is_a_fault(own: Checkout) -> None:
    with good_index() as index:
        done = own.run("resolve", "--flavour", "runtime", PIP_INDEX_URL=index.url)
        assert done.returncode == 0, done.stderr
        checked = own.run("check", PIP_INDEX_URL=index.url)
    assert checked.returncode == 1
    assert "lock/names.toml: triton: [name] no longer needed: alpha brings none" in checked.stdout


@pytest.mark.parametrize("way", WAYS)
def test_index_cannot_bring_its_own_build_of_what_is_taken_as_a_cpu_build(
    own: Checkout, way: str
) -> None:
    # the table has no torchvision for this Python, so there is no build to take
    with good_index() as index:
        index.pages["alpha"].clear()
        index.add("alpha", "1.0", requires=("torchvision",))
        for version in ("0.28.0", "0.28.0+cpu", "0.28.0+cu130", "0.99.0"):
            index.add("torchvision", version, "cp311-cp311-manylinux_2_28_x86_64")
        done = own.run("resolve", "--flavour", "runtime", "--way", way, PIP_INDEX_URL=index.url)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "torchvision" in done.stderr
        assert not own.runtime.exists()
        # with a line in the table it is that file, whatever the index has under the number
        table = own.lock / "torch-cpu.sha256"
        digest, file = "ab" * 32, "torchvision-0.28.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
        table.write_text(f"{table.read_text()}{digest}  {file}\n", encoding="utf-8")
        for name in ("numpy", "pillow"):
            index.add(name, "9.0")
        done = own.run("resolve", "--flavour", "runtime", "--way", way, PIP_INDEX_URL=index.url)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {package.name: package for package in read_lock(own.runtime)}
    assert (found["torchvision"].version, found["torchvision"].sha256) == ("0.28.0+cpu", digest)
    why = json.loads(own.runtime.with_suffix(".json").read_text(encoding="utf-8"))["packages"]
    origin = {entry["name"]: entry["index"] for entry in why}
    assert {n for n, index in origin.items() if index == "PyTorch index"} == {
        "torch",
        "torchvision",
    }
