"""Names that may not enter a lock, and exceptions that end."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from tpuforge.errors import Exit, ForgeError
from tpuforge.lock.names import ended, load_names

TEXT = """[refused]
bad-name = "squats"

[[allowed]]
name = "triton"
flavour = "serve"
until = 2027-01-31
why = "its import is not needed"

[[left_out]]
name = "cupy"
flavour = "serve"
by = "alpha"
until = 2027-03-31
why = "alpha imports without it"
"""


def test_names_are_refused_allowed_and_allowed_no_more(tmp_path: Path) -> None:
    path = tmp_path / "names.toml"
    path.write_text(TEXT, encoding="utf-8")
    names = load_names(path)
    day, later = date(2027, 1, 31), date(2027, 2, 1)
    assert names.refusal("bad-name", "serve", day) == "squats"
    assert names.refusal("numpy", "serve", day) == ""
    assert names.refusal("triton", "serve", day) == ""
    assert names.refusal("triton", "serve", later) == "its exception ended on 2027-01-31"
    assert names.refusal("triton", "runtime", day) == "it is a CUDA package"
    assert names.refusal("nvidia-nccl", "serve", day) == "it is a CUDA package"


def test_package_that_is_left_out_may_not_enter_the_lock_either(tmp_path: Path) -> None:
    path = tmp_path / "names.toml"
    path.write_text(TEXT, encoding="utf-8")
    names = load_names(path)
    (one,) = names.left_out_of("serve")
    assert (one.name, one.by) == ("cupy", "alpha")
    assert names.left_out_of("train") == []
    assert names.refusal("cupy", "serve", date(2027, 1, 31)) == "it is a CUDA package"
    assert ended(one, date(2027, 3, 31)) == ""
    assert ended(one, date(2027, 4, 1)) == "its exception ended on 2027-03-31"


def test_real_names_allow_no_cuda() -> None:
    assert load_names().allowed == ()
    assert load_names().refusal("tpu-raiden-torch", "train")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[refused]", "[denied]", "denied is an unknown key"),
        ("bad-name", "Bad_Name", "refused.Bad_Name is a name"),
        ('"squats"', '""', "refused.bad-name is ''"),
        ('"triton"', '"numpy"', "allowed[1].name is numpy"),
        ("2027-01-31", '"soon"', "allowed[1].until is 'soon'"),
        ('why = "its', 'whom = "its', "allowed[1].why is missing"),
        ('flavour = "serve"\n', "", "allowed[1].flavour is missing"),
        ("[[allowed]]", "[[allowed]", "names.toml is not TOML: Expected"),
        ('by = "alpha"\n', "", "left_out[1].by is missing"),
        ('by = "alpha"', 'by = "Al_pha"', "left_out[1].by is 'Al_pha'"),
        ('"cupy"', '"numpy"', "left_out[1].name is numpy"),
        ('"cupy"', '"triton"', "left_out[1].name is triton for serve again"),
        ("[[left_out]]", "[left_out]", "left_out is {"),
        ("[refused]", "[[refused]]", "refused is ["),
        (
            'flavour = "serve"\nuntil = 2027-01-31',
            'flavour = ""\nuntil = 2027-01-31',
            "allowed[1].flavour is ''",
        ),
        ('"squats"', '"a\\nb"', "refused.bad-name is 'a\\nb'"),
        ('bad-name = "squats"', '"-rx" = "squats"', "refused.-rx is a name"),
        ('"cupy"', '"cupy-"', "left_out[1].name is 'cupy-'"),
        ("2027-01-31", "2027-01-31T00:00:00Z", "allowed[1].until is datetime"),
    ],
)
def test_bad_names_are_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "names.toml"
    path.write_text(TEXT.replace(old, new), encoding="utf-8")
    with pytest.raises(ForgeError) as caught:
        load_names(path)
    assert words in caught.value.found
    assert caught.value.exit_code == Exit.FAULT


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"allowed = [1]", "allowed[1] is 1"),
        (b'left_out = ["x"]', "left_out[1] is 'x'"),
        (b"# \xff", "is not TOML: 'utf-8' codec"),
        (b"a = " + b"[" * 9000, "names.toml is not TOML: "),
    ],
)
def test_file_of_another_form_is_a_fault(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "names.toml"
    path.write_bytes(data)
    with pytest.raises(ForgeError) as caught:
        load_names(path)
    assert words in caught.value.found
    assert caught.value.exit_code == Exit.FAULT
