"""What an audit compares, what its findings mean, the known failures, and two tables compared."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from smoke.operators import audit, census, table
from smoke.operators.table import Listed

LIMITS = [Listed("the plugin is old", r"vhlo\.composite", frozenset({"cumsum"}), frozenset())]
KNOWN = [Listed("a defect", "exceeds", frozenset({"pad"}), frozenset({"float32"}))]


def judged(
    op: str, outcome: str, message: str = "", dtype: str = "float32", **more: Any
) -> dict[str, Any]:
    value = {"outcome": outcome, "message": message, "samples": 1, "values": True, **more}
    finding = {"kind": "done", "message": "", "value": value, "seconds": 0.1}
    return table.judge((op, dtype, "forward"), finding, LIMITS, KNOWN)


@pytest.mark.parametrize(
    ("op", "outcome", "message", "status"),
    [
        ("add", "same", "", "passes"),
        ("add", "differs", "Tensor-likes are not close", "differs"),
        ("add", "no reference", "the CPU does not do it: …", "not run"),
        ("eigh", "raised", "NotImplementedError: operator 'aten::x' is not", "unsupported"),
        ("eigh", "raised", "RuntimeError: 'aten::x' is not implemented for TPU", "unsupported"),
        ("unique", "raised", "RuntimeError: sorted=False is not yet supported", "unsupported"),
        ("add", "raised", "RuntimeError: out of luck", "error"),
        ("cumsum", "raised", "RuntimeError: 'vhlo.composite_v2' was illegal", "simulator limit"),
        # listed, and failing in another way
        ("cumsum", "raised", "RuntimeError: out of luck", "error"),
        # the same way, and not listed
        ("add", "raised", "RuntimeError: 'vhlo.composite_v2' was illegal", "error"),
        ("cumsum", "same", "", "passes"),
    ],
)
def test_the_status_of_a_cell(op: str, outcome: str, message: str, status: str) -> None:
    assert judged(op, outcome, message)["status"] == status


def test_a_limit_gives_its_reason_and_the_message() -> None:
    cell = judged("cumsum", "raised", "'vhlo.composite_v2'")
    assert cell["detail"] == "the plugin is old\n'vhlo.composite_v2'"


def test_what_is_unsupported_names_the_overload() -> None:
    cell = judged("eigh", "raised", "NotImplementedError: operator 'aten::_eigh.out' is not")
    assert cell["missing"] == ["_eigh.out"]


def test_a_known_error_stays_an_error_and_says_that_it_is_known() -> None:
    cell = judged("pad", "raised", "RuntimeError: padding exceeds")
    assert (cell["status"], cell["known"]) == ("error", "a defect")
    assert "known" not in judged("pad", "raised", "RuntimeError: padding exceeds", "int64")
    assert "known" not in judged("pad", "raised", "RuntimeError: out of luck")


@pytest.mark.parametrize(
    ("kind", "status"),
    [("signal", "error"), ("exit", "error"), ("timeout", "error"), ("killed", "not run")],
)
def test_a_task_without_a_value(kind: str, status: str) -> None:
    finding = {"kind": kind, "message": "ended", "value": None, "seconds": 2.0, "again": True}
    cell = table.judge(("add", "float32", "forward"), finding, LIMITS, KNOWN)
    assert cell["status"] == status
    assert cell["detail"].startswith("ended")


def test_a_crash_can_be_a_limit_of_the_simulator() -> None:
    message = "the process was ended by SIGABRT: vhlo.composite"
    finding = {"kind": "signal", "message": message, "value": None, "seconds": 2.0}
    assert (
        table.judge(("cumsum", "int8", "forward"), finding, LIMITS, KNOWN)["status"]
        == "simulator limit"
    )


def test_without_values_the_cell_says_so() -> None:
    cell = judged("randn", "same", values=False)
    assert cell["values"] is False
    assert "shape and dtype only" in cell["detail"]


def test_a_listed_failure_that_is_no_longer_true_is_found() -> None:
    operators = {
        "cumsum": {"float32": judged("cumsum", "same"), "int64": {"status": "not run"}},
        "pad": {
            "float32": judged("pad", "raised", "exceeds"),
            "int64": judged("pad", "same", dtype="int64"),
        },
    }
    gone = [*LIMITS, Listed("old", "x", frozenset({"removed"}), frozenset())]
    found = table.stale(operators, gone, KNOWN, ["cumsum", "pad"])
    assert [(one["op"], one["dtype"], one["now"]) for one in found] == [
        ("cumsum", "float32", "it passes"),
        ("removed", "", "PyTorch has no such entry"),
    ]


BACKWARD = Listed("no scan", "composite", frozenset({"prod"}), frozenset(), "gradient")


def test_what_is_known_of_one_way_excuses_no_other() -> None:
    value = {"outcome": "raised", "message": "RuntimeError: vhlo.composite"}
    finding = {"kind": "done", "message": "", "value": value}
    found = [
        table.judge(("prod", "float32", way), finding, [BACKWARD], [])["status"]
        for way in ("forward", *table.WAYS)
    ]
    assert found == ["error", "simulator limit", "error", "error"]


def test_further_ways_are_counted_blamed_and_found_stale() -> None:
    passes = {"status": "passes", "detail": ""}
    cells = {
        "prod": {"float32": {**passes, "gradient": dict(passes), "out": dict(passes)}},
        "add": {"float32": {**passes, "inplace": {"status": "differs", "detail": "by 7"}}},
    }
    assert table.counts(cells, ["float32"])["float32"]["passes"] == 2
    assert table.counts(cells, ["float32"], "out")["float32"]["passes"] == 1
    assert table.counts(cells, ["float32"], "inplace")["float32"]["differs"] == 1
    stale = table.stale(cells, [BACKWARD], [], ["add", "prod"])
    assert [(one["op"], one["dtype"]) for one in stale] == [("prod", "float32 gradient")]
    found = table.problems({"operators": cells, "stale": []})
    assert [(one["op"], one["dtype"], one["what"]) for one in found] == [
        ("add", "float32 inplace", "differs")
    ]


def test_a_gradient_that_is_lost_between_two_tables_is_told() -> None:
    made: dict[str, list[dict[str, str]]] = {"lost": [], "gained": [], "changed": []}
    before = {"status": "passes", "detail": "", "gradient": {"status": "passes", "detail": ""}}
    now = {**before, "gradient": {"status": "error", "detail": "boom"}, "out": before}
    table._compare_cell("add", "float32", before, now, made)
    assert [(one["op"], one["dtype"], one["now"]) for one in made["lost"]] == [
        ("add", "float32 gradient", "error")
    ]
    # out= was asked for in one of them only
    assert not made["gained"] and not made["changed"]


def test_the_files_of_known_failures_are_whole() -> None:
    limits, known = table.limits(), table.known()
    assert limits and known
    names = [(op, one.way) for one in limits for op in one.ops]
    assert len(names) == len(set(names)), "an operator has two limits"
    for one in (*limits, *known):
        assert len(one.reason) > 10


@pytest.mark.parametrize(
    "text",
    [
        '[[listed]]\nreason = "r"\nops = ["x"]\n',
        '[[listed]]\nreason = "r"\nmatch = "m"\nops = []\n',
        '[[listed]]\nreason = "r"\nmatch = "m"\nops = ["x"]\ndtype = "float32"\n',
        '[[listed]]\nreason = "r"\nmatch = "("\nops = ["x"]\n',
        '[[listed]]\nreason = "r"\nmatch = "m"\nops = ["x"]\nway = "sideways"\n',
    ],
)
def test_a_file_that_excuses_too_much_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(text)
    with pytest.raises((ValueError, re.error)):
        table.read_listed(file)


def test_compiles_are_joined_by_the_worst_of_all_programs() -> None:
    programs = {
        "a": {"v6e:2x2": {"status": "yes"}},
        "b": {"v6e:2x2": {"status": "refused", "detail": "too large"}},
        "c": {"v6e:2x2": {"status": "error", "detail": "aborted"}},
    }
    cells: list[dict[str, Any]] = [
        {"status": "passes", "programs": ["a"]},
        {"status": "passes", "programs": ["a", "b"]},
        {"status": "passes", "programs": ["a", "c"]},
        {"status": "passes", "programs": ["a", "lost"]},
        {"status": "passes", "programs": []},
        {"status": "simulator limit", "programs": ["a"]},
        {"status": "unsupported", "programs": []},
        {"status": "not run"},
    ]
    table.join_compiles(cells, programs, ["v6e:2x2"])
    found = [cell["compiles"]["v6e:2x2"] for cell in cells[:-1]]
    assert found == [
        {"status": "yes"},
        {"status": "refused", "detail": "too large"},
        {"status": "error", "detail": "aborted"},
        {"status": "not run"},
        {"status": "nothing to compile"},
        {"status": "yes", "detail": "the programs it came to"},
        {"status": "not run", "detail": "it came to no program"},
    ]
    assert "compiles" not in cells[-1]
    assert table.compiled(programs, ["v6e:2x2"]) == {
        "v6e:2x2": {"yes": 1, "refused": 1, "error": 1, "not run": 0}
    }


def document(**operators: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema": table.SCHEMA,
        "image": None,
        "versions": {"torch": "2.13.0"},
        "started": "2026-11-30T12:00:00+00:00",
        "settings": {
            "dtypes": ["float32"],
            "ways": ["gradient"],
            "ways_dtypes": ["float32"],
            "samples": 1,
            "only": None,
            "targets": ["v6e:2x2"],
        },
        "census": {"direct": ["add.Tensor"], "composite": ["flatten"], "unsupported": ["eig"]},
        "audited": True,
        "stale": [],
        "operators": operators,
    }


def cell(status: str, compiles: str = "yes") -> dict[str, dict[str, Any]]:
    one = {"status": status, "detail": "why", "compiles": {"v6e:2x2": {"status": compiles}}}
    return {"float32": one}


def test_what_the_newer_table_gained_and_lost() -> None:
    old = document(
        add=cell("passes"),
        mul=cell("unsupported"),
        sub=cell("error"),
        div=cell("passes"),
        neg=cell("passes"),
        abs=cell("passes"),
    )
    new = document(
        add=cell("passes"),
        mul=cell("passes"),
        sub=cell("unsupported"),
        div=cell("not run"),
        neg=cell("passes", "refused"),
        new=cell("passes"),
    )
    changes = table.compare(old, new)
    told = {
        kind: [(one["op"], one["what"], one["before"], one["now"]) for one in changes[kind]]
        for kind in ("lost", "gained", "changed")
    }
    assert told == {
        "lost": [
            ("div", "runs", "passes", "not run"),
            ("neg", "compiles for v6e:2x2", "yes", "refused"),
            ("abs", "runs", "passes", "no such entry"),
        ],
        "gained": [
            ("mul", "runs", "unsupported", "passes"),
            ("new", "runs", "no such entry", "passes"),
        ],
        "changed": [("sub", "runs", "error", "unsupported")],
    }
    assert changes["exit_code"] == 1
    assert changes["not_compared"] == []


def test_the_same_table_twice_lost_nothing() -> None:
    old = document(add=cell("passes"), mul=cell("error"))
    changes = table.compare(old, copy.deepcopy(old))
    assert changes["exit_code"] == 0
    assert not changes["lost"] and not changes["gained"] and not changes["changed"]


def test_the_census_is_compared_as_well() -> None:
    old, new = document(), document()
    new["census"] = {"direct": ["eig", "flatten"], "composite": [], "unsupported": ["add.Tensor"]}
    changes = table.compare(old, new)
    assert [one["op"] for one in changes["lost"]] == ["aten::add.Tensor"]
    assert [one["op"] for one in changes["gained"]] == ["aten::eig"]
    assert [one["op"] for one in changes["changed"]] == ["aten::flatten"]


def test_what_only_one_table_was_asked_for_is_named_and_not_judged() -> None:
    old, new = document(add=cell("passes"), mul=cell("passes")), document(add=cell("passes"))
    new["settings"] |= {"only": "add", "dtypes": ["float32", "int64"], "targets": [], "samples": 2}
    new["settings"]["ways"] = ["out"]
    changes = table.compare(old, new)
    assert changes["exit_code"] == 0
    said = "\n".join(changes["not_compared"])
    for word in ("mul", "int64", "float32 gradient: only the older", "float32 out: only the newer",
                 "v6e:2x2", "samples"):  # fmt: skip
        assert word in said


def test_what_nobody_knew_is_listed() -> None:
    found = document(
        add=cell("passes"), mul=cell("differs"), sub=cell("error"), neg=cell("passes", "refused")
    )
    found["operators"]["sub"]["float32"]["known"] = "a defect"
    found["stale"] = [
        {"op": "x", "dtype": "int8", "file": "limits.toml", "reason": "r", "now": "it passes"}
    ]
    assert [(one["op"], one["what"]) for one in table.problems(found)] == [
        ("mul", "differs"),
        ("neg", "libtpu for v6e:2x2: refused"),
        ("x", "no longer true in limits.toml"),
    ]


def test_how_much_of_the_backend_is_exercised() -> None:
    census = {"direct": ["add.out", "add_.Tensor", "mul.out"]}
    found = table.exercised(["add.Tensor", "flatten", "prim::other"], census)
    assert found == {"direct_operators": 1, "missing": ["mul"]}


def test_a_run_that_contradicts_the_census_is_found() -> None:
    operators = {
        "eig": {"float32": {"status": "unsupported", "missing": ["eig"]}},
        "add": {"float32": {"status": "unsupported", "missing": ["add.Tensor"]}},
    }
    found = table.disagreements(operators, document()["census"])
    assert [(one["op"], one["census"]) for one in found] == [("add", "direct")]


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ("csrc/x.cc:364 [kernel]", "direct"),
        ("x.cpp:1342 [default backend kernel]", "composite"),
        ("x.cpp:15716 [math kernel]", "composite"),
        ("csrc/x.cc:1149 [backend fallback]", "unsupported"),
    ],
)
def test_the_census_reads_the_line_of_its_key(end: str, kind: str) -> None:
    other = "CPU: registered at x.cpp:1297 [kernel]\n"
    text = f"{other}PrivateUse1: registered at {end}\nSparsePrivateUse1: registered at x [kernel]\n"
    assert census.kind_of(text) == kind
    assert census.kind_of(other) == "unsupported"


def test_the_census_refuses_to_guess() -> None:
    with pytest.raises(ValueError, match="nobody has explained"):
        census.kind_of("PrivateUse1: registered at x [magic kernel]\n")


def test_the_operator_of_an_overload() -> None:
    names = ("aten::add.Tensor", "aten::add_.Tensor", "aten::add", "aten::__ior__.Tensor")
    assert [census.base_name(name) for name in names] == ["add", "add", "add", "__ior__"]


@dataclass(frozen=True)
class Dtype:
    """As much of a dtype as the weights of a backward pass need."""

    bits: int
    is_complex: bool = False

    def to_real(self) -> Dtype:
        return Dtype(self.bits)


@dataclass
class Numbers:
    """A tensor, likewise."""

    values: list[Any]
    dtype: Dtype
    shape: tuple[int, ...] = ()
    device: str = "cpu"

    def numel(self) -> int:
        return len(self.values)

    def reshape(self, shape: tuple[int, ...]) -> Numbers:
        return Numbers(self.values, self.dtype, shape)

    def to(self, what: Dtype | str) -> Numbers:
        if isinstance(what, str) or what.is_complex:
            return self
        unit = [2.0 ** (math.frexp(one)[1] - what.bits) for one in self.values]
        rounded = [round(one / u) * u for one, u in zip(self.values, unit, strict=True)]
        return Numbers(rounded, what, self.shape)

    def __mul__(self, factor: complex) -> Numbers:
        return Numbers([one * factor for one in self.values], Dtype(self.dtype.bits, True))


@pytest.mark.parametrize("audited", [Dtype(8), Dtype(11), Dtype(24), Dtype(24, True)])
def test_every_reference_begins_backward_with_what_the_device_began_with(audited: Dtype) -> None:
    def linspace(first: float, last: float, count: int) -> Numbers:
        step = (last - first) / (count - 1)
        return Numbers([first + step * n for n in range(count)], Dtype(24)).to(Dtype(24))

    call = audit._Call(SimpleNamespace(linspace=linspace), None, audited, "gradient")
    begun = [
        call._weights(Numbers([0.0] * 1000, dtype)).values
        for dtype in (audited.to_real(), Dtype(24), Dtype(53), Dtype(24, True))
    ]
    assert begun[0] == begun[1] == begun[2] == [one.real for one in begun[3]]
    assert min(begun[0]) == 0.5 and max(begun[0]) == 1.5
    assert len(set(begun[0])) > 100, "weights that are all the same let errors cancel out"
